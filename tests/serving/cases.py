"""What is served: heads x targets x K, one line each.

Counters tell heads apart only where a fair share of drafts is accepted, at every depth. So the tiny targets walk
through their vocabulary in a circle that their random layers disturb about every third time, and heads learn the circle
in a few steps.
"""

import json
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mtptrain.convert.draft_model import copy_first_layers
from mtptrain.convert.formats import format_for
from mtptrain.convert.mimo import MIMO_LAYER
from mtptrain.export import write_head
from mtptrain.heads.base import Head
from mtptrain.heads.config import HeadConfig
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.files import build_head
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.packing import PackedTokens, Packing
from mtptrain.heads.peagle import PeagleHead
from mtptrain.target.model import Target
from mtptrain.target.position_cache import PositionCache
from mtptrain.utils.files import tensor_shapes
from tests.conftest import FAMILIES, LLAMA3_ROPE, YARN_ROPE, make_target
from tests.mimo import MIMO_HEAD, add_mimo_layer

CONTEXT_TOKENS, MAX_NEW_TOKENS, EOS = 1024, 24, 256
_RANDOM = random.Random(0)
PROMPTS = [[_RANDOM.randrange(256) for _ in range(_RANDOM.randint(5, 700))] for _ in range(40)]
Break = Callable[[Path], None]
"""Changes an exported directory."""


@dataclass(frozen=True)
class TargetKind:
    """A family and its settings."""

    model_type: str
    disturbance: float
    """How much attention takes part in the answer: about every third token should leave the circle."""
    settings: dict[str, Any] = field(default_factory=dict)
    shared: float = 0.0
    """Size of a component that all embeddings share. Keys made of embeddings need one to be told from others."""
    step: int = 1
    """Steps in the circle from a token to the next one; with 0 it repeats, which heads without a chain can foresee."""


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
    "gemma3_text": TargetKind("gemma3_text", 2.0, FAMILIES["gemma3_text"][1] | {"num_hidden_layers": 3}),
    "deepseek_v2": TargetKind(
        "deepseek_v2",
        0.5,
        FAMILIES["deepseek_v2"][1]
        # What vLLM's kernels for CPUs have: a latent of 512 + 64 and widths in steps of 32, for bf16 weights.
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
        | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
        | {
            "rope_parameters": YARN_ROPE
            | {"original_max_position_embeddings": 256, "mscale": 0.707, "mscale_all_dim": 0.5}
        },
    ),
}
HEAD_CONFIGS: dict[str, HeadConfig] = {
    "mtp": MtpHead.Config(),
    "mtp_mimo": MIMO_HEAD,
    "eagle": EagleHead.Config(),
    "eagle3": Eagle3Head.Config(capture_layers=[1, 2, 3]),
    "eagle3_small_vocabulary": Eagle3Head.Config(capture_layers=[1, 2, 3], draft_vocab_size=200),
    "eagle3_own_lm_head": Eagle3Head.Config(capture_layers=[1, 2, 3], draft_vocab_size=260),
    "eagle3_norms_before": Eagle3Head.Config(capture_layers=[1, 2, 4], norm_before_fc=True, norm_before_residual=True),
    "eagle3_1": Eagle3Head.Config(capture_layers=[1, 2, 3], fc_norm=True, norm_output=True),
    "eagle3_default_layers": Eagle3Head.Config(),
    "peagle": PeagleHead.Config(capture_layers=[1, 2, 3]),
    "medusa": MedusaHead.Config(ttt_steps=5),
    "medusa_two_layers": MedusaHead.Config(ttt_steps=3, num_layers=2, fc_bias=True),
    "dflash": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=3),
    "dflash_K1": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=1),
    "dflash_K5": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=5),
    "dflash_small_vocabulary": DflashHead.Config(capture_layers=[2, 4], ttt_steps=3, draft_vocab_size=200),
    "dflash_two_layers": DflashHead.Config(capture_layers=[1, 2, 3], ttt_steps=3, num_layers=2),
    "draft_model": DraftModelHead.Config(num_hidden_layers=2),
}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """Changes a tensor of the served file, under the engine's name."""

    def apply(directory: Path) -> None:
        path = next(path for path in directory.glob("*.safetensors") if name in tensor_shapes(path))
        tensors = load_file(path)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def swapped(*names: str) -> Break:
    """Concatenates the halves of the input the other way round."""

    def apply(directory: Path) -> None:
        for name in names:
            changed(name, lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))(directory)

    return apply


def one_layer_later(directory: Path) -> None:
    """Captures the streams one layer behind those that the head was trained with."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    path.write_text(
        json.dumps(config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in ids]}})
    )


def another_mask_token(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": 3}))


def another_lm_head(directory: Path) -> None:
    path = directory / "lm_head.safetensors"
    save_file({name: tensor.roll(1, 0) for name, tensor in load_file(path).items()}, path)


def changed_dflash(**settings: Any) -> Break:
    """Changes settings of `dflash_config`."""

    def apply(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"dflash_config": config["dflash_config"] | settings}))

    return apply


def without_norms(*names: str) -> dict[str, Break]:
    """Leaves each norm out: its weight becomes one."""
    return {name: changed(name + ".weight", torch.ones_like) for name in names}


EAGLE3_NORMS = without_norms(
    "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"
)
BREAKS: dict[str, dict[str, Break]] = {
    "mtp": without_norms("enorm", "hnorm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    | {"columns": swapped("fc.weight")},
    "mtp_mimo": without_norms(
        *(f"{MIMO_LAYER}{name}_layernorm" for name in ("token", "hidden", "input", "post_attention", "final"))
    )
    | {"columns": swapped(f"{MIMO_LAYER}input_proj.weight")}
    | {f"{part}_bias": changed(f"{MIMO_LAYER}self_attn.{part}_proj.bias", torch.zeros_like) for part in "qkv"},
    "eagle": without_norms("layers.0.post_attention_layernorm") | {"columns": swapped("fc.weight")},
    "eagle3": EAGLE3_NORMS
    | {"columns": swapped(*(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")), "layer_ids": one_layer_later},
    "eagle3_norms_before": without_norms("input_norm"),
    "eagle3_1": without_norms("fc_norm.0", "fc_norm.1", "fc_norm.2"),
    "dflash": without_norms(
        "hidden_norm",
        "norm",
        *(f"layers.0.{norm}_layernorm" for norm in ("input", "post_attention")),
        *(f"layers.0.self_attn.{part}_norm" for part in "qk"),
    )
    | {
        "layer_ids": changed_dflash(target_layer_ids=[1, 2, 3]),
        "mask_token": changed_dflash(mask_token_id=3),
        "two_ways": changed_dflash(causal=True),
    },
    "draft_model": without_norms("model.norm"),
    "peagle": {"mask_hidden": changed("mask_hidden", torch.neg), "mask_token": another_mask_token},
    "medusa": {"blocks": changed("blocks.0.layers.0.weight", torch.neg), "lm_head": another_lm_head},
}
"""Of each kind of head, what is wrong in the served directory."""


@dataclass(frozen=True)
class Case:
    """A head served for a target."""

    head: str
    target: str
    num_speculative_tokens: int = 3
    dtype: str = "float32"
    broken: str = ""
    """One of the head's `BREAKS`; ours stays whole."""

    def __str__(self) -> str:
        parts = [self.head, self.target, f"K{self.num_speculative_tokens}"]
        return "-".join(
            parts + [self.dtype] * (self.dtype != "float32") + [f"without_{self.broken}"] * bool(self.broken)
        )


EVERYWHERE = ("mtp", "eagle", "eagle3")
"""Heads that are tried with every family."""
IN_TABLE = (*EVERYWHERE, "peagle", "medusa", "dflash", "draft_model")
"""Rows of the README's table for each engine."""
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
BROKEN_ON = {"peagle": "llama_repeating", "medusa": "llama_repeating", "dflash": "llama_shared", "mtp_mimo": "mimo"}
"""The target on which what is wrong shows, if not a plain Llama."""
BROKEN_CASES = [
    Case(head, BROKEN_ON.get(head, "llama"), broken=broken) for head, breaks in BREAKS.items() for broken in breaks
]


def make_served_target(directory: Path, kind: str) -> Path:
    """A tiny target; its newest token alone says the next one, its layers say otherwise."""
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "tie_word_embeddings": False,
    }
    settings |= {"max_position_embeddings": CONTEXT_TOKENS, "initializer_range": 0.1}
    make_target(directory, TARGETS[kind].model_type, **(settings | TARGETS[kind].settings))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).requires_grad_(False)
    embeddings, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embeddings.div_(embeddings.std()).add_(TARGETS[kind].shared)
    circle = torch.randperm(len(embeddings), generator=torch.Generator().manual_seed(0))
    lm_head[circle.roll(-TARGETS[kind].step)] = embeddings[circle]
    for name, parameter in model.named_parameters():
        if name.endswith("o_proj.weight"):
            parameter.mul_(TARGETS[kind].disturbance)
    model.save_pretrained(directory)
    if TARGETS[kind].model_type == "mimo":
        add_mimo_layer(directory)
    return directory


def make_head(target: Target, kind: str, num_steps: int = 30) -> Head:
    """A head with random norms, trained for some steps on what the target answers to random prompts."""
    torch.manual_seed(1)
    head = build_head(HEAD_CONFIGS[kind], target.config)
    is_of_family = isinstance(head, DraftModelHead) and head.config.model_type == target.config.model_type
    if is_of_family:  # half of the target's layers often say what all of them say
        copy_first_layers(head, Path(target.config.name_or_path))
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, *((0.0, 2.0) if is_of_family else (0.5, 1.5)))
    if is_of_family:
        return head.eval().requires_grad_(False)
    if isinstance(head, DflashHead):
        share_key_norms(head)
        attend_to_masks(head)
    # A head without a chain cannot learn the circle, but repetition; answers that repeat must begin with all tokens.
    tokens = answers(target, *((256, 4, 12) if head.is_bound_to_depths else (16, 16, 48)))
    depths = HEAD_CONFIGS[kind].ttt_steps if isinstance(head, MedusaHead) or head.drafts_all_depths else 3
    num_rows = tokens.shape[1] - 2
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    states = target.forward(tokens, positions, PositionCache(tokens.shape[1]), head.read_layers)
    target_states = (states.hidden_states if states.aux_hidden_states is None else states.aux_hidden_states)[
        :, :num_rows
    ]
    ids = (tokens[:, first : first + num_rows].flatten() for first in (0, 1))
    packed = PackedTokens(target_states.flatten(0, 1), *ids, Packing.of([num_rows] * len(tokens)))
    unread = F.pad(tokens, (0, depths), value=-100)
    labels = torch.stack(
        [unread[:, 2 + depth :][:, :num_rows].flatten() for depth in range(depths)]
    )  # [T, N], -100 behind the end
    if head.d2t is not None:
        frequent = torch.bincount(tokens.flatten(), minlength=target.config.vocab_size).argsort(
            descending=True, stable=True
        )
        ids = frequent[: len(head.d2t)].sort().values
        head.d2t.copy_(ids - torch.arange(len(ids)))
        draft_ids = torch.full((target.config.vocab_size,), -100).index_copy_(0, ids, torch.arange(len(ids)))
        labels = torch.where(labels < 0, labels, draft_ids[labels])
    optimizer = torch.optim.Adam([parameter for parameter in head.parameters() if parameter.requires_grad], lr=1e-2)
    for _ in range(num_steps * 3 if head.drafts_all_depths else num_steps):
        logits = head.logits(head(packed, target.parts, depths), target.parts)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Copies, because a file cannot hold one tensor under several names.
    if isinstance(head, DflashHead):
        share_key_norms(head, deepcopy)
    return head.eval().requires_grad_(False)


def share_key_norms(head: DflashHead, take: Callable[[torch.nn.Module], torch.nn.Module] = lambda norm: norm) -> None:
    """Give every layer of a `dflash` head the key norm of the first one, as vLLM's kernels for CPUs do.

    They norm the keys of the target's tokens in all layers with the weight of the first layer (vllm 0.32), so that
    only heads with equal weights have equal counters.
    """
    for layer in head.layers[1:]:
        layer.self_attn.k_norm = take(head.layers[0].self_attn.k_norm)


@torch.no_grad()
def attend_to_masks(head: DflashHead) -> None:
    """Let mask rows attend to each other in the first layer from the start: their keys equal their queries.

    Otherwise a head learns to read the newest token alone, and drafts the same whether later masks are seen or not.
    """
    attention = head.layers[0].self_attn
    attention.k_proj.weight.copy_(attention.q_proj.weight[: len(attention.k_proj.weight)])


def answers(target: Target, count: int, prompt_tokens: int, new_tokens: int) -> torch.Tensor:
    """Random prompts, each followed by the target's greedy answer [count, prompt_tokens + new_tokens]."""
    prompts = torch.randint(0, 256, (count, prompt_tokens), generator=torch.Generator().manual_seed(2))
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new_tokens}
    return target.model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)


def write_served_head(directory: Path, target: Target, target_dir: Path, case: Case, head: Head) -> dict[str, Any]:
    """Export a head's weights, wrong where the case says so; returns what `serving.json` holds."""
    form = format_for("vllm", HEAD_CONFIGS[case.head], target.config)
    write_head(directory, form, head.state_dict())
    form.add_target(directory, target_dir)
    if case.broken:
        BREAKS[case.head][case.broken](directory)
    return {
        "method": form.method,
        "hf_overrides": form.hf_overrides,
        "speculative_settings": form.speculative_settings,
        "holds_target": form.holds_target,
    }
