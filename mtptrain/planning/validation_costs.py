"""Estimates the memory of validation beyond the weights: a batch's caches, and the forward over its prompts."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from mtptrain.config import PipelineConfig, PromptSource
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.heads.base import Head
from mtptrain.heads.config import HeadConfig
from mtptrain.heads.files import build_head
from mtptrain.planning.costs import _DefaultDtype, _frozen_parts
from mtptrain.planning.meter import Meter
from mtptrain.target.families import head_dim
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import TargetStates, Verified
from mtptrain.target.position_cache import PositionCache, TreeRows


def validation_bytes(config: PipelineConfig, target_config: PreTrainedConfig, longest_tokens: int) -> int:
    """Returns the peak bytes of validation on a GPU, beyond the weights of the target and the head.

    The estimate is rather high: it assumes the largest batch that the settings allow, and that all of its tokens are
    prompts. Later rounds process only a few rows per sequence and need less memory than the prompts do.

    Args:
        config: the run's settings.
        target_config: the target's config.
        longest_tokens: number of tokens in the longest document.
    """
    dtype = getattr(torch, config.acceptance.dtype.value)
    prompts, tokens = largest_batch(config, longest_tokens, target_config.max_position_embeddings)
    # `speculate` allocates these slots in addition to those of prompt and answer.
    drafted_slots = prompts * (3 * config.acceptance.num_speculative_tokens + 2)
    cached = (tokens + drafted_slots) * cached_values(target_config) * dtype.itemsize
    target_bytes = tokens * forward_values(target_config) * dtype.itemsize
    return cached + max(target_bytes, head_prompt_bytes(config.head, target_config, dtype, tokens))


def largest_batch(config: PipelineConfig, longest_tokens: int, context_tokens: int) -> tuple[int, int]:
    """Returns the size of validation's largest batch on a GPU, in prompts and in tokens (with answers and padding)."""
    new_tokens = config.train.validation_new_tokens
    is_text = config.prompts.source is PromptSource.text_files
    prompt_tokens = min(longest_tokens, config.acceptance.prompt_tokens) if is_text else longest_tokens
    longest = min(prompt_tokens + new_tokens, context_tokens)
    prompts = min(config.acceptance.batch_size, -(-config.train.validation_prompts // config.planner.num_gpus))
    return prompts, max(longest, min(prompts * longest, config.acceptance.batch_tokens))


def cached_values(target_config: PreTrainedConfig) -> int:
    """Returns the number of values that the target's cache holds per token, over all layers."""
    # DeepSeek caches the latent from which the keys and values of all attention heads are computed.
    if target_config.model_type == "deepseek_v2":
        layer_values = target_config.kv_lora_rank + target_config.qk_rope_head_dim
    else:
        layer_values = 2 * target_config.num_key_value_heads * head_dim(target_config)
    return int(target_config.num_hidden_layers * layer_values)


def forward_values(target_config: PreTrainedConfig) -> int:
    """Returns the approximate number of values per token alive in the MLP, the widest part of a decoder layer."""
    hidden_size = target_config.hidden_size
    dense = 3 * target_config.intermediate_size
    experts_size = getattr(target_config, "moe_intermediate_size", None)
    routed = target_config.num_experts_per_tok * (3 * experts_size + 2 * hidden_size) if experts_size else 0
    # Four more rows of the hidden size: residual stream, its norm, the MLP's output, and the sum of stream and output.
    return int(max(dense, routed) + 4 * hidden_size)


def head_prompt_bytes(config: HeadConfig, target_config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Returns the peak bytes of a head's depth 0 over a prompt: target states, head cache and activations."""
    meter = Meter()
    with FakeTensorMode(allow_non_fake_inputs=True), _DefaultDtype(dtype), torch.no_grad():
        head, parts = build_head(config, target_config), _frozen_parts(target_config)
        meter.hold(*head.parameters(), *head.buffers(), parts.embed_tokens, parts.norm_weight, parts.lm_head)
        held = meter.peak_bytes["cpu"]
        with meter:
            read_prompt(head, parts, target_config, tokens)
    return meter.peak_bytes["cpu"] - held


class _CacheWithoutData(PositionCache):
    """A cache for positions without data: a block that `dflash` drafts after the prompt reads all slots."""

    def begin(self, positions: torch.Tensor, tree: TreeRows | None = None) -> torch.Tensor | None:
        if self._used_slots == 0:
            return super().begin(positions, tree)
        self._written, self._used_slots = {positions.device: positions}, self.num_slots
        return torch.ones(len(positions), 1, positions.shape[1], self.num_slots, dtype=torch.bool)


def read_prompt(head: Head, parts: FrozenParts, target_config: PreTrainedConfig, tokens: int) -> HeadDrafter:
    """Returns a drafter whose head has run depth 0 over a prompt of `tokens` tokens. The states are uninitialised."""
    drafter = HeadDrafter(head, parts, 1)
    drafter.start(1, tokens + 1)
    drafter.cache = _CacheWithoutData(tokens + 1)
    states = torch.empty(1, tokens, target_config.hidden_size)
    captured = torch.empty(1, tokens, len(head.read_layers), target_config.hidden_size)
    read = TargetStates(states, captured if head.read_layers else None)
    positions = torch.arange(tokens)[None]
    drafter.first_depth(
        Verified(torch.zeros(1, tokens + 1, dtype=torch.long), torch.tensor([tokens + 1]), positions, read)
    )
    return drafter
