"""Alignment of packed batches (design: a draft counts only if tokens j-1-k .. j lie in one generated span), and their order."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mtptrain.batches import Batch, BatchSchedule, make_batch, pack_documents
from mtptrain.fp8 import decode, encode
from mtptrain.hidden_store import StoredDocument

T = 4


def document(document_id: int, mask: list[int]) -> StoredDocument:
    """Token i of document d is 100 * d + i, so that a token names its place."""
    tokens = torch.arange(len(mask), dtype=torch.int32) + 100 * document_id
    states = tokens[:, None].repeat(1, 8).to(torch.bfloat16)
    return StoredDocument(document_id, tokens, torch.tensor(mask, dtype=torch.uint8), states, None)


DOCUMENTS = {
    1: [1] * 7,
    2: [0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0],  # two answers, the second too short for depth 1
    3: [0, 1],
    4: [0, 0, 1, 1, 1, 1, 1, 1],  # an answer that ends with the document
}


def batch() -> Batch:
    return make_batch([document(i, mask) for i, mask in DOCUMENTS.items()], T)


def plain_drafts() -> set[tuple[int, int, int, int]]:
    """(document, row t, depth k, token read) of every draft that serving makes, by a loop over the definition."""
    drafts = set()
    for i, mask in DOCUMENTS.items():
        for t in range(len(mask)):
            for k in range(T):
                j = t + 2 + k
                if j < len(mask) and all(mask[j - 1 - k : j + 1]):
                    drafts.add((i, t, k, 100 * i + t + 1 + k))
    return drafts


def test_exactly_the_drafts_that_serving_makes_count_and_each_reads_its_token() -> None:
    made = batch()
    owners = [i for i in sorted(DOCUMENTS, key=lambda i: -len(DOCUMENTS[i])) for _ in DOCUMENTS[i]]
    found = {(owners[n], int(made.packing.positions[n]), k, int(made.next_ids[k, n])) for k, n in made.is_draft.nonzero().tolist()}
    assert found == plain_drafts()
    assert made.num_drafts.tolist() == [sum(draft[2] == k for draft in found) for k in range(T)]


def test_the_first_draft_of_an_answer_counts_and_the_one_before_does_not() -> None:
    """Trap 6: an answer of tokens 3 .. 6 is drafted from row 2 on, since token 3 itself comes from the target's prefill."""
    rows = sorted({t for i, t, k, _ in plain_drafts() if i == 2 and k == 0})
    assert rows == [2, 3, 4, 8]


def test_teachers_are_the_positions_before_drafted_tokens() -> None:
    made = batch()
    expected = {n + 1 + k for k, n in made.is_draft.nonzero().tolist()}
    assert set(made.supervised_positions.tolist()) == expected


def test_nothing_is_read_from_behind_the_end_of_a_document() -> None:
    made = batch()
    for n, position in enumerate(made.packing.positions.tolist()):
        document_id = int(made.hidden_states[n, 0].item()) // 100
        for k in range(T):
            token = int(made.next_ids[k, n])
            assert token == (100 * document_id + position + 1 + k if position + 1 + k < len(DOCUMENTS[document_id]) else 0)


def test_an_epoch_packs_every_document_once_within_the_budget_and_in_another_order_than_the_next() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    first, second = pack_documents(lengths, 64, seed=0, epoch=0), pack_documents(lengths, 64, seed=0, epoch=1)
    for packed in (first, second):
        assert sorted(i for indices in packed for i in indices) == list(range(200))
        assert all(lengths[indices].sum() <= 64 for indices in packed)
    assert first != second
    assert first == pack_documents(lengths, 64, seed=0, epoch=0)


def test_a_document_longer_than_a_batch_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"train\.batch_tokens: must be at least the longest document, 70 tokens, but is 64; raise it"
    ):
        pack_documents(np.array([3, 70]), 64, seed=0, epoch=0)


@pytest.mark.parametrize("decode_states", [False, True])
def test_states_of_eight_bits_reach_the_device_decoded_wherever_that_happens(decode_states: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    documents, expected, expected_aux = [], [], []
    for i, mask in DOCUMENTS.items():
        plain = document(i, mask)
        states, aux = torch.randn(len(mask), 8, generator=generator), torch.randn(len(mask), 3, 8, generator=generator)
        (values, scales), (aux_values, aux_scales) = encode(states), encode(aux)
        documents.append(StoredDocument(i, plain.input_ids, plain.loss_mask, values, aux_values, scales, aux_scales))
        expected.append(decode(values, scales, torch.float32))
        expected_aux.append(decode(aux_values, aux_scales, torch.float32))
    order = sorted(range(len(documents)), key=lambda i: -len(expected[i]))
    made = make_batch(documents, T, decode_states)
    assert (made.hidden_states_scales is None) == (made.aux_hidden_states_scales is None) == decode_states
    on_device = made.to(torch.device("cpu"), torch.float32)
    assert torch.equal(on_device.hidden_states, torch.cat([expected[i] for i in order]))
    assert on_device.aux_hidden_states is not None
    assert torch.equal(on_device.aux_hidden_states, torch.cat([expected_aux[i] for i in order]))


def fp8_document(document_id: int, length: int) -> StoredDocument:
    values, scales = encode(torch.randn(length, 8, generator=torch.Generator().manual_seed(document_id)))
    ids = torch.full((length,), document_id, dtype=torch.int32)
    return StoredDocument(document_id, ids, torch.ones(length, dtype=torch.uint8), values, None, scales, None)


class Store:
    """Documents of 5 to 14 tokens, in memory."""

    directory = Path("in memory")

    def __init__(self, make: Callable[[int, int], StoredDocument]) -> None:
        self.documents = [make(i, 5 + i % 10) for i in range(40)]
        self.document_lengths = np.array([len(document.input_ids) for document in self.documents])

    def document(self, index: int) -> StoredDocument:
        return self.documents[index]


@pytest.mark.parametrize("make", [fp8_document, lambda i, length: document(i, [1] * length)])
def test_memory_of_states_is_used_again_but_never_before_its_step_is_over(make: Callable[[int, int], StoredDocument]) -> None:
    store = Store(make)
    schedule = BatchSchedule(store, T, 16, 2, seed=0, decode_states=True)  # type: ignore[arg-type]
    addresses = set()
    for batches in schedule.prefetch(0, 3 * schedule.steps_per_epoch, 0, 1):
        time.sleep(0.002)  # the next step is read meanwhile
        for batch in batches:
            alone = make_batch([store.documents[i] for i in batch.document_ids], T, decode_states=True)
            assert torch.equal(batch.hidden_states, alone.hidden_states)
            addresses.add(batch.hidden_states.data_ptr())
    assert len(addresses) == 2 * 2, "the step at hand and the one to come"
