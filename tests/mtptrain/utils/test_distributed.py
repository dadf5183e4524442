"""Tests that ranks wait for each other as long as the config says, in every process group."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mtptrain.utils import distributed
from mtptrain.utils.distributed import Ranks, StopSignal, cpu_ranks, free_port, init_ranks
from mtptrain.utils.errors import UserError
from tests.programs import FORKED, ranks_environment


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes this a machine with 4 cores and 5 GB of free memory, and returns the folder of its container's limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(distributed.psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * 10**9))
    monkeypatch.setattr(distributed, "CGROUP", tmp_path)
    return tmp_path


LIMITS = [
    ("max 100000", "max", 4),
    ("250000 100000", "max", 2),
    ("50000 100000", "max", 1),
    ("800000 100000", "8000000000", 4),
    ("max 100000", "3000000000", 3),
    ("max 100000", "500000000", 1),
]
"""A container's CPUs and bytes of memory, and its ranks for a target of half a gigabyte."""


def test_a_cpu_gets_a_rank_per_core_as_far_as_memory_and_the_container_allow_unless_the_config_says_how_many(
    machine: Path,
) -> None:
    cases = ((0, 1, 4), (0, 10**9, 2), (0, 10**12, 1), (7, 10**12, 7))
    assert all(cpu_ranks(setting, weights_bytes) == expected for setting, weights_bytes, expected in cases)
    for cpu, memory, expected in LIMITS:
        (machine / "cpu.max").write_text(cpu + "\n")
        (machine / "memory.max").write_text(memory + "\n")
        assert cpu_ranks(0, weights_bytes=5 * 10**8) == expected


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    message = "^--nproc-per-node: must be at most 2, the number of GPUs that this process sees, but LOCAL_RANK is 2; "
    with pytest.raises(UserError, match=message):
        init_ranks(timeout_hours=1)


def test_a_rank_gets_the_next_item_when_it_asks_for_one_and_no_other_rank_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "_numbers", dist.HashStore())
    fast, slow = (Ranks(rank, 2, rank).share("items", "abcde") for rank in range(2))
    assert (next(slow), [next(fast) for _ in range(3)], next(slow), [*fast, *slow]) == ("a", ["b", "c", "d"], "e", [])
    assert [*Ranks(0, 1, 0).share("items", "abcde")] == [*"abcde"]


def groups_have_the_timeout(rank: int, port: int, timeout_hours: float) -> None:
    os.environ.update(ranks_environment(rank, 2, port))
    ranks = init_ranks(timeout_hours)
    StopSignal(ranks)
    dist.new_group(ranks=range(2))  # DeepSpeed creates a group in this way
    ranks.barrier()  # if rank 0 ended earlier, the address store that rank 1 needs could end with it
    groups = list(dist.distributed_c10d._world.pg_map)
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    assert timeouts == {timedelta(hours=timeout_hours)} and len(groups) >= 3 and distributed._waiting_group in groups, (
        timeouts
    )


def test_every_group_has_the_timeout_whoever_makes_it() -> None:
    for hours in (7.0, 10_000.0):
        port = free_port()
        ranks = [FORKED.Process(target=groups_have_the_timeout, args=(rank, port, hours)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == [0, 0]


PROGRAM = """
import os, sys, time
from pathlib import Path
from mtptrain.utils.distributed import become_ranks
from mtptrain.utils.errors import UserError, errors_as_lines
become_ranks(2)
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n".encode())
Path(os.environ["RANK"]).touch()
for _ in range(6000 * (sys.argv[1] == "is killed")):  # rank 0 waits for minutes, as if for the other rank
    time.sleep(0.05)
    if os.environ["RANK"] == "1" and Path("0").exists():  # both have printed
        os.kill(os.getpid(), 9)
with errors_as_lines():
    raise UserError("run_dir: must be right, but is wrong; correct it")
"""


@pytest.mark.parametrize(("argument", "code"), [("is killed", 128 + 9), ("is refused", 1)])
def test_a_program_that_becomes_ranks_ends_as_they_do(tmp_path: Path, argument: str, code: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = Path(__file__).parents[3]
    # A test that trained in this process has set the variables of torchrun, which would make the program a rank.
    alone = {name: value for name, value in os.environ.items() if name not in distributed._SINGLE_PROCESS}
    result = subprocess.run(
        [sys.executable, "-m", "program", argument],
        cwd=tmp_path,
        env={**alone, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == code, result.stderr[-3000:]
    assert ("was killed, perhaps for want of memory; start fewer ranks with cpu_ranks=1" in result.stderr) == (
        code > 128
    )
    assert code != 1 or result.stderr == "error: run_dir: must be right, but is wrong; correct it\n"
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 2 ['{argument}']" for rank in range(2)]
