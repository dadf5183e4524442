"""Tests that the extraction benchmark runs and writes all its figures, whatever the speed."""

import json
from pathlib import Path

import pytest
import torch

from eval.bench import extraction
from eval.bench.extraction import bench_reading, bench_vllm, bench_writing, load_bench_target, plain_loop
from eval.bench.random_data import random_documents
from mtptrain.planning.costs import target_costs
from tests.conftest import make_config, make_target, run_program

TINY = (
    "bench.documents=9",
    "bench.median_tokens=40",
    "bench.max_tokens=200",
    "bench.repeats=1",
    "bench.read_tokens=8192",
)


def test_every_candidate_is_measured_and_written(tiny_target: Path, tmp_path: Path) -> None:
    overrides = (
        f"target.path={tiny_target}",
        f"bench.out={tmp_path}/figures.json",
        "serving.python=/nowhere",
        *TINY,
    )
    result = run_program("eval.bench.extraction", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures.pop("bench") == "extraction"
    assert sorted(figures) == [
        "bare_forward_tokens_per_s",
        "batches_bfloat16_gb_per_s",
        "batches_fp8_gb_per_s",
        "batches_fp8_undecoded_gb_per_s",
        "mapped_copy_gb_per_s",
        "mfu",
        "ours_fp8_tokens_per_s",
        "ours_tokens_per_s",
        "plain_loop_tokens_per_s",
    ]
    assert all(value > 0 for value in figures.values())
    for word in (
        "plain loop",
        "vs. bare forward",
        "batches fp8",
        "vLLM is left out: serving.python: must be a Python with vLLM",
    ):
        assert word in result.stdout.replace("\n", " ")


def test_mfu_counts_attention(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(f"target.path={tiny_target}", *TINY)
    monkeypatch.setattr(extraction, "matmul_peak", lambda device, dtype: 1.0)
    monkeypatch.setattr(extraction, "seconds_of", lambda candidates, *args: dict.fromkeys(candidates, 1.0))
    target = load_bench_target(config, torch.device("cpu")).config
    costs, lengths = target_costs(target), random_documents(config, target.vocab_size).lengths
    expected = 2 * costs.active_parameters * lengths.sum() + costs.attention_flops * (lengths**2).sum() / 2
    assert bench_writing(config, torch.device("cpu"), tmp_path)["mfu"] == pytest.approx(expected)


def test_the_plain_loop_saves_documents_without_padding(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(f"target.path={tiny_target}", *TINY)
    target, saved = load_bench_target(config, torch.device("cpu")), []
    documents = random_documents(config, target.config.vocab_size)
    monkeypatch.setattr(torch, "save", lambda content, path: saved.append(content["hidden_states"]))
    plain_loop(target, documents, (1,), tmp_path)
    assert [len(states[0]) for states in saved] == documents.lengths.tolist()
    assert all(each.untyped_storage().nbytes() == each.nbytes for states in saved for each in states)


def test_reading_is_repeated_as_often_as_extraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[object] = []
    monkeypatch.setattr(extraction, "copy_mapped", copied.append)
    bench_reading(make_config(*TINY).bench, tmp_path)
    assert len(copied) == 2, "a warm-up and one run"


def test_vllm_is_left_out_for_a_target_from_which_it_cannot_extract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target_dir = make_target(tmp_path, "qwen2", num_attention_heads=2, head_dim=64)
    assert bench_vllm(make_config(f"target.path={target_dir}", *TINY), tmp_path) == {}
    assert "vLLM is left out: hidden_states.backend: the target must be one that vLLM" in capsys.readouterr().out


def test_an_unknown_target_of_the_bench_is_refused(tmp_path: Path) -> None:
    result = run_program("eval.bench.extraction", "bench.target=9b")
    assert result.returncode != 0
    assert "bench.target: must be `8b` or left out for the recipe's target, but is '9b'" in result.stderr
