"""Tests that sampled speculation follows the target's joint distribution of tokens 2, 3 and 4 after a prompt."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import mtptrain.decoding.speculate as speculate_module
from mtptrain.decoding.draft import Draft, Drafter
from mtptrain.decoding.drafters import HeadDrafter, HybridDrafter, TreeDrafter
from mtptrain.decoding.sampler import History, Sampler
from mtptrain.decoding.speculate import Accepted, accept_chosen, accept_sampled
from mtptrain.engines.table import engine_of
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target, Verified
from tests.conftest import as_draft_model, make_target, tiers
from tests.mtptrain.decoding.drafting import PARALLEL_OR_MLP, decode, penalised, random_head

VOCAB, PROMPT, SAMPLES = 6, [3, 1, 4, 1, 5], 12_000


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Target:
    settings = {"vocab_size": VOCAB, "eos_token_id": None, "initializer_range": 0.15}
    directory = make_target(tmp_path_factory.mktemp("small"), **settings)
    return load_target(directory, torch.float32, torch.device("cpu"))


class HalfProcessed(HeadDrafter):
    """Samples drafts by their own rule, but reports the distributions that the target's rules give."""

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        draft = super().draft(verified, sampler)
        assert draft.logits is not None
        history = History.of(verified.tokens, torch.full_like(verified.num_tokens, len(PROMPT)), verified.num_tokens)
        return replace(draft, probs=sampler.probs(sampler.processed(torch.stack(draft.logits, 1), history)))


Settings = dict[str, Any]  # of a Sampler
PARTS: dict[str, Settings] = {
    "min_p": {"min_p": 0.3},
    # Biases make new tokens likely, and their logits positive.
    "repetition_penalty": {"repetition_penalty": 5.0, "logit_bias": {0: 2.5, 2: 2.5}},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": -1.0},
    "logit_bias": {"logit_bias": {0: 1.0, 4: -math.inf}},
}
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.4}
FILTERS: Settings = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
LLAMA_CPP: Settings = {**engine_of("llama_cpp").sampling, **FILTERS, "draft_top_k": 3}
ALL_PARTS: Settings = {**PENALTIES, "min_p": 0.05, "logit_bias": {0: 0.5, 2: -0.3}}


def filtered(logits: torch.Tensor, temperature: float, filters: Settings) -> torch.Tensor:
    """Returns probabilities [..., V] computed by transformers, in the order of vLLM unless `filters` has another."""
    warpers: dict[str, Any] = {"temperature": TemperatureLogitsWarper, "min_p": MinPLogitsWarper}
    warpers |= {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    scores, settings = logits.flatten(0, -2), filters | {"temperature": temperature}
    for name in filters.get("order", ("temperature", "min_p", "top_k", "top_p")):
        scores = warpers[name](settings[name])(torch.zeros(0), scores) if name in settings else scores
    return scores.softmax(-1).view(logits.shape)


def test_filters_keep_the_tokens_that_transformers_keeps_and_extreme_settings_the_likeliest_one() -> None:
    logits = 3 * torch.randn(4, 5, 50, generator=torch.Generator().manual_seed(0))
    usual: list[Settings] = [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.9}, {"top_k": 1}]
    usual += [{"min_p": 0.1}, {"min_p": 1.0}, {"min_p": 0.1, "top_p": 0.8}, {"min_p": 0.1, "top_k": 4}]
    usual += [{"order": engine_of(name).sampling["order"], **FILTERS} for name in ("llama_cpp", "transformers")]
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
        scores = penalised(sequences[:, :end], logits[:, end - 1], len(PROMPT), settings)
        probs *= filtered(scores, temperature, settings).gather(1, sequences[:, end, None])[:, 0]
    return probs.view(VOCAB, VOCAB, VOCAB, VOCAB).sum(0)


def chi_square_p_value(
    target: Target, temperature: float, kind: str, settings: Settings, missing: Sequence[str] = ()
) -> float:
    """Returns the p-value of a chi-square test that sampled speculation follows `joint_distribution` with `settings`.

    Combinations of tokens with fewer than 8 expected samples are pooled. The p-value uses Wilson and Hilferty's normal
    approximation. Speculation leaves out the settings that are `missing`.
    """
    sampler = Sampler(temperature, 1, **{name: value for name, value in settings.items() if name not in missing})
    head = random_head(target, kind if kind in PARALLEL_OR_MLP else "mtp", seed=5)
    sampled = HeadDrafter(head, target.parts, 2, sample_drafts=True)
    drafters: dict[str, Drafter] = {
        "greedy drafts": HeadDrafter(head, target.parts, 2),
        "half processed": HalfProcessed(head, target.parts, 2, sample_drafts=True),
        "tree": TreeDrafter(head, target.parts, 2, num_nodes=7, top_k=3) if kind == "tree" else sampled,
        "hybrid": HybridDrafter(sampled, min_match=1),
        "model": HeadDrafter(as_draft_model(target), target.parts, 2, sample_drafts=True),
    }
    counts = torch.zeros(VOCAB, VOCAB, VOCAB)
    lengths = {"num_speculative_tokens": 2, "max_new_tokens": 4}
    for _ in range(SAMPLES // 4000):
        for generation in decode(target, drafters.get(kind, sampled), [PROMPT] * 4000, **lengths, sampler=sampler):
            counts[tuple(generation.tokens[1:])] += 1
    expected = joint_distribution(target, temperature, settings).flatten() * SAMPLES
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


LAWS: list[tuple[str, float, Settings]] = [(kind, temperature, {}) for kind in KINDS for temperature in (1.0, 0.7)]
for kind in ("sampled drafts", "greedy drafts", "tree", "hybrid", "model"):
    LAWS += [(kind, 1.0, {"top_k": 5, "top_p": 0.9}), (kind, 0.8, ALL_PARTS)]
LAWS += [("sampled drafts", 1.0, settings) for settings in PARTS.values()]
CORE_LAWS = [("sampled drafts", 0.8, ALL_PARTS), ("model", 0.8, LLAMA_CPP)]
LAWS += CORE_LAWS[1:]


@pytest.mark.parametrize(("kind", "temperature", "settings"), tiers(LAWS, CORE_LAWS))
def test_sampled_speculation_follows_the_targets_joint_distribution(
    small_vocabulary: Target, kind: str, temperature: float, settings: Settings
) -> None:
    assert chi_square_p_value(small_vocabulary, temperature, kind, settings) > 1e-3


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


Patch = tuple[Any, str, Callable[..., Any]]
OF, WITH_DRAFTS = History.of, History.with_drafts
WRONG_HISTORIES: dict[str, Patch] = {
    "drafts": (History, "with_drafts", lambda history, drafts, above: WITH_DRAFTS(history, drafts, above & False)),
    "output": (History, "of", lambda tokens, prompt_lengths, num_tokens: OF(tokens, prompt_lengths, prompt_lengths)),
    "prompt": (History, "of", lambda *texts: replace(OF(*texts), is_prompt=torch.zeros_like(texts[0]).bool())),
}
CONTROLS: dict[str, tuple[str, Settings, list[str], Patch | None]] = {
    "residual": ("sampled drafts", {}, [], (speculate_module, "accept_sampled", accept_without_residual)),
    "children": ("tree", {}, [], (speculate_module, "accept_chosen", accept_first_child)),
    "draft side: draft_top_k": ("half processed", {"draft_top_k": 3}, [], None),
}
for part, settings in PARTS.items():
    CONTROLS[f"draft side: {part}"] = ("half processed", settings, [], None)
    CONTROLS[f"both sides: {part}"] = ("sampled drafts", settings, [part], None)
    for name, patch in WRONG_HISTORIES.items():
        if part == "repetition_penalty" or (part in PENALTIES and name != "prompt"):
            CONTROLS[f"history of {part}: {name}"] = ("sampled drafts", settings, [], patch)
CORE = ["residual", "draft side: draft_top_k", "both sides: logit_bias", "history of presence_penalty: drafts"]


@pytest.mark.parametrize("wrong", tiers(CONTROLS, CORE))
def test_what_is_wrong_or_missing_is_caught(
    small_vocabulary: Target, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings, missing, patch = CONTROLS[wrong]
    if patch is not None:
        monkeypatch.setattr(*patch)
    assert chi_square_p_value(small_vocabulary, 1.0, kind, settings, missing) < 1e-6
