"""Tests that MLX's counters equal ours, and that each of its traps is found."""

import shlex
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from mtptrain.engines.mlx.engine import ENGINE
from mtptrain.engines.process import started
from tests.conftest import Run
from tests.serving.breaks import BREAKS
from tests.serving.cases import Case, cases_of, each
from tests.serving.ours import Serve, check_equal
from tests.serving.workers import launch_of, run_readme

TARGETS = {"eagle3": "qwen3_5", "dflash": "qwen3_5_shared", "draft_model": "llama"}


@each(cases_of("mlx"))
def test_mlx_counts_as_we_do(serve_by_mlx: Serve, case: Case) -> None:
    check_equal(serve_by_mlx, case)


@each({Case(head, TARGETS[head], broken=name): head == "eagle3" for head in TARGETS for name in BREAKS[f"mlx {head}"]})
def test_what_is_moved_by_one_changes_the_counters(serve_by_mlx: Serve, case: Case) -> None:
    ours, theirs, counted = serve_by_mlx(case)
    assert theirs.counts != counted and theirs.tokens == [generation.tokens for generation in ours]


@each({Case(*item): item[0] == "eagle3" for item in TARGETS.items()})
def test_a_head_that_misses_the_prompts_first_token_accepts_other_drafts(
    serve_by_mlx: Serve, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(ENGINE), "worker", Path(__file__).with_name("moved_mlx_worker.py"))
    ours, theirs, counted = serve_by_mlx(case)
    assert theirs.counts != counted and theirs.tokens == [generation.tokens for generation in ours]


@pytest.mark.slow
@pytest.mark.parametrize("head", TARGETS)
def test_the_readme_of_an_export_decodes(
    run_of: Callable[[str], Run], mlx_python: Path, tmp_path: Path, head: str
) -> None:
    export = run_of(f"mlx {head}")[0] / "export/mlx"
    if head != "draft_model":
        assert run_readme(export, mlx_python, tmp_path).strip()
        return
    program, *arguments = shlex.split(launch_of(export))
    with started(program, [mlx_python.parent / program, *arguments], tmp_path / "log") as server:
        server.wait()
        asked = {"prompt": "def main", "max_tokens": 8}
        [choice] = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60.0).json()["choices"]
        assert choice["text"]
