"""The device of the GPU check, and the table that it ends with.

`make gpu-check` runs the tests marked `gpu`. It sets MTPTRAIN_GPU_CHECK to overrides for the programs that are
checked; without this variable, tests see no GPU. On a CPU, the same tests run in fp32 at tiny sizes, which shows that
the checks themselves work.
"""

from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mtptrain.utils.distributed import device_name

Record = Callable[[float, float, str], None]


@pytest.fixture(
    scope="session", params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("*** NOTHING IS CHECKED ON A GPU: run `make gpu-check` on a machine with one ***")
    return torch.device(request.param)


@pytest.fixture
def at_most(record_property: Callable[[str, object], None]) -> Record:
    """Returns a function that records a figure for the table, and asserts that it is within its bound."""

    def check(value: float, bound: float, what: str) -> None:
        record_property("measured", f"{what} {value:.3g}")
        record_property("allowed", f"at most {bound:g}")
        assert value <= bound

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a row for each check that ran on a GPU, or was to."""
    table = Table("check", "", "measured", "allowed", "s", title="GPU check")
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if "gpu" in report.keywords:
                found = dict(report.user_properties)
                reason = report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else ""
                name = report.nodeid.rpartition("::test_")[2].replace("_", " ").replace("[cuda]", "")
                allowed = str(found.get("allowed", ""))
                table.add_row(
                    escape(name), outcome, str(found.get("measured", reason)), allowed, f"{report.duration:.0f}"
                )
    if table.row_count and torch.cuda.is_available():
        table.title = f"GPU check, {device_name(torch.device('cuda'))}, torch {torch.__version__}"
        Console(width=120).print(table)
