"""Tests that sampled speculation follows the target's joint distribution of tokens 2, 3 and 4 after a prompt."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import mtptrain.decoding.speculate as speculate_module
from mtptrain.decoding.draft import Draft, Drafter
from mtptrain.decoding.drafters import HeadDrafter, HybridDrafter, TreeDrafter
from mtptrain.decoding.sampler import History, Sampler
from mtptrain.decoding.speculate import Accepted, accept_chosen, accept_sampled
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target, Verified
from mtptrain.utils.errors import UserError
from tests.conftest import as_draft_model, make_target, tiers
from tests.mtptrain.decoding.drafting import PARALLEL_OR_MLP, decode, penalised, random_head

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


class HalfProcessed(HeadDrafter):
    """Samples drafts with neither min-p nor biases nor penalties, but reports the distributions that have them."""

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        draft = super().draft(verified, replace(sampler, min_p=0.0))
        assert draft.logits is not None
        history = History.of(verified.tokens, torch.full_like(verified.num_tokens, len(PROMPT)), verified.num_tokens)
        history = history.with_drafts(draft.tokens, draft.ancestors())
        logits = F.pad(torch.stack(draft.logits, 1), (0, 0, 0, 1))  # [B, 1 + K, V]
        return replace(draft, probs=sampler.probs(sampler.processed(logits, history))[:, :-1])


class FilteredDrafts(HeadDrafter):
    """Samples drafts with min-p, whatever the sampler of the target."""

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        return super().draft(verified, replace(sampler, **PARTS["min_p"]))


Settings = dict[str, Any]  # of a Sampler
PARTS: dict[str, Settings] = {
    "min_p": {"min_p": 0.3},
    # Biases make new tokens likely, and their logits positive.
    "repetition_penalty": {"repetition_penalty": 5.0, "logit_bias": {0: 2.5, 2: 2.5}},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": -1.0},
    "logit_bias": {"logit_bias": {0: 1.0, 4: -math.inf}},
}
ALL_PARTS = {
    "min_p": 0.05,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "logit_bias": {0: 0.5, 2: -0.3},
}


def filtered(logits: torch.Tensor, temperature: float, filters: Settings) -> torch.Tensor:
    """Returns probabilities [..., V] computed by transformers, in the order of vLLM."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [MinPLogitsWarper(filters["min_p"])] if "min_p" in filters else []
    warpers += [TopKLogitsWarper(int(filters["top_k"]))] if "top_k" in filters else []
    warpers += [TopPLogitsWarper(filters["top_p"])] if "top_p" in filters else []
    scores = logits.flatten(0, -2)
    for warper in warpers:
        scores = warper(torch.zeros(0), scores)
    return scores.softmax(-1).view(logits.shape)


def test_filters_keep_the_tokens_that_transformers_keeps_and_extreme_settings_the_likeliest_one() -> None:
    logits = 3 * torch.randn(4, 5, 50, generator=torch.Generator().manual_seed(0))
    usual: list[Settings] = [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.9}, {"top_k": 1}]
    usual += [{"min_p": 0.1}, {"min_p": 1.0}, {"min_p": 0.1, "top_p": 0.8}, {"min_p": 0.1, "top_k": 4}]
    for filters in usual:
        probs = Sampler(0.7, **filters).probs(logits)
        torch.testing.assert_close(probs, filtered(logits, 0.7, filters))
    for temperature, top_p in itertools.product((1e-300, 1e-38, 1e-9), (1.0, 1e-9, 1e-300)):
        sampler, likeliest = Sampler(temperature, top_p=top_p), logits.argmax(-1)
        torch.testing.assert_close(sampler.probs(logits).amax(-1), torch.ones(4, 5))
        assert torch.equal(sampler.choose(logits), likeliest)


@torch.no_grad()
def joint_distribution(target: Target, temperature: float, settings: Settings) -> torch.Tensor:
    """Returns the probabilities [V, V, V] of tokens 2, 3 and 4, computed by enumerating all sequences."""
    sequences = torch.tensor([[*PROMPT, *tail] for tail in itertools.product(range(VOCAB), repeat=4)])
    logits, probs = target.model(sequences).logits, torch.ones(len(sequences))
    for end in range(len(PROMPT), sequences.shape[1]):
        scores = penalised(logits[:, end - 1], sequences[:, :end], len(PROMPT), settings)
        probs *= filtered(scores, temperature, settings).gather(1, sequences[:, end, None])[:, 0]
    return probs.view(VOCAB, VOCAB, VOCAB, VOCAB).sum(0)


def chi_square_p_value(
    target: Target,
    temperature: float,
    kind: str = "sampled drafts",
    settings: Settings | None = None,
    verified_with: Settings | None = None,
    samples: int = SAMPLES,
) -> float:
    """Returns the p-value of a chi-square test that sampled speculation follows `joint_distribution` with `settings`.

    Combinations of tokens with fewer than 8 expected samples are pooled. The p-value uses Wilson and Hilferty's normal
    approximation. Speculation uses the settings `verified_with` if they are given.
    """
    settings = settings or {}
    sampler = Sampler(temperature, 1, **(settings if verified_with is None else verified_with))
    head = random_head(target, kind if kind in PARALLEL_OR_MLP else "mtp", seed=5)
    sampled = HeadDrafter(head, target.parts, 2, sample_drafts=True)
    drafters: dict[str, Drafter] = {
        "greedy drafts": CertainDrafts(head, target.parts, 2),
        "half processed": HalfProcessed(head, target.parts, 2, sample_drafts=True),
        "filtered drafts": FilteredDrafts(head, target.parts, 2, sample_drafts=True),
        "tree": TreeDrafter(head, target.parts, 2, num_nodes=7, top_k=3) if kind == "tree" else sampled,
        "hybrid": HybridDrafter(sampled, min_match=1),
        "model": HeadDrafter(as_draft_model(target), target.parts, 2, sample_drafts=True),
    }
    counts = torch.zeros(VOCAB, VOCAB, VOCAB)
    lengths = {"num_speculative_tokens": 2, "max_new_tokens": 4}
    for _ in range(samples // 4000):
        for generation in decode(target, drafters.get(kind, sampled), [PROMPT] * 4000, **lengths, sampler=sampler):
            counts[tuple(generation.tokens[1:])] += 1
    expected = joint_distribution(target, temperature, settings).flatten() * samples
    if counts.flatten()[expected == 0].any():
        return 0.0
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


@pytest.mark.parametrize("kind", tiers(["sampled drafts", "greedy drafts", "tree", "hybrid"], ["sampled drafts"]))
def test_speculation_with_min_p_biases_and_penalties_follows_the_distribution(
    small_vocabulary: Target, kind: str
) -> None:
    assert chi_square_p_value(small_vocabulary, 0.8, kind, ALL_PARTS, samples=16_000) > 1e-3


def without_drafts(history: History, drafts: torch.Tensor, ancestors: torch.Tensor) -> History:
    return WITH_DRAFTS(history, drafts, torch.zeros_like(ancestors))


def without_output(tokens: torch.Tensor, prompt_lengths: torch.Tensor, num_tokens: torch.Tensor) -> History:
    return OF(tokens, prompt_lengths, prompt_lengths)


def without_prompt(tokens: torch.Tensor, prompt_lengths: torch.Tensor, num_tokens: torch.Tensor) -> History:
    history = OF(tokens, prompt_lengths, num_tokens)
    return replace(history, is_prompt=torch.zeros_like(history.is_prompt))


def prompt_as_output(tokens: torch.Tensor, prompt_lengths: torch.Tensor, num_tokens: torch.Tensor) -> History:
    return OF(tokens, torch.zeros_like(prompt_lengths), num_tokens)


OF, WITH_DRAFTS = History.of, History.with_drafts
WRONG_HISTORIES: dict[str, tuple[str, Callable[..., History]]] = {
    "drafts left out": ("with_drafts", without_drafts),
    "output left out": ("of", without_output),
    "prompt left out": ("of", without_prompt),
    "prompt as output": ("of", prompt_as_output),
}
SIDES = ["nothing", "draft", "target", "both"]
CONTROLS = [(part, wrong) for part in PARTS for wrong in SIDES]
CONTROLS += [(part, wrong) for part in list(PARTS)[1:4] for wrong in list(WRONG_HISTORIES)[:2]]
CONTROLS += [("repetition_penalty", "prompt left out")]
CONTROLS += [(part, "prompt as output") for part in ("presence_penalty", "frequency_penalty")]
CORE = [("min_p", "draft"), ("logit_bias", "target"), ("presence_penalty", "drafts left out")]


@pytest.mark.parametrize(("part", "wrong"), tiers(CONTROLS, CORE))
def test_a_part_of_the_sampler_that_is_missing_somewhere_is_caught(
    small_vocabulary: Target, part: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts see min-p alone, so the other parts are missing on the target's side if they are missing on both."""
    if wrong in WRONG_HISTORIES:
        monkeypatch.setattr(History, *WRONG_HISTORIES[wrong])
    kind = {"draft": "half processed", "target": "filtered drafts"}.get(wrong, "sampled drafts")
    is_missing = wrong in ("target", "both")
    verified_with = {name: value for name, value in PARTS[part].items() if name != part or not is_missing}
    p_value = chi_square_p_value(small_vocabulary, 1.0, kind, PARTS[part], verified_with, samples=8000)
    assert p_value > 1e-3 if wrong == "nothing" else p_value < 1e-6


def test_settings_of_the_sampler_that_no_token_can_follow_are_refused() -> None:
    for settings in ({"min_p": 1.5}, {"repetition_penalty": 0.0}):
        with pytest.raises(UserError, match="must be from 0 to 1, and repetition_penalty above 0, but are"):
            Sampler(**settings)
    history = History.of(torch.zeros(1, 4, dtype=torch.long), torch.tensor([2]), torch.tensor([3]))
    with pytest.raises(UserError, match=r"logit_bias: must name tokens from 0 to 4, but names \[1, 5\]"):
        Sampler(logit_bias={1: 1.0, 5: 1.0}).processed(torch.zeros(1, 1, 5), history)


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
