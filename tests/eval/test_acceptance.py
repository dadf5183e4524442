"""Tests the longest prompt with which acceptance is measured."""

from types import SimpleNamespace

from eval.acceptance import longest_prompt
from mtptrain.config import AcceptanceConfig


def test_later_turns_fit_the_contexts_of_target_and_heads() -> None:
    target = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=100))
    settings = AcceptanceConfig(max_new_tokens=30, num_speculative_tokens=5)
    head, model = SimpleNamespace(context_tokens=None), SimpleNamespace(context_tokens=80)
    assert longest_prompt(target, [head, None], settings) == 70  # type: ignore[arg-type, list-item]
    assert longest_prompt(target, [head, model], settings) == 45  # type: ignore[list-item, arg-type]
    settings = AcceptanceConfig(max_new_tokens=3, num_speculative_tokens=5)
    assert longest_prompt(target, [head], settings) == 95  # type: ignore[list-item, arg-type]
