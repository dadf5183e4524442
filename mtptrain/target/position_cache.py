"""Caches for decoding, of keys and values and of the states of layers that have states instead."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin


@dataclass(frozen=True)
class TreeSlots:
    """The slots in which a forward over a tree of drafts stores its keys, and the slots that each token sees.

    The tree continues a sequence. Several tokens may have the same position, but each has its own slot.
    """

    root: torch.Tensor
    """The first slot of the tree, i64[B]. Every token of the tree sees all slots before it."""
    first: int
    """The tokens use the slots root + first, root + first + 1, ..."""
    sees: torch.Tensor
    """Which slots of the tree each token sees, bool[B, S, first + S]."""


Reading = tuple[torch.Tensor | slice, slice]
"""The sequences and the columns of a forward's tokens that are read together."""


class PositionCache(Cache):
    """A cache that stores the key and value of position p in slot p of each sequence.

    Writing a position again overwrites it, and the mask of `begin` hides the slots after a query's position. After a
    rejected draft, decoding therefore continues at an earlier position, without copying or cropping the cache. A tree
    occupies the slots after the sequence until `keep` copies the accepted branch to the slots of its positions. A
    layer's keys and values are on that layer's device.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.num_slots = num_slots
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._written: dict[torch.device, torch.Tensor] = {}  # slots [B, S], by device
        self._used_slots = 0

    def readings(self, positions: torch.Tensor) -> Iterator[Reading]:
        """Yields which of the tokens at positions [B, S] to read together, in this order: here all of them."""
        yield slice(None), slice(None)

    def begin(self, positions: torch.Tensor, tree: TreeSlots | None = None) -> torch.Tensor | None:
        """Set the positions [B, S] that the next forward writes, and the slots and mask of its tokens in a tree.

        The first forward reads the prompts and must have positions 0 .. S - 1 in every sequence.

        Returns the mask [B, 1, S, slots in use], True for slots that a token sees. It is None for prompts, which need
        only causal attention: a prompt token never sees the padding after the prompt.
        """
        is_prompt = self._used_slots == 0
        assert not (is_prompt and tree is not None), "a tree needs a prompt before it"
        written = positions
        if tree is not None:
            written = tree.root[:, None] + tree.first + torch.arange(positions.shape[1], device=positions.device)
        self._written = {positions.device: written}
        highest = positions.shape[1] - 1 if is_prompt else int(written.max())
        self._used_slots = max(self._used_slots, highest + 1)
        assert self._used_slots <= self.num_slots, "positions exceed the slots of the cache"
        if is_prompt:
            return None
        slots = torch.arange(self._used_slots, device=positions.device)
        if tree is None:
            return slots <= positions[:, None, :, None]  # [B, 1, S, slots]
        inside = slots - tree.root[:, None]  # [B, slots]
        index = inside.clamp(0, tree.sees.shape[2] - 1)[:, None].expand(-1, positions.shape[1], -1)
        is_seen = tree.sees.gather(2, index) & (inside < tree.sees.shape[2])[:, None]
        return torch.where((inside < 0)[:, None], True, is_seen)[:, None]

    def keep(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Copy the keys and values in `slots` [B, S] to the slots of `positions` [B, S]."""
        indices: dict[torch.device, tuple[torch.Tensor, ...]] = {}
        for tensor in (*self._keys.values(), *self._values.values()):
            if tensor.device not in indices:
                sequences = torch.arange(len(slots), device=tensor.device)[:, None]
                indices[tensor.device] = sequences, slots.to(tensor.device), positions.to(tensor.device)
            sequences, sources, destinations = indices[tensor.device]
            tensor[sequences, :, destinations] = tensor[sequences, :, sources]

    def select(self, is_kept: torch.Tensor) -> None:
        """Keep only the sequences at which `is_kept` [B] is True, for forwards of a smaller batch."""
        for tensors in (self._keys, self._values):
            for layer, tensor in tensors.items():
                tensors[layer] = tensor[is_kept.to(tensor.device)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [B, heads, S, head_dim] to the slots of `begin`; returns those of all slots in use."""
        keys, values = self._slots(layer_idx, key_states, value_states, len(key_states))
        if keys.device not in self._written:
            self._written[keys.device] = next(iter(self._written.values())).to(keys.device)
        written = self._written[keys.device]
        sequences = torch.arange(keys.shape[0], device=keys.device)[:, None]  # [B, 1]
        keys[sequences, :, written] = key_states.transpose(1, 2)
        values[sequences, :, written] = value_states.transpose(1, 2)
        return keys[:, :, : self._used_slots], values[:, :, : self._used_slots]

    def _slots(
        self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's keys and values of all slots [batch, heads, slots, head_dim], made when first needed."""
        for tensors, states in ((self._keys, key_states), (self._values, value_states)):
            if layer_idx not in tensors:
                tensors[layer_idx] = states.new_zeros(batch, states.shape[1], self.num_slots, states.shape[-1])
        return self._keys[layer_idx], self._values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._used_slots


class StateCache(PositionCache):
    """A `PositionCache` for models some of whose layers keep a state instead of keys and values, or beside them.

    Linear attention, Mamba and short convolutions fold all earlier tokens into a state, from which no token can be
    taken away. So the states after each token of a round are kept, and the next round continues from those of the last
    accepted token. Prompts of equal length are read together, because padding would change their states. Drafts are
    read one column at a time: the code of some families is wrong for several tokens after a state.
    """

    def __init__(self, num_slots: int, config: PreTrainedConfig, lengths: Sequence[int] | None = None) -> None:
        """Make an empty cache. `lengths` are the numbers of tokens of the prompts; None if no prompt is padded."""
        super().__init__(num_slots)
        self._config, self._lengths, self._batch = config, lengths, 0
        self._prompts: torch.Tensor | None = None
        """The sequences whose prompts are being read; None after the prompts."""
        self._after: list[list[torch.Tensor]] = []
        """The states [B, ...] before the last round, then those after each of its tokens."""
        self._first = torch.empty(0)
        """Position of the first token of the last round [B]."""

    def readings(self, positions: torch.Tensor) -> Iterator[Reading]:
        if not self._after:
            yield from self._read_prompts(positions)
            return
        sequences, columns = torch.arange(len(positions)), (positions[:, 0] - self._first).cpu()
        kept = [torch.stack(states)[columns, sequences] for states in zip(*self._after, strict=True)]
        self._set(kept)
        self._after, self._first = [kept], positions[:, 0].clone()
        for column in range(positions.shape[1]):
            yield slice(None), slice(column, column + 1)
            self._after.append([states[index].clone() for states, index in self._places()])

    def _read_prompts(self, positions: torch.Tensor) -> Iterator[Reading]:
        self._batch, longest = positions.shape
        lengths = torch.tensor(self._lengths or [longest] * self._batch)
        whole: list[torch.Tensor] = []
        for length in lengths.unique().tolist():
            self._prompts, self.layers = (lengths == length).nonzero()[:, 0], DynamicCache(config=self._config).layers
            yield self._prompts, slice(0, length)
            states = [of_layer[index] for of_layer, index in self._places()]
            whole = whole or [state.new_zeros(self._batch, *state.shape[1:]) for state in states]
            for all_states, state in zip(whole, states, strict=True):
                all_states[self._prompts] = state
        self._prompts = None
        self._set(whole)
        self._after, self._first = [whole], lengths.to(positions.device)

    def _places(self) -> list[tuple[dict[int, Any], int]]:
        """Returns where the layers of transformers keep each of their states."""
        layers = [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        places = [states for layer in layers for states in (layer.conv_states, layer.recurrent_states)]
        return [(states, index) for states in places for index in states if states[index] is not None]

    def _set(self, states: list[torch.Tensor]) -> None:
        """Give copies of these states to the layers of transformers, which write into them."""
        for (of_layer, index), state in zip(self._places(), states, strict=True):
            of_layer[index] = state.clone()

    def begin(self, positions: torch.Tensor, tree: TreeSlots | None = None) -> torch.Tensor | None:
        assert tree is None, "states cannot be read again for each branch"
        if self._prompts is None:
            return super().begin(positions)
        self._used_slots = max(self._used_slots, positions.shape[1])
        return None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._prompts is None:
            return super().update(key_states, value_states, layer_idx)
        slots = self._slots(layer_idx, key_states, value_states, self._batch)
        for tensor, states in zip(slots, (key_states, value_states), strict=True):
            tensor[self._prompts.to(states.device), :, : states.shape[2]] = states
        return key_states, value_states  # prompts see no other sequence's slots

    def select(self, is_kept: torch.Tensor) -> None:
        super().select(is_kept)
        self._after = [[state[is_kept.to(state.device)] for state in states] for states in self._after]
        self._first = self._first[is_kept.to(self._first.device)]
        self._set(self._after[-1])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._prompts is not None else self._used_slots
