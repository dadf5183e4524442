"""Starts a head from the target's own weights, with `head.start_from_target`.

Head `draft_model` copies the target's first layers. All other heads copy its last layer.
"""

import re

import torch
from transformers import PreTrainedConfig

from mtptrain.heads.base import Head, Tensors
from mtptrain.heads.draft_model import SIZES, DraftModelHead
from mtptrain.heads.layer_head import LayerHead
from mtptrain.target.families import head_dim as target_head_dim
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import (
    load_frozen_parts,
    load_last_layer,
    refuse_missing,
    refuse_quantised,
    stored_tensors,
)
from mtptrain.utils.errors import UserError, warn

NAMES_IN_TARGET = {
    "hidden_norm.weight": ("input_layernorm.weight",),
    # Gemma's name, then the other families'. OLMo 2's is a norm of the attention's output, taken as a start.
    "post_attention_layernorm.weight": ("pre_feedforward_layernorm.weight", "post_attention_layernorm.weight"),
}
"""Names in the target's layer, in order of preference, for head tensors that are named differently there."""
EQUAL_SETTINGS = (
    "model_type",
    *(size for size in SIZES if size != "num_hidden_layers"),
    "head_dim",
    "tie_word_embeddings",
)
"""Settings of a draft model that must equal the target's if layers of the target are copied into it."""


@torch.no_grad()
def start_from_target(head: Head, target: TargetFiles) -> None:
    """Copy the target's final norm, and those weights of its last layer that have the head's shapes and head dim.

    In head `eagle3`, the first columns of the query, key and value projections read the embedding and stay random. The
    random weights of `fc` or `eh_proj` are halved, and the identity is added to the columns for the hidden state (in
    `eagle3`, for the last captured stream), so that the layer reads the target's states.
    """
    if isinstance(head, DraftModelHead):
        copy_first_layers(head, target)
        return
    assert isinstance(head, LayerHead)
    head_dim, target_dim = head.self_attn.head_dim, target_head_dim(target.config)
    layer, parts = fold_query_key_norms(load_last_layer(target.directory)), load_frozen_parts(target.directory)
    copied, parameters = [], dict(head.named_parameters())
    for name, parameter in parameters.items():
        weight = next((layer[source] for source in NAMES_IN_TARGET.get(name, (name,)) if source in layer), None)
        if name == "norm.weight":
            parameter.copy_(parts.norm_weight.float() + parts.form.norm_offset)
        elif (
            weight is not None and fits(name, parameter, weight) and (head_dim == target_dim or "self_attn" not in name)
        ):
            parameter[..., -weight.shape[-1] :].copy_(weight)
            copied.append(name)
    projections = [name for name in parameters if re.fullmatch(r"(self_attn|mlp)\..*proj\.weight", name)]
    left_random = [name.removesuffix(".weight") for name in projections if name not in copied]
    if len(left_random) == len(projections):
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(layer.items())[:4])
        raise UserError(
            "head.start_from_target: the target's last layer must have projections of the head's shapes and head dim, "
            f"but {target.directory} has {sizes} and head dim {target_dim}; set head.start_from_target=false"
        )
    if left_random:
        warn(
            "head.start_from_target: the target's last layer should have each projection of the head, in its shape and "
            f"with its head dim {head_dim}, but lacks {', '.join(left_random)}, which stay random; compare with "
            "head.start_from_target=false"
        )
    fuse = parameters["eh_proj.weight" if "eh_proj.weight" in parameters else "fc.weight"]
    hidden_size = fuse.shape[0]
    fuse.mul_(0.5)
    fuse[:, -hidden_size:].add_(torch.eye(hidden_size))


def fold_query_key_norms(layer: Tensors) -> Tensors:
    """Returns a target's layer with its query and key norms folded into the projections.

    Qwen3 and Gemma 3 have such norms; the heads that can start from a target do not. The weights of the norms fold
    exactly. The norms also divide each row by its root mean square, which depends on the input. A constant per
    attention head replaces this divisor: the root mean square over inputs of random direction. OLMo 2 has one norm over
    all attention heads, and no input norm; Command R+ has a weight for each attention head.
    """
    folded, input_weight = dict(layer), layer.get("input_layernorm.weight", torch.ones(()))
    for name in ("q", "k"):
        norm = layer.get(f"self_attn.{name}_norm.weight")
        if norm is not None:
            heads = layer[f"self_attn.{name}_proj.weight"].unflatten(0, (-1, norm.shape[-1]))  # [heads, head_dim, H]
            mean_squares = (heads * input_weight).square().sum(-1).mean(-1)  # [heads]
            scaled = heads * norm[..., None] * mean_squares.rsqrt()[:, None, None]
            folded[f"self_attn.{name}_proj.weight"] = scaled.flatten(0, 1)
    return folded


def fits(name: str, parameter: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether the shapes match. An attention projection may have extra leading columns for the embedding."""
    reads_embedding = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    widths = (weight.shape[-1], 2 * weight.shape[-1]) if reads_embedding else (weight.shape[-1],)
    return parameter.shape[:-1] == weight.shape[:-1] and parameter.shape[-1] in widths


def refuse_other_sizes(draft: PreTrainedConfig, target: PreTrainedConfig) -> None:
    """Raise UserError unless a draft model can be the first layers of a target."""
    ours, theirs = ({name: getattr(each, name, None) for name in EQUAL_SETTINGS} for each in (draft, target))
    wrong = [(name, theirs[name], ours[name]) for name in ours if ours[name] != theirs[name]]
    if draft.num_hidden_layers > target.num_hidden_layers:
        wrong.append(("num_hidden_layers", f"at most {target.num_hidden_layers}", draft.num_hidden_layers))
    if wrong:
        raise UserError(
            "head.start_from_target: a draft model must have the target's family and sizes to start as its first "
            f"layers, but has {', '.join(f'{name} {found}, not {wanted}' for name, wanted, found in wrong)}; leave "
            "these settings out, or set head.start_from_target=false"
        )


@torch.no_grad()
def copy_first_layers(head: DraftModelHead, target: TargetFiles) -> None:
    """Copy the target's embeddings, first decoder layers, final norm and lm_head into a draft model."""
    refuse_other_sizes(head.config, target.config)
    state, stored = head.state_dict(), stored_tensors(target.directory)
    refuse_quantised(stored, [name.rpartition(".")[0] for name in state])
    refuse_missing(target.directory, state.keys() - stored.keys())
    head.load_state_dict({name: stored[name].read() for name in state})
