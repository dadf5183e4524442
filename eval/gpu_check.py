"""Checks what CPU tests cannot show: that the stages from prompts to export run on GPUs, and that their results are
correct within bf16 rounding. It downloads nothing.

It runs the programs of the pipeline as users do, on a small amount of text, in a new folder in `run_dir/gpu_check/`,
which it removes if nothing failed. It compares attention and loss with their definitions, and decoding with the
training forward, and kills and resumes a training run. It prints a table and writes `run_dir/gpu_check/report.json`;
the exit code is 1 if a check failed. A check that needs vLLM or a second GPU is skipped without it, and its row says
why. `eval.bench` measures the speed.

    make gpu-check
    mtptrain gpu-check recipe=quickstart run_dir=runs/gpu_check
    mtptrain gpu-check recipe=quickstart run_dir=runs/gpu_check check.size=tiny      # on a CPU
"""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from hydra import compose
from hydra.core.hydra_config import HydraConfig

from mtptrain.command_line.program import command, quoted
from mtptrain.command_line.stages import stages_of
from mtptrain.config import CheckSize, PipelineConfig, load_config
from mtptrain.run_dir import claim_stage_dir, write_provenance, writing
from mtptrain.utils.compile import set_compilation
from mtptrain.utils.distributed import device_name, init_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json

from .checks.findings import Check, Outcome, Row, print_rows, run_check
from .checks.numerics import check_attention, check_decode, check_loss
from .checks.pipeline import Stages

COMMON = ("train.log_every=1", "train.tracker=none", "train.validate_every=0", "train.warmup_steps=5")
SIZES = {
    CheckSize.full: (
        "prompts.max_train_tokens=200000",
        "train.max_steps=80",
        "train.save_every=20",
        "train.validation_prompts=8",
        "train.micro_batches_per_step=2",
        "acceptance.dtype=bfloat16",
        "acceptance.num_prompts=16",
        "acceptance.max_new_tokens=32",
    ),
    CheckSize.tiny: (
        "prompts.max_train_tokens=20000",
        "hidden_states.dtype=float32",
        "deepspeed=zero0",
        "train.max_steps=24",
        "train.save_every=2",
        "train.validation_prompts=0",
        "train.compile=false",
        "head.start_from_target=false",
        "acceptance.num_prompts=8",
        "acceptance.max_new_tokens=16",
    ),
}


def main(config: PipelineConfig) -> None:
    device = init_ranks(config.distributed_timeout_hours).device
    if config.check.size is CheckSize.full and device.type != "cuda":
        raise UserError(
            "check.size: must be tiny on a machine without a GPU, because the full checks take hours on a CPU, "
            "but is full; set check.size=tiny, or use a machine with a GPU"
        )
    without = {"responses": "prompts.source=conversations", "draft-vocab": "head.draft_vocab_size=null"}
    if needed := [name for name, *_ in stages_of(config) if name in without]:
        raise UserError(
            "recipe: must need neither mtptrain responses nor mtptrain draft-vocab, which the check does not run, but "
            f"needs {' and '.join(needed)}; use recipe=quickstart, or set {' '.join(without[name] for name in needed)}"
        )
    directory = config.stage_dir("gpu_check")
    with writing(directory):
        code = check_all(config, directory, device)
    sys.exit(code)


def check_all(config: PipelineConfig, directory: Path, device: torch.device) -> int:
    """Run every check in a new folder, write and print the report, and return the exit code."""
    overrides = [*COMMON, *SIZES[config.check.size], *forwarded(HydraConfig.get().overrides.task)]
    claim_stage_dir(directory, config)
    work_dir = Path(tempfile.mkdtemp(prefix="check_", dir=directory))  # an older one may hold files of somebody
    inner = load_config(compose("pipeline", [*overrides, f"run_dir={quoted(work_dir / 'run')}"]))
    rows = run_all(inner, overrides, config.check.size, device)
    write_provenance(directory, config, "report.json")
    code = report(rows, directory, device)
    if code:
        print(f"the programs' output and logs are in {work_dir}")
    else:
        shutil.rmtree(work_dir)
    return code


def forwarded(given: Sequence[str]) -> list[str]:
    """Returns the overrides that are passed on to the checked programs, including the recipe."""
    return [override for override in given if not override.lstrip("+~").startswith(("check.", "run_dir="))]


def run_all(config: PipelineConfig, overrides: Sequence[str], size: CheckSize, device: torch.device) -> list[Row]:
    """Runs every check in order, prints each result as it comes, and returns all rows."""
    Path(config.run_dir).mkdir(parents=True)
    set_compilation(size is CheckSize.full)
    rows = []
    for name, check in checks_of(Stages(config, overrides, device), size, device).items():
        row = run_check(name, check)
        print(f"{row.outcome:8}{name}: {row.shown}", flush=True)
        rows.append(row)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next checks start programs of their own, which need the memory
    return rows


def checks_of(stages: Stages, size: CheckSize, device: torch.device) -> dict[str, Check]:
    """Returns the checks by name, in order: later stages need the output of earlier ones."""
    is_tiny = size is CheckSize.tiny
    dtype = torch.float32 if is_tiny else torch.bfloat16
    return {
        "attention = dense softmax": partial(check_attention, device, dtype),
        "loss = plain formula": partial(check_loss, device, dtype),
        **{
            f"decoding = training forward, {head}": partial(check_decode, head, device, dtype)
            for head in ("mtp", "eagle3", "dflash")
        },
        "prompts": stages.prompts,
        "extraction = plain forward": stages.extraction,
        "extraction by vLLM": partial(stages.extraction_by_vllm, 1),
        "extraction by vLLM, tensor parallel": partial(stages.extraction_by_vllm, 2),
        "training": stages.training,
        "killed and resumed": stages.resumed_training,
        "acceptance": stages.acceptance,
        "greedy answers, float32": partial(stages.greedy, torch.float32),
        **({} if is_tiny else {"greedy answers, bfloat16": partial(stages.greedy, torch.bfloat16)}),
        "export": stages.export,
        "served by vLLM": stages.serving,
    }


def report(rows: list[Row], directory: Path, device: torch.device) -> int:
    """Print the table, write the JSON, and return the exit code."""
    num_failed = sum(row.outcome is Outcome.failed for row in rows)
    facts = {
        "command": command(),
        "device": device_name(device),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "failed": num_failed,
        "seconds": round(sum(row.seconds for row in rows), 1),
    }
    print_rows(rows, f"GPU check, {device_name(device)}, torch {torch.__version__}")
    for row in rows:
        if row.outcome is Outcome.skipped:
            print(f"*** SKIPPED {row.name}: {row.reason} ***")
    write_json(directory / "report.json", {**facts, "rows": [asdict(row) for row in rows]})
    print(f"{num_failed} of {len(rows)} checks failed; {directory / 'report.json'}")
    return int(num_failed > 0)
