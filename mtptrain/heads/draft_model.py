"""Head `draft_model`: a small language model that has the target's vocabulary.

It reads tokens, each at its own position, and never the target's states. Its output after t + 1 predicts token t + 2,
so it is depth 0 of draft position t. In serving, as in training, the model's keys depend only on the tokens, so depth k
of draft position t computes the same as depth 0 of position t + k: training one depth trains them all. Source: Fast
Inference from Transformers via Speculative Decoding (arXiv 2211.17192).
"""

import math
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.base import DepthStates, Drafted, FirstStates, Head
from mtptrain.heads.packing import PackedTokens, Packing, Segments
from mtptrain.settings.heads import DraftModelConfig, config_of
from mtptrain.target.causal_attention import CAUSAL_OR_MASKED, Extras, SeenSlots
from mtptrain.target.families import (
    head_rope_parameters,
    key_heads,
    mlp_size,
    norm_eps,
    read_target_config,
    sliding_window,
)
from mtptrain.target.form import TargetForm, find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.hub import config_dir
from mtptrain.target.model import Verified
from mtptrain.target.position_cache import PositionCache
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_sealed

TRAINED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Families that can be trained: their layers are dense and scale scores by 1 / sqrt(head_dim). The first is for targets
of any other family."""


NO_TARGET = (
    "{directory}: a draft model must be a language model that mtptrain can run as a target, but this one is none "
    "({error}); choose another draft model"
)


class DraftModelHead(Head):
    """A causal language model of transformers. Its tensors are named as in a stock checkpoint."""

    Config = DraftModelConfig

    def __init__(self, config: DraftModelConfig, target_config: PreTrainedConfig) -> None:
        super().__init__(config, target_config)
        self.config = model_config(config, target_config)
        self.target_hidden_size = int(target_config.hidden_size)
        self.context_tokens = int(self.config.max_position_embeddings)
        model = AutoModelForCausalLM.from_config(
            self.config,
            dtype=torch.get_default_dtype(),
            trust_remote_code=False,
            attn_implementation=CAUSAL_OR_MASKED,
        )
        self.model = model.model
        self.lm_head = None if self.config.tie_word_embeddings else model.lm_head
        for layer in self.model.layers:
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)

    @classmethod
    def check_trainable(cls, config: DraftModelConfig, target_config: PreTrainedConfig) -> None:
        """Refuse families that are not in `TRAINED_MODEL_TYPES`, and models with a sliding window."""
        found = model_config(config, target_config)
        window, family = sliding_window(found), found.model_type
        if family not in TRAINED_MODEL_TYPES or window is not None:
            what = family if window is None else f"{family} with a sliding window of {window} tokens"
            raise UserError(
                f"head.init_from: a draft model that is trained must be one of {', '.join(TRAINED_MODEL_TYPES)} with "
                f"full attention, but is {what}; choose another model, or measure this one untrained with "
                "acceptance.draft_model"
            )

    def forward(self, tokens: PackedTokens, parts: FrozenParts, ttt_steps: int) -> torch.Tensor:
        """Training: run the model once over all documents, and return the states of all depths [T, M, H].

        H is the model's own hidden size. The model reads the first token of each document, then the token after each of
        the document's tokens: N tokens plus one per document.
        """
        for layer in self.model.layers:
            layer.gradient_checkpointing = self.activation_checkpointing
        packing = tokens.packing
        documents = longer_documents(packing)
        num_read, device = sum(documents.document_lengths), packing.positions.device
        # 1. Put the first token of each document in front of the document's next tokens.
        firsts, first_read = packing.document_offsets[:-1], documents.document_offsets[:-1]
        next_read = torch.arange(len(packing.positions), device=device) + (packing.positions == 0).cumsum(0)  # [N]
        ids, positions = torch.zeros(2, num_read, dtype=torch.long, device=device)
        ids[first_read], ids[next_read] = tokens.input_ids[firsts], tokens.next_ids
        positions[next_read] = packing.positions + 1
        # 2. Run the model, and take the output after token t + 1 + k for depth k of draft position t.
        attend = partial(attend_in_documents, documents)
        states = self.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, attend=attend
        ).last_hidden_state[0]
        depths = torch.arange(ttt_steps, device=device)[:, None]
        indices = (next_read[packing.draft_positions] + depths).clamp(max=num_read - 1)  # [T, M]
        return F.embedding(indices, states)

    def draft_first(self, verified: Verified, parts: FrozenParts, cache: PositionCache, num_drafts: int) -> FirstStates:
        """Read the tokens that the model has not read yet, up to the newest one; see `Head.draft_first`."""
        positions, last = verified.positions + 1, verified.last_index
        if cache.get_seq_length() == 0:  # also read the first token, at position 0
            positions, last = F.pad(positions, (1, 0)), last + 1
        states = self._read(verified.tokens.gather(1, positions), positions, cache)
        newest = states[torch.arange(len(last), device=last.device), last]
        return FirstStates(newest[:, None], newest)

    def draft_next(self, drafted: Drafted, parts: FrozenParts, cache: PositionCache) -> DepthStates:
        """Read the drafted tokens, each one position later than the states; see `Head.draft_next`."""
        assert drafted.tree is None, "a draft model drafts chains only"
        states = self._read(drafted.tokens, drafted.positions + 1, cache)
        return states, states

    def _read(self, tokens: torch.Tensor, positions: torch.Tensor, cache: PositionCache) -> torch.Tensor:
        """Returns the states after the final norm [B, S, H] of tokens [B, S] at these positions."""
        mask = cache.begin(positions)
        seen = SeenSlots(self.form.masks, mask, positions, num_read=cache.get_seq_length())
        output = self.model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, seen_slots=seen
        )
        return output.last_hidden_state

    def output_weight(self, parts: FrozenParts) -> torch.Tensor:
        """Returns the model's own output layer [V, H], which may be its embedding table."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, states: torch.Tensor, parts: FrozenParts) -> torch.Tensor:
        """Returns the model's logits [..., V], scaled and capped as in its family."""
        return self.form.scaled_logits(super().logits(self.form.scaled_states(states), parts))

    @cached_property
    def form(self) -> TargetForm:
        return find_form(self.config)


def longer_documents(packing: Packing) -> Packing:
    """Returns a packing in which every document has one more token, and attention is causal over whole documents.

    Only `segments`, `document_lengths` and `document_offsets` are those of the longer documents; all other fields are
    still those of `packing`.
    """
    lengths = tuple(length + 1 for length in packing.document_lengths)
    offsets = packing.document_offsets + torch.arange(len(lengths) + 1, device=packing.document_offsets.device)
    everything, offsets_i32 = slice(0, sum(lengths)), offsets.int()
    segments = Segments(
        queries=everything,
        keys=everything,
        lengths=tuple((length, length) for length in lengths),
        query_offsets=offsets_i32,
        key_offsets=offsets_i32,
        is_causal=True,
    )
    return replace(packing, segments=(segments,), document_lengths=lengths, document_offsets=offsets)


def attend_in_documents(
    documents: Packing,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    extras: Extras,
) -> torch.Tensor:
    """Returns the attention output [S, heads, head_dim] of packed documents, which do not see each other."""
    assert not extras and (scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5))
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [S, (kv) heads, head_dim]
    return depth_attention(query, key, value, [], [], documents)


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def model_config(config: DraftModelConfig, target_config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the language model, with the target's vocabulary size."""
    if config.init_from is None:
        model = _random_config(config, target_config)
    else:
        model = published_config(config.init_from, target_config)
        for name in (*SIZES, "tie_word_embeddings"):
            value, published = getattr(config, name), getattr(model, name)
            if value not in (None, published):
                raise UserError(
                    f"head.{name}: must be left out or {published}, as in {config.init_from}, but is {value}; remove it"
                )
    model.vocab_size = target_config.vocab_size
    # transformers would not train the embedding of a padding token.
    model.pad_token_id = None
    return model


def published_config(path: str, target_config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of a language model that drafts for the target, or of a head of another run."""
    facts = Path(path) / "head.json"
    if facts.is_file():
        stored: dict[str, Any] = read_sealed(facts, "copy it again, or train again", ["head"])["head"]
        if stored["name"] != "draft_model":
            raise UserError(
                f"{path}: must be a language model, but holds the head {stored['name']}; choose a language model, or "
                f"train with head={stored['name']}"
            )
        return model_config(config_of(DraftModelConfig, stored, facts), target_config)
    directory = config_dir(path, setting="head.init_from")
    try:
        config = read_target_config(directory)
        form = find_form(config)
    except UserError as error:
        raise UserError(NO_TARGET.format(directory=directory, error=error)) from error
    if form.keeps_states or form.has_lm_head_bias or (form.decoder, form.norm) != ("model", "model.norm"):
        raise UserError(
            f"{directory}: a draft model must have plain decoder layers, no bias in lm_head, and tensors named model.* "
            f"with model.norm.weight, but this {config.model_type} lacks one of these; choose another model"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{directory}: a draft model must be unquantised, so that its weights can be trained, but has a "
            "quantization_config; choose the unquantised checkpoint"
        )
    if config.vocab_size > target_config.vocab_size:
        raise UserError(
            f"{directory}: a draft model must have at most {target_config.vocab_size} rows of embeddings, as many as "
            f"the target, but has vocab_size {config.vocab_size}; choose a model with the target's vocabulary"
        )
    return config


def _random_config(config: DraftModelConfig, target: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of a model of the target's family if that family can be trained, else of a Llama."""
    defaults = {
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": key_heads(target),
        "intermediate_size": mlp_size(target),
    }
    sizes = {name: defaults[name] if (size := getattr(config, name)) is None else size for name in SIZES}
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    has_target_heads = (sizes["hidden_size"], heads) == (target.hidden_size, target.num_attention_heads)
    head_dim = getattr(target, "head_dim", None) if has_target_heads else None
    head_dim = head_dim or sizes["hidden_size"] // heads
    if sizes["hidden_size"] % heads or head_dim % 2 or heads % kv_heads:
        raise UserError(
            "head.num_attention_heads: must divide head.hidden_size into head dims that are even numbers, and "
            f"be a multiple of head.num_key_value_heads, but the three are {heads}, {sizes['hidden_size']} and "
            f"{kv_heads}; change one of them"
        )
    tied = target.tie_word_embeddings if config.tie_word_embeddings is None else config.tie_word_embeddings
    return AutoConfig.for_model(
        target.model_type if target.model_type in TRAINED_MODEL_TYPES else TRAINED_MODEL_TYPES[0],
        **sizes,
        vocab_size=target.vocab_size,
        head_dim=head_dim,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=norm_eps(target),
        rope_parameters=head_rope_parameters(target),
        tie_word_embeddings=tied,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        sliding_window=None,
    )
