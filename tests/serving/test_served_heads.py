"""Tests that vLLM drafts with a trained head as mtptrain does: in fp32, rounds and accepted drafts are equal for every
prompt."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedConfig

from mtptrain.decoding.acceptance import summarise
from mtptrain.decoding.divergence import first_answer_divergence, first_draft_divergence
from mtptrain.engines.requests import EngineCounts
from mtptrain.engines.table import format_for
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from tests.serving.cases import (
    BF16_CASES,
    BROKEN_CASES,
    BROKEN_ON,
    CASES,
    HEAD_CONFIGS,
    NOT_HERE,
    PROMPTS,
    Case,
    each,
    is_served_here,
)
from tests.serving.conftest import NUM_GENERATED, Served
from tests.serving.ours import OnDisk, drafted_here
from tests.serving.served_directories.breaks import BREAKS

QUICK = [Case(head, "llama") for head in ("mtp", "eagle", "eagle3")]
PlainGreedy = Callable[[str], list[list[int]]]


@each(CASES, QUICK)
def test_a_served_heads_counters_answers_and_rounds_are_ours(served: dict[str, Served], case: Case) -> None:
    both = served[str(case)]
    ours, theirs, plain = summarise(both.ours), both.theirs, served[f"{case.target}-float32"].theirs.tokens
    assert theirs.counts == EngineCounts(ours.rounds, ours.drafted, ours.accepted_at), theirs.error
    assert 0.04 * ours.rounds < ours.accepted_at[0] < 0.96 * ours.rounds, "some drafts must be rejected, some accepted"
    assert theirs.tokens == plain == [generation.tokens for generation in both.ours]
    assert theirs.accepted_by_round is not None
    for generation, rounds in zip(both.ours, theirs.accepted_by_round, strict=True):
        accepted_at = [sum(accepted > depth for accepted in rounds) for depth in range(case.num_speculative_tokens)]
        assert (len(rounds), accepted_at) == (generation.rounds, generation.accepted_at)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=() if target == "llama" else pytest.mark.slow)
        for target in sorted({case.target for case in CASES})
    ],
)
def test_vllm_without_drafts_decodes_as_transformers_does(
    served: dict[str, Served], plain_greedy: PlainGreedy, target: str
) -> None:
    assert served[f"{target}-float32"].theirs.tokens[:NUM_GENERATED] == plain_greedy(target)
    assert served[f"{target}-float32"].theirs.counts is None


@each(BF16_CASES)
def test_in_bf16_the_acceptance_lengths_lie_within_2_percent(served: dict[str, Served], case: Case) -> None:
    if not is_served_here(case):
        pytest.skip(NOT_HERE)
    ours, theirs = summarise(served[str(case)].ours), served[str(case)].theirs
    assert theirs.error == "" and theirs.counts is not None
    assert theirs.counts.acceptance_length == pytest.approx(ours.acceptance_length, rel=0.02)
    assert 0.04 * ours.rounds < ours.accepted_at[0] < 0.96 * ours.rounds


@each(BF16_CASES)
def test_in_bf16_the_first_divergence_is_one_of_near_logits(
    served: dict[str, Served], target_of: Callable[[str], OnDisk], head_of: Callable[[str, str], Head], case: Case
) -> None:
    """Tests that at the first divergence, the logits of the two tokens differ by at most 5 % of their size.

    Rounding to the 8 significant bits of bf16 can then decide between them.
    """
    if not is_served_here(case):
        pytest.skip(NOT_HERE)
    ours, theirs = served[str(case)].ours, served[str(case)].theirs
    target, head = target_of(case.target).in_dtype(case.dtype), deepcopy(head_of(case.head, case.target)).bfloat16()
    answers = [generation.tokens for generation in ours]
    found = [first_answer_divergence(target, PROMPTS, answers, theirs.tokens)]
    assert theirs.accepted_by_round is not None
    alike = [i for i, (a, b) in enumerate(zip(answers, theirs.tokens, strict=True)) if a == b]
    assert len(alike) > 10
    pick = [[values[i] for i in alike] for values in (PROMPTS, ours, theirs.accepted_by_round)]
    found.append(first_draft_divergence(target, head, case.num_speculative_tokens, *pick))
    for divergence in filter(None, found):
        print(f"{case}, prompt {divergence.prompt}: {divergence}")
        assert abs(divergence.logit_gap) <= 0.05 * abs(divergence.logit), divergence


@each(BROKEN_CASES, [Case("mtp", "llama", broken="columns")])
def test_a_head_served_with_one_part_wrong_has_other_counters(served: dict[str, Served], case: Case) -> None:
    ours, theirs = summarise(served[str(case)].ours), served[str(case)].theirs
    assert theirs.error == "" and theirs.counts is not None
    assert (theirs.counts.rounds, theirs.counts.accepted_at) != (ours.rounds, ours.accepted_at)


@each([Case("mtp_mimo", "mimo")])
def test_the_states_and_the_first_embedding_that_mimo_reads_show_in_the_counters(
    served: dict[str, Served], target_of: Callable[[str], OnDisk], head_of: Callable[[str, str], Head], case: Case
) -> None:
    """Tests that two settings of MiMo's head change the counters.

    Unlike other families in vLLM, MiMo passes the states before the final norm to its MTP layer.
    """
    theirs = served[str(case)].theirs.counts
    assert theirs is not None

    def accepted(**attributes: object) -> list[int]:
        head = deepcopy(head_of(case.head, case.target))
        for name, value in attributes.items():
            setattr(head, name, value)
        return summarise(drafted_here(case, target_of, lambda *_: head)).accepted_at

    assert accepted() == theirs.accepted_at
    assert accepted(read_layers=()) != theirs.accepted_at
    assert accepted(zero_first_embedding=False) != theirs.accepted_at


@pytest.mark.parametrize(
    "kinds", [("mtp",), ("mtp_mimo",), ("eagle",), ("eagle3", "eagle3_norms_before", "eagle3_1"), ("dflash",)], ids=str
)
def test_every_norm_of_every_head_is_left_out_once(target_of: Callable[[str], OnDisk], kinds: tuple[str, ...]) -> None:
    config = target_of(BROKEN_ON.get(kinds[0], "llama")).target.config
    tensors = {
        name
        for kind in kinds
        for name in format_for("vllm", HEAD_CONFIGS[kind], config).tensors(state_of(kind, config))
    }
    norms = {name.removesuffix(".weight") for name in tensors if "norm" in name}
    assert norms and norms <= {name for kind in kinds for name in BREAKS[kind]}


def state_of(kind: str, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    return build_head(HEAD_CONFIGS[kind], config).state_dict()


def test_an_engine_that_fails_says_why_and_the_others_go_on(served: dict[str, Served]) -> None:
    assert "config.json" in served["nothing"].theirs.error and served["nothing"].theirs.tokens == []
    not_here = {str(case) for case in BF16_CASES if not is_served_here(case) and str(case) in served}
    assert {name for name, both in served.items() if both.theirs.error} == {"nothing", *not_here}
