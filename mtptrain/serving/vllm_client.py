"""vLLM, started in a Python of its own or already running as a server: what it answers and what it counts.

vLLM needs other versions of torch and transformers than training does, so it lives in an environment of its own (`make .venv-vllm`)
and runs as a process, as in production.
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
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

WORKER = Path(__file__).with_name("vllm_worker.py")
DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
PROGRESS = "vllm_worker:"
"""How the worker's lines of progress begin; the engine's own lines are shown where it fails."""
SHOWN_LINES = 30
MAX_CONCURRENT_REQUESTS = 16
REQUEST_TIMEOUT_S = 600.0
SETTLED_AFTER_S = 0.3

_SAMPLE = re.compile(r'^vllm:(\w+)_total(?:\{(?:.*?\bposition="(\d+)")?[^}]*\})? (\S+)$')


@dataclass(frozen=True)
class EngineCounts:
    """An engine's counters of drafting, over all requests of a run."""

    rounds: int
    """Verified drafts, vLLM's num_drafts."""
    drafted: int
    accepted_at: list[int]
    """Rounds that accepted the draft at each position [K]."""

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted_at) / max(self.rounds, 1)


@dataclass(frozen=True)
class EngineRun:
    """What an engine did with a list of prompts."""

    version: str
    tokens: list[list[int]]
    """New tokens of each prompt, the stop token included."""
    counts: EngineCounts | None
    """None for an engine without drafts."""
    accepted_by_round: list[list[int]] | None
    """Accepted drafts of each round of each prompt; None where the engine does not tell."""
    error: str = ""
    """What the engine raised; everything else is then empty."""


@dataclass(frozen=True)
class GenerateJob:
    """Greedy decoding by one engine."""

    name: str
    """In lines of progress."""
    target_dir: str
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    max_model_len: int
    """The engine's context. It drafts nothing of use for any request where one comes within 2 K tokens of this."""
    speculative_config: dict[str, Any] | None = None
    """As `--speculative-config`; None decodes without drafts."""
    hf_overrides: dict[str, Any] | None = None
    """What the engine must be told about the target."""
    stop_token_ids: Sequence[int] = ()
    dtype: str = "float32"
    max_num_seqs: int = 32
    """Requests that are decoded together."""
    kv_cache_memory_bytes: int | None = None
    """The engine's choice unless given: nearly all memory."""
    tensor_parallel_size: int = 1
    """GPUs of the engine."""
    device_type: str = "cpu"
    """`cuda` where this process has a GPU: the engine then refuses to run on CPUs."""


def find_python(python: str | None) -> Path:
    """The Python that vLLM is installed for: the one given, or that of `.venv-vllm` at the top of the checkout.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it has no vLLM.
    """
    found = DEFAULT_PYTHON if python is None else Path(python)
    advice = "run `make .venv-vllm/.installed`, or set serving.python to the Python of an environment with vLLM"
    if not found.is_file():
        raise FileNotFoundError(f"serving.python: must be a Python with vLLM, but {found} does not exist; {advice}")
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([found, "-I", "-c", look], stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
        raise ValueError(f"serving.python: must be a Python with vLLM, but {found} has none; {advice}")
    return found


def generate(jobs: Sequence[GenerateJob], python: str | None = None) -> list[EngineRun]:
    """Build the engines one after the other in one process and let each answer its prompts; results in the order of the jobs.

    Raises:
        FileNotFoundError: there is no such Python.
        ValueError: it has no vLLM.
        RuntimeError: the process ended early. An engine that fails gives its error in its result.
    """
    version, results = _run_worker(jobs, find_python(python))
    return [_engine_run(version, result) for result in results]


def _engine_run(version: str, result: dict[str, Any]) -> EngineRun:
    if "error" in result:
        return EngineRun(version, [], None, None, result["error"])
    counters = result["counters"]
    counts = None
    if counters:
        counts = EngineCounts(counters["num_drafts"], counters["num_draft_tokens"], counters["num_accepted_tokens_per_pos"])
    return EngineRun(version, result["tokens"], counts, result["accepted_by_round"])


def _run_worker(jobs: Sequence[GenerateJob], python: Path) -> tuple[str, list[dict[str, Any]]]:
    """vLLM's version, and what its worker gave for each job."""
    with tempfile.TemporaryDirectory(prefix="mtptrain-vllm-") as directory:
        job_path, result_path = (Path(directory) / name for name in ("job.json", "result.json"))
        job_path.write_text(json.dumps([asdict(job) for job in jobs]))
        command = [str(part) for part in (python, WORKER, "generate", job_path, result_path)]
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
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
                f"vLLM: the worker must end with a result, but ended with status {process.returncode}; its last lines:\n"
                + "".join(lines[-SHOWN_LINES:])
            )
        result = json.loads(result_path.read_text())
    return result["version"], result["results"]


@dataclass(frozen=True)
class StartedVllm:
    """An engine that is built for each list of prompts and ended after it."""

    python: str | None
    target_dir: Path
    speculative_config: dict[str, Any]
    """As `--speculative-config`."""
    hf_overrides: dict[str, Any] | None
    dtype: str
    max_model_len: int
    kv_cache_memory_bytes: int | None
    tensor_parallel_size: int
    """GPUs of the engine."""
    device_type: str
    """`cuda` where this process has a GPU: the engine then refuses to run on CPUs."""

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]) -> EngineRun:
        """Greedy answers to prompts of token ids, and the differences of the counters.

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
            raise RuntimeError(
                f"vLLM: must serve {self.speculative_config['model']} for {self.target_dir}, but raised:\n{run.error}"
            )
        return run


class VllmServer:
    """A running `vllm serve`, known by its base URL."""

    def __init__(self, url: str) -> None:
        """Ask the server for its model.

        Raises:
            ConnectionError: nothing answers there.
            ValueError: what answers is not vLLM, or does not draft.
        """
        self.url = url.rstrip("/")
        self.version: str = self._ask("/version")["version"]
        model = self._ask("/v1/models")["data"][0]
        self.model: str = model["id"]
        self.max_model_len: int = model["max_model_len"]

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]) -> EngineRun:
        """Greedy answers to prompts of token ids, a bounded number of them at once, and the differences of the counters.

        Raises:
            RuntimeError: somebody else used the server meanwhile, so that its counters tell nothing.
        """
        before = self.counters()

        def ask(prompt: Sequence[int]) -> dict[str, Any]:
            request = {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": max_new_tokens,
                "temperature": 0.0,
                # What is left out here comes from the target's generation_config.json, and penalties change greedy answers too.
                **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
                **{"top_p": 1.0, "top_k": 0, "min_p": 0.0},
                "ignore_eos": True,
                "stop_token_ids": list(stop_token_ids),
                "return_token_ids": True,
            }
            return self._ask("/v1/completions", request)

        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            answers = list(pool.map(ask, prompts))
        after = self._settled_counters()
        counts = {name: after[name] - before.get(name, 0) for name in after}
        num_finished = sum(count for (name, _), count in counts.items() if name == "request_success")
        if num_finished != len(prompts):
            raise RuntimeError(
                f"{self.url}: the server must serve nobody else during the check, but finished {num_finished} requests instead of "
                f"{len(prompts)}; check again when it is idle"
            )
        return EngineRun(
            self.version, [answer["choices"][0]["token_ids"] for answer in answers], _counts(counts), _accepted_by_round(answers)
        )

    def counters(self) -> dict[tuple[str, int | None], int]:
        """Every counter by name and position, summed over engines and other labels."""
        text = self._fetch("/metrics").decode()
        found: dict[tuple[str, int | None], int] = {}
        for name, position, value in (match.groups() for match in map(_SAMPLE.match, text.splitlines()) if match):
            key = (name, None if position is None else int(position))
            found[key] = found.get(key, 0) + int(float(value))
        return found

    def _settled_counters(self) -> dict[tuple[str, int | None], int]:
        """The counters once they stand still: the server answers a request before it counts its last step."""
        counters = self.counters()
        while True:
            time.sleep(SETTLED_AFTER_S)
            if (later := self.counters()) == counters:
                return counters
            counters = later

    def _ask(self, path: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._fetch(path, content))
        return answer

    def _fetch(self, path: str, content: dict[str, Any] | None = None) -> bytes:
        data = None if content is None else json.dumps(content).encode()
        try:
            with urlopen(
                Request(self.url + path, data, {"Content-Type": "application/json"}), timeout=REQUEST_TIMEOUT_S
            ) as response:
                body: bytes = response.read()
                return body
        except HTTPError as error:
            raise ValueError(
                f"serving.url: must be a vLLM server, but {self.url}{path} answers {error.code}: {error.read().decode()[:300]}"
            ) from error
        except URLError as error:
            raise ConnectionError(
                f"serving.url: must be a running vLLM server, but {self.url} does not answer ({error.reason}); start `vllm serve` or "
                "correct the address"
            ) from error


def _counts(counters: dict[tuple[str, int | None], int]) -> EngineCounts | None:
    """The counters of drafting; None where the server does not draft."""
    if ("spec_decode_num_drafts", None) not in counters:
        return None
    per_position = {position: n for (name, position), n in counters.items() if name == "spec_decode_num_accepted_tokens_per_pos"}
    accepted_at = [per_position[position] for position in sorted(p for p in per_position if p is not None)]
    return EngineCounts(counters["spec_decode_num_drafts", None], counters["spec_decode_num_draft_tokens", None], accepted_at)


def _accepted_by_round(answers: Sequence[dict[str, Any]]) -> list[list[int]] | None:
    """Told by a server that was started with `--per-request-spec-decode-metrics detailed`."""
    found = [((answer.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted") for answer in answers]
    return None if all(rounds is None for rounds in found) else [rounds or [] for rounds in found]
