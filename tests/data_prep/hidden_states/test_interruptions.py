"""Tests that resumed runs and concurrent parts write the same store as an undisturbed run."""

import os
import shutil
import subprocess
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess

import numpy as np
import pytest

from data_prep.hidden_states import extract_hidden_states
from eval.checks.processes import kill_tree
from mtptrain.config import PipelineConfig
from mtptrain.run import Run
from mtptrain.utils.distributed import free_port, init_ranks
from tests.conftest import program_command, run_program
from tests.data_prep.hidden_states.stage import ONE_RANK, ConfigFor, overrides_of, read_store
from tests.programs import FORKED, ROOT, ranks_environment


def extract(config: PipelineConfig, num_ranks: int) -> str:
    result = run_program("hidden-states", *overrides_of(config), num_ranks=num_ranks)
    assert result.returncode == 0, result.stderr
    return result.stdout


def kill_program(config: PipelineConfig, num_ranks: int, after_shards: int) -> None:
    """Starts the program, and kills it and its child processes once `after_shards` shards exist."""
    command = program_command("hidden-states", *overrides_of(config), num_ranks=num_ranks)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store_dir = config.stage_dir("hidden_states")
    deadline = time.monotonic() + 300
    while len(list(store_dir.glob("shard_*.safetensors"))) < after_shards:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.0005)
    kill_tree(process.pid)
    process.wait()
    assert (store_dir / "plan.json").exists() and not (store_dir / "manifest.json").exists()


def test_a_killed_run_resumes_with_other_ranks_to_the_bytes_of_an_undisturbed_run(prepared: ConfigFor) -> None:
    rng = np.random.default_rng(3)
    config = prepared(lengths=rng.integers(1, 90, 400).tolist())
    store_dir = config.stage_dir("hidden_states")
    extract(config, num_ranks=1)
    undisturbed = read_store(store_dir)
    assert len(undisturbed) > 200
    shutil.rmtree(store_dir)

    kill_program(config, num_ranks=1, after_shards=int(rng.integers(1, 60)))
    kill_program(config, num_ranks=2, after_shards=int(rng.integers(80, 150)))
    trusted = {path.stem for path in store_dir.glob("shard_*.json")}
    kept = {
        path.stem: path.stat().st_mtime_ns for path in store_dir.glob("shard_*.safetensors") if path.stem in trusted
    }
    output = extract(config, num_ranks=2)
    assert read_store(store_dir) == undisturbed
    assert len(kept) > 79
    assert {name: (store_dir / f"{name}.safetensors").stat().st_mtime_ns for name in kept} == kept
    assert "computed now" in output

    assert "is finished already: 400 documents" in extract(config, num_ranks=2)
    assert read_store(store_dir) == undisturbed


def work(config: PipelineConfig, rank: int, num_ranks: int, port: int) -> None:
    """Runs the stage as one rank under torchrun."""
    os.environ.update(ranks_environment(rank, num_ranks, port))
    extract_hidden_states(Run(config), init_ranks(timeout_hours=1))


def start_ranks(config: PipelineConfig, num_ranks: int) -> list[BaseProcess]:
    """Starts one process per rank, which the test can kill."""
    port = free_port()
    processes = [FORKED.Process(target=work, args=(config, rank, num_ranks, port)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    return processes


def end_ranks(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(timeout=120)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("store_dtype", ["bfloat16", "fp8"])
def test_runs_killed_at_ten_random_moments_with_changing_ranks_leave_an_undisturbed_store(
    prepared: ConfigFor, store_dtype: str
) -> None:
    rng = np.random.default_rng(7)
    config = prepared(f"hidden_states.store_dtype={store_dtype}", lengths=rng.integers(1, 200, 300).tolist())
    store_dir = config.stage_dir("hidden_states")
    assert end_ranks(start_ranks(config, 1)) == [0]
    undisturbed = read_store(store_dir)
    shutil.rmtree(store_dir)

    def count_shards() -> int:
        return len(list(store_dir.glob("shard_*.safetensors")))

    most_at_once = len(undisturbed) // 15
    for _ in range(10):
        wanted = count_shards() + int(rng.integers(0, most_at_once))
        processes = start_ranks(config, int(rng.integers(1, 4)))
        deadline = time.monotonic() + 120
        while count_shards() < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(float(rng.uniform(0, 0.03)))
        for process in processes:
            process.kill()
        end_ranks(processes)
        assert not (store_dir / "manifest.json").exists(), "the run finished before it was killed"
    assert 10 < count_shards() < len(undisturbed) - 1
    assert end_ranks(start_ranks(config, 2)) == [0, 0]
    assert read_store(store_dir) == undisturbed


def test_parts_run_concurrently_and_the_last_one_finishes_the_store(prepared: ConfigFor) -> None:
    rng = np.random.default_rng(5)
    config = prepared(lengths=rng.integers(1, 90, 60).tolist())
    store_dir = config.stage_dir("hidden_states")
    extract_hidden_states(Run(config), ONE_RANK)
    undisturbed = read_store(store_dir)
    shutil.rmtree(store_dir)
    parts = []
    for part in range(3):
        settings = replace(config.hidden_states, part=part, num_parts=3)
        parts += start_ranks(replace(config, hidden_states=settings), 1)
    assert end_ranks(parts) == [0, 0, 0]
    assert read_store(store_dir) == undisturbed


def test_a_part_that_ends_names_the_parts_that_are_unfinished(
    prepared: ConfigFor, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared(lengths=[50] * 60)
    settings = replace(config.hidden_states, part=0, num_parts=3)
    extract_hidden_states(Run(replace(config, hidden_states=settings)), ONE_RANK)
    printed = capsys.readouterr().out
    assert "unfinished parts   1, 2; to rerun a failed one, set hidden_states.part=N and the same num_parts" in printed
