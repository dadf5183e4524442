"""Runs the benchmarks at the dimensions of an 8B target with random weights, or at tiny sizes.

Their figures are reported, but have no bounds to meet.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mtptrain.command_line.program import quoted

from .rows import Finding, measured, skipped
from .stages import Stages

EXTRACTION_8B = ("bench.target=8b", "bench.documents=64", "bench.repeats=2", "hidden_states.batch_tokens=8192")
STEP_8B = ("bench.target=8b", "bench.repeats=2")
PEER_8B = (
    "bench.hidden_sizes=[4096]",
    "bench.vocab_size=128256",
    "bench.train_tokens=[4096]",
    "bench.longest_tokens=1024",
    "bench.repeats=2",
)
EXTRACTION_TINY = (
    "bench.documents=4",
    "bench.median_tokens=20",
    "bench.max_tokens=40",
    "bench.repeats=1",
)
STEP_TINY = (
    "bench.hidden_sizes=[64]",
    "bench.vocab_size=64",
    "bench.prompt_sizes=[64,64]",
    "bench.train_tokens=[64]",
    "bench.longest_tokens=1024",
    "bench.repeats=1",
)


NEEDED_GB = {"extraction": 30, "step": 60, "peer": 75}
"""GPU memory in GB that each benchmark needs at 8B dimensions.

`peer` needs more than `step`, because it also runs the unoptimised implementation of `eval.bench.train`."""


def too_small(bench: str) -> str:
    """Returns why a benchmark at 8B dimensions cannot run on this GPU, or an empty string if it can."""
    found = torch.cuda.get_device_properties(0).total_memory / 1e9
    if found >= NEEDED_GB[bench]:
        return ""
    return f"needs {NEEDED_GB[bench]} GB of GPU memory, but this GPU has {found:.0f} GB"


def figures_of(stages: Stages, module: str, overrides: Sequence[str]) -> dict[str, Any]:
    path = stages.directory.with_name(f"{module}.json")
    stages.program(module, *overrides, f"bench.out={quoted(path)}")
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def bench_extraction(stages: Stages, is_tiny: bool) -> Finding:
    if not is_tiny and (reason := too_small("extraction")):
        return skipped(reason)
    figures = figures_of(
        stages, "eval.bench.extraction", [*(EXTRACTION_TINY if is_tiny else EXTRACTION_8B), "bench.read_tokens=8192"]
    )
    rates = {name: figures[f"{name}_tokens_per_s"] for name in ("ours", "ours_fp8", "bare_forward")}
    shown = ", ".join(f"{name.replace('_', ' ')} {rate:,.0f}" for name, rate in rates.items())
    return measured(f"tokens/s: {shown}; MFU of the bare forward {figures['mfu']:.0%}")


def bench_step(stages: Stages, is_tiny: bool) -> Finding:
    if not is_tiny and (reason := too_small("step")):
        return skipped(reason)
    figures = figures_of(stages, "eval.bench.train", STEP_TINY if is_tiny else STEP_8B)
    cases = figures["steps"] if is_tiny else figures["gpu"]
    return measured("; ".join(describe_case(case) for case in cases) + f"; peak {figures['matmul_tflops']:.0f} TFLOP/s")


def describe_case(case: dict[str, Any]) -> str:
    name = (
        f"{case.get('head', 'eagle3')} T={case['depths']}" if "depths" in case else f"eagle3, {case['tokens']} tokens"
    )
    vocabulary = f" D={case['draft_vocab_size']:,}" if case.get("draft_vocab_size") else ""
    return f"{name}{vocabulary} {case['tokens_per_s']:,.0f} tokens/s, MFU {case['mfu']:.0%}"


def bench_peer(stages: Stages, is_tiny: bool) -> Finding:
    """Times our step and that of vLLM Speculators alternately in one run."""
    python = Path(stages.config.bench.peer_python)
    if not python.exists():
        return skipped(f"SPECULATORS IS NOT INSTALLED: {python} does not exist; run `make .venv-peer/.installed`")
    if not is_tiny and (reason := too_small("peer")):
        return skipped(reason)
    (case,) = figures_of(stages, "eval.bench.train", STEP_TINY if is_tiny else PEER_8B)["steps"]
    ours, theirs = case["tokens_per_s"], case["peer_tokens_per_s"]
    return measured(f"{ours:,.0f} tokens/s, vLLM Speculators {theirs:,.0f}: {ours / theirs:.2f} times as many")
