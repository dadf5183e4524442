"""Tests how much free disk space the stage requires, and that a run stopped by a full disk can resume."""

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep import hidden_states
from data_prep.extraction import Extraction, prepare_extraction
from data_prep.hidden_states import extract_hidden_states, scratch_bytes
from mtptrain.hidden_states.extraction import fill
from mtptrain.hidden_states.extraction.fill import Streams
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES
from mtptrain.hidden_states.stream import missing_open_shards
from mtptrain.hidden_states.writer import finished_shards
from mtptrain.run import Run
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from tests.data_prep.hidden_states.stage import ONE_RANK, ConfigFor, read_store


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a separate file system of one megabyte."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", directory], check=True)


def test_a_disk_that_fills_up_stops_the_run_and_after_space_is_made_it_resumes(
    prepared: ConfigFor, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepared(lengths=[50] * 60)
    extract_hidden_states(Run(config), ONE_RANK)
    undisturbed = read_store(config.stage_dir("hidden_states"))
    config.stage_dir("hidden_states").rename(Path(config.run_dir) / "undisturbed")
    (Path(config.run_dir) / "hidden_states").symlink_to(small_disk, target_is_directory=True)

    store_dir, tokens_of_shard = config.stage_dir("hidden_states"), fill.tokens_of_shard

    def fill_the_disk_first(*args: Any) -> Any:
        """Fills the disk once at least five shards exist."""
        theirs = small_disk / "of_somebody_else"
        if len(list(store_dir.glob("shard_*.safetensors"))) >= 5 and not theirs.exists():
            with theirs.open("wb") as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        return tokens_of_shard(*args)

    monkeypatch.setattr(fill, "tokens_of_shard", fill_the_disk_first)
    message = (
        r"must have room for 0\.000 GB of hidden states .*, but is full; finished shards are kept: free some .* run"
    )
    with pytest.raises(OSError, match=message) as raised:
        extract_hidden_states(Run(config), ONE_RANK)
    assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(store_dir)
    assert not list(store_dir.glob("*.tmp"))
    shards = sorted(store_dir.glob("shard_*.safetensors"))  # the full disk may lack the record of the last shard
    kept = {shards[i].name: shards[i].stat().st_mtime_ns for i in finished_shards(store_dir, range(len(shards)))}
    assert len(kept) >= 5

    monkeypatch.undo()
    (small_disk / "of_somebody_else").unlink()
    extract_hidden_states(Run(config), ONE_RANK)
    assert read_store(store_dir) == undisturbed
    assert {name: (store_dir / name).stat().st_mtime_ns for name in kept} == kept


def test_a_disk_that_is_too_small_stops_before_anything_is_computed(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared()
    needed = 267 * (2 * 64 + 5) + 10 * DOCUMENT_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    message = (
        r"hidden_states: 0.000 GB must be free for the hidden states, but only 0.000 GB are; free more, .* delete \S+ "
        r"and set hidden_states\.store_dtype=fp8, or lower prompts\.max_train_tokens and run"
    )
    with pytest.raises(UserError, match=message):
        extract_hidden_states(Run(config), ONE_RANK)
    assert "267 tokens x 133 bytes" in capsys.readouterr().out
    written = sorted(path.name for path in config.stage_dir("hidden_states").iterdir())
    assert written == ["config.yaml", "plan.json", "provenance.json"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    extract_hidden_states(Run(config), ONE_RANK)


def test_the_temporary_files_of_vllm_must_fit_too(prepared: ConfigFor) -> None:
    config = prepared("hidden_states.backend=vllm", "hidden_states.dtype=float32")
    by_transformers = prepare_extraction(Run(prepared()))
    by_vllm = replace(by_transformers, config=config, identity=replace(by_transformers.identity, backend="vllm"))
    extraction = replace(by_vllm, shards=[range(0, 3), range(3, 10)], capture_layers=(0, 1))
    two_ranks = Ranks(rank=0, world_size=2, local_rank=0)
    assert extraction.target.config.hidden_size == 64
    assert scratch_bytes(extraction, two_ranks) == 2 * 2 * (267 - 62) * 64 * 3 * 4
    last_is_captured = replace(extraction, capture_layers=(1, 2))
    assert scratch_bytes(last_is_captured, two_ranks) == 2 * 2 * (267 - 62) * 64 * 2 * 4
    config.hidden_states.scratch_dir = "/dev/shm"
    assert scratch_bytes(extraction, two_ranks) == 0
    assert scratch_bytes(by_transformers, two_ranks) == 0


def test_a_deleted_shard_is_computed_again_and_finished_ones_need_no_free_disk(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepared()
    extract_hidden_states(Run(config), ONE_RANK)
    undisturbed = read_store(config.stage_dir("hidden_states"))
    (config.stage_dir("hidden_states") / "shard_00000.safetensors").unlink()
    one_shard = (5 + 40 + 17) * 133 + 3 * DOCUMENT_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=one_shard))
    extract_hidden_states(Run(config), ONE_RANK)
    assert read_store(config.stage_dir("hidden_states")) == undisturbed


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
        hidden_states.fill(extraction, streams, missing, ranks)

    monkeypatch.setattr("data_prep.hidden_states.follow_training", write_open_windows)
    extract_hidden_states(Run(config), ONE_RANK)
    assert len(list(store_dir.glob("shard_*.safetensors"))) == 3
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    extract_hidden_states(Run(config), ONE_RANK)
    next(store_dir.glob("shard_*.safetensors")).unlink()
    message = r"must be free for the hidden states, .* delete \S+ and lower train\.stream_shards or hidden_states"
    with pytest.raises(UserError, match=message):
        extract_hidden_states(Run(config), ONE_RANK)
