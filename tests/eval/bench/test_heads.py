"""Tests that `eval.bench.heads` measures every head at every K. No speed is required."""

import json
from pathlib import Path

from mtptrain.heads import HEADS
from tests.conftest import run_program


def test_every_head_is_measured(fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path) -> None:
    sizes = ("bench.draft_depths=[1,3]", "bench.repeats=1", f"bench.out={tmp_path}/heads.json")
    result = run_program("eval.bench.heads", *fresh_run[1], *sizes)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = {row["head"]: row for row in json.loads((tmp_path / "heads.json").read_text())["rows"]}
    assert set(rows) == set(HEADS)
    assert all(row["draft_ms"].keys() == {"1", "3"} and min(row["draft_ms"].values()) > 0 for row in rows.values())
    assert rows["eagle3"]["store_bytes_per_token"] > rows["mtp"]["store_bytes_per_token"]
