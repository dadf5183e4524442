"""Prints a line once for a program, its ranks and the programs that it starts."""

import os
import sys


def print_once(line: str, variable: str) -> None:
    """Print a line once, on rank 0: not again if this process, or the one that started it, has printed it.

    The line goes to stderr, because slurm/pipeline.sh reads what slurm/stages.py prints to stdout.

    Args:
        line: what to print.
        variable: the environment variable that remembers the printed line.
    """
    if os.environ.get("RANK", "0") == "0" and os.environ.get(variable) != line:
        print(line, file=sys.stderr, flush=True)
        os.environ[variable] = line
