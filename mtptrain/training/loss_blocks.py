"""Compares blocks of drafts with their teacher. A block holds the logits of all depths of some target tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mtptrain.heads.corrected import Correction
from mtptrain.settings.loss import LossPart
from mtptrain.training.loss_parts import DIVERGENCES, GRADIENTS, Drafted, Rows
from mtptrain.training.teacher import Teacher
from mtptrain.utils.compile import fused, mark_width_static


@dataclass(frozen=True)
class DepthGroup:
    """The drafts of depths that are compared together, and what they are compared with.

    The target token of depth k at draft position t is token t + 1 + k: the target's state there gives the distribution
    to learn. Depth 0 at draft position t + k has the same target token, so all depths share the teacher. In a group of
    one depth, the draft positions need not be consecutive.
    """

    states: torch.Tensor
    """The head's states [T, M, H]."""
    lm_head: torch.Tensor
    """The head's own lm_head [D, H], or the target's frozen one [V, H]."""
    target_states: torch.Tensor
    """The target's post-norm states at the target tokens of the first depth [M, H]."""
    target_logits: Callable[[torch.Tensor], torch.Tensor]
    """Returns the target's logits [C, V] for its states [C, H]."""
    is_draft: torch.Tensor
    """bool[T, M], whether each draft counts. A draft position that counts at a depth counts at all smaller depths."""
    scale: torch.Tensor
    """Weight of each depth's sum in the loss [T]."""
    draft_token_ids: torch.Tensor | None = None
    """Target token ids i64[D] that form the head's own vocabulary; None if it has none."""
    data_tokens: torch.Tensor | None = None
    """The data's token that the first depth should predict at each draft position i64[M]; for `LossPart.data_ce`."""
    correction: Correction | None = None
    """The correction of the logits of `states @ lm_head` by the tokens before the drafts."""

    def correction_at(self, block: "Block") -> Correction | None:
        """Returns the correction of a block's drafts, with features [T * C, r]."""
        if self.correction is None:
            return None
        return replace(self.correction, features=block.rows(self.correction.features))


@dataclass(frozen=True)
class Block:
    """The drafts at T depths whose targets are among C consecutive target tokens."""

    targets: slice
    """The C target tokens. The draft at depth k of draft position t has target token t + k."""
    size: int  # C
    slots: Sequence[tuple[slice, slice]]
    """For each depth, the drafts, and the places of their target tokens in the block. If a depth has fewer drafts than
    the block has target tokens, the drafts take the last places."""

    def at_targets(self, x: torch.Tensor) -> torch.Tensor:
        """Moves the drafts [T, M, ...] of the block to their target tokens [T, C, ...]; empty places are 0."""
        block = x.new_zeros(len(x), self.size, *x.shape[2:])
        for depth, (drafts, in_block) in enumerate(self.slots):
            block[depth, in_block] = x[depth, drafts]
        return block

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the drafts of the block at their target tokens [T * C, ...]."""
        return self.at_targets(x).flatten(0, 1)

    def write(self, block: torch.Tensor, x: torch.Tensor) -> None:
        """Writes the block [T, C, ...] to its drafts in x [T, M, ...]."""
        for depth, (drafts, in_block) in enumerate(self.slots):
            x[depth, drafts] = block[depth, in_block]


def blocks(num_depths: int, num_draft_positions: int, chunk_rows: int) -> Iterator[Block]:
    """Yields the blocks of M draft positions, each of at most `chunk_rows` rows if that is at least T."""
    size = max(1, chunk_rows // num_depths)
    if size > 4:
        size -= size % 4  # matmuls with other numbers of rows take 5 to 8 % longer on a CPU
    for first in range(0, num_draft_positions, size):
        count = min(size, num_draft_positions - first)
        drafts = [(max(0, first - depth), max(0, first + count - depth)) for depth in range(num_depths)]
        slots = [(slice(start, stop), slice(count - (stop - start), count)) for start, stop in drafts]
        yield Block(slice(first, first + count), count, slots)


def corrected_logits(rows: torch.Tensor, lm_head: torch.Tensor, correction: Correction | None) -> torch.Tensor:
    """Returns the logits of rows of states [R, H], for a correction with features [R, r].

    A correction of all logits is added; one of candidates alone is not.
    """
    logits = F.linear(rows, lm_head)
    if correction is not None and correction.num_candidates is None:
        logits += F.linear(correction.features, correction.weight)
    return logits


class Selected(NamedTuple):
    """How R drafts that are chosen among A candidates compare with their teacher, and the gradient of their loss."""

    kl: torch.Tensor
    """f32[R], the sum over the candidates of p log(p / (m q)), where p sums to m over them, and q is the softmax of
    their scores."""
    overlap: torch.Tensor  # f32[R]
    is_right: torch.Tensor  # bool[R], whether the most likely candidate is the target's most likely token
    candidates: torch.Tensor  # i64[R, A]
    gradient: torch.Tensor  # f32[R, A], of the weighted loss with respect to the candidates' scores


def select(
    logits: torch.Tensor, correction: Correction, teacher: Teacher, num_depths: int, weights: torch.Tensor
) -> Selected:
    """Choose among the candidates of each draft, and compare with the teacher.

    The logits [R, D] of all depths are concatenated, so R is T times the number of target tokens. The correction of the
    candidates has features [R, r], and each row a weight in the loss [R].
    """
    candidates, scores = correction.candidates(logits)
    targets = torch.arange(len(teacher.tokens), device=logits.device).repeat(num_depths)[:, None]  # [R, 1]
    probs = teacher.values[targets, candidates].float()
    if teacher.log_total is not None:
        probs = (probs - teacher.log_total[targets]).exp()
    mass, log_drafted = probs.sum(-1, keepdim=True), scores.log_softmax(-1)
    best = candidates.gather(1, scores.argmax(-1, keepdim=True))
    return Selected(
        kl=(torch.xlogy(probs, probs) - probs * log_drafted).sum(-1) - torch.xlogy(mass, mass)[:, 0],
        overlap=torch.minimum(probs, log_drafted.exp()).sum(-1),
        is_right=(best == teacher.tokens[targets])[:, 0],
        candidates=candidates,
        gradient=(log_drafted.exp() * mass - probs) * weights[:, None],
    )


def compare(
    logits: torch.Tensor,
    teacher: Teacher,
    weights: dict[LossPart, torch.Tensor],
    num_depths: int,
    data_tokens: torch.Tensor | None = None,
) -> Drafted:
    """Compare the logits of drafts [T * C, D], those of all depths concatenated, with the teacher of C target tokens.

    `weights` has the weight of each row in the loss [T * C] for each part whose gradient is wanted. `LossPart.data_ce`
    needs the data's own tokens [C], -1 where outside the head's vocabulary.
    """
    tokens = teacher.tokens.repeat(num_depths)
    data_rows = None if data_tokens is None else data_tokens.repeat(num_depths)
    mass = None if teacher.mass is None else teacher.mass.repeat(num_depths)  # [T * C]
    largest, total, product, overlap, grad, divergences = _rows_and_grad(
        mark_width_static(logits),
        mark_width_static(teacher.values),
        teacher.log_total,
        tokens,
        data_rows,
        mass,
        tuple(weights.values()),
        tuple(part.value for part in weights),  # torch.compile guards on strings, but not on members of an enum
        num_depths,
    )
    log_total, at_token = total.log(), _at(logits, tokens)
    cross = -product if teacher.negative_entropy is None else teacher.negative_entropy.repeat(num_depths) - product
    kl = cross + log_total
    if mass is not None:
        kl = kl + (1 - mass) * (1 - log_total)  # weights log_total by mass, and adds the mass outside the vocabulary
    log_sum = largest + log_total
    return Drafted(
        kl,
        overlap,
        is_right=(at_token == largest) & (tokens >= 0),
        target_ce=torch.where(tokens >= 0, log_sum - at_token, 0.0),
        data_ce=None if data_rows is None else torch.where(data_rows >= 0, log_sum - _at(logits, data_rows), 0.0),
        divergences=dict(zip((part for part in weights if part in DIVERGENCES), divergences, strict=True)),
        gradient=grad,
    )


def _at(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logit of each row's token f32[R]; arbitrary where the token is -1."""
    return logits.gather(-1, tokens.clamp(min=0)[:, None])[:, 0].float()


@partial(fused, recomputes=True)
def _rows_and_grad(
    logits: torch.Tensor,
    teacher_values: torch.Tensor,
    teacher_log_total: torch.Tensor | None,
    tokens: torch.Tensor,
    data_tokens: torch.Tensor | None,
    mass: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    parts: tuple[str, ...],
    num_depths: int,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]
]:  # fmt: skip
    """Computes, in one compiled function, everything that `compare` needs from whole rows of logits.

    With e = exp(logits - largest logit), it returns for each row f32[T * C]: the largest logit, sum e, the sum of
    target_probs * log e (or of target_probs * (log e - log target_probs) if the teacher holds logits), and the overlap.
    Then follow the gradient of the weighted loss [T * C, D], or None without parts, and the values of `DIVERGENCES`.

    A row stays in a CPU core's cache as in `teacher._softmax`, except with parts whose gradient depends on a sum over
    the whole row, such as the overlap. `num_depths` is an argument because torch.compile does not guard on a quotient
    of sizes: if it were computed from the shapes, it would be wrong when compiled code is reused for another number of
    depths.
    """
    values = teacher_values.expand(num_depths, -1, -1).reshape(logits.shape)
    if teacher_log_total is None:
        probs, log_probs = values, None
    else:
        log_probs = values.float() - teacher_log_total.repeat(num_depths)[:, None]
        probs = log_probs.exp()
    wide = logits.float()
    largest = wide.amax(-1, keepdim=True)
    shifted = wide - largest
    exps = shifted.exp()
    total = exps.sum(-1, keepdim=True)
    drafted = exps / total
    overlap = torch.minimum(probs, drafted).sum(-1)
    rows = Rows(probs, log_probs, drafted, shifted, total, overlap, mass, tokens, data_tokens)
    grad, divergences = None, []
    for part, weight in zip(parts, weights, strict=True):
        if part in DIVERGENCES:
            gradient, divergence = DIVERGENCES[part](rows)
            divergences.append(divergence)
        else:
            gradient = GRADIENTS[part](rows)
        gradient = gradient * weight[:, None]
        grad = gradient if grad is None else grad + gradient
        del gradient  # without compilation, it would take memory
    product = (probs * (shifted if log_probs is None else shifted - log_probs)).sum(-1)
    grad = None if grad is None else grad.to(logits.dtype)
    return largest[:, 0], total[:, 0], product, overlap, grad, tuple(divergences)
