"""Tests that compiled layers give the same streams, how documents are batched, and which backend runs a target."""

from pathlib import Path

import pytest
import torch

from mtptrain.config import Backend
from mtptrain.hidden_states.extraction.transformers_streams import (
    TransformersStreams,
    residual_streams,
    token_budget_batches,
)
from mtptrain.run_dir import Run
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from tests.conftest import FAMILIES, make_config, make_target

LENGTHS = [50, 50, 33, 33, 33, 7, 1]
"""Lengths of documents with and without neighbours of equal length."""
DOCUMENTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(LENGTHS)]


@pytest.mark.slow
def test_compiled_layers_give_the_same_streams(tmp_path: Path) -> None:
    directory = make_target(tmp_path)
    found = []
    for compile_layers in (False, True):
        target = load_target(directory, torch.float32, torch.device("cpu"))
        TransformersStreams(target, (0, 1, 2), 1000, compile_layers)
        found.append(residual_streams(target, DOCUMENTS, (0, 1, 2)))
    torch.testing.assert_close(*found, rtol=1e-3, atol=2e-4)


def test_batches_hold_whole_documents_up_to_their_tokens_and_each_document_once() -> None:
    lengths = [5, 40, 17, 40, 1, 40, 17, 64, 3, 40]
    batches = list(token_budget_batches(lengths, batch_tokens=80))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert batches == [[7], [1, 3], [5, 9], [2, 6, 0, 8, 4]]
    assert [len(batch) for batch in token_budget_batches(lengths, batch_tokens=1)] == [1] * len(lengths)
    assert list(token_budget_batches([], 10)) == []


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
