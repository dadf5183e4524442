"""Decodes greedily with one vLLM engine after another, inside vLLM's own Python, because importing vLLM is slow.

    python vllm_jobs_worker.py FOLDER_OF_THE_EXTRACTING_WORKER job.json result.json

The job is a list of engines. The result holds vLLM's version and, for each engine, its output or `{"error": text}`.
"""

import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.append(sys.argv[1])

from vllm_worker import LLM, SamplingParams  # type: ignore[import-not-found]  # isort: skip
from vllm import __version__  # isort: skip
from vllm.distributed import cleanup_dist_env_and_memory  # isort: skip


def run_and_clean_up(engine: dict[str, Any]) -> dict[str, Any]:
    """Returns an engine's result or error, and frees the engine's memory."""
    try:
        return generate(engine)
    except Exception as error:  # third-party code may raise anything, and the next engine must still run
        return {"error": "".join(traceback.format_exception(error))}
    finally:
        cleanup_dist_env_and_memory()
        gc.collect()


def generate(engine: dict[str, Any]) -> dict[str, Any]:
    """Returns greedy answers to all prompts at once, and how much the counters grew: see `EXACT` of the vLLM engine."""
    llm = LLM(
        model=engine["target_dir"],
        **{name: engine[name] for name in ("dtype", "max_model_len", "kv_cache_memory_bytes", "speculative_config")},
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_batched_tokens=max(engine["max_model_len"], 4096),
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
    )
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
    # The counters go on where those of the engine before ended.
    counters = [after - number for number, after in zip(before, read_counters(llm), strict=True)]
    return {
        "tokens": [list(answer.token_ids) for answer in answers],
        "counters": counters,
        "accepted_by_round": [rounds or [] for rounds in accepted],
    }


def read_counters(llm: Any) -> list[int]:
    """Returns vLLM's counters of rounds, of drafts, and of drafts accepted at each position."""
    metrics = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    totals = (metrics[name].value for name in ("num_drafts", "num_draft_tokens"))
    return [*totals, *metrics["num_accepted_tokens_per_pos"].values]


if __name__ == "__main__":
    engines = json.loads(Path(sys.argv[2]).read_text())
    results = []
    for number, engine in enumerate(engines, 1):
        start = time.perf_counter()
        results.append(run_and_clean_up(engine))
        seconds = time.perf_counter() - start
        print(
            f"vllm_jobs_worker: {number}/{len(engines)} {engine['name']}: {seconds:.1f} s", file=sys.stderr, flush=True
        )
    Path(sys.argv[3]).write_text(json.dumps({"version": __version__, "results": results}))
