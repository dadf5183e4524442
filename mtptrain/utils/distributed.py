"""Reads ranks and devices from torchrun's environment, lets ranks agree on a stop signal, and starts them on a CPU."""

import atexit
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]

from mtptrain.utils.errors import FORKED, UserError

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that a batch system sends before it ends a job."""
EXIT_STOPPED = 75
"""Exit code of a program that saved its work and ended because of a signal: EX_TEMPFAIL in sysexits.h."""

CPU_THREADS = 1
"""Number of threads of a rank on a CPU. The last bits of matrix products depend on it, so all ranks have one, and
programs start as many ranks as the CPU has cores."""

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux shows the limits of a container."""

_waiting_group: dist.ProcessGroup | None = None
"""A gloo group of all ranks. Ranks sleep while they wait in it; NCCL's barrier would keep the GPU busy."""

_numbers: Any = HashStore()
"""Numbers that all ranks add to."""

_SINGLE_PROCESS = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among those started by torchrun; rank 0 of 1 without torchrun."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def label(self) -> str:
        """What the bar of a rank that has its share of the work says after its title."""
        return f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""

    def barrier(self) -> None:
        """Wait for all ranks without keeping a GPU busy."""
        if self.world_size > 1:
            dist.barrier(group=_waiting_group)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on every rank. Values are sent through the CPU."""
        if self.world_size == 1:
            return [value]
        gathered: list[T] = [value] * self.world_size
        dist.all_gather_object(gathered, value, group=_waiting_group)
        return gathered

    def add(self, name: str, number: int) -> int:
        """Add to a number that all ranks share, without waiting for them. Returns its value, 0 at first."""
        return int(_numbers.add(f"mtptrain/{name}", number))

    def share(self, name: str, items: Sequence[T]) -> Iterator[T]:
        """Yields items that no other rank gets, each once this rank asks for it, so that none waits long for another.

        A program may share each name once.
        """
        if self.world_size == 1:
            yield from items
            return
        while (index := self.add(name, 1) - 1) < len(items):
            yield items[index]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks in place and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


class StopSignal:
    """Records SIGTERM and SIGUSR1, so that all ranks can check together whether any of them has received one."""

    def __init__(self, ranks: Ranks) -> None:
        self._received = 0
        self._has_others = ranks.world_size > 1
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received = number

    def agreed(self) -> signal.Signals | None:
        """Return a signal that some rank received, or None; the same on all ranks. All ranks must call it together."""
        received = torch.tensor([self._received])
        if self._has_others:  # on the CPU, so that it does not wait for work queued on the GPU
            dist.all_reduce(received, dist.ReduceOp.MAX, group=_waiting_group)
        return signal.Signals(int(received)) if received else None


def init_ranks(timeout_hours: float) -> Ranks:
    """Join the process groups if torchrun started several ranks, which wait so long for each other in all groups."""
    global _waiting_group, _numbers
    ranks = Ranks(
        int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    )
    is_on_gpu = ranks.device.type == "cuda"
    if is_on_gpu and ranks.local_rank >= (num_gpus := torch.cuda.device_count()):
        raise UserError(
            f"--nproc-per-node: must be at most {num_gpus}, the number of GPUs that this process sees, but LOCAL_RANK "
            f"is {ranks.local_rank}; start fewer ranks"
        )
    if is_on_gpu:
        torch.cuda.set_device(ranks.device)
    if ranks.world_size > 1 and not dist.is_initialized():
        timeout = timedelta(hours=timeout_hours)
        # Groups created without a timeout, such as DeepSpeed's, would have torch's of 10 minutes with NCCL.
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(distributed_c10d, name, timeout)
        dist.init_process_group("nccl" if is_on_gpu else "gloo", timeout=timeout)
        if not is_on_gpu:
            close_at_exit()
        _waiting_group = dist.new_group(backend="gloo", timeout=timeout)
        close_at_exit(_waiting_group)
    # Nothing public returns the store of all ranks.
    _numbers = distributed_c10d._get_default_store() if ranks.world_size > 1 else HashStore()
    return ranks


def cpu_ranks(num_ranks: int, weights_bytes: int) -> int:
    """Returns how many ranks a program should become on this machine's CPU: the setting `cpu_ranks`, if it is not 0.

    Every rank holds a copy of the target's weights. All copies together may take half of the memory that is available.
    """
    if num_ranks:
        return num_ranks
    memory_bytes = min(psutil.virtual_memory().available, _container_limit("memory.max"))
    return max(1, int(min(_cores(), memory_bytes // (2 * max(1, weights_bytes)))))


def _cores() -> int:
    return max(1, int(min(len(os.sched_getaffinity(0)), _container_limit("cpu.max"))))


def _container_limit(name: str) -> float:
    """Returns the number of CPUs (`cpu.max`) or bytes (`memory.max`) that this container may use; infinite if all.

    A process in a container sees all the CPUs and memory of the host. The files are those of cgroups 2.
    """
    try:
        limit, *period = (CGROUP / name).read_text().split()
    except OSError:
        return math.inf
    return math.inf if limit == "max" else int(limit) / int(period[0] if period else 1)


def is_alone_on_cpu() -> bool:
    """Returns whether this process runs on a CPU and is not one of several ranks (RANK is not set)."""
    return "RANK" not in os.environ and not torch.cuda.is_available()


def become_ranks(num_ranks: int) -> None:
    """Go on as `num_ranks` forked copies of this process, the ranks, each with its share of the CPU's threads.

    The ranks return. The process that called this waits for them, then exits as they do. It must not have computed
    anything with torch yet, whose threads a fork does not copy. Does nothing for one rank, on a GPU, or in a process
    that torchrun or another program has made a rank. Unlike torchrun, this shows nothing but what the ranks print.
    """
    if num_ranks == 1 or not is_alone_on_cpu():
        return
    of_all = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", FORKED), str(num_ranks))
    of_all |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    threads = max(1, _cores() // num_ranks)
    sys.stdout.flush()
    ranks: dict[int, int] = {}  # by process id
    for rank in range(num_ranks):
        if (process := os.fork()) == 0:
            os.environ |= of_all | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            torch.set_num_threads(threads)
            return
        ranks[process] = rank
    sys.exit(_wait_for(ranks))


def _wait_for(ranks: dict[int, int]) -> int:
    """Waits for processes, given as their ranks by process id; if one fails, ends the others. Returns an exit code."""

    def terminate(*_: object) -> None:
        for process in ranks:
            os.kill(process, signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks get Ctrl-C too, and say what they keep
    signal.signal(signal.SIGTERM, terminate)
    num_ranks, code = len(ranks), 0  # that of the first rank that fails
    while ranks:
        process, status = os.wait()
        rank, ended = ranks.pop(process), os.waitstatus_to_exitcode(status)
        if ended == 0 or code:
            continue
        code = ended
        terminate()  # the others would wait for it
        if ended == -signal.SIGKILL:
            print(
                f"rank {rank}: must run to the end, but was killed, perhaps for want of memory; start fewer ranks with "
                f"cpu_ranks={max(1, num_ranks // 2)}",
                file=sys.stderr,
            )
    return code if code >= 0 else 128 - code


def close_at_exit(group: dist.ProcessGroup | None = None) -> None:
    """Destroy a group, or the default group if None, before the interpreter ends.

    Otherwise gloo's threads may abort the process at exit (right after a collective, 3 of 8 runs with two ranks ended
    in SIGABRT), and NCCL's group of one process ends it with a warning.
    """
    if not _to_close:
        atexit.register(close_groups)
    _to_close.append(group)


_to_close: list[dist.ProcessGroup | None] = []


def close_groups() -> None:
    """Destroy what `close_at_exit` was given. A forked process that ends by `os._exit` must call this before."""
    while _to_close:
        group = _to_close.pop()
        if dist.is_initialized():  # else all groups are destroyed already
            dist.destroy_process_group(group)


def prepare_single_process() -> None:
    """Set the variables of torchrun in a process started without it. If they are missing, DeepSpeed looks for MPI."""
    for name, value in _SINGLE_PROCESS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(free_port()))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
