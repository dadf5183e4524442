"""Prints a line once for a program, its ranks and the programs that it starts."""

import os
import sys


def print_once(line: str, variable: str) -> None:
    """Print a line to stderr once, on rank 0; an environment variable tells started programs what has been printed.

    slurm/pipeline.sh reads what slurm/stages.py prints to stdout.
    """
    if os.environ.get("RANK", "0") == "0" and os.environ.get(variable) != line:
        print(line, file=sys.stderr, flush=True)
        os.environ[variable] = line
