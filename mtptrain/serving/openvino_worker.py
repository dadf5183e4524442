"""Decodes prompts inside OpenVINO's own Python, for `openvino_client.py`.

    python openvino_worker.py job.json result.json

This file imports nothing from mtptrain, whose dependencies are not installed there. It first converts the target and
the head with optimum-intel, in fp32, unless their folders hold converted ones already.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

MODEL = "openvino_model.xml"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Settings for both models, which otherwise round to the types in which the CPU is fastest."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def convert(source: Path, directory: Path, is_head: bool) -> None:
    """Convert a model or a head, and write into an EAGLE-3 head which streams of the target it reads.

    optimum takes its own class of a head for remote code. OpenVINO's id k is the stream after k + 1 decoder layers, and
    optimum does not write the ids.
    """
    if (directory / MODEL).is_file():
        return
    temporary = directory.with_name(directory.name + ".tmp")
    main_export(
        str(source),
        str(temporary),
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp32"),
        trust_remote_code=is_head,
        local_files_only=True,
        convert_tokenizer=True,
    )
    layers = json.loads((source / "config.json").read_text()).get(LAYER_IDS) if is_head else None
    if layers is not None:
        model = openvino.Core().read_model(temporary / MODEL)
        model.set_rt_info([layer - 1 for layer in layers], "hidden_layers_list")
        openvino.save_model(model, temporary / "with_layers.xml", compress_to_fp16=False)
        for kind in ("xml", "bin"):
            (temporary / f"with_layers.{kind}").replace(temporary / f"openvino_model.{kind}")
    temporary.rename(directory)


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the greedy answers, one prompt at a time, and the number of tokens of every step that gave some."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # DFlash does not support it
    settings: dict[str, Any] = dict(EXACT)
    if "OMP_NUM_THREADS" in os.environ:  # OpenVINO does not read it
        settings["INFERENCE_NUM_THREADS"] = int(os.environ["OMP_NUM_THREADS"])
    draft = openvino_genai.draft_model(job["converted_head"], "CPU", **settings)
    target = openvino_genai.LLMPipeline(
        job["converted_target"], "CPU", draft_model=draft, scheduler_config=scheduler, **settings
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
    return {"version": openvino_genai.get_version().split("-")[0], "tokens": tokens, "steps": steps}


if __name__ == "__main__":
    job_path, result_path = map(Path, sys.argv[1:])
    settings = json.loads(job_path.read_text())
    for name in ("target", "head"):
        convert(Path(settings[name]), Path(settings[f"converted_{name}"]), name == "head")
    result_path.write_text(json.dumps(decode(settings)))
