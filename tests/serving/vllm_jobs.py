"""Runs many vLLM engines one after another in one process, which starts vLLM once."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtptrain.engines.process import run_worker
from mtptrain.engines.requests import EngineCounts, EngineRun
from mtptrain.engines.vllm.client import WORKER


@dataclass(frozen=True)
class Job:
    """Greedy decoding by one engine."""

    name: str
    target_dir: str
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    max_model_len: int
    """The engine's context length. If a request comes within 2 * num_speculative_tokens tokens of it, vLLM's drafts
    become useless for all requests."""
    kv_cache_memory_bytes: int
    stop_token_ids: Sequence[int]
    speculative_config: dict[str, Any] | None = None
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    device_type: str = "cpu"


@dataclass(frozen=True)
class JobRun(EngineRun):
    """The output of an engine, or its error."""

    error: str = ""


def generate(jobs: Sequence[Job], python: Path) -> list[JobRun]:
    """Returns the results of jobs in order. An engine's own error is returned in its result."""
    worker = Path(__file__).with_name("vllm_jobs_worker.py")
    answer = run_worker(python, worker, str(WORKER.parent), [asdict(job) for job in jobs], "vLLM")
    return [run_of(answer["version"], result) for result in answer["results"]]


def run_of(version: str, result: dict[str, Any]) -> JobRun:
    if "error" in result:
        return JobRun(version, [], None, None, result["error"])
    counters, names = result["counters"], ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos")
    counts = EngineCounts(*(counters[name] for name in names)) if counters else None
    return JobRun(version, result["tokens"], counts, result["accepted_by_round"])
