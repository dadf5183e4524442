"""Says which files of a run can be made again, what that costs, and frees them after asking.

    mtptrain clean runs/quickstart
    mtptrain clean runs/quickstart --yes  # asks nothing, for scripts

These are the hidden states of a run with a head, and its checkpoints before the newest. Nothing else is touched:
responses, prompts, heads, measurements and exports stay. Links are neither followed nor removed, and a run in which a
program writes is refused.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mtptrain.cli import tables
from mtptrain.stage_dir import STAGE, StageDir
from mtptrain.utils.errors import UserError, errors_as_lines

STORE = re.compile(r"manifest\.json|plan\.json|shard_\d+\.(safetensors|json)")
"""The names of the files of stored hidden states."""
STEP = re.compile(r"step_(\d{8,})")
"""The names of the folders of checkpoints."""


@dataclass(frozen=True)
class Freed:
    """Files of one kind that may go."""

    name: str
    paths: list[Path]
    """Files and folders, in the order in which they are removed."""
    cost: str
    """What it takes to make them again."""

    @property
    def num_bytes(self) -> int:
        files = (each for path in self.paths for each in (path, *path.rglob("*")))
        return sum(each.lstat().st_size for each in files if not each.is_dir())


@errors_as_lines(lambda: "the rest is kept; the same command removes it")
def main() -> None:
    parser = argparse.ArgumentParser(prog="mtptrain clean", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="the run's directory")
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    args = parser.parse_args()
    stages = stage_dirs(args.run_dir)
    with ExitStack() as held:
        for stage in stages:
            for part in stage.parts():
                held.enter_context(stage.writing(part))
        found = [each for each in what_may_go(args.run_dir, stages) if each.paths]
        rows = [(each.name, f"{each.num_bytes / 1e6:,.1f} MB", each.cost) for each in found]
        total = sum(each.num_bytes for each in found)
        if not found:
            print(f"{args.run_dir} has nothing that can be made again and is no longer needed")
            return
        tables.print_table(f"What may go from {args.run_dir}", ("", "size", "to make it again"), rows)
        if not args.yes and not confirmed(f"remove {total / 1e6:,.1f} MB? [y/N] "):
            print("nothing was removed")
            return
        for each in found:
            for path in each.paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(f"removed {total / 1e6:,.1f} MB")


def stage_dirs(run_dir: Path) -> list[StageDir]:
    """Returns the folders of a run that stages have written, without links to those of other runs."""
    if run_dir.is_symlink():
        raise UserError(
            f"run_dir: must not be a link, but {run_dir} leads to {run_dir.resolve()}; give that folder itself"
        )
    if not run_dir.is_dir():
        raise UserError(f"run_dir: must be a run's directory, but {run_dir} is none; correct the path")
    found = [path.parent for path in sorted(run_dir.glob(f"*/{STAGE}")) if not path.parent.is_symlink()]
    stages = [StageDir(path) for path in found if StageDir(path).settings() is not None]
    if not stages:
        raise UserError(
            f"run_dir: must be a run's directory, in whose folders mtptrain has written {STAGE}, but {run_dir} has no "
            "such folder; correct the path"
        )
    return stages


def what_may_go(run_dir: Path, stages: list[StageDir]) -> Iterator[Freed]:
    written = [each.path for each in stages]
    states, train = run_dir / "hidden_states", run_dir / "train"
    if states in written and any((train / name / "head.json").is_file() for name in ("best", "last")):
        # The manifest goes first: without it, a kill leaves no store that seems whole.
        files = [path for path in sorted(states.iterdir()) if STORE.fullmatch(path.name) and not path.is_symlink()]
        times = [path.stat().st_mtime for path in files if path.suffix == ".safetensors"]
        cost = f"mtptrain hidden-states, which wrote them within {max(times, default=0) - min(times, default=0):,.0f} s"
        yield Freed("hidden_states", files, f"{cost}; only training and mtptrain run read them")
    checkpoints = train / "checkpoints"
    if train in written and checkpoints.is_dir() and not checkpoints.is_symlink():
        steps = {path: int(match[1]) for path in checkpoints.iterdir() if (match := STEP.fullmatch(path.name))}
        newest = max(
            (path for path in steps if (path / "complete.json").is_file()), key=steps.__getitem__, default=None
        )
        if newest is not None:
            older = [path for path in steps if steps[path] < steps[newest] and not path.is_symlink()]
            yield Freed("older checkpoints", older, f"training again; it goes on from {newest.name}, which stays")


def confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError("--yes: must be given where nobody can answer, but is not; add it to remove these files")
    return input(question).strip().lower() in ("y", "yes")
