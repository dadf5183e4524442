"""Decodes prompts with vLLM, in a process started here or on a running server, and reads vLLM's counters.

vLLM and training need different versions of torch and transformers. vLLM therefore has its own environment (`make
.venv-vllm/.installed`) and runs in its own process, as in production.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

WORKER = Path(__file__).with_name("vllm_worker.py")
DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
PROGRESS = "vllm_worker:"
"""The prefix of the worker's progress lines. Other lines are printed only after a failure."""
SHOWN_LINES = 30
"""Number of log lines that the error of a failed process shows."""
MAX_CONCURRENT_REQUESTS = 16
REQUEST_TIMEOUT_S = 600.0
SETTLED_AFTER_S = 0.3
"""Seconds after which unchanged counters are final."""

Counters = dict[tuple[str, int | None], int]
"""A server's counters, by name and draft position (None for counters without positions)."""
_SAMPLE = re.compile(r'^vllm:(\w+)_total(?:\{(?:.*?\bposition="(\d+)")?[^}]*\})? (\S+)$')


@dataclass(frozen=True)
class EngineCounts:
    """An engine's drafting counters, summed over all requests of a run."""

    rounds: int
    """Number of verified drafts, which vLLM calls num_drafts."""
    drafted: int
    accepted_at: list[int]
    """Number of rounds that accepted the draft at each position [K]."""

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted_at) / max(self.rounds, 1)


@dataclass(frozen=True)
class EngineRun:
    """An engine's output for a list of prompts."""

    version: str
    tokens: list[list[int]]
    """New tokens for each prompt, including the stop token."""
    counts: EngineCounts | None
    """None for an engine without drafts."""
    accepted_by_round: list[list[int]] | None
    """Number of accepted drafts in each round of each prompt; None if the engine does not report them."""
    error: str = ""
    """The engine's error, if it failed; everything else is then empty."""


@dataclass(frozen=True)
class GenerateJob:
    """Greedy decoding by one engine."""

    name: str
    """The engine's name in progress lines."""
    target_dir: str
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    max_model_len: int
    """The engine's context length. If a request comes within 2 * num_speculative_tokens tokens of it, vLLM's drafts
    become useless for all requests."""
    speculative_config: dict[str, Any] | None = None
    """vLLM's `--speculative-config`; None decodes without drafts."""
    hf_overrides: dict[str, Any] | None = None
    """Changes to the target's config that the engine needs."""
    stop_token_ids: Sequence[int] = ()
    dtype: str = "float32"
    max_num_seqs: int = 32
    """Maximum number of requests decoded at once."""
    kv_cache_memory_bytes: int | None = None
    """None lets the engine choose; it then takes nearly all memory."""
    tensor_parallel_size: int = 1
    """Number of GPUs that the engine uses."""
    device_type: str = "cpu"
    """`cuda` if this process has a GPU: the engine then refuses to run on CPUs."""


def find_python(python: str | None) -> Path:
    """Returns the Python interpreter for vLLM: `python`, or that of `.venv-vllm` at the top of the checkout.

    Raises:
        FileNotFoundError: the interpreter does not exist.
        ValueError: vLLM is not installed for it.
    """
    path = DEFAULT_PYTHON if python is None else Path(python)
    advice = "run `make .venv-vllm/.installed`, or set serving.python to the Python of an environment with vLLM"
    if not path.is_file():
        raise FileNotFoundError(f"serving.python: must be a Python with vLLM, but {path} does not exist; {advice}")
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([path, "-I", "-c", check], stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
        raise ValueError(f"serving.python: must be a Python with vLLM, but {path} has none; {advice}")
    return path


def generate(jobs: Sequence[GenerateJob], python: str | None = None) -> list[EngineRun]:
    """Run the jobs one after another in one process, each with its own engine, and return their results in order.

    Raises:
        FileNotFoundError: the interpreter does not exist.
        ValueError: vLLM is not installed for it.
        RuntimeError: the process ended early. An engine's own error is returned in its result instead.
    """
    version, results = _run_worker(jobs, find_python(python))
    return [_engine_run(version, result) for result in results]


def _engine_run(version: str, result: dict[str, Any]) -> EngineRun:
    if "error" in result:
        return EngineRun(version, [], None, None, result["error"])
    counters = result["counters"]
    counts = None
    if counters:
        counts = EngineCounts(
            counters["num_drafts"], counters["num_draft_tokens"], counters["num_accepted_tokens_per_pos"]
        )
    return EngineRun(version, result["tokens"], counts, result["accepted_by_round"])


def _run_worker(jobs: Sequence[GenerateJob], python: Path) -> tuple[str, list[dict[str, Any]]]:
    """Returns vLLM's version, and the worker's result for each job."""
    with tempfile.TemporaryDirectory(prefix="mtptrain-vllm-") as directory:
        job_path, result_path = (Path(directory) / name for name in ("job.json", "result.json"))
        job_path.write_text(json.dumps([asdict(job) for job in jobs]))
        command = [str(part) for part in (python, WORKER, "generate", job_path, result_path)]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith(PROGRESS):
                    sys.stderr.write(line.removeprefix(PROGRESS).lstrip())
                    sys.stderr.flush()
        if process.returncode or not result_path.is_file():
            raise RuntimeError(
                f"vLLM: the worker must end with a result, but ended with status {process.returncode}; its last "
                "lines:\n" + "".join(lines[-SHOWN_LINES:])
            )
        result = json.loads(result_path.read_text())
    return result["version"], result["results"]


@dataclass(frozen=True)
class VllmProcess:
    """Runs vLLM in a new process for each list of prompts."""

    python: str | None
    target_dir: Path
    speculative_config: dict[str, Any]
    """vLLM's `--speculative-config`."""
    hf_overrides: dict[str, Any] | None
    dtype: str
    max_model_len: int
    kv_cache_memory_bytes: int | None
    tensor_parallel_size: int
    """Number of GPUs that the engine uses."""
    device_type: str
    """`cuda` if this process has a GPU: the engine then refuses to run on CPUs."""

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> EngineRun:
        """Returns greedy answers to prompts of token ids, and how much the counters grew.

        Raises:
            RuntimeError: the engine failed.
        """
        job = GenerateJob(
            name="vllm",
            target_dir=str(self.target_dir),
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            max_model_len=self.max_model_len,
            speculative_config=self.speculative_config,
            hf_overrides=self.hf_overrides,
            stop_token_ids=stop_token_ids,
            dtype=self.dtype,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            tensor_parallel_size=self.tensor_parallel_size,
            device_type=self.device_type,
        )
        (run,) = generate([job], self.python)
        if run.error:
            head_dir = self.speculative_config.get("model")  # None if the export also holds the target
            served = self.target_dir if head_dir is None else f"{head_dir} for {self.target_dir}"
            raise RuntimeError(f"vLLM: must serve {served}, but raised:\n{run.error}")
        return run


class VllmServer:
    """A running `vllm serve` at a base URL."""

    def __init__(self, url: str) -> None:
        """Ask the server for its version and model.

        Raises:
            ConnectionError: the server does not answer.
            ValueError: the server is not vLLM.
        """
        self.url = url.rstrip("/")
        self._client = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S, follow_redirects=True)
        self.version: str = self._fetch("/version").json()["version"]
        model = self._fetch("/v1/models").json()["data"][0]
        self.model: str = model["id"]
        self.root: str = model.get("root") or self.model
        """The path or hub name that the server was started with."""
        self.max_model_len: int = model["max_model_len"]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> EngineRun:
        """Returns greedy answers to prompts of token ids, and how much the counters grew. Several requests run at once.

        Raises:
            RuntimeError: the server finished other requests in the meantime, which makes its counters useless.
        """
        before = self.counters()

        def ask(prompt: Sequence[int]) -> dict[str, Any]:
            request = {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": max_new_tokens,
                "temperature": 0.0,
                # Set all values: omitted ones come from generation_config.json, and penalties affect greedy decoding.
                **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
                **{"top_p": 1.0, "top_k": 0, "min_p": 0.0},
                "ignore_eos": True,
                "stop_token_ids": list(stop_token_ids),
                "return_token_ids": True,
            }
            answer: dict[str, Any] = self._fetch("/v1/completions", request).json()
            return answer

        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            answers = list(pool.map(ask, prompts))
        return EngineRun(
            self.version,
            [answer["choices"][0]["token_ids"] for answer in answers],
            self.counts_since(before, len(prompts)),
            _accepted_by_round(answers),
        )

    def counts_since(self, before: Counters, num_requests: int) -> EngineCounts | None:
        """Returns how much the drafting counters grew; None if the server does not draft.

        Raises:
            RuntimeError: the server finished other requests than these in the meantime.
        """
        after = self._settled_counters()
        counts = {name: after[name] - before.get(name, 0) for name in after}
        num_finished = sum(count for (name, _), count in counts.items() if name == "request_success")
        if num_finished != num_requests:
            raise RuntimeError(
                f"{self.url}: the server must serve no other requests during the check, but finished {num_finished} "
                f"requests instead of {num_requests}; repeat the check when it is idle"
            )
        return _counts(counts)

    def counters(self) -> Counters:
        """Returns every counter by name and position, summed over engines and other labels."""
        text = self._fetch("/metrics").text
        counters: Counters = {}
        for name, position, value in (match.groups() for match in map(_SAMPLE.match, text.splitlines()) if match):
            key = (name, None if position is None else int(position))
            counters[key] = counters.get(key, 0) + int(float(value))
        return counters

    def _settled_counters(self) -> Counters:
        """Returns the counters once they stop changing: the server answers a request before counting its last step."""
        counters = self.counters()
        while True:
            time.sleep(SETTLED_AFTER_S)
            if (later := self.counters()) == counters:
                return counters
            counters = later

    def _fetch(self, path: str, content: dict[str, Any] | None = None) -> httpx.Response:
        """Returns the response to a GET request, or to a POST request with JSON content."""
        try:
            response = self._client.get(path) if content is None else self._client.post(path, json=content)
            return response.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise ValueError(
                f"serving.url: must be a vLLM server, but {self.url}{path} answers {error.response.status_code}: "
                f"{error.response.text[:300]}"
            ) from error
        except httpx.TransportError as error:
            raise ConnectionError(
                f"serving.url: must be a running vLLM server, but {self.url} does not answer ({error}); start `vllm "
                "serve` or correct the address"
            ) from error


def _counts(counters: Counters) -> EngineCounts | None:
    """Returns the drafting counters; None if the server does not draft."""
    if ("spec_decode_num_drafts", None) not in counters:
        return None
    per_position = {
        position: n for (name, position), n in counters.items() if name == "spec_decode_num_accepted_tokens_per_pos"
    }
    accepted_at = [per_position[position] for position in sorted(p for p in per_position if p is not None)]
    return EngineCounts(
        counters["spec_decode_num_drafts", None], counters["spec_decode_num_draft_tokens", None], accepted_at
    )


def _accepted_by_round(answers: Sequence[dict[str, Any]]) -> list[list[int]] | None:
    """Returns the number of accepted drafts in each round, by answer.

    This is None unless the server runs with `--per-request-spec-decode-metrics detailed`.
    """
    accepted = [
        ((answer.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted") for answer in answers
    ]
    return None if all(rounds is None for rounds in accepted) else [rounds or [] for rounds in accepted]
