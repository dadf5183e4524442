"""Chooses the documents and draft positions of each training step, and divides them among its micro-batches.

The loss of a step is divided by the number of drafts in that step, so a token in a small step weighs more than one in a
large step. Steps are therefore filled evenly. A document that does not fit waits for the next step while shorter ones
fill the current step. The documents of an epoch's last steps are spread evenly over those steps.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtptrain.hidden_states.store import HiddenStates
from mtptrain.utils.errors import UserError

Step = list[list[int]]
"""Document indices of each micro-batch."""
_Document = tuple[int, int, float]
"""Index, number of tokens, and cost."""

PACKING_VERSION = 2
"""Increase this when the order of documents changes, so that runs do not resume from checkpoints with another order."""
LOOK_AHEAD = 8
"""Maximum number of waiting documents per micro-batch. It limits the packing work and the reordering."""
FULL_SHARE = 0.99
"""A step is full once its documents fill this share of its token budget."""
MOST_SWAPS = 64
"""Maximum number of swaps of two documents that even out the micro-batches of a step."""
EVENED_STEPS = 8
"""Number of steps at the end of an epoch whose documents are redistributed evenly."""


TOKEN_COST = 1 / 16
"""Cost of computing a token's keys and values, relative to the other work of a draft position."""
PAIR_COST = 1 / 32_768
"""Cost of a draft position's attention to one token, relative to its other work."""


@dataclass(frozen=True)
class Anchors:
    """Samples the draft positions of a document for one step, for heads that do not use all of them."""

    per_document: int
    seed: tuple[int, ...]
    """Seed of the draw, for example the seed of the run and the epoch. The document id is appended to it."""

    def draw(self, document_id: int, num_draft_positions: int) -> NDArray[np.int64]:
        """Returns the indices, in increasing order, of the draft positions chosen from all those of a document."""
        generator = np.random.default_rng([*self.seed, document_id])
        return np.sort(
            generator.choice(num_draft_positions, min(self.per_document, num_draft_positions), replace=False)
        )


def document_costs(store: HiddenStates, most_drafts: float = math.inf) -> NDArray[np.float64]:
    """Returns each document's training cost: 1 per draft position that is used, plus attention; 0 without any."""
    return np.concatenate([shard_costs(mask, offsets, most_drafts) for mask, offsets in store.loss_masks()])


def shard_costs(
    loss_mask: NDArray[np.uint8], offsets: NDArray[np.int64], most_drafts: float = math.inf
) -> NDArray[np.float64]:
    """Returns the costs of documents with concatenated loss masks [N], where document i begins at `offsets[i]`.

    The computation is vectorised over documents, because a store may have millions.
    """
    drafts = np.zeros(len(loss_mask) + 2, np.uint8)  # padded at both ends with a token that does not draft
    drafts[1:-3] = loss_mask[1:-1] & loss_mask[2:]  # draft positions, as in `draft_spans`
    for distance in (1, 2):  # the last two tokens of a document have no draft
        drafts[1 + np.maximum(offsets[1:] - distance, 0)] = 0
    changes = np.flatnonzero(drafts[1:] != drafts[:-1])
    firsts, ends = changes[::2], changes[1::2]
    document = np.searchsorted(offsets, firsts, side="right") - 1  # document of each span
    counts, firsts, ends = ends - firsts, firsts - offsets[document], ends - offsets[document]
    num_documents = len(offsets) - 1
    last_ends = np.zeros(num_documents)
    last_ends[document] = ends  # later spans overwrite earlier ones
    drafts_and_pairs = counts + PAIR_COST * (counts * (firsts + counts / 2))
    num_drafts = np.bincount(document, counts, num_documents)
    share = np.minimum(1, most_drafts / np.maximum(num_drafts, 1))  # share of the draft positions that a step uses
    return TOKEN_COST * last_ends + np.bincount(document, drafts_and_pairs, num_documents) * share


def shuffled(num_documents: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the indices of all documents in the order of an epoch. Epochs count from 0."""
    return np.random.default_rng([seed, epoch]).permutation(num_documents)


def pack_documents(
    lengths: NDArray[np.int64],
    costs: NDArray[np.float64],
    batch_tokens: int,
    micro_batches: int,
    order: NDArray[np.int64],
    evens_last_steps: bool = True,
) -> list[Step]:
    """Returns the document indices of every micro-batch of every step of an epoch.

    Documents are taken in the given order, from `shuffled` or from a streamed store. Each goes to the cheapest
    micro-batch of the step that has room. A document that does not fit waits, and the next step takes waiting documents
    first. Documents with cost 0 are left out. So is the last step if one of its micro-batches stays empty.

    Lengths and costs are those of each document, and `batch_tokens` is the most that one micro-batch may have. With
    `evens_last_steps` documents are spread evenly over the last steps. This is impossible for a streamed store, which
    does not hold the documents of all these steps at once.
    """
    if lengths.max() > batch_tokens:
        raise UserError(
            f"train.batch_tokens: must be at least the {lengths.max()} tokens of the longest document, but is "
            f"{batch_tokens}; raise it or lower prompts.max_document_tokens and run mtptrain prompts and "
            "mtptrain hidden-states again"
        )
    order = order[costs[order] > 0]
    coming = zip(order.tolist(), lengths[order].tolist(), costs[order].tolist(), strict=True)
    shortest = int(lengths[order].min(initial=batch_tokens))
    steps: list[Step] = []
    waiting: list[_Document] = []
    while True:
        step = _PartialStep(batch_tokens, micro_batches)
        waiting = [document for document in waiting if not step.take(*document)]
        while len(waiting) < LOOK_AHEAD * micro_batches and not step.is_full(shortest):
            if (document := next(coming, None)) is None:
                break
            if not step.take(*document):
                waiting.append(document)
        if not step.tokens:
            break
        steps.append(step.documents)
    if steps and not all(steps[-1]):
        steps.pop()
    if not evens_last_steps:
        return steps
    return steps[:-EVENED_STEPS] + _evened(steps[-EVENED_STEPS:], lengths, costs, batch_tokens)


class _PartialStep:
    """A step that is being filled with documents."""

    def __init__(self, batch_tokens: int, micro_batches: int) -> None:
        self.documents: Step = [[] for _ in range(micro_batches)]
        self.tokens = 0
        self._full_tokens = FULL_SHARE * batch_tokens * micro_batches
        self._room = [batch_tokens] * micro_batches
        self._most_room = batch_tokens
        self._by_cost = [(0.0, micro_batch) for micro_batch in range(micro_batches)]  # a heap

    def is_full(self, shortest: int) -> bool:
        """Returns whether the step has reached `FULL_SHARE` or has no room for a document of `shortest` tokens."""
        return self.tokens >= self._full_tokens or self._most_room < shortest

    def take(self, index: int, length: int, cost: float) -> bool:
        """Adds a document to the cheapest micro-batch that has room. Returns False if no micro-batch has room."""
        if length > self._most_room:
            return False
        passed_over = []
        spent, chosen = heapq.heappop(self._by_cost)
        while self._room[chosen] < length:
            passed_over.append((spent, chosen))
            spent, chosen = heapq.heappop(self._by_cost)
        for micro_batch in [*passed_over, (spent + cost, chosen)]:
            heapq.heappush(self._by_cost, micro_batch)
        self.documents[chosen].append(index)
        self.tokens += length
        self._room[chosen] -= length
        self._most_room = max(self._room)
        return True


def _evened(steps: list[Step], lengths: NDArray[np.int64], costs: NDArray[np.float64], batch_tokens: int) -> list[Step]:
    """Redistributes the documents over the same number of steps, longest first, each to the emptiest step with room.

    Returns the steps unchanged if a document does not fit, a micro-batch stays empty, or the smallest step does not
    gain tokens.
    """
    indices = [index for step in steps for documents in step for index in documents]
    evened = [_PartialStep(batch_tokens, len(step)) for step in steps]
    for index in sorted(indices, key=lambda index: -lengths[index]):
        document = index, int(lengths[index]), float(costs[index])
        if not any(step.take(*document) for step in sorted(evened, key=lambda step: step.tokens)):
            return steps
    least = min((int(lengths[np.concatenate(step)].sum()) for step in steps), default=0)
    is_better = all(step.tokens > least and all(step.documents) for step in evened)
    return [step.documents for step in evened] if is_better else steps


def balance(step: Step, lengths: NDArray[np.int64], costs: NDArray[np.float64], batch_tokens: int) -> Step:
    """Returns the step with documents swapped between micro-batches to even out their costs."""
    parts = [list(indices) for indices in step]
    for _ in range(MOST_SWAPS):
        costly, *others = sorted(parts, key=lambda part: -costs[part].sum())
        if not any(_swap(costly, cheap, lengths, costs, batch_tokens) for cheap in reversed(others)):
            break
    return parts


def _swap(
    costly: list[int], cheap: list[int], lengths: NDArray[np.int64], costs: NDArray[np.float64], batch_tokens: int
) -> bool:
    """Swaps the two documents that best even out two micro-batches. Returns False if no pair gains at least 1 %."""
    gap = costs[costly].sum() - costs[cheap].sum()
    moved = costs[costly][:, None] - costs[cheap]  # cost that each swap moves from costly to cheap
    longer = lengths[costly][:, None] - lengths[cheap]
    fits = (longer <= batch_tokens - lengths[cheap].sum()) & (-longer <= batch_tokens - lengths[costly].sum())
    left = np.where(fits, np.abs(gap - 2 * moved), np.inf)
    i, j = np.unravel_index(left.argmin(), left.shape)
    if left[i, j] > 0.99 * gap:
        return False
    costly[i], cheap[j] = cheap[j], costly[i]
    return True
