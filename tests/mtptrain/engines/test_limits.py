"""Tests that an export that an engine would not serve correctly is refused with the reason and a remedy."""

import ast
import inspect
import warnings
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from types import GeneratorType
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from mtptrain.engines.table import ENGINES, engine_of, first_refusal, format_for, warn_of_limits
from tests.conftest import FAMILIES, YARN_ROPE
from tests.mtptrain.engines.conftest import BLOCK_DRAFTERS, head_config

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 1},
    **{"num_key_value_heads": 1, "max_position_embeddings": 512},
}
MIMO = {"attention_bias": True, "zero_first_embedding": True, "prenorm_states": True}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
WINDOW = {"sliding_window": 128}
SLIDING = {"causal": "sliding", "sliding_window": 9, "num_layers": 2, "capture_layers": [1, 2]}
Case = tuple[str, str, dict[str, Any], str, dict[str, Any], str]
"""Engine, head, its settings, the target's family, its settings, and a part of the message."""
# fmt: off
REFUSED: list[Case] = [
    ("vllm", "mtp", {}, "llama", FP8,
     "target.path: must be a target that is not quantised to export head mtp for vllm, but is quantised with fp8: vLLM "
     "builds the layers of this head with the target's quantisation; export for the target in bf16, or train"),
    ("vllm", "mtp", {}, "mimo", {}, "head.prenorm_states: must be true for a mimo target and false for any"),
    ("vllm", "mtp", {"prenorm_states": True}, "llama", {}, "but is true: vLLM passes a head the states before"),
    ("vllm", "mtp", {"prenorm_states": True}, "mimo", {}, "head.zero_first_embedding: must be true for a mimo"),
    ("vllm", "mtp", {"zero_first_embedding": True}, "qwen3", {}, "; set export.engine=sglang, or change it"),
    ("vllm", "mtp", {"attention_bias": True}, "llama", {}, "head.attention_bias: must be false for families"),
    ("vllm", "mtp", {**MIMO, "intermediate_size": 64}, "mimo", {}, "one with (1, 1, 128, 64) instead of (1,"),
    ("vllm", "mtp", MIMO, "mimo", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
     "target.path: must be a mimo target without a sliding window to export head mtp for vllm, but is one"),
    ("vllm", "native_mtp", {}, "llama", {}, "must be of a family with MTP modules (deepseek_v3, "),
    ("vllm", "native_mtp", {}, "glm4_moe", {"num_nextn_predict_layers": 3}, "must be a target with one MTP"),
    ("vllm", "native_mtp", {}, "glm4_moe", FP8, "vLLM builds the module with the target's quantisation;"),
    ("vllm", "eagle", {}, "mimo", {}, "; set export.engine=sglang, or train head=mtp with"),
    ("vllm", "medusa", {}, "mimo", {}, "head medusa for vllm, but is mimo: vLLM passes the states before"),
    ("vllm", "eagle3", {}, "gemma3_text", {}, "vLLM's class does not return its residual streams; set"),
    *(("vllm", name, {}, "glm4", {}, "does not return its residual streams; train head=mtp (for a mimo")
      for name in ("eagle3", "peagle", *BLOCK_DRAFTERS)),
    *(("sglang", name, {}, "mimo", {}, f"that returns residual streams to head {name}; train head=mtp")
      for name in ("eagle3", *BLOCK_DRAFTERS)),
    ("sglang", "eagle3", {}, "granite", {}, "to head eagle3; set export.engine=vllm, or train head=mtp"),
    ("sglang", "mtp", {"prenorm_states": True}, "mimo", {}, "head.prenorm_states: must be false to export"),
    ("sglang", "eagle3", {"norm_before_residual": True}, "llama", {}, "is true: SGLang takes the residual"),
    ("sglang", "eagle3", {"capture_layers": [2]}, "llama", {}, "must be two or more to export head eagle3 for"),
    *(("sglang", name, {"capture_layers": [1, 4]}, "llama", {}, "must be below the target's last layer to")
      for name in ("eagle3", "dflash2")),
    ("sglang", "dspark", {"capture_layers": [0, 2]}, "llama", {}, "must be above 0 (the embeddings) to export"),
    ("sglang", "dspark", {"draft_vocab_size": 64}, "llama", {}, "head.draft_vocab_size: must be null to"),
    *(("sglang", "eagle3", {"capture_layers": [1, 2, 3]}, family, {}, "must be a list that does not start with")
      for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")),
    ("llama_cpp", "eagle3", {"norm_output": True}, "llama", {}, "is true: llama.cpp feeds back the state"),
    ("llama_cpp", "eagle3", {"fc_norm": True}, "llama", {}, "; set export.engine=vllm or sglang, or train"),
    ("llama_cpp", "eagle3", {"capture_layers": [1, 3]}, "llama", {}, "must be three to export head eagle3 for"),
    *(("llama_cpp", name, {"capture_layers": [1, 2, 4]}, "llama", {}, "but is [1, 2, 4]: llama.cpp captures a")
      for name in ("eagle3", *BLOCK_DRAFTERS)),
    *(("llama_cpp", name, SLIDING, "llama", {}, "head.causal: must be all or none if some layers slide and")
      for name in BLOCK_DRAFTERS),
    *(("llama_cpp", name, {}, "gemma3_text", {}, "target.path: must be one of llama, mistral, qwen3, qwen3_moe")
      for name in ("eagle3", *BLOCK_DRAFTERS)),
    *(("llama_cpp", name, {}, *target) for name in ("eagle3", "dspark", "draft_model") for target in (
        ("mistral", WINDOW, "must be a target without a sliding window to export head"),
        ("llama", {"hidden_act": "gelu"}, "a target with hidden_act=silu to"),
        ("qwen3", {"attention_bias": True}, "a target with attention_bias=false, unless it is a Llama to"),
        ("qwen3_moe", {"norm_topk_prob": False}, "a target with norm_topk_prob=true to"),
    )),
    ("llama_cpp", "dflash2", {"selector_top_k": 11}, "llama", {}, "must be k with k (k + 1) of at most the"),
    *(("llama_cpp", "draft_model", head, family, target, f"head.init_from: must be one of llama, mistral, {more}")
      for head, family, target, more in (
          ({}, "qwen2", {"rope_parameters": YARN_ROPE}, "qwen2, qwen3 without a window, and with unscaled"),
          ({"init_from": "gemma3"}, "llama", {}, "qwen2"), ({"init_from": "mistral"}, "llama", {}, "qwen2"))),
    ("tensorrt_llm", "eagle3", {"norm_before_residual": True}, "llama", {}, "is true: TensorRT-LLM takes the"),
    ("tensorrt_llm", "eagle3", {"capture_layers": [2]}, "llama", {}, "must be two or more to export head"),
    ("tensorrt_llm", "eagle3", {"capture_layers": [0, 2]}, "llama", {}, "must be above 0 (the embeddings) to"),
    *(("openvino", "eagle3", {setting: True}, "llama", {}, f"head.{setting}: must be false to export head")
      for setting in ("norm_before_fc", "norm_before_residual", "fc_norm", "norm_output")),
    ("openvino", "eagle3", {"capture_layers": [1, 3]}, "llama", {}, "must be three to export head eagle3 for"),
    *(("openvino", name, {"capture_layers": [0, 1, 2]}, "llama", {}, "must be above 0 (the embeddings) to")
      for name in ("eagle3", "dflash")),
    ("openvino", "dflash", {"capture_layers": [1, 4]}, "llama", {}, "must be below the target's last layer to"),
    ("openvino", "dflash", {"draft_vocab_size": 64}, "llama", {}, "is 64: OpenVINO gives the head the"),
    ("openvino", "dflash", {"causal": "all"}, "llama", {}, "head.causal: must be none to export head dflash"),
    *(("openvino", name, {}, "gemma3_text", {}, "target.path: must be one of llama, mistral, qwen2, qwen3 to")
      for name in ("eagle3", "dflash", "draft_model")),
    *(("openvino", name, {}, "mistral", WINDOW, "target.path: must be a target without a sliding window to export head")
      for name in ("eagle3", "dflash", "draft_model")),
    ("openvino", "draft_model", {"init_from": "gemma3"}, "llama", {}, "head.init_from: must be one of llama,"),
    ("openvino", "draft_model", {"init_from": "mistral"}, "llama", {}, "head.init_from: must be a model"),
    *((engine, "dflash", {"sample_from_anchor": True}, "llama", {}, "is true: ")
      for engine in ("vllm", "sglang", "openvino")),
    ("vllm", "dflash", {"sample_from_anchor": True}, "qwen3", {}, "; set export.engine=llama_cpp, or train"),
    ("transformers", "mtp", {"attention_bias": True}, "llama", {}, "must be without settings of MiMo's MTP"),
    ("transformers", "mtp", {}, "qwen3", {}, "must be a Llama or Mistral with full attention, SiLU and no"),
    ("transformers", "mtp", {}, "llama", {"hidden_act": "gelu"}, "but is one with hidden_act gelu:"),
    ("transformers", "mtp", {}, "llama", {"attention_bias": True}, "but is one with biases: transformers"),
    ("transformers", "mtp", {}, "mistral", WINDOW, "but is one with a sliding window of 128 tokens:"),
    ("transformers", "mtp", {}, "llama", FP8, "the head's layer would have to be quantised like the target's;"),
    ("transformers", "mtp", {"intermediate_size": 64}, "llama", {}, "a layer with the target's sizes"),
]
# fmt: on


def configured(family: str, **settings: object) -> PreTrainedConfig:
    """Returns the config of a tiny target."""
    config: PreTrainedConfig = AutoConfig.for_model(family, **{**SIZES, **settings})
    return config


@pytest.fixture(scope="module", autouse=True)
def draft_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs the tests in a folder with the configs of two draft models."""
    directory = tmp_path_factory.mktemp("draft_models")
    configured("gemma3_text", vocab_size=32000).save_pretrained(directory / "gemma3")
    configured("mistral", vocab_size=32000, sliding_window=64).save_pretrained(directory / "mistral")
    with chdir(directory):
        yield


def innermost(generator: Any) -> Any:
    """Returns the generator that yielded last, of one that may yield from others."""
    while isinstance(generator.gi_yieldfrom, GeneratorType):
        yield generator
        generator = generator.gi_yieldfrom
    yield generator


def test_every_reason_of_every_engine_refuses_with_its_message() -> None:
    provoked: set[tuple[str, int]] = set()
    for engine, name, head, family, target, message in REFUSED:
        config, target_config = head_config(name, **head), configured(family, **target)
        with pytest.raises(ValueError) as refused:
            format_for(engine, config, target_config)
        assert message in str(refused.value), (engine, name, head, family, target)
        generator: Any = engine_of(engine).why_not(config, target_config)
        next(generator)
        provoked |= {(each.gi_code.co_filename, each.gi_frame.f_lineno) for each in innermost(generator)}
    for engine in ENGINES:
        path = inspect.getfile(type(engine_of(engine))).replace("vllm/engine.py", "vllm/limits.py")
        nodes = ast.walk(ast.parse(Path(path).read_text()))
        yields = [node for node in nodes if isinstance(node, ast.Yield | ast.YieldFrom)]
        lines = {line for file, line in provoked if file == path}
        assert yields and [node.lineno for node in yields if lines.isdisjoint(lines_of(node))] == [], path


def lines_of(node: ast.Yield | ast.YieldFrom) -> range:
    assert node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)


def test_which_engine_serves_which_family() -> None:
    """Before adding a family here, look it up in the engines."""
    families = sorted({family for family, _ in FAMILIES.values()})
    served = {
        (engine, name, family)
        for family in families
        for engine in ENGINES
        for name in engine_of(engine).formats
        if not first_refusal(engine, head_of(engine, name), configured(family))
    }
    with_streams, both = ("llama", "mistral", "qwen3"), ("vllm", "sglang")
    common = (*with_streams, "qwen2", "qwen3_moe", "deepseek_v2")
    expected = {(engine, name, family) for engine in both for name in ("mtp", "eagle") for family in common}
    expected |= {(engine, name, "gemma3_text") for engine in both for name in ("mtp", "eagle")}
    # For mimo, vLLM serves head mtp only with the settings of MiMo's own layer, and eagle not at all.
    expected |= {("sglang", "mtp", "mimo"), ("sglang", "eagle", "mimo"), ("sglang", "eagle3", "gemma3_text")}
    expected |= {("vllm", name, family) for name in ("eagle3", "peagle", *BLOCK_DRAFTERS) for family in common}
    expected |= {
        ("sglang", name, family)
        for name in ("eagle3", *BLOCK_DRAFTERS)
        for family in common
        if name == "eagle3" or family != "qwen2"
    }
    expected |= {("vllm", "medusa", family) for family in (*common, "gemma3_text")}
    expected |= {("vllm", "draft_model", family) for family in families}
    expected |= {("tensorrt_llm", name, family) for name in ("eagle3", "draft_model") for family in families}
    expected |= {("llama_cpp", name, family) for name in ("eagle3", *BLOCK_DRAFTERS) for family in with_streams}
    expected |= {
        ("openvino", name, family)
        for name in ("eagle3", "dflash", "draft_model")
        for family in (*with_streams, "qwen2")
    }
    # Every target with experts here has weights that do not add up to 1.
    expected |= {("llama_cpp", "draft_model", family) for family in (*with_streams, "qwen2", "gemma3_text", "mimo")}
    assert served == expected | {("transformers", "mtp", "llama")}, "mistral's default config has a sliding"


def head_of(engine: str, name: str) -> Any:
    layers = [1, 2, 3] if engine in ("llama_cpp", "openvino") else [2, 3]
    return head_config(name, **({"capture_layers": layers} if name in ("eagle3", "peagle", *BLOCK_DRAFTERS) else {}))


def test_a_quantised_target_is_served_where_the_head_keeps_its_own_dtype() -> None:
    for engine, name in (("vllm", "eagle"), ("vllm", "eagle3"), ("sglang", "eagle"), ("sglang", "eagle3")):
        form = format_for(engine, head_config(name), configured("llama", **FP8))
        assert "quantization_config" not in form.config_json("bfloat16")


def test_a_limit_is_warned_of_before_a_long_computation(user_warnings: list[warnings.WarningMessage]) -> None:
    warn_of_limits("sglang", head_config("eagle3"), configured("gemma3_text"))
    assert not user_warnings
    with pytest.warns(UserWarning, match=r"can be trained and measured, but not exported: target\.path: must be of a"):
        warn_of_limits("vllm", head_config("eagle3"), configured("gemma3_text"))
    with pytest.warns(UserWarning, match=r"not exported: head: must be one of .* but is hydra, which no engine has a"):
        warn_of_limits("vllm", head_config("hydra"), configured("llama"))
    with pytest.raises(ValueError, match=r"export\.engine: must be vllm or sglang or llama_cpp or tensorrt_llm or op"):
        format_for("transformers", head_config("eagle3"), configured("llama"))
