"""Tests that a head that drafts all tokens in one forward drafts in every round as in training."""

import pytest
import torch

from mtptrain.decoding.draft import Draft
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import PackedTokens, Packing
from mtptrain.heads.peagle import PeagleHead
from mtptrain.target.model import Target, Verified
from mtptrain.target.position_cache import PositionCache

K = 4


@pytest.fixture(scope="module", params=["peagle", "dflash"])
def head(request: pytest.FixtureRequest, target: Target) -> Head:
    torch.manual_seed(0)
    config = HEADS[request.param].Config(capture_layers=[1, 2])
    return build_head(config, target.config).eval().requires_grad_(False)


class Recorder(HeadDrafter):
    """Keeps the tokens of the sequences and the logits of the drafts in every round."""

    def start(self, batch_size: int, num_slots: int) -> None:
        super().start(batch_size, num_slots)
        self.rounds: list[tuple[list[list[int]], tuple[torch.Tensor, ...]]] = []
        self.forwards = 0

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        draft = super().draft(verified, sampler)
        rows = [row[:count] for row, count in zip(verified.tokens.tolist(), verified.num_tokens.tolist(), strict=True)]
        assert draft.logits is not None
        self.rounds.append((rows, draft.logits))
        return draft


def trained_logits(target: Target, head: Head, tokens: list[int]) -> torch.Tensor:
    """Returns the logits [K, V] that training computes at the token before the newest."""
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    captured = target.forward(ids, positions, PositionCache(len(tokens)), head.capture_layers).aux_hidden_states
    assert captured is not None
    num_tokens = len(tokens) - 1
    packing = Packing.of_spans([num_tokens], window=head.shared_window)
    read = PackedTokens(captured[0, :num_tokens], ids[0, :-1], ids[0, 1:], packing)
    states = head(read, target.parts, K)
    return head.logits(states[:, -1], target.parts)


@torch.no_grad()
def test_the_drafts_of_every_round_are_those_of_training(target: Target, head: Head) -> None:
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [9] * 6]
    recorder = Recorder(head, target.parts, K)
    generations = speculate(target, recorder, prompts, num_speculative_tokens=K, max_new_tokens=16, sampler=Sampler())
    assert len(recorder.rounds) > 8, "a random head must need many rounds, because most drafts are rejected"
    assert any(sum(generation.accepted_at) < generation.drafted for generation in generations)
    for rows, logits in recorder.rounds:
        for index, tokens in enumerate(rows):
            drafted = torch.stack([each[index] for each in logits])
            torch.testing.assert_close(drafted, trained_logits(target, head, tokens), atol=1e-5, rtol=1e-5)


def test_one_forward_drafts_all_tokens(target: Target, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, calls, draft_first = Recorder(head, target.parts, K), [], head.draft_first
    monkeypatch.setattr(head, "draft_first", lambda *args: calls.append(None) or draft_first(*args))
    monkeypatch.setattr(head, "draft_next", None)
    speculate(target, recorder, [[1, 2, 3]], num_speculative_tokens=K, max_new_tokens=8, sampler=Sampler())
    assert len(calls) == len(recorder.rounds)


def test_a_mask_token_beyond_the_vocabulary_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match=r"head\.mask_token_id: must be within 0\.\.259, .* but is 260; set the id"):
        build_head(PeagleHead.Config(capture_layers=[1, 2], mask_token_id=260), target.config)
