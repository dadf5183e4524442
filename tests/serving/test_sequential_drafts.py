"""Tests that vLLM's classes of DSpark and DFlash 2 draft as we do, with a plugin for the runner that CPUs have."""

import pytest

from mtptrain.decoding.acceptance import summarise
from mtptrain.engines.requests import EngineCounts
from tests.serving.cases import SEQUENTIAL_BROKEN_CASES, SEQUENTIAL_CASES, Case
from tests.serving.conftest import Served


@pytest.mark.parametrize("case", SEQUENTIAL_CASES, ids=str)
def test_vllms_classes_count_as_we_do(served_with_plugin: dict[str, Served], case: Case) -> None:
    both = served_with_plugin[str(case)]
    ours = summarise(both.ours)
    assert both.theirs.error == "", both.theirs.error
    assert both.theirs.counts == EngineCounts(ours.rounds, ours.drafted, ours.accepted_at)
    assert both.theirs.tokens == [generation.tokens for generation in both.ours]
    assert ours.accepted > 50


@pytest.mark.parametrize("case", SEQUENTIAL_BROKEN_CASES, ids=str)
def test_a_head_with_one_part_wrong_has_other_counters(served_with_plugin: dict[str, Served], case: Case) -> None:
    both = served_with_plugin[str(case)]
    ours = summarise(both.ours)
    assert both.theirs.error == "" and both.theirs.counts is not None
    assert (both.theirs.counts.rounds, both.theirs.counts.accepted_at) != (ours.rounds, ours.accepted_at)
    assert both.theirs.tokens == [generation.tokens for generation in both.ours]
