"""Tests that greedy speculation gives the tokens of plain greedy decoding."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import mtptrain.utils.compile as compile_module
from mtptrain.decoding.draft import Draft, Drafter
from mtptrain.decoding.drafters import HeadDrafter, HybridDrafter, NoDrafter, PromptLookupDrafter, TreeDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation, accept_chosen
from mtptrain.target.model import Target, Verified
from mtptrain.utils.errors import UserError
from tests.conftest import as_draft_model, tiers
from tests.mtptrain.decoding.drafting import PARALLEL_OR_MLP, decode, penalised, random_head


def random_prompts(count: int, vocab_size: int = 256, longest: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


class BranchingCopy:
    """Drafts a tree with two branches at each depth: two wrong tokens in a row, and the target's own choice."""

    read_layers = ()

    def __init__(self, target: Target, num_speculative_tokens: int) -> None:
        self.copy = HeadDrafter(as_draft_model(target), target.parts, num_speculative_tokens)
        self.start, self.draft_slots = self.copy.start, 3 * num_speculative_tokens

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        right = self.copy.draft(verified, sampler).tokens  # [B, K]
        tokens = torch.stack([(right + 1) % 7, (right + 2) % 7, right], 2).flatten(1)
        parents = torch.tensor([[3 * depth - 1, 3 * depth, 3 * depth - 1] for depth in range(right.shape[1])]).flatten()
        return Draft(tokens, torch.ones_like(tokens, dtype=torch.bool), parents=parents.expand_as(tokens))


PROMPTS = random_prompts(24)
COPY = "tree that is often right"
KINDS = ["head", *PARALLEL_OR_MLP, "tree of hydra", "prompt lookup", "tree", "hybrid", "model", COPY]


def plain_answers(target: Target, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    """Returns the answers of transformers' `generate`, the independent reference."""
    answers, settings = [], {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 256, "pad_token_id": 0}
    for ids in (torch.tensor([prompt]) for prompt in prompts):
        processors = LogitsProcessorList([partial(penalised, prompt_length=ids.shape[1], settings=sampling)])
        mask = torch.ones_like(ids)
        output = target.model.generate(ids, attention_mask=mask, logits_processor=processors, **settings)
        answers.append(output[0, ids.shape[1] :].tolist())
    return answers


@pytest.fixture(scope="module")
def greedy(target: Target) -> list[list[int]]:
    return plain_answers(target, PROMPTS)


@pytest.mark.parametrize("batch_size", tiers([1, 8], [8]))
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_speculation_gives_exactly_plain_greedy_decodings_tokens(
    target: Target, greedy: list[list[int]], kind: str, batch_size: int
) -> None:
    head = HeadDrafter(random_head(target), target.parts, 3)
    drafters: dict[str, Callable[[], Drafter]] = {
        "head": lambda: head,
        "tree of hydra": lambda: TreeDrafter(random_head(target, "hydra"), target.parts, 3, num_nodes=20, top_k=4),
        "prompt lookup": lambda: PromptLookupDrafter(3),
        "tree": lambda: TreeDrafter(head.head, target.parts, 3, num_nodes=20, top_k=4),
        "hybrid": lambda: HybridDrafter(head, min_match=2),
        "model": lambda: HeadDrafter(as_draft_model(target), target.parts, 3),
        COPY: lambda: BranchingCopy(target, 3),
    }
    make = drafters.get(kind, lambda: HeadDrafter(random_head(target, kind), target.parts, 3))
    found: list[Generation] = []
    for start in range(0, len(PROMPTS), batch_size):
        found += decode(target, make(), PROMPTS[start : start + batch_size], eos_token_ids=[256])
    assert [generation.tokens for generation in found] == greedy
    accepted = sum(sum(generation.accepted_at) for generation in found)
    assert accepted > (300 if kind in ("model", COPY) else 0), "accept enough drafts, or the test shows little"


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.4},
    {"frequency_penalty": 0.2},
    {"logit_bias": {46: 0.3, 229: -math.inf}},
    {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": -0.05, "logit_bias": {46: 0.3}},
]


@pytest.mark.parametrize("settings", PENALTIES, ids=lambda settings: "+".join(settings))
def test_greedy_speculation_with_biases_and_penalties_gives_plain_decodings_tokens(
    target: Target, settings: dict[str, Any]
) -> None:
    prompts = [[*prompt, *prompt[-3:]] for prompt in random_prompts(12, vocab_size=12, longest=20)]
    expected = plain_answers(target, prompts, **settings)
    assert expected != [each.tokens for each in decode(target, NoDrafter(), prompts, eos_token_ids=[256])]
    model = HeadDrafter(as_draft_model(target), target.parts, 3)
    accepting = {NoDrafter(): 0, PromptLookupDrafter(3): 1, model: 100, BranchingCopy(target, 3): 100}
    for drafter, least in accepting.items():
        found = decode(target, drafter, prompts, sampler=Sampler(**settings), eos_token_ids=[256])
        assert [generation.tokens for generation in found] == expected
        assert sum(sum(generation.accepted_at) for generation in found) >= least, "accept drafts, or little is shown"


def test_nothing_is_compiled_for_the_shapes_of_a_round(target: Target) -> None:
    """Decoding must not use the functions that training compiles, because most rounds would compile them again."""
    frames = torch._dynamo.utils.counters["frames"]
    compile_module.set_compilation(True)
    try:
        before = frames["total"]
        decode(target, HeadDrafter(random_head(target), target.parts, 3), random_prompts(1), max_new_tokens=4)
        assert compile_module._is_on and frames["total"] == before
    finally:
        compile_module.set_compilation(False)


def test_a_draft_that_is_the_target_is_accepted_whole(target: Target) -> None:
    for num_drafts, temperature in ((1, 0.0), (5, 0.0), (3, 1.0)):
        drafter = HeadDrafter(as_draft_model(target), target.parts, num_drafts, sample_drafts=True)
        settings = {"num_speculative_tokens": num_drafts, "sampler": Sampler(temperature)}
        for generation in decode(target, drafter, random_prompts(8), **settings):
            # The logits come from another batch shape: a uniform sample within 1e-6 of 1 could reject a draft.
            assert generation.accepted_at == [generation.rounds] * num_drafts
            assert temperature or generation.rounds == math.ceil(23 / (num_drafts + 1))


def test_one_new_token_needs_no_round_and_padding_of_a_draft_is_not_accepted(target: Target) -> None:
    (generation,) = decode(target, PromptLookupDrafter(3), [[1, 2, 3]], max_new_tokens=1)
    assert len(generation.tokens) == 1 and generation.rounds == generation.empty_rounds == 0
    draft = Draft(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[True, False, False]]))
    accepted = accept_chosen(draft, torch.zeros(1, 4, dtype=torch.long), draft.ancestors(), 3)
    assert (accepted.count.item(), accepted.bonus.item()) == (1, 0), "padding is not accepted even if it is right"


def test_prompt_lookup_proposes_what_followed_the_longest_match_and_its_first_occurrence() -> None:
    tokens = [1, 2, 3, 9, 8, 2, 3, 7, 6, 5, 1, 2, 3]
    look_up = PromptLookupDrafter(3)._look_up
    assert look_up(tokens) == [9, 8, 2]  # the tokens after 1 2 3
    assert look_up(tokens[1:]) == [9, 8, 2]  # the tokens after the first 2 3
    assert look_up([9] * 6) == [9, 9]  # the first match is four tokens long, and only two follow it
    assert look_up([1, 2, 3, 4]) == []
    latest = PromptLookupDrafter(3, latest=True)._look_up
    assert latest(tokens[1:]) == [7, 6, 5]  # the tokens after the last 2 3
    assert latest([9] * 6) == [9, 9, 9] and latest([8, 9, 9, 9]) == []


def test_a_prompt_that_cannot_be_decoded_is_refused(target: Target) -> None:
    for prompt, message in (
        ([], "prompt 0: must hold at least one token, but is empty; leave it out"),
        ([1] * 500, r"prompt 0: .* must fit the target's context of 512 tokens, but are 500 \+ 24; shorten the prompt"),
    ):
        with pytest.raises(UserError, match=message):
            decode(target, PromptLookupDrafter(3), [prompt])
