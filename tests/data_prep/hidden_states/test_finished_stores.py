"""Tests that a finished store is kept, deleted shards are computed again, and the full check finds damaged shards."""

import subprocess

import pytest

from data_prep import hidden_states
from data_prep.hidden_states import extract_hidden_states
from mtptrain.config import PipelineConfig
from mtptrain.run import Run
from tests.conftest import run_program
from tests.data_prep.hidden_states.stage import ONE_RANK, ConfigFor, overrides_of, read_store
from tests.sealed import flip_bit


def test_a_finished_store_is_not_computed_again(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared()
    extract_hidden_states(Run(config), ONE_RANK)
    assert "supervised tokens" in capsys.readouterr().out
    monkeypatch.delattr(hidden_states, "load_target")
    extract_hidden_states(Run(config), ONE_RANK)
    assert "is finished already: 10 documents, 267 tokens" in capsys.readouterr().out


def verify_by_program(config: PipelineConfig, num_ranks: int) -> subprocess.CompletedProcess[str]:
    return run_program("hidden-states", *overrides_of(config), "verify=true", num_ranks=num_ranks)


def test_the_full_check_names_every_damaged_shard_and_computes_nothing(prepared: ConfigFor) -> None:
    config = prepared()
    assert "must exist, but it does not" in verify_by_program(config, 1).stderr
    extract_hidden_states(Run(config), ONE_RANK)
    store_dir = config.stage_dir("hidden_states")
    whole = verify_by_program(config, 2)
    assert whole.returncode == 0 and "damaged" in whole.stdout and "documents" in whole.stdout
    for name in ("shard_00000", "shard_00003"):
        path = store_dir / f"{name}.safetensors"
        flip_bit(path, path.stat().st_size // 2)
    before = read_store(store_dir)
    damaged = verify_by_program(config, 2)
    assert damaged.returncode != 0 and read_store(store_dir) == before
    for index in (0, 3):
        message = f"shard_0000{index}.safetensors: the sha256 of shard {index} must be"
        assert damaged.stderr.count(message) == 1, "only the first rank must report"
    assert "the sha256 of shard 1 must" not in damaged.stderr
