"""Closed formulas for the FLOPs and the memory of a training step.

Both follow from a head's matrices and norms: how many rows of a step each of them reads, and what autograd keeps of
these rows. The functions of a step are counted as they run without compilation; compiled ones keep less.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from mtptrain.config import LossPart
from mtptrain.heads.base import Head
from mtptrain.heads.dflash import DflashHead, DflashLayer
from mtptrain.heads.dflash2 import Dflash2Head
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.hydra import HydraHead
from mtptrain.heads.layer_head import LayerHead
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.packing import Packing
from mtptrain.target.families import head_dim, key_heads, routed_experts
from mtptrain.training.flops import StepFlops
from mtptrain.training.losses import LossSettings

UNUSED = (
    "embed_tokens",
    "markov_w1",
    "predecessor_codebook",
    "successor_codebook",
    "mask_hidden",
    "base_kernel",
    "bias",
)
"""Tables and other parameters that multiply no rows."""
OUTPUTS = ("lm_head", "norm", "candidate_selector.hidden_projection", "markov_head.markov_w2", "confidence_head.proj")
"""Parameters that make or read the states of all depths."""
FINISH = ("o_proj", "gate_proj", "up_proj", "down_proj", "post_attention_layernorm")
"""Parameters of a decoder layer after attention."""
FROZEN = 2 / 3
"""The share that counts of a row which nothing trained makes: its matrix products have no gradient of the row."""
KEPT = {
    **{"q_proj": (0, 0), "k_proj": (1, 0), "v_proj": (0, 0), "o_proj": (1, 0)},
    **{"gate_proj": (1, 2), "up_proj": (0, 1), "down_proj": (1, 0)},
    **{"eh_proj": (1, 0), "fc": (1, 0)},
    **{"residual": (1 / FROZEN, 0), "first": (0, 1 / FROZEN)},  # whose rows count as `FROZEN`
    **{"lm_head": (0, 0), "embed_tokens": (0, 0), "markov_w2": (1, 0)},
}
"""How often autograd keeps the input and the output of a matrix, apart from what attention keeps; of all others, it
keeps both. An input that several matrices read is kept once."""
BYTES_PER_LOGIT = {2: 40, 4: 28}
"""Peak bytes of comparing a logit with the teacher, by the bytes of a logit."""
BYTES_PER_TEACHER_LOGIT = 14
"""Peak bytes of computing the softmax of the target's logits, before those of drafts exist."""
PAIR_FLOPS = 14
"""FLOPs per value of a query for each key: two dot products in the forward pass, and five in the backward pass."""


class Rows(NamedTuple):
    """A number of rows per token, and per draft position over all depths."""

    tokens: float
    drafts: float

    def of(self, packing: Packing) -> float:
        """Returns the number of rows of a packed micro-batch."""
        return self.tokens * len(packing.positions) + self.drafts * len(packing.draft_positions)


class Part(NamedTuple):
    """A trained matrix or norm."""

    rows: Rows
    size: float
    """Values of a matrix that a row meets, which are fewer than it has in a mixture of experts; 0 for a norm."""
    kept: float
    """Bytes that autograd keeps per row."""


class Layers(NamedTuple):
    """The attention of a head's decoder layers, and what activation checkpointing does with these layers, or MLPs."""

    pair_flops: float
    """FLOPs per pair of a draft position and a token that it sees."""
    block_flops: float
    """FLOPs per draft position of attention inside its block."""
    kept: Rows
    """Values that autograd keeps of queries, keys, values and outputs of attention, apart from the input of o_proj."""
    inputs: Rows
    """States that checkpointing keeps, instead of what the matrices and norms keep."""
    num_runs: int
    """How often a layer runs in the forward pass. Checkpointing recomputes the activations of one at a time."""


def step_flops(head: Head, target_config: PreTrainedConfig, loss: LossSettings) -> StepFlops:
    """Returns the FLOPs of matmuls and attention in a training step. What checkpointing recomputes does not count."""
    layers, output, depths = _layers(head, target_config), _own_output(head), head.ttt_steps
    # 1. A value of a matrix is multiplied in the forward pass, for its own gradient, and for that of the row.
    per_token, per_draft = 0.0, layers.block_flops
    for part in _parts(head, target_config, 2):
        per_token += 6 * part.size * part.rows.tokens
        per_draft += 6 * part.size * part.rows.drafts
    # 2. Parts of the loss that couple depths take a first pass over all logits. A frozen output layer has no gradient.
    passes, table = 1 + loss.couples_depths, target_config.vocab_size * target_config.hidden_size
    per_draft += 2 * table * passes * (depths if head.drafts_per_document else 1)
    if output is None:
        has_gradient = not loss.mix.keys() <= {LossPart.features, LossPart.confidence}
        per_draft += 2 * table * (passes + has_gradient) * depths
    else:
        per_draft += 2 * output.numel() * (passes - 1) * depths
    if isinstance(head, Dflash2Head):  # the scores of candidates
        per_draft += 2 * head.num_candidates * head.candidate_selector.successor_codebook.shape[1] * depths
    if isinstance(head, DraftModelHead):
        return StepFlops(per_token, per_draft, 0.0, layers.pair_flops)
    return StepFlops(per_token, per_draft, layers.pair_flops, 0.0, head.sliding_share)


def activation_bytes(
    head: Head, target_config: PreTrainedConfig, packing: Packing, width: int, loss: LossSettings
) -> int:
    """Returns the peak memory of a step over a packed micro-batch, without weights, gradients and frozen parts.

    The peak is in the loss, which holds a block of logits beside the activations of the whole head; with activation
    checkpointing it may be in the backward pass of a layer.

    `width` is the number of bytes of a value: 2 in bf16, 4 in fp32. The head's weights need no data.
    """
    layers, output, depths = _layers(head, target_config), _own_output(head), head.ttt_steps
    hidden_size, vocab_size = target_config.hidden_size, target_config.vocab_size
    state_size = head.config.hidden_size if isinstance(head, DraftModelHead) else hidden_size
    # 1. The batch, the target's states after its norm and those of the teacher, and the head's with their gradient.
    values = hidden_size * Rows(1 + len(head.capture_layers) + (not head.read_layers), 1).of(packing)
    values += state_size * Rows(0, 2 * depths).of(packing)
    # 2. A block of the loss, with all depths if they share the teacher, and the gradient of a trained output layer.
    draft_vocab_size = vocab_size if output is None else len(output)
    num_together = depths if packing.depths_share_targets else 1
    num_teachers = min(len(packing.draft_positions), max(1, loss.chunk_rows // num_together))
    of_drafts = num_together * draft_vocab_size * BYTES_PER_LOGIT[width] + vocab_size * width
    block = num_teachers * max(of_drafts, vocab_size * BYTES_PER_TEACHER_LOGIT)
    block += 0 if output is None else output.numel() * torch.float32.itemsize
    # 3. What autograd keeps of the layers, or else their inputs and what it keeps of one of them.
    kept = sum(part.kept * part.rows.of(packing) for part in _parts(head, target_config, width))
    attention = width * layers.kept.of(packing)
    if not head.activation_checkpointing:
        return round(width * values + kept + attention + block)
    if isinstance(head, DraftModelHead):  # whose layers are checkpointed with their attention
        kept, attention = kept + attention, 0.0
    values += state_size * layers.inputs.of(packing)
    return round(width * values + attention + max(block, kept / layers.num_runs))


def query_and_key_size(config: PreTrainedConfig) -> tuple[int, int]:
    """Returns the values of a query of a language model over all attention heads, and of a key over all key heads."""
    latent = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)
    size = int(latent or head_dim(config))
    return config.num_attention_heads * size, key_heads(config) * size


def _own_output(head: Head) -> torch.Tensor | None:
    """Returns the weight [D, H] of the head's own output layer, which may be its embedding table; None without one."""
    own = head.model.embed_tokens if isinstance(head, DraftModelHead) and head.lm_head is None else head.lm_head
    return None if own is None else own.weight


def _parts(head: Head, target_config: PreTrainedConfig, width: int) -> Iterator[Part]:
    """Yields the matrices and norms of a head, for values of `width` bytes."""
    num_used, num_experts = routed_experts(target_config)
    shapes = {name.removesuffix(".weight"): parameter.shape for name, parameter in head.named_parameters()}
    default, rows_of = _rows(head)
    for name, shape in shapes.items():
        last = next(part for part in reversed(name.split(".")) if not part.isdigit())
        rows = rows_of.get(name) or rows_of.get(last) or default
        if len(shape) == 1:  # a norm, maybe of each attention head, keeps its input in fp32 for the gradient
            size = shapes.get(f"{name.removesuffix('_norm')}_proj", shape)[0]
            yield Part(rows, 0, size * (width + 4))
            continue
        inputs, outputs = shape[-1], math.prod(shape[:-1]) * (num_used / num_experts if ".experts." in name else 1)
        of_input, of_output = KEPT.get(last, (1, 1))
        if last == "q_proj" and isinstance(head, DflashHead):
            of_input = 1  # the norm is computed again for keys
        kept = width * (of_input * inputs + of_output * outputs)
        if last == "kernel_projection":  # its convolution keeps values and kernels of each tap
            kept = width * inputs * (2 + 4 * shapes[name.replace(last, "base_kernel")][1])
        yield Part(rows, inputs * outputs, kept)


def _rows(head: Head) -> tuple[Rows, dict[str, Rows]]:
    """Returns the rows that most parameters of a head read, and those of others by name or by its last part."""
    depths = head.ttt_steps
    rows = dict.fromkeys(UNUSED, Rows(0, 0)) | dict.fromkeys(OUTPUTS, Rows(0, depths))
    match head:
        case LayerHead():
            later = depths - 1 if head.mask_hidden is None else 0
            rows |= dict.fromkeys(FINISH, Rows(0, depths)) | {"q_proj": Rows(0, 1 + later)}
            if isinstance(head, Eagle3Head):
                is_normed = head.input_norm is not None or head.fc_norm is not None
                rows |= {"input_norm": Rows(1, 0), "fc_norm": Rows(1, 0), "fc": Rows(1 if is_normed else FROZEN, 0)}
            return Rows(1, later), rows
        case DflashHead():
            block, queries = head.num_masks + 1, _queries(head)
            rows |= {"fc": Rows(FROZEN, 0), "hidden_norm": Rows(1, 0)}
            rows |= dict.fromkeys(("k_proj", "v_proj", "k_norm"), Rows(1, block))
            # Queries and keys have a norm each, and a convolution has another. Five use halves of two matrices.
            reads = block + queries * (1 + isinstance(head, Dflash2Head))
            rows |= {"input_layernorm": Rows(0, reads)}
            return Rows(0, queries), rows | {"kernel_projection": Rows(0, 1.25 * block)}
        case MedusaHead():
            first = {f"blocks.{depth}.layers.0": Rows(0, FROZEN) for depth in range(depths)}
            return Rows(0, 1), rows | first
        case HydraHead():
            return Rows(0, 1), rows | dict.fromkeys(("residual", "first"), Rows(0, FROZEN))
        case DraftModelHead():
            return Rows(1, 0), rows | {"embed_tokens": Rows(0, depths if head.lm_head is None else 0)}
    return Rows(1, depths - 1), rows


def _queries(head: DflashHead) -> float:
    """Returns the queries of a block, averaged over the layers. The last layer has those of the drafts alone, unless it
    convolves the tokens of a block."""
    block, num_layers = head.num_masks + 1, len(head.layers)
    return block if isinstance(head, Dflash2Head) else (block * (num_layers - 1) + head.ttt_steps) / num_layers


def _layers(head: Head, target_config: PreTrainedConfig) -> Layers:
    """Returns the costs of the attention of a head, and of its layers with activation checkpointing."""
    depths = head.ttt_steps
    match head:
        case MedusaHead() | HydraHead():
            return Layers(0, 0, Rows(0, 0), Rows(0, 1 if isinstance(head, MedusaHead) else depths + 1), depths)
        case DflashHead():
            layers = [layer for layer in head.layers if isinstance(layer, DflashLayer)]
            query, key = layers[0].self_attn.q_proj.out_features, layers[0].self_attn.k_proj.out_features
            count, block, queries = len(layers), head.num_masks + 1, _queries(head)
            # In layers with a window, matmuls also compute the tokens that only a part of the block sees.
            num_sliding = sum(layer.kind.window is not None for layer in layers)
            pairs = queries * (count * block + num_sliding * head.num_masks)
            keys = count * block + num_sliding * (block + head.num_masks)
            kept = Rows(2 * count * key, 2 * count * queries * query + 2 * keys * key)
            flops = PAIR_FLOPS * query
            return Layers(count * queries * flops, pairs * flops, kept, Rows(1, count * block), count)
        case DraftModelHead():
            (query, key), count = query_and_key_size(head.config), head.config.num_hidden_layers
            kept = Rows(count * (query + 2 * key), 0)
            return Layers(PAIR_FLOPS * count * query, 0, kept, Rows(count, 0), count)
        case LayerHead():
            query, key, copies = head.self_attn.q_proj.out_features, head.self_attn.k_proj.out_features, 1
        case _:
            (query, key), copies = query_and_key_size(target_config), 2
    # Each depth keeps the keys and values of all depths between the first and itself.
    kept = Rows(2 * key, copies * depths * query + depths * (depths - 1) * key)
    return Layers(PAIR_FLOPS * depths * query, 0, kept, Rows(2, 2 * depths), depths)
