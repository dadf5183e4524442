"""Runs the programs of the pipeline on one machine as users do, and checks what they compute.

Prompts, hidden states and training run on two ranks if there are two GPUs. The output of every program is in a `.log`
beside its run folder.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch

from mtptrain.cli.program import stage_command
from mtptrain.config import PipelineConfig
from mtptrain.decoding.acceptance import generate_in_batches
from mtptrain.decoding.divergence import first_answer_divergence
from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.decoding.prompts import read_prompts
from mtptrain.decoding.sampler import Sampler
from mtptrain.engines.vllm.client import find_python
from mtptrain.hidden_states.store import HiddenStore
from mtptrain.init_from.start import trained_or_initial_head
from mtptrain.run_dir import Run
from mtptrain.target.loading import load_target
from mtptrain.training.batches import pack_states
from mtptrain.training.checkpoint import finished_checkpoints
from mtptrain.training.metrics import METRICS
from mtptrain.utils.errors import UserError
from tests.conftest import make_config, write_text_files
from tests.gpu.conftest import Record
from tests.gpu.test_numerics import relative_error
from tests.programs import kill_tree

LIMIT_S = 600
"""Time limit of one program in seconds, so that one that hangs does not block the others."""
COMMON = ("train.log_every=1", "train.tracker=none", "train.validate_every=0", "train.warmup_steps=5")
SIZES = {
    "cuda": (
        *("prompts.max_train_tokens=200000", "train.compile=true", "train.max_steps=80", "train.save_every=20"),
        *("train.validation_prompts=8", "train.micro_batches_per_step=2", "acceptance.dtype=bfloat16"),
        *("acceptance.num_prompts=16", "acceptance.max_new_tokens=32", "head.start_from_target=true"),
    ),
    "cpu": (
        *("prompts.max_document_tokens=128", "prompts.validation_fraction=0.2", "hidden_states.dtype=float32"),
        *("deepspeed=zero0", "train.max_steps=24", "train.save_every=2", "train.validation_prompts=0"),
        *("acceptance.num_prompts=8", "acceptance.max_new_tokens=16", "acceptance.prompt_tokens=32"),
        "serving.program=/nowhere",
    ),
}
COMPARED_DOCUMENTS = 8
NEAR_TIE = {torch.bfloat16: 2.0**-6, torch.float32: 1e-4}
"""Largest relative gap between the logits of two tokens at which rounding may decide which of them is chosen.

The gap is divided by the magnitude of the logit of the token that plain decoding chose, or by 1 if that is smaller.
"""


@dataclass(frozen=True)
class Checked:
    """A run whose stages are checked."""

    run_dir: Path
    overrides: tuple[str, ...]
    device: torch.device

    @cached_property
    def config(self) -> PipelineConfig:
        return make_config(*self.overrides, f"run_dir={self.run_dir}")

    @property
    def num_ranks(self) -> int:
        return min(2, max(1, torch.cuda.device_count()))

    @property
    def store_bound(self) -> float:
        """The relative error allowed in stored states."""
        return 0.05 if self.device.type == "cuda" else 0.01

    def command(self, stage: str, run_dir: Path, *overrides: str, num_ranks: int = 1) -> list[str]:
        settings = ["recipe=quickstart", *self.overrides, f"run_dir={run_dir}", *overrides]
        return stage_command(stage, settings, num_ranks)

    def run(self, stage: str, *overrides: str, run_dir: Path | None = None, num_ranks: int = 1) -> None:
        """Run a stage, which must end without an error."""
        run_dir = run_dir or self.run_dir
        log = run_dir.with_name(f"{run_dir.name}_{stage}.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(stage, run_dir, *overrides, num_ranks=num_ranks),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(LIMIT_S)
            finally:
                kill_tree(process.pid)
        assert code == 0, f"{log}: mtptrain {stage} failed: {log.read_text()[-2000:]}"

    def sibling(self, name: str, *stages: str) -> Path:
        """Returns a new run folder next to this one, with copies of the outputs of `stages`."""
        run_dir = self.run_dir.with_name(name)
        for stage in stages:
            shutil.copytree(self.run_dir / stage, run_dir / stage)
        return run_dir

    def states(self, run_dir: Path, document: int) -> torch.Tensor:
        """Returns the stored states of a document before the final norm, f32[n, H]."""
        stored = HiddenStore.open(run_dir / "hidden_states").document(document)
        states, _ = pack_states([stored], [len(stored.input_ids)], "hidden_states", True)
        assert states is not None
        return states.float()

    def losses(self, run_dir: Path) -> list[float]:
        records = [json.loads(line) for line in (run_dir / "train" / METRICS).read_text().splitlines()]
        return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def extracted(device: torch.device, tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Checked:
    """A run with prompts and hidden states."""
    directory = tmp_path_factory.mktemp(f"check_{device.type}")
    overrides = tuple(os.environ.get("MTPTRAIN_GPU_CHECK", "").split())
    if device.type == "cpu":
        overrides = (f"target.path={tiny_target}", f"prompts.paths=[{write_text_files(directory / 'files')}]")
    checked = Checked(directory / "run", (*COMMON, *SIZES[device.type], *overrides), device)
    checked.run_dir.mkdir()
    checked.run("prompts")
    checked.run("hidden-states", num_ranks=checked.num_ranks)
    return checked


@pytest.fixture(scope="module")
def trained(extracted: Checked) -> Checked:
    extracted.run("train", num_ranks=extracted.num_ranks)
    return extracted


@pytest.fixture(scope="module")
def vllm(extracted: Checked) -> None:
    try:
        find_python(extracted.config.serving.of("vllm").program)
    except UserError as missing:
        pytest.skip(f"*** vLLM IS NOT INSTALLED: {missing} ***")


def test_stored_states_are_those_of_an_unpacked_forward_in_fp32(extracted: Checked, at_most: Record) -> None:
    target = load_target(Run(extracted.config).target.directory, torch.float32, extracted.device)
    store, stored, computed = HiddenStore.open(extracted.run_dir / "hidden_states"), [], []
    for index in range(min(COMPARED_DOCUMENTS, store.num_documents)):
        tokens = store.document(index).input_ids[None].long().to(extracted.device)
        positions = torch.arange(tokens.shape[1], device=extracted.device)[None]
        computed.append(target.forward(tokens, positions, target.cache(tokens.shape[1])).postnorm_states[0])
        stored.append(target.parts.final_norm(extracted.states(extracted.run_dir, index).to(extracted.device)))
    at_most(relative_error(torch.cat(stored), torch.cat(computed)), extracted.store_bound, "error of states")


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_vllm_extracts_the_same_states(num_gpus: int, extracted: Checked, at_most: Record) -> None:
    if num_gpus > max(1, torch.cuda.device_count()):
        pytest.skip(f"needs {num_gpus} GPUs, but this machine has {torch.cuda.device_count()}")
    run_dir = extracted.sibling(f"vllm_{num_gpus}", "prompts")
    parallel = f"hidden_states.tensor_parallel_size={num_gpus}"
    extracted.run("hidden-states", "hidden_states.backend=vllm", parallel, run_dir=run_dir)
    by_vllm, stored = (
        torch.cat([extracted.states(directory, index) for index in range(COMPARED_DOCUMENTS)])
        for directory in (run_dir, extracted.run_dir)
    )
    at_most(relative_error(by_vllm, stored), 2 * extracted.store_bound, "difference from the stored states")


def test_a_killed_training_resumes_with_the_same_losses(trained: Checked, at_most: Record) -> None:
    """FlashAttention is not deterministic on a GPU."""
    run_dir = trained.sibling("resumed", "prompts", "hidden_states")
    command, started = trained.command("train", run_dir, num_ranks=trained.num_ranks), time.monotonic()
    with run_dir.with_name("killed.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        while not finished_checkpoints(run_dir / "train/checkpoints"):
            assert process.poll() is None and time.monotonic() - started < LIMIT_S, f"see {log.name}"
            time.sleep(0.01)
        kill_tree(process.pid)
        process.wait()
    assert not (run_dir / "train/last").exists(), "training ended before it was killed"
    trained.run("train", run_dir=run_dir, num_ranks=trained.num_ranks)
    losses = zip(trained.losses(run_dir), trained.losses(trained.run_dir), strict=True)
    error = max(abs(resumed / uninterrupted - 1) for resumed, uninterrupted in losses)
    at_most(error, 0.02 if trained.device.type == "cuda" else 0.0, "error of a loss")


def test_training_lowers_the_loss_and_drafts_are_accepted(
    trained: Checked, record_property: Callable[[str, object], None]
) -> None:
    first, *_, last = trained.losses(trained.run_dir)
    trained.run("acceptance")
    length = json.loads((trained.run_dir / "acceptance/report.json").read_text())["acceptance_length"]
    record_property("measured", f"loss from {first:.3f} to {last:.3f}, acceptance length {length:.3f}")
    assert last < first and length > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_are_those_of_plain_decoding(dtype: torch.dtype, trained: Checked, at_most: Record) -> None:
    """They may differ only where two logits are nearly equal."""
    run, settings = Run(trained.config), trained.config.acceptance
    target = load_target(run.target.directory, dtype, trained.device)
    head = trained_or_initial_head(run.stage_dir("train"), run.config.head, run.target, dtype, trained.device).head
    prompts = list(read_prompts(settings, run.config.prompts, run.target, run.stage_dir("prompts")).input_ids.values())

    def answers(drafter: HeadDrafter | NoDrafter) -> list[list[int]]:
        sizes = {"max_new_tokens": settings.max_new_tokens, "batch_size": settings.batch_size}
        greedy = {
            "sampler": Sampler(),
            "eos_token_ids": target.eos_token_ids,
            "num_speculative_tokens": drafter.draft_slots,
        }
        return [each.tokens for each in generate_in_batches(target, drafter, prompts, **sizes, **greedy)]  # type: ignore[arg-type]

    plain, drafted = answers(NoDrafter()), answers(HeadDrafter(head, target.parts, settings.num_speculative_tokens))
    pairs = zip(prompts, plain, drafted, strict=True)
    divergences = [first_answer_divergence(target, [prompt], [one], [other]) for prompt, one, other in pairs]
    gaps = [abs(each.logit_gap) / max(1.0, abs(each.logit)) for each in divergences if each is not None]
    equal = f"{len(plain) - len(gaps)} of {len(plain)} answers are equal, largest gap of logits"
    at_most(max(gaps, default=0.0), NEAR_TIE[dtype], equal)


@pytest.mark.usefixtures("vllm")
def test_vllm_serves_the_head_with_the_same_acceptance(
    trained: Checked, record_property: Callable[[str, object], None]
) -> None:
    """`mtptrain serving-check` has its own bounds, and fails if they are exceeded."""
    trained.run("export", "export.engine=vllm")
    trained.run("serving-check")
    report = json.loads((trained.run_dir / "serving_check/report.json").read_text())
    lengths = [f"{report[side]['acceptance_length']:.3f}" for side in ("ours", "theirs")]
    record_property("measured", f"acceptance length {lengths[0]} here, {lengths[1]} served")
