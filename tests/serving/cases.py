"""Lists the combinations of engine, head, target and K that the tests serve.

The tests compare counters of accepted drafts. These tell heads apart only if a fair share of drafts is accepted at
every depth. The tiny targets therefore walk through their vocabulary in a circle, which heads learn in a few steps. The
random layers of a target make about every third token leave the circle.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mtptrain.settings import heads
from mtptrain.settings.heads import HeadConfig
from mtptrain.utils.cpu import has_amx
from tests.conftest import FAMILIES, LLAMA3_ROPE, YARN_ROPE
from tests.families import ERNIE_EXPERTS, EXPERTS, GRANITE, LOCAL_EXPERTS, ROUTED, SHARED_EXPERT
from tests.mimo import MIMO_HEAD
from tests.serving.breaks import BREAKS

CONTEXT_TOKENS, MAX_NEW_TOKENS, EOS = 1024, 24, 256
_RANDOM = random.Random(0)
PROMPTS = [[_RANDOM.randrange(256) for _ in range(_RANDOM.randint(5, 700))] for _ in range(40)]
HAS_AMX = has_amx()
"""Whether vLLM 0.32 can draft for multi-head latent attention here: elsewhere it has no common block size."""


@dataclass(frozen=True)
class TargetKind:
    """Describes a target by its model family, its settings, and how it chooses the next token."""

    model_type: str
    disturbance: float
    """Factor on the attention output weights, chosen so that about every third token leaves the circle."""
    settings: dict[str, Any] = field(default_factory=dict)
    shared: float = 0.0
    """Constant that is added to all embeddings. With it, a head can tell keys that are computed from embeddings from
    keys that are computed from hidden states."""
    step: int = 1
    """Number of steps along the circle to the next token. With 0 the target repeats its token, which heads that feed
    nothing back can predict."""
    has_images: bool = False
    """Whether the checkpoint is that of an image+text model."""


SCALED = {"rope_parameters": LLAMA3_ROPE}
YARN = YARN_ROPE | {"original_max_position_embeddings": 256}
MOE = FAMILIES["qwen3_moe"][1]
# SGLang captures no stream after the last layer, so that there are four for EAGLE-3's first three.
GEMMA3 = FAMILIES["gemma3_text"][1] | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
# vLLM's CPU kernels support only a latent of 512 + 64, widths that are multiples of 32, and bf16 weights.
LATENT = FAMILIES["deepseek_v2"][1] | {
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
    **{"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
}
# Without its linear attention, for which vLLM has CPU kernels in bf16 alone. The MTP module has none.
QWEN3_NEXT = EXPERTS | SHARED_EXPERT | {"layer_types": ["full_attention"] * 4, "initializer_range": 0.07}
# Three of four layers keep a state. Small weights, because only attention's are scaled.
QWEN3_5 = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"layer_types": ["linear_attention"] * 3 + ["full_attention"], "head_dim": 64, "initializer_range": 0.05},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        **{"mrope_section": [3, 3, 2], "mrope_interleaved": True},
    },
}
TARGETS = {
    "llama": TargetKind("llama", 1.5, SCALED),
    "llama_repeating": TargetKind("llama", 1.5, SCALED, step=0),
    "llama_shared": TargetKind("llama", 1.0, SCALED, shared=0.5, step=0),
    "qwen3_shared": TargetKind("qwen3", 1.0, {"head_dim": 128}, shared=0.5, step=0),
    "llama_8_layers": TargetKind("llama", 0.8, {"num_hidden_layers": 8}),
    "llama_10_layers": TargetKind("llama", 0.7, {"num_hidden_layers": 10}),
    "mistral": TargetKind("mistral", 1.5, {"sliding_window": None}),
    "qwen2": TargetKind("qwen2", 1.5, {"rope_parameters": YARN}),
    "qwen2_unscaled": TargetKind("qwen2", 1.5),
    "qwen3": TargetKind("qwen3", 1.2, {"head_dim": 128}),
    "qwen3_moe": TargetKind("qwen3_moe", 1.0, MOE),
    "qwen3_moe_normed": TargetKind("qwen3_moe", 1.0, MOE | {"norm_topk_prob": True}),
    "mimo": TargetKind("mimo", 1.5),
    "gemma3_text": TargetKind("gemma3_text", 2.0, GEMMA3),
    "deepseek_v2": TargetKind("deepseek_v2", 0.5, LATENT),
    "granite": TargetKind("granite", 1.0, GRANITE | {"logits_scaling": 8.0}),
    "phi3": TargetKind("phi3", 1.5, {"sliding_window": None}),
    "glm4": TargetKind("glm4", 1.5),
    "olmoe": TargetKind("olmoe", 1.0, {"num_experts": 8, "num_experts_per_tok": 2}),
    "mixtral": TargetKind("mixtral", 1.0, LOCAL_EXPERTS | {"sliding_window": None}),
    "qwen2_moe": TargetKind("qwen2_moe", 1.0, EXPERTS | SHARED_EXPERT),
    "granitemoe": TargetKind("granitemoe", 1.0, GRANITE | LOCAL_EXPERTS | {"logits_scaling": 8.0}),
    "dots1": TargetKind("dots1", 1.0, ROUTED),
    "gpt_oss": TargetKind("gpt_oss", 1.0, LOCAL_EXPERTS | {"sliding_window": 16}),
    "glm4_moe": TargetKind("glm4_moe", 1.8, ROUTED | {"attention_bias": True, "use_qk_norm": True}),
    "ernie4_5_moe": TargetKind("ernie4_5_moe", 1.8, ERNIE_EXPERTS),
    "qwen3_next": TargetKind("qwen3_next", 2.0, QWEN3_NEXT),
    "qwen3_5": TargetKind("qwen3_5_text", 1.5, QWEN3_5),
    "qwen3_5_images": TargetKind("qwen3_5_text", 1.5, QWEN3_5, has_images=True),
    "qwen3_5_shared": TargetKind("qwen3_5_text", 1.0, QWEN3_5, shared=0.5, step=0),
}
INSIDE: dict[str, Any] = {"capture_layers": [1, 2, 3]}
BLOCK = INSIDE | {"ttt_steps": 3}
TWO: dict[str, Any] = {"num_layers": 2}
SLIDING: dict[str, Any] = {"sliding_window": 6}
PLAIN: dict[str, Any] = {"norm_before_fc": False, "norm_output": False}
NORMS_BEFORE: dict[str, Any] = {"norm_output": False, "norm_before_residual": True}
DSPARK = BLOCK | {"markov_rank": 32}
DFLASH2 = BLOCK | {"selector_rank": 32, "selector_top_k": 7}
SMALL: dict[str, Any] = {"draft_vocab_size": 200}
HEADS: dict[str, HeadConfig] = {
    "mtp": heads.MtpConfig(),
    "mtp_mimo": MIMO_HEAD,
    "native_mtp": heads.NativeMtpConfig(),
    "eagle": heads.EagleConfig(),
    "eagle3": heads.Eagle3Config(**INSIDE, **PLAIN),
    "eagle3_norms": heads.Eagle3Config(**INSIDE),
    "eagle3_small_vocabulary": heads.Eagle3Config(**INSIDE, **PLAIN, **SMALL),
    "eagle3_own_lm_head": heads.Eagle3Config(**INSIDE, **PLAIN, draft_vocab_size=260),
    "eagle3_norms_before": heads.Eagle3Config(capture_layers=[1, 2, 4], **NORMS_BEFORE),
    "eagle3_norms_before_inside": heads.Eagle3Config(capture_layers=[0, 2, 3], **NORMS_BEFORE),
    "eagle3_1": heads.Eagle3Config(**INSIDE, norm_before_fc=False, fc_norm=True),
    "eagle3_own_rope": heads.Eagle3Config(**INSIDE, **PLAIN, rope_parameters=YARN),
    "eagle3_default_layers": heads.Eagle3Config(**PLAIN),
    "eagle3_last_stream": heads.Eagle3Config(capture_layers=[1, 2, 4], **PLAIN),
    "peagle": heads.PeagleConfig(**INSIDE),
    "medusa": heads.MedusaConfig(ttt_steps=5),
    "medusa_two_layers": heads.MedusaConfig(ttt_steps=3, num_layers=2, fc_bias=True),
    "dflash": heads.DflashConfig(**BLOCK),
    "dflash_K1": heads.DflashConfig(**INSIDE, ttt_steps=1),
    "dflash_K5": heads.DflashConfig(**INSIDE, ttt_steps=5),
    "dflash_small_vocabulary": heads.DflashConfig(capture_layers=[2, 4], ttt_steps=3, **SMALL),
    "dflash_small_vocabulary_inside": heads.DflashConfig(capture_layers=[1, 3], ttt_steps=3, **SMALL),
    "dflash_two_layers": heads.DflashConfig(**BLOCK, **TWO),
    # As above, but with a key norm for each layer, which vLLM's CPU kernels do not serve: see has_own_key_norms.
    "dflash_two_norms": heads.DflashConfig(**BLOCK, **TWO),
    "dflash_causal_window": heads.DflashConfig(**BLOCK, **SLIDING, causal="sliding"),
    "dflash_mixed_windows": heads.DflashConfig(**BLOCK, **TWO, **SLIDING),
    "dflash_causal_mixed": heads.DflashConfig(**BLOCK, **TWO, **SLIDING, causal="all"),
    "dflash_anchor_first": heads.DflashConfig(
        **BLOCK, **TWO, **SLIDING, **SMALL, causal="all", sample_from_anchor=True
    ),
    "dspark": heads.DsparkConfig(**DSPARK),
    "dspark_K5": heads.DsparkConfig(**DSPARK | TWO | {"ttt_steps": 5}),
    "dspark_fill_in": heads.DsparkConfig(**DSPARK, **TWO, **SLIDING, **SMALL, sample_from_anchor=False),
    "dspark_fill_in_one_layer": heads.DsparkConfig(**DSPARK, sample_from_anchor=False),
    "dflash2": heads.Dflash2Config(**DFLASH2),
    "dflash2_K5": heads.Dflash2Config(**DFLASH2 | TWO | {"ttt_steps": 5, "conv_kernel_size": 3}),
    "dflash2_window": heads.Dflash2Config(**DFLASH2, **TWO, **SLIDING, causal="all"),
    "draft_model": heads.DraftModelConfig(num_hidden_layers=2),
}
SERVED = {
    "vllm": {
        "mtp": "*llama llama:1 llama:5 qwen3 mistral qwen2 qwen3_moe gemma3_text granite phi3 glm4 olmoe gpt_oss",
        "mtp_mimo": "mimo",
        "native_mtp": "glm4_moe ernie4_5_moe qwen3_next",
        "eagle": "*llama qwen3 mistral qwen2 qwen3_moe gemma3_text",
        "eagle3": "*llama llama:1 llama:5 qwen3 mistral qwen2 qwen3_moe granite phi3 gpt_oss",
        "eagle3_norms": "*llama qwen3",
        "eagle3_small_vocabulary": "llama",
        "eagle3_own_lm_head": "qwen3",
        "eagle3_norms_before": "llama",
        "eagle3_1": "llama",
        "eagle3_own_rope": "llama",
        "eagle3_default_layers": "llama_8_layers",
        "peagle": "llama_repeating llama_repeating:5 llama qwen3 mistral qwen2 qwen3_moe",
        "medusa": "llama_repeating llama_repeating:5 llama qwen3 mistral qwen2 qwen3_moe gemma3_text",
        "medusa_two_layers": "llama_repeating",
        "dflash": "*llama_shared qwen3_shared",
        "dflash_K5": "llama_shared",
        "dflash_small_vocabulary": "llama_shared",
        "dflash_two_layers": "llama_shared",
        "dflash_causal_window": "llama_shared",
        "draft_model": "llama llama:1 qwen3 mistral qwen2",
    },
    "vllm in bf16": {
        "mtp": "llama gemma3_text deepseek_v2",
        "eagle": "deepseek_v2",
        "eagle3": "qwen3 deepseek_v2",
    },
    # vLLM's classes draft these with a plugin, with one layer, because of its bug with several k_norms.
    "vllm with a plugin": {"dflash2": "*llama qwen3", "dspark_fill_in_one_layer": "*llama"},
    "llama_cpp": {  # which reads no stream after the last layer
        "eagle3": "*llama llama:1 llama:5 qwen3 mistral qwen3_moe_normed",
        "eagle3_small_vocabulary": "llama",
        "eagle3_own_lm_head": "qwen3",
        "eagle3_norms_before_inside": "qwen3",
        "eagle3_own_rope": "llama",
        "eagle3_default_layers": "llama_8_layers",
        "dflash": "*llama_shared qwen3_shared",
        "dflash_K5": "qwen3_shared",
        "dflash_two_norms": "llama_shared",
        "dflash_small_vocabulary_inside": "llama_shared",
        "dflash_mixed_windows": "llama_shared",
        "dflash_causal_mixed": "qwen3_shared",
        "dflash_anchor_first": "llama_shared",
        "dspark": "llama qwen3",
        "dspark_K5": "qwen3",
        "dspark_fill_in": "llama",
        "dflash2": "llama qwen3",
        "dflash2_K5": "llama",
        "dflash2_window": "qwen3",
        "draft_model": "llama llama:1 qwen3:5 mistral qwen2_unscaled",
    },
    "openvino": {
        "eagle3": "*llama llama:1 llama:5 qwen3 mistral qwen2",
        "eagle3_small_vocabulary": "llama",
        "eagle3_own_lm_head": "qwen3",
        "eagle3_default_layers": "llama_10_layers",
        "eagle3_last_stream": "llama",
        "eagle3_own_rope": "llama",
        "dflash": "*llama_shared qwen3_shared mistral qwen2",
        "dflash_K5": "llama_shared",
        "dflash_two_norms": "llama_shared",
        "dflash_mixed_windows": "llama_shared",
        "draft_model": "llama qwen3 mistral qwen2",
    },
    "mlx": {
        "draft_model": "*llama llama:1 llama:5 qwen3 mistral qwen2 qwen3_moe olmoe mixtral qwen2_moe granitemoe dots1",
        "eagle3": "*qwen3_5 qwen3_5:1 qwen3_5:5 qwen3_5_images",
        "eagle3_small_vocabulary": "qwen3_5",
        "eagle3_own_lm_head": "qwen3_5",
        "eagle3_norms_before": "qwen3_5",
        "dflash": "*qwen3_5_shared",
        "dflash_K1": "qwen3_5_shared",
        "dflash_K5": "qwen3_5_shared",
        "dflash_two_norms": "qwen3_5_shared",
    },
}
"""The heads and targets that each engine serves in the tests, `TARGET` or `TARGET:K`. Those with a star are quick."""


@dataclass(frozen=True)
class Case:
    """Names a head and the target for which it is served."""

    head: str
    target: str
    num_speculative_tokens: int = 3
    dtype: str = "float32"
    broken: str = ""
    """Key in `BREAKS` of a deliberate fault of the served head. The head that decodes in mtptrain has no fault."""

    def __str__(self) -> str:
        parts = [self.head, self.target, f"K{self.num_speculative_tokens}"]
        return "-".join(
            parts + [self.dtype] * (self.dtype != "float32") + [f"without_{self.broken}"] * bool(self.broken)
        )


def cases_of(engine: str) -> dict[Case, bool]:
    """Returns the cases of an engine, and whether each is quick."""
    found = {}
    for head, targets in SERVED[engine].items():
        for word in targets.split():
            target, _, given = word.removeprefix("*").partition(":")
            num_drafts = HEADS[head].ttt_steps if HEADS[head].drafts_whole_blocks else int(given or 3)
            dtype = "bfloat16" if engine.endswith("bf16") else "float32"
            found[Case(head, target, num_drafts, dtype)] = word.startswith("*")
    return found


def broken_cases(engine: str) -> list[Case]:
    """Returns a case for each fault in `BREAKS` of the heads of an engine, on the head's first target."""
    first = {case.head: case for case in reversed(cases_of(engine))}
    return [
        replace(first[head], broken=broken) for head, breaks in BREAKS.items() if head in first for broken in breaks
    ]


def each(cases: Mapping[Case, bool]) -> pytest.MarkDecorator:
    """Runs a test with each case. All but the quick ones are slow."""
    marked = [
        pytest.param(case, id=str(case), marks=() if is_quick else pytest.mark.slow) for case, is_quick in cases.items()
    ]
    return pytest.mark.parametrize("case", marked)
