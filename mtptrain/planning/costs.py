"""Closed formulas for the FLOPs and the memory of a training step, of the target's forward pass, and of validation.

Those of a step follow from the head's matrices: how many rows of a step each of them reads. They stand for a step
without compilation, and lie within 10 % of what its operators compute and keep.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from mtptrain.config import LossPart, PipelineConfig, PromptSource
from mtptrain.heads.base import Head
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.dflash2 import Dflash2Head
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.hydra import HydraHead
from mtptrain.heads.layer_head import LayerHead
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.packing import Packing
from mtptrain.target.families import head_dim, key_heads, largest, mlp_size, routed_experts
from mtptrain.target.form import build_on_meta, find_form
from mtptrain.training.flops import StepFlops
from mtptrain.training.losses import LossSettings

UNUSED = (
    *("embed_tokens", "markov_w1", "predecessor_codebook", "successor_codebook"),
    *("mask_hidden", "base_kernel", "bias"),
)
"""Tables and other parameters that multiply no rows."""
OUTPUTS = ("lm_head", "norm", "candidate_selector.hidden_projection", "markov_head.markov_w2", "confidence_head.proj")
"""Parameters that make or read the states of all depths."""
FINISH = ("o_proj", "gate_proj", "up_proj", "down_proj", "post_attention_layernorm")
"""Parameters of a decoder layer after attention."""
FROZEN = 2 / 3
"""The share that counts of a row which nothing trained makes: its matrix products have no gradient of the row."""
KEPT = 0.8
"""The share of the inputs and outputs of matrices that autograd keeps: some share an input, and sums need no output."""
BYTES_PER_LOGIT, BYTES_PER_LOGIT_GPU = {2: 30, 4: 28}, 40
"""Peak bytes of comparing a logit with the teacher, by the bytes of a logit. On a GPU, the teacher's logits have to
become probabilities too."""
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
    attention: float
    """Part of them that attention keeps, also with activation checkpointing."""


class Layers(NamedTuple):
    """The attention of a head, and its layers (or MLPs) with activation checkpointing."""

    queries: float
    """Values of queries per draft position, over all layers and depths."""
    inputs: Rows
    """States that checkpointing keeps."""
    num_runs: int
    """How often a layer runs in the forward pass. Checkpointing recomputes the activations of one at a time."""


def step_flops(head: Head, target_config: PreTrainedConfig, loss: LossSettings) -> StepFlops:
    """Returns the FLOPs of matmuls and attention in a training step. What checkpointing recomputes does not count."""
    output, depths = _own_output(head), head.ttt_steps
    of_pair = PAIR_FLOPS * _layers(head, target_config).queries
    # 1. A value of a matrix is multiplied in the forward pass, for its own gradient, and for that of the row.
    per_token = per_draft = 0.0
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
    if isinstance(head, DraftModelHead):
        return StepFlops(per_token, per_draft, 0.0, of_pair)
    return StepFlops(per_token, per_draft, of_pair, 0.0, head.sliding_share)


def activation_bytes(
    head: Head, target_config: PreTrainedConfig, packing: Packing, width: int, loss: LossSettings, on_gpu: bool
) -> int:
    """Returns the peak memory of a step over a packed micro-batch, without weights, gradients and frozen parts.

    The peak is in the loss, which holds a block of logits beside the activations of the whole head; with activation
    checkpointing it may be in the backward pass of a layer.

    `width` is the number of bytes of a value: 2 in bf16, 4 in fp32. The head's weights need no data.
    """
    output, depths = _own_output(head), head.ttt_steps
    hidden_size, vocab_size = target_config.hidden_size, target_config.vocab_size
    state_size = head.config.hidden_size if isinstance(head, DraftModelHead) else hidden_size
    # 1. The batch, the target's states after its norm and those of the teacher, and the head's with their gradient.
    values = hidden_size * Rows(1 + len(head.capture_layers) + (not head.read_layers), 1).of(packing)
    values += state_size * Rows(0, 2 * depths).of(packing)
    # 2. A block of the loss, with all depths if they share the teacher, and the gradient of a trained output layer.
    draft_vocab_size = vocab_size if output is None else len(output)
    num_together = depths if packing.depths_share_targets else 1
    num_rows = loss.for_vocabulary(draft_vocab_size, vocab_size, num_together, on_gpu).chunk_rows
    num_teachers = min(len(packing.draft_positions), max(1, num_rows // num_together))
    per_logit = BYTES_PER_LOGIT_GPU if on_gpu else BYTES_PER_LOGIT[width]
    of_drafts = num_together * draft_vocab_size * per_logit + vocab_size * width
    block = num_teachers * max(of_drafts, vocab_size * BYTES_PER_TEACHER_LOGIT)
    block += 0 if output is None else output.numel() * torch.float32.itemsize
    # 3. What autograd keeps of the layers; or with checkpointing their inputs, attention, and the rest of one of them.
    parts = [(part, part.rows.of(packing)) for part in _parts(head, target_config, width)]
    kept, attention = sum(rows * part.kept for part, rows in parts), sum(rows * part.attention for part, rows in parts)
    if not head.activation_checkpointing:
        return round(width * values + kept + block)
    layers = _layers(head, target_config)
    values += state_size * layers.inputs.of(packing)
    return round(width * values + attention + max(block, (kept - attention) / layers.num_runs))


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
    default, rows_of = _rows(head)
    shapes = {name.removesuffix(".weight"): parameter.shape for name, parameter in head.named_parameters()}
    for name, shape in shapes.items():
        last = next(part for part in reversed(name.split(".")) if not part.isdigit())
        rows = rows_of.get(name) or rows_of.get(last) or default
        if len(shape) == 1:  # a norm, maybe of each attention head, keeps its input in fp32 for the gradient
            yield Part(rows, 0, shapes.get(f"{name.removesuffix('_norm')}_proj", shape)[0] * (width + 4), 0)
            continue
        inputs, outputs = shape[-1], math.prod(shape[:-1]) * (num_used / num_experts if ".experts." in name else 1)
        kept = KEPT * width * (inputs + outputs) * (last not in ("lm_head", "embed_tokens"))
        if last == "kernel_projection":  # its convolution keeps values and kernels of each tap
            kept = width * inputs * (2 + 4 * shapes[name.replace(last, "base_kernel")][1])
        in_attention = outputs if last in ("q_proj", "k_proj", "v_proj") else inputs * (last == "o_proj")
        if isinstance(head, DraftModelHead):  # whose layers are checkpointed with their attention
            in_attention = 0
        yield Part(rows, inputs * outputs, kept, width * in_attention)


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
            rows |= {"fc": Rows(FROZEN, 0), "hidden_norm": Rows(1, 0), "input_layernorm": Rows(0, block + queries)}
            rows |= dict.fromkeys(("k_proj", "v_proj", "k_norm"), Rows(1, block))
            return Rows(0, queries), rows
        case MedusaHead():
            return Rows(0, 1), rows | {f"blocks.{depth}.layers.0": Rows(0, FROZEN) for depth in range(depths)}
        case HydraHead():
            return Rows(0, 1), rows | dict.fromkeys(("residual", "first"), Rows(0, FROZEN))
        case DraftModelHead():
            return Rows(1, 0), rows | {"embed_tokens": Rows(0, depths if head.lm_head is None else 0)}
    return Rows(1, depths - 1), rows


def _queries(head: DflashHead) -> float:
    """Returns the queries of a block, averaged over the layers. The last layer has only those of the drafts, unless it
    convolves the tokens of a block."""
    block, count = head.num_masks + 1, len(head.layers)
    return block if isinstance(head, Dflash2Head) else (block * (count - 1) + head.ttt_steps) / count


def _layers(head: Head, target_config: PreTrainedConfig) -> Layers:
    depths, (query_size, _) = head.ttt_steps, query_and_key_size(target_config)
    match head:
        case MedusaHead() | HydraHead():
            return Layers(0, Rows(0, 1 if isinstance(head, MedusaHead) else depths + 1), depths)
        case DflashHead():
            count = len(head.layers)
            return Layers(query_size * count * _queries(head), Rows(1, count * (head.num_masks + 1)), count)
        case DraftModelHead():
            count = head.config.num_hidden_layers
            return Layers(query_and_key_size(head.config)[0] * count, Rows(count, 0), count)
        case LayerHead():
            query_size = head.self_attn.q_proj.out_features
    return Layers(query_size * depths, Rows(2, 2 * depths), depths)


class TargetCosts(NamedTuple):
    """The costs of the target's forward up to its final norm; extraction needs no logits."""

    num_parameters: int
    """Tied parameters count once."""
    active_parameters: int
    """Those of the decoder layers and the final norm that one token uses: only k of E experts."""
    attention_flops: int
    """FLOPs for each pair of a query token and a key token, over all layers."""

    def flops_per_token(self, document_tokens: float) -> float:
        """Returns 2 FLOPs per active parameter, plus causal attention over half a document: an upper bound for layers
        with a sliding window, or without attention."""
        return 2 * self.active_parameters + self.attention_flops * document_tokens / 2


def target_costs(config: PreTrainedConfig) -> TargetCosts:
    """Returns the costs of a target. It is built on the meta device, so it takes no memory."""
    form, (num_used, num_experts) = find_form(config), routed_experts(config)
    total, active = 0, 0.0
    for name, parameter in build_on_meta(config).named_parameters():
        total += parameter.numel()
        if not name.startswith((form.embed_tokens, form.lm_head)):
            active += parameter.numel() * (num_used / num_experts if ".experts." in name else 1)
    value_size = config.num_attention_heads * (getattr(config, "v_head_dim", None) or head_dim(config))
    attention = 2 * config.num_hidden_layers * (query_and_key_size(config)[0] + value_size)
    return TargetCosts(total, round(active), attention)


def validation_bytes(config: PipelineConfig, target_config: PreTrainedConfig, longest_tokens: int) -> int:
    """Returns the peak bytes of validation on a GPU, beyond the weights of the target and the head.

    The estimate is rather high: it assumes the largest batch that the settings allow, and that all of its tokens are
    prompts, as long as `longest_tokens`. It leaves out the states of layers without attention.
    """
    settings, train, hidden_size = config.acceptance, config.train, target_config.hidden_size
    # 1. The largest batch: its prompts, and its tokens with answers and padding.
    if config.prompts.source is PromptSource.text_files:
        longest_tokens = min(longest_tokens, settings.prompt_tokens)
    longest = min(longest_tokens + train.validation_new_tokens, target_config.max_position_embeddings)
    num_prompts = min(settings.batch_size, -(-train.validation_prompts // config.planner.num_gpus))
    num_tokens = max(longest, min(num_prompts * longest, settings.batch_tokens))
    # 2. Reading a prompt: the MLP, the widest part of a layer (routed experts have copies of each token), and states of
    # the target, its layer and the head. The cache also has slots for drafts.
    num_used, num_experts = routed_experts(target_config)
    expert_size = largest(target_config, "moe_intermediate_size", "intermediate_size")
    routed = num_used * (3 * expert_size + 2 * hidden_size) if num_experts > 1 else 0
    read_values = max(3 * mlp_size(target_config), routed) + 10 * hidden_size
    num_slots = num_tokens + num_prompts * (3 * settings.num_speculative_tokens + 2)
    values = num_tokens * read_values + num_slots * cached_values(target_config)
    return int(values * getattr(torch, settings.dtype).itemsize)


def cached_values(config: PreTrainedConfig) -> int:
    """Returns the number of values that the cache of a target or of a draft model holds per token, over all layers."""
    # Latent attention caches the latent from which the keys and values of all attention heads are computed.
    latent = getattr(config, "kv_lora_rank", None)
    layer_values = latent + config.qk_rope_head_dim if latent else 2 * query_and_key_size(config)[1]
    return int(layer_values * sum(mask is not None for mask in find_form(config).masks))  # other layers keep states
