"""Tests what is said of a head's gain, from the reports of the acceptance and of an engine's speed."""

from pathlib import Path
from typing import Any

import pytest

from mtptrain.engines.verdict import MORE_TRAINING as MORE
from mtptrain.engines.verdict import bench_of, verdict
from mtptrain.utils.files import write_sealed
from tests.conftest import make_config

LOOKUP = {"prompt_lookup": {"tokens_per_step": 1.47}}
PLAIN = " over 1,200 prompts, where plain decoding has 1"


def row(depth: int, concurrency: int, speed_up: float | None) -> dict[str, Any]:
    return {"num_speculative_tokens": depth, "concurrency": concurrency, "speed_up": speed_up}


BENCH = {"engine": "vllm", "version": "0.32.0", "head_sha256": "cc"}
ROWS = [row(0, 1, 1.0), row(0, 8, 1.0), row(1, 1, 1.2), row(3, 1, 1.4), row(1, 8, 0.97), row(3, 8, 0.9)]


@pytest.mark.parametrize(
    ("length", "baselines", "rows", "said"),
    [
        (1.9, {}, [], f"1.90 tokens per step{PLAIN}."),
        (1.9, {}, ROWS, f"1.90 tokens per step{PLAIN}; vllm 0.32.0 gains 40% with 1 in flight, nothing with 8."),
        (1.9, LOOKUP, [], f"1.90 tokens per step{PLAIN} and prompt lookup 1.47."),
        (1.45, LOOKUP, [], f"Prompt lookup needs no head and gains more: serve without this, or {MORE}."),
        (1.468, LOOKUP, [], f"Prompt lookup needs no head and gains as much: serve without this, or {MORE}."),
        (1.04, {}, [], f"1.04 tokens per step{PLAIN}. The head gains nothing: {MORE}."),
        (1.15, {}, [], f"1.15 tokens per step{PLAIN}. That is little: {MORE}."),
        (1.15, {}, ROWS, f"1.15 tokens per step{PLAIN}; vllm 0.32.0 gains 40% with 1 in flight, nothing with 8."),
        (None, {}, [], "No step was measured."),
    ],
)  # fmt: skip
def test_a_verdict_names_what_is_gained_or_what_to_do(
    length: float | None, baselines: dict[str, Any], rows: list[dict[str, Any]], said: str
) -> None:
    report = {"tokens_per_step": length, "prompts": 1200, "baselines": baselines, "intervals": None}
    found = verdict(report, {**BENCH, "rows": rows} if rows else None)
    assert found.endswith(said)
    with_interval = verdict(report | {"intervals": {"tokens_per_step": [1.234, 2.1]}}, None)
    assert length is None or f"{length:.2f} tokens per step (1.23 to 2.10 with 95 % confidence) over" in with_interval


def test_only_a_measurement_of_the_same_head_with_plain_decoding_counts(tmp_path: Path) -> None:
    config, path = make_config(f"run_dir={tmp_path}"), tmp_path / "serving_bench/report.json"
    assert bench_of(config, {"head_sha256": "cc"}) is None
    path.parent.mkdir()
    write_sealed(path, {**BENCH, "rows": ROWS})
    assert bench_of(config, {"head_sha256": "cc"}) is not None and bench_of(config, {"head_sha256": "dd"}) is None
    write_sealed(path, {**BENCH, "rows": [row(3, 1, None)]})  # of a running server
    assert bench_of(config, {"head_sha256": "cc"}) is None
