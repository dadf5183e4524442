"""Extracts hidden states inside vLLM's own Python, for `hidden_states/extraction/vllm_streams.py`.

    python vllm_worker.py < windows > answers

This file imports nothing from mtptrain, whose dependencies are not installed there. Every line is JSON. The first line
describes the engine. Each further line is a window of prompts with the files to write, and is answered with a line once
the files are written.

EOF on stdin means that the parent died or is done: the engine and its workers then end at once, even during startup or
a window.
"""

import json
import multiprocessing
import os
import select
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a separate process would import vLLM again
# By default a CPU engine binds to cores that other programs may be using.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# A forked worker inherits locks that other threads hold, and hangs on them. `vllm serve` and CPU engines spawn their
# workers too, so only one start method needs tests.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector
from vllm.platforms import current_platform

Engine = dict[str, Any]


class HiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Extends vLLM's connector to run on CPUs, free blocks at fixed steps and report failed writes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failures: list[BaseException] = []

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        if self._kv_cache.device.type == "cuda":
            super()._submit_async_write(pending)
            self._req_copy_events[pending.req_id] = _SecondQuery(self._req_copy_events[pending.req_id])
            return
        blocks = torch.tensor(pending.block_ids)
        states = (  # [S, L, H]
            self._kv_cache.transpose(1, 2).index_select(0, blocks).flatten(0, 1)[: len(pending.token_ids)]
        )
        save_file({"hidden_states": states, "token_ids": pending.token_ids}, pending.filename)
        if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = _Done()

    def _on_write_done(self, req_id: str, future: "Future[None]") -> None:
        if error := future.exception():
            self._failures.append(error)
        self._req_futures.pop(req_id, None)

    def finish_writing(self) -> None:
        """Wait until all files are written, and raise the error of a write that failed."""
        for future in list(self._req_futures.values()):
            future.result()
        if self._failures:
            raise self._failures[0]


class _Done:
    """Replaces the event of a copy that is already done."""

    def query(self) -> bool:
        return True


class _SecondQuery:
    """Replaces the event of a copy, and reports the copy as done exactly one step after it began.

    The base class frees a prompt's blocks as soon as it sees that they have been copied. Timing would then determine
    the size of the next batch, and thereby the bits of its states. The copy overlaps with the forward in between.
    """

    def __init__(self, event: Any) -> None:
        self._event = event
        self._was_asked = False

    def query(self) -> bool:
        if self._was_asked:
            self._event.synchronize()
            return True
        self._was_asked = True
        return False


def answer_windows() -> None:
    """Extract one window after another. Everything that vLLM prints goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    llm = build_extractor(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        window = json.loads(line)
        extract(llm, window["prompts"], window["paths"])
        print("{}", file=answers, flush=True)


def end_with_input(descriptor: int) -> None:
    """Start a thread that kills the engine's workers and ends this process when the other end of a pipe is closed.

    The thread polls and never reads, because a thread that blocks on reading stdin holds stdin's lock. A forked worker
    first closes its copy of stdin and would wait for that lock forever.
    """
    poller = select.poll()
    poller.register(descriptor, 0)  # a hang-up is always reported

    def wait() -> None:
        poller.poll()
        for worker in multiprocessing.active_children():
            worker.kill()  # a worker that is still starting would not notice that this process ends
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def build_extractor(engine: Engine) -> Any:
    """Returns an engine that writes a file for every prompt: `hidden_states` [S, L, H] and `token_ids` [S].

    Splitting long prompts into chunks is safe here, because each chunk adds its states to the cache. Compilation and
    asynchronous scheduling are off: kernels or batches that depend on timing would give different bits in another run.
    Prefix caching is off too: a cached prefix would not be computed, and its states would be missing.
    """
    transfer = {
        "kv_connector": HiddenStatesConnector.__name__,
        "kv_connector_module_path": Path(__file__).stem,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"allow_custom_save_path": True, "use_synchronization_lock": False},
    }
    streams = {"hf_config": {"eagle_aux_hidden_state_layer_ids": engine["layer_ids"]}}
    llm = LLM(
        model=engine["target_dir"],
        dtype=engine["dtype"],
        max_model_len=engine["max_model_len"],
        tensor_parallel_size=engine["tensor_parallel_size"],
        skip_tokenizer_init=True,
        trust_remote_code=False,
        enforce_eager=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": streams,
        },
        kv_transfer_config=transfer,
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
        **engine["cpu_limits" if current_platform.is_cpu() else "gpu_limits"],
    )
    assert not llm.llm_engine.vllm_config.use_v2_model_runner  # see ENVIRONMENT in extraction/vllm_streams.py
    return llm


def extract(llm: Any, prompts: list[list[int]], paths: list[str]) -> None:
    """Write the file of every prompt, and wait until the engine is idle."""
    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            extra_args={"kv_transfer_params": {"hidden_states_path": path}},
        )
        for path in paths
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():  # the last files are written in the step after their requests finished
        llm.llm_engine.step()
    llm.collective_rpc(finish_writing)
    cached = [index for index, output in enumerate(outputs) if output.num_cached_tokens]
    if cached:
        raise RuntimeError(
            f"prompts must be run from their first token, but part of prompt {cached[0]} came from the prefix cache"
        )


def finish_writing(worker: Any) -> None:
    get_kv_transfer_group().finish_writing()


if __name__ == "__main__":
    end_with_input(sys.stdin.fileno())
    answer_windows()
