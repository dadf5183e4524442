"""Head `native_mtp`: the multi-token-prediction module that a family publishes with its models.

It combines an embedding e and a state h into x = eh_proj[enorm(e); hnorm(h)], which passes through one decoder layer of
the target's own code, with its experts, gates, kind of attention and norms, and a final norm; the target's frozen
lm_head follows. Head `mtp` is the same around a plain Llama layer. `NATIVE_MTP` has what differs between families.
Sources: vllm/model_executor/models/*_mtp.py in vLLM 0.32.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from mtptrain.heads.attention.depths import DepthKeys
from mtptrain.heads.base import DepthStates, Drafted, FirstStates, Head
from mtptrain.heads.packing import PackedTokens, Packing
from mtptrain.settings.heads import NativeMtpConfig
from mtptrain.target.causal_attention import CAUSAL_OR_MASKED, FULL, SeenSlots
from mtptrain.target.form import build_on_meta, find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import Verified
from mtptrain.target.position_cache import PositionCache, TreeSlots
from mtptrain.utils.errors import UserError

LAYER = "model.layers.0."
"""Prefix of the decoder layer's tensors in the head."""


@dataclass(frozen=True)
class NativeModule:
    """Names and arithmetic of a family's published MTP modules."""

    names: Mapping[str, str] = field(default_factory=dict)
    """The checkpoint's prefix for each prefix of the head's tensors. {N} is the number of the target's layers."""
    zero_first_embedding: bool = False
    """Whether zeros replace the embedding at position 0."""
    feeds_back_normed: bool = True
    """Whether a depth reads the previous depth's states after the final norm."""
    has_norm: bool = True
    """Whether there is a final norm."""
    layer: Mapping[str, Any] = field(default_factory=dict)
    """Settings in which the layer differs from the target's last one."""
    is_llama_layer: bool = False
    """Whether the layer is a Llama layer with the target's sizes."""
    count: str = "num_nextn_predict_layers"
    """Setting of config.json, or of its `text_config`, that says how many modules a checkpoint has."""
    is_first_of_several: bool = False
    """Whether engines run the first of several modules alone."""


_BEHIND_LAYERS = {
    **{f"{part}.": f"model.layers.{{N}}.{part}." for part in ("enorm", "hnorm", "eh_proj")},
    "norm.": "model.layers.{N}.shared_head.norm.",
    LAYER: "model.layers.{N}.",
}
_QWEN = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "norm.": "mtp.norm.",
    LAYER: "mtp.layers.0.",
}
_ERNIE = {
    "enorm.": "model.mtp_emb_norm.0.",
    "hnorm.": "model.mtp_hidden_norm.0.",
    "eh_proj.": "model.mtp_linear_proj.0.",
    LAYER: "model.mtp_block.0.",
}
_MIMO_V2 = {
    **{f"{part}.": f"model.mtp.layers.0.{part}." for part in ("enorm", "hnorm", "eh_proj")},
    "norm.": "model.mtp.layers.0.final_layernorm.",
    LAYER + "post_attention_layernorm.": "model.mtp.layers.0.pre_mlp_layernorm.",
    LAYER: "model.mtp.layers.0.",
}
NATIVE_MTP = {
    "deepseek_v3": NativeModule(_BEHIND_LAYERS, zero_first_embedding=True),
    "glm4_moe": NativeModule(_BEHIND_LAYERS, zero_first_embedding=True, feeds_back_normed=False),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), NativeModule(_QWEN, count="mtp_num_hidden_layers")),
    "qwen3_next": NativeModule(_QWEN),
    "ernie4_5_moe": NativeModule(
        _ERNIE,
        zero_first_embedding=True,
        feeds_back_normed=False,
        has_norm=False,
        is_llama_layer=True,
    ),
    "mimo_v2_flash": NativeModule(
        _MIMO_V2,
        layer={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        is_first_of_several=True,
    ),
}
"""The modules of each family, by model type. In other families the head is one layer of theirs, under our names."""


class NativeMtpHead(Head):
    """One decoder layer of the target's own code, with the combination and norms of its family's MTP module."""

    Config = NativeMtpConfig

    def __init__(self, config: NativeMtpConfig, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        self.native = NATIVE_MTP.get(target_config.model_type, NativeModule())
        own, hidden_size = module_config(target_config), int(target_config.hidden_size)
        self.form = find_form(own)
        model = AutoModelForCausalLM.from_config(
            own, dtype=torch.get_default_dtype(), trust_remote_code=False, attn_implementation=CAUSAL_OR_MASKED
        )
        inside = f"{self.form.decoder}."
        self.model = model.get_submodule(self.form.decoder)
        norm = model.get_submodule(self.form.norm)
        setattr(self.model, self.form.norm.removeprefix(inside), nn.Identity())
        setattr(self.model, self.form.embed_tokens.removeprefix(inside), None)
        self.enorm, self.hnorm = (type(norm)(hidden_size, eps=self.form.norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)  # columns: embedding, then hidden state
        nn.init.normal_(self.eh_proj.weight, std=hidden_size**-0.5)
        self.norm = norm if self.native.has_norm else nn.Identity()
        self.model.eval()

    def forward(self, tokens: PackedTokens, parts: FrozenParts, ttt_steps: int) -> torch.Tensor:
        """Training: compute the states of all depths [T, M, H] at the draft positions; see `Head.forward`.

        Draft position t attends to the depth-0 keys of its document up to t, and to its own keys of depths 1 .. k. At
        depth 0, the layer runs over all N tokens, because its keys are not computed without the rest of it.
        """
        packing = tokens.packing
        # 1. Put the draft positions first, and all other tokens behind them.
        hidden_states, embeddings, positions = (  # [N, H], [N, H], [N]
            torch.cat(packing.split(x)) for x in (tokens.target_states, parts.embed(tokens.next_ids), packing.positions)
        )
        num_drafts = len(packing.draft_positions)
        # 2. Each depth combines the states with the embeddings, shifted by one token, and adds its keys.
        earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        states = []
        for _ in range(ttt_steps):
            depth_states, hidden_states, *made = self._run(
                self._train_depth, hidden_states, embeddings, positions, packing, earlier
            )
            states.append(depth_states[:num_drafts])
            earlier = [*earlier, (made[0], made[1])]
            # 3. The next depth reads what this one feeds back at the draft positions, each with the next token.
            hidden_states, positions = hidden_states[:num_drafts], positions[:num_drafts] + 1
            embeddings = F.pad(embeddings[1:num_drafts], (0, 0, 0, 1))
        return torch.stack(states)

    def _train_depth(
        self,
        hidden_states: torch.Tensor,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        packing: Packing,
        earlier: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        """Returns the states that `logits` reads, the states to feed back, and the keys and values of one depth."""
        keys = DepthKeys(packing, positions, self.form.masks[0] or FULL, earlier)
        states = self._layer(hidden_states[None], embeddings[None], positions[None], attend=keys.attend)
        assert keys.made is not None, "the layer's attention is the registered one"
        return *(x[0] for x in states), *keys.made

    def draft_first(self, verified: Verified, parts: FrozenParts, cache: PositionCache, num_drafts: int) -> FirstStates:
        states, fed_back = self._read(
            verified.states.read_by(()), parts.embed(verified.next_tokens), verified.positions, cache
        )
        newest = torch.arange(len(states), device=states.device), verified.last_index
        return FirstStates(states[newest][:, None], fed_back[newest])

    def draft_next(self, drafted: Drafted, parts: FrozenParts, cache: PositionCache) -> DepthStates:
        return self._read(drafted.fed_back, parts.embed(drafted.tokens), drafted.positions, cache, drafted.tree)

    def _read(
        self,
        hidden_states: torch.Tensor,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        cache: PositionCache,
        tree: TreeSlots | None = None,
    ) -> DepthStates:
        """Returns what `_layer` returns for tokens at these positions, and writes their keys to the cache."""
        mask = cache.begin(positions, tree)
        seen = SeenSlots(self.form.masks, mask, positions, tree, num_read=cache.get_seq_length())
        return self._layer(hidden_states, embeddings, positions, past_key_values=cache, seen_slots=seen)

    def _layer(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, **attention: Any
    ) -> DepthStates:
        """Run one depth on hidden states and on the embeddings of the token after each position [B, S, H]."""
        if self.native.zero_first_embedding:
            embeddings = torch.where(positions[..., None] == 0, 0, embeddings)
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1))
        out = self.model(
            inputs_embeds=x, position_ids=positions, use_cache="past_key_values" in attention, **attention
        ).last_hidden_state
        normed = self.norm(out)
        return normed, normed if self.native.feeds_back_normed else out

    def train(self, mode: bool = True) -> "NativeMtpHead":
        """Set the mode, but keep dropout and the noise of routers in the layer off: decoding has none."""
        super().train(mode)
        self.model.eval()
        return self


def module_config(target_config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of a model whose only layer is that of the target's MTP module; its vocabulary is not used."""
    native = NATIVE_MTP.get(target_config.model_type, NativeModule())
    if native.is_llama_layer:
        return llama_config(target_config)
    own, last = deepcopy(target_config), int(target_config.num_hidden_layers) - 1
    own.num_hidden_layers, own.vocab_size, own.pad_token_id = 1, 1, None
    for name, value in target_config.to_dict().items():
        if isinstance(value, list) and len(value) == last + 1:
            setattr(own, name, [getattr(target_config, name)[-1]])
    for name in ("first_k_dense_replace", "moe_layer_start_index"):
        if hasattr(own, name):
            setattr(own, name, max(0, getattr(own, name) - last))
    for name, value in native.layer.items():
        setattr(own, name, list(value))
    form = find_form(own)
    has_attention = form.masks[0] is not None and not form.keeps_states
    if not has_attention or (not native.layer and not has_last_layer_of(own, target_config)):
        raise UserError(
            "head: for head native_mtp, the target's last decoder layer must have attention, keep no state, and have "
            f"the tensors that it has in a model of one layer, but that of a {target_config.model_type} does not; "
            "train head=mtp"
        )
    return own


def has_last_layer_of(own: PreTrainedConfig, target_config: PreTrainedConfig) -> bool:
    """Returns whether the only layer of one model has the tensors of the last layer of another."""

    def tensors(config: PreTrainedConfig) -> dict[str, torch.Size]:
        model = build_on_meta(config)
        layer = model.get_submodule(f"{find_form(config).layers}.{config.num_hidden_layers - 1}")
        return {name: tensor.shape for name, tensor in layer.state_dict().items()}

    return tensors(own) == tensors(target_config)


def llama_config(target_config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of a Llama layer with the target's sizes and rotary embedding."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    return LlamaConfig(
        **{name: getattr(target_config, name) for name in names},
        vocab_size=1,
        num_hidden_layers=1,
        head_dim=getattr(target_config, "head_dim", None),
        max_position_embeddings=target_config.max_position_embeddings,
        rope_parameters=deepcopy(target_config.rope_parameters),
        tie_word_embeddings=False,
        pad_token_id=None,
    )
