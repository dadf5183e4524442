"""Tests that MLX's counters equal ours, and that each of its traps is found."""

import random
import shlex
import string
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.engines.mlx.engine import ENGINE
from mtptrain.engines.process import started
from mtptrain.heads.base import Head
from tests.conftest import Run
from tests.serving.breaks import BREAKS
from tests.serving.cases import Case, cases_of, each
from tests.serving.ours import OnDisk, Serve, check_equal, decoded_here
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
def test_the_readme_of_a_draft_models_export_starts_a_server(
    run_of: Callable[[str], Run], mlx_python: Path, tmp_path: Path
) -> None:
    program, *arguments = shlex.split(launch_of(run_of("mlx draft_model")[0] / "export/mlx"))
    with started(program, [mlx_python.parent / program, *arguments], tmp_path / "log") as server:
        server.wait()
        asked = {"prompt": "def main", "max_tokens": 8}
        [choice] = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60.0).json()["choices"]
        assert choice["text"]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["eagle3", "dflash"])
def test_the_readme_of_an_export_has_a_program_that_accepts_our_drafts(
    run_of: Callable[[str], Run],
    mlx_python: Path,
    mlx_target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path: Path,
    head: str,
) -> None:
    """With another block size, or a prompt of which the head sees the last token, other drafts are accepted."""
    readme = (run_of(f"mlx {head}")[0] / "export/mlx/README.md").read_text()
    text = "".join(random.Random(1).choices(string.ascii_letters, k=200))
    shown = "print('\\n', *draft.accept_lens)\nEND"
    (tmp_path / "README.md").write_text(readme.replace("def main", text).replace("\nEND", f"\n{shown}"))
    theirs = [int(each) for each in run_readme(tmp_path, mlx_python, tmp_path).rpartition("\n ")[2].split()]
    on_disk = mlx_target_of(TARGETS[head])
    prompt = AutoTokenizer.from_pretrained(on_disk.directory)(text).input_ids
    drafter = HeadDrafter(head_of(head, TARGETS[head]), on_disk.target.parts, 3)
    [ours] = decoded_here(on_disk.target, drafter, 3, prompts=[prompt])
    *rounds, _ = ours.accepted_by_round  # the last may be cut off, where the program's answer is longer
    assert theirs[: len(rounds)] == rounds and max(rounds) == 3, (theirs, rounds)
