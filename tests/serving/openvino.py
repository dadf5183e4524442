"""Builds what OpenVINO GenAI serves: targets and heads, converted by optimum-intel."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.openvino.engine import ENGINE, accepted_of, job_of, run
from mtptrain.engines.process import CHECKOUT
from mtptrain.engines.requests import EngineCounts, EngineRun
from mtptrain.engines.table import format_for
from mtptrain.export import check_tensors, write_head
from mtptrain.heads.base import Head
from mtptrain.settings.evaluation import ServingConfig
from tests.serving.cases import HEADS, Case
from tests.serving.ours import QUESTIONS, OnDisk, Serve, drafted_here, served_from


@pytest.fixture(scope="session")
def openvino_python() -> Path:
    """Returns the Python of the checkout's environment, or skips the test if it was not made."""
    if not (CHECKOUT / ".venv-openvino/.installed").is_file():
        pytest.skip("NOTHING IS SERVED BY OPENVINO: run `make .venv-openvino/.installed`")
    return ENGINE.find_program(ServingConfig())


@pytest.fixture(scope="session")
def openvino_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all converted targets and heads."""
    return tmp_path_factory.mktemp("openvino")


@pytest.fixture(scope="session")
def serve_by_openvino(
    openvino_python: Path, target_of: Callable[[str], OnDisk], head_of: Callable[[str, str], Head], openvino_dir: Path
) -> Serve:
    """Returns a function that serves a case, and returns our answers, OpenVINO's, and our counts by its rules."""

    def serve(case: Case) -> tuple[list[Generation], EngineRun, EngineCounts]:
        on_disk, directory = target_of(case.target), openvino_dir / f"{case.head}-{case.target}"
        if not directory.exists():
            form = format_for("openvino", HEADS[case.head], on_disk.target.config)
            write_head(directory, form, head_of(case.head, case.target).state_dict())
            form.add_target(directory, on_disk.directory)
            check_tensors(directory, form)
        served = served_from(openvino_python, on_disk.directory, directory)
        job = job_of(served, case.num_speculative_tokens, openvino_dir)
        job |= {"converted_target": str(openvino_dir / case.target), "converted_head": str(directory / "converted")}
        job |= QUESTIONS._asdict()
        ours = drafted_here(case, target_of, head_of)
        counted, _ = ENGINE.counted(ours, case.num_speculative_tokens, QUESTIONS)
        result = run(openvino_python, "decode", job)
        accepted = accepted_of(result["steps"])
        counts = EngineCounts.of_rounds(accepted, case.num_speculative_tokens)
        return ours, EngineRun(result["version"], result["tokens"], counts, accepted), counted

    return serve
