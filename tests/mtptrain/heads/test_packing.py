"""Tests which tokens the kernels of a packing pair with each draft position, and the order of tokens and keys."""

import math

import numpy as np
import pytest
import torch

from mtptrain.heads.packing import Indices, Packing, Segments
from tests.mtptrain.heads.dense import PACKINGS, seen_tokens


def times_seen_in(packing: Packing, segments: tuple[Segments, ...]) -> torch.Tensor:
    """Returns how often kernels pair each draft position with each token, i64[M, N]."""
    num_drafts, num_tokens = len(packing.draft_positions), len(packing.positions)
    times_seen = torch.zeros(num_drafts, num_tokens, dtype=torch.long)
    in_key_order = packing.key_indices.argsort()
    for part in segments:
        queries, tokens = torch.arange(num_drafts)[part.queries], in_key_order[part.keys]
        assert len(queries.unique()) == len(queries) and len(tokens.unique()) == len(tokens)
        for index, (num_queries, num_keys) in enumerate(part.lengths):
            first_query, first_key = part.query_offsets[index], part.key_offsets[index]
            pairs = torch.ones(num_queries, num_keys, dtype=torch.long)
            rows = queries[first_query : first_query + num_queries, None]
            times_seen[rows, tokens[first_key : first_key + num_keys]] += pairs.tril() if part.is_causal else pairs
    return times_seen


def test_a_packing_says_where_documents_and_draft_positions_lie() -> None:
    packing = Packing.of_spans([4, 4], [(0, 1, 2), (1, 0, 1), (1, 2, 2)])
    assert packing.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert packing.draft_positions.tolist() == [1, 2, 4, 6, 7] and packing.other_tokens.tolist() == [0, 5, 3], (
        "no draft position sees token 3, so it must come last"
    )
    inside, before = packing.segments
    assert inside.lengths == ((2, 2), (1, 1), (2, 2)) and inside.queries == inside.keys == slice(0, 5)
    assert before.lengths == ((2, 1), (2, 2))
    assert _listed(before.queries) == [0, 1, 3, 4] and _listed(before.keys) == [5, 2, 6]
    assert packing.num_pairs() == (2 + 3) + 1 + (3 + 4)


def _listed(indices: Indices) -> list[int]:
    return torch.arange(1000)[indices].tolist()


def test_keys_of_others_that_are_each_read_by_one_answer_are_read_without_a_copy() -> None:
    inside, before = Packing.of_spans([9, 7, 5], [(0, 4, 3), (1, 3, 3), (2, 1, 2)]).segments
    assert inside.queries == inside.keys == before.queries == slice(0, 8) and before.keys == slice(8, 8 + 4 + 3 + 1)


@pytest.mark.parametrize("spans", [[(0, 1, 2), (1, 0, 1), (1, 2, 2)], None], ids=["some tokens", "all tokens"])
def test_what_belongs_to_tokens_is_split_by_draft_positions(
    spans: list[tuple[int, int, int]] | None,
) -> None:
    packing, x = Packing.of_spans([3, 4], spans), torch.randn(7, 2, requires_grad=True)
    of_drafts, of_others = packing.split(x)
    assert torch.equal(of_drafts, x[packing.draft_positions]) and torch.equal(of_others, x[packing.other_tokens])
    joined = torch.cat([2 * of_drafts, 3 * of_others])
    scale = torch.full((7, 1), 2.0).index_fill_(0, packing.other_tokens, 3.0)
    assert torch.equal(joined[packing.key_indices], scale * x)
    weights = torch.randn(7, 2)
    assert torch.equal(torch.autograd.grad(joined[packing.key_indices], x, weights)[0], scale * weights)


def test_of_many_answers_each_kernel_takes_one_of_a_document() -> None:
    """Twenty answers in one document and two in another: a kernel for the answers, 20 for the tokens before them."""
    packing = Packing.of_spans([200, 30], [(0, 10 * i + 5, 5) for i in range(20)] + [(1, 10, 5), (1, 20, 5)])
    inside, *before = packing.segments
    assert len(_listed(inside.keys)) == 110 and len(before) == 20
    assert torch.equal(times_seen_in(packing, packing.segments), seen_tokens(packing).long())


@pytest.mark.parametrize("seed", range(5))
def test_the_kernels_of_single_draft_positions_pair_each_with_every_token_that_it_sees_once(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 60, 4).tolist()
    points = [np.sort(generator.choice(length, generator.integers(1, length + 1), replace=False)) for length in lengths]
    packing = Packing.of_points(lengths, points)
    assert torch.equal(times_seen_in(packing, packing.segments), seen_tokens(packing).long())
    assert sorted(_listed(packing.segments[0].queries)) == list(range(len(packing.draft_positions)))
    assert len(packing.segments) == 1 + math.ceil(math.log2(max(map(len, points))))
    assert packing.num_pairs() == seen_tokens(packing).sum()


@pytest.mark.parametrize("window", [1, 2, 7, 30, 100])
@pytest.mark.parametrize("case", PACKINGS)
def test_the_kernels_of_a_window_pair_each_draft_position_with_the_tokens_in_it_once(case: str, window: int) -> None:
    packing = PACKINGS[case](window)
    distance = packing.draft_positions[:, None] - torch.arange(len(packing.positions))
    assert torch.equal(
        times_seen_in(packing, packing.window_segments), (seen_tokens(packing) & (distance < window)).long()
    )
