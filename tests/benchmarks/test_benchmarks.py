"""Tests the benchmarks of extraction and of the training step. Speed is not tested."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import extraction
from benchmarks.command import tensor_bytes
from mtptrain.planning.costs import target_costs
from mtptrain.target.loading import load_target
from tests.conftest import make_config, succeed


@pytest.mark.slow
def test_every_case_is_measured() -> None:
    sizes = ["--hidden-sizes", "64", "--tokens", "96", "--longest-tokens", "8192", "--repeats", "1"]
    result = succeed("benchmarks.training_step", *sizes)
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(row["tokens"], row["supervised"]) for row in rows] == [
        *((96, 96), (2000, 200), (512, 512), (5120, 512), (1024, 1024)),
        *((2048, 1024), (2048, 2048), (4096, 1024), (8192, 1024)),
    ]
    assert all(row["tokens_per_s"] > 0 and row["megabytes"] > 0 for row in rows)
    assert "A prompt token takes" in result.stdout and "matmul peak" in result.stdout


def test_only_tensors_that_are_alive_together_add_up() -> None:
    size, cpu = 50_000_000, torch.device("cpu")
    kept = torch.ones(size, dtype=torch.uint8)

    def one_after_the_other() -> None:
        for _ in range(2):
            torch.ones_like(kept)

    assert tensor_bytes(lambda: (torch.ones_like(kept), torch.ones_like(kept)), cpu) == 2 * size
    assert size <= tensor_bytes(one_after_the_other, cpu) < 1.01 * size


def test_every_candidate_is_measured_and_mfu_counts_attention(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = []
    for name, size in {"MEDIAN_TOKENS": 40, "MAX_TOKENS": 200}.items():
        monkeypatch.setattr(extraction, name, size)
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
