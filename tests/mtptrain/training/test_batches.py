"""Tests the alignment and the order of packed batches.

A draft of token j at depth k counts only if tokens j-1-k to j lie in one generated span.
"""

from itertools import chain, product
from pathlib import Path

import numpy as np
import torch

from mtptrain.hidden_states.fp8 import decode, encode
from mtptrain.hidden_states.store import HiddenStore, StoredDocument
from mtptrain.training.batches import BatchSchedule, make_batch
from mtptrain.training.step_packing import PAIR_COST, TOKEN_COST, shard_costs
from tests.mtptrain.hidden_states.small_store import make_store

T = 4


def document(document_id: int, mask: list[int]) -> StoredDocument:
    """Returns document d, whose token i is 100 * d + i, so that each token tells its position."""
    tokens = torch.arange(len(mask), dtype=torch.int32) + 100 * document_id
    states = tokens[:, None].repeat(1, 8).to(torch.bfloat16)
    return StoredDocument(document_id, tokens, torch.tensor(mask, dtype=torch.uint8), states, None)


DOCUMENTS = {
    1: [1] * 7,
    2: [0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0],  # two answers, of which the second is too short for depth 1
    3: [0, 1],
    4: [0, 0, 1, 1, 1, 1, 1, 1],  # an answer that ends with the document
}


def plain_drafts() -> set[tuple[int, int, int, int]]:
    """Returns (document, draft position t, depth k, token read) of every draft that serving makes, by definition."""
    drafts = set()
    for i, mask in DOCUMENTS.items():
        for t, k in product(range(len(mask)), range(T)):
            j = t + 2 + k
            if j < len(mask) and all(mask[j - 1 - k : j + 1]):
                drafts.add((i, t, k, 100 * i + t + 1 + k))
    return drafts


def test_exactly_the_drafts_that_serving_makes_count_and_only_tokens_that_they_need_are_packed() -> None:
    """A document is cut after the token whose state gives its last label, and left out if it has no draft."""
    made = make_batch([document(i, mask) for i, mask in DOCUMENTS.items()], T)
    assert made.document_ids == (2, 4, 1) and made.document_tokens == 27
    owners = [2] * 10 + [4] * 7 + [1] * 6
    assert made.hidden_states[:, 0].float().div(100).floor().tolist() == owners
    assert made.packing.positions.tolist() == [p for count in (10, 7, 6) for p in range(count)]
    tokens = made.packing.draft_positions.tolist()
    found = {
        (owners[tokens[index]], int(made.packing.positions[tokens[index]]), k, int(made.next_ids[tokens[index + k]]))
        for k, index in made.is_draft.nonzero().tolist()
    }
    assert found == plain_drafts()
    assert made.num_drafts.tolist() == [sum(draft[2] == k for draft in found) for k in range(T)]


def test_documents_of_a_shard_cost_together_what_each_costs_alone() -> None:
    rng = np.random.default_rng(0)
    for lengths in (rng.integers(1, 40, 300), *map(np.array, ([1, 1, 2, 1, 3, 2], [2], [1], [3, 1]))):
        masks = [(rng.random(length) < rng.choice([0.1, 0.7, 1.0])).astype(np.uint8) for length in lengths]
        expected = []
        for mask in masks:
            # A token drafts if the next two tokens are generated.
            drafting = [t for t in range(len(mask) - 2) if mask[t + 1] and mask[t + 2]]
            of_pairs = sum(1 + PAIR_COST * (t + 0.5) for t in drafting)
            expected.append(of_pairs + TOKEN_COST * (max(drafting) + 1) if drafting else 0)
        costs = shard_costs(np.concatenate(masks), np.cumsum([0, *lengths]))
        np.testing.assert_allclose(costs, expected, rtol=1e-12)


def test_states_of_eight_bits_reach_the_device_decoded_wherever_that_happens() -> None:
    generator = torch.Generator().manual_seed(0)
    for decode_states, last_is_exact in product((False, True), (False, True)):
        documents, expected, expected_aux = [], [], []
        for (i, mask), num_used in zip(DOCUMENTS.items(), (6, 10, 0, 7), strict=True):
            plain, shape = document(i, mask), (len(mask), 3, 8)
            states, aux = torch.randn(len(mask), 8, generator=generator), torch.randn(shape, generator=generator)
            (values, scales), (aux_values, aux_scales) = encode(states), encode(aux)
            last = (states.bfloat16(), None) if last_is_exact else (values, scales)
            of_last, of_aux = (last[0], aux_values), (last[1], aux_scales)
            documents.append(StoredDocument(i, plain.input_ids, plain.loss_mask, *of_last, *of_aux))
            exact = states.bfloat16().float() if last_is_exact else decode(values, scales, torch.float32)
            expected.append(exact[:num_used])
            expected_aux.append(decode(aux_values, aux_scales, torch.float32)[:num_used])
        made = make_batch(documents, T, decode_states)
        assert (made.aux_hidden_states_scales is None) == decode_states
        assert (made.hidden_states_scales is None) == (decode_states or last_is_exact)
        on_device = made.to(torch.device("cpu"), torch.float32)
        assert on_device.aux_hidden_states is not None
        order = [1, 3, 0]  # the document at index 2 has no draft
        assert torch.equal(on_device.hidden_states, torch.cat([expected[i] for i in order]))
        assert torch.equal(on_device.aux_hidden_states, torch.cat([expected_aux[i] for i in order]))


def test_the_batches_of_a_schedule_are_those_of_their_documents(tmp_path: Path) -> None:
    """Those for a GPU are made one step ahead."""
    make_store(tmp_path)
    store = HiddenStore.open(tmp_path)
    for for_gpu in (False, True):
        schedule = BatchSchedule(store, T, 32, 1, seed=0, for_gpu=for_gpu)
        batches = list(chain(*schedule.prefetch(0, 3 * schedule.steps_per_epoch, 0, 1)))
        assert len(batches) > 5
        for batch in batches:
            alone = make_batch([store.document(i - 100) for i in batch.document_ids], T)
            assert torch.equal(batch.hidden_states, alone.hidden_states)
