"""Runs many vLLM engines one after another in one process, which starts vLLM once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtptrain.engines.process import run_worker
from mtptrain.engines.requests import EngineCounts, EngineRun
from mtptrain.engines.vllm.client import WORKER
from tests.serving.cases import CONTEXT_TOKENS, EOS, MAX_NEW_TOKENS, PROMPTS

KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class JobRun(EngineRun):
    """The output of an engine, or its error."""

    error: str = ""


def job_of(name: str, target_dir: Path, speculative_config: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Returns a job of `vllm_jobs_worker.py` that decodes all prompts greedily."""
    # If a request comes within 2 * K tokens of the engine's context, vLLM's drafts become useless for all requests.
    sizes = {"max_new_tokens": MAX_NEW_TOKENS, "max_model_len": CONTEXT_TOKENS, "kv_cache_memory_bytes": KV_CACHE_BYTES}
    asked = {"prompts": PROMPTS, "stop_token_ids": [EOS], "speculative_config": speculative_config}
    return {"name": name, "target_dir": str(target_dir), "dtype": dtype, **sizes, **asked}


def generate(jobs: Sequence[dict[str, Any]], python: Path) -> list[JobRun]:
    """Returns the results of jobs in order. An engine's own error is returned in its result."""
    worker = Path(__file__).with_name("vllm_jobs_worker.py")
    answer = run_worker(python, worker, str(WORKER.parent), jobs, "vLLM")
    return [run_of(answer["version"], result) for result in answer["results"]]


def run_of(version: str, result: dict[str, Any]) -> JobRun:
    if "error" in result:
        return JobRun(version, [], None, None, result["error"])
    rounds, drafted, *accepted_at = result["counters"]
    return JobRun(version, result["tokens"], EngineCounts(rounds, drafted, accepted_at), result["accepted_by_round"])
