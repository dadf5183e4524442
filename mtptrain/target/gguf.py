"""Keeps a dequantised copy of a GGUF file as a model directory, which all other code then reads.

The copy is in `gguf/` inside the cache directory: `$MTPTRAIN_CACHE`, or else `mtptrain` in `$XDG_CACHE_HOME` or
`~/.cache`. It may be deleted at any time.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from transformers import GenerationConfig, PreTrainedConfig

from mtptrain.target.gguf_header import GGUFHeader, read_header
from mtptrain.target.gguf_model import model_config, model_tensor, tensor_names
from mtptrain.target.gguf_tokenizer import check_tokenizer, special_token_ids, write_tokenizer
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import publish, sync

SUFFIX = ".gguf"
FORMAT = 2
"""Raised when the same GGUF file would be translated into another model directory."""

_HEAD_BYTES, _NUM_SAMPLES, _SAMPLE_BYTES = 2**25, 4096, 4096
_MARGIN_BYTES = 2**26
"""Room for the tokenizer and the configs."""


def is_gguf(path: str) -> bool:
    """Returns whether a target's path is that of a file. Those that Ollama keeps have no suffix."""
    return not Path(path).is_dir() and (path.lower().endswith(SUFFIX) or Path(path).is_file())


def gguf_of(path: str, given: str | None) -> Path | None:
    """Returns the target's GGUF file: that of `target.gguf`, or else of `target.path`; None if neither names one.

    Raises:
        UserError: they name two files.
    """
    own = path if path and is_gguf(path) else None
    if given and own and Path(given).resolve() != Path(own).resolve():
        raise UserError(
            f"target.gguf: must be left out if target.path is a GGUF file, {own}, but is {given}; leave one of them out"
        )
    chosen = given or own
    return None if chosen is None else Path(chosen)


def dequantised_dir(path: Path, setting: str) -> Path:
    """Returns a model directory with the weights of a GGUF file in fp32, which is written when it is first needed.

    Args:
        path: the GGUF file.
        setting: name of the setting that holds the path, for error messages.

    Raises:
        OSError: the file cannot be read, or the copy cannot be written.
        UserError: the file does not exist, is damaged, is not one that this program understands, or its copy does not
            fit the disk, which must also have locks.
    """
    if not path.is_file():
        raise UserError(
            f"{setting}: must be an existing file if it ends in {SUFFIX}, but {str(path)!r} does not exist; correct "
            "the path"
        )
    directory = cache_dir() / "gguf" / f"{path.stem}-{fingerprint(path)[:12]}"
    if directory.is_dir():
        return directory
    header = read_header(path)
    config = model_config(header)
    check_tokenizer(header)
    names = tensor_names(header, config)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(directory.name + ".lock")):
        if not directory.is_dir():  # otherwise another rank has written it
            _write_copy(directory, header, config, names)
    return directory


def cache_dir() -> Path:
    if own := os.environ.get("MTPTRAIN_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtptrain"


def fingerprint(path: Path) -> str:
    """Returns a hash of `FORMAT`, the size of a file, its first 32 MiB, and 4,096 samples of 4 KiB from all of it.

    The first bytes hold all settings and the tokenizer. The samples are fast to read, and requantising or fine-tuning
    the model changes them.
    """
    num_bytes = path.stat().st_size
    digest = hashlib.sha256(f"{FORMAT} {num_bytes}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for i in range(_NUM_SAMPLES):
            file.seek(num_bytes * i // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process is in this block with the same path. A process that dies leaves the block.

    Ranks of a run come here at the same time, so unlike a program's own folder, the cache must have locks.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"{path.parent}: must be on a file system with locks, but this one has none ({error.strerror}); set "
                "MTPTRAIN_CACHE to a directory on another"
            ) from error
        yield


def _write_copy(directory: Path, header: GGUFHeader, config: PreTrainedConfig, names: dict[str, str]) -> None:
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    weight_bytes = sum(4 * math.prod(header.tensors[name].shape) for name in names)
    free_bytes = shutil.disk_usage(directory.parent).free
    if weight_bytes + _MARGIN_BYTES > free_bytes:
        raise UserError(
            f"{directory.parent}: {(weight_bytes + _MARGIN_BYTES) / 1e9:,.1f} GB must be free for the dequantised copy "
            f"of {header.path}, but {free_bytes / 1e9:,.1f} GB are; free some, or set MTPTRAIN_CACHE to a directory on "
            "a larger disk"
        )
    try:
        temporary.mkdir()
        tokens = special_token_ids(header)
        config.update(tokens)
        config.save_pretrained(temporary)
        GenerationConfig(**tokens).save_pretrained(temporary)
        write_tokenizer(header, temporary)
        print(f"{header.path}: writing a copy in fp32, {weight_bytes / 1e9:,.2f} GB, to {directory}", flush=True)
        write_weights(temporary / "model.safetensors", header, config, names)
        for file in temporary.iterdir():
            sync(file)
        publish(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_weights(path: Path, header: GGUFHeader, config: PreTrainedConfig, names: dict[str, str]) -> None:
    """Write all tensors to one safetensors file, with only one of them in memory at a time.

    Source of the format: https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, translated in names.items():
        shape = header.tensors[name].shape
        start, end = end, end + 4 * math.prod(shape)
        entries[translated] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                file.write(np.ascontiguousarray(model_tensor(header, name, config), np.float32).data)
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write, unlike a failed opening, names no file
        raise
