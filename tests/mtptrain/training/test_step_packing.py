"""Which documents a step packs: every one at most once, within the budget, and no step much smaller than the others."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtptrain.training.step_packing import EVENED_STEPS, LOOK_AHEAD, Anchors, Step, balance, pack_documents, shuffled

MICRO_BATCHES, BATCH_TOKENS = 8, 32_768


def pack(
    lengths: np.ndarray,
    micro_batches: int = 1,
    epoch: int = 0,
    costs: np.ndarray | None = None,
    batch_tokens: int = 64,
    evens_last_steps: bool = True,
) -> list[Step]:
    costs = lengths.astype(float) if costs is None else costs
    order = shuffled(len(lengths), 0, epoch)
    return pack_documents(lengths, costs, batch_tokens, micro_batches, order, evens_last_steps=evens_last_steps)


def test_the_micro_batches_of_a_step_cost_about_the_same_and_longer_documents_are_refused() -> None:
    """Costs do not follow the number of tokens here: one document in ten costs 20 times as much as the others."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 12, 2000)
    costs = np.where(rng.random(2000) < 0.1, 20.0, 1.0) * rng.random(2000)
    steps = pack(lengths, 8, 0, costs, batch_tokens=256)
    assert steps != pack(lengths, 8, 1, costs, batch_tokens=256), "each epoch has another order"
    before, after = list[float](), list[float]()
    for step in steps:
        balanced = balance(step, lengths, costs, 256)
        assert sorted(chain(*balanced)) == sorted(chain(*step))
        assert all(lengths[indices].sum() <= 256 for indices in balanced)
        for parts, ratios in ((step, before), (balanced, after)):
            spent = [costs[part].sum() for part in parts]
            ratios.append(max(spent) / np.mean(spent))
    assert max(before) > 1.5 and max(after) < 1.1
    message = r"train\.batch_tokens: must be at least the 70 tokens of the longest document, but is 64; raise it"
    with pytest.raises(ValueError, match=message):
        pack(np.array([3, 70]))


@settings(max_examples=200, deadline=None)
@given(
    documents=st.lists(st.tuples(st.integers(1, 64), st.sampled_from([0.0, 0.5, 1.0, 7.0])), min_size=1, max_size=120),
    micro_batches=st.integers(1, 6),
    epoch=st.integers(0, 3),
)
def test_whatever_the_lengths_are_a_document_is_packed_at_most_once_and_few_are_left(
    documents: list[tuple[int, float]], micro_batches: int, epoch: int
) -> None:
    lengths, costs = np.array([length for length, _ in documents]), np.array([cost for _, cost in documents])
    steps = pack(lengths, micro_batches, epoch, costs)
    seen = [i for step in steps for indices in step for i in indices]
    assert len(seen) == len(set(seen)) and (costs[seen] > 0).all()
    assert all(len(step) == micro_batches and all(step) for step in steps)
    assert all(lengths[indices].sum() <= 64 for step in steps for indices in step)
    left = np.count_nonzero(costs) - len(seen)
    assert left < micro_batches, "documents are left out only if the last step leaves a micro-batch empty"
    assert steps == pack(lengths, micro_batches, epoch, costs)


def test_no_step_is_much_smaller_than_the_others_with_long_documents_or_at_the_end() -> None:
    """If a step ended at the first document that does not fit, steps would be 0.6 full on average, the emptiest 0.2."""
    of_step = MICRO_BATCHES * BATCH_TOKENS
    for longest, num_steps, least in (
        (BATCH_TOKENS, 60, 0.85),
        (BATCH_TOKENS // 2, 60, 0.93),
        (4000, 1.2, 0.93),
        (4000, 2.5, 0.93),
        (4000, 10.2, 0.93),
    ):
        lengths = np.random.default_rng(0).integers(16, longest, 10_000)
        lengths = lengths[: np.searchsorted(lengths.cumsum(), num_steps * of_step)]
        steps = pack(lengths, MICRO_BATCHES, batch_tokens=BATCH_TOKENS)
        fill = np.array([lengths[np.concatenate(step)].sum() for step in steps]) / of_step
        assert len(steps) < 1.1 * num_steps + 1 and fill.min() > least * fill.mean()
        assert fill.sum() > 0.99 * lengths.sum() / of_step


def test_a_streamed_store_keeps_to_its_order_and_last_steps_are_otherwise_evened() -> None:
    """Evened steps take documents out of order, but later windows of a streamed store may not be on disk yet."""
    lengths = np.random.default_rng(0).integers(10, 60, 200)
    place = np.argsort(shuffled(len(lengths), 0, 0))
    streamed, evened = (
        [[place[index] for index in chain(*step)] for step in pack(lengths, 2, evens_last_steps=evens)]
        for evens in (False, True)
    )
    assert max(max(places) - min(places) for places in streamed) < 4 * LOOK_AHEAD
    last, last_evened = (min(max(places) for places in steps[-EVENED_STEPS:]) for steps in (streamed, evened))
    assert last_evened > last


def test_every_draft_position_is_drawn_equally_often_and_each_epoch_draws_others() -> None:
    draws = [Anchors(3, (0, epoch)).draw(7, 10).tolist() for epoch in range(2000)]
    assert all(drawn == sorted(set(drawn)) and len(drawn) == 3 for drawn in draws)
    assert len({tuple(drawn) for drawn in draws}) > 100
    times = torch.tensor(draws).flatten().bincount(minlength=10)
    assert (times - 600).abs().max() < 100, "600 each on average, with a standard deviation of 20"
    assert Anchors(3, (0, 5)).draw(7, 10).tolist() == draws[5]
    assert len({tuple(Anchors(3, (0, 5)).draw(document, 10)) for document in range(20)}) > 10
