"""The target's distribution that a head learns from, held as logits on a GPU and as probabilities on a CPU."""

from typing import NamedTuple

import torch

from mtptrain.utils.compile import fused, mark_width_static, uses_gpu_kernels


class Teacher(NamedTuple):
    """The target's distribution over the head's vocabulary for a block of C target tokens, shared by all depths.

    On a GPU, memory bandwidth limits the loss, so the teacher holds logits: every depth reads them in their own dtype,
    and no fp32 probabilities are written. On a CPU, computing exponentials is the bottleneck, so the teacher holds
    probabilities.
    """

    values: torch.Tensor  # [C, D], logits if `log_total` is given, otherwise probabilities in fp32
    log_total: torch.Tensor | None  # [C], the log of the sum of exp(logit) over the target's whole vocabulary
    negative_entropy: torch.Tensor | None  # [C], the sum of p log p over the head's vocabulary; None with logits
    tokens: torch.Tensor  # [C], the most likely tokens, as indices into the head's vocabulary; -1 if outside it
    mass: torch.Tensor | None  # [C], the target's mass in the head's own vocabulary; None if the head has none


def teach(logits: torch.Tensor, draft_token_ids: torch.Tensor | None) -> Teacher:
    """Returns the teacher for the target's logits [C, V]. It holds logits on a GPU, and probabilities on a CPU."""
    return (
        teach_by_logits(logits, draft_token_ids)
        if uses_gpu_kernels(logits)
        else teach_by_probs(logits, draft_token_ids)
    )


def teach_by_logits(logits: torch.Tensor, draft_token_ids: torch.Tensor | None) -> Teacher:
    largest, total, smallest, tokens = _totals(mark_width_static(logits))
    # The last term turns a logit of -inf into NaN. The sum of exponentials would hide such a logit.
    log_total = largest + total.log() + 0 * smallest
    if draft_token_ids is None:
        return Teacher(logits, log_total, None, tokens, None)
    own, own_tokens, mass = _own_logits(logits, log_total, tokens, draft_token_ids)
    return Teacher(own, log_total, None, own_tokens, mass)


@fused
def _totals(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns for each row [C, V] the largest logit, the sum of exp(x - largest), the smallest logit and the top token.

    A GPU computes all of them in one pass over the row.
    """
    wide = logits.float()
    largest = wide.amax(-1, keepdim=True)
    total = (wide - largest).exp().sum(-1, keepdim=True)  # keepdim, so that the compiler recognises a softmax
    return largest[:, 0], total[:, 0], wide.amin(-1), wide.argmax(-1)


@fused
def _own_logits(
    logits: torch.Tensor, log_total: torch.Tensor, tokens: torch.Tensor, draft_token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the logits, the most likely tokens and the mass of a `Teacher` over the head's own vocabulary."""
    own = logits[:, draft_token_ids]  # [C, D]
    is_in = draft_token_ids == tokens[:, None]
    own_tokens = torch.where(is_in.any(-1), is_in.int().argmax(-1), -1)
    return own, own_tokens, (own.float() - log_total[:, None]).exp().sum(-1)


def teach_by_probs(logits: torch.Tensor, draft_token_ids: torch.Tensor | None) -> Teacher:
    probs, total, product, tokens = _softmax(logits)
    if draft_token_ids is None:
        return Teacher(probs, None, product / total - total.log(), tokens.long(), None)
    own, negative_entropy, own_tokens, mass = _own_probs(probs, product, tokens, draft_token_ids)
    return Teacher(own, None, negative_entropy, own_tokens, mass)


@fused
def _own_probs(
    probs: torch.Tensor, product: torch.Tensor, tokens: torch.Tensor, draft_token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the probabilities, negative entropy, most likely tokens and mass of a `Teacher` over the head's own
    vocabulary, from the results of `_softmax`."""
    is_in = draft_token_ids == tokens[:, None]  # [C, D]
    own = probs[:, draft_token_ids]
    # The last term is NaN if a logit is not finite, as in `teach_by_logits`.
    negative_entropy = torch.xlogy(own, own).sum(-1) + 0 * product
    return own, negative_entropy, torch.where(is_in.any(-1), is_in.int().argmax(-1), -1), own.sum(-1)


@fused
def _softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the fp32 probabilities of rows [C, V], the sums [C] of e and of e log e for e = exp(x - max x), and the
    most likely tokens i32[C].

    A row stays in a CPU core's cache from the first pass over it to the last. Computing one more number per row here,
    such as the log of a sum, would break that: the compiler would split the function into one loop over all rows
    before that number, and another after it.
    """
    wide, last = logits.float(), logits.shape[-1] - 1
    shifted = wide - wide.amax(-1, keepdim=True)
    exps = shifted.exp()
    total = exps.sum(-1, keepdim=True)
    ids = torch.arange(last + 1, device=logits.device, dtype=torch.int32)
    tokens = torch.where(shifted >= 0, ids, last).amin(-1)  # the argmax; torch.argmax is not vectorised on a CPU
    return exps / total, total[:, 0], (exps * shifted).sum(-1), tokens
