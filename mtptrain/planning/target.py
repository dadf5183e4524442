"""Closed formulas for the target: its size, the FLOPs of extraction, and the memory of decoding in validation."""

from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from mtptrain.config import PipelineConfig, PromptSource
from mtptrain.heads import HEADS
from mtptrain.planning.step import query_and_key_size
from mtptrain.target.families import head_dim, largest, mlp_size, routed_experts
from mtptrain.target.form import build_on_meta, find_form


@dataclass(frozen=True)
class TargetCosts:
    """The costs of the target's forward up to its final norm; extraction needs no logits."""

    num_parameters: int
    """Tied parameters count once."""
    active_parameters: int
    """Number of parameters of the decoder layers and the final norm that one token uses: only k of E experts."""
    attention_flops: int
    """FLOPs of attention for each pair of a query token and a key token, over all layers."""

    def flops_per_token(self, document_tokens: float) -> float:
        """Returns 2 FLOPs per active parameter, plus causal attention over half a document on average.

        This counts attention to all earlier tokens in every layer: an upper bound for layers with a sliding window, or
        without attention.
        """
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
    prompts, as long as `longest_tokens`. Later rounds process only a few rows per sequence.
    """
    settings, train, hidden_size = config.acceptance, config.train, target_config.hidden_size
    # 1. The largest batch: its prompts, and its tokens with answers and padding.
    if config.prompts.source is PromptSource.text_files:
        longest_tokens = min(longest_tokens, settings.prompt_tokens)
    longest = min(longest_tokens + train.validation_new_tokens, target_config.max_position_embeddings)
    num_prompts = min(settings.batch_size, -(-train.validation_prompts // config.planner.num_gpus))
    num_tokens = max(longest, min(num_prompts * longest, settings.batch_tokens))
    # 2. Reading a prompt. The MLP is the widest part of a layer; routed experts have copies of each token, and families
    # without dense layers, such as Mixtral, call their size intermediate_size. Beside it are four rows of the hidden
    # size in the layer, the target's states and the captured ones, and the head's embeddings, their concatenation with
    # states (two), and its keys and values (one where several query heads share a key head).
    num_used, num_experts = routed_experts(target_config)
    expert_size = largest(target_config, "moe_intermediate_size", "intermediate_size")
    routed = num_used * (3 * expert_size + 2 * hidden_size) if num_experts > 1 else 0
    num_captured = len(HEADS[config.head.name].resolve_capture_layers(config.head, target_config))
    read_values = max(3 * mlp_size(target_config), routed) + (9 + num_captured) * hidden_size
    # 3. The cache. `speculate` allocates slots for drafts. It keeps states before a round and after each of its tokens,
    # beside those that the model and the next round use.
    num_drafts = settings.num_speculative_tokens
    num_slots = num_tokens + num_prompts * (3 * num_drafts + 2)
    values = num_tokens * read_values + num_slots * cached_values(target_config)
    states = num_prompts * (num_drafts + 4) * state_values(target_config)
    return int(values * getattr(torch, settings.dtype).itemsize + states * torch.float32.itemsize)


def cached_values(config: PreTrainedConfig) -> int:
    """Returns the number of values that the cache of a target or of a draft model holds per token, over all layers."""
    # Latent attention caches the latent from which the keys and values of all attention heads are computed.
    latent = getattr(config, "kv_lora_rank", None)
    layer_values = latent + config.qk_rope_head_dim if latent else 2 * query_and_key_size(config)[1]
    return int(layer_values * sum(mask is not None for mask in find_form(config).masks))  # other layers keep states


@torch.no_grad()
def state_values(config: PreTrainedConfig) -> int:
    """Returns the number of values in the states of one sequence, over all layers that keep states."""
    if not find_form(config).keeps_states:
        return 0
    model = build_on_meta(config)
    model.set_experts_implementation("batched_mm")  # other implementations read values
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, 2, dtype=torch.long, device="meta"), past_key_values=cache, use_cache=True)
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    states = [state for layer in layers for state in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    return sum(state.numel() for state in states if state is not None)
