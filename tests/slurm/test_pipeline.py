"""Tests the Slurm scripts on a real Slurm of two nodes that declare 8 GPUs each, with ranks on this machine's CPU."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PLAIN, TINY_SETTINGS, succeed, write_text_files
from tests.slurm.cluster import ROOT, Slurm, records, running_slurm, stopped_at

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm"), "ab") as slurm:
        yield slurm


def figures(run_dir: Path) -> list[list[object]]:
    """Returns the losses, gradient norm and validated acceptance rates of every step."""
    names = ("step", "loss", "kl_at", "grad_norm", "acceptance_rate_at")
    return [[record.get(name) for name in names] for record in records(run_dir)]


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("shard_*"))}


@dataclass(frozen=True)
class Chain:
    """A pipeline that Slurm has run to its end."""

    run_dir: Path
    overrides: tuple[str, ...]
    stages: list[str]
    """The stages of its jobs, as `pipeline.sh` prints them."""


SETTINGS = (*PLAIN, *TINY_SETTINGS, "train.max_steps=120", "train.validate_every=40")
SETTINGS += ("deepspeed=zero1", "deepspeed.bf16.enabled=false")


@pytest.fixture(scope="module")
def chain(slurm: Slurm, tiny_target: Path) -> Chain:
    """Runs every stage from a folder outside the checkout, and requeues one task of the extraction while it runs."""
    files = write_text_files(slurm.directory / "files", num_files=150)
    overrides = ("recipe=quickstart", "run_dir=chain", f"target.path={tiny_target}", f"prompts.paths=[{files}]")
    overrides += SETTINGS
    variables = {"NODES": "2", "ARRAY_TASKS": "2", "NPROC": "1", "CPU_OPTIONS": "--cpus-per-task=1"}
    printed = slurm.run(ROOT / "slurm/pipeline.sh", "--time=30", *overrides, **variables)
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", printed, re.MULTILINE))
    run_dir, task = slurm.directory / "chain", f"{jobs['hidden_states']}_1"
    slurm.wait(task, lambda: (run_dir / "hidden_states/shard_00003.safetensors").is_file())
    slurm.run("scontrol", "requeue", task)
    slurm.wait(task, lambda: slurm.state(task) == "PENDING")
    slurm.wait_completed(task)
    assert "Restarts=1 " in slurm.run("scontrol", "show", "job", task)
    for job in jobs.values():
        slurm.wait_completed(job)
    return Chain(run_dir, overrides, [*jobs])


def test_every_stage_of_the_chain_ends_and_leaves_its_output(chain: Chain) -> None:
    assert chain.stages == ["prompts", "hidden_states", "train", "acceptance", "export"]
    assert json.loads((chain.run_dir / "hidden_states/manifest.json").read_text())["num_documents"] > 150
    assert [record["step"] for record in records(chain.run_dir) if "loss" in record] == list(range(1, 121))
    assert json.loads((chain.run_dir / "acceptance/report.json").read_text())["prompts"] == 8
    assert (chain.run_dir / "export/vllm/config.json").is_file()
    names = sorted(re.sub(r"\d+", "N", path.name) for path in (chain.run_dir / "slurm").iterdir())
    tasks = ("prompts-N", "hidden_states-N_N", "hidden_states-N_N", "train-N", "acceptance-N", "export-N")
    assert names == sorted(f"{task}.out" for task in tasks)


def test_a_requeued_task_of_the_extraction_goes_on_and_the_store_is_byte_for_byte_that_of_one_process(
    chain: Chain, tmp_path: Path
) -> None:
    shutil.copytree(chain.run_dir / "prompts", tmp_path / "run/prompts")
    overrides = [override for override in chain.overrides if not override.startswith(("recipe=", "run_dir="))]
    succeed("hidden-states", f"run_dir={tmp_path}/run", *overrides)
    alone, shared = bytes_of(tmp_path / "run/hidden_states"), bytes_of(chain.run_dir / "hidden_states")
    assert len(alone) >= 8 and alone == shared


def test_a_training_job_that_is_stopped_in_each_way_resumes_with_bit_identical_metrics(
    slurm: Slurm, chain: Chain
) -> None:
    """Compares two ranks on one node that are stopped three times with two ranks on two nodes that never stop."""
    run_dir = slurm.directory / "disturbed"
    for stage in ("prompts", "hidden_states"):
        shutil.copytree(chain.run_dir / stage, run_dir / stage)
    overrides = ("recipe=quickstart", "run_dir=disturbed", *chain.overrides[2:])
    log, script = slurm.directory / "train.out", ROOT / "slurm/train.sbatch"
    submitted = slurm.run(
        "sbatch", "--parsable", f"--output={log}", script, *overrides, NPROC="2", MTPTRAIN_CHECKOUT=str(ROOT)
    )
    job = submitted.strip()

    stop_commands = (
        ("scancel", "--batch", "--signal=USR1", job),  # as `--signal=B:USR1@120` does before the time limit
        # A job in a partition of higher priority preempts this one.
        ("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"),
        ("scontrol", "requeue", job),
    )
    for number, command in enumerate(stop_commands):
        slurm.wait(job, lambda: len(records(run_dir)) >= (stopped_at(log) or [0])[-1] + 10)
        slurm.run(*command)
        slurm.wait(job, lambda: slurm.state(job) == "PENDING" and len(stopped_at(log)) > number)  # noqa: B023
    slurm.wait_completed(job)

    causes = re.findall(r"train: stopped by (\w+)", log.read_text(errors="replace"))
    assert causes == ["USR1", "preemption", "TERM"]
    steps = stopped_at(log)
    assert len(steps) == 3 and 10 <= steps[0] < steps[1] < steps[2] < 120
    assert "Restarts=3" in slurm.run("scontrol", "show", "job", job)
    assert figures(run_dir) == figures(chain.run_dir)
    last = "train/last/head.safetensors"
    assert (run_dir / last).read_bytes() == (chain.run_dir / last).read_bytes()
