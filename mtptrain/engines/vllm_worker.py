"""What runs inside vLLM's own Python: builds the engines of a job one after the other and writes what they answered and counted.

    python vllm_worker.py job.json result.json

It imports nothing of mtptrain, whose dependencies are not installed there. The import of vLLM, by far the slowest part, is paid once
for all engines. `mtptrain/engines/vllm.py` writes the job and reads the result: a list of engines, of `kind` `generate` or
`hidden_states`, and the version of vLLM with a list of what each engine gave, `{"error": text}` where it failed.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process of its own would import vLLM again
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a CPU engine else binds to cores that others may be using

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams, __version__
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector

PROGRESS = "vllm_worker:"
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
MIN_BATCHED_TOKENS = 4096
LAST_STEPS = 4

Engine = dict[str, Any]


class HiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """vLLM's connector without CUDA streams, so that it works on every device: a file is written whole, then named."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)  # [blocks]
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()[: len(pending.token_ids)]  # [T]
        assert self._kv_cache is not None
        states = self._kv_cache.transpose(1, 2).flatten(0, 1)[slots.to(self._kv_cache.device)]  # [T, L, H]
        temporary = pending.filename + ".tmp"
        save_file({"hidden_states": states.cpu().contiguous(), "token_ids": pending.token_ids}, temporary)
        os.replace(temporary, pending.filename)
        self._req_copy_events[pending.req_id] = _Done()


class _Done:
    """Stands where the base class keeps the event of an unfinished copy."""

    def query(self) -> bool:
        return True


def main(job_path: str, result_path: str) -> None:
    engines = json.loads(Path(job_path).read_text())
    results = []
    for number, engine in enumerate(engines, 1):
        start = time.perf_counter()
        results.append(run_one({"generate": generate, "hidden_states": extract_hidden_states}[engine["kind"]], engine))
        outcome = "failed" if "error" in results[-1] else f"{len(engine['prompts'])} prompts"
        progress(f"{number}/{len(engines)} {engine['name']}: {outcome}, {time.perf_counter() - start:.1f} s")
    Path(result_path).write_text(json.dumps({"version": __version__, "results": results}))


def progress(text: str) -> None:
    print(PROGRESS, text, file=sys.stderr, flush=True)


def run_one(run: Callable[[Engine], dict[str, Any]], engine: Engine) -> dict[str, Any]:
    """What an engine gave, or its error; nothing of it is left behind."""
    try:
        with few_collections():
            return run(engine)
    except Exception as error:  # whatever a third party's engine raises belongs to this engine alone
        return {"error": "".join(traceback.format_exception(error))}
    finally:
        with few_collections():
            cleanup_dist_env_and_memory()
        gc.collect()


@contextmanager
def few_collections() -> Iterator[None]:
    """vLLM collects garbage ten times per engine, a quarter of a second each over all that it imports: most of a small engine's
    start and end.
    """
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    try:
        yield
    finally:
        gc.collect = collect


def build(engine: Engine, **settings: Any) -> Any:
    """An engine for token ids, without graphs or compilation.

    Prompts are not cut into chunks: at the end of each chunk vLLM 0.32 gives the head the prompt's last token in place of the next
    one (`prepare_next_token_ids_padded` of its first runner), and what the head drafts then depends on how requests fell together.
    """
    given = {name: engine[name] for name in ("kv_cache_memory_bytes", "hf_overrides", "max_num_seqs") if engine.get(name)}
    return LLM(
        model=engine["target_dir"],
        dtype=engine["dtype"],
        max_model_len=engine["max_model_len"],
        max_num_batched_tokens=max(engine["max_model_len"], MIN_BATCHED_TOKENS),
        enable_chunked_prefill=False,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        **given,
        **settings,
    )


def generate(engine: Engine) -> dict[str, Any]:
    """Greedy answers to all prompts, handed to the engine at once, and the differences of its counters."""
    speculative = engine["speculative_config"]
    settings = {} if speculative is None else {"speculative_config": speculative, "per_request_spec_decode_metrics": "detailed"}
    llm = build(engine, **settings)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=engine["max_new_tokens"],
        ignore_eos=True,
        stop_token_ids=engine["stop_token_ids"],
        detokenize=False,
    )
    before = read_counters(llm)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in engine["prompts"]], sampling, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    accepted = [answer.spec_decode_metrics and answer.spec_decode_metrics.per_step_accepted for answer in answers]
    return {
        "tokens": [list(answer.token_ids) for answer in answers],
        "counters": difference(before, read_counters(llm)),
        "accepted_by_round": None if speculative is None else [rounds or [] for rounds in accepted],
    }


def read_counters(llm: Any) -> dict[str, Any]:
    """vLLM's counters of drafting, numbers and a list; empty for an engine without drafts."""
    metrics = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    found = {name: metrics[name] for name in COUNTERS if name in metrics}
    return {name: metric.values if hasattr(metric, "values") else metric.value for name, metric in found.items()}


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Counters live as long as the process, whatever engines come and go."""
    return {
        name: [b - a for a, b in zip(before[name], value, strict=True)] if isinstance(value, list) else value - before[name]
        for name, value in after.items()
    }


def extract_hidden_states(engine: Engine) -> dict[str, Any]:
    """Residual streams of prompts, one safetensors file each: `hidden_states` [T, L, H] and `token_ids` [T]."""
    transfer = {
        "kv_connector": HiddenStatesConnector.__name__,
        "kv_connector_module_path": Path(__file__).stem,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"allow_custom_save_path": True, "use_synchronization_lock": False},
    }
    streams = {"hf_config": {"eagle_aux_hidden_state_layer_ids": engine["layer_ids"]}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": streams}
    # A prefix that is taken from the cache is not run, and would have no states.
    llm = build(engine, speculative_config=speculative, kv_transfer_config=transfer, enable_prefix_caching=False)
    paths = [str(Path(engine["output_dir"]) / f"prompt_{index:06d}.safetensors") for index in range(len(engine["prompts"]))]
    sampling = [
        SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": {"hidden_states_path": path}}
        )
        for path in paths
    ]
    llm.generate([{"prompt_token_ids": prompt} for prompt in engine["prompts"]], sampling, use_tqdm=False)
    for _ in range(LAST_STEPS):  # the files of the last requests are written in the step after their answer
        llm.llm_engine.step()
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        raise RuntimeError(f"every prompt must have its file of hidden states, but {missing[0]} was not written")
    return {"paths": paths}


if __name__ == "__main__":
    main(*sys.argv[1:])
