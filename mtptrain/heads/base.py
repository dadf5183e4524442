"""What every head has in common.

Shapes, here and everywhere: B batch, S sequence, N packed tokens, M rows that draft, H hidden size, L captured layers, V target vocabulary,
D draft vocabulary, K drafted tokens, T depths (`ttt_steps`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from mtptrain.heads.attention.training import cached_attention, depth_attention
from mtptrain.heads.packing import Packing
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.position_cache import PositionCache, TreeRows
from mtptrain.utils.compile import fused, mark_static

if TYPE_CHECKING:
    from mtptrain.heads.layers import Attention, RmsNorm

R = TypeVar("R")
FourTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Head(nn.Module, ABC):
    """A draft head: one class per file, listed in `HEADS`.

    A head says how it starts from the target's states (`fuse`), which layers read an embedding and a state side by side
    (`joint_layers`, `joint_norms`), what one depth computes behind them before and after its attention
    (`layer_inputs`, `outputs`) and what turns states into tokens (`logits`); which keys a depth sees is the same for all.
    """

    Config: ClassVar[type[Any]]
    """Of its settings, a dataclass on top of `HeadConfig`."""
    d2t: torch.Tensor | None
    """i64[D], added to a draft token's id to give the target's: of heads with a vocabulary of their own."""
    lm_head: nn.Linear | None
    """The head's own [D, H]; the target's frozen one where there is none."""
    self_attn: "Attention"
    activation_checkpointing: bool = False
    """Keep the inputs of each part of a depth alone until the backward pass, and compute the rest again."""

    @abstractmethod
    def __init__(self, config: Any, target_config: PreTrainedConfig) -> None:
        """Build for a target, initialised from torch's global generator."""
        super().__init__()
        self.register_buffer("d2t", None)
        self.lm_head = None
        self.capture_layers = self.layers_to_capture(config, target_config)

    @classmethod
    def layers_to_capture(cls, config: Any, target_config: PreTrainedConfig) -> tuple[int, ...]:
        """Residual streams of the target that the head reads, in this order: id k is the stream after k decoder layers.

        A head without any reads the post-norm states of the last layer.
        """
        return ()

    def fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        """What depth 0 reads [..., H], from the captured streams [..., L, H], or from post-norm states [..., H] unless any are."""
        return target_states

    @property
    @abstractmethod
    def joint_layers(self) -> tuple[nn.Linear, ...]:
        """Without biases, of a row's embedding and state side by side [..., 2 H], to [..., P] together; columns of the embedding first."""

    @property
    def key_layers(self) -> tuple[nn.Linear, ...]:
        """The last of the joint layers: those that keys and values need."""
        return self.joint_layers

    @property
    def joint_norms(self) -> tuple["RmsNorm | None", "RmsNorm | None"]:
        """Of the embedding and of the state, before the joint layers read them."""
        return None, None

    @abstractmethod
    def layer_inputs(self, hidden_states: torch.Tensor, joint: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One depth of rows of any leading shape, from the joint layers up to its attention.

        Args:
            hidden_states: that the joint layers read, before their norm [..., H].
            joint: what the joint layers give [..., P], or the key layers.

        Returns:
            The residual stream [..., H], and what `self_attn` takes queries, keys and values from.
        """

    def attention_inputs(self, hidden_states: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`layer_inputs` of rows as an engine computes them.

        Args:
            hidden_states: fused states of the target, or the states recycled from the depth before [..., H].
            embeddings: of the token after each row's [..., H].
        """
        parts = zip(self.joint_norms, (embeddings, hidden_states), strict=True)
        x = torch.cat([part if norm is None else norm(part) for norm, part in parts], dim=-1)
        return self.layer_inputs(hidden_states, torch.cat([layer(x) for layer in self.joint_layers], dim=-1))

    @abstractmethod
    def outputs(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of a depth.

        Args:
            residual: of `layer_inputs` [..., H].
            attended: what the queries found [..., heads * head_dim].

        Returns:
            States for `logits` [..., H], and states to feed back [..., H].
        """

    def forward(self, target_states: torch.Tensor, embeddings: torch.Tensor, packing: Packing, ttt_steps: int) -> torch.Tensor:
        """Training: the states of every depth, at the rows that draft; the other tokens give depth-0 keys and values alone.

        Depth k of a row reads what depth 0 of the k-th row behind it does, where both lie in one span and the draft counts: what the
        joint layers make of an embedding is computed once for all depths.

        Args:
            target_states: what `fuse` takes, of N packed tokens [N, H] or [N, L, H].
            embeddings: of the token after each [N, H].
            packing: where documents and rows lie.
            ttt_steps: T.

        Returns:
            States [T, M, H]; `logits` of depth k at row t predict token t + 2 + k. Of no use where rows of the span end before t + k.
        """
        of_embeddings, of_states = map(mark_static, self._joint_weights())
        num_keys = sum(layer.out_features for layer in self.key_layers)
        keys_of_embeddings, keys_of_states = (mark_static(weight[-num_keys:]) for weight in (of_embeddings, of_states))
        recycled, prompt_states = packing.split(self._run(self._fuse, target_states))
        row_embeddings, prompt_embeddings = packing.split(embeddings)
        positions, prompt_positions = packing.split(packing.positions)
        terms = F.pad(self._run(self._embed, row_embeddings, of_embeddings), (0, 0, 0, ttt_steps - 1))  # [M + T - 1, P]
        states, own_keys, own_values = [], [], []
        for depth in range(ttt_steps):
            of_depth = terms[depth : depth + len(positions)]
            residual, query, own_key, own_value = self._run(self._project_terms, recycled, of_depth, of_states, positions + depth)
            if depth:
                own_keys.append(own_key)
                own_values.append(own_value)
            else:
                prompt_terms = self._run(self._embed, prompt_embeddings, keys_of_embeddings)
                of_prompts = self._run(self._keys_values, prompt_states, prompt_terms, keys_of_states, prompt_positions)
                key, value = (torch.cat(parts) for parts in zip((own_key, own_value), of_prompts, strict=True))
            attended = depth_attention(query, key, value, own_keys, own_values, packing)
            depth_states, recycled = self._run(self._finish, residual, attended)
            states.append(depth_states)
        return torch.stack(states)

    def decode(
        self,
        hidden_states: torch.Tensor,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        cache: PositionCache,
        tree: TreeRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inference: one step of S rows per sequence; keys go into the slots of their positions.

        Args:
            hidden_states: fused states of the target, or the states recycled from the depth before [B, S, H].
            embeddings: of the token after each row's [B, S, H].
            positions: of the rows [B, S].
            cache: of this head.
            tree: where the rows are some of a tree, and what they see of it.

        Returns:
            As `outputs`, each [B, S, H].
        """
        residual, query, key, value = self._project(hidden_states, embeddings, positions)
        return self._finish(residual, cached_attention(query, key, value, positions, cache, tree))

    @fused
    def _fuse(self, target_states: torch.Tensor) -> torch.Tensor:
        return self.fuse(target_states)

    @fused
    def _joint_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the joint layers for embeddings and for states [P, H] each, with the weights of their norms.

        So embeddings, and states of the target, are not differentiated for the sake of a norm's weight.
        """
        weights = torch.cat([layer.weight for layer in self.joint_layers]).chunk(2, dim=1)
        of_embeddings, of_states = (
            weight if norm is None else weight * norm.weight for weight, norm in zip(weights, self.joint_norms, strict=True)
        )
        return of_embeddings, of_states

    @fused
    def _embed(self, embeddings: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """What the joint layers make of embeddings [M, P], by their part of `_joint_weights` [P, H]."""
        norm, _ = self.joint_norms
        return F.linear(embeddings if norm is None else norm.unit(embeddings), weight)

    @fused
    def _keys_values(
        self, hidden_states: torch.Tensor, terms: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of prompts, by the key layers; arguments as of `_project_terms`."""
        return self.self_attn.keys_values(self._add_states(hidden_states, terms, weight)[1], positions)

    @fused
    def _project(self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor) -> FourTensors:
        """One depth of rows: residual stream, query, key, value."""
        residual, x = self.attention_inputs(hidden_states, embeddings)
        return residual, *self.self_attn.queries_keys_values(x, positions)

    @fused
    def _project_terms(
        self, hidden_states: torch.Tensor, terms: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor
    ) -> FourTensors:
        """The same in training.

        Args:
            hidden_states: [M, H].
            terms: what the joint layers make of the embeddings [M, P].
            weight: of `_joint_weights`, for states [P, H].
            positions: i64[M].
        """
        residual, x = self._add_states(hidden_states, terms, weight)
        return residual, *self.self_attn.queries_keys_values(x, positions)

    def _add_states(
        self, hidden_states: torch.Tensor, terms: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`layer_inputs` from what the joint layers make of the embeddings."""
        _, norm = self.joint_norms
        joint = torch.addmm(terms, hidden_states if norm is None else norm.unit(hidden_states), weight.T)
        return self.layer_inputs(hidden_states, joint)

    @fused
    def _finish(self, residual: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of a depth, from what its queries found [..., heads, head_dim]."""
        return self.outputs(residual, attended.flatten(-2))

    def _run(self, function: Callable[..., R], *args: torch.Tensor) -> R:
        """Call; where `activation_checkpointing` is set, what it computes on the way is computed again in the backward pass."""
        if not self.activation_checkpointing:
            return function(*args)
        result: R = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return result

    def logits(self, states: torch.Tensor, parts: FrozenParts) -> torch.Tensor:
        """Of the head's own vocabulary, or the target's [..., D]."""
        return F.linear(states, parts.lm_head if self.lm_head is None else self.lm_head.weight)

    @property
    def draft_token_ids(self) -> torch.Tensor | None:
        """The target's ids of the head's vocabulary i64[D]; None where it is the target's."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def target_tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of ids in the head's vocabulary."""
        return draft_tokens if self.d2t is None else draft_tokens + self.d2t[draft_tokens]

    def target_probs(self, draft_probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """A distribution over the head's vocabulary [..., D] as one over the target's [..., V]."""
        if self.draft_token_ids is None:
            return draft_probs
        zeros = draft_probs.new_zeros(*draft_probs.shape[:-1], vocab_size)
        return zeros.index_copy_(-1, self.draft_token_ids, draft_probs)
