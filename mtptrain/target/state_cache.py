"""A cache for decoding with models some of whose layers keep a state instead of keys and values.

Linear attention, Mamba and short convolutions fold all earlier tokens into a state, from which no token can be taken
away. So the states after each token of a round are kept, and the next round continues from those of the last accepted
token.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from mtptrain.target.position_cache import PositionCache, Reading, TreeSlots


class StateCache(PositionCache):
    """A `PositionCache` that also keeps the states of each sequence, by position.

    Prompts of equal length are read together, because padding would change their states. Drafts are read one column at
    a time: the code of some families is wrong for several tokens after a state.
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
