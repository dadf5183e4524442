"""The whole frozen target, used by responses, extraction, validation and acceptance.

A training step reads only the embeddings, final norm and lm_head (`load_frozen_parts`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from mtptrain.target.causal_attention import CAUSAL_OR_MASKED, SeenSlots
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.generation import as_ids
from mtptrain.target.position_cache import PositionCache, StateCache, TreeSlots
from mtptrain.utils.cpu import has_bf16_instructions
from mtptrain.utils.errors import UserError

MOST_ROWS = 32
"""With more rows, torch's product costs about the same, because the copy is small beside the product."""


class FrozenLinear:
    """A linear layer whose weights never change, fast on a CPU for a few rows, as a round of drafts has.

    A decoding step is as fast as the weights can be read. torch's product for more than one row first copies the
    weights into another layout, so that in fp32 two tokens take twice as long as one, and no draft can pay. This keeps
    a copy in oneDNN's layout, which takes as much memory as the weights. One row and many rows take torch's own
    product, as do other devices, and bf16 on a CPU without instructions for it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        is_fast = weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and has_bf16_instructions())
        self._can_pack = weight.device.type == "cpu" and is_fast and torch.backends.mkldnn.is_available()
        self._packed: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the outputs [..., D] of rows [..., H]."""
        num_rows = rows.numel() // rows.shape[-1]
        if not 1 < num_rows <= MOST_ROWS or not self._can_pack or torch.is_grad_enabled():
            return F.linear(rows, self.weight, self.bias)
        # These functions are private. The public `torch.utils.mkldnn` reorders the weights anew in each product.
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), MOST_ROWS)
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")


def use_few_rows(model: nn.Module) -> None:
    """Make all linear layers of a frozen model use `FrozenLinear`, except those whose forward is not torch's own.

    transformers replaces the forward of a quantised layer, for example to quantise its inputs.
    """
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = FrozenLinear(module.weight, module.bias)  # type: ignore[method-assign, assignment]


class Target:
    """The whole frozen target. All but its layers, which may be on several devices, is on the embeddings' device."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Freeze a model, without copying it."""
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.form = find_form(model.config)
        self.decoder = model.get_submodule(self.form.decoder)
        self.layers = list(model.get_submodule(self.form.layers).children())
        weights = dict(model.named_parameters(remove_duplicate=False))  # lists a tied weight under both names
        parts = FrozenParts.of(model.config, weights)
        device = parts.embed_tokens.device
        if "meta" in (device.type, parts.norm_weight.device.type, parts.lm_head.device.type):
            raise UserError(
                "target.path: embeddings, final norm and lm_head of the target must fit the GPUs of one machine, but "
                "accelerate has offloaded some of them; use more GPUs, or a smaller dtype"
            )
        # With several devices, this copies an untied lm_head from the last device to the first.
        self.parts = parts.to(device)
        use_few_rows(self.decoder)
        self._output = FrozenLinear(self.parts.lm_head, self.parts.lm_head_bias)

    @property
    def device(self) -> torch.device:
        return self.parts.embed_tokens.device

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(as_ids(self.model.generation_config.eos_token_id))

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: PositionCache,
        capture_layers: tuple[int, ...] = (),
        tree: TreeSlots | None = None,
    ) -> "TargetStates":
        """Returns the states of tokens [B, S] at positions [B, S], and updates `cache`, which `Target.cache` made.

        With `tree`, the tokens form a tree of drafts. States of padding may be missing, and are 0 then.
        """
        found = []
        with self.capturing(capture_layers) as streams, self.attention(CAUSAL_OR_MASKED):
            for sequences, columns in cache.readings(positions):
                part = positions[sequences, columns]
                mask = cache.begin(part, tree)
                output = self.decoder(
                    input_ids=input_ids[sequences, columns],
                    position_ids=part,
                    past_key_values=cache,
                    use_cache=True,
                    seen_slots=SeenSlots(self.form.masks, mask, part, tree, cache.get_seq_length()),
                )
                captured = [streams[k].to(self.device) for k in capture_layers]
                states = TargetStates(
                    output.last_hidden_state.to(self.device), torch.stack(captured, dim=-2) if captured else None
                )
                found.append((sequences, columns, states))
        return states if len(found) == 1 else TargetStates.joined(positions.shape, found)

    def cache(self, num_slots: int, lengths: Sequence[int] | None = None) -> PositionCache:
        """Returns an empty cache for so many positions of each sequence. `lengths` are those of padded prompts."""
        return StateCache(num_slots, self.config, lengths) if self.form.keeps_states else PositionCache(num_slots)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the logits [..., V] of post-norm states [..., H], fast for a few of them on a CPU."""
        return self.form.scaled_logits(self._output(self.form.scaled_states(states)))

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Makes the model use an attention function that is registered with transformers inside this context."""
        # This property is private. The public `set_attn_implementation` checks every module, in each forward.
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = name
        try:
            yield
        finally:
            self.model.config._attn_implementation = before

    @contextmanager
    def capturing(self, after_layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Record residual streams of the model's forward, by the number of decoder layers before them, from 0."""
        # The stream after k layers is the input of module k.
        readers = [*self.layers, self.model.get_submodule(self.form.norm)]
        streams: dict[int, torch.Tensor] = {}

        def keep(layer: int, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
            streams[layer] = args[0] if args else kwargs["hidden_states"]

        handles = [
            readers[k].register_forward_pre_hook(lambda _, args, kwargs, k=k: keep(k, args, kwargs), with_kwargs=True)
            for k in sorted(set(after_layers))
        ]
        try:
            yield streams
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True)
class TargetStates:
    """The outputs of the target's forward that a drafter reads."""

    postnorm_states: torch.Tensor
    """Post-norm states [B, S, H]."""
    aux_hidden_states: torch.Tensor | None
    """Captured residual streams [B, S, L, H]; None if none were requested."""

    @staticmethod
    def joined(
        shape: torch.Size, parts: "Sequence[tuple[torch.Tensor | slice, slice, TargetStates]]"
    ) -> "TargetStates":
        """Returns the states of all tokens [B, S], from those of some sequences and columns each."""

        def join(tensors: list[torch.Tensor]) -> torch.Tensor:
            whole = tensors[0].new_zeros(*shape, *tensors[0].shape[2:])
            for (sequences, columns, _), tensor in zip(parts, tensors, strict=True):
                whole[sequences, columns] = tensor
            return whole

        captured = [states.aux_hidden_states for _, _, states in parts]
        aux = None if captured[0] is None else join([each for each in captured if each is not None])
        return TargetStates(join([states.postnorm_states for _, _, states in parts]), aux)

    def read_by(self, read_layers: tuple[int, ...]) -> torch.Tensor:
        """Returns the states that a head reads: the streams [B, S, L, H] of its `read_layers` if it has any, otherwise
        the post-norm states [B, S, H]."""
        if not read_layers:
            return self.postnorm_states
        assert self.aux_hidden_states is not None
        return self.aux_hidden_states

    def at_indices(self, index: torch.Tensor) -> "TargetStates":
        """Returns the states at indices into S [B, R], separate ones for each sequence."""
        sequences, captured = torch.arange(len(index), device=index.device)[:, None], self.aux_hidden_states
        return TargetStates(
            self.postnorm_states[sequences, index], None if captured is None else captured[sequences, index]
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
        """Index [B] into S of the token before the newest one, where drafts start; -1 if a sequence has ended."""
        return self.num_tokens - 2 - self.positions[:, 0]

    @property
    def next_tokens(self) -> torch.Tensor:
        """The token after each of these tokens [B, S]; arbitrary after `last_index`."""
        return self.tokens.gather(1, self.positions + 1)
