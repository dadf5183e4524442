"""Command lines, measurements, tables and a large target, which the benchmarks share."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from mtptrain.cli import tables
from mtptrain.cli.program import run_program
from mtptrain.config import PipelineConfig
from mtptrain.utils.startup import command

Row = dict[str, Any]
"""Measurements by name; the unit is part of the name."""


def run_benchmark(main: Callable[[PipelineConfig, argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Call `main` with the settings that the overrides on the command line compose, and the benchmark's own options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each candidate; the fastest counts")
    options, sys.argv[1:] = parser.parse_known_args(namespace=argparse.Namespace(command=command()))
    run_program(lambda config: main(config, options))


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def fastest(candidates: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Returns the seconds of each candidate's fastest run. A candidate runs once and returns its seconds.

    Candidates take turns, so that other load on the machine affects all of them. The first turn warms up.
    """
    best = dict.fromkeys(candidates, math.inf)
    for turn in range(repeats + 1):
        for name, run in candidates.items():
            seconds = run()
            if turn:
                best[name] = min(best[name], seconds)
    return best


def tensor_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Returns the peak size in bytes of tensors during a step, excluding those that exist before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted(
        (event["ts"], index, event["args"]["Bytes"])
        for index, event in enumerate(events)
        if event["name"] == "[memory]"
    )
    return max(accumulate(num_bytes for *_, num_bytes in changes), default=0)


def print_table(title: str, columns: Mapping[str, tuple[str, str]], rows: Sequence[Row]) -> None:
    """Print a line for each row. A column is a heading with the key and the format of its cells."""
    cells = [["" if row.get(key) is None else format(row[key], form) for key, form in columns.values()] for row in rows]
    tables.print_table(title, tuple(columns), cells)


def llama_8b(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
    )
