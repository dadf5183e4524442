"""Makes targets and heads for the serving tests, and writes the directories that vLLM serves."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from mtptrain.engines.table import format_for
from mtptrain.export import write_head
from mtptrain.heads.base import Head
from mtptrain.heads.corrected import Corrected
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.packing import PackedTokens, Packing
from mtptrain.init_from.from_target import copy_first_layers
from mtptrain.target.files import TargetFiles
from mtptrain.target.model import Target
from tests.conftest import make_target
from tests.families import TOKENS, VISION
from tests.mimo import add_mimo_layer
from tests.serving.breaks import damage
from tests.serving.cases import CONTEXT_TOKENS, HEADS, TARGETS, Case

SETTINGS: dict[str, Any] = {
    **{"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "tie_word_embeddings": False},
    **{"max_position_embeddings": CONTEXT_TOKENS, "initializer_range": 0.1},
    "pad_token_id": None,  # the default of some families, such as phi3, is beyond a vocabulary of 260
}


def make_served_target(directory: Path, kind: str) -> Path:
    """Makes a tiny target that walks through its vocabulary in a circle, disturbed by its layers; see cases.py."""
    make_target(directory, TARGETS[kind].model_type, **(SETTINGS | TARGETS[kind].settings))
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
    if TARGETS[kind].has_images:
        add_image_encoder(directory, model)
    return directory


def add_image_encoder(directory: Path, model: PreTrainedModel) -> None:
    """Writes a Qwen3.5 as an image+text model."""
    vision = VISION | {"out_hidden_size": model.config.hidden_size}
    config = AutoConfig.for_model("qwen3_5", text_config=model.config.to_dict(), vision_config=vision, **TOKENS)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.model.language_model.load_state_dict(model.base_model.state_dict())
    whole.lm_head.load_state_dict(model.get_output_embeddings().state_dict())
    whole.save_pretrained(directory)


def make_head(target: Target, kind: str, num_steps: int = 30) -> Head:
    """Makes a head with random norms and trains it for some steps on the target's answers to random prompts.

    A `draft_model` of the target's family is not trained: it copies the target's first layers.
    """
    torch.manual_seed(1)
    head = build_head(HEADS[kind], target.config)
    is_of_family = isinstance(head, DraftModelHead) and head.config.model_type == target.config.model_type
    if is_of_family:  # half of the target's layers often predict the same token as all of them
        copy_first_layers(head, TargetFiles(Path(target.config.name_or_path)))
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, *((0.0, 2.0) if is_of_family else (0.5, 1.5)))
    if is_of_family:
        return head.eval().requires_grad_(False)
    if isinstance(head, DflashHead):
        if not has_own_key_norms(kind):
            share_key_norms(head)
        attend_to_masks(head)
    # Heads that are bound to their depths get more and shorter prompts: most of them feed nothing back and are tried on
    # targets that repeat a token, whose answers have few distinct tokens.
    tokens = answers(target, *((256, 4, 12) if head.Config.is_bound_to_depths else (16, 16, 48)))
    depths = HEADS[kind].ttt_steps if isinstance(head, MedusaHead) or head.Config.drafts_whole_blocks else 3
    num_tokens = tokens.shape[1] - 2
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    states = target.forward(tokens, positions, target.cache(tokens.shape[1]), head.read_layers)
    target_states = (states.postnorm_states if states.aux_hidden_states is None else states.aux_hidden_states)[
        :, :num_tokens
    ]
    ids = (tokens[:, first : first + num_tokens].flatten() for first in (0, 1))
    packing = Packing.of_spans([num_tokens] * len(tokens), window=head.shared_window)
    packed = PackedTokens(target_states.flatten(0, 1), *ids, packing)
    padded = F.pad(tokens, (0, depths), value=-100)
    labels = torch.stack(
        [padded[:, 2 + depth :][:, :num_tokens].flatten() for depth in range(depths)]
    )  # [T, N], -100 past the end
    if head.d2t is not None:
        frequent = torch.bincount(tokens.flatten(), minlength=target.config.vocab_size).argsort(
            descending=True, stable=True
        )
        drafted_tokens = frequent[: len(head.d2t)].sort().values
        draft_ids = torch.arange(len(drafted_tokens))
        head.d2t.copy_(drafted_tokens - draft_ids)
        draft_id_of = torch.full((target.config.vocab_size,), -100).index_copy_(0, drafted_tokens, draft_ids)
        labels = torch.where(labels < 0, labels, draft_id_of[labels])
    optimizer = torch.optim.Adam([parameter for parameter in head.parameters() if parameter.requires_grad], lr=1e-2)
    for _ in range(num_steps * 3 if head.Config.drafts_whole_blocks else num_steps):
        drafted = head(packed, target.parts, depths)
        logits = [head.logits(drafted, target.parts)]
        correction = head.correction(packed, drafted) if isinstance(head, Corrected) else None
        if correction is not None:
            logits.append(logits[0] + F.linear(correction.features, correction.weight))
        # A head that corrects only its most likely candidates needs a loss on the uncorrected logits too.
        trained = logits if correction is not None and correction.num_candidates else logits[-1:]
        torch.stack([F.cross_entropy(each.flatten(0, 1), labels.flatten()) for each in trained]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Copy the norm, because a file cannot hold one tensor under several names.
    if isinstance(head, DflashHead) and not has_own_key_norms(kind):
        share_key_norms(head, deepcopy)
    return head.eval().requires_grad_(False)


def has_own_key_norms(kind: str) -> bool:
    """Returns whether each layer of a block drafter keeps its own key norm, which vLLM's CPU kernels do not serve."""
    return kind == "dflash_two_norms" or "mixed" in kind or "anchor" in kind or "dspark" in kind or "dflash2" in kind


def share_key_norms(head: DflashHead, take: Callable[[torch.nn.Module], torch.nn.Module] = lambda norm: norm) -> None:
    """Gives every layer of a `dflash` head the key norm of the first layer.

    vLLM 0.32's CPU kernels apply the first layer's norm weight to the keys of the target's tokens in all layers.
    Counters therefore agree only for heads whose layers share that weight.
    """
    for layer in head.layers[1:]:
        layer.self_attn.k_norm = take(head.layers[0].self_attn.k_norm)


@torch.no_grad()
def attend_to_masks(head: DflashHead) -> None:
    """Sets the first layer's key weights to its query weights, so that mask tokens attend to each other from the start.

    Otherwise the head learns to read only the newest token, and drafts the same whether or not it sees later masks.
    """
    attention = head.layers[0].self_attn
    attention.k_proj.weight.copy_(attention.q_proj.weight[: len(attention.k_proj.weight)])


def answers(target: Target, count: int, prompt_tokens: int, new_tokens: int) -> torch.Tensor:
    """Returns random prompts, each followed by the target's greedy answer [count, prompt_tokens + new_tokens]."""
    prompts = torch.randint(0, 256, (count, prompt_tokens), generator=torch.Generator().manual_seed(2))
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new_tokens}
    return target.model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)


def write_served_head(directory: Path, target: Target, target_dir: Path, case: Case, head: Head) -> dict[str, Any]:
    """Exports a head, applies the case's break if it has one, and returns what `serving.json` says of the export."""
    form = format_for("vllm", HEADS[case.head], target.config)
    write_head(directory, form, head.state_dict())
    form.add_target(directory, target_dir)
    if case.broken:
        damage(directory, case.head, case.broken)
    return {"method": form.method, "speculative_settings": form.speculative_settings, "holds_target": form.holds_target}
