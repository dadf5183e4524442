"""Reads an export's `serving.json`, and turns it into settings of the engine that serves the export."""

import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.config import PipelineConfig
from mtptrain.stage_dir import StageDir, require
from mtptrain.target.families import head_dim, key_heads
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import SEAL, read_json, read_sealed, refuse_absent

SERVING = "serving.json"
"""Name of the file in an export that describes it for programs."""
README = "README.md"
WRITTEN_FOR = {
    "vllm": "0.32",
    "sglang": "0.5.23",
    "llama_cpp": "b11434",
    "openvino": "2026.4.1",
    "tensorrt_llm": "1.3",
    "transformers": "5.23",
}
"""The version of each engine that exports are written for. Tests serve them with all but SGLang and TensorRT-LLM."""
WITHOUT_STREAMS_IN_VLLM = (
    *("axk1", "bloom", "cohere", "cohere2", "dbrx", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1"),
    *("falcon_mamba", "gemma", "gemma2", "gemma3_text", "gemma3n", "gemma3n_text", "glm4", "glm4_moe", "glm4_moe_lite"),
    *("gpt-sw3", "gpt2", "gptj", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hrm_text"),
    *("hy_v3", "hyperclovax", "jamba", "lfm2", "lfm2_moe", "longcat_flash", "mamba", "mamba2", "mimo", "mixtral"),
    *("nemotron", "olmo_hybrid", "olmoe", "opt", "qwen2_moe", "stablelm", "zamba2"),
)
"""Families whose class in vLLM does not return residual streams.

MiMo's forward leaves them out, the others have no `SupportsEagle3`. The class of a model with images around such a
family, or around another one, may differ: then vLLM itself refuses the head when it starts.
"""
_STREAMS_FOR_ALL = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma4_text", "gemma4_unified_text", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt_oss", "internlm3", "iquestcoder", "llama", "mellum", "minimax_m3_vl_text", "ministral3"),
    *("mistral", "phi3", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
)
_STREAMS_FOR_BLOCKS = ("inkling_text", "laguna", "lfm2", "lfm2_moe", "mimo_v2_flash", "nemotron_h", *_STREAMS_FOR_ALL)
STREAMS_OF_SGLANG = {
    "eagle3": (
        *("apertus", "exaone_moe", "gemma3_text", "glm4_moe", "llama4_text", "longcat_flash", "minimax_m2", "qwen2"),
        "qwen2_moe",
        *_STREAMS_FOR_ALL,
    ),
    "dflash": _STREAMS_FOR_BLOCKS,
    "dspark": ("kimi_linear", *_STREAMS_FOR_BLOCKS),
    "dflash2": _STREAMS_FOR_BLOCKS,
}
"""Families whose class in SGLang returns residual streams to a head, or that of the model with images around them.

Those classes have `set_eagle3_layers_to_capture`, `set_dflash_layers_to_capture` or `set_dspark_layers_to_capture`.
"""
STREAMS_OF_LLAMA_CPP = ("llama", "mistral", "qwen3", "qwen3_moe")
"""Families whose residual streams in llama.cpp were compared with ours.

Its classes of Qwen2, Gemma 3 and DeepSeek-V2 return none.
"""
FAMILIES_OF_OPENVINO = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose counters in OpenVINO GenAI were compared with ours. It finds no residual streams among the operations
of a layer with experts."""
REQUIRED = ("engine", "method", "head_sha256")
"""Entries of `serving.json` that every export has."""


def read_serving_facts(head_dir: Path, engine: str, head_sha256: str) -> dict[str, Any]:
    """Returns the contents of the exported head's `serving.json`, which says how an engine loads the head.

    Raises:
        UserError: nothing was exported, or the file is damaged, or the export is for another engine or contains another
            head.
    """
    path = require(head_dir / SERVING, "mtptrain export")
    facts = read_sealed(path, "run mtptrain export again", REQUIRED, files=None)
    if facts["engine"] != engine:
        raise UserError(
            f"{path}: engine must be {engine}, but is {facts['engine']}; run mtptrain export with "
            f"export.engine={engine}, or set serving.head_dir"
        )
    if facts["head_sha256"] != head_sha256:
        raise UserError(
            f"{path}: head_sha256 must be {head_sha256}, the hash of this run's head, but is "
            f"{facts['head_sha256']}, the hash of another head; run mtptrain export again, or correct serving.head_dir"
        )
    return facts


def refuse_changed_export(directory: Path, advice: str = "copy or download it again") -> None:
    """Raises UserError if a folder is an export of ours whose `serving.json`, weights or config.json have changed.

    An export is recognised by either its `serving.json` or its `stage.json`, which lists that file.
    """
    path = directory / SERVING
    is_ours = path.is_file() and not {SEAL, "head_sha256"}.isdisjoint(read_json(path, advice))
    if is_ours or StageDir(directory).lists(SERVING):
        refuse_absent(path, advice)
        read_sealed(path, advice, files=None)


def export_dir(config: PipelineConfig) -> StageDir:
    """Returns the folder to write the export to."""
    directory = Path(config.export.output_dir or config.stage_dir("export") / config.export.engine)
    if directory.is_symlink():  # a directory cannot be renamed to a link
        directory = directory.resolve()
    return StageDir(directory, "export.output_dir")


def warn_of_untested_vllm(version: str, place: str) -> None:
    """Warn if the vLLM at `place` is not the one that has served exports in the tests."""
    tested = WRITTEN_FOR["vllm"]
    if version.split(".")[:2] != tested.split("."):
        warn_of_other_version("vllm", "vLLM", version, place, f" (0.33 has no medusa): install vllm=={tested}.0")


def warn_of_other_version(engine: str, name: str, version: str, place: str, more: str = "") -> None:
    """Warn that an engine, which users know by this name, has not the version that exports are written for."""
    warnings.warn(
        f"{place}: {name} should be {WRITTEN_FOR[engine]}, the only version that mtptrain was tested with, but is "
        f"{version}; another version may read exports differently{more}",
        stacklevel=3,
    )


def served_model(facts: dict[str, Any], head_dir: Path, target: Path | str) -> Path | str:
    """Returns the model to start the engine with: the export itself if it also holds the target, else the target."""
    return head_dir.resolve() if facts.get("holds_target", False) else target


def speculative_config(facts: dict[str, Any], head_dir: Path, num_speculative_tokens: int) -> dict[str, Any]:
    """Returns vLLM's `--speculative-config`, without `model` if the export also holds the target."""
    return {
        "method": facts["method"],
        **({} if facts.get("holds_target", False) else {"model": str(head_dir.resolve())}),
        "num_speculative_tokens": num_speculative_tokens,
        **facts.get("speculative_settings", {}),
    }


def cache_bytes(target: PreTrainedConfig, head_dir: Path, max_model_len: int, num_sequences: int) -> int:
    """Returns enough bytes for a float32 KV cache of the target's layers and of the exported head's.

    A head gets at least two layers of the target's size. Each sequence has room for one more block, because the
    engine's blocks may hold up to 128 tokens.
    """
    own = read_json(head_dir / "config.json", "run mtptrain export again")
    heads = own.get("num_attention_heads") or 0
    own_head_dim = own.get("head_dim") or (own.get("hidden_size") or 0) // max(1, heads)
    head_values = (own.get("num_hidden_layers") or 0) * (own.get("num_key_value_heads") or heads) * own_head_dim
    layer_values = key_heads(target) * head_dim(target)
    token_bytes = 2 * 4 * (target.num_hidden_layers * layer_values + max(2 * layer_values, head_values))
    return num_sequences * (max_model_len + 128) * token_bytes + (64 << 20)
