"""Sends requests from a worker in an engine's own Python, and reads the measurements.

For vLLM, the worker is `vllm bench serve`, and the requests go to a server. OpenVINO has no server: its worker decodes
them itself.
"""

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from mtptrain.serving.server_process import WorkerProcess
from mtptrain.utils.errors import UserError
from mtptrain.utils.masking import hide_passwords


@dataclass(frozen=True)
class Load:
    """Requests to an engine, with at most `concurrency` of them in flight at any time."""

    name: str
    """Part of each request's id and cache salt, so that no two loads share cached prefixes."""
    url: str
    """Address of the server; empty if the worker itself decodes."""
    model: str
    """The model's name at the server; empty if there is only one."""
    prompts_path: str
    """Path of a JSON list of prompts, each a list of token ids."""
    num_requests: int
    concurrency: int
    """Maximum number of requests in flight."""
    max_new_tokens: int
    sampling: dict[str, Any]
    """Sampling parameters of each request, as in the body of `/v1/completions`."""
    ignore_eos: bool
    seed: int
    result_path: str
    """The file that is written, with the entries of a result of `vllm bench serve`."""


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles of a latency over requests or messages, in milliseconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Returns the spread of times in seconds; zeros if there are none."""
        if not seconds:
            return cls(0.0, 0.0, 0.0)
        return cls(*(1e3 * float(each) for each in (np.mean(seconds), *np.percentile(seconds, [50, 99]))))


@dataclass(frozen=True)
class Latencies:
    """The latencies and rates of a load, as `vllm bench serve` defines them."""

    requests: int
    output_tokens: int
    duration_s: float
    """Seconds from the first request to the last token."""
    ttft_ms: Spread
    """Time to the first token of each request, from when it was sent."""
    tpot_ms: Spread
    """Time per output token after the first: one value per request with at least two tokens."""
    itl_ms: Spread
    """Time between consecutive messages of a stream. A message carries all tokens of a step: several with drafts."""
    step_ms: float
    """Mean time between consecutive messages without the slowest tenth, in which the engine also read other prompts."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    @classmethod
    def read(cls, path: Path) -> "Latencies":
        """Returns the figures in a result file of `vllm bench serve --save-detailed`."""
        result = json.loads(path.read_text())
        requests = zip(result["latencies"], result["ttfts"], result["output_lens"], strict=True)
        gaps = [gap for of_request in result["itls"] for gap in of_request]
        return cls(
            requests=result["completed"],
            output_tokens=result["total_output_tokens"],
            duration_s=result["duration"],
            ttft_ms=Spread.of(result["ttfts"]),
            tpot_ms=Spread.of([(latency - ttft) / (tokens - 1) for latency, ttft, tokens in requests if tokens > 1]),
            itl_ms=Spread.of(gaps),
            step_ms=Spread.of(sorted(gaps)[: math.ceil(0.9 * len(gaps))]).mean,
        )


class LoadGenerator:
    """A worker that runs one load after another. The context manager starts and ends it."""

    def __init__(self, command: Sequence[Path | str], log_path: Path, name: str = "vllm bench serve") -> None:
        """Store the worker's command, the file for what it prints, and its name for error messages."""
        self._command, self._log_path, self._name = command, log_path, name

    def __enter__(self) -> Self:
        """Start the worker and read its engine's version. Raises UserError if the worker ended."""
        self._worker = WorkerProcess(self._command, self._log_path, subprocess.PIPE)
        try:
            facts = self._answer()
        except BaseException:
            self._worker.end()
            raise
        self.version: str = facts["version"]
        self.is_cpu: bool = facts["is_cpu"]
        """Whether the worker's engine runs on CPUs."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.end()

    def run(self, load: Load, finished: Callable[[int], None] = lambda _: None) -> Latencies:
        """Send the requests and return their latencies. Call `finished` with the number of requests finished so far.

        Raises:
            UserError: the worker or one of its requests failed.
        """
        pipe = self._worker.process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # the worker has ended, which `_answer` reports
            print(json.dumps(asdict(load)), file=pipe, flush=True)
        while "done" in (answer := self._answer()):
            finished(answer["done"])
        if "error" in answer:
            raise UserError(
                f"{self._name}: must answer its requests, but failed; its log is {self._log_path}, and the error "
                f"is:\n{answer['error']}"
            )
        errors = [error for error in json.loads(Path(answer["result"]).read_text())["errors"] if error]
        if errors:
            raise UserError(
                f"{hide_passwords(load.url) or self._name}: must answer every request, but {len(errors)} of "
                f"{load.num_requests} failed at concurrency {load.concurrency}; the first error is:\n"
                f"{errors[0].strip()}"
            )
        return Latencies.read(Path(answer["result"]))

    def _answer(self) -> dict[str, Any]:
        pipe = self._worker.process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise self._worker.ended(self._name, "must answer")
        return json.loads(line)
