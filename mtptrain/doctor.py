"""Prints what this machine has for mtptrain: memory, GPUs, disk, versions, engines, and variables that change a run.

    mtptrain doctor

Versions are read from metadata, so this works where a library cannot be imported. An engine's module says which version
the tests ran, and what is known of it.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Column, Table

from mtptrain.settings.evaluation import ExportEngine
from mtptrain.settings.hardware import GPU_DEVICES, has_gpu, this_machine
from mtptrain.stage_dir import package_versions
from mtptrain.utils.cpu import has_bf16_instructions
from mtptrain.utils.errors import error_summary, errors_as_lines
from mtptrain.utils.masking import hide_passwords

VARIABLES = re.compile(
    r"(CUDA|DS|GOMP|HF|HUGGING_FACE|MTPTRAIN|NCCL|OMP|OPENAI|PYTORCH|TORCH|TRANSFORMERS|VLLM|WANDB)_|.*_PROXY$", re.I
)
SECRETS = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")
Row = tuple[str, str, str]
"""A name, what was found, and what is known of it."""


@errors_as_lines()
def main() -> None:
    argparse.ArgumentParser(prog="mtptrain doctor", description=(__doc__ or "").split("\n")[0]).parse_args()
    table = Table("", "found", Column("what is known", overflow="fold"))
    for rows in (machine(), versions(), engines(), variables()):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    Console().print(table)


def machine() -> Iterator[Row]:
    fast = "bfloat16" if has_bf16_instructions() else "float32"
    yield "CPU", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores", f"computes {fast} fast"
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(".")
    yield "memory", f"{memory.total / 1e9:,.0f} GB", f"{memory.available / 1e9:,.0f} GB available"
    yield "disk here", f"{disk.total / 1e9:,.0f} GB", f"{disk.free / 1e9:,.0f} GB free"
    try:
        has_device = any(True for pattern in GPU_DEVICES for _ in Path("/dev").glob(pattern))
        unused = "torch uses none of those in /dev: install a torch for them" if has_device else ""
        yield "GPUs", this_machine().reason.partition(" has ")[2], "" if has_gpu() else unused
    except Exception as error:  # torch may be broken in any way
        yield "GPUs", "unknown", error_summary(error)


def versions() -> Iterator[Row]:
    yield "Python", sys.version.split()[0], sys.executable
    for package, version in package_versions().items():
        yield package, version or "not installed", ""


def engines() -> Iterator[Row]:
    for key in ExportEngine:
        try:
            from mtptrain.engines.base import RunningEngine
            from mtptrain.engines.table import engine_of

            engine = engine_of(key)
            version, place = engine.found(key) or ("not found", "")
        except Exception as error:  # an engine's module imports torch and transformers
            yield key, "unknown", error_summary(error)
            continue
        is_tested = version.startswith(engine.version)
        known = ["tests ran this version" if is_tested else f"exports are for {engine.version}", place]
        if not isinstance(engine, RunningEngine):
            known.append("mtptrain does not start it")
        elif place:
            known.append(engine.why_not_sampled())
        yield engine.name, version, "; ".join(filter(None, [*known, f"heads: {', '.join(engine.formats)}"]))


def variables() -> Iterator[Row]:
    for name, value in sorted(os.environ.items()):
        if VARIABLES.match(name):
            yield name, "set" if SECRETS.search(name) else str(hide_passwords(value)) or "empty", ""
