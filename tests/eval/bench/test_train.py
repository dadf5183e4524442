"""Tests that the training benchmark writes all its figures, and that the formulas that it compares agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eval.bench.train_steps import WORKER, PeerProcess, case_of, plain_losses, random_batch, random_parts
from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import PackedTokens
from mtptrain.training.losses import LossSettings, draft_losses
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from tests.conftest import make_config, run_program
from tests.programs import fake_python

ROOT = Path(__file__).parents[3]
TINY = (
    "bench.hidden_sizes=[64]",
    "bench.train_tokens=[96]",
    "bench.vocab_size=50",
    "bench.depths=2",
    "bench.prompt_sizes=[64,60]",
    "bench.longest_tokens=2048",
    "bench.repeats=1",
    "bench.peer_python=/nowhere",
)


def test_every_candidate_is_measured_and_written(tmp_path: Path) -> None:
    result = run_program("eval.bench.train", f"bench.out={tmp_path}/figures.json", *TINY)
    assert result.returncode == 0, result.stderr[-3000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    (step,) = figures["steps"]
    assert figures["bench"] == "train"
    assert {"tokens_per_s", "plain_tokens_per_s", "mfu", "peak_bytes", "plain_peak_bytes"} <= set(step)
    assert step["tokens_per_s"] > 0 and isinstance(figures["prompt_token_cost"], float)
    assert [(row["tokens"], row["supervised"]) for row in figures["lengths"]] == [(1024, 1024), (2048, 1024)]
    assert "*** THE PEER IS LEFT OUT: bench.peer_python must be a Python with speculators" in result.stdout


def test_a_peer_that_ended_between_two_steps_is_reported(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "#!/bin/sh\nread line\necho '{\"peak_bytes\": 1}'\nexit 3\n")
    case = case_of(64, 50, HEADS["eagle3"].Config())
    peer = PeerProcess(make_config(f"bench.peer_python={python}"), case, ([9], [0]), Ranks(0, 1, 0))
    peer._process.wait()
    with pytest.raises(UserError, match=r"bench\.peer_python: the peer must answer, but exited with 3; run"):
        peer.step()


def test_the_peer_needs_nothing_of_mtptrain(tmp_path: Path) -> None:
    """Starts the worker with a stand-in for speculators, and reads the names of all modules that it imports."""
    for name in ("losses", "models.eagle3"):
        module = tmp_path.joinpath("speculators", *name.split(".")).with_suffix(".py")
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text("resolve_loss_config = Eagle3DraftModel = Eagle3SpeculatorConfig = None\n")
    result = subprocess.run(
        [sys.executable, "-X", "importtime", str(WORKER)],
        env=dict(os.environ, PYTHONPATH=str(tmp_path)), input="", capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "step_memory" in imported and imported.isdisjoint({"mtptrain", "eval"})


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_the_plain_formula_that_is_timed_gives_the_same_loss(name: str) -> None:
    torch.manual_seed(0)
    case, depths = case_of(64, 50, HEADS[name].Config(ttt_steps=3)), 3
    head = build_head(case.head, case.target).bfloat16()
    parts = random_parts(case.target, torch.device("cpu"), torch.bfloat16)
    batch = random_batch(case.target, ([20, 9, 9], [5, 0, 8]), head)
    target_states = parts.final_norm(batch.hidden_states)
    read = target_states if batch.aux_hidden_states is None else batch.aux_hidden_states
    states = head(PackedTokens(read, batch.input_ids, batch.next_ids, batch.packing), parts, depths)
    scale = torch.full((depths,), 1 / depths) / batch.num_drafts
    teachers = target_states[batch.packing.draft_positions + 1]
    ours = draft_losses(states, parts.lm_head, teachers, parts.logits, batch.is_draft, scale, LossSettings())
    assert plain_losses(head, parts, batch).item() == pytest.approx(ours.loss.item(), rel=5e-3)


AS_ON_A_GPU = """
from dataclasses import replace

from eval.bench import train as bench_train
from mtptrain.utils.distributed import Ranks
from tests.conftest import make_config

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 1, "num_key_value_heads": 1}
bench_train.GPU_TARGETS, bench_train.GPU_VOCAB, bench_train.GPU_DOCUMENTS = {"8b": sizes}, 300, ([96] * 2, [0] * 2)
config = make_config("bench.target=8b", "bench.repeats=1", "train.micro_batches_per_step=1")
for head in bench_train.GPU_HEADS:
    tiny = {"draft_vocab_size": 200} if getattr(head, "draft_vocab_size", None) else {}
    tiny |= {"sliding_window": 40, "anchors_per_document": 30} if head.name == "dflash" else {}
    figures = bench_train.bench_gpu(config, Ranks(0, 1, 0), 1e12, replace(head, **tiny))
    assert figures["tokens_per_s"] > 0 and 0 < figures["optimizer_share"] < 1
    bench_train.print_tables({"device": "a GPU", "dtype": "bfloat16", "matmul_tflops": 1.0, "gpu": [figures]})
"""


def test_what_runs_on_a_gpu_runs_here_at_a_tiny_size() -> None:
    """Runs the benchmark in a new process, because an engine leaves behind a process group and torchrun's variables."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", AS_ON_A_GPU], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("eagle3") == 2 and "mtp" in result.stdout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bench.target=9b", "bench.target: must be one of `8b`, `70b` or left out, but is '9b'"),
        (
            "bench.hidden_sizes=[100]",
            "hidden sizes must be multiples of 64, the size of an attention head, but one is 100",
        ),
        (
            "bench.prompt_sizes=[64]",
            "bench.prompt_sizes: must be two numbers, a hidden size and a vocabulary size",
        ),
    ],
)
def test_what_the_bench_cannot_measure_is_refused(override: str, message: str) -> None:
    result = run_program("eval.bench.train", override)
    assert result.returncode != 0 and message in result.stderr
