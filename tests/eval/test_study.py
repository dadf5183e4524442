"""Tests that studies train and measure every variant and seed once, on prompts that end at the same positions."""

import json
from pathlib import Path

import pytest

from tests.conftest import run_program

VARIANTS = (
    "+study.variants={short:['prompts.max_document_tokens=64'],norms:['head.norms=[norm]'],wild:['train.lr=1e30'],"
    "kept:['head.norms=[norm]','acceptance.num_speculative_tokens=2','acceptance.rebuild_cache=false',"
    "'acceptance.baselines=[prompt_lookup]','acceptance.temperatures=[1]']}",
    "study.name=tiny",
    "study.seeds=[1]",
    "study.prompt_tokens=[16,48]",
    "study.num_prompts=8",
    "train.warmup_steps=0",
    "train.micro_batches_per_step=1",
)


def study(run_dir: Path, overrides: tuple[str, ...], *more: str) -> tuple[int, str, str]:
    result = run_program("eval.study", *overrides, f"run_dir={run_dir}", *VARIANTS, *more)
    return result.returncode, result.stdout, result.stderr


def test_variants_are_trained_and_measured_once_and_those_that_diverge_are_named(
    tiny_run: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    overrides = tiny_run[1]
    status, shown, errors = study(tmp_path, overrides)
    assert status == 0, errors[-3000:]
    directory = tmp_path / "study" / "tiny"
    measured = json.loads((directory / "study.json").read_text())["measured"]
    assert measured["wild"] == {"1": None} and "1 seeds, 1 diverged" in shown
    assert all(set(measured[name]["1"]["acceptance"]) == {"16", "48"} for name in ("short", "norms", "kept"))
    assert "<svg" in (directory / "study.svg").read_text()
    # Variants with equal settings for stages 1 and 2 share the output of these stages. Each has its own head settings.
    assert sorted(path.name for path in (directory / "data").iterdir()) == ["norms", "short"]
    head = json.loads((directory / "norms" / "seed_1" / "train" / "best" / "head.json").read_text())
    assert head["head"]["norms"] == ["norm"] and head["step"] == 20
    # Variants that differ only in how they are measured share one training.
    assert not (directory / "kept" / "seed_1" / "train").exists()
    assert [len(measured[name]["1"]["acceptance_rate_at"]) for name in ("norms", "kept")] == [3, 2]
    report = json.loads(next((directory / "kept" / "seed_1").glob("acceptance_*/report.json")).read_text())
    assert report["rebuild_cache"] is False
    # Other drafters and temperatures are measured where a variant asks for them.
    assert set(measured["norms"]["1"]["tokens_per_s_of"]) == {"head"}
    drafters = ("head", "prompt_lookup", "temperature_1", "temperature_1_sampled_drafts")
    assert tuple(measured["kept"]["1"]["tokens_per_s_of"]) == drafters
    assert measured["kept"]["1"]["length_of"]["head"] == report["acceptance_length"]
    assert "kept, prompt lookup" in shown and "by drafter" in shown
    manifest = json.loads((directory / "short" / "seed_1" / "prompts" / "manifest.json").read_text())
    assert manifest["max_document_tokens"] == 64
    # A shorter prompt is the end of the longer one from the same document.
    prompts = [
        json.loads(line) for line in next((directory / "held_out").glob("prompts_*.jsonl")).read_text().splitlines()
    ]
    assert len(prompts) == 2 * 8
    for short, long in zip(prompts[::2], prompts[1::2], strict=True):
        assert (
            short["id"].split()[0] == long["id"].split()[0]
            and len(short["input_ids"]) == 16
            and len(long["input_ids"]) == 48
        )
        assert long["input_ids"][-16:] == short["input_ids"]

    # Finished runs, including diverged ones, are not run again. Other prompts are measured without training again.
    logs = {path: path.stat().st_mtime_ns for path in directory.rglob("log.txt")}
    status, again, errors = study(tmp_path, overrides)
    assert status == 0 and again == shown, errors[-3000:]
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("log.txt")} == logs and len(logs) == 6
    trained = (directory / "norms" / "seed_1" / "train" / "best" / "head.safetensors").stat().st_mtime_ns
    status, _, errors = study(tmp_path, overrides, "study.num_prompts=4", "study.prompt_tokens=[48]")
    assert status == 0, errors[-3000:]
    assert (directory / "norms" / "seed_1" / "train" / "best" / "head.safetensors").stat().st_mtime_ns == trained
    report = json.loads((directory / "study.json").read_text())
    assert set(report["measured"]["norms"]["1"]["acceptance"]) == {"48"}
    # A variant whose settings have changed is refused.
    status, _, errors = study(tmp_path, overrides, "study.variants.norms=['head.norms=[hnorm]']")
    assert status != 0 and "head must be {" in errors and ", or set another study.name" in errors
    record = directory / "norms" / "seed_1" / "trained.json"
    record.write_text(record.read_text()[:20])
    status, _, errors = study(tmp_path, overrides)
    assert status == 1 and f"error: {record}: must be JSON" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (),
            "study: must have variants, seeds and prompt_tokens, but has 0, 3 and 0 of them; choose one of "
            "recipes/study "
            "(cache_rebuild, depths, drafters, feature_loss, heads, long_context, norms)",
        ),
        (
            ("study=norms", "study.prompt_tokens=[2040]"),
            "must be distinct, at least 4, and leave room for 64 new tokens in the target's context of 2048",
        ),
        (("study=norms", "study.prompt_tokens=[16,16]"), "must be distinct, at least 4, and leave room"),
        (("study=norms", "seed=3"), "seed: must be left out, but is 3; set study.seeds"),
        (("study=norms", "+study.variants.data=[]"), "and must not be data or held_out, but one is 'data'; rename it"),
        (("study=norms", '+study.variants.x=["target.path=/x"]'), "study.variants.x: must have the study's target"),
        (
            ("study=norms", '+study.variants.x=["prompts.validation_fraction=0.001"]'),
            "must have the study's `prompts` settings",
        ),
        (
            ("study=norms", '+study.variants.x=["acceptance.temperature=1"]'),
            "study.variants.x: must have the study's `acceptance` settings",
        ),
        (("study=norms", "study.seeds=[1,1]"), "study.seeds: must be distinct and at least 0, but are [1, 1]"),
        (("study=norms", '+study.variants.x=["train.lr=-1"]'), "train.lr: must be a number of at least 0"),
    ],
)
def test_a_study_that_cannot_be_run_is_refused_before_anything_is_trained(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = run_program("eval.study", f"run_dir={tmp_path}/run", *overrides)
    assert result.returncode != 0 and message in result.stderr and not (tmp_path / "run").exists()
