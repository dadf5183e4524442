"""Tests that docs/serving.md's tables say what tests/serving serves and asks; `make served-table` writes them."""

import os
import re
from pathlib import Path

from transformers import PreTrainedConfig

from mtptrain.engines.base import GENERATION_SETTINGS
from mtptrain.engines.table import engine_of, format_for
from mtptrain.export import check_tensors, write_head
from mtptrain.settings.heads import HEAD_CONFIGS
from mtptrain.target.families import read_target_config
from tests.mtptrain.engines.conftest import random_head
from tests.serving.cases import HEADS, SERVED, TARGETS, cases_of
from tests.serving.writing import make_served_target

PAGE = Path(__file__).parents[2] / "docs/serving.md"
BETWEEN = r"(?<=<!-- {0}: written by `make served-table` -->\n).*?(?=<!-- end of {0} -->)"
FAMILIES = {
    **{"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE"},
    **{"gemma3_text": "Gemma-3", "deepseek_v2": "DeepSeek-V2"},
}
MORE_FAMILIES = {
    **{"granite": "Granite", "phi3": "Phi-3", "glm4": "GLM-4", "olmoe": "OLMoE", "gpt_oss": "gpt-oss"},
    **{"mixtral": "Mixtral", "qwen2_moe": "Qwen2-MoE", "granitemoe": "Granite-MoE", "dots1": "dots.1"},
    **{"glm4_moe": "GLM-4.5", "ernie4_5_moe": "ERNIE-4.5", "qwen3_next": "Qwen3-Next (full attention)"},
    **dict.fromkeys(("qwen3_5", "qwen3_5_shared"), "Qwen3.5"),
}
"""Families of which a head or two are served. They have lines below the table instead of columns in it."""
IN_TABLE = ("mtp", "eagle", "eagle3", "peagle", "medusa", "dflash", "dspark", "dflash2", "draft_model")
ENGINES = {
    **{"vllm": "vLLM 0.32", "llama_cpp": "llama.cpp b11434", "openvino": "OpenVINO GenAI 2026.4"},
    "mlx": "MLX 0.32",
    **{"sglang": "SGLang 0.5.23", "tensorrt_llm": "TensorRT-LLM 1.3", "transformers": "transformers 5.23"},
}
NAMES = {"eos_token_ids": "`eos_token_id`", "tokenizer_eos_token_id": "the tokenizer's `eos_token`"}
ONLY_ON_GPUS = {"dspark": "dspark_fill_in_one_layer", "dflash2": "dflash2"}
"""Heads that vLLM serves with its V2 runner, which needs a GPU, and the variant that a plugin serves in its V1."""
EQUAL, NEAR, CHECKED, REFUSED, UNTRIED = "equal", "within 2 %", "format", "no", "not tried"
WITH_PLUGIN = "equal in V1"


def is_served(engine: str, head: str, family: str) -> bool:
    return any((case.head, TARGETS[case.target].model_type) == (head, family) for case in cases_of(engine))


def cell(engine: str, head: str, family: str, target: PreTrainedConfig, directory: Path) -> str:
    """Returns the cell of a head for a family in an engine. An export that no engine serves here is written."""
    if engine in SERVED and is_served(engine, head, family):
        return EQUAL
    if next(engine_of(engine).why_not(HEADS[head], target), None) is not None:
        return REFUSED
    if engine == "vllm" and head in ONLY_ON_GPUS and is_served("vllm with a plugin", ONLY_ON_GPUS[head], family):
        return WITH_PLUGIN
    if engine in SERVED and not (engine == "vllm" and head in ONLY_ON_GPUS):
        return NEAR if engine == "vllm" and is_served("vllm in bf16", head, family) else UNTRIED
    form = format_for(engine, HEADS[head], target)
    write_head(directory, form, random_head(form.head, target).state_dict())
    check_tensors(directory, form)
    # tests/mtptrain/engines/test_transformers.py compares what transformers accepts with our own loop.
    return EQUAL if engine == "transformers" else CHECKED


def served_table(directory: Path) -> str:
    """Returns a table with a row for each engine and head, and a column for each family."""
    lines = ["| engine | head | " + " | ".join(FAMILIES.values()) + " |", "|---|---|" + "---|" * len(FAMILIES)]
    targets = {name: read_target_config(make_served_target(directory / "targets" / name, name)) for name in FAMILIES}
    for target in targets.values():
        target.name_or_path = ""  # whose config.json lacks what mlx-lm reads, as transformers writes it
    for engine, engine_name in ENGINES.items():
        for head in IN_TABLE:
            if HEADS[head].name in engine_of(engine).formats:
                cells = [cell(engine, head, name, targets[name], directory / engine / head / name) for name in FAMILIES]
                lines.append(f"| {engine_name} | `{head}` | " + " | ".join(cells) + " |")
    families: dict[str, dict[str, None]] = {}
    for case, by in ((case, ENGINES[engine]) for engine in ("vllm", "mlx") for case in cases_of(engine)):
        if case.target in MORE_FAMILIES and case.head in HEAD_CONFIGS:
            line = f"{by} serves `{case.head}` for"
            families.setdefault(line, {})[MORE_FAMILIES[case.target]] = None
    more = [f"{line} {', '.join(names)} too: {EQUAL}." for line, names in families.items()]
    return "\n".join([*lines, "", *more, ""])


def applied_table() -> str:
    """Returns a table with a row for each setting of generation_config.json, and a column for each engine.

    tests/serving/test_generation_config.py runs the engines.
    """
    engines = {name.split()[0]: engine_of(key) for key, name in ENGINES.items() if engine_of(key).applies}
    lines = ["| setting | " + " | ".join(engines) + " |", "|---|" + "---|" * len(engines)]
    for setting in GENERATION_SETTINGS:
        cells = [NAMES.get(setting, f"`{setting}`")]
        for engine in engines.values():
            own = f" ({engine.defaults[setting]:g})" if setting in engine.defaults else ""
            cells.append(engine.applies.get(setting, "no") + own)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_the_tables_of_the_page_say_what_the_tests_find(tmp_path: Path) -> None:
    for name, table in (("served", served_table(tmp_path)), ("applied", applied_table())):
        between = re.compile(BETWEEN.format(name), re.DOTALL)
        found = between.search(PAGE.read_text())
        assert found is not None
        if os.environ.get("WRITE_SERVED_TABLE"):
            PAGE.write_text(between.sub(lambda _, table=table: table, PAGE.read_text()))
        else:
            assert found[0] == table, "run `make served-table`"
