"""Writing safetensors files."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from mtptrain.atomic_files import publish


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file whole or not at all, as `atomic_files.publish` does."""
    temporary = path.with_name(path.name + ".tmp")
    write_tensors(temporary, tensors)
    publish(temporary, path)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file that whoever shares the run may read, as the umask says: safetensors makes it the owner's alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(mode)
