"""Estimates the memory of decoding: in validation beyond the weights, and of a draft model in serving."""

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from mtptrain.config import PipelineConfig, PromptSource
from mtptrain.heads import HEADS
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head
from mtptrain.settings.heads import DraftModelConfig, HeadConfig
from mtptrain.target.families import head_dim, key_heads, largest, mlp_size, routed_experts
from mtptrain.target.form import build_on_meta, find_form


def validation_bytes(config: PipelineConfig, target_config: PreTrainedConfig, longest_tokens: int) -> int:
    """Returns the peak bytes of validation on a GPU, beyond the weights of the target and the head.

    The estimate is rather high: it assumes the largest batch that the settings allow, and that all of its tokens are
    prompts. Later rounds process only a few rows per sequence and need less memory than the prompts do.

    Args:
        config: the run's settings.
        target_config: the target's config.
        longest_tokens: number of tokens in the longest document.
    """
    num_prompts, num_tokens = largest_batch(config, longest_tokens, target_config.max_position_embeddings)
    # `speculate` allocates these slots in addition to those of prompt and answer.
    drafted_slots = num_prompts * (3 * config.acceptance.num_speculative_tokens + 2)
    num_captured = len(HEADS[config.head.name].resolve_capture_layers(config.head, target_config))
    # The head reads a prompt with a layer like the target's (block drafters need less). Alive beside it are rows of the
    # hidden size: the target's states and the captured ones, the embeddings, the concatenated input (two), and the
    # head's own keys and values, which take one where several query heads share a key head.
    read_values = forward_values(target_config) + (5 + num_captured) * target_config.hidden_size
    values = (num_tokens + drafted_slots) * cached_values(target_config) + num_tokens * read_values
    # States are kept before a round and after each of its tokens, beside those that the model and the next round use.
    states = num_prompts * (config.acceptance.num_speculative_tokens + 4) * state_values(target_config)
    return values * int(getattr(torch, config.acceptance.dtype.value).itemsize) + states * torch.float32.itemsize


def largest_batch(config: PipelineConfig, longest_tokens: int, context_tokens: int) -> tuple[int, int]:
    """Returns the most prompts and the most tokens (with answers and padding) of a batch of validation on a GPU."""
    new_tokens = config.train.validation_new_tokens
    is_text = config.prompts.source is PromptSource.text_files
    prompt_tokens = min(longest_tokens, config.acceptance.prompt_tokens) if is_text else longest_tokens
    longest = min(prompt_tokens + new_tokens, context_tokens)
    num_prompts = min(config.acceptance.batch_size, -(-config.train.validation_prompts // config.planner.num_gpus))
    return num_prompts, max(longest, min(num_prompts * longest, config.acceptance.batch_tokens))


def cached_values(config: PreTrainedConfig) -> int:
    """Returns the number of values that the cache of a target or of a draft model holds per token, over all layers."""
    # Latent attention caches the latent from which the keys and values of all attention heads are computed.
    if getattr(config, "kv_lora_rank", None):
        layer_values = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        layer_values = 2 * key_heads(config) * head_dim(config)
    num_layers = sum(mask is not None for mask in find_form(config).masks)  # the others keep states
    return int(num_layers * layer_values)


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


def forward_values(target_config: PreTrainedConfig) -> int:
    """Returns the approximate number of values per token alive in the MLP, the widest part of a decoder layer."""
    hidden_size = target_config.hidden_size
    dense = 3 * mlp_size(target_config)
    num_used, num_experts = routed_experts(target_config)
    # Families without dense layers, such as Mixtral, call the size of an expert intermediate_size.
    experts_size = largest(target_config, "moe_intermediate_size", "intermediate_size")
    routed = num_used * (3 * experts_size + 2 * hidden_size) if num_experts > 1 else 0
    # Four more rows of the hidden size: residual stream, its norm, the MLP's output, and the sum of stream and output.
    return int(max(dense, routed) + 4 * hidden_size)


def draft_model_bytes(
    config: HeadConfig, target_config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[int, int] | None:
    """Returns the bytes of weights, and of keys and values per token, of head `draft_model`; None for other heads."""
    if not isinstance(config, DraftModelConfig):
        return None
    with torch.device("meta"):
        head = build_head(config, target_config)
    assert isinstance(head, DraftModelHead)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    return num_parameters * dtype.itemsize, cached_values(head.config) * dtype.itemsize
