"""Tests that an engine extracts the same bits for a shard in any order, limits its files, and ends with its rank."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from mtptrain.config import Dtype, HiddenStatesConfig
from mtptrain.hidden_states.extraction.vllm_streams import VllmStreams, visible_devices
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.programs import wait_until_ended

LAYERS, LONGEST = (1, 2), 300
SETTINGS = HiddenStatesConfig(dtype=Dtype.bfloat16, batch_tokens=256)
HANGS_AFTER_S = 1800
"""A tensor-parallel engine takes about a minute for its start and its first shard on an idle machine."""
_RANDOM = random.Random(0)


def make_shard(num_documents: int) -> list[NDArray[np.int32]]:
    lengths = [_RANDOM.randint(4, LONGEST) for _ in range(num_documents)]
    return [np.array([_RANDOM.randrange(256) for _ in range(length)], dtype=np.int32) for length in lengths]


A, B = make_shard(9), make_shard(12)
B[3] = B[0]  # a prefix cache would find this document


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), num_attention_heads=2, num_key_value_heads=2)


def streams_of(target_dir: Path, python: str, scratch_dir: Path) -> VllmStreams:
    return VllmStreams(target_dir, LAYERS, SETTINGS, LONGEST, scratch_dir, 0, python)


def read_all(shard: Iterator[tuple[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    return {index: states.clone() for index, states in shard}


def assert_equal_bits(found: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for index, states in found.items():
        assert states.dtype == torch.bfloat16 and torch.equal(states, wanted[index])


def test_states_depend_on_their_shard_alone_and_two_shards_of_files_exist_at_most(
    target_dir: Path, vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Extraction must ignore what a user sets for serving, and the variables of torchrun.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    scratch_dir = tmp_path / "scratch" / "rank"
    found = []
    with streams_of(target_dir, vllm_python, scratch_dir) as streams:
        for number, shard in enumerate(streams.extract([A, B, A, B])):
            states = read_all(shard)
            found.append(states)
            # Files that are left belong to the next shard, which the engine may have started.
            left = {path.name.split("_")[1] for path in scratch_dir.glob("shard_*")}
            assert left <= {f"{number + 1:05d}"}
    assert not scratch_dir.exists()
    assert_equal_bits(found[2], found[0])
    assert_equal_bits(found[3], found[1])
    assert [len(found[1][i]) for i in range(len(B))] == [len(prompt) for prompt in B]
    torch.testing.assert_close(found[1][3], found[1][0], rtol=0.1, atol=0.1)
    with streams_of(target_dir, vllm_python, scratch_dir) as streams:
        (alone,) = map(read_all, streams.extract([B]))
    assert_equal_bits(alone, found[1])


@pytest.mark.slow
def test_an_engine_that_cannot_write_or_is_killed_is_reported(
    target_dir: Path, vllm_python: str, tmp_path: Path
) -> None:
    scratch_dir = tmp_path / "rank"
    for is_killed, message in ((False, r"(?s)ended with status 1; .*director"), (True, r"ended with status -9")):
        with pytest.raises(UserError, match=message), streams_of(target_dir, vllm_python, scratch_dir) as streams:
            if is_killed:
                os.kill(streams._process.pid, signal.SIGKILL)
            else:
                (scratch_dir / "shard_00000_000005.safetensors").mkdir()
            for shard in streams.extract([A]):
                read_all(shard)
        assert not scratch_dir.exists()


USER = """
import sys
from pathlib import Path
import numpy as np
from mtptrain.hidden_states.extraction.vllm_streams import VllmStreams
from mtptrain.config import Dtype, HiddenStatesConfig
target_dir, scratch_dir, python, num_gpus = sys.argv[1:]
settings = HiddenStatesConfig(dtype=Dtype.bfloat16, tensor_parallel_size=int(num_gpus))
shard = [np.arange(500, dtype=np.int32) % 256] * 100
with VllmStreams(Path(target_dir), (1, 2), settings, 500, Path(scratch_dir), 0, python) as streams:
    for states in streams.extract([shard] * 1000):
        print(sum(1 for _ in states), flush=True)
"""


FORK = """
import multiprocessing
get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)
"""


def test_a_tensor_parallel_engine_with_forked_workers_extracts_and_ends_when_its_rank_is_killed(
    target_dir: Path, vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs vLLM forks its workers by default. On CPUs it always asks for `spawn`."""
    (tmp_path / "sitecustomize.py").write_text(FORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    scratch_dir = tmp_path / "rank"
    command = [sys.executable, "-c", USER, str(target_dir), str(scratch_dir), vllm_python, "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as rank:
        try:
            assert rank.stdout is not None
            assert select.select([rank.stdout], [], [], HANGS_AFTER_S)[0], "the engine hangs"
            assert rank.stdout.readline() == b"100\n"  # the first shard is done
            engine = psutil.Process(rank.pid).children(recursive=True)
            segments = shared_memory(engine)
            assert len(engine) >= 2 and segments
            time.sleep(random.uniform(0, 1))
        finally:
            rank.kill()
    for process in engine:
        wait_until_ended(process.pid, timeout_s=60)
    assert not any(segment.exists() for segment in segments)
    left = sorted(scratch_dir.iterdir())
    time.sleep(1)
    assert sorted(scratch_dir.iterdir()) == left, "no process may write any more"


def shared_memory(engine: list[psutil.Process]) -> set[Path]:
    """Returns the shared memory that an engine and its workers use, and that no other process would remove."""
    mapped = (mapping.path for process in engine for mapping in process.memory_maps())
    return {Path(path) for path in mapped if path.startswith("/dev/shm/psm_")}


def test_every_rank_has_gpus_of_its_own() -> None:
    assert [visible_devices(None, rank, 2) for rank in range(3)] == ["0,1", "2,3", "4,5"]
    assert [visible_devices("4,GPU-a,6,7", rank, 1) for rank in range(4)] == ["4", "GPU-a", "6", "7"]
    assert visible_devices("4,5,6,7", 1, 2) == "6,7"
    assert [visible_devices(hidden, 3, 1) for hidden in ("", "-1", "NoDevFiles")] == ["", "-1", "NoDevFiles"]
    with pytest.raises(
        ValueError,
        match=r"tensor_parallel_size: local rank 1 must have 4 GPUs .*, 8 in all, but CUDA_VISIBLE_DEVICES=0,1,2,3 has "
        r"4",
    ):
        visible_devices("0,1,2,3", 1, 4)
