"""Command lines, tables and a large target, which the benchmarks share."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from transformers import LlamaConfig

from mtptrain.cli.program import run_program
from mtptrain.cli.tables import wide_console
from mtptrain.config import PipelineConfig
from mtptrain.utils.startup import command

Row = dict[str, Any]
"""Measurements by name; the unit is part of the name."""


def run_benchmark(main: Callable[[PipelineConfig, argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Call `main` with the settings that the overrides on the command line compose, and the benchmark's own options.

    Everything that begins with dashes is an option. `options.command` is the whole command.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each candidate; the fastest counts")
    options, sys.argv[1:] = parser.parse_known_args(namespace=argparse.Namespace(command=command()))
    run_program(lambda config: main(config, options))


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def print_table(title: str, columns: Mapping[str, tuple[str, str]], rows: Sequence[Row]) -> None:
    """Print a line for each row. A column is a heading with the key and the format of its cells."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*("" if row.get(key) is None else format(row[key], form) for key, form in columns.values()))
    wide_console(130).print(table)


def llama_8b(num_layers: int) -> LlamaConfig:
    """Returns the config of a target with the dimensions of an 8B Llama."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
    )
