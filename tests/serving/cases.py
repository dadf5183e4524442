"""Lists the combinations of head, target and K that engines serve in the tests.

The tests compare counters of accepted drafts. These tell heads apart only if a fair share of drafts is accepted at
every depth. The tiny targets therefore walk through their vocabulary in a circle, which heads learn in a few steps. The
random layers of a target make about every third token leave the circle.
"""

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.dflash2 import Dflash2Head
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.dspark import DsparkHead
from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.native_mtp import NativeMtpHead
from mtptrain.heads.peagle import PeagleHead
from mtptrain.settings.heads import HeadConfig
from tests.conftest import FAMILIES, LLAMA3_ROPE, YARN_ROPE
from tests.families import ERNIE_EXPERTS, EXPERTS, GRANITE, LOCAL_EXPERTS, ROUTED, SHARED_EXPERT
from tests.mimo import MIMO_HEAD
from tests.serving.served_directories.breaks import BREAKS, SEQUENTIAL_BREAKS

CONTEXT_TOKENS, MAX_NEW_TOKENS, EOS = 1024, 24, 256
_RANDOM = random.Random(0)
PROMPTS = [[_RANDOM.randrange(256) for _ in range(_RANDOM.randint(5, 700))] for _ in range(40)]


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


GEMMA3_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
TARGETS = {
    "llama": TargetKind("llama", 1.5, {"rope_parameters": LLAMA3_ROPE}),
    "llama_repeating": TargetKind("llama", 1.5, {"rope_parameters": LLAMA3_ROPE}, step=0),
    "qwen3_repeating": TargetKind("qwen3", 1.5, {"head_dim": 128}, step=0),
    "llama_shared": TargetKind("llama", 1.0, {"rope_parameters": LLAMA3_ROPE}, shared=0.5, step=0),
    "qwen3_shared": TargetKind("qwen3", 1.0, {"head_dim": 128}, shared=0.5, step=0),
    "llama_8_layers": TargetKind("llama", 0.8, {"num_hidden_layers": 8}),
    "mistral": TargetKind("mistral", 1.5, {"sliding_window": None}),
    "qwen2": TargetKind("qwen2", 1.5, {"rope_parameters": YARN_ROPE | {"original_max_position_embeddings": 256}}),
    "qwen3": TargetKind("qwen3", 1.2, {"head_dim": 128}),
    "qwen3_moe": TargetKind("qwen3_moe", 1.0, FAMILIES["qwen3_moe"][1]),
    "mimo": TargetKind("mimo", 1.5),
    # SGLang captures no stream after the last layer, so that there are four for EAGLE-3's first three.
    "gemma3_text": TargetKind("gemma3_text", 2.0, FAMILIES["gemma3_text"][1] | GEMMA3_LAYERS),
    "deepseek_v2": TargetKind(
        "deepseek_v2",
        0.5,
        FAMILIES["deepseek_v2"][1]
        # vLLM's CPU kernels support only a latent of 512 + 64, widths that are multiples of 32, and bf16 weights.
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
        | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
        | {
            "rope_parameters": YARN_ROPE
            | {"original_max_position_embeddings": 256, "mscale": 0.707, "mscale_all_dim": 0.5}
        },
    ),
}
MORE_TARGETS = {
    "granite": TargetKind("granite", 1.0, GRANITE | {"logits_scaling": 8.0}),
    "phi3": TargetKind("phi3", 1.5, {"sliding_window": None}),
    "glm4": TargetKind("glm4", 1.5),
    "olmoe": TargetKind("olmoe", 1.0, {"num_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": TargetKind("gpt_oss", 1.0, LOCAL_EXPERTS | {"sliding_window": 16}),
}
"""Families of which a head or two are served: each has something that those above lack."""
NATIVE_TARGETS = {
    "glm4_moe": TargetKind("glm4_moe", 1.8, ROUTED | {"attention_bias": True, "use_qk_norm": True}),
    "ernie4_5_moe": TargetKind("ernie4_5_moe", 1.8, ERNIE_EXPERTS),
    # Without its linear attention, for which vLLM has CPU kernels in bf16 alone. The module has none.
    "qwen3_next": TargetKind(
        "qwen3_next", 2.0, EXPERTS | SHARED_EXPERT | {"layer_types": ["full_attention"] * 4, "initializer_range": 0.07}
    ),
}
"""Families whose checkpoints have an MTP module, which `native_mtp` is."""
# The default padding token of some, such as phi3 and glm4, is beyond a vocabulary of 260.
TARGETS |= {
    name: replace(kind, settings={**kind.settings, "pad_token_id": None})
    for name, kind in (MORE_TARGETS | NATIVE_TARGETS).items()
}
DFLASH2: dict[str, Any] = {"capture_layers": [1, 2, 3], "selector_rank": 32, "selector_top_k": 7}
HEAD_CONFIGS: dict[str, HeadConfig] = {
    "mtp": MtpHead.Config(),
    "mtp_mimo": MIMO_HEAD,
    "native_mtp": NativeMtpHead.Config(),
    "eagle": EagleHead.Config(),
    "eagle3": Eagle3Head.Config(capture_layers=[1, 2, 3]),
    "eagle3_small_vocabulary": Eagle3Head.Config(capture_layers=[1, 2, 3], draft_vocab_size=200),
    "eagle3_own_lm_head": Eagle3Head.Config(capture_layers=[1, 2, 3], draft_vocab_size=260),
    "eagle3_norms_before": Eagle3Head.Config(capture_layers=[1, 2, 4], norm_before_fc=True, norm_before_residual=True),
    "eagle3_1": Eagle3Head.Config(capture_layers=[1, 2, 3], fc_norm=True, norm_output=True),
    "eagle3_default_layers": Eagle3Head.Config(),
    "eagle3_last_stream": Eagle3Head.Config(capture_layers=[1, 2, 4]),
    "peagle": PeagleHead.Config(capture_layers=[1, 2, 3]),
    "medusa": MedusaHead.Config(ttt_steps=5),
    "medusa_two_layers": MedusaHead.Config(ttt_steps=3, num_layers=2, fc_bias=True),
    "dflash": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=3),
    "dflash_K1": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=1),
    "dflash_K5": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=5),
    "dflash_small_vocabulary": DflashHead.Config(capture_layers=[2, 4], ttt_steps=3, draft_vocab_size=200),
    "dflash_two_layers": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=3, num_layers=2),
    # As above, but with a key norm for each layer, which vLLM's CPU kernels do not serve: see has_own_key_norms.
    "dflash_two_norms": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=3, num_layers=2),
    "dflash_window": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=3, sliding_window=6),
    "dflash_causal": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=3, causal="all"),
    "dflash_causal_window": DflashHead.Config(
        capture_layers=[1, 2, 3], ttt_steps=3, sliding_window=6, causal="sliding"
    ),
    "dflash_mixed_windows": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=3, num_layers=2, sliding_window=6),
    "dflash_causal_mixed": DflashHead.Config(
        capture_layers=[1, 2, 3], ttt_steps=3, num_layers=2, sliding_window=6, causal="all"
    ),
    "dflash_anchor_first": DflashHead.Config(
        capture_layers=[1, 2, 3], ttt_steps=3, num_layers=2, sample_from_anchor=True
    ),
    "dflash_anchor_first_window": DflashHead.Config(
        **{"capture_layers": [1, 2, 3], "ttt_steps": 3, "num_layers": 2, "sample_from_anchor": True},
        **{"sliding_window": 6, "causal": "all", "draft_vocab_size": 200},
    ),
    "dflash_small_vocabulary_inside": DflashHead.Config(capture_layers=[1, 3], ttt_steps=3, draft_vocab_size=200),
    "eagle3_norms_before_inside": Eagle3Head.Config(
        capture_layers=[0, 2, 3], norm_before_fc=True, norm_before_residual=True
    ),
    "dspark": DsparkHead.Config(capture_layers=[1, 2, 3], ttt_steps=3, markov_rank=32),
    "dspark_K1": DsparkHead.Config(capture_layers=[1, 2, 3], ttt_steps=1, markov_rank=32),
    "dspark_K5": DsparkHead.Config(capture_layers=[1, 2, 3], ttt_steps=5, markov_rank=32, num_layers=2),
    "dspark_fill_in_one_layer": DsparkHead.Config(
        **{"capture_layers": [1, 2, 3], "ttt_steps": 3, "markov_rank": 32, "sample_from_anchor": False}
    ),
    "dspark_fill_in": DsparkHead.Config(
        **{"capture_layers": [1, 2, 3], "ttt_steps": 3, "markov_rank": 32, "sample_from_anchor": False},
        **{"num_layers": 2, "sliding_window": 6, "draft_vocab_size": 200},
    ),
    "dflash2": Dflash2Head.Config(**DFLASH2, ttt_steps=3),
    "dflash2_K1": Dflash2Head.Config(**DFLASH2, ttt_steps=1),
    "dflash2_K5": Dflash2Head.Config(**DFLASH2, ttt_steps=5, num_layers=2, conv_kernel_size=3),
    "dflash2_window": Dflash2Head.Config(**DFLASH2, ttt_steps=3, num_layers=2, sliding_window=6, causal="all"),
    "draft_model": DraftModelHead.Config(num_hidden_layers=2),
}


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


EVERYWHERE = ("mtp", "eagle", "eagle3")
"""Heads that are tried with most families."""
IN_TABLE = (*EVERYWHERE, "peagle", "medusa", "dflash", "dspark", "dflash2", "draft_model")
"""Heads in the table of docs/serving.md, which has a row for each engine that can load the head."""
CASES = [
    *(
        Case(head, target, num_speculative_tokens)
        for head in (*EVERYWHERE, "eagle3_small_vocabulary", "eagle3_1")
        for target in ("llama", "qwen3")
        for num_speculative_tokens in (1, 3, 5)
    ),
    *(Case(head, target) for head in ("eagle3_own_lm_head", "eagle3_norms_before") for target in ("llama", "qwen3")),
    *(Case(head, target) for head in EVERYWHERE for target in ("mistral", "qwen2", "qwen3_moe")),
    *(Case("peagle", target) for target in ("llama", "qwen3", "mistral", "qwen2", "qwen3_moe", "qwen3_repeating")),
    *(
        Case(head, target, HEAD_CONFIGS[head].ttt_steps)
        for head in ("dflash", "dflash_K1", "dflash_K5")
        for target in ("llama_shared", "qwen3_shared")
    ),
    *(Case(head, "llama_shared") for head in ("dflash_small_vocabulary", "dflash_two_layers")),
    *(Case(f"dflash_{variant}", "llama_shared") for variant in ("window", "causal", "causal_window")),
    *(Case("peagle", "llama_repeating", num_speculative_tokens) for num_speculative_tokens in (1, 3, 5)),
    *(Case("medusa", target) for target in ("llama", "qwen3", "mistral", "qwen2", "qwen3_moe", "gemma3_text")),
    *(Case("medusa", f"{target}_repeating", tokens) for target in ("llama", "qwen3") for tokens in (1, 3, 5)),
    Case("medusa_two_layers", "llama_repeating"),
    *(Case("mtp_mimo", "mimo", num_speculative_tokens) for num_speculative_tokens in (1, 3)),
    *(Case("draft_model", target, num_drafts) for target in ("llama", "qwen3") for num_drafts in (1, 3, 5)),
    *(Case("draft_model", target) for target in ("mistral", "qwen2")),
    Case("mtp", "gemma3_text"),
    Case("eagle", "gemma3_text"),
    Case("eagle3_default_layers", "llama_8_layers"),
    *(Case("mtp", target) for target in MORE_TARGETS),
    *(Case("eagle3", target) for target in ("granite", "phi3", "gpt_oss")),
    *(Case("native_mtp", target, tokens) for target in NATIVE_TARGETS for tokens in (1, 3, 5)),
]
HAS_AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text()
NOT_HERE = (
    "NOT SERVED ON THIS CPU: vLLM 0.32 drafts for multi-head latent attention with AMX alone (no common block size "
    "elsewhere)"
)


def is_served_here(case: "Case") -> bool:
    return HAS_AMX or case.target != "deepseek_v2"


BF16_CASES = [
    *(Case(head, "deepseek_v2", dtype="bfloat16") for head in EVERYWHERE),
    Case("mtp", "llama", dtype="bfloat16"),
    Case("eagle3", "qwen3", dtype="bfloat16"),
    Case("mtp", "gemma3_text", dtype="bfloat16"),
]
TARGETS |= {
    "llama_10_layers": TargetKind("llama", 0.7, {"num_hidden_layers": 10}),
    "qwen2_unscaled": TargetKind("qwen2", 1.5),
    "qwen3_moe_normed": TargetKind("qwen3_moe", 1.0, FAMILIES["qwen3_moe"][1] | {"norm_topk_prob": True}),
}
LLAMA_CPP_CASES = [
    *(
        Case(head, target, num_drafts)
        for head in ("eagle3", "draft_model")
        for target in ("llama", "qwen3")
        for num_drafts in (1, 3, 5)
    ),
    *(
        Case(head, target, HEAD_CONFIGS[head].ttt_steps)
        for head in ("dflash", "dflash_K1", "dflash_K5", "dflash_two_norms")
        for target in ("llama_shared", "qwen3_shared")
    ),
    Case("dflash_small_vocabulary_inside", "llama_shared"),
    *(Case("dspark", target) for target in ("llama", "qwen3")),
    Case("dspark_K1", "llama", 1),
    Case("dspark_K5", "qwen3", 5),
    Case("dspark_fill_in", "llama"),
    *(Case("dflash2", target) for target in ("llama", "qwen3")),
    Case("dflash2_K5", "llama", 5),
    Case("dflash2_window", "qwen3"),
    *(Case(f"dflash_{variant}", "llama_shared") for variant in ("window", "causal_window", "mixed_windows")),
    Case("dflash_causal_mixed", "qwen3_shared"),
    Case("dflash_anchor_first", "qwen3_shared"),
    Case("dflash_anchor_first_window", "llama_shared"),
    *(
        Case(head, target)
        for head in ("eagle3_small_vocabulary", "eagle3_own_lm_head")
        for target in ("llama", "qwen3")
    ),
    *(Case("eagle3_norms_before_inside", target) for target in ("llama", "qwen3")),
    *(Case("eagle3", target) for target in ("mistral", "qwen3_moe_normed")),
    *(Case("draft_model", target) for target in ("mistral", "qwen2_unscaled")),
    Case("eagle3_default_layers", "llama_8_layers"),
]
"""Cases that llama.cpp serves. It reads no stream after the last layer."""
SEQUENTIAL_CASES = [
    *(Case("dflash2", target) for target in ("llama", "qwen3")),
    Case("dflash2_K1", "qwen3", 1),
    Case("dspark_fill_in_one_layer", "llama"),
]
"""Cases that vLLM's classes draft with a plugin, with one layer, because of its bug with several k_norms."""
SEQUENTIAL_BROKEN_CASES = [
    Case(head, "llama", broken=broken) for head, breaks in SEQUENTIAL_BREAKS.items() for broken in breaks
]
OPENVINO_CASES = [
    *(Case(head, "llama", num_drafts) for head in ("eagle3", "draft_model") for num_drafts in (1, 3, 5)),
    *(
        Case(head, "llama_shared", HEAD_CONFIGS[head].ttt_steps)
        for head in ("dflash", "dflash_K1", "dflash_K5", "dflash_two_norms")
    ),
    Case("dflash", "qwen3_shared"),
    *(Case(f"dflash_{variant}", "llama_shared") for variant in ("window", "mixed_windows")),
    Case("eagle3_small_vocabulary", "llama"),
    Case("eagle3_own_lm_head", "qwen3"),
    Case("eagle3_last_stream", "llama"),
    *(Case(head, target) for head in ("eagle3", "draft_model") for target in ("qwen3", "mistral", "qwen2")),
    *(Case("dflash", target) for target in ("mistral", "qwen2")),
]
"""Cases that OpenVINO serves."""


BROKEN_ON = {"peagle": "llama_repeating", "medusa": "llama_repeating", "dflash": "llama_shared", "mtp_mimo": "mimo"}
"""Target of each head's broken cases. A head that is not listed uses `llama`."""
BROKEN_CASES = [
    Case(head, BROKEN_ON.get(head, "llama"), broken=broken) for head, breaks in BREAKS.items() for broken in breaks
]


def each(cases: Iterable[Case], quick: Collection[Case] = ()) -> pytest.MarkDecorator:
    """Runs a test with each case. All but the quick ones are slow."""
    marked = [pytest.param(case, id=str(case), marks=() if case in quick else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize("case", marked)
