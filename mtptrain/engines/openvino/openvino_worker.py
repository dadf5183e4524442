"""Decodes prompts inside OpenVINO's own Python, for `engine.py`.

    python openvino_worker.py decode job.json result.json
    python openvino_worker.py load job.json result.json

`decode` answers one prompt at a time, exactly. `load` decodes as OpenVINO usually does, with many requests in flight.
This file imports nothing from mtptrain, whose dependencies are not installed there. It first converts the target and
the head with optimum-intel, unless their folders hold converted ones already.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

PROGRESS = "openvino_worker:"
MODEL = "openvino_model.xml"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Settings for both models, which otherwise round to the types in which the CPU is fastest."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
CONVERT = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--task", "text-generation-with-past")


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
    """Returns the number of threads as OpenVINO names it, which does not read `OMP_NUM_THREADS`.

    One thread computes in f32: on a CPU with AMX, OpenVINO 2026.4.1 fails in bf16 with one.
    """
    number = int(os.environ.get("OMP_NUM_THREADS") or 0)
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": number} if number else {}
    return settings | EXACT if number == 1 else settings


def decode(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the greedy answers to questions, one prompt at a time."""
    settings: dict[str, Any] = EXACT | threads()
    draft = openvino_genai.draft_model(job["converted_head"], "CPU", **settings)
    target = openvino_genai.LLMPipeline(
        job["converted_target"], "CPU", draft_model=draft, scheduler_config=scheduler(), **settings
    )
    results = []
    for asked in job["asked"]:
        config = openvino_genai.GenerationConfig()
        config.do_sample = False
        config.apply_chat_template = False
        config.max_new_tokens = asked["max_new_tokens"]
        config.num_assistant_tokens = job["num_speculative_tokens"]
        config.ignore_eos = not asked["stop_token_ids"]
        config.eos_token_id = next(iter(asked["stop_token_ids"]), -1)
        config.stop_token_ids = set(asked["stop_token_ids"])
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in asked["prompts"]]
        answers = [target.generate(prompt, config) for prompt in prompts]
        metrics = [answer.extended_perf_metrics.main_model_metrics.raw_metrics for answer in answers]
        # The first step reads the prompt. In every other one, the last token is the target's own.
        accepted = [[num_tokens - 1 for num_tokens in each.m_batch_sizes[1:]] for each in metrics]
        of_all = {"tokens": [list(map(int, answer.tokens[0])) for answer in answers], "accepted": accepted}
        chat = asked["chat"]
        results.append({"chat_ids": chat_ids(target.get_tokenizer(), chat) if chat else None, **of_all})
    return results


def chat_ids(tokenizer: Any, chat: dict[str, Any]) -> list[int]:
    """Returns the prompt that OpenVINO makes of a chat; nothing of one whose template its program does not know."""
    try:
        variables = {"extra_context": chat["chat_template_kwargs"]} if chat["chat_template_kwargs"] else {}
        text = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True, **variables)
    except RuntimeError:
        return []
    return list(map(int, tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]))


@dataclass(eq=False)
class Request:
    handle: Any
    start: float
    steps_s: list[float] = field(default_factory=list)
    """Seconds from the request to each step that gave tokens."""
    tokens_of_steps: list[int] = field(default_factory=list)

    def read(self) -> bool:
        """Note the tokens of the last step. Returns whether the request has ended."""
        status = self.handle.get_status()
        if self.handle.can_read():
            self.steps_s.append(time.perf_counter() - self.start)
            self.tokens_of_steps.append(sum(len(output.generated_ids) for output in self.handle.read().values()))
        if status not in (openvino_genai.GenerationStatus.RUNNING, openvino_genai.GenerationStatus.FINISHED):
            sys.exit(
                f"a request must be answered as a whole, but ended with status {status.name} after "
                f"{sum(self.tokens_of_steps)} tokens"  # IGNORED where memory did not suffice
            )
        return bool(status == openvino_genai.GenerationStatus.FINISHED)


def run_load(pipeline: Any, load: dict[str, Any], requests: dict[str, Any], num_drafts: int) -> dict[str, Any]:
    """Keep as many requests in flight as a load says, and return the times and tokens of the steps of each."""
    prompts, started, active = requests["prompts"], list[Request](), list[Request]()
    start = time.perf_counter()
    while len(started) < load["num_requests"] or active:
        while len(started) < load["num_requests"] and len(active) < load["concurrency"]:
            prompt = openvino.Tensor(np.array([prompts[len(started) % len(prompts)]], dtype=np.int64))
            config = generation_config(pipeline, requests, num_drafts)
            started.append(Request(pipeline.add_request(len(started), prompt, config), time.perf_counter()))
            active.append(started[-1])
        pipeline.step()
        active = [request for request in active if not request.read()]
    duration_s = time.perf_counter() - start
    print(f"{PROGRESS} {load['name']}: {len(started)} requests, {duration_s:.1f} s", flush=True)
    return {
        "duration_s": duration_s,
        "steps_s": [request.steps_s for request in started],
        "num_tokens": [sum(request.tokens_of_steps) for request in started],
        "accepted": [[num - 1 for num in request.tokens_of_steps[1:]] for request in started],
    }


def generation_config(pipeline: Any, requests: dict[str, Any], num_drafts: int) -> Any:
    config, ends = openvino_genai.GenerationConfig(), pipeline.get_config()
    config.eos_token_id, config.stop_token_ids = ends.eos_token_id, ends.stop_token_ids
    config.max_new_tokens, config.ignore_eos = requests["max_new_tokens"], requests["ignore_eos"]
    config.do_sample = False  # temperatures above 0 are refused before
    if num_drafts:
        config.num_assistant_tokens = num_drafts
    return config


def run_loads(job: dict[str, Any]) -> list[dict[str, Any]]:
    draft, num_drafts = {}, job["num_speculative_tokens"]
    if num_drafts:
        draft["draft_model"] = openvino_genai.draft_model(job["converted_head"], "CPU", **threads())
    pipeline = openvino_genai.ContinuousBatchingPipeline(job["converted_target"], scheduler(), "CPU", draft | threads())
    return [run_load(pipeline, load, job["requests"], num_drafts) for load in job["loads"]]


if __name__ == "__main__":
    kind, job_path, result_path = sys.argv[1:]
    job = json.loads(Path(job_path).read_text())
    for name in ("target", "head"):
        convert(Path(job[name]), Path(job[f"converted_{name}"]), job["weights"], name == "head")
    Path(result_path).write_text(json.dumps(run_loads(job) if kind == "load" else decode(job)))
