"""Makes the table of served heads in docs/serving.md from the results of the engines."""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtptrain.decoding.acceptance import summarise
from mtptrain.engines.requests import EngineCounts
from mtptrain.engines.table import check_servable, engine_of, format_for
from mtptrain.export import check_tensors, write_head
from mtptrain.heads.base import Head
from tests.serving.cases import (
    BF16_CASES,
    CASES,
    HEAD_CONFIGS,
    IN_TABLE,
    LLAMA_CPP_CASES,
    NOT_HERE,
    OPENVINO_CASES,
    SEQUENTIAL_CASES,
    TARGETS,
    Case,
    is_served_here,
    one_of_each_family,
)
from tests.serving.conftest import Served
from tests.serving.ours import OnDisk, Serve, check_equal

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "gemma3_text": "Gemma-3",
    "deepseek_v2": "DeepSeek-V2",
}
MORE_FAMILIES = {
    "granite": "Granite",
    "phi3": "Phi-3",
    "glm4": "GLM-4",
    "olmoe": "OLMoE",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "GLM-4.5",
    "ernie4_5_moe": "ERNIE-4.5",
    "qwen3_next": "Qwen3-Next (full attention)",
}
"""Families of `MORE_TARGETS` and `NATIVE_TARGETS`, which have lines below the table instead of columns in it."""
ENGINES = {
    "vllm": "vLLM 0.32",
    "llama_cpp": "llama.cpp b11434",
    "openvino": "OpenVINO GenAI 2026.4",
    "sglang": "SGLang 0.5.23",
    "tensorrt_llm": "TensorRT-LLM 1.3",
    "transformers": "transformers 5.23",
}
TRIED = {"llama_cpp": LLAMA_CPP_CASES, "openvino": OPENVINO_CASES}
ONLY_ON_GPUS = {"dspark": "dspark_fill_in_one_layer", "dflash2": "dflash2"}
"""Heads that vLLM serves with its V2 runner, which needs a GPU, and the variant that a plugin serves in its V1."""
EQUAL, NEAR, CHECKED, REFUSED, UNTRIED = "equal", "within 2 %", "format", "no", "not tried"
WITH_PLUGIN = "equal in V1"
LEGEND = f"""
*{EQUAL}*: served in fp32; all answers equal ours, and all counters by
[the engine's rules](#checking-an-export). *{NEAR}*: served in bf16, the only dtype of
vLLM's CPU kernels there; acceptance lengths are within 2 %. *{CHECKED}*: the files are checked, but
not served. *{WITH_PLUGIN}*: vLLM serves this head with its V2 runner, which needs a GPU. Here its
classes run in its V1 runner, with a plugin of the tests that chooses the drafts; all is equal in
fp32, for `dspark` with `head.sample_from_anchor=false`.
*{REFUSED}*: the export is refused, with the reason. *{UNTRIED}*: no test serves it. Llama and Qwen3 are
tested with K = 1, 3 and 5, and `eagle3` also with a draft vocabulary, with its own lm_head and, in
vLLM, with the flags of EAGLE-3.1; the others with K = 3. `peagle` and `medusa` are tested with
K = 1 and 5 too on targets that repeat tokens, and `dflash` with K = 1, 3 and 5, with a draft
vocabulary and with two layers, whose `k_norm` must be equal in vLLM. llama.cpp's Qwen2 has unscaled
RoPE, and the weights of its Qwen3-MoE's experts add up to 1.
"""


def cell(
    engine: str,
    head_name: str,
    head: Head,
    family: str,
    target: OnDisk,
    served: dict[str, Served],
    serve_by: dict[str, Serve],
    directory: Path,
) -> str:
    """Returns the cell of a head for a family in an engine. `directory` must not exist; the export is written there."""
    if engine in serve_by:
        return served_by(engine, serve_by[engine], head_name, family, target)
    try:
        form = format_for(engine, HEAD_CONFIGS[head_name], target.target.config)
    except ValueError:
        return REFUSED
    if engine == "vllm" and head_name not in ONLY_ON_GPUS:
        return served_by_vllm(served, head_name, family)
    if engine == "vllm" and any(
        (case.head, case.target) == (ONLY_ON_GPUS[head_name], family) for case in SEQUENTIAL_CASES
    ):
        assert served_by_vllm(served, ONLY_ON_GPUS[head_name], family, SEQUENTIAL_CASES) == EQUAL
        return WITH_PLUGIN
    state = head.state_dict()
    write_head(directory, form, state)
    form.add_target(directory, target.directory)
    check_tensors(directory, form)
    reloaded = form.state(load_file(directory / form.weights_name))
    assert reloaded.keys() == state.keys() and all(torch.equal(reloaded[name], state[name]) for name in state)
    # tests/mtptrain/engines/test_transformers.py compares what transformers accepts with our own loop.
    return EQUAL if engine == "transformers" else CHECKED


def served_by(engine: str, serve: Serve, head: str, family: str, target: OnDisk) -> str:
    case = one_of_each_family(TRIED[engine]).get((head, family))
    if case is not None:
        check_equal(serve, case)
        return EQUAL
    try:
        check_servable(engine, HEAD_CONFIGS[head], target.target.config)
    except ValueError:
        return REFUSED
    return UNTRIED


def served_by_vllm(served: dict[str, Served], head: str, family: str, cases: list[Case] = CASES) -> str:
    exact = [case for case in cases if (case.head, TARGETS[case.target].model_type) == (head, family)]
    for case in exact:
        ours, theirs = summarise(served[str(case)].ours), served[str(case)].theirs
        assert theirs.counts == EngineCounts(ours.rounds, ours.drafted, ours.accepted_at), theirs.error
        assert theirs.tokens == [generation.tokens for generation in served[str(case)].ours]
    if exact:
        return EQUAL
    near = next((case for case in BF16_CASES if (case.head, case.target) == (head, family)), None)
    if near is None:
        return UNTRIED
    if not is_served_here(near):
        assert not os.environ.get("WRITE_SERVED_TABLE"), NOT_HERE
        warnings.warn(f"{near}: {NOT_HERE}; the page's cell is taken as it stands", stacklevel=1)
        return NEAR
    ours, theirs = summarise(served[str(near)].ours), served[str(near)].theirs
    assert theirs.counts is not None, theirs.error
    assert theirs.counts.acceptance_length == pytest.approx(ours.acceptance_length, rel=0.02)
    return NEAR


def served_table(
    served: dict[str, Served],
    serve_by: dict[str, Serve],
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    directory: Path,
) -> str:
    """Returns a table with a row for each engine and head, and a column for each family."""
    lines = ["| engine | head | " + " | ".join(FAMILIES.values()) + " |", "|---|---|" + "---|" * len(FAMILIES)]
    for engine, engine_name in ENGINES.items():
        for head in IN_TABLE:
            if HEAD_CONFIGS[head].name in engine_of(engine).formats:
                cells = [
                    cell(
                        engine,
                        head,
                        head_of(head, family),
                        family,
                        target_of(family),
                        served,
                        serve_by,
                        directory / engine / head / family,
                    )
                    for family in FAMILIES
                ]
                lines.append(f"| {engine_name} | `{head}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + LEGEND + more_families(served)


def more_families(served: dict[str, Served]) -> str:
    """Returns a line for each head that is served for families without a column of their own."""
    families: dict[tuple[str, str], list[str]] = {}
    for case in dict.fromkeys(replace(case, num_speculative_tokens=3) for case in CASES + BF16_CASES):
        if case.target in MORE_FAMILIES:
            result = served_by_vllm(served, case.head, case.target)
            families.setdefault((case.head, result), []).append(MORE_FAMILIES[case.target])
    return "\n" + "".join(
        f"vLLM 0.32 serves `{head}` for {', '.join(names)} too: {result}.\n"
        for (head, result), names in families.items()
    )
