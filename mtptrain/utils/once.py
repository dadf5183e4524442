"""Prints a line once for all ranks, and for the programs that a program starts."""

import os
import sys


def print_once(line: str, variable: str) -> None:
    """Print a line to stderr, because slurm/pipeline.sh reads the output of slurm/stages.py.

    Args:
        line: what to print.
        variable: the environment variable that holds the line which this process, or the one that started it, has
            printed.
    """
    if os.environ.get("RANK", "0") == "0" and os.environ.get(variable) != line:
        print(line, file=sys.stderr, flush=True)
        os.environ[variable] = line
