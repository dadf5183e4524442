"""Tests the training of a head with its own vocabulary."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtptrain import run_dir as run_module
from mtptrain.data.draft_vocab import DraftVocabManifest, offsets, write_draft_vocab
from mtptrain.heads.files import build_head
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.train import initialise
from mtptrain.utils.files import read_sealed
from tests.conftest import Run, make_config, succeed
from tests.mtptrain.train.runs import copy_of, refused, train

EAGLE3 = ("head=eagle3", "head.capture_layers=[1,2]", "head.draft_vocab_size=48", "train.validation_prompts=0")


@pytest.fixture(scope="module")
def captured_run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a run of stages 1 and 2 for an eagle3 head whose draft vocabulary is not chosen yet."""
    directory = tmp_path_factory.mktemp("eagle3") / "run"
    shutil.copytree(tiny_run[0] / "prompts", directory / "prompts")
    overrides = (f"run_dir={directory}", *tiny_run[1], *EAGLE3)
    succeed("hidden-states", *overrides)
    return directory, overrides


def test_a_bf16_engine_trains_the_lm_head_on_a_mix_of_losses_and_keeps_the_offsets_whole(
    captured_run: Run, tmp_path: Path, tiny_target: Path
) -> None:
    run = copy_of(captured_run, tmp_path)
    succeed("draft-vocab", *run[1])
    d2t = load_file(run[0] / "draft_vocab/draft_vocab.safetensors")["d2t"]
    settings = ("deepspeed=zero2", "train.loss={kl:0.5,e2e:1,dpace:1}", "train.max_steps=8")
    found = train(run, *settings)
    last = found[-1]
    assert last["loss"] < 0.95 * found[0]["loss"] and last["kl_at"][0] < 0.9 * found[0]["kl_at"][0]
    parts = [last[f"{part}_at"] for part in ("kl", "e2e", "dpace")]
    losses = [kl / 2 + e2e + dpace for kl, e2e, dpace in zip(*parts, strict=True)]
    assert last["loss"] == pytest.approx(losses[0] / 2.44 + losses[1] * 0.8 / 2.44 + losses[2] * 0.64 / 2.44, rel=1e-5)

    trained = load_file(run[0] / "train/last/head.safetensors")
    assert trained["lm_head.weight"].dtype is torch.bfloat16
    assert trained["d2t"].dtype is torch.int64 and torch.equal(trained["d2t"], d2t) and d2t.any()
    rows = load_frozen_parts(tiny_target).lm_head[d2t + torch.arange(48)]
    moved = (trained["lm_head.weight"].float() - rows).norm() / rows.norm()
    assert 1e-3 < moved < 0.2, "the lm_head must start from the target's rows and be trained"

    directory = run[0] / "draft_vocab"
    manifest = DraftVocabManifest(**read_sealed(directory / "manifest.json", "again"))
    write_draft_vocab(directory, offsets(torch.arange(100, 148)), manifest)
    message = r"the sha256 of the draft vocabulary must be \w+, but is \w+; restore these settings to resume"
    assert re.search(message, refused(run, *settings))


def test_a_head_starts_from_the_targets_rows_and_a_missing_stale_or_other_draft_vocabulary_is_refused(
    captured_run: Run, tmp_path: Path, tiny_target: Path
) -> None:
    run = copy_of(captured_run, tmp_path)
    whole = run_module.Run(make_config(*run[1], "head.draft_vocab_size=260"))  # needs no draft vocabulary
    head, parts = build_head(whole.config.head, whole.target.config), load_frozen_parts(tiny_target)
    initialise(whole, head, parts, "any")
    assert head.d2t is None and torch.equal(head.get_parameter("lm_head.weight"), parts.lm_head)
    # This target has no weights, because the error must come before they are read, which takes long.
    shutil.copytree(tiny_target, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    missing = refused(run, f"target.path={tmp_path / 'bare'}")
    assert "draft_vocab/manifest.json: must exist, but does not; run mtptrain draft-vocab with the same re" in missing
