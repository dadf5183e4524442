"""Finds the GPUs of this machine, and the choice of config group `hardware` that fits it, for `hardware=auto`.

`recipes/hardware/auto.yaml` reads the fields of `this_machine()` as `${this_machine:FIELD}`.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from mtptrain.utils.startup import print_once

GPU_DEVICES = ("nvidia[0-9]*", "nvhost-ctrl-gpu", "kfd", "dxg")
"""Names in /dev of GPUs that torch may be able to use: Nvidia's, Jetson's, AMD's, and those of Windows under Linux."""
LARGE_GB = 70
"""Memory from which several GPUs get the batches of `h100_8`."""


@dataclass(frozen=True)
class Machine:
    """Describes the machine that `hardware=auto` follows."""

    hardware: str
    """The name of a file in `recipes/hardware/`."""
    reason: str
    """Why it is this file."""
    num_gpus: int
    """Number of GPUs; 1 on a machine without a GPU, because `planner.num_gpus` counts its CPU as one."""
    memory_gb: int
    """Memory of the smallest GPU, or of the machine if it has no GPU, in units of 10**9 bytes."""


def has_gpu() -> bool:
    """Returns whether torch can use a GPU. A machine without any is recognised without importing torch."""
    if "torch" not in sys.modules and sys.platform == "linux":
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if is_hidden or not any(True for pattern in GPU_DEVICES for _ in Path("/dev").glob(pattern)):
            return False
    import torch

    return torch.cuda.is_available()


def this_machine() -> Machine:
    """Returns the machine on which this process runs."""
    if not has_gpu():
        return Machine("cpu", "this machine has no GPU", 1, psutil.virtual_memory().total // 10**9)
    import torch

    count = torch.cuda.device_count()
    memory_gb = min(torch.cuda.get_device_properties(index).total_memory for index in range(count)) // 10**9
    hardware = "h100_8" if count > 1 and memory_gb >= LARGE_GB else "gpu_1"
    found = "1 GPU" if count == 1 else f"{count} GPUs"
    return Machine(hardware, f"this machine has {found} of {memory_gb} GB", count, memory_gb)


def announce_hardware(choice: str | None) -> None:
    """Print what `hardware=auto` stands for, and why, once for all ranks and for all stages of a run."""
    if choice == "auto":
        machine = this_machine()
        line = f"hardware: {machine.hardware}, because {machine.reason}; hardware=NAME chooses another"
        print_once(line, "MTPTRAIN_HARDWARE")
