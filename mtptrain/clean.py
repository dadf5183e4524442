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
from pathlib import Path

from mtptrain.cli import tables
from mtptrain.stage_dir import STAGE, StageDir
from mtptrain.utils.errors import UserError, errors_as_lines

STORE = re.compile(r"manifest\.json|plan\.json|shard_\d+\.(safetensors|json)")
"""The names of the files of stored hidden states."""
STEP = re.compile(r"step_(\d{8,})")
"""The names of the folders of checkpoints."""


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
        found = [each for each in what_may_go(args.run_dir, stages) if each[1]]
        rows = [(name, f"{megabytes(paths):,.1f} MB", cost) for name, paths, cost in found]
        paths = [path for _, paths, _ in found for path in paths]
        if not found:
            print(f"{args.run_dir} has nothing that can be made again and is no longer needed")
            return
        total = f"{megabytes(paths):,.1f} MB"
        tables.print_table(f"What may go from {args.run_dir}", ("", "size", "to make it again"), rows)
        if not args.yes and not confirmed(f"remove {total}? [y/N] "):
            print("nothing was removed")
            return
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(f"removed {total}")


def megabytes(paths: list[Path]) -> float:
    files = (each for path in paths for each in (path, *path.rglob("*")))
    return sum(each.lstat().st_size for each in files if not each.is_dir()) / 1e6


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


def what_may_go(run_dir: Path, stages: list[StageDir]) -> Iterator[tuple[str, list[Path], str]]:
    """Yields each kind of files that may go: its name, the paths in the order of removal, and what makes it again."""
    written = [each.path for each in stages]
    states, train = run_dir / "hidden_states", run_dir / "train"
    if states in written and any((train / name / "head.json").is_file() for name in ("best", "last")):
        # The manifest goes first: without it, a kill leaves no store that seems whole.
        files = [path for path in sorted(states.iterdir()) if STORE.fullmatch(path.name) and not path.is_symlink()]
        times = [path.stat().st_mtime for path in files if path.suffix == ".safetensors"]
        cost = f"mtptrain hidden-states, which wrote them within {max(times, default=0) - min(times, default=0):,.0f} s"
        yield "hidden_states", files, f"{cost}; only training and mtptrain run read them"
    checkpoints = train / "checkpoints"
    if train in written and checkpoints.is_dir() and not checkpoints.is_symlink():
        steps = sorted((int(match[1]), path) for path in checkpoints.iterdir() if (match := STEP.fullmatch(path.name)))
        if whole := [each for each in steps if (each[1] / "complete.json").is_file()]:
            older = [path for step, path in steps if step < whole[-1][0] and not path.is_symlink()]
            yield "older checkpoints", older, f"training again; it goes on from {whole[-1][1].name}, which stays"


def confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError("--yes: must be given where nobody can answer, but is not; add it to remove these files")
    return input(question).strip().lower() in ("y", "yes")
