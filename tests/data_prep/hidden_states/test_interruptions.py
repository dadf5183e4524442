"""Tests that resumed runs and concurrent parts write the same store as an undisturbed run, and the check of a store."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep.hidden_states import Extraction, extract_hidden_states, fill, verify_store
from mtptrain.config import PipelineConfig
from mtptrain.hidden_states.extraction.fill import Streams
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES
from mtptrain.hidden_states.stream import missing_open_shards
from mtptrain.run_dir import Run
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from tests.conftest import run_program, start_program
from tests.data_prep.hidden_states.stage import ONE_RANK, ConfigFor, overrides_of, read_store
from tests.programs import wait_until
from tests.sealed import flip_bit


def undisturbed(config: PipelineConfig) -> dict[str, bytes]:
    """Returns the files of a whole run on one rank, and removes them."""
    extract_hidden_states(Run(config), ONE_RANK)
    store_dir = config.stage_dir("hidden_states")
    files = read_store(store_dir)
    shutil.rmtree(store_dir)
    return files


def shards_of(config: PipelineConfig) -> list[Path]:
    return list(config.stage_dir("hidden_states").glob("shard_*.safetensors"))


def kill_after(config: PipelineConfig, num_ranks: int, num_shards: int) -> None:
    """Starts the program, and kills all ranks once so many shards exist."""
    program = start_program("hidden-states", *overrides_of(config), num_ranks=num_ranks)
    wait_until(lambda: len(shards_of(config)) >= num_shards, program)
    program.kill()
    assert not (config.stage_dir("hidden_states") / "manifest.json").exists(), "the run must be killed before its end"


def test_a_killed_run_resumes_with_other_ranks_to_the_bytes_of_an_undisturbed_run(prepared: ConfigFor) -> None:
    rng = np.random.default_rng(3)
    config = prepared(lengths=rng.integers(1, 90, 300).tolist())
    store_dir, files = config.stage_dir("hidden_states"), undisturbed(config)
    assert len(files) > 150
    kill_after(config, num_ranks=1, num_shards=30)
    trusted = {path.stem for path in store_dir.glob("shard_*.json")}
    kept = {path.name: path.stat().st_mtime_ns for path in shards_of(config) if path.stem in trusted}
    resumed = run_program("hidden-states", *overrides_of(config), num_ranks=2)
    assert len(kept) > 20 and "computed now" in resumed.stdout, resumed.stderr
    assert read_store(store_dir) == files
    assert {name: (store_dir / name).stat().st_mtime_ns for name in kept} == kept


def test_the_full_check_names_every_damaged_shard_and_computes_nothing(
    prepared: ConfigFor, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared()
    extract_hidden_states(Run(config), ONE_RANK)
    verify_store(config.stage_dir("hidden_states"), ONE_RANK)
    assert "damaged" in capsys.readouterr().out
    for index in (0, 3):
        path = config.stage_dir("hidden_states") / f"shard_0000{index}.safetensors"
        flip_bit(path, path.stat().st_size // 2)
    before = read_store(config.stage_dir("hidden_states"))
    damaged = run_program("verify", *overrides_of(config), num_ranks=2)
    assert damaged.returncode != 0 and read_store(config.stage_dir("hidden_states")) == before
    for index, count in ((0, 1), (1, 0), (3, 1)):
        message = f"shard_0000{index}.safetensors: the sha256 of shard {index} must be"
        assert damaged.stderr.count(message) == count, "the first rank alone must report"


def set_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))


def test_only_what_is_missing_is_computed_and_needs_free_disk(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared()
    store_dir, needed = config.stage_dir("hidden_states"), 267 * (2 * 64 + 5) + 10 * DOCUMENT_BYTES
    set_free(monkeypatch, needed - 1)
    message = (
        r"hidden_states: 0.000 GB must be free for the hidden states, but only 0.000 GB are; free .* delete \S+ "
        r"and set hidden_states\.store_dtype=fp8, or lower prompts\.max_train_tokens and run"
    )
    with pytest.raises(UserError, match=message):
        extract_hidden_states(Run(config), ONE_RANK)
    assert "267 tokens x 133 bytes" in capsys.readouterr().out
    assert sorted(path.name for path in store_dir.iterdir()) == ["plan.json", "stage.json"]
    set_free(monkeypatch, needed)
    extract_hidden_states(Run(config), ONE_RANK)
    undisturbed = read_store(store_dir)
    (store_dir / "shard_00000.safetensors").unlink()
    set_free(monkeypatch, (5 + 40 + 17) * 133 + 3 * DOCUMENT_BYTES)
    extract_hidden_states(Run(config), ONE_RANK)
    assert read_store(store_dir) == undisturbed
    assert "supervised tokens" in capsys.readouterr().out
    monkeypatch.delattr("data_prep.hidden_states.load_target")
    extract_hidden_states(Run(config), ONE_RANK)
    assert "is finished already: 10 documents, 267 tokens" in capsys.readouterr().out


def test_streamed_shards_on_the_disk_make_room_for_later_ones(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that a restart needs free space only if a shard of the open windows is missing."""
    streamed = ("train.stream=true", "train.stream_shards=1", "train.epochs=1", "hidden_states.store_dtype=fp8")
    config = prepared(*streamed, lengths=[40] * 20)
    store_dir = config.stage_dir("hidden_states")

    def write_open_windows(extraction: Extraction, streams: Streams, ranks: Ranks) -> None:
        missing = missing_open_shards(store_dir, extraction.windows)
        assert missing is not None
        fill(extraction, streams, missing, ranks)

    monkeypatch.setattr("data_prep.hidden_states.follow_training", write_open_windows)
    extract_hidden_states(Run(config), ONE_RANK)
    assert len(list(store_dir.glob("shard_*.safetensors"))) == 3
    set_free(monkeypatch, 0)
    extract_hidden_states(Run(config), ONE_RANK)
    next(store_dir.glob("shard_*.safetensors")).unlink()
    message = r"must be free for the hidden states, .* delete \S+ and lower train\.stream_shards or hidden_states"
    with pytest.raises(UserError, match=message):
        extract_hidden_states(Run(config), ONE_RANK)
