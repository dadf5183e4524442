"""Decodes prompts inside OpenVINO's own Python, for `openvino_client.py` and `openvino_load.py`.

    python openvino_worker.py decode job.json result.json
    python openvino_worker.py load job.json

`decode` answers one prompt at a time, exactly. `load` decodes as OpenVINO usually does, with many requests in flight,
and speaks with the other end of its stdin and stdout as `bench_worker.py load` does. This file imports nothing from
mtptrain, whose dependencies are not installed there. It first converts the target and the head with optimum-intel,
unless their folders hold converted ones already.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

MODEL = "openvino_model.xml"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Settings for both models, which otherwise round to the types in which the CPU is fastest."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
CONVERT = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--task", "text-generation-with-past")


def convert_both(job: dict[str, Any]) -> None:
    """Convert the target and the head of a job."""
    for name in ("target", "head"):
        convert(Path(job[name]), Path(job[f"converted_{name}"]), job["weights"], name == "head")


def convert(source: Path, directory: Path, weights: str, is_head: bool) -> None:
    """Convert a model or a head, and write into an EAGLE-3 head which streams of the target it reads.

    OpenVINO's id k is the stream after k + 1 decoder layers, and optimum does not write the ids.
    """
    if (directory / MODEL).is_file():
        return
    temporary = directory.with_name(directory.name + ".tmp")
    # Without --trust-remote-code, optimum converts an EAGLE-3 head as a plain Llama, without an error.
    arguments = ["--weight-format", weights, *(["--trust-remote-code"] if is_head else [])]
    command = [sys.executable, *CONVERT, *arguments, "-m", str(source), str(temporary)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode:
        other_weights = "set serving.openvino_weights=fp32, or " if weights != "fp32" else ""
        sys.exit(
            f"serving.openvino_weights: optimum-cli must be able to convert {source} to {weights}, but fails as above; "
            f"{other_weights}correct the model"
        )
    layers = json.loads((source / "config.json").read_text()).get(LAYER_IDS) if is_head else None
    if layers is not None:
        model = openvino.Core().read_model(temporary / MODEL)
        model.set_rt_info([layer - 1 for layer in layers], "hidden_layers_list")
        openvino.save_model(model, temporary / "with_layers.xml", compress_to_fp16=False)
        for kind in ("xml", "bin"):
            (temporary / f"with_layers.{kind}").replace(temporary / f"openvino_model.{kind}")
    temporary.rename(directory)


def scheduler() -> Any:
    config = openvino_genai.SchedulerConfig()
    config.enable_prefix_caching = False  # DFlash does not support it, and a benchmark must not profit from it
    return config


def threads() -> dict[str, Any]:
    """Returns the number of threads as OpenVINO names it, which does not read `OMP_NUM_THREADS`."""
    number = os.environ.get("OMP_NUM_THREADS")
    return {"INFERENCE_NUM_THREADS": int(number)} if number else {}


def version() -> str:
    found: str = openvino_genai.get_version()
    return found.split("-")[0]


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the greedy answers, one prompt at a time, and the number of tokens of every step that gave some."""
    settings: dict[str, Any] = EXACT | threads()
    draft = openvino_genai.draft_model(job["converted_head"], "CPU", **settings)
    target = openvino_genai.LLMPipeline(
        job["converted_target"], "CPU", draft_model=draft, scheduler_config=scheduler(), **settings
    )
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.apply_chat_template = False
    config.max_new_tokens = job["max_new_tokens"]
    config.num_assistant_tokens = job["num_speculative_tokens"]
    config.ignore_eos = not job["stop_token_ids"]
    config.eos_token_id = next(iter(job["stop_token_ids"]), -1)
    config.stop_token_ids = set(job["stop_token_ids"])
    tokens, steps = [], []
    for prompt in job["prompts"]:
        answer = target.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        tokens.append([int(token) for token in answer.tokens[0]])
        steps.append(list(answer.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes))
    return {"version": version(), "tokens": tokens, "steps": steps}


@dataclass(eq=False)
class Request:
    """A request in flight."""

    handle: Any
    start: float
    times: list[float] = field(default_factory=list)
    """When each step ended that gave tokens."""
    sizes: list[int] = field(default_factory=list)
    """The number of tokens of each of these steps."""
    status: Any = None
    """OpenVINO's status after the last step: FINISHED after a whole answer, IGNORED where memory did not suffice."""

    def read(self) -> bool:
        """Note the status and the tokens of the last step. Returns whether the request has ended."""
        self.status = self.handle.get_status()
        if self.handle.can_read():
            self.times.append(time.perf_counter())
            self.sizes.append(sum(len(output.generated_ids) for output in self.handle.read().values()))
        return bool(self.status != openvino_genai.GenerationStatus.RUNNING)


def run_load(pipeline: Any, load: dict[str, Any], num_drafts: int, say_done: Callable[[int], None]) -> None:
    """Keep as many requests in flight as the load says, and write the times in the form of `vllm bench serve`.

    Calls `say_done` with the number of requests that have ended. The figures are those of finished ones.
    """
    prompts = json.loads(Path(load["prompts_path"]).read_text())
    num_started = 0
    active: list[Request] = []
    ended: list[Request] = []
    start = time.perf_counter()
    while len(ended) < load["num_requests"]:
        while num_started < load["num_requests"] and len(active) < load["concurrency"]:
            prompt = openvino.Tensor(np.array([prompts[num_started % len(prompts)]], dtype=np.int64))
            config = generation_config(pipeline, load, num_drafts)
            active.append(Request(pipeline.add_request(num_started, prompt, config), time.perf_counter()))
            num_started += 1
        pipeline.step()
        ended_now = [request for request in active if request.read()]
        active = [request for request in active if request not in ended_now]
        ended += ended_now
        if ended_now:
            say_done(len(ended))
    duration = time.perf_counter() - start
    finished = [request for request in ended if request.status == openvino_genai.GenerationStatus.FINISHED]
    others = [request for request in ended if request not in finished]
    result = {
        "completed": len(finished),
        "total_output_tokens": sum(sum(request.sizes) for request in finished),
        "duration": duration,
        "ttfts": [request.times[0] - request.start for request in finished],
        "latencies": [request.times[-1] - request.start for request in finished],
        "output_lens": [sum(request.sizes) for request in finished],
        "itls": [np.diff(request.times).tolist() for request in finished],
        "errors": [f"ended with status {each.status.name} after {sum(each.sizes)} tokens" for each in others],
        "tokens_of_steps": [request.sizes for request in finished],
    }
    Path(load["result_path"]).write_text(json.dumps(result))


def generation_config(pipeline: Any, load: dict[str, Any], num_drafts: int) -> Any:
    """Returns the settings of a request: greedy decoding, the load's limits, and the ends of answers of the target."""
    config, ends = openvino_genai.GenerationConfig(), pipeline.get_config()
    config.eos_token_id, config.stop_token_ids = ends.eos_token_id, ends.stop_token_ids
    config.max_new_tokens, config.ignore_eos = load["max_new_tokens"], load["ignore_eos"]
    config.do_sample = False  # check_openvino refuses temperatures above 0
    if num_drafts:
        config.num_assistant_tokens = num_drafts
    return config


def serve_loads(job: dict[str, Any], worker: Any) -> None:
    """Convert and load both models, then run the loads that arrive on stdin, and answer on stdout."""
    answers = worker.take_stdout()
    convert_both(job)
    draft, num_drafts = {}, job["num_speculative_tokens"]
    if num_drafts:
        draft["draft_model"] = openvino_genai.draft_model(job["converted_head"], "CPU", **threads())
    pipeline = openvino_genai.ContinuousBatchingPipeline(job["converted_target"], scheduler(), "CPU", draft | threads())
    worker.say(answers, {"version": version(), "is_cpu": True})

    def say_done(number: int) -> None:
        worker.say(answers, {"done": number})

    worker.run_jobs(lambda load: run_load(pipeline, load, num_drafts, say_done), answers)


if __name__ == "__main__":
    kind, job_path, *rest = sys.argv[1:]
    job = json.loads(Path(job_path).read_text())
    bench_worker = importlib.import_module("bench_worker")  # beside this file
    bench_worker.end_with_input(sys.stdin.fileno())
    if kind == "load":
        serve_loads(job, bench_worker)
    else:
        convert_both(job)
        Path(rest[0]).write_text(json.dumps(decode(job)))
