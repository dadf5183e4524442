"""Tests the training of a head with its own vocabulary."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtptrain.data.draft_vocab import DraftVocabManifest, offsets, write_draft_vocab
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.utils.files import read_sealed
from tests.conftest import Run, run_program
from tests.mtptrain.train.runs import FP32, figures, train
from tests.sealed import seal_again

EAGLE3 = ("head=eagle3", "head.capture_layers=[1,2]", "head.draft_vocab_size=48")


@pytest.fixture(scope="module")
def captured_run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a run of stages 1 and 2 for an eagle3 head whose draft vocabulary is not chosen yet."""
    directory = tmp_path_factory.mktemp("eagle3") / "run"
    shutil.copytree(tiny_run[0] / "prompts", directory / "prompts")
    overrides = (f"run_dir={directory}", *tiny_run[1], *EAGLE3)
    result = run_program("hidden-states", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    return directory, overrides


@pytest.fixture(scope="module")
def chosen_run(captured_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a copy of `captured_run` with a draft vocabulary."""
    directory = tmp_path_factory.mktemp("chosen") / "run"
    shutil.copytree(captured_run[0], directory)
    overrides = (f"run_dir={directory}", *captured_run[1][1:])
    result = run_program("draft-vocab", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    return directory, overrides


def copy_of(run: Run, directory: Path) -> Run:
    shutil.copytree(run[0], directory / "run")
    return directory / "run", (f"run_dir={directory}/run", *run[1][1:])


@pytest.fixture
def eagle3_run(chosen_run: Run, tmp_path: Path) -> Run:
    """Returns a copy of `chosen_run` for one test alone."""
    return copy_of(chosen_run, tmp_path)


@pytest.fixture(scope="module")
def eagle3_one_rank(chosen_run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    """Trains the reference for a head with its own vocabulary, on one rank with ZeRO 0 in fp32."""
    run = copy_of(chosen_run, tmp_path_factory.mktemp("eagle3_one_rank"))
    return run[0], train(run, "deepspeed=zero0")


def head_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "train/last/head.safetensors")


def test_a_head_with_a_draft_vocabulary_trains_its_lm_head_and_keeps_its_offsets(
    eagle3_one_rank: tuple[Path, list[dict[str, object]]], tiny_target: Path
) -> None:
    run_dir, found = eagle3_one_rank
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]  # type: ignore[operator]
    trained, d2t = head_tensors(run_dir), load_file(run_dir / "draft_vocab/draft_vocab.safetensors")["d2t"]
    assert torch.equal(trained["d2t"], d2t) and d2t.any()
    rows = load_frozen_parts(tiny_target).lm_head[d2t + torch.arange(48)]
    moved = (trained["lm_head.weight"] - rows).norm() / rows.norm()
    assert 1e-3 < moved < 0.2, "the lm_head must start from the target's rows and be trained"


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 2), (2, 1)])
def test_ranks_and_zero_stages_agree_on_a_head_with_a_draft_vocabulary(
    eagle3_one_rank: tuple[Path, list[dict[str, object]]], eagle3_run: Run, num_ranks: int, stage: int
) -> None:
    run_dir, reference = eagle3_one_rank
    found = train(eagle3_run, f"deepspeed=zero{stage}", FP32, num_ranks=num_ranks)
    assert len(found) == 20
    for ours, theirs in zip(figures(found), figures(reference), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    ours, theirs = head_tensors(eagle3_run[0])["lm_head.weight"], head_tensors(run_dir)["lm_head.weight"]
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_bf16_engine_keeps_the_offsets_whole_and_resumes_with_them(eagle3_run: Run) -> None:
    train(eagle3_run, "deepspeed=zero2", "train.max_steps=2")
    run_dir, overrides = eagle3_run
    d2t = load_file(run_dir / "draft_vocab/draft_vocab.safetensors")["d2t"]
    first = head_tensors(run_dir)
    assert first["lm_head.weight"].dtype is torch.bfloat16
    assert first["d2t"].dtype is torch.int64 and torch.equal(first["d2t"], d2t)
    train(eagle3_run, "deepspeed=zero2", "train.max_steps=4")
    resumed = head_tensors(run_dir)
    assert torch.equal(resumed["d2t"], d2t) and not torch.equal(resumed["lm_head.weight"], first["lm_head.weight"])
    result = run_program("acceptance", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]


def test_a_whole_vocabulary_of_its_own_starts_from_the_targets_lm_head_without_a_draft_vocabulary(
    captured_run: Run, tmp_path: Path, tiny_target: Path
) -> None:
    run = copy_of(captured_run, tmp_path)
    train(run, "head.draft_vocab_size=260", "train.max_steps=1", "train.lr=1e-9")
    found = head_tensors(run[0])
    assert "d2t" not in found
    assert torch.allclose(found["lm_head.weight"].float(), load_frozen_parts(tiny_target).lm_head, rtol=1e-2, atol=1e-3)


def test_a_draft_vocabulary_that_is_missing_stale_or_of_another_size_is_refused(
    captured_run: Run, tmp_path: Path, tiny_target: Path
) -> None:
    run_dir, overrides = copy_of(captured_run, tmp_path)
    # This target has no weights, because the error must come before they are read, which takes long.
    shutil.copytree(tiny_target, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    result = run_program("train", *overrides, f"target.path={tmp_path / 'bare'}")
    assert (
        "draft_vocab/manifest.json: must exist, but does not; run mtptrain draft-vocab with the same recipe"
        in result.stderr
    )
    assert run_program("draft-vocab", *overrides, "head.draft_vocab_size=40").returncode == 0
    result = run_program("train", *overrides)
    assert "manifest.json: head.draft_vocab_size must be 48, but is 40; run mtptrain draft-vocab again" in result.stderr
    seal_again(run_dir / "draft_vocab/manifest.json", prompts_sha256="other")
    result = run_program("train", *overrides, "head.draft_vocab_size=40")
    assert (
        "the hash of the prompts (train.safetensors) must be" in result.stderr
        and "but is other; run mtptrain" in result.stderr
    )
    assert not (run_dir / "train").exists()


def test_a_checkpoint_of_another_draft_vocabulary_is_refused(eagle3_run: Run) -> None:
    run_dir, overrides = eagle3_run
    train(eagle3_run, "train.max_steps=1")
    directory = run_dir / "draft_vocab"
    manifest = DraftVocabManifest(**read_sealed(directory / "manifest.json", "again"))
    write_draft_vocab(directory, offsets(torch.arange(100, 148)), manifest)
    result = run_program("train", *overrides, "train.max_steps=2")
    assert result.returncode != 0
    assert re.search(
        r"the sha256 of the draft vocabulary must be \w+, but is \w+; restore these settings to resume",
        result.stderr,
    )
