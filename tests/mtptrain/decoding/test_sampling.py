"""Tests that sampled speculation follows the target's joint distribution of tokens 2, 3 and 4 after a prompt."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import mtptrain.decoding.speculate as speculate_module
from mtptrain.decoding.draft import Draft, Drafter
from mtptrain.decoding.drafters import HeadDrafter, HybridDrafter, TreeDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Accepted, accept_chosen, accept_sampled
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target, Verified
from tests.conftest import as_draft_model, make_target, tiers
from tests.mtptrain.decoding.drafting import PARALLEL_OR_MLP, decode, random_head

VOCAB, PROMPT, SAMPLES = 6, [3, 1, 4, 1, 5], 24_000


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Target:
    settings = {"vocab_size": VOCAB, "eos_token_id": None, "initializer_range": 0.15}
    directory = make_target(tmp_path_factory.mktemp("small"), **settings)
    return load_target(directory, torch.float32, torch.device("cpu"))


class CertainDrafts(HeadDrafter):
    """Drafts greedily, whatever the temperature at which the target samples."""

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        return super().draft(verified, Sampler())


Filters = dict[str, float]


def filtered(logits: torch.Tensor, temperature: float, filters: Filters) -> torch.Tensor:
    """Returns probabilities [..., V] computed by transformers."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(int(filters["top_k"]))] if "top_k" in filters else []
    warpers += [TopPLogitsWarper(filters["top_p"])] if "top_p" in filters else []
    scores = logits.flatten(0, -2)
    for warper in warpers:
        scores = warper(torch.zeros(0), scores)
    return scores.softmax(-1).view(logits.shape)


def test_filters_keep_the_tokens_that_transformers_keeps_and_extreme_settings_the_likeliest_one() -> None:
    logits = 3 * torch.randn(4, 5, 50, generator=torch.Generator().manual_seed(0))
    usual: list[Filters] = [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.9}, {"top_k": 1}]
    for filters in usual:
        probs = Sampler(0.7, **filters).probs(logits)  # type: ignore[arg-type]
        torch.testing.assert_close(probs, filtered(logits, 0.7, filters))
    for temperature, top_p in itertools.product((1e-300, 1e-38, 1e-9), (1.0, 1e-9, 1e-300)):
        sampler, likeliest = Sampler(temperature, top_p=top_p), logits.argmax(-1)
        torch.testing.assert_close(sampler.probs(logits).amax(-1), torch.ones(4, 5))
        assert torch.equal(sampler.choose(logits), likeliest)


def joint_distribution(target: Target, temperature: float, filters: Filters) -> torch.Tensor:
    """Returns the probabilities [V, V, V] of tokens 2, 3 and 4, computed by enumerating all sequences."""
    sequences = torch.tensor([[*PROMPT, *tail] for tail in itertools.product(range(VOCAB), repeat=4)])
    logits = target.model(sequences).logits[:, len(PROMPT) - 1 : -1]
    probs = filtered(logits, temperature, filters).gather(2, sequences[:, len(PROMPT) :, None])[..., 0].prod(1)
    return probs.view(VOCAB, VOCAB, VOCAB, VOCAB).sum(0)


def chi_square_p_value(
    target: Target, temperature: float, kind: str = "sampled drafts", filters: Filters | None = None
) -> float:
    """Returns the p-value of a chi-square test that sampled speculation follows `joint_distribution`.

    Combinations of tokens with fewer than 8 expected samples are pooled. The p-value uses Wilson and Hilferty's normal
    approximation.
    """
    filters = filters or {}
    sampler = Sampler(temperature, 1, **filters)  # type: ignore[arg-type]
    head = random_head(target, kind if kind in PARALLEL_OR_MLP else "mtp", seed=5)
    sampled = HeadDrafter(head, target.parts, 2, sample_drafts=True)
    drafters: dict[str, Drafter] = {
        "greedy drafts": CertainDrafts(head, target.parts, 2),
        "tree": TreeDrafter(head, target.parts, 2, num_nodes=7, top_k=3) if kind == "tree" else sampled,
        "hybrid": HybridDrafter(sampled, min_match=1),
        "model": HeadDrafter(as_draft_model(target), target.parts, 2, sample_drafts=True),
    }
    counts = torch.zeros(VOCAB, VOCAB, VOCAB)
    settings = {"num_speculative_tokens": 2, "max_new_tokens": 4, "sampler": sampler}
    for _ in range(SAMPLES // 4000):
        for generation in decode(target, drafters.get(kind, sampled), [PROMPT] * 4000, **settings):
            counts[tuple(generation.tokens[1:])] += 1
    expected = joint_distribution(target, temperature, filters).flatten() * SAMPLES
    assert not counts.flatten()[expected == 0].any()
    counts, expected = counts.flatten()[expected > 0], expected[expected > 0]
    rare = expected < 8
    if rare.any():
        counts, expected = (torch.cat([cells[~rare], cells[rare].sum()[None]]) for cells in (counts, expected))
    assert len(expected) > 15
    statistic, freedom = ((counts - expected) ** 2 / expected).sum().item(), len(expected) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


KINDS = ["sampled drafts", *PARALLEL_OR_MLP, "greedy drafts", "tree", "hybrid", "model"]


@pytest.mark.parametrize("kind", tiers(KINDS, ["sampled drafts"]))
def test_sampled_speculation_follows_the_targets_joint_distribution(small_vocabulary: Target, kind: str) -> None:
    assert chi_square_p_value(small_vocabulary, 1.0, kind) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cold_and_filtered_speculation_follows_the_distribution_too(small_vocabulary: Target, kind: str) -> None:
    assert chi_square_p_value(small_vocabulary, 0.7, kind) > 1e-3
    if kind not in PARALLEL_OR_MLP:
        assert chi_square_p_value(small_vocabulary, 1.0, kind, {"top_k": 5, "top_p": 0.9}) > 1e-3


def accept_without_residual(draft: Draft, target_probs: torch.Tensor, sampler: Sampler) -> Accepted:
    """Applies a wrong rule: the token after a rejection is sampled from the target's whole distribution."""
    accepted = accept_sampled(draft, target_probs, sampler)
    return replace(accepted, bonus=sampler.sample(target_probs[torch.arange(len(draft.tokens)), accepted.count]))


def accept_first_child(draft: Draft, target_tokens: torch.Tensor, ancestors: torch.Tensor, num_depths: int) -> Accepted:
    """Applies a wrong rule to trees: in every second sequence, a row whose children are all wrong accepts the first."""
    assert draft.parents is not None
    biased = target_tokens.clone()
    for row in range(target_tokens.shape[1]):
        is_child = draft.parents == row - 1  # [B, P], P proposed tokens
        is_missed = is_child.any(1) & ~(is_child & (draft.tokens == target_tokens[:, row, None])).any(1)
        is_missed &= torch.arange(len(is_missed)) % 2 == 0
        first = draft.tokens.gather(1, is_child.int().argmax(1)[:, None])[:, 0]
        biased[:, row] = torch.where(is_missed, first, biased[:, row])
    return accept_chosen(draft, biased, ancestors, num_depths)


WRONG_RULES: list[tuple[str, Callable[..., Accepted], str]] = [
    ("accept_sampled", accept_without_residual, "sampled drafts"),
    ("accept_chosen", accept_first_child, "tree"),
]


@pytest.mark.parametrize(("rule", "wrong", "kind"), tiers(WRONG_RULES, WRONG_RULES[:1]))
def test_a_wrong_acceptance_rule_is_caught(
    small_vocabulary: Target, rule: str, wrong: Callable[..., Accepted], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculate_module, rule, wrong)
    assert chi_square_p_value(small_vocabulary, 1.0, kind) < 1e-6
