"""Tests that an export that an engine would not serve correctly is refused with the reason and a remedy."""

import warnings
from collections.abc import Iterator
from contextlib import chdir

import pytest
from transformers import AutoConfig, PreTrainedConfig

from mtptrain.engines.limits import BLOCK_DRAFTERS, LIMITS
from mtptrain.engines.table import FORMATS, format_for, warn_of_limits
from tests.conftest import FAMILIES, YARN_ROPE
from tests.mtptrain.engines.conftest import head_config

FAMILIES_IN_TESTS = sorted({family for family, _ in FAMILIES.values()})
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
MIMO = {"attention_bias": True, "zero_first_embedding": True, "prenorm_states": True}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
REFUSED: list[tuple[str, str, dict[str, object], str, dict[str, object], str]] = [
    (
        "vllm", "mtp", {}, "llama", FP8,
        r"target\.path: must be a target that is not quantised to export head mtp for vllm, but is quantised with "
        r"fp8: vLLM builds the layers of this head with the target's quantisation; export for the target in bf16, or "
        r"train head=eagle3",
    ),
    (
        "vllm", "native_mtp", {}, "llama", {},
        r"target\.path: must be of a family with MTP modules \(deepseek_v3, .*\) to export head native_mtp for vllm, "
        r"but is a llama: vLLM has no such class for others; train head=mtp",
    ),
    (
        "vllm", "native_mtp", {}, "glm4_moe", {"num_nextn_predict_layers": 3},
        r"target\.path: must be a target with one MTP module .* but is 3: vLLM drafts each depth with a module of its",
    ),
    (
        "vllm", "native_mtp", {}, "glm4_moe", FP8,
        r"target\.path: must be a target that is not quantised .* but is quantised with fp8: vLLM builds the "
        r"module with the target's quantisation",
    ),
    *(
        (
            "vllm", name, {}, family, {},
            rf"target\.path: must be of a family whose layers can be captured to export head {name} for vllm, but is "
            rf"{family}: vLLM's class does not return its residual streams; {advice}",
        )
        for name, family, advice in (
            *((name, "glm4", "train head=mtp") for name in ("eagle3", "peagle", *BLOCK_DRAFTERS)),
            ("eagle3", "gemma3_text", r"set export\.engine=sglang, or train head=mtp"),
            *((name, "gemma3_text", "train head=mtp") for name in ("peagle", *BLOCK_DRAFTERS)),
            *((name, "glm4_moe_lite", r"set export\.engine=sglang, or train head=mtp") for name in BLOCK_DRAFTERS),
        )
    ),
    *(
        (
            "sglang", name, {}, family, {},
            rf"but is a {family}: SGLang has no class for it that returns residual streams to head {name}; {advice}",
        )
        for name, family, advice in (
            *((name, "mimo", "train head=mtp") for name in ("eagle3", *BLOCK_DRAFTERS)),
            *((name, "gemma3_text", "train head=mtp") for name in BLOCK_DRAFTERS),
            *(("eagle3", family, r"set export\.engine=vllm, or train head=mtp") for family in ("granite", "smollm3")),
            *((name, "qwen2", r"set export\.engine=vllm, or train head=mtp") for name in BLOCK_DRAFTERS),
        )
    ),
    (
        "sglang", "eagle3", {"norm_before_residual": True}, "llama", {},
        r"head\.norm_before_residual: must be false .* but is true: SGLang takes the residual before the norm; set "
        r"export\.engine=vllm",
    ),
    (
        "sglang", "eagle3", {"capture_layers": [1, 2, 4]}, "llama", {},
        r"head\.capture_layers: must be below the target's last layer .* but is \[1, 2, 4\]: SGLang captures a stream "
        r"at the input",
    ),
    ("sglang", "eagle3", {"capture_layers": [0, 2]}, "llama", {}, r"head\.capture_layers: must be above 0 \(the "
                                                                  r"embeddings\) .* but is \[0, 2\]"),
    ("sglang", "eagle3", {"capture_layers": [2]}, "llama", {}, r"head\.capture_layers: must be two or more .* but is "
                                                               r"\[2\]"),
    *(
        (
            "sglang", "eagle3", {"capture_layers": [1, 2, 3]}, family, {},
            rf"head\.capture_layers: must be a list that does not start with 1 for a .*{family}.* target .* but is "
            r"\[1, 2, 3\]",
        )
        for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    ),
    (
        "transformers", "mtp", {}, "qwen3", {},
        r"target\.path: must be a Llama or Mistral .* but is a qwen3: transformers builds the head from the target's "
        r"own decoder "
        r"layer; set export\.engine=vllm",
    ),
    (
        "vllm", "mtp", {}, "mimo", {},
        r"head\.prenorm_states: must be true for a mimo target and false for any other .* but is false: vLLM passes "
        r"a head the states before",
    ),
    (
        "vllm", "mtp", {"prenorm_states": True}, "llama", {},
        r"head\.prenorm_states: must be true for a mimo .* but is true: .*; change it and train again",
    ),
    (
        "vllm", "mtp", {"prenorm_states": True}, "mimo", {},
        r"head\.zero_first_embedding: must be true for a mimo target .* but is false: of the vLLM "
        r"classes that serve this head, only MiMo's zeroes the embedding",
    ),
    ("vllm", "mtp", {"zero_first_embedding": True}, "qwen3", {}, r"head\.zero_first_embedding: must .* but is true: "),
    (
        "vllm", "mtp", {"attention_bias": True}, "llama", {},
        r"head\.attention_bias: must be false for families other than mimo .* but is true: of the vLLM .*, only MiMo's "
        r"has biases; train without it",
    ),
    (
        "vllm", "mtp", {**MIMO, "intermediate_size": 64}, "mimo", {},
        r"head: must be a layer with the mimo target's sizes \(.*\) .* but is one with \(1, 1, 128, 64\) instead of "
        r"\(1, 1, 128, 96\): vLLM builds",
    ),
    (
        "vllm", "mtp", MIMO, "mimo", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        r"target\.path: must be a mimo target without a sliding window .* but is one with a window of 64 tokens: vLLM",
    ),
    ("vllm", "eagle", {}, "mimo", {}, r"target\.path: must be of a family other than mimo .* but is mimo: vLLM "
                                      r"passes .*; train head=mtp with head\.prenorm_states=true"),
    ("vllm", "medusa", {}, "mimo", {}, r"head medusa for vllm, but is mimo: vLLM passes .* before .*; train head=mtp"),
    ("vllm", "eagle3", {}, "mimo", {}, r"head eagle3 for vllm, but is mimo: vLLM's class does not return"),
    (
        "sglang", "mtp", {"prenorm_states": True}, "mimo", {},
        r"head\.prenorm_states: must be false .* but is true: SGLang passes the states after .*; set "
        r"export\.engine=vllm",
    ),
    (
        "transformers", "mtp", {"attention_bias": True, "zero_first_embedding": True}, "llama", {},
        r"head: must be without settings of MiMo's MTP layer .* but is one with attention_bias, zero_first_embedding: ",
    ),
    ("transformers", "mtp", {}, "llama", {"attention_bias": True}, r"but is one with biases"),
    ("transformers", "mtp", {}, "llama", {"mlp_bias": True}, r"but is one with biases"),
    ("transformers", "mtp", {}, "llama", {"hidden_act": "gelu"}, r"but is one with hidden_act gelu"),
    ("transformers", "mtp", {}, "mistral", {"sliding_window": 128}, r"but is one with a sliding window of 128 tokens"),
    ("transformers", "mtp", {}, "llama", FP8, r"target\.path: must be a target that is not quantised .* head mtp for "
                                              r"transformers"),
    (
        "transformers", "mtp", {"intermediate_size": 64}, "llama", {},
        r"head: must be a layer with the target's sizes \(.*\) .* but is one with \(1, 1, 128, 64\) instead of "
        r"\(1, 1, 128, 96\)",
    ),
    ("llama_cpp", "eagle3", {"norm_output": True}, "llama", {}, r"head\.norm_output: must be false .* but is true: .* "
                                                                r"feeds back the state before"),
    ("llama_cpp", "eagle3", {"fc_norm": True}, "llama", {}, r"head\.fc_norm: must be false .* but is true: "),
    ("llama_cpp", "eagle3", {"capture_layers": [1, 3]}, "llama", {}, r"must be three .* but is \[1, 3\]: "),
    ("llama_cpp", "eagle3", {"capture_layers": [1, 2, 4]}, "llama", {}, r"must be below the target's last layer .* but "
                                                                        r"is \[1, 2, 4\]: llama\.cpp captures"),
    *(
        ("llama_cpp", name, {"capture_layers": [1, 4]}, "llama", {}, r"must be below .* but is \[1, 4\]: llama\.cpp")
        for name in BLOCK_DRAFTERS
    ),
    ("llama_cpp", "eagle3", {}, "qwen2", {}, r"target\.path: must be one of llama, .* but is a qwen2: of other"),
    *(
        ("llama_cpp", name, {}, "gemma3_text", {}, r"target\.path: must be one of llama, .* but is a gemma3_text")
        for name in BLOCK_DRAFTERS
    ),
    *(
        ("llama_cpp", name, {}, "mistral", {"sliding_window": 128}, r"must be a target without a sliding window .* but "
                                                                    r"is one with a window of 128 tokens: its window "
                                                                    r"in llama\.cpp")
        for name in ("eagle3", *BLOCK_DRAFTERS, "draft_model")
    ),
    *(
        ("llama_cpp", name, {}, "llama", {"hidden_act": "gelu"}, r"a target with hidden_act=silu .* but is gelu: ")
        for name in ("eagle3", *BLOCK_DRAFTERS, "draft_model")
    ),
    *(
        ("llama_cpp", name, {}, "qwen3", {"attention_bias": True}, r"with attention_bias=false, .* but is true: llama")
        for name in ("eagle3", *BLOCK_DRAFTERS, "draft_model")
    ),
    *(
        ("llama_cpp", name, {}, "qwen3_moe", {"norm_topk_prob": False}, r"must be a target with norm_topk_prob=true .* "
                                                                        r"but is false: llama\.cpp makes the weights")
        for name in ("eagle3", *BLOCK_DRAFTERS, "draft_model")
    ),
    (
        "llama_cpp", "draft_model", {}, "qwen2", {"rope_parameters": YARN_ROPE},
        r"head\.init_from: must be one of llama, .* but is a qwen2 with yarn RoPE: the names .*; convert the export of",
    ),
    ("tensorrt_llm", "eagle3", {"norm_before_residual": True}, "llama", {}, r"must be false .* is true: TensorRT-LLM"),
    ("tensorrt_llm", "eagle3", {"capture_layers": [2]}, "llama", {}, r"must be two or more .* but is \[2\]: TensorRT"),
    ("tensorrt_llm", "eagle3", {"capture_layers": [0, 2]}, "llama", {}, r"must be above 0 .* but is \[0, 2\]: Tensor"),
    *(
        ("openvino", "eagle3", {setting: True}, "llama", {}, rf"head\.{setting}: must be false .* but is true: optimum")
        for setting in ("norm_before_fc", "norm_before_residual", "fc_norm", "norm_output")
    ),
    ("openvino", "eagle3", {"capture_layers": [1, 3]}, "llama", {}, r"must be three .* but is \[1, 3\]: OpenVINO"),
    *(
        ("openvino", name, {"capture_layers": [0, 1, 2]}, "llama", {}, r"must be above 0 .* but is \[0, 1, 2\]: Open")
        for name in ("eagle3", "dflash")
    ),
    ("openvino", "dflash", {"capture_layers": [1, 4]}, "llama", {}, r"below the target's last .* \[1, 4\]: optimum"),
    ("openvino", "dflash", {"draft_vocab_size": 64}, "llama", {}, r"must be null .* but is 64: OpenVINO gives"),
    *(
        (engine, "dflash", {"sample_from_anchor": True, "capture_layers": [1, 2]}, "llama", {},
         rf"must be false .* but is true: {name}'s class drafts nothing with the newest")
        for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang"), ("openvino", "OpenVINO"))
    ),
    ("openvino", "dflash", {"causal": "all", "capture_layers": [1, 2]}, "llama", {}, r"must be none .* but is all: in"),
    *(
        (
            "llama_cpp", name,
            {"causal": "sliding", "sliding_window": 9, "num_layers": 2, "capture_layers": [1, 2]}, "llama", {},
            r"head\.causal: must be all or none if some layers .* but is sliding: llama\.cpp has one setting",
        )
        for name in BLOCK_DRAFTERS
    ),
    *(
        ("sglang", name, {"draft_vocab_size": 64}, "llama", {}, r"must be null .* but is 64: SGLang gives the head")
        for name in ("dflash", "dspark")
    ),
    *(
        ("sglang", name, head, family, {}, message)
        for name in BLOCK_DRAFTERS
        for head, family, message in (
            ({"capture_layers": [1, 4]}, "llama", r"must be below .* but is \[1, 4\]: SGLang captures"),
            ({"capture_layers": [0, 2]}, "llama", r"must be above 0 .* but is \[0, 2\]: SGLang counts"),
        )
    ),
    ("llama_cpp", "dflash2", {"selector_top_k": 11}, "llama", {}, r"must be k with k \(k \+ 1\) .* but is 11"),
    *(
        ("openvino", name, {}, "gemma3_text", {}, r"target\.path: must be one of llama, .* but is a gemma3_text: in Op")
        for name in ("eagle3", "dflash", "draft_model")
    ),
    *(
        ("openvino", name, {}, "mistral", {"sliding_window": 128}, r"without a sliding window .* but is one with a "
                                                                   r"window of 128 tok")
        for name in ("eagle3", "dflash", "draft_model")
    ),
    *(
        (engine, "draft_model", {"init_from": directory}, "llama", {}, rf"head\.init_from: must be {message}")
        for engine, directory, message in (
            ("openvino", "gemma3", r"one of llama, .* but is a gemma3_text: in OpenVINO .*, or choose another model"),
            ("openvino", "mistral", r"a model without a sliding window .* but is one with a window of 64 tokens: its"),
            ("llama_cpp", "gemma3", r"one of llama, .* but is a gemma3_text: the names"),
            ("llama_cpp", "mistral", r"one of llama, .* but is one with a window of 64 tokens: the names"),
        )
    ),
    ("transformers", "mtp", {}, "llama", {"head_dim": 64}, r"\(1, 1, 128, 96\) instead of \(1, 1, 64, 96\)"),
]  # fmt: skip


def configured(model_type: str, **settings: object) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **{**SIZES, **settings})
    return config


@pytest.fixture(scope="module", autouse=True)
def draft_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs the tests in a folder with the configs of two draft models."""
    directory = tmp_path_factory.mktemp("draft_models")
    configured("gemma3_text", vocab_size=32000).save_pretrained(directory / "gemma3")
    configured("mistral", vocab_size=32000, sliding_window=64).save_pretrained(directory / "mistral")
    with chdir(directory):
        yield


@pytest.mark.parametrize(("engine", "name", "head", "family", "target", "message"), REFUSED)
def test_a_combination_that_the_engine_does_not_serve_is_refused_with_the_reason(
    engine: str, name: str, head: dict[str, object], family: str, target: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        format_for(engine, head_config(name, **head), configured(family, **target))


def test_every_row_is_among_the_cases() -> None:
    """Tests that every row of `LIMITS` is, for each of its heads, the first row that some case violates."""
    provoked = set()
    for engine, name, head, family, target, _ in REFUSED:
        rows = [row for row in LIMITS if row.engine == engine and name in row.heads]
        config, target_config = head_config(name, **head), configured(family, **target)
        provoked.add((next(row for row in rows if row.find_violation(config, target_config) is not None), name))
    assert provoked == {(row, name) for row in LIMITS for name in row.heads}


CAPTURING = {
    "eagle3": ("vllm", "sglang"),
    "peagle": ("vllm",),
    **dict.fromkeys(BLOCK_DRAFTERS, ("vllm", "sglang")),
}
"""Engines of heads that read captured streams."""


def test_every_supported_family_is_served_by_vllm_and_sglang() -> None:
    """Tests which families each engine serves. Before adding a family here, look it up in the engines."""
    served = {
        (engine, name, family)
        for family in FAMILIES_IN_TESTS
        for engine, name in FORMATS
        if not any(
            row.find_violation(
                head_config(name, capture_layers=[1, 2, 3] if engine in ("llama_cpp", "openvino") else [2, 3])
                if name in ("eagle3", "peagle", *BLOCK_DRAFTERS)
                else head_config(name),
                configured(family),
            )
            for row in LIMITS
            if row.engine == engine and name in row.heads
        )
    }
    families = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "deepseek_v2")
    expected = {
        (engine, name, family) for engine in ("vllm", "sglang") for name in ("mtp", "eagle") for family in families
    }
    # For mimo, vLLM serves head mtp only with the settings of MiMo's own layer, and eagle not at all.
    expected |= {("sglang", "mtp", "mimo"), ("sglang", "eagle", "mimo")}
    expected |= {
        (engine, name, family)
        for name, engines in CAPTURING.items()
        for engine in engines
        for family in families
        if (engine, family) != ("vllm", "gemma3_text")
        and not (engine == "sglang" and name in BLOCK_DRAFTERS and family in ("qwen2", "gemma3_text"))
    }
    expected |= {("vllm", "medusa", family) for family in families}
    expected |= {("vllm", "draft_model", family) for family in FAMILIES_IN_TESTS}
    expected |= {("tensorrt_llm", name, family) for name in ("eagle3", "draft_model") for family in FAMILIES_IN_TESTS}
    with_streams = ("llama", "mistral", "qwen3")
    expected |= {("llama_cpp", name, family) for name in ("eagle3", *BLOCK_DRAFTERS) for family in with_streams}
    expected |= {
        ("openvino", name, family)
        for name in ("eagle3", "dflash", "draft_model")
        for family in (*with_streams, "qwen2")
    }
    # Every target with experts here has weights that do not add up to 1.
    expected |= {("llama_cpp", "draft_model", family) for family in (*with_streams, "qwen2", "gemma3_text", "mimo")}
    assert served == expected | {("transformers", "mtp", "llama")}, (
        "transformers must serve llama only, because mistral's default config has a sliding window"
    )


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_quantised_target_is_served_where_the_head_keeps_its_own_dtype(engine: str, name: str) -> None:
    config = format_for(engine, head_config(name), configured("llama", **FP8)).config_json("bfloat16")
    assert "quantization_config" not in config


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("eagle3", "gemma3_text", r"can be trained and measured, but not exported: target\.path: must be of a family"),
        ("eagle3", "mimo", r"not exported: target\.path: must be of a family whose layers can be captured"),
        ("hydra", "llama", r"not exported: head: must be one of .* but is hydra, which no engine has a class for"),
    ],
)
def test_a_limit_is_warned_of_before_a_long_computation(name: str, family: str, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        warn_of_limits("vllm", head_config(name), configured(family))


def test_a_head_that_the_engine_serves_is_not_warned_of(user_warnings: list[warnings.WarningMessage]) -> None:
    warn_of_limits("sglang", head_config("eagle3"), configured("gemma3_text"))
    assert not user_warnings
