"""Tests that runs start from a published head, and can measure it before training."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtptrain.convert.warm_start import trained_or_initial_head
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.files import TARGET_WEIGHTS, save_head
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import weights_fingerprint
from mtptrain.utils.errors import UserError
from tests.conftest import run_program
from tests.mtptrain.convert.warm_start.written_heads import EAGLE3, MTP, assert_equal, write


def test_a_run_without_a_trained_head_takes_the_initial_one_and_then_its_own(tmp_path: Path, tiny_target: Path) -> None:
    state, cpu, train_dir = (
        write(tmp_path / "head", "vllm", EAGLE3, tiny_target),
        torch.device("cpu"),
        tmp_path / "train",
    )
    config = Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=48, init_from=str(tmp_path / "head"))
    found = trained_or_initial_head(train_dir, config, TargetFiles(tiny_target), None, cpu)
    assert_equal(found.head.state_dict(), state)
    assert not found.is_trained and found.directory == tmp_path / "head"

    trained = {name: tensor if name == "d2t" else tensor * 2 for name, tensor in state.items()}
    for name in ("last", "best"):  # the last head counts until one was measured
        save_head(train_dir / name, trained, EAGLE3, {TARGET_WEIGHTS: weights_fingerprint(tiny_target)})
        found = trained_or_initial_head(train_dir, config, TargetFiles(tiny_target), None, cpu)
        assert_equal(found.head.state_dict(), trained)
        assert found.is_trained and found.directory == train_dir / name

    with pytest.raises(UserError, match=r"must hold a trained head, but has no head\.json; run mtptrain train first"):
        trained_or_initial_head(tmp_path / "none", EAGLE3, TargetFiles(tiny_target), None, cpu)


def test_training_starts_from_the_published_head_and_acceptance_measures_it_before(
    fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path, tiny_target: Path
) -> None:
    run_dir, overrides = fresh_run
    state = write(tmp_path / "head", "sglang", MTP, tiny_target)
    init = f"head.init_from={tmp_path}/head"
    result = run_program("acceptance", *overrides, init)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((run_dir / "acceptance/report.json").read_text())
    assert report["head"] == str(tmp_path / "head") and report["head_sha256"] == weights_fingerprint(tmp_path / "head")
    assert "unchanged from head.init_from; this run has not trained a head" in " ".join(result.stdout.split())

    result = run_program("train", *overrides, init, "train.max_steps=1", "train.lr=1e-9", "deepspeed=zero0")
    assert result.returncode == 0, result.stderr[-3000:]
    trained = load_file(run_dir / "train/best/head.safetensors")
    assert all(torch.allclose(trained[name], tensor, atol=1e-6) for name, tensor in state.items())
    result = run_program("acceptance", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    again = json.loads((run_dir / "acceptance/report.json").read_text())
    assert again["head"] == str(run_dir / "train/best") and again["accepted_at"] == report["accepted_at"]
