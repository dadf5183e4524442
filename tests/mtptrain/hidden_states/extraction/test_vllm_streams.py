"""Tests which backend runs a target for its hidden states."""

from pathlib import Path

import pytest

from mtptrain.config import Backend
from mtptrain.run import Run
from mtptrain.utils.errors import UserError
from tests.conftest import FAMILIES, make_config, make_target


def test_a_node_of_h100_extracts_by_transformers_where_vllm_cannot_and_says_so_once_but_not_if_the_user_sets_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTPTRAIN_BACKEND", "")
    gemma, llama = make_target(tmp_path / "gemma", *FAMILIES["gemma3_text"]), make_target(tmp_path / "llama")
    capfd.readouterr()
    line = "hidden_states.backend: transformers, because family 'gemma3_text' has layers that vLLM cannot capture\n"
    for target, backend, printed in (
        (llama, Backend.vllm, ""),
        (gemma, Backend.transformers, line),
        (gemma, Backend.transformers, ""),
    ):
        assert Run(make_config(f"target.path={target}", "hardware=h100_8")).backend is backend
        assert capfd.readouterr() == ("", printed)
    config = make_config(f"target.path={gemma}", "hardware=h100_8", "hidden_states.backend=vllm")
    with pytest.raises(UserError, match=r"but family 'gemma3_text' has layers .*; set hidden_states\.backend=transf"):
        _ = Run(config).backend
