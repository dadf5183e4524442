"""Greedy speculation gives the tokens of plain greedy decoding; sampled speculation has the target's distribution."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import mtptrain.decoding.speculate as speculate_module
import mtptrain.utils.compile as compile_module
from mtptrain.decoding.draft import Draft, Drafter
from mtptrain.decoding.drafters import HeadDrafter, HybridDrafter, PromptLookupDrafter, TreeDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Accepted, Generation, accept_chosen, speculate
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.target.model import Target, Verified, load_target
from mtptrain.target.position_cache import PositionCache
from tests.conftest import as_draft_model, make_target
from tests.mtptrain.heads.test_contract import draw_norms


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(tiny_target, torch.float32, torch.device("cpu"))


def random_head(target: Target, name: str = "mtp", seed: int = 0) -> Head:
    torch.manual_seed(seed)
    settings = {"capture_layers": [1, 2]} if name in ("peagle", "dflash") else {}
    head = build_head(HEADS[name].Config(**settings), target.config).eval()
    if name in ("medusa", "hydra"):  # they start as the target's own state
        draw_norms(head)
    return head


def random_prompts(count: int, vocab_size: int = 256, longest: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def plain_greedy(target: Target, prompt: list[int], max_new_tokens: int, eos_token_id: int | None = None) -> list[int]:
    """The independent reference: transformers' own generate."""
    output = target.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


class TargetCopy:
    """A draft model that is the target itself."""

    capture_layers = ()

    def __init__(self, target: Target, num_speculative_tokens: int) -> None:
        self.target, self.draft_slots = target, num_speculative_tokens

    def start(self, batch_size: int, num_slots: int) -> None:
        self.cache = PositionCache(num_slots)

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        rows, probs, tokens = torch.arange(len(verified.tokens)), [], verified.tokens.clone()
        for depth in range(self.draft_slots):
            width = int(verified.num_tokens.max()) + depth
            positions = torch.arange(width).expand(len(tokens), -1)
            states = self.target.forward(tokens[:, :width], positions, PositionCache(tokens.shape[1]))
            logits = self.target.parts.logits(states.hidden_states[rows, verified.num_tokens - 1 + depth])
            if not sampler.is_greedy:
                probs.append(sampler.probs(logits))
            tokens[rows, verified.num_tokens + depth] = sampler.choose(logits)
        drafted = tokens.gather(1, verified.num_tokens[:, None] + torch.arange(self.draft_slots))
        return Draft(drafted, torch.ones_like(drafted, dtype=torch.bool), torch.stack(probs, 1) if probs else None)


class BranchingCopy:
    """A tree with two branches at each depth: a wrong one of two tokens, and the target's own choice."""

    capture_layers = ()

    def __init__(self, target: Target, num_speculative_tokens: int) -> None:
        self.copy = TargetCopy(target, num_speculative_tokens)
        self.start, self.draft_slots = self.copy.start, 3 * num_speculative_tokens

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        right = self.copy.draft(verified, sampler).tokens  # [B, K]
        tokens = torch.stack([(right + 1) % 7, (right + 2) % 7, right], 2).flatten(1)
        parents = torch.tensor([[3 * depth - 1, 3 * depth, 3 * depth - 1] for depth in range(right.shape[1])]).flatten()
        return Draft(tokens, torch.ones_like(tokens, dtype=torch.bool), parents=parents.expand_as(tokens))


PARALLEL_OR_MLP = ("peagle", "dflash", "medusa", "hydra")
COPY = "tree that is often right"


def decode(target: Target, drafter: Drafter, prompts: list[list[int]], **settings: object) -> list[Generation]:
    defaults: dict[str, object] = {"num_speculative_tokens": 3, "max_new_tokens": 24, "sampler": Sampler()}
    return speculate(target, drafter, prompts, **{**defaults, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize(
    "kind", ["head", *PARALLEL_OR_MLP, "tree of hydra", "prompt lookup", "tree", "hybrid", "model", COPY]
)
def test_greedy_speculation_gives_exactly_plain_greedy_decodings_tokens(
    target: Target, kind: str, batch_size: int
) -> None:
    head = HeadDrafter(random_head(target), target.parts, 3)
    drafters: dict[str, Drafter] = {
        "head": head,
        **{name: HeadDrafter(random_head(target, name), target.parts, 3) for name in PARALLEL_OR_MLP},
        "tree of hydra": TreeDrafter(random_head(target, "hydra"), target.parts, 3, num_nodes=20, top_k=4),
        "prompt lookup": PromptLookupDrafter(3),
        "tree": TreeDrafter(head.head, target.parts, 3, num_nodes=20, top_k=4),
        "hybrid": HybridDrafter(head, min_match=2),
        "model": HeadDrafter(as_draft_model(target), target.parts, 3),
        COPY: BranchingCopy(target, 3),
    }
    prompts, accepted = random_prompts(24), 0
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        for prompt, generation in zip(batch, decode(target, drafters[kind], batch, eos_token_ids=[256]), strict=True):
            assert generation.tokens == plain_greedy(target, prompt, 24, eos_token_id=256)
            accepted += sum(generation.accepted_at)
    assert accepted > (300 if kind in ("model", COPY) else 0), "nothing accepted shows little"


def test_nothing_is_compiled_for_the_shapes_of_a_round(target: Target) -> None:
    """Training compiles the head's functions. Decoding with them would compile most rounds anew."""
    frames = torch._dynamo.utils.counters["frames"]
    compile_module.set_compilation(True)
    try:
        before = frames["total"]
        decode(target, HeadDrafter(random_head(target), target.parts, 3), random_prompts(1), max_new_tokens=4)
        assert compile_module._is_on and frames["total"] == before
    finally:
        compile_module.set_compilation(False)


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 5])
def test_a_draft_that_is_the_target_is_accepted_whole(target: Target, num_speculative_tokens: int) -> None:
    drafter = TargetCopy(target, num_speculative_tokens)
    for generation in decode(target, drafter, random_prompts(8), num_speculative_tokens=num_speculative_tokens):
        assert generation.rounds == math.ceil(23 / (num_speculative_tokens + 1))
        assert generation.accepted_at == [generation.rounds] * num_speculative_tokens


def test_a_sampled_draft_that_is_the_target_is_accepted_whole(target: Target) -> None:
    sampler = Sampler(1.0)
    for generation in decode(target, TargetCopy(target, 3), random_prompts(8), sampler=sampler):
        # The copy's logits come from another batch shape: a coin within 1e-6 of 1 may still reject.
        assert generation.accepted_at == [generation.rounds] * 3


def test_a_random_heads_drafts_are_mostly_rejected_and_counted_so(target: Target) -> None:
    generations = decode(target, HeadDrafter(random_head(target), target.parts, 3), random_prompts(8))
    assert sum(sum(generation.accepted_at) for generation in generations) < 0.2 * sum(
        generation.drafted for generation in generations
    )
    assert all(generation.drafted == 3 * generation.rounds for generation in generations)
    for generation in generations:
        assert len(generation.tokens) == 24 <= 1 + generation.rounds + sum(generation.accepted_at)
        by_round = generation.accepted_by_round
        assert len(by_round) == generation.rounds
        assert generation.accepted_at == [sum(count > depth for count in by_round) for depth in range(3)]


def test_decoding_stops_at_the_end_of_sequence_token_and_at_no_other(target: Target) -> None:
    prompts = random_prompts(8)
    whole = decode(target, TargetCopy(target, 3), prompts)
    for prompt, generation in zip(prompts, whole, strict=True):
        eos = generation.tokens[9]
        (cut,) = decode(target, TargetCopy(target, 3), [prompt], eos_token_ids=[eos])
        assert cut.tokens == generation.tokens[: generation.tokens.index(eos) + 1]


def test_a_sequence_is_the_same_alone_and_in_a_batch_of_ragged_ones(target: Target) -> None:
    drafter = HeadDrafter(random_head(target), target.parts, 3)
    prompts = random_prompts(8)
    batch = decode(target, drafter, prompts, eos_token_ids=[256])
    assert batch == [decode(target, drafter, [prompt], eos_token_ids=[256])[0] for prompt in prompts]


def test_one_new_token_needs_no_round(target: Target) -> None:
    (generation,) = decode(target, PromptLookupDrafter(3), [[1, 2, 3]], max_new_tokens=1)
    assert len(generation.tokens) == 1 and generation.rounds == generation.empty_rounds == 0


def test_padding_of_a_draft_is_not_accepted_even_if_it_is_right() -> None:
    draft = Draft(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[True, False, False]]))
    accepted = accept_chosen(draft, torch.zeros(1, 4, dtype=torch.long), draft.ancestors(), 3)
    assert (accepted.count.item(), accepted.bonus.item()) == (1, 0)


def test_the_branch_of_a_tree_that_the_target_chooses_is_kept() -> None:
    """The tree is 5 | 6 (7 | 8 (9)), and the target chooses 6, 8, then 3."""
    draft = Draft(
        torch.tensor([[5, 6, 7, 8, 9]]), torch.ones(1, 5, dtype=torch.bool), parents=torch.tensor([[-1, -1, 1, 1, 3]])
    )
    chosen = torch.tensor([[6, 0, 8, 0, 3, 4]])  # after the newest token, 5, 6, 7, 8, 9
    accepted = accept_chosen(draft, chosen, draft.ancestors(), 3)
    assert (accepted.count.item(), accepted.bonus.item()) == (2, 3)
    assert accepted.branch[0, :3].tolist() == [0, 2, 4]
    assert draft.ancestors()[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 1, 1],
    ]


def test_prompt_lookup_proposes_what_followed_the_longest_match_and_its_first_occurrence() -> None:
    tokens = [1, 2, 3, 9, 8, 2, 3, 7, 6, 5, 1, 2, 3]
    look_up = PromptLookupDrafter(3)._look_up
    assert look_up(tokens) == [9, 8, 2]  # after 1 2 3
    assert look_up(tokens[1:]) == [9, 8, 2]  # after the first 2 3
    assert look_up([9] * 6) == [9, 9]  # two tokens follow the first four
    assert look_up([1, 2, 3, 4]) == []
    latest = PromptLookupDrafter(3, latest=True)._look_up
    assert latest(tokens[1:]) == [7, 6, 5]  # after the last 2 3
    assert latest([9] * 6) == [9, 9, 9] and latest([8, 9, 9, 9]) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"prompt 0: must hold at least one token, but is empty; leave it out"),
        (
            [1] * 500,
            r"prompt 0: prompt and answer must fit the target's context of 512 tokens, but are 500 \+ 24; shorten",
        ),
    ],
)
def test_a_prompt_that_cannot_be_decoded_is_refused(target: Target, prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(target, PromptLookupDrafter(3), [prompt])


# The distribution of sampled output: the joint distribution of tokens 2, 3 and 4 after a prompt, over a vocabulary of
# 6.

VOCAB, PROMPT, SAMPLES = 6, [3, 1, 4, 1, 5], 24_000
Accept = Callable[[Draft, torch.Tensor, Sampler], Accepted]


@pytest.fixture(scope="module")
def small_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = make_target(
        tmp_path_factory.mktemp("small"), vocab_size=VOCAB, eos_token_id=None, initializer_range=0.15
    )
    return load_target(directory, torch.float32, torch.device("cpu"))


class CertainDrafts:
    """Drafts greedily while the target samples."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.start, self.capture_layers = drafter, drafter.start, drafter.capture_layers
        self.draft_slots = drafter.draft_slots

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        return self.drafter.draft(verified, Sampler())


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


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.9}, {"top_k": 1}, {"top_p": 1e-9}]
)
def test_filters_keep_the_tokens_that_transformers_keeps(filters: Filters) -> None:
    logits = 3 * torch.randn(4, 5, 50, generator=torch.Generator().manual_seed(0))
    found = Sampler(0.7, **filters).probs(logits)  # type: ignore[arg-type]
    torch.testing.assert_close(found, filtered(logits, 0.7, filters))


@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_k": 99}, {"top_p": 1e-9}, {"top_p": 1e-300}])
@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-9, 1.0, 1e300])
def test_extreme_settings_keep_the_likeliest_token(temperature: float, filters: Filters) -> None:
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    probs = Sampler(temperature, 0, **filters).probs(logits)  # type: ignore[arg-type]
    torch.testing.assert_close(probs.sum(-1), torch.ones(4))
    if temperature < 1e300:  # where all tokens are equally likely
        assert bool((probs.gather(1, logits.argmax(1)[:, None]) == probs.amax(1, keepdim=True)).all())
    if temperature < 1e-8:
        assert Sampler(temperature, 0, **filters).choose(logits).tolist() == logits.argmax(1).tolist()  # type: ignore[arg-type]


def joint_distribution(target: Target, temperature: float, filters: Filters) -> torch.Tensor:
    """Returns the probability of every (token 2, token 3, token 4) by enumeration [V, V, V]."""
    sequences = torch.tensor([[*PROMPT, *tail] for tail in itertools.product(range(VOCAB), repeat=4)])
    logits = target.model(sequences).logits[:, len(PROMPT) - 1 : -1]
    probs = filtered(logits, temperature, filters).gather(2, sequences[:, len(PROMPT) :, None])[..., 0].prod(1)
    return probs.view(VOCAB, VOCAB, VOCAB, VOCAB).sum(0)


def chi_square_p_value(
    target: Target, temperature: float, kind: str = "sampled drafts", filters: Filters | None = None
) -> float:
    """Returns the p-value of sampled speculation, by Wilson and Hilferty's normal approximation. Rare cells are
    pooled."""
    filters = filters or {}
    sampler = Sampler(temperature, 1, **filters)  # type: ignore[arg-type]
    sampled, num_speculative_tokens = HeadDrafter(random_head(target, seed=5), target.parts, 2, sample_drafts=True), 2
    drafters: dict[str, Drafter] = {
        "sampled drafts": sampled,
        **{
            name: HeadDrafter(random_head(target, name, seed=5), target.parts, 2, sample_drafts=True)
            for name in PARALLEL_OR_MLP
        },
        "greedy drafts": CertainDrafts(sampled),
        "tree": TreeDrafter(sampled.head, target.parts, 2, num_nodes=7, top_k=3),
        "hybrid": HybridDrafter(sampled, min_match=1),
        "model": HeadDrafter(as_draft_model(target), target.parts, 2, sample_drafts=True),
    }
    drafter = drafters[kind]
    counts = torch.zeros(VOCAB, VOCAB, VOCAB)
    for _ in range(SAMPLES // 4000):
        for generation in decode(
            target,
            drafter,
            [PROMPT] * 4000,
            num_speculative_tokens=num_speculative_tokens,
            max_new_tokens=4,
            sampler=sampler,
        ):
            counts[tuple(generation.tokens[1:])] += 1
    expected = joint_distribution(target, temperature, filters).flatten() * SAMPLES
    assert not counts.flatten()[expected == 0].any()
    counts, expected = counts.flatten()[expected > 0], expected[expected > 0]
    rare = expected < 8
    observed, expected = (
        torch.cat([cells[~rare], cells[rare].sum()[None]]) if rare.any() else cells for cells in (counts, expected)
    )
    assert len(expected) > 15
    statistic, freedom = ((observed - expected) ** 2 / expected).sum().item(), len(expected) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", ["sampled drafts", *PARALLEL_OR_MLP, "greedy drafts", "tree", "hybrid", "model"])
def test_sampled_speculation_follows_the_targets_joint_distribution(
    small_vocabulary: Target, temperature: float, kind: str
) -> None:
    assert chi_square_p_value(small_vocabulary, temperature, kind) > 1e-3


@pytest.mark.parametrize("kind", ["sampled drafts", "greedy drafts", "tree", "hybrid", "model"])
def test_sampled_speculation_follows_the_distribution_of_top_p_and_top_k(small_vocabulary: Target, kind: str) -> None:
    assert chi_square_p_value(small_vocabulary, 1.0, kind, {"top_k": 5, "top_p": 0.9}) > 1e-3


def accept_everything_likely(draft: Draft, target_probs: torch.Tensor, sampler: Sampler) -> Accepted:
    """A wrong rule that keeps a draft if the target gives it at least half the draft's probability."""
    assert draft.probs is not None
    chosen = draft.tokens[..., None]
    kept = 2 * target_probs[:, :-1].gather(2, chosen) >= draft.probs.gather(2, chosen)
    num_accepted = kept[..., 0].long().cumprod(1).sum(1)
    bonus = sampler.sample(target_probs[torch.arange(len(chosen)), num_accepted])
    return Accepted(num_accepted, bonus, torch.arange(draft.tokens.shape[1] + 1).expand(len(chosen), -1))


def accept_without_residual(draft: Draft, target_probs: torch.Tensor, sampler: Sampler) -> Accepted:
    """A wrong rule that samples the token after a rejection from the target's whole distribution."""
    accepted = real_accept_sampled(draft, target_probs, sampler)
    return replace(accepted, bonus=sampler.sample(target_probs[torch.arange(len(draft.tokens)), accepted.count]))


real_accept_sampled = speculate_module.accept_sampled


@pytest.mark.parametrize("wrong_rule", [accept_everything_likely, accept_without_residual])
def test_a_wrong_acceptance_rule_is_caught(
    small_vocabulary: Target, wrong_rule: Accept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculate_module, "accept_sampled", wrong_rule)
    assert chi_square_p_value(small_vocabulary, 1.0) < 1e-6


def accept_first_child(draft: Draft, target_tokens: torch.Tensor, ancestors: torch.Tensor, num_depths: int) -> Accepted:
    """A wrong rule for trees: if the target chose none of a row's children, the first one is taken every other time."""
    assert draft.parents is not None
    biased = target_tokens.clone()
    for row in range(target_tokens.shape[1]):
        is_child = draft.parents == row - 1  # [B, D]
        is_missed = is_child.any(1) & ~(is_child & (draft.tokens == target_tokens[:, row, None])).any(1)
        is_missed &= torch.arange(len(is_missed)) % 2 == 0
        first = draft.tokens.gather(1, is_child.int().argmax(1)[:, None])[:, 0]
        biased[:, row] = torch.where(is_missed, first, biased[:, row])
    return accept_chosen(draft, biased, ancestors, num_depths)


def test_a_biased_rule_of_trees_is_caught(small_vocabulary: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate_module, "accept_chosen", accept_first_child)
    assert chi_square_p_value(small_vocabulary, 1.0, "tree") < 1e-6
