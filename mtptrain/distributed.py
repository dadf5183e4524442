"""Ranks and devices: one place that reads torchrun's environment."""

import os
import socket
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_SINGLE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started; rank 0 of 1 without torchrun."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.world_size == 1:
            return [value]
        gathered: list[T] = [value] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor


def init_ranks() -> Ranks:
    """Join the process group of torchrun, where it started more than one rank."""
    ranks = Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0")))
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.world_size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if ranks.device.type == "cuda" else "gloo")
    return ranks


def prepare_single_process() -> None:
    """Set torchrun's variables for a process started without it: DeepSpeed looks for MPI where they are missing."""
    for name, value in _SINGLE_PROCESS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(_free_port()))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
