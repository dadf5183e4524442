"""Extracts residual streams with vLLM: each rank starts an engine, which writes a file for each prompt of a shard."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from mtptrain.config import Backend, HiddenStatesConfig
from mtptrain.engines.process import SHOWN_LINES
from mtptrain.engines.vllm.client import WORKER, find_python
from mtptrain.hidden_states.extraction.backend import choose_backend
from mtptrain.target.families import head_dim, key_heads, read_target_config
from mtptrain.utils.errors import UserError
from mtptrain.utils.startup import without_own_settings

CPU_BATCH_TOKENS = 4096
"""Maximum number of tokens in one forward pass on a CPU. Larger batches do not fit into the CPU's caches."""
CPU_BLOCK_TOKENS = 128
"""Number of tokens in a block of vLLM's KV cache on a CPU."""
MAX_SEQS, CPU_MAX_SEQS = 256, 64
"""Maximum number of prompts in one forward pass, on a GPU and on a CPU. vLLM's maximum of tokens must not be lower."""
LOG = "vllm.log"
SHUTDOWN_TIMEOUT_S = 10.0
"""Seconds that an engine gets to exit before it is killed. Only one that is still importing vLLM takes this long, and
has no workers yet."""
FULL_BYTES = 2**16
"""A disk with fewer free bytes counts as full."""
ENVIRONMENT = {
    # The last bits of matrix products depend on the number of threads. More cores take more ranks.
    "OMP_NUM_THREADS": "1",
    # A scheduler in another process would start before all prompts arrive, so that batches would depend on timing.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A prompt may fill the target's context; the token that is generated after it is never read.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # On GPUs vLLM 0.32 prefers its second model runner, which extracts with different code. The worker's connector and
    # the reproducibility of the states are tested with the first one.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Environment variables of every engine, which override the user's."""


class VllmStreams:
    """Extracts residual streams with vLLM, which runs under its own Python inside this context manager.

    The engine runs one shard at a time, so that the bits of the states depend only on the shard, and the next one while
    the files of the previous one are read.
    """

    def __init__(
        self,
        target_dir: Path,
        layers: tuple[int, ...],
        settings: HiddenStatesConfig,
        max_document_tokens: int,
        scratch_dir: Path,
        local_rank: int,
        python: str | None,
    ) -> None:
        """Check the settings. Entering the context starts the engine.

        Layer k is the stream after k decoder layers, and the last is the state before the final norm. The folder
        `scratch_dir` is for this rank only: it is created here and removed at the end. The engine uses the GPUs after
        those of the lower local ranks. `python` is vLLM's.
        """
        self.target_dir, self.layers, self.scratch_dir = target_dir, layers, scratch_dir
        target_config = read_target_config(target_dir)
        choose_backend(Backend.vllm, target_config)
        self._python = find_python(python, is_checked=True)
        self._environment = engine_environment(os.environ, local_rank, settings.tensor_parallel_size)
        self._layer_ids = sorted(set(layers))  # the engine's order
        self._columns = [self._layer_ids.index(layer) for layer in layers]
        self._engine = {
            "target_dir": str(target_dir),
            "layer_ids": self._layer_ids,
            **engine_limits(settings, target_config, len(self._layer_ids), max_document_tokens),
        }

    def __enter__(self) -> "VllmStreams":
        self.scratch_dir.mkdir(parents=True)
        with (self.scratch_dir / LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [self._python, WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
            )
        try:
            self._send(self._engine)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # ends the engine and its workers, once its process has imported vLLM
        try:
            self._process.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self.scratch_dir, ignore_errors=True)

    def extract(self, shards: Iterable[Sequence[NDArray[np.int32]]]) -> Iterator[Iterator[tuple[int, torch.Tensor]]]:
        """Yields what `Streams` says, on the CPU. The engine works one shard ahead: at most two shards have files."""
        sent: list[tuple[int, list[Path], Sequence[NDArray[np.int32]]]] = []  # at most the shard that the engine runs
        for number, prompts in enumerate(shards):
            paths = [self.scratch_dir / f"shard_{number:05d}_{index:06d}.safetensors" for index in range(len(prompts))]
            self._send({"prompts": [prompt.tolist() for prompt in prompts], "paths": list(map(str, paths))})
            if sent:
                yield self._read(*sent.pop())
            sent.append((number, paths, prompts))
        if sent:
            yield self._read(*sent.pop())

    def _read(
        self, shard: int, paths: Sequence[Path], prompts: Sequence[NDArray[np.int32]]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self._raise_failure()
        num_streams = len(self._layer_ids)
        for index, (path, prompt) in enumerate(zip(paths, prompts, strict=True)):
            tensors = load_file(path)
            path.unlink()
            states, ids = tensors["hidden_states"], tensors["token_ids"]  # [n, layers, H], [n]
            if states.shape[:2] != (len(prompt), num_streams) or not np.array_equal(ids.numpy(), prompt):
                raise UserError(
                    f"vLLM: document {index} of the {len(prompts)} in shard {shard} of this process must have "
                    f"{num_streams} states for each of its {len(prompt)} tokens, but has {states.shape[1]} for "
                    f"{len(states)}, perhaps of others; set hidden_states.backend=transformers, or use the version of "
                    "vLLM that mtptrain was tested with"
                )
            yield index, states if self._columns == list(range(num_streams)) else states[:, self._columns]

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        status = self._process.wait()
        lines = (self.scratch_dir / LOG).read_text(errors="replace").splitlines()
        if (
            any("No space left on device" in line for line in lines)
            or shutil.disk_usage(self.scratch_dir).free < FULL_BYTES
        ):
            raise OSError(
                errno.ENOSPC,
                "the disk of hidden_states.scratch_dir must hold the files of two shards, but is full; free some "
                "space, or set hidden_states.scratch_dir to a directory on a larger disk",
                str(self.scratch_dir),
            )
        raise UserError(
            f"vLLM: must extract hidden states of {self.target_dir}, but its process ended with status {status}; its "
            "last lines:\n" + "\n".join(lines[-SHOWN_LINES:])
        )


def engine_environment(environment: Mapping[str, str], local_rank: int, tensor_parallel_size: int) -> dict[str, str]:
    """Returns the environment of a rank's engine, with its GPUs and `ENVIRONMENT`, and without torchrun's variables."""
    own, ends = ("TORCHELASTIC_", "MASTER_"), ("RANK", "WORLD_SIZE")  # of torchrun
    given = without_own_settings(environment)
    kept = {name: value for name, value in given.items() if not (name.startswith(own) or name.endswith(ends))}
    devices = visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), local_rank, tensor_parallel_size)
    return {**kept, "CUDA_VISIBLE_DEVICES": devices, **ENVIRONMENT}


def visible_devices(visible: str | None, local_rank: int, tensor_parallel_size: int) -> str:
    """Returns CUDA_VISIBLE_DEVICES of the engine of a node's rank, from that of the rank itself.

    None shows all GPUs; an empty string, -1 and NoDevFiles hide them.
    """
    if visible is not None and visible.partition(",")[0] in ("", "-1", "NoDevFiles"):
        return visible
    end = (local_rank + 1) * tensor_parallel_size
    names = [str(index) for index in range(end)] if visible is None else visible.split(",")
    if len(names) < end:
        raise UserError(
            f"hidden_states.tensor_parallel_size: local rank {local_rank} must have {tensor_parallel_size} GPUs after "
            f"those of the lower ranks, {end} in all, but CUDA_VISIBLE_DEVICES={visible} has {len(names)}; start fewer "
            "ranks on a node, one for each engine"
        )
    return ",".join(names[end - tensor_parallel_size : end])


def engine_limits(
    settings: HiddenStatesConfig, target_config: PreTrainedConfig, num_streams: int, max_document_tokens: int
) -> dict[str, Any]:
    """Returns an engine's limits on context, batches and memory, on a GPU and on a CPU."""
    max_model_len = max_document_tokens + 1  # vLLM generates one token
    batch_tokens = min(max(settings.batch_tokens, CPU_MAX_SEQS), CPU_BATCH_TOKENS)
    itemsize = getattr(torch, settings.dtype.value).itemsize
    cache_bytes = cpu_cache_bytes(target_config, num_streams, itemsize, max_model_len, batch_tokens)
    return {
        "dtype": settings.dtype.value,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_model_len": max_model_len,
        "gpu_limits": {
            "max_num_seqs": MAX_SEQS,
            "max_num_batched_tokens": max(settings.batch_tokens, MAX_SEQS),
            "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        },
        "cpu_limits": {
            "max_num_seqs": CPU_MAX_SEQS,
            "max_num_batched_tokens": batch_tokens,
            "kv_cache_memory_bytes": settings.kv_cache_memory_bytes or cache_bytes,
        },
    }


def cpu_cache_bytes(
    target_config: PreTrainedConfig, num_streams: int, itemsize: int, max_model_len: int, batch_tokens: int
) -> int:
    """Returns the size in bytes of vLLM's CPU cache for two batches: one that runs and one whose states are written.

    Hidden states share a pool of blocks with keys and values. A block has a page in every layer, but states fill
    only one of its pages (`get_kv_cache_groups` in vLLM 0.32).
    """
    page_bytes = CPU_BLOCK_TOKENS * 2 * key_heads(target_config) * head_dim(target_config) * itemsize  # keys and values
    num_layers: int = target_config.num_hidden_layers
    state_bytes: int = num_streams * target_config.hidden_size * itemsize
    scale = -(-state_bytes // page_bytes)  # pages grow until one holds the states of a token
    block_tokens, page_bytes = CPU_BLOCK_TOKENS * scale, page_bytes * scale
    states_per_page = max(
        n for n in range(1, block_tokens + 1) if block_tokens % n == 0 and n * state_bytes <= page_bytes
    )
    tokens = 2 * (batch_tokens + max_model_len)
    num_blocks = tokens // block_tokens + tokens // states_per_page
    num_blocks += 2 * 2 * (CPU_MAX_SEQS + 1)  # the last, partly filled block of each kind for every prompt
    return num_blocks * page_bytes * num_layers
