"""Defines the results of checks, which are printed as a table with one row per check."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rich.markup import escape
from rich.table import Table

from mtptrain.command_line.tables import wide_console


class Outcome(StrEnum):
    passed = "passed"
    failed = "failed"
    skipped = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    outcome: Outcome
    figure: str = ""
    """The measured figure with its name."""
    bound: str = ""
    """The bound on the figure; empty if there is none."""
    reason: str = ""
    """Why a check failed or was skipped."""

    @property
    def shown(self) -> str:
        """The figure, the reason, or both."""
        return "; ".join(filter(None, (self.figure, self.reason)))


@dataclass(frozen=True)
class Row(Finding):
    """A finding with the name of its check, and the seconds that the check took."""

    name: str = ""
    seconds: float = 0.0


Check = Callable[[], Finding]


def skipped(reason: str) -> Finding:
    return Finding(Outcome.skipped, reason=reason)


def measured(figure: str) -> Finding:
    """Returns the finding of a check that only measures: it passes, and its figure has no bound."""
    return Finding(Outcome.passed, figure)


def judged(is_good: bool, figure: str, bound: str, reason: str = "") -> Finding:
    return Finding(Outcome.passed if is_good else Outcome.failed, figure, bound, "" if is_good else reason)


def at_most(value: float, bound: float, what: str) -> Finding:
    return judged(value <= bound, f"{what} {value:.3g}", f"at most {bound:g}", f"must be at most {bound:g}")


def run_check(name: str, check: Check) -> Row:
    """Runs one check and returns its row. An exception gives a failed row, so that the other checks still run."""
    started = time.perf_counter()
    try:
        finding = check()
    except Exception as error:
        finding = Finding(Outcome.failed, reason=f"{type(error).__name__}: {error}")
    return Row(**vars(finding), name=name, seconds=time.perf_counter() - started)


STYLES = {Outcome.passed: "green", Outcome.failed: "bold red", Outcome.skipped: "yellow"}


def print_rows(rows: list[Row], title: str) -> None:
    table = Table("check", "", "measured", "allowed", "s", title=title)
    for row in rows:
        outcome = f"[{STYLES[row.outcome]}]{row.outcome}[/]"
        table.add_row(row.name, outcome, escape(row.shown), row.bound, f"{row.seconds:.0f}")
    wide_console(120).print(table)
