"""Adds a target's files to the directory of an exported head, for engines that load both from one checkpoint."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from mtptrain.target.hub import INDEX, weight_files
from mtptrain.utils.files import save_tensors, tensor_shapes, write_json

COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of the target's tokenizer and generation settings."""


def add_target_files(
    directory: Path, target_dir: Path, head_file: str, is_replaced: Callable[[str], bool] = lambda name: False
) -> None:
    """Add the target's weights, its tokenizer, and the index of all tensors to a directory with a head's tensors.

    Weight files are hard-linked if possible. A file with tensors that the head replaces, which `is_replaced` tells by
    their names, is rewritten without them.
    """
    names = []
    for path in weight_files(target_dir):
        # Engines would load model.safetensors instead of the index, and the head's file must not be overwritten.
        name = {"model.safetensors": "target.safetensors", head_file: f"target-{head_file}"}.get(path.name, path.name)
        is_left_out = [is_replaced(tensor) for tensor in tensor_shapes(path)]
        if all(is_left_out):
            continue
        names.append(name)
        if any(is_left_out):
            with safe_open(path, framework="pt") as file:
                kept = {each: file.get_tensor(each) for each in tensor_shapes(path) if not is_replaced(each)}
            save_tensors(directory / name, kept)
        else:
            try:
                os.link(path.resolve(), directory / name)
            except OSError:  # another file system, or another user's files
                shutil.copyfile(path, directory / name)
    for pattern in COPIED:
        for path in target_dir.glob(pattern):
            if path.name != INDEX and not (directory / path.name).exists():  # such as the head's config.json
                shutil.copyfile(path, directory / path.name)
    names.append(head_file)
    weight_map = {tensor: name for name in names for tensor in tensor_shapes(directory / name)}
    total_bytes = sum(tensors_bytes(directory / name) for name in names)
    write_json(directory / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def tensors_bytes(path: Path) -> int:
    """Returns the bytes of a safetensors file's tensors, which follow the header and the 8 bytes of its length."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
