"""Tests the longest prompt with which acceptance is measured, and how an example is printed on a terminal."""

from types import SimpleNamespace

import pytest

from eval.acceptance import longest_prompt, print_example
from mtptrain.config import AcceptanceConfig


def test_later_turns_fit_the_contexts_of_target_and_heads() -> None:
    target = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=100))
    settings = AcceptanceConfig(max_new_tokens=30, num_speculative_tokens=5)
    head, model = SimpleNamespace(context_tokens=None), SimpleNamespace(context_tokens=80)
    assert longest_prompt(target, [head, None], settings) == 70  # type: ignore[arg-type, list-item]
    assert longest_prompt(target, [head, model], settings) == 45  # type: ignore[list-item, arg-type]
    settings = AcceptanceConfig(max_new_tokens=3, num_speculative_tokens=5)
    assert longest_prompt(target, [head], settings) == 95  # type: ignore[list-item, arg-type]


def test_an_id_that_looks_like_markup_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    print_example([{"id": "a[/b]", "prompt": "text [/i]", "acceptance_length": 2.0, "pieces": [("[/u]", True)]}])
    assert "prompt a[/b]: 2.00 tokens" in capsys.readouterr().out
