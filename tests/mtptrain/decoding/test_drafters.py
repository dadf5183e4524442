"""Tests that drafts and counts equal those of a loop without caches, which drafts with the head's training forward."""

from typing import Any

import pytest
import torch

from mtptrain.decoding.draft import Draft
from mtptrain.decoding.drafters import HeadDrafter, TreeDrafter
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.layer_head import LayerHead
from mtptrain.heads.packing import PackedTokens, Packing
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from tests.conftest import make_target, tiers
from tests.mtptrain.decoding.drafting import decode, draft_after

AT_ONCE = ("peagle", "dflash")
"""Heads that draft all depths in one forward, whose states depend on the number of depths."""


def read_states(target: Target, head: Head, tokens: list[int]) -> torch.Tensor:
    """Returns what the head reads of the target's states after the whole text but its newest token."""
    output = target.model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    if not head.capture_layers:
        return output.last_hidden_state[0]
    return torch.stack([output.hidden_states[layer][0] for layer in head.capture_layers], -2)


def next_draft(target: Target, head: Head, states: torch.Tensor, tokens: list[int], depths: int) -> torch.Tensor:
    """Returns the logits [D] after a text, from the head's training forward.

    The draft starts from the target's last state, and its depths read the tokens after the newest verified one. The
    target has no states of those tokens yet, so they are filled with zeros, which the draft does not see.
    """
    depth = len(tokens) - 1 - len(states)
    packed, ids = torch.cat([states, states.new_zeros(depth, *states.shape[1:])]), torch.tensor(tokens)
    read = PackedTokens(packed, ids[:-1], ids[1:], Packing.of_spans([len(packed)], window=head.shared_window))
    drafted = head(read, target.parts, depths if head.Config.name in AT_ONCE else depth + 1)
    return head.logits(drafted[depth, len(states) - 1], target.parts)


@torch.no_grad()
def plain_speculation(
    target: Target, head: Head, prompt: list[int], depths: int, max_new_tokens: int, eos: set[int]
) -> tuple[list[int], int, list[int], list[list[int]]]:
    """Returns the new tokens, the number of rounds, the accepted drafts at each position, and every draft.

    The whole text is read again for every token.
    """
    tokens = [*prompt, int(target.model(torch.tensor([prompt])).logits[0, -1].argmax())]
    rounds, accepted_at, proposals = 0, [0] * depths, []
    while len(tokens) < len(prompt) + max_new_tokens and not eos & set(tokens[len(prompt) :]):
        states, draft = read_states(target, head, tokens), list[int]()
        for _ in range(depths):
            logits = next_draft(target, head, states, tokens + draft, depths)
            draft.append(int(head.target_tokens(logits.argmax())))
        wanted = target.model(torch.tensor([tokens + draft])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(draft) if token != wanted[i]), depths)
        rounds += 1
        accepted_at = [n + (i < accepted) for i, n in enumerate(accepted_at)]
        proposals.append(draft)
        tokens += [*draft[:accepted], wanted[accepted]]
    new = tokens[len(prompt) :][:max_new_tokens]
    ends = [i for i, token in enumerate(new) if token in eos]
    return (new[: ends[0] + 1] if ends else new), rounds, accepted_at, proposals


HEAD_CASES: dict[str, tuple[str, dict[str, object]]] = {
    "mtp": ("mtp", {}),
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "eagle3 own lm_head": ("eagle3", {"draft_vocab_size": 5}),
    "eagle3 draft vocabulary": ("eagle3", {"draft_vocab_size": 4}),
    "eagle3 norms before": ("eagle3", {"norm_output": False, "norm_before_residual": True}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_before_fc": False}),
    "medusa": ("medusa", {"ttt_steps": 5, "num_layers": 2, "fc_bias": True}),
    "hydra": ("hydra", {"ttt_steps": 5, "num_layers": 2}),
}
TREE_CASES = [case for case, (name, _) in HEAD_CASES.items() if HEADS[name].Config.drafts_trees]
CHAIN_CASES = HEAD_CASES | {
    "draft_model": ("draft_model", {"num_hidden_layers": 2, "hidden_size": 64}),
    **{name: (name, {"capture_layers": [1, 2]}) for name in AT_ONCE},
}
IN_CORE = ("mtp", "eagle3 draft vocabulary", "medusa", "hydra", "draft_model", *AT_ONCE)
PROMPT_LENGTHS = (1, 2, 5, 9, 14, 20, 25, 30)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Returns a random target with a vocabulary of 5, which accepts drafts."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    family = {"vocab_size": 5, "eos_token_id": None, "num_hidden_layers": 4, **sizes}
    directory = make_target(tmp_path_factory.mktemp("target"), "llama", family)
    return load_target(directory, torch.float32, torch.device("cpu"))


def head_and_prompts(target: Target, case: str) -> tuple[Head, list[list[int]]]:
    torch.manual_seed(1)
    name, settings = CHAIN_CASES[case]
    if name == "eagle3":
        settings = {"capture_layers": [1, 2, 3], **settings}
    if issubclass(HEADS[name], LayerHead):
        settings = {"num_attention_heads": 2, "num_key_value_heads": 1, **settings}
    head = build_head(HEADS[name].Config(**settings), target.config).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            if not parameter.any():
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
    if head.d2t is not None:
        head.d2t.copy_(torch.tensor([0, 0, 1, 1]))  # drafts tokens 0, 1, 3, 4
    generator = torch.Generator().manual_seed(1)
    return head, [torch.randint(0, 5, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("depths", tiers([1, 3, 5], [3]))
@pytest.mark.parametrize("case", tiers(CHAIN_CASES, IN_CORE))
def test_drafts_and_counts_equal_those_of_a_loop_without_caches(target: Target, case: str, depths: int) -> None:
    """Token 4 ends some sequences within accepted drafts."""
    head, prompts = head_and_prompts(target, case)
    drafted: list[torch.Tensor] = []
    settings: dict[str, Any] = {"num_speculative_tokens": depths, "max_new_tokens": 20, "eos_token_ids": [4]}
    settings["observe"] = lambda seen: drafted.append(seen.draft.tokens)
    found = decode(target, HeadDrafter(head, target.parts, depths), prompts, **settings)
    assert sum(sum(generation.accepted_at) for generation in found) > 0, "accept some drafts, or the test shows little"
    for row, (prompt, generation) in enumerate(zip(prompts, found, strict=True)):
        tokens, rounds, accepted_at, proposals = plain_speculation(target, head, prompt, depths, 20, {4})
        assert generation.tokens == tokens
        assert (generation.rounds, generation.accepted_at, generation.drafted) == (rounds, accepted_at, depths * rounds)
        assert [sum(count > i for count in generation.accepted_by_round) for i in range(depths)] == accepted_at
        assert [step[row].tolist() for step in drafted[:rounds]] == proposals


Branch = tuple[int, ...]


@torch.no_grad()
def plain_tree(
    target: Target, head: Head, tokens: list[int], depths: int, num_nodes: int, top_k: int
) -> dict[Branch, float]:
    """Returns the branches of the tree with their log-probabilities, each from the head's *training* forward."""
    states, found, frontier = read_states(target, head, tokens), dict[Branch, float](), {(): 0.0}
    for _ in range(depths):
        candidates: dict[Branch, float] = {}
        for branch, score in frontier.items():
            logits = next_draft(target, head, states, [*tokens, *branch], depths)
            logprobs, ids = logits.log_softmax(-1).topk(top_k)
            more = zip(head.target_tokens(ids).tolist(), logprobs.tolist(), strict=True)
            candidates |= {(*branch, token): score + logprob for token, logprob in more}
        found |= candidates
        frontier = dict(sorted(candidates.items(), key=lambda item: -item[1])[:top_k])
    return dict(sorted(found.items(), key=lambda item: -item[1])[:num_nodes])


def branches_of(draft: Draft) -> list[Branch]:
    assert draft.parents is not None
    branches: list[Branch] = []
    for token, parent in zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True):
        branches.append((*(branches[parent] if parent >= 0 else ()), token))
    return branches


@pytest.mark.parametrize("case", tiers(TREE_CASES, IN_CORE))
def test_trees_equal_those_of_a_loop_without_caches(target: Target, case: str) -> None:
    depths, num_nodes, top_k = 3, 9, 3
    head, prompts = head_and_prompts(target, case)
    drafter = TreeDrafter(head, target.parts, depths, num_nodes, top_k)
    for prompt in prompts[1:]:
        with torch.no_grad():
            draft = draft_after(target, drafter, prompt)
        branches, expected = branches_of(draft), plain_tree(target, head, prompt, depths, num_nodes, top_k)
        assert len(set(branches)) == len(branches) == len(expected)
        lowest = min(expected.values())  # leave out ties for the last place
        assert {branch for branch, score in expected.items() if score > lowest + 1e-4} <= set(branches)
        assert all(branch[:-1] in {(), *branches} for branch in branches)
