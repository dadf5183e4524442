"""Tests the longest prompt with which acceptance is measured, and what is refused before."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from eval.acceptance import candidates_of, longest_prompt
from mtptrain.config import AcceptanceConfig, Baseline
from mtptrain.target.model import Target
from mtptrain.utils.errors import UserError
from tests.families import EXACT, SIZES


def test_later_turns_fit_the_contexts_of_target_and_heads() -> None:
    target = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=100))
    settings = AcceptanceConfig(max_new_tokens=30, num_speculative_tokens=5)
    head, model = SimpleNamespace(context_tokens=None), SimpleNamespace(context_tokens=80)
    assert longest_prompt(target, [head, None], settings) == 70  # type: ignore[arg-type, list-item]
    assert longest_prompt(target, [head, model], settings) == 45  # type: ignore[list-item, arg-type]
    settings = AcceptanceConfig(max_new_tokens=3, num_speculative_tokens=5)
    assert longest_prompt(target, [head], settings) == 95  # type: ignore[list-item, arg-type]


def test_a_tree_is_refused_for_a_target_that_keeps_states() -> None:
    family, family_settings = EXACT["lfm2"]
    config = AutoConfig.for_model(family, **{**SIZES, **family_settings})
    target = Target(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    settings, found = AcceptanceConfig(baselines=[Baseline.tree]), SimpleNamespace(head=None)
    with pytest.raises(UserError, match=r"acceptance\.baselines: must not contain tree for a target .*; remove it"):
        candidates_of(settings, found, target, None, 0, {})  # type: ignore[arg-type]
