"""Tests that resumed runs and concurrent parts write the same store as an undisturbed run, and the check of a store."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep import hidden_states
from data_prep.hidden_states import extract_hidden_states
from mtptrain.config import PipelineConfig
from mtptrain.run import Run
from mtptrain.utils.errors import UserError
from tests.conftest import run_program, start_program
from tests.data_prep.hidden_states.stage import ONE_RANK, ConfigFor, overrides_of, read_store
from tests.programs import StartedProgram
from tests.sealed import flip_bit


def extract(config: PipelineConfig, num_ranks: int) -> str:
    result = run_program("hidden-states", *overrides_of(config), num_ranks=num_ranks)
    assert result.returncode == 0, result.stderr
    return result.stdout


def undisturbed(config: PipelineConfig) -> dict[str, bytes]:
    """Returns the files of a whole run on one rank, and removes them."""
    extract_hidden_states(Run(config), ONE_RANK)
    store_dir = config.stage_dir("hidden_states")
    files = read_store(store_dir)
    shutil.rmtree(store_dir)
    return files


def shards_of(config: PipelineConfig) -> list[Path]:
    return list(config.stage_dir("hidden_states").glob("shard_*.safetensors"))


def kill_after(config: PipelineConfig, num_ranks: int, num_shards: int, then_s: float = 0.0) -> None:
    """Starts the program, and kills all ranks once so many shards exist."""
    program, deadline = (
        start_program("hidden-states", *overrides_of(config), num_ranks=num_ranks),
        time.monotonic() + 120,
    )
    while len(shards_of(config)) < num_shards:
        assert program.is_running and time.monotonic() < deadline, program.errors_so_far()
        time.sleep(0.0005)
    time.sleep(then_s)
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
    assert len(kept) > 20 and "computed now" in extract(config, num_ranks=2)
    assert read_store(store_dir) == files
    assert {name: (store_dir / name).stat().st_mtime_ns for name in kept} == kept


@pytest.mark.slow
@pytest.mark.parametrize("store_dtype", ["bfloat16", "fp8"])
def test_runs_killed_at_ten_random_moments_with_changing_ranks_leave_an_undisturbed_store(
    prepared: ConfigFor, store_dtype: str
) -> None:
    rng = np.random.default_rng(7)
    config = prepared(f"hidden_states.store_dtype={store_dtype}", lengths=rng.integers(1, 200, 300).tolist())
    files = undisturbed(config)
    for _ in range(10):
        num_shards = len(shards_of(config)) + int(rng.integers(0, len(files) // 15))
        kill_after(config, int(rng.integers(1, 4)), num_shards, float(rng.uniform(0, 0.03)))
    assert 10 < len(shards_of(config)) < len(files) - 1
    extract(config, 2)
    assert read_store(config.stage_dir("hidden_states")) == files


def test_parts_run_concurrently_and_the_last_one_finishes_the_store(
    prepared: ConfigFor, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared(lengths=np.random.default_rng(5).integers(1, 90, 60).tolist())
    files = undisturbed(config)
    extract_hidden_states(Run(replace(config, hidden_states=replace(config.hidden_states, num_parts=3))), ONE_RANK)
    unfinished = "unfinished parts   1, 2; to rerun a failed one, set hidden_states.part=N and the same num_parts"
    assert unfinished in capsys.readouterr().out
    shutil.rmtree(config.stage_dir("hidden_states"))
    parts: list[StartedProgram] = []
    for part in range(3):
        settings = (f"hidden_states.part={part}", "hidden_states.num_parts=3")
        parts.append(start_program("hidden-states", *overrides_of(config), *settings))
    assert [part.result().returncode for part in parts] == [0, 0, 0]
    assert read_store(config.stage_dir("hidden_states")) == files


def test_a_finished_store_is_not_computed_again(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared()
    extract_hidden_states(Run(config), ONE_RANK)
    assert "supervised tokens" in capsys.readouterr().out
    monkeypatch.delattr(hidden_states, "load_target")
    extract_hidden_states(Run(config), ONE_RANK)
    assert "is finished already: 10 documents, 267 tokens" in capsys.readouterr().out


def test_the_full_check_names_every_damaged_shard_and_computes_nothing(
    prepared: ConfigFor, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared("verify=true")

    with pytest.raises(UserError, match="must exist, but it does not"):
        hidden_states.main(config)
    extract_hidden_states(Run(config), ONE_RANK)
    hidden_states.main(config)
    printed = capsys.readouterr().out
    assert "damaged" in printed and "documents" in printed
    for index in (0, 3):
        path = config.stage_dir("hidden_states") / f"shard_0000{index}.safetensors"
        flip_bit(path, path.stat().st_size // 2)
    before = read_store(config.stage_dir("hidden_states"))
    damaged = run_program("hidden-states", *overrides_of(config), "verify=true", num_ranks=2)
    assert damaged.returncode != 0 and read_store(config.stage_dir("hidden_states")) == before
    for index, count in ((0, 1), (1, 0), (3, 1)):
        message = f"shard_0000{index}.safetensors: the sha256 of shard {index} must be"
        assert damaged.stderr.count(message) == count, "the first rank alone must report"
