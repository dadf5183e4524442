"""Tests the benchmark of extraction. Speed is not tested."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import extraction
from mtptrain.planning.costs import target_costs
from mtptrain.target.loading import load_target
from tests.conftest import make_config


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"MEDIAN_TOKENS": 40, "MAX_TOKENS": 200}.items():
        monkeypatch.setattr(extraction, name, size)


def test_every_candidate_is_measured_and_mfu_counts_attention(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(extraction, "print_table", lambda title, columns, shown: rows.extend(shown))
    monkeypatch.setattr(extraction, "matmul_peak", lambda device, dtype: 1e9)
    config = make_config(f"target.path={tiny_target}")
    extraction.main(config, Namespace(is_8b=False, documents=9, repeats=1))
    assert [row["name"] for row in rows] == ["bare forward", "ours", "ours, fp8", "plain loop"]
    assert all(row["speed"] > 0 and row["ratio"] > 0 for row in rows)
    target = load_target(tiny_target, torch.bfloat16, torch.device("cpu")).config
    costs, lengths = target_costs(target), extraction.random_documents(9, target.vocab_size).lengths
    flops = 2 * costs.active_parameters * lengths.sum() + costs.attention_flops * (lengths**2).sum() / 2
    printed = capsys.readouterr().out
    assert f"MFU of the bare forward: {flops / lengths.sum() * rows[0]['speed'] / 1e9:.1%}" in printed
