"""Tests that the checks for GPU machines pass on a CPU at a tiny size, and that they find errors."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.checks import numerics, pipeline
from eval.checks.findings import Finding, Outcome, Row, at_most, run_check, skipped
from eval.checks.pipeline import Stages
from eval.gpu_check import COMMON, SIZES, checks_of, forwarded, report, run_all
from mtptrain.config import CheckSize
from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.layer_head import LayerHead
from mtptrain.heads.packing import Packing
from mtptrain.utils.errors import UserError
from tests.conftest import make_config, run_program, write_text_files
from tests.programs import run_ranks

CPU = torch.device("cpu")
SMALL = (
    "prompts.max_document_tokens=128",
    "prompts.validation_fraction=0.2",
    "acceptance.prompt_tokens=32",
    "serving.python=/nowhere",
)
NEEDS_MORE = {"extraction by vLLM", "extraction by vLLM, tensor parallel", "served by vLLM"}
"""Names of the checks that need another Python environment, and are skipped here."""


def run_quickly(stage: str, overrides: list[str], num_ranks: int) -> subprocess.CompletedProcess[str]:
    """Runs a stage in forks, which start faster."""
    return run_ranks("mtptrain", [stage, *overrides], num_ranks)


def test_every_check_runs_and_passes_on_a_cpu_or_says_why_it_did_not(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "run_in_subprocess", run_quickly)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    files = write_text_files(tmp_path / "files")
    overrides = [
        "recipe=quickstart",
        *COMMON,
        *SIZES[CheckSize.tiny],
        *SMALL,
        f"target.path={tiny_target}",
        f"prompts.paths=[{files}]",
    ]
    config = make_config(*overrides[1:], f"run_dir={tmp_path}/gpu_check/run")
    rows = run_all(config, overrides, CheckSize.tiny, CPU)
    assert [(row.name, row.reason) for row in rows if row.outcome is Outcome.failed] == []
    assert {row.name for row in rows if row.outcome is Outcome.skipped} == NEEDS_MORE
    assert all(row.figure for row in rows if row.outcome is Outcome.passed)
    assert report(rows, tmp_path / "gpu_check", CPU) == 0
    printed = capsys.readouterr().out
    assert "*** SKIPPED served by vLLM: vLLM IS NOT INSTALLED: serving.python: must be a Python with vLLM" in printed
    written = json.loads((tmp_path / "gpu_check/report.json").read_text())
    assert written["failed"] == 0 and [row["name"] for row in written["rows"]] == [row.name for row in rows]


def test_the_page_has_a_row_for_each_check_in_their_order(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/gpu_check.md").read_text()
    rows = re.findall(r"^\| (?!row )([^|]+) \|", page, re.MULTILINE)
    stages = Stages(make_config(f"run_dir={tmp_path}"), [], CPU)
    assert rows == list(checks_of(stages, CheckSize.full, CPU))


def test_a_stage_that_fails_names_the_log_of_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stage: str, overrides: list[str], num_ranks: int) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, f"{overrides}\n", "error: no space\n\n")

    monkeypatch.setattr(pipeline, "run_in_subprocess", fail)
    stages = Stages(make_config(f"run_dir={tmp_path}/run"), [], CPU)
    for name in ("run", "resumed"):
        match = rf"^mtptrain train: must exit with 0, but exited with 1: error: no space; see .*/{name}_train\.log$"
        with pytest.raises(UserError, match=match):
            stages.run("train", run_dir=tmp_path / name)
    assert f"{tmp_path}/run'" in (tmp_path / "run_train.log").read_text()


def test_what_a_stage_that_hangs_has_printed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LIMIT_S", 2)
    hangs = [sys.executable, "-c", "import time; print('loaded', flush=True); time.sleep(60)"]
    monkeypatch.setattr(pipeline, "stage_command", lambda *_: hangs)
    result = pipeline.run_in_subprocess("train", [], 1)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGKILL, "loaded\n", "killed after 2 s\n")


def without_own_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    packing: Packing,
) -> torch.Tensor:
    unused = sum(0.0 * x.sum() for x in (*own_keys, *own_values))
    return depth_attention(query, key, value, [], [], packing) + unused


def test_attention_that_forgets_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numerics.check_attention(CPU, torch.bfloat16).outcome is Outcome.passed
    monkeypatch.setattr(numerics, "depth_attention", without_own_keys)
    assert numerics.check_attention(CPU, torch.bfloat16).outcome is Outcome.failed


def test_a_loss_whose_teacher_is_shifted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = numerics.plain_kl
    monkeypatch.setattr(
        numerics, "plain_kl", lambda states, parts, teacher, *rest: plain(states, parts, teacher.roll(1, 0), *rest)
    )
    assert numerics.check_loss(CPU, torch.float32).outcome is Outcome.failed


@pytest.mark.parametrize("head", ["mtp", "eagle3"])
def test_decoding_that_reads_other_embeddings_is_found(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = LayerHead.decode

    def shifted(
        self: LayerHead, states: torch.Tensor, embeddings: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return decode(self, states, embeddings.roll(1, -1), *rest)

    monkeypatch.setattr(LayerHead, "decode", shifted)
    assert numerics.check_decode(head, CPU, torch.float32).outcome is Outcome.failed


def test_an_error_is_a_failed_row_and_the_exit_code_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Finding:
        raise RuntimeError("no kernel image is available")

    checks = {
        "kernel": broken,
        "error": lambda: at_most(0.5, 0.02, "error of states"),
        "vLLM": lambda: skipped("not installed"),
    }
    rows = [run_check(name, check) for name, check in checks.items()]
    assert [row.outcome for row in rows] == [Outcome.failed, Outcome.failed, Outcome.skipped]
    assert rows[0].reason == "RuntimeError: no kernel image is available"
    assert rows[1].shown == "error of states 0.5; must be at most 0.02" and rows[2].shown == "not installed"
    directory = tmp_path / "run[bold]"
    directory.mkdir()
    assert report(rows, directory, CPU) == 1
    printed = capsys.readouterr().out
    assert "no kernel image" in printed and "at most 0.02" in printed
    assert f"2 of 3 checks failed; {directory}/report.json" in printed
    assert report([Row(Outcome.passed, name="kernel")], directory, CPU) == 0


def test_the_programs_get_the_overrides_of_the_check_but_not_its_own() -> None:
    given = ["recipe=quickstart", "run_dir=runs/a", "check.size=tiny", "+check.size=tiny", "serving.python=/python"]
    assert forwarded(given) == ["recipe=quickstart", "serving.python=/python"]


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        ([], ["check.size: must be tiny on a machine without a GPU", "but is full; set check.size=tiny"]),
        (
            ["check.size=tiny", "prompts.source=responses", "head=eagle3", "head.draft_vocab_size=64"],
            [
                "recipe: must need neither mtptrain responses nor mtptrain draft-vocab, which the check does not run, "
                "but needs responses and draft-vocab; use recipe=quickstart, or set prompts.source=conversations "
                "head.draft_vocab_size=null"
            ],
        ),
    ],
)
def test_what_the_check_cannot_run_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], messages: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run_program("gpu-check", f"run_dir={tmp_path}/run", *overrides)
    assert result.returncode != 0
    assert all(message in result.stderr for message in messages)
    assert not (tmp_path / "run").exists()
