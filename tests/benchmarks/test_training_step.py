"""Tests the benchmark of the training step, beside a stand-in for the peer. Speed is not tested."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.measuring import tensor_bytes
from benchmarks.training_step import Case, PeerStep, main, narrow_target
from mtptrain.settings.heads import Eagle3Config
from mtptrain.utils.errors import UserError
from tests.conftest import make_config, run_program
from tests.programs import fake_python

LOSSES = "def resolve_loss_config(*names): return names\n"
EAGLE3 = """
from types import SimpleNamespace as Eagle3SpeculatorConfig
from torch import nn

class Eagle3DraftModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, vocab_size = config.transformer_layer_config.hidden_size, config.draft_vocab_size
        self.embed_tokens, self.lm_head, self.verifier_lm_head = (nn.Linear(size, vocab_size) for _ in range(3))
        self.fc = nn.Linear(3 * size, size)

    def forward(self, hidden_states, loss_mask, **batch):
        return None, self.lm_head(self.fc(hidden_states))[loss_mask].logsumexp(-1).mean(), None
"""


@pytest.mark.slow
def test_our_step_is_measured_beside_the_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("losses", LOSSES), ("models/eagle3", EAGLE3)):
        module = (tmp_path / "speculators" / name).with_suffix(".py")
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sizes = ["--hidden-sizes", "64", "--tokens", "96", "--longest-tokens", "8192", "--repeats", "1"]
    result = run_program("benchmarks.training_step", *sizes, "--peer-python", sys.executable)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(row["tokens"], row["supervised"]) for row in rows if "mfu" in row] == [
        *((96, 96), (2000, 200), (512, 512), (5120, 512), (1024, 1024)),
        *((2048, 1024), (2048, 2048), (4096, 1024), (8192, 1024)),
    ]
    assert all(row["tokens_per_s"] > 0 and row["megabytes"] > 0 for row in rows)
    assert [row["speed_of_peer"] > 0 for row in rows if "speed_of_peer" in row] == [True, True]
    assert "A prompt token takes" in result.stdout and "matmul peak" in result.stdout


def test_a_peer_that_fails_is_reported(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "#!/bin/sh\necho 'no memory' >&2\nexit 3\n")
    peer = PeerStep(python, Case(Eagle3Config(), narrow_target(64), [(9, 0)]), torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match=r"--peer-python: the peer must answer, but exited with 3: no memory; lower"):
        peer.seconds()


def test_steps_for_an_8b_target_are_refused_without_a_gpu() -> None:
    with pytest.raises(UserError, match=r"^--8b: must be left out without a GPU, because its steps take hours"):
        main(make_config(), Namespace(is_8b=True))


def test_only_tensors_that_are_alive_together_add_up() -> None:
    size, cpu = 50_000_000, torch.device("cpu")
    kept = torch.ones(size, dtype=torch.uint8)

    def one_after_the_other() -> None:
        for _ in range(2):
            torch.ones_like(kept)

    assert tensor_bytes(lambda: (torch.ones_like(kept), torch.ones_like(kept)), cpu) == 2 * size
    assert size <= tensor_bytes(one_after_the_other, cpu) < 1.01 * size
