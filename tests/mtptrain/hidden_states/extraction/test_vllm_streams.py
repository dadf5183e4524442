"""Tests which backend runs a target for its hidden states."""

from pathlib import Path

import pytest

from mtptrain.config import Backend
from mtptrain.run import Run
from mtptrain.utils.errors import UserError
from tests.conftest import FAMILIES, make_config, make_target


def backend(target: Path, *overrides: str) -> Backend:
    return Run(make_config(f"target.path={target}", *overrides)).backend


def test_a_node_of_h100_extracts_by_transformers_where_vllm_cannot_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTPTRAIN_BACKEND", "")
    gemma, llama = make_target(tmp_path / "gemma", *FAMILIES["gemma3_text"]), make_target(tmp_path / "llama")
    capfd.readouterr()
    assert backend(llama, "hardware=h100_8") is Backend.vllm
    assert capfd.readouterr() == ("", "")
    for _ in range(2):
        assert backend(gemma, "hardware=h100_8") is Backend.transformers
    line = "hidden_states.backend: transformers, because family 'gemma3_text' has layers that vLLM cannot capture\n"
    assert capfd.readouterr() == ("", line)


def test_vllm_that_the_user_sets_is_refused_for_a_target_that_it_cannot_extract_from(tmp_path: Path) -> None:
    target = make_target(tmp_path, *FAMILIES["gemma3_text"])
    with pytest.raises(UserError, match=r"but family 'gemma3_text' has layers .*; set hidden_states\.backend=transf"):
        backend(target, "hardware=h100_8", "hidden_states.backend=vllm")
