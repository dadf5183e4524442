"""The whole frozen target, used by responses, extraction, validation and acceptance.

A training step reads only the embeddings, final norm and lm_head (`load_frozen_parts`).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from mtptrain.target.causal_attention import CAUSAL_OR_MASKED
from mtptrain.target.checkpoint_check import check_weights
from mtptrain.target.families import WINDOW_IN_ALL_LAYERS, read_target_config, sliding_window
from mtptrain.target.few_rows import FrozenLinear, use_few_rows
from mtptrain.target.frozen_parts import FrozenParts, _refuse_missing
from mtptrain.target.hub import weight_files
from mtptrain.target.position_cache import PositionCache, TreeSlots
from mtptrain.utils.errors import UserError, error_summary


class Target:
    """The whole frozen target for drafting and verification.

    Its layers may be on several devices. Inputs, outputs and `parts` are on `device`, the device of the embeddings.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Freeze a model, without copying it.

        Raises:
            UserError: accelerate has offloaded a part that drafting needs.
        """
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.window = sliding_window(model.config)
        weights = dict(model.named_parameters(remove_duplicate=False))  # lists a tied weight under both names
        parts = FrozenParts.of(model.config, weights)
        device = parts.embed_tokens.device
        if "meta" in (device.type, parts.norm_weight.device.type, parts.lm_head.device.type):
            raise UserError(
                "target.path: embeddings, final norm and lm_head of the target must fit the GPUs of one machine, but "
                "accelerate has offloaded some of them; use more GPUs, or a smaller dtype"
            )
        # With several devices, this copies an untied lm_head from the last device to the first.
        self.parts = replace(parts, norm_weight=parts.norm_weight.to(device), lm_head=parts.lm_head.to(device))
        use_few_rows(self.model.model)
        self._output = FrozenLinear(self.parts.lm_head)

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
        tree: TreeSlots | None = None,
    ) -> "TargetStates":
        """Returns the states of tokens [B, S] at positions [B, S], and updates the cache.

        With `tree`, the tokens form a tree of drafts.
        """
        mask = family_mask(self.config.model_type, self.window, cache.begin(positions, tree), positions, tree)
        with self.capturing(capture_layers) as streams, self._causal_or_masked_attention():
            output = self.model.model(
                input_ids=input_ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
            )
        captured = torch.stack([streams[k].to(self.device) for k in capture_layers], dim=-2) if capture_layers else None
        return TargetStates(output.last_hidden_state.to(self.device), captured)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the logits [..., V] of post-norm states [..., H], fast for a few of them on a CPU."""
        return self.parts.soft_capped(self._output(states))

    @contextmanager
    def _causal_or_masked_attention(self) -> Iterator[None]:
        """Makes the model use `causal_or_masked_attention` inside this context."""
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = CAUSAL_OR_MASKED
        try:
            yield
        finally:
            self.model.config._attn_implementation = before

    @contextmanager
    def capturing(self, after_layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Record residual streams of the model's forward, keyed by the number of decoder layers before them.

        Key 0 is the input of the first layer. The key equal to the number of layers is the input of the final norm.
        """
        readers = [
            *self.model.model.layers,
            self.model.model.norm,
        ]  # the stream after k layers is the input of module k
        streams: dict[int, torch.Tensor] = {}

        def keep(layer: int, args: tuple[torch.Tensor, ...]) -> None:
            streams[layer] = args[0]

        handles = [
            readers[k].register_forward_pre_hook(lambda _, args, k=k: keep(k, args)) for k in sorted(set(after_layers))
        ]
        try:
            yield streams
        finally:
            for handle in handles:
                handle.remove()


def family_mask(
    model_type: str,
    window: int | None,
    mask: torch.Tensor | None,
    positions: torch.Tensor,
    tree: TreeSlots | None = None,
) -> torch.Tensor | dict[str, torch.Tensor] | None:
    """Returns the mask of `PositionCache.begin` as the family expects it, with the sliding window applied."""
    if mask is None or window is None:
        return mask
    slot_positions = torch.arange(mask.shape[-1], device=mask.device).repeat(len(mask), 1)  # [B, slots]
    if tree is not None:
        slot_positions.scatter_(1, tree.root[:, None] + torch.arange(positions.shape[1], device=mask.device), positions)
    in_window = mask & (slot_positions[:, None, None] > positions[:, None, :, None] - window)  # [B, 1, S, slots]
    if model_type in WINDOW_IN_ALL_LAYERS:
        return in_window
    return {"full_attention": mask, "sliding_attention": in_window}


@dataclass(frozen=True)
class TargetStates:
    """The outputs of the target's forward that a drafter reads."""

    post_norm_states: torch.Tensor
    """Post-norm states [B, S, H]."""
    aux_hidden_states: torch.Tensor | None
    """Captured residual streams [B, S, L, H]; None if none were requested."""

    def read_by(self, read_layers: tuple[int, ...]) -> torch.Tensor:
        """Returns the states that a head reads: the streams [B, S, L, H] of its `read_layers` if it has any, otherwise
        the post-norm states [B, S, H]."""
        if not read_layers:
            return self.post_norm_states
        assert self.aux_hidden_states is not None
        return self.aux_hidden_states

    def at_indices(self, index: torch.Tensor) -> "TargetStates":
        """Returns the states at indices into S [B, R], separate ones for each sequence."""
        sequences, captured = torch.arange(len(index), device=index.device)[:, None], self.aux_hidden_states
        return TargetStates(
            self.post_norm_states[sequences, index], None if captured is None else captured[sequences, index]
        )


@dataclass(frozen=True)
class Verified:
    """The S tokens that the target has just read: those of the prompts, or those of a round."""

    tokens: torch.Tensor
    """All tokens so far of each sequence [B, slots]; only those before `num_tokens` are valid."""
    num_tokens: torch.Tensor
    """Length of each sequence [B], including the newest token, which the target has not read yet."""
    positions: torch.Tensor
    """Positions of the tokens just read [B, S]. Those at `num_tokens` - 1 and later were rejected or are padding."""
    states: TargetStates
    """The target's states of these tokens [B, S, H], and the streams that the drafter captures [B, S, L, H]."""

    @property
    def last_index(self) -> torch.Tensor:
        """Index [B] into S of the token before the newest one, from which the next draft starts."""
        return self.num_tokens - 2 - self.positions[:, 0]

    @property
    def next_tokens(self) -> torch.Tensor:
        """The token after each of these tokens [B, S]; arbitrary after `last_index`."""
        return self.tokens.gather(1, self.positions + 1)


def load_target(target_dir: Path, dtype: torch.dtype, device: torch.device) -> Target:
    """Returns the whole target on one device, or spread over several by accelerate if it does not fit.

    Raises:
        UserError: the target has no weights, or the family is not supported, a tensor is missing, `check_placement`
            refuses the target, or `Target` does.
    """
    config = read_target_config(target_dir)
    check_placement(target_dir, dtype, device)
    placement = "auto" if needs_several_devices(target_dir, dtype, device) else device
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        target_dir,
        config=config,
        dtype=dtype,
        device_map=placement,
        trust_remote_code=False,
        attn_implementation="sdpa",  # takes boolean masks; eager attention would add them to its scores
        output_loading_info=True,
    )
    model, loading = loaded
    # transformers initialises missing tensors at random and only logs a warning.
    _refuse_missing(target_dir, loading["missing_keys"])
    if hasattr(model, "ct_decompress_hook"):
        # compressed-tensors restores the weights when the whole model is first called, but `Target` calls parts of it.
        model.hf_quantizer.compressor.decompress_model(model)
    return Target(model)


def check_placement(target_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a target that `load_target` could not place, before any long work.

    Raises:
        UserError: the target has no weights, or the weights do not belong to the config, transformers cannot run their
            quantisation here, or the target needs several devices but several ranks share the machine.
    """
    check_weights(target_dir)
    check_quantisation(target_dir, dtype, device)
    if needs_several_devices(target_dir, dtype, device) and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"target.path: {target_dir} must fit one device if several ranks share a machine, but does not; start one "
            "process, which spreads it over all devices; in training, set train.validation_prompts=0"
        )


def check_quantisation(target_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a quantised target if transformers lacks the package or the hardware that its format needs.

    Raises:
        UserError: the package or the hardware is missing, or the format is unknown or badly described.
    """
    quantisation = getattr(read_target_config(target_dir), "quantization_config", None)
    if quantisation is None:
        return
    try:
        quantiser = AutoHfQuantizer.from_config(deepcopy(quantisation), pre_quantized=True)
        quantiser.validate_environment(dtype=dtype, device_map={"": device})
    except Exception as error:  # each quantiser checks its section in its own way, such as pydantic's ValidationError
        raise UserError(
            "target.path: transformers must be able to run the quantised weights that quantization_config in "
            f"{target_dir / 'config.json'} describes, but reports {error_summary(error)}; install what it names, or "
            "run this target in vLLM only: hidden_states.backend=vllm, train.validation_prompts=0, and "
            "mtptrain serving-bench for its acceptance"
        ) from error


def needs_several_devices(target_dir: Path, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether the weights of a target take more than 80 % of a GPU's memory, and there are several GPUs."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return False
    weights_bytes = sum(path.stat().st_size for path in weight_files(target_dir)) * (2 if dtype is torch.float32 else 1)
    return weights_bytes > 0.8 * torch.cuda.get_device_properties(device).total_memory
