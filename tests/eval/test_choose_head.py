"""Tests the choice among heads that training kept without measuring them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.choose_head import heads_to_measure
from mtptrain.heads.files import kept_head, remove_stale_heads, save_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.utils.errors import UserError
from tests.conftest import Run, run_program, succeed
from tests.sealed import describe_again

KEEPING = ("train.validation_prompts=0", "train.validate_every=5", "deepspeed=zero0")
LEARNING = ("train.lr=3e-2", "train.validation_prompts=12", "train.validation_new_tokens=16")
"""Settings with which heads of different steps have different acceptance."""


def kept(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "train/heads").iterdir())


def facts(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "head.json").read_text())
    return content


def test_two_heads_of_one_step_are_refused_unless_they_are_the_same(tmp_path: Path) -> None:
    config, kept_dir = MtpHead.Config(), kept_head(tmp_path, 9)
    save_head(kept_dir, {"weight": torch.zeros(1)}, config, {"step": 9})
    save_head(tmp_path / "best", {"weight": torch.zeros(1)}, config, {"step": 9, "acceptance_length": 2.5})
    assert heads_to_measure(tmp_path) == {9: kept_dir}
    save_head(tmp_path / "best", {"weight": torch.ones(1)}, config, {"step": 9, "acceptance_length": 2.5})
    with pytest.raises(UserError, match=rf"best: must be the same head as {kept_dir}, .* but has other weights; move"):
        heads_to_measure(tmp_path)


def test_only_what_training_kept_is_removed(tmp_path: Path) -> None:
    written = ["step_00000007/head.json", "step_00000007/head.safetensors", "step_00000009/head.json"]
    somebodys = ["step_00000009/notes.txt", "step_00000009_good/head.json", "step_best/head.json"]
    for name in (*written, *somebodys):
        (tmp_path / "heads" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "heads" / name).write_text("{}")
    remove_stale_heads(tmp_path, 5)
    left = sorted(str(path.relative_to(tmp_path / "heads")) for path in tmp_path.rglob("*") if path.is_file())
    assert left == somebodys and not (tmp_path / "heads/step_00000007").exists()


def test_the_head_of_every_step_that_is_due_and_of_the_last_is_kept_and_measures_as_it_does_during_training(
    tiny_run: Run, fresh_run: Run, tmp_path: Path
) -> None:
    settings = (*LEARNING, "train.max_steps=40", "deepspeed=zero0", "train.validate_every=15")
    shutil.copytree(tiny_run[0], tmp_path / "measured")
    succeed("train", f"run_dir={tmp_path}/measured", *tiny_run[1], *settings)
    lines = map(json.loads, (tmp_path / "measured/train/metrics.jsonl").read_text().splitlines())
    names = ("step", "acceptance_length", "acceptance_rate_at")
    measured = [[line[name] for name in names] for line in lines if "acceptance_length" in line]

    run_dir, overrides = fresh_run
    assert (
        "not measured: run mtptrain choose-head"
        in succeed("train", *overrides, *settings, "train.validation_prompts=0").stdout
    )
    assert kept(run_dir) == ["step_00000015", "step_00000030", "step_00000040"]
    printed = succeed("choose-head", *overrides, *settings).stdout
    choice = json.loads((run_dir / "train/choice.json").read_text())
    assert [[head[name] for name in names] for head in choice["heads"]] == measured
    assert len({length for _, length, _ in measured}) > 1 and choice["heads"][0]["prompts"] == 12
    best, best_during_training = run_dir / "train/best", tmp_path / "measured/train/best"
    assert facts(best) == facts(best_during_training) and choice["best_step"] == facts(best)["step"]
    assert (best / "head.safetensors").read_bytes() == (best_during_training / "head.safetensors").read_bytes()
    assert all(f"{length:.3f}" in printed for _, length, _ in measured)


@pytest.mark.slow
def test_a_better_head_than_the_last_is_chosen_on_the_default_number_of_prompts_and_stays_the_best(
    fresh_run: Run,
) -> None:
    run_dir, overrides = fresh_run
    settings = (*LEARNING, *KEEPING, "train.validate_every=15")
    stage_dir = run_dir / "train"
    succeed("train", *overrides, *settings, "train.max_steps=20")
    last = stage_dir / "heads/step_00000020/head.safetensors"
    generator = torch.Generator().manual_seed(0)
    spoilt = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor) for name, tensor in load_file(last).items()
    }
    save_file(spoilt, last)
    describe_again(last.with_name("head.json"))
    assert not (stage_dir / "best").exists()
    printed = succeed("choose-head", *overrides, *settings).stdout
    choice = json.loads((stage_dir / "choice.json").read_text())
    first, second = choice["heads"]
    assert first["prompts"] == second["prompts"] > 12
    assert (choice["best_step"], first["step"], second["step"]) == (15, 15, 20)
    assert facts(stage_dir / "best")["acceptance_length"] == first["acceptance_length"] > second["acceptance_length"]
    assert [line.rstrip(" │").endswith("best") for line in printed.splitlines() if "│" in line] == [True, False]

    succeed("train", *overrides, *settings, "train.max_steps=21")
    assert facts(stage_dir / "last")["step"] == 21 and facts(stage_dir / "best")["step"] == 15
    assert kept(run_dir) == ["step_00000015", "step_00000020", "step_00000021"]


@pytest.mark.slow
def test_a_run_that_starts_again_from_an_earlier_step_forgets_the_heads_that_came_later_but_not_the_best(
    fresh_run: Run,
) -> None:
    run_dir, overrides = fresh_run
    stage_dir = run_dir / "train"
    settings = (*overrides, *KEEPING, "train.save_every=6")
    succeed("train", *settings, "train.max_steps=10")
    succeed("choose-head", *overrides)
    undisturbed = (stage_dir / "heads/step_00000010/head.safetensors").read_bytes()
    shutil.rmtree(stage_dir / "checkpoints/step_00000010")
    succeed("train", *settings, "train.max_steps=8")
    assert kept(run_dir) == ["step_00000005", "step_00000008"]
    assert (stage_dir / "best").exists() and not (stage_dir / "choice.json").exists()
    shutil.rmtree(stage_dir / "checkpoints/step_00000008")
    succeed("train", *settings, "train.max_steps=10")
    assert kept(run_dir) == ["step_00000005", "step_00000010"]
    assert (stage_dir / "heads/step_00000010/head.safetensors").read_bytes() == undisturbed

    succeed("choose-head", *overrides)
    for name in ("heads", "checkpoints"):
        shutil.rmtree(stage_dir / name)
    anew = run_program("train", *settings, "train.max_steps=7", "train.validate_every=0")
    assert anew.returncode == 1 and "best: must not exist if training starts anew and measures no head" in anew.stderr


def test_heads_that_cannot_be_measured_are_refused(fresh_run: Run) -> None:
    run_dir, overrides = fresh_run
    nothing = run_program("choose-head", *overrides)
    message = "train/heads: must hold the heads to choose from, but holds none; run mtptrain train with the same recipe"
    assert nothing.returncode != 0 and message in nothing.stderr
    succeed("train", *overrides, *KEEPING, "train.max_steps=1")
    result = run_program("choose-head", *overrides, "head.intermediate_size=32")
    message = "the head's settings must be those of the config, but differ in head.intermediate_size ("
    assert result.returncode != 0 and message in result.stderr
    assert not (run_dir / "train/choice.json").exists()
