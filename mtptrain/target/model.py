"""The frozen target: the whole model, or only what training needs of it.

Training reads embeddings, final norm and lm_head alone from the target's safetensors (`load_frozen_parts`); extraction and
acceptance run the whole model (`load_target`).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
)

from mtptrain.target.causal_attention import CAUSAL_OR_MASKED
from mtptrain.target.families import WINDOW_IN_ALL_LAYERS, read_target_config, sliding_window
from mtptrain.target.frozen_parts import FrozenParts, _refuse_missing
from mtptrain.target.hub import load_tokenizer, resolve_target, weight_files
from mtptrain.target.position_cache import PositionCache, TreeRows


class Target:
    """The whole frozen target for drafting and verification.

    Its layers may be on several devices; what it takes and returns is on `device`, that of its embeddings, and so are its `parts`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over a model.

        Raises:
            ValueError: accelerate has left what drafting needs off the GPUs.
        """
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.window = sliding_window(model.config)
        weights = dict(model.named_parameters(remove_duplicate=False))  # tied: under both names
        parts = FrozenParts.of(model.config, weights)
        device = parts.embed_tokens.device
        if "meta" in (device.type, parts.norm_weight.device.type, parts.lm_head.device.type):
            raise ValueError(
                "target.path: embeddings, final norm and lm_head of the target must fit the GPUs of one machine, but accelerate has "
                "left some of them out; take more GPUs, or a smaller dtype"
            )
        # Nothing is copied on one device; on several, an untied lm_head of the last device is also kept on the first.
        self.parts = replace(parts, norm_weight=parts.norm_weight.to(device), lm_head=parts.lm_head.to(device))

    @property
    def device(self) -> torch.device:
        return self.parts.embed_tokens.device

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: PositionCache,
        capture_layers: tuple[int, ...] = (),
        tree: TreeRows | None = None,
    ) -> "TargetStates":
        """States of tokens [B, S] at positions [B, S], reading and writing the cache; a whole tree where one is given."""
        mask = self._family_mask(cache.begin(positions, tree), positions, tree)
        with self.capturing(capture_layers) as streams, self._causal_or_masked_attention():
            output = self.model.model(
                input_ids=input_ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
            )
        captured = torch.stack([streams[k].to(self.device) for k in capture_layers], dim=-2) if capture_layers else None
        return TargetStates(output.last_hidden_state.to(self.device), captured)

    @contextmanager
    def _causal_or_masked_attention(self) -> Iterator[None]:
        """Swaps the model's attention; other callers of the model keep their own."""
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = CAUSAL_OR_MASKED
        try:
            yield
        finally:
            self.model.config._attn_implementation = before

    def _family_mask(
        self, mask: torch.Tensor | None, positions: torch.Tensor, tree: TreeRows | None
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """What the family's forward takes for the mask of `PositionCache.begin`: with the sliding window where layers have one."""
        if mask is None or self.window is None:
            return mask
        slot_positions = torch.arange(mask.shape[-1], device=mask.device).repeat(len(mask), 1)  # [B, slots]
        if tree is not None:
            slot_positions.scatter_(1, tree.root[:, None] + torch.arange(positions.shape[1], device=mask.device), positions)
        in_window = mask & (slot_positions[:, None, None] > positions[:, None, :, None] - self.window)  # [B, 1, S, slots]
        if self.config.model_type in WINDOW_IN_ALL_LAYERS:
            return in_window
        return {"full_attention": mask, "sliding_attention": in_window}

    @contextmanager
    def capturing(self, after_layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Keep residual streams of a forward of the model, by the number of decoder layers that they are behind.

        0 is what the first layer reads, the number of layers the state before the final norm.
        """
        readers = [*self.model.model.layers, self.model.model.norm]  # the stream after k layers is what module k reads
        streams: dict[int, torch.Tensor] = {}

        def keep(layer: int, args: tuple[torch.Tensor, ...]) -> None:
            streams[layer] = args[0]

        handles = [readers[k].register_forward_pre_hook(lambda _, args, k=k: keep(k, args)) for k in sorted(set(after_layers))]
        try:
            yield streams
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True)
class TargetStates:
    """What a forward of the target gives to a drafter."""

    hidden_states: torch.Tensor
    """Post-norm states [B, S, H]."""
    aux_hidden_states: torch.Tensor | None
    """Captured residual streams [B, S, L, H]; None where none were asked for."""

    def of_rows(self, index: torch.Tensor) -> "TargetStates":
        """Of the rows [B, R] of each sequence."""
        rows, captured = torch.arange(len(index), device=index.device)[:, None], self.aux_hidden_states
        return TargetStates(self.hidden_states[rows, index], None if captured is None else captured[rows, index])


def load_target(target_dir: Path, dtype: torch.dtype, device: torch.device) -> Target:
    """The whole target on one device; on several, where it does not fit, by accelerate's placement.

    Raises:
        ValueError: the family is not supported, a tensor is missing, or several ranks would share several devices.
    """
    read_target_config(target_dir)
    check_placement(target_dir, dtype, device)
    placement = "auto" if _needs_several_devices(target_dir, dtype, device) else device
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        target_dir,
        dtype=dtype,
        device_map=placement,
        attn_implementation="sdpa",  # takes boolean masks; eager attention would add them to its scores
        output_loading_info=True,
    )
    model, loading = loaded
    _refuse_missing(target_dir, loading["missing_keys"])  # transformers only logs that it drew them at random
    return Target(model)


def load_draft_model(path: str, target_dir: Path, context_tokens: int, dtype: torch.dtype, device: torch.device) -> Target:
    """A small language model that drafts for the target.

    Args:
        context_tokens: that it must be able to read, drafts included.

    Raises:
        FileNotFoundError: `path` is neither a directory nor a hub name.
        ValueError: it has another tokenizer, fewer embeddings than that has tokens, too short a context, or a family that is not
            supported.
    """
    directory = resolve_target(path, setting="acceptance.draft_model")
    vocab = load_tokenizer(directory).get_vocab()
    if vocab != load_tokenizer(target_dir).get_vocab():
        raise ValueError(
            f"acceptance.draft_model: must have the target's tokenizer, but the tokens of {directory} are not those of {target_dir}; "
            "choose a smaller model of the same family"
        )
    config = read_target_config(directory)
    if config.vocab_size <= max(vocab.values()):
        raise ValueError(
            f"acceptance.draft_model: must have an embedding for each token of its tokenizer, ids up to {max(vocab.values())}, but "
            f"{directory} has vocab_size {config.vocab_size}; choose another model"
        )
    own_context = config.max_position_embeddings
    if own_context < context_tokens:
        raise ValueError(
            f"acceptance.draft_model: must read the longest prompt with its answer and drafts, {context_tokens} tokens, but {directory} "
            f"has a context of {own_context}; leave out long prompts or choose another model"
        )
    return load_target(directory, dtype, device)


def check_placement(target_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a target that `load_target` could not place, before long work.

    Raises:
        FileNotFoundError: it has no weights.
        ValueError: several ranks would share several devices.
    """
    weight_files(target_dir)
    if _needs_several_devices(target_dir, dtype, device) and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"target.path: {target_dir} must fit one device where several ranks share a machine, but does not; start one process, "
            "over which accelerate spreads it; in training set train.validation_prompts=0"
        )


def _needs_several_devices(target_dir: Path, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return False
    weights_bytes = sum(path.stat().st_size for path in weight_files(target_dir)) * (2 if dtype is torch.float32 else 1)
    return weights_bytes > 0.8 * torch.cuda.get_device_properties(device).total_memory
