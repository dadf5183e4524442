"""Proves that an exported head drafts the same tokens as the trained one, without running the target's decoder layers.

The trained head is first rounded as the export is, so this finds wrong names and layouts, not the effect of rounding.
Both heads draft in fp32 on the CPU from the same random hidden states. Only the target's embeddings, final norm and
lm_head are loaded, so `proof_bytes` does not depend on its decoder layers.
"""

from typing import NamedTuple

import torch

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.heads.base import Head
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.target.model import TargetStates, Verified
from mtptrain.utils.errors import UserError

PROMPT_TOKENS, ROUNDS, DRAFTS, DOCUMENTS = 64, 8, 3, 8
"""A head drafts after the prompt and after each of ROUNDS further rounds of DRAFTS + 1 tokens. K is DRAFTS, or T for a
head with `is_bound_to_depths`."""
CONFIDENCE_ATOL = 0.02
"""Confidences may differ a little where a file keeps their weights in a dtype of its own."""
TOKENS = PROMPT_TOKENS + ROUNDS * (DRAFTS + 1)
"""Number of tokens of each document whose states the heads read. The drafts also read the token after them."""


def proof_bytes(vocab_size: int, hidden_size: int, head_parameters: int, num_tables: int) -> int:
    """Returns the bytes of the proof: two heads in fp32, and 1 table (tied) or 2 in both bf16 and fp32."""
    return num_tables * vocab_size * hidden_size * (2 + 4) + 2 * head_parameters * 4


def prove_equal_proposals(parts: FrozenParts, head: Head, reloaded: Head) -> int:
    """Draft for the same random documents with both heads in fp32, and return the number of compared tokens."""
    tokens, states = random_documents(head, parts)
    ours, theirs = (propose(each.float(), parts, tokens, states) for each in (head, reloaded))
    are_equal = torch.equal(ours.tokens, theirs.tokens)
    if ours.confidences is not None and theirs.confidences is not None:
        are_equal &= torch.allclose(ours.confidences, theirs.confidences, atol=CONFIDENCE_ATOL)
    if not are_equal:
        raise UserError(
            "export: the exported head must propose the same tokens as the trained one, as surely, but proposes "
            "others, or is more or less sure of the same ones, for the same hidden states; the export was not put "
            "in place; report this with the run's stage.json"
        )
    return ours.tokens.numel()


class Proposed(NamedTuple):
    """The drafts of a head after several prefixes of a document."""

    tokens: torch.Tensor  # i64[B, 1 + ROUNDS, K]
    confidences: torch.Tensor | None  # f32[B, 1 + ROUNDS, K] of a head that has them


def random_documents(head: Head, parts: FrozenParts) -> tuple[torch.Tensor, TargetStates]:
    """Returns random tokens [B, S + 1], and states and captured layers of the first S.

    The states pass through the final norm, so that they have the scale of real ones.
    """
    generator = torch.Generator().manual_seed(0)
    vocab_size, hidden_size = parts.embed_tokens.shape
    tokens = torch.randint(0, vocab_size, (DOCUMENTS, TOKENS + 1), generator=generator)
    states = parts.final_norm(torch.randn(DOCUMENTS, TOKENS, hidden_size, generator=generator))
    captured = torch.randn(DOCUMENTS, TOKENS, len(head.read_layers), hidden_size, generator=generator)
    return tokens, TargetStates(states, captured if head.read_layers else None)


@torch.no_grad()
def propose(head: Head, parts: FrozenParts, tokens: torch.Tensor, states: TargetStates) -> Proposed:
    """Returns the drafts after the prompt, and after every further DRAFTS + 1 tokens."""
    batch_size, num_drafts = len(tokens), head.ttt_steps if head.Config.is_bound_to_depths else DRAFTS
    drafter = HeadDrafter(head, parts, num_drafts)
    drafter.start(batch_size, TOKENS + num_drafts + 1)
    drafts = []
    first = 0
    for end in range(PROMPT_TOKENS, TOKENS + 1, DRAFTS + 1):
        positions = torch.arange(first, end).repeat(batch_size, 1)  # [B, S]
        verified = Verified(tokens, torch.full((batch_size,), end + 1), positions, states.at_indices(positions))
        drafts.append(drafter.draft(verified, Sampler()))
        first = end
    confidences = [draft.confidences for draft in drafts if draft.confidences is not None]
    return Proposed(
        torch.stack([draft.tokens for draft in drafts], 1), torch.stack(confidences, 1) if confidences else None
    )
