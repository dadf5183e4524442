"""Runs the programs of the pipeline on one machine as users do, and checks their output."""

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mtptrain.command_line.program import quoted, stage_command
from mtptrain.config import PipelineConfig
from mtptrain.decoding.acceptance import generate_in_batches
from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.hidden_states.store import HiddenStore
from mtptrain.run import Run
from mtptrain.serving.divergence import first_answer_divergence
from mtptrain.serving.engine import TOLERANCE
from mtptrain.serving.vllm_client import find_python
from mtptrain.target.loading import load_target
from mtptrain.training.batches import pack_states
from mtptrain.training.checkpoint import finished_checkpoints
from mtptrain.training.metrics import METRICS
from mtptrain.utils.errors import UserError

from .findings import Finding, Outcome, at_most, judged, measured, skipped
from .numerics import relative_error
from .processes import kill_tree

LIMIT_S = 600
"""Time limit of one program in seconds, so that a hanging check does not block the others."""
COMPARED_DOCUMENTS = 8
STORE_ERROR = {torch.bfloat16: 0.05, torch.float32: 0.01}
"""Relative error allowed in stored states, by the dtype that the target ran in. By default they are stored in bf16."""
LOSS_ERROR = 0.02
"""Relative error allowed in each loss of a resumed run on a GPU, since FlashAttention is not deterministic."""
NEAR_TIE = {torch.bfloat16: 2.0**-6, torch.float32: 1e-4}
"""Largest relative gap between the logits of two tokens at which rounding may decide which of them is chosen.

The gap is divided by the magnitude of the logit of the token that plain decoding chose, or by 1 if that is smaller.
"""


def run_in_subprocess(stage: str, overrides: list[str], num_ranks: int) -> subprocess.CompletedProcess[str]:
    """Runs a stage as a user does. If it exceeds the time limit, it is killed with all its ranks."""
    command = stage_command(stage, overrides, num_ranks)
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            stdout, stderr = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            stdout, stderr = process.communicate()
            stderr += f"killed after {LIMIT_S} s\n"
        except BaseException:
            kill_tree(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


class Stages:
    """Runs the programs of the pipeline one after the other, in a separate run folder."""

    def __init__(self, config: PipelineConfig, overrides: Sequence[str], device: torch.device) -> None:
        """
        Args:
            config: the settings that result from `overrides`, with the run_dir that the programs write to.
            overrides: command-line overrides for every program, without run_dir.
            device: the device that the checks compute on.
        """
        self.config, self.overrides, self.device = config, list(overrides), device
        self.directory = Path(config.run_dir)
        self.num_ranks = min(2, max(1, torch.cuda.device_count()))

    def run(self, stage: str, *overrides: str, run_dir: Path | None = None, num_ranks: int = 1) -> None:
        """Run a stage.

        Raises:
            UserError: the stage failed. The message has the last line of its stderr; the whole output is in
                `<run folder>_<stage>.log` next to the run folder.
        """
        directory = run_dir or self.directory
        result = run_in_subprocess(stage, [*self.overrides, f"run_dir={quoted(directory)}", *overrides], num_ranks)
        log = directory.with_name(f"{directory.name}_{stage}.log")
        log.write_text(result.stdout + result.stderr)
        if result.returncode:
            last = next(filter(str.strip, reversed(result.stderr.splitlines())), "it printed no error")
            raise UserError(
                f"mtptrain {stage}: must exit with 0, but exited with {result.returncode}: {last}; see {log}"
            )

    def prompts(self) -> Finding:
        self.run("prompts")
        manifest = json.loads((self.directory / "prompts/manifest.json").read_text())
        return measured(", ".join(f"{name} {value:,}" for name, value in manifest.items() if isinstance(value, int)))

    def extraction(self) -> Finding:
        """Compares the stored states, computed in packed batches, with those of an unpacked forward in fp32."""
        self.run("hidden-states", num_ranks=self.num_ranks)
        store = HiddenStore.open(self.directory / "hidden_states")
        target = load_target(Run(self.config).target.directory, torch.float32, self.device)
        found, wanted = [], []
        for index in range(min(COMPARED_DOCUMENTS, store.num_documents)):
            document = store.document(index)
            tokens = document.input_ids[None].long().to(self.device)
            positions = torch.arange(tokens.shape[1], device=self.device)[None]
            plain = target.forward(tokens, positions, target.cache(tokens.shape[1])).postnorm_states[0]
            wanted.append(plain.cpu())
            found.append(target.parts.final_norm(stored_states(store, index).to(self.device)).cpu())
        return at_most(
            relative_error(torch.cat(found), torch.cat(wanted)), self._store_bound(), "relative error of states"
        )

    def extraction_by_vllm(self, tensor_parallel_size: int) -> Finding:
        """Compares the states that vLLM extracts with those of `extraction`, which uses transformers by default."""
        if reason := self.why_vllm_is_missing():
            return skipped(reason)
        if tensor_parallel_size > 1 and torch.cuda.device_count() < tensor_parallel_size:
            return skipped(f"needs {tensor_parallel_size} GPUs, but this machine has {torch.cuda.device_count()}")
        run_dir = self._sibling(f"vllm_tp{tensor_parallel_size}", "prompts")
        parallel = f"hidden_states.tensor_parallel_size={tensor_parallel_size}"
        self.run("hidden-states", "hidden_states.backend=vllm", parallel, run_dir=run_dir)
        ours, theirs = (HiddenStore.open(each / "hidden_states") for each in (self.directory, run_dir))
        indices = range(min(COMPARED_DOCUMENTS, ours.num_documents))
        states = [torch.cat([stored_states(store, index) for index in indices]) for store in (theirs, ours)]
        return at_most(relative_error(*states), 2 * self._store_bound(), "relative difference from the stored states")

    def training(self) -> Finding:
        self.run("train", num_ranks=self.num_ranks)
        found = losses(self.directory)
        first, last = found[0], found[-1]
        return judged(
            last < first, f"loss from {first:.3f} to {last:.3f} in {len(found)} steps", "falls", "the loss did not fall"
        )

    def resumed_training(self) -> Finding:
        """Kills a run after a checkpoint, resumes it, and compares its losses with those of the uninterrupted run."""
        run_dir = self._sibling("resumed", "prompts", "hidden_states")
        arguments = [*self.overrides, f"run_dir={quoted(run_dir)}"]
        killed_at = kill_after_a_checkpoint(stage_command("train", arguments, self.num_ranks), run_dir)
        self.run("train", run_dir=run_dir, num_ranks=self.num_ranks)
        resumed, uninterrupted = losses(run_dir), losses(self.directory)
        if len(resumed) != len(uninterrupted) or killed_at >= len(uninterrupted):
            return Finding(
                Outcome.failed,
                reason=f"training must be killed before step {len(uninterrupted)} and then resume up to it, but "
                f"was killed at step {killed_at} and ended at step {len(resumed)}",
            )
        error = max(abs(a / b - 1) for a, b in zip(resumed, uninterrupted, strict=True))
        return at_most(
            error,
            LOSS_ERROR if self.device.type == "cuda" else 0.0,
            f"killed after step {killed_at}, largest relative error of a loss",
        )

    def acceptance(self) -> Finding:
        self.run("acceptance")
        report = json.loads((self.directory / "acceptance/report.json").read_text())
        length = report["acceptance_length"]
        return judged(length > 1.0, f"acceptance length {length:.3f}", "above 1", "no draft was accepted")

    def greedy(self, dtype: torch.dtype) -> Finding:
        """Compares answers decoded with and without drafts, which may differ only where two logits are nearly equal."""
        run, settings = Run(self.config), self.config.acceptance
        target = load_target(run.target.directory, dtype, self.device)
        head = run.head(dtype, self.device).head
        prompts = list(run.measured_prompts().input_ids.values())

        def answers(drafter: HeadDrafter | NoDrafter) -> list[list[int]]:
            generations = generate_in_batches(
                target,
                drafter,
                prompts,
                num_speculative_tokens=drafter.draft_slots,
                max_new_tokens=settings.max_new_tokens,
                sampler=Sampler(),
                eos_token_ids=target.eos_token_ids,
                batch_size=settings.batch_size,
            )
            return [generation.tokens for generation in generations]

        plain, drafted = answers(NoDrafter()), answers(HeadDrafter(head, target.parts, settings.num_speculative_tokens))
        divergences = [
            first_answer_divergence(target, [prompt], [one], [other])
            for prompt, one, other in zip(prompts, plain, drafted, strict=True)
        ]
        gaps = [abs(each.logit_gap) / max(1.0, abs(each.logit)) for each in divergences if each is not None]
        largest = max(gaps, default=0.0)
        return judged(
            largest <= NEAR_TIE[dtype],
            f"{len(plain) - len(gaps)} of {len(plain)} answers are equal, largest relative logit gap {largest:.2g}",
            f"gap at most {NEAR_TIE[dtype]:.2g}",
            "a token differs from plain decoding without a near tie",
        )

    def export(self) -> Finding:
        self.run("export", "export.engine=vllm")
        return measured("proposals are the same after reloading")

    def serving(self) -> Finding:
        """Runs mtptrain serving-check, which has its own bounds and fails if they are exceeded."""
        if reason := self.why_vllm_is_missing():
            return skipped(reason)
        self.run("serving-check")
        report = json.loads((self.directory / "serving_check/report.json").read_text())
        ours, theirs = (report[side]["acceptance_length"] for side in ("ours", "theirs"))
        bound = "equal" if report["dtype"] == "float32" else TOLERANCE
        return Finding(
            Outcome.passed, f"acceptance length {ours:.3f} here, {theirs:.3f} served by vLLM {report['version']}", bound
        )

    def why_vllm_is_missing(self) -> str:
        """Returns the reason why vLLM cannot be used, or an empty string if it can."""
        try:
            find_python(self.config.serving.python)
        except UserError as missing:
            return f"vLLM IS NOT INSTALLED: {missing}"
        return ""

    def _store_bound(self) -> float:
        return STORE_ERROR[getattr(torch, self.config.hidden_states.dtype)]

    def _sibling(self, name: str, *stages: str) -> Path:
        """Returns a new run folder next to this one, with copies of the outputs of `stages`."""
        run_dir = self.directory.with_name(name)
        for stage in stages:
            shutil.copytree(self.directory / stage, run_dir / stage)
        return run_dir


def stored_states(store: HiddenStore, index: int) -> torch.Tensor:
    """Returns the states of a document before the final norm, f32[n, H]."""
    document = store.document(index)
    states, _ = pack_states([document], [len(document.input_ids)], "hidden_states", True)
    assert states is not None
    return states.float()


def losses(run_dir: Path) -> list[float]:
    """Returns the loss of every step in the metrics file. An incomplete last line is ignored."""
    path = run_dir / "train" / METRICS
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if "loss" in record]


def kill_after_a_checkpoint(command: list[str], run_dir: Path) -> int:
    """Start training, kill it as soon as it has a checkpoint, and return the number of steps that it had recorded.

    Raises:
        UserError: training ended by itself, or made no checkpoint within `LIMIT_S`.
    """
    log_path, started = run_dir.with_name(f"{run_dir.name}_killed.log"), time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not finished_checkpoints(run_dir / "train/checkpoints"):
            if process.poll() is not None or time.monotonic() - started > LIMIT_S:
                raise UserError(
                    "training must be killed after its first checkpoint, but ended or hung before that; see its output "
                    f"in {log_path}"
                )
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()
    return len(losses(run_dir))
