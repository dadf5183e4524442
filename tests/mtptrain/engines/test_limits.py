"""Tests that an export that an engine would not serve correctly is refused with the reason and a remedy."""

import json
import re
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mtptrain.engines.table import ENGINES, engine_of, first_refusal, format_for, warn_of_limits
from mtptrain.utils.errors import UserError
from tests.conftest import YARN_ROPE
from tests.mtptrain.engines.conftest import BLOCK_DRAFTERS, head_config, target_config

MIMO = {"attention_bias": True, "zero_first_embedding": True, "prenorm_states": True}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
INT4: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:.*lm_head"]}}}
QUANTISED_LM_HEAD = {"quantization_config": INT4}
WINDOW = {"sliding_window": 128}
SLIDING = {"causal": "sliding", "sliding_window": 9, "num_layers": 2, "capture_layers": [1, 2]}
PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
MROPE: dict[str, Any] = {"rope_parameters": PLAIN_ROPE | {"mrope_section": [3, 3, 2]}}
QWEN3_5: tuple[str, dict[str, Any]] = ("qwen3_5_text", {"head_dim": 64, **MROPE})
LINEAR_ROPE = PLAIN_ROPE | {"rope_type": "linear", "factor": 4.0, "mrope_section": [3, 3, 2]}
EVERY_OTHER = {"layer_types": ["linear_attention", "full_attention"] * 2}
Case = tuple[str, str, dict[str, Any], str, dict[str, Any], str]
"""Engine, head, its settings, the target's family, its settings, and a part of the message."""
# fmt: off
REFUSED: list[Case] = [
    ("vllm", "mtp", {}, "llama", FP8,
     "target.path: must be a target that is not quantised to export head mtp for vllm, but is quantised with fp8: vLLM "
     "builds the layers of this head with the target's quantisation; export for the target in bf16, or train"),
    *(("sglang", name, head, "llama", QUANTISED_LM_HEAD,
       "but is one with a quantised one: SGLang reads the weight of lm_head to draft with this head, and a packed one h"
       "as none; set export.engine=vllm, or train head=dflash")
      for name, head in (("eagle", {}), ("eagle3", {"draft_vocab_size": 64}), ("dspark", {}), ("dflash2", {}))),
    ("vllm", "mtp", {}, "mimo", {}, "head.prenorm_states: must be true for a mimo target and false for any"),
    ("vllm", "mtp", {"zero_first_embedding": True}, "qwen3", {}, "; set export.engine=sglang, or change it"),
    ("vllm", "mtp", {"attention_bias": True}, "llama", {}, "head.attention_bias: must be false for families"),
    ("vllm", "mtp", {**MIMO, "intermediate_size": 64}, "mimo", {}, "one with (1, 1, 64, 64) instead of (1,"),
    ("vllm", "mtp", MIMO, "mimo", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
     "target.path: must be a mimo target without a sliding window to export head mtp for vllm, but is one"),
    ("vllm", "native_mtp", {}, "llama", {}, "must be of a family with MTP modules (deepseek_v3, "),
    ("vllm", "native_mtp", {}, "glm4_moe", {"num_nextn_predict_layers": 3}, "must be a target with one MTP"),
    ("vllm", "medusa", {}, "mimo", {}, "head medusa for vllm, but is mimo: vLLM passes the states before"),
    *(("vllm", name, {}, "glm4", {}, "does not return its residual streams; train head=eagle or medusa or mtp")
      for name in ("eagle3", "peagle", *BLOCK_DRAFTERS)),
    ("vllm", "dflash", {"sample_from_anchor": True}, "qwen3", {}, "; set export.engine=llama_cpp, or train"),
    ("sglang", "eagle3", {}, "granite", {}, "to head eagle3; set export.engine=vllm, or train head=eagle or m"),
    ("sglang", "mtp", {"prenorm_states": True}, "mimo", {}, "head.prenorm_states: must be false to export"),
    ("sglang", "eagle3", {"norm_before_residual": True}, "llama", {}, "is true: SGLang takes the residual"),
    ("sglang", "eagle3", {"capture_layers": [2]}, "llama", {}, "must be two or more to export head eagle3 for"),
    ("sglang", "dflash2", {"capture_layers": [1, 4]}, "llama", {}, "must be below the target's last layer to"),
    ("sglang", "dspark", {"capture_layers": [0, 2]}, "llama", {}, "must be above 0 (the embeddings) to export"),
    ("sglang", "dspark", {"draft_vocab_size": 64}, "llama", {}, "head.draft_vocab_size: must be null to"),
    ("sglang", "eagle3", {"capture_layers": [1, 2, 3]}, "deepseek_v3", {}, "must be a list that does not start with"),
    ("llama_cpp", "eagle3", {"fc_norm": True}, "llama", {}, "; set export.engine=vllm or sglang, or train"),
    ("llama_cpp", "eagle3", {"capture_layers": [1, 3]}, "llama", {}, "must be three to export head eagle3 for"),
    ("llama_cpp", "dspark", {"capture_layers": [1, 2, 4]}, "llama", {}, "but is [1, 2, 4]: llama.cpp captures a"),
    ("llama_cpp", "dflash", SLIDING, "llama", {}, "head.causal: must be all or none if some layers slide and"),
    ("llama_cpp", "eagle3", {}, "gemma3_text", {}, "target.path: must be one of llama, mistral, qwen3, qwen3_moe"),
    ("llama_cpp", "draft_model", {}, "mistral", WINDOW, "must be a target without a sliding window to export head"),
    ("llama_cpp", "eagle3", {}, "llama", {"hidden_act": "gelu"}, "a target with hidden_act=silu to"),
    ("llama_cpp", "draft_model", {"init_from": "llama"}, "starcoder2", {}, "a target with hidden_act=silu to"),
    ("llama_cpp", "eagle3", {}, "qwen3", {"attention_bias": True}, "a target with attention_bias=false to export head"),
    ("llama_cpp", "eagle3", {}, "qwen3_moe", {"norm_topk_prob": False}, "a target with norm_topk_prob=true to"),
    ("llama_cpp", "dflash2", {"selector_top_k": 11}, "llama", {}, "must be k with k (k + 1) of at most the"),
    ("llama_cpp", "draft_model", {}, "qwen2", {"rope_parameters": YARN_ROPE}, "must be one of llama, mistral, qwen2"),
    ("llama_cpp", "draft_model", {"init_from": "mistral"}, "llama", {}, "but is one with a window of 64"),
    ("openvino", "eagle3", {"fc_norm": True}, "llama", {}, "head.fc_norm: must be false to export head"),
    ("openvino", "dflash", {"capture_layers": [0, 1, 2]}, "llama", {}, "must be above 0 (the embeddings) to"),
    ("openvino", "dflash", {"capture_layers": [1, 4]}, "llama", {}, "must be below the target's last layer to"),
    ("openvino", "dflash", {"causal": "all"}, "llama", {}, "head.causal: must be none to export head dflash"),
    ("openvino", "eagle3", {}, "gemma3_text", {}, "must be a target of one of llama, mistral, qwen2, qwen3"),
    ("openvino", "draft_model", {"init_from": "mistral"}, "llama", {}, "head.init_from: must be a model"),
    ("mlx", "eagle3", {}, "llama", {}, "target.path: must be a qwen3_5_text to export head eagle3 for mlx"),
    ("mlx", "eagle3", {}, "gemma4_text", {}, "with a head, mlx-vlm changes the answers of Gemma 4"),
    *(("mlx", "eagle3", {setting: True}, *QWEN3_5, f"head.{setting}: must be false to export head eagle3 for mlx")
      for setting in ("fc_norm", "norm_output")),
    ("mlx", "eagle3", {"capture_layers": [0, 1, 2]}, *QWEN3_5, "must be above 0 (the embeddings) to export head"),
    ("mlx", "eagle3", {"capture_layers": [1, 2]}, *QWEN3_5, "head.capture_layers: must be three to export head"),
    ("mlx", "eagle3", {"rope_parameters": YARN_ROPE}, *QWEN3_5, "head.rope_parameters: must be of type default to"),
    ("mlx", "dflash", {"draft_vocab_size": 64}, *QWEN3_5, "head.draft_vocab_size: must be null to export head dfl"),
    ("mlx", "dflash", {"sliding_window": 9}, *QWEN3_5, "must be one without windows and causal layers to export"),
    ("mlx", "dflash", {"causal": "all"}, *QWEN3_5, "but is sliding_window=None, causal=all: blocks with windows or"),
    ("mlx", "dflash", {}, "qwen3_5_text", {"hidden_act": "gelu", **MROPE}, "must be a target with hidden_act=silu to"),
    ("mlx", "eagle3", {"rope_parameters": {"rope_type": "default"}}, "qwen3_5_text", {"rope_parameters": LINEAR_ROPE},
     "target.path: must be a target with rope_parameters of type default to export head eagle3 for mlx, but is linear"),
    ("mlx", "dflash", {}, "qwen3_5_text", {"rope_parameters": PLAIN_ROPE}, "must be a target with mrope_section and"),
    ("mlx", "eagle3", {}, "qwen3_5_text", {**EVERY_OTHER, **MROPE}, "the full_attention_interval of its layer_types to "
     "export head eagle3 for mlx, but is 4: mlx-vlm reads only the first of these; set export.engine=vllm or"),
    ("mlx", "dflash", {"sample_from_anchor": True}, *QWEN3_5, "head.sample_from_anchor: must be false to export"),
    *(("mlx", name, {}, *QWEN3_5, f"to export head {name} for mlx, but is mlx: mtptrain does not write this head for")
      for name in ("dflash2", "dspark", "native_mtp", "peagle", "eagle", "medusa")),
    ("mlx", "draft_model", {}, *QWEN3_5, "must be a target of one of deepseek_v3, dots1, ern"),
    ("mlx", "draft_model", {}, "glm", {"pad_token_id": 0}, "must be a target of one of deepseek_v3, dots1, ern"),
    ("mlx", "draft_model", {}, "llama", {"hidden_act": "gelu"}, "must be a target with hidden_act=silu to"),
    ("mlx", "draft_model", {}, "mistral", WINDOW, "must be a target without a sliding window to export head draft"),
    ("transformers", "mtp", {"attention_bias": True}, "llama", {}, "must be without a RoPE or other set"),
    ("transformers", "mtp", {}, "qwen3", {}, "must be a Llama or Mistral with full attention, SiLU and no"),
    ("transformers", "mtp", {}, "mistral", WINDOW, "but is one with a sliding window of 128 tokens:"),
    ("transformers", "mtp", {"intermediate_size": 64}, "llama", {}, "a layer with the target's sizes"),
]
# fmt: on


def test_what_an_engine_does_not_serve_is_refused_with_the_reason_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_config("mistral", sliding_window=64).save_pretrained(tmp_path / "mistral")  # of a draft model
    target_config().save_pretrained(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    scaled = target_config(rope_parameters=YARN_ROPE, _name_or_path="scaled")
    scaled.save_pretrained("scaled")
    with pytest.raises(UserError, match=r'add the entries {"rope_scaling": {.*"factor": .*} to scaled/config\.json'):
        format_for("mlx", head_config("draft_model"), scaled)
    for config, name, more, message in (
        (
            target_config("qwen3_moe", _name_or_path="experts", num_experts=8),
            "draft_model",
            {},
            r'has rope_theta and num_experts and head_dim .* "num_experts": 8, "head_dim": 64} to experts/config',
        ),
        (target_config(_name_or_path="seen"), "draft_model", {"text_config": {}}, "a target that reads text alone to"),
        (
            target_config("qwen3_5_text", _name_or_path="full", layer_types=["full_attention"] * 4, **QWEN3_5[1]),
            "dflash",
            {"full_attention_interval": 1},
            "must be a target with full_attention_interval above 1",
        ),
    ):
        config.save_pretrained(config.name_or_path)
        stored = Path(config.name_or_path) / "config.json"
        stored.write_text(json.dumps(json.loads(stored.read_text()) | more))
        with pytest.raises(UserError, match=message):
            format_for("mlx", head_config(name), config)
    for engine, name, head, family, target, message in REFUSED:
        with pytest.raises(UserError) as refused:
            format_for(engine, head_config(name, **head), target_config(family, **target))
        assert message in str(refused.value), (engine, name, head, family, target)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_a_refusal_advises_is_served_with_this_target(family: str) -> None:
    advised = set()
    target = target_config(family)
    for engine, name in product(ENGINES, ("mtp", "eagle3", "dflash", "hydra", "native_mtp")):
        try:
            format_for(engine, head_config(name), target)
            continue
        except UserError as error:
            advice = str(error).rpartition("; ")[2]
        for part in advice.split(", or "):
            found = {key: each.split(" or ") for key, each in re.findall(r"(engine|head)=(\w+(?: or \w+)*)", part)}
            for other in product(found.get("engine", [engine]), found.get("head", [name]) if found else []):
                advised.add(other)
                assert first_refusal(other[0], head_config(other[1]), target) is None, (engine, name, part)
    assert len(advised) > 5


def test_a_quantised_target_is_served_where_the_head_keeps_its_own_dtype() -> None:
    for engine, name in (("vllm", "eagle"), ("vllm", "eagle3"), ("sglang", "eagle"), ("sglang", "eagle3")):
        form = format_for(engine, head_config(name), target_config("llama", **FP8))
        assert "quantization_config" not in form.config_json("bfloat16")
    ignored = {"quantization_config": INT4 | {"ignore": ["lm_head"]}}
    for engine, name, more in (
        *(("vllm", name, QUANTISED_LM_HEAD) for name in ("eagle", "eagle3", "dflash", "peagle", "medusa")),
        ("sglang", "dflash", QUANTISED_LM_HEAD),
        ("sglang", "eagle3", ignored),
    ):
        format_for(engine, head_config(name), target_config("llama", **more))


def test_a_limit_is_warned_of_before_a_long_computation(user_warnings: list[warnings.WarningMessage]) -> None:
    warn_of_limits("sglang", head_config("eagle3"), target_config("gemma3_text"))
    assert not user_warnings
    with pytest.warns(UserWarning, match=r"can be trained and measured, but not exported: target\.path: must be of a"):
        warn_of_limits("vllm", head_config("eagle3"), target_config("gemma3_text"))
    with pytest.warns(UserWarning, match=r"not exported: head: must be one of .* but is hydra: no engine has a class"):
        warn_of_limits("vllm", head_config("hydra"), target_config())
    with pytest.raises(ValueError, match=r"export\.engine: must be vllm or sglang or llama_cpp or tensorrt_llm or op"):
        format_for("transformers", head_config("eagle3"), target_config())


def test_a_directory_whose_name_switches_vllms_method_is_refused(tmp_path: Path) -> None:
    """A recipe such as `llama3_1_8b_eagle3` writes to a folder of the same name, which is right for head eagle3."""
    forms = {name: format_for("vllm", head_config(name), target_config()) for name in ("eagle", "eagle3")}
    engine = engine_of("vllm")
    for name, method in (("eagle-head", "eagle"), ("llama_eagle3", "eagle3")):
        engine.check_directory(tmp_path / name / "vllm", forms[method])
    for name, method in (("eagle-head", "eagle3"), ("my_eagle3", "eagle"), ("DFlash", "eagle")):
        message = rf"export\.output_dir: vLLM must not infer a method other than {method} from the path, but"
        with pytest.raises(ValueError, match=message):
            engine.check_directory(tmp_path / name / "vllm", forms[method])
