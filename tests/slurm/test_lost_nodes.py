"""Nodes and tasks that are lost, and run folders on a node's own disk, on a real Slurm of three nodes."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PLAIN, run_program
from tests.slurm.cluster import ROOT, Slurm, jobs_of, records, running_slurm, wait_for

pytestmark = pytest.mark.slow

NUM_STEPS = 40
TRAINING = (f"train.max_steps={NUM_STEPS}", "train.save_every=5", "train.validation_prompts=0")
TRAINING += ("deepspeed=zero1", "deepspeed.bf16.enabled=false")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Three nodes, each of which Slurm gives up for lost when it has not answered for 20 seconds."""
    with running_slurm(tmp_path_factory.mktemp("slurm"), "abc", "SlurmdTimeout=20\nKillWait=5") as slurm:
        yield slurm


@pytest.fixture
def nodes(slurm: Slurm) -> Iterator[None]:
    """Bring every node back afterwards."""
    yield
    for name, node in list(slurm.nodes.items()):
        if node.process.poll() is not None:
            slurm.add_node(name)
        if "DRAIN" in slurm.run("scontrol", "show", "node", name):
            set_state(slurm, name, "RESUME")
    wait_for(lambda: slurm.run("sinfo", "--noheader", "--format", "%T %D").strip() == "idle 3")


def set_state(slurm: Slurm, node: str, state: str) -> None:
    slurm.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")


@pytest.fixture(scope="module")
def undisturbed(tiny_run: tuple[Path, tuple[str, ...]], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run with one rank."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    shutil.copytree(tiny_run[0], run_dir)
    result = run_program("train", f"run_dir={run_dir}", *tiny_run[1], *TRAINING)
    assert result.returncode == 0, result.stderr[-3000:]
    return losses(run_dir)


def losses(run_dir: Path) -> list[float]:
    found = [record for record in records(run_dir) if "loss" in record]
    assert [record["step"] for record in found] == list(range(1, NUM_STEPS + 1))
    return [float(str(record["loss"])) for record in found]


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    ("lost", "is_silent"), [("b", False), ("a", True)], ids=["a node that ends", "a head node that falls silent"]
)
def test_training_that_loses_a_node_resumes_on_another_with_another_number_of_ranks(
    slurm: Slurm, tiny_run: tuple[Path, tuple[str, ...]], undisturbed: list[float], lost: str, is_silent: bool
) -> None:
    """Two nodes at first; one is lost, the other is drained, and the third is all that is left."""
    run_dir = slurm.directory / f"lost_{lost}"
    shutil.copytree(tiny_run[0], run_dir)
    set_state(slurm, "c", "DRAIN")
    command = ("sbatch", "--parsable", "--nodes=1-2", ROOT / "slurm/train.sbatch", "recipe=quickstart")
    overrides = (f"run_dir=lost_{lost}", *PLAIN, *tiny_run[1], *TRAINING)
    job = slurm.run(*command, *overrides, NPROC="1", MTPTRAIN_CHECKOUT=str(ROOT)).strip()
    slurm.wait(job, lambda: slurm.state(job) == "RUNNING")
    assert slurm.shown(job, "NodeList") == "a,b"
    set_state(slurm, "ab".replace(lost, ""), "DRAIN")
    set_state(slurm, "c", "RESUME")
    slurm.wait(job, lambda: len(records(run_dir)) >= 12)
    (slurm.cut_off if is_silent else slurm.lose)(lost)
    slurm.wait_completed(job)

    assert (slurm.shown(job, "NodeList"), slurm.shown(job, "Restarts")) == ("c", "1")
    assert losses(run_dir) == pytest.approx(undisturbed, rel=1e-3)


def test_a_task_of_an_extraction_that_dies_leaves_the_rest_and_the_printed_command_completes_the_store(
    slurm: Slurm, tiny_run: tuple[Path, tuple[str, ...]]
) -> None:
    run_dir = slurm.directory / "dead_task"
    shutil.copytree(tiny_run[0] / "prompts", run_dir / "prompts")
    overrides = ("recipe=quickstart", "run_dir=dead_task", *PLAIN, *tiny_run[1])
    variables = {"ARRAY_TASKS": "2", "SKIP": "prompts acceptance export", "NPROC": "1"}
    jobs = jobs_of(slurm.run(ROOT / "slurm/pipeline.sh", *overrides, **variables))
    dead, other = f"{jobs['hidden_states']}_1", f"{jobs['hidden_states']}_0"
    steps = ("squeue", "--steps", "--noheader", f"--jobs={dead}", "--format=%i %j")
    slurm.wait(dead, lambda: "python" in slurm.run(*steps))

    # Kill the step that runs torchrun, but not the job's shell, as the kernel does when memory runs out.
    def is_dead() -> bool:
        # Send the signal in every round, because a step that is still starting may miss it.
        slurm.try_to_run("scancel", "--signal=KILL", f"{dead}.0")
        return slurm.state(dead) == "FAILED"

    wait_for(is_dead, report=slurm.report)
    wait_for(lambda: slurm.state(jobs["train"]) == "CANCELLED", report=slurm.report)
    slurm.wait_completed(other)

    assert slurm.state(dead) == "FAILED"
    assert not (run_dir / "hidden_states/manifest.json").exists()
    assert "unfinished parts   1; to rerun a failed one, set hidden_states.part=N" in log_of(run_dir, other).read_text()
    printed = log_of(run_dir, dead).read_text(errors="replace")
    assert re.search(r"task 1 of 0-1 has failed with exit code \d+, so the store stays unfinished", printed)
    command = re.findall(r"^    ARRAY_TASKS=1 .*", printed, re.MULTILINE)[-1]
    assert "draft_vocab'" in command
    # Only the hidden states are written again: the stages after them are left out too.
    command = command.replace("draft_vocab'", "draft_vocab train acceptance export'")
    again = jobs_of(slurm.run("bash", "-c", command.replace("[SBATCH OPTIONS]", "--time=30"), NPROC="1"))
    slurm.wait_completed(again["hidden_states"])
    whole, completed = (
        {path.name: path.read_bytes() for path in (directory / "hidden_states").glob("*.safetensors")}
        for directory in (tiny_run[0], run_dir)
    )
    assert len(whole) > 4 and completed == whole
    assert json.loads((run_dir / "hidden_states/manifest.json").read_text())["num_documents"]


def log_of(run_dir: Path, task: str) -> Path:
    return run_dir / f"slurm/hidden_states-{task}.out"


@pytest.mark.usefixtures("nodes")
def test_a_chain_whose_run_folder_is_on_a_nodes_own_disk_stays_on_the_node_of_its_first_job(
    slurm: Slurm, tiny_run: tuple[Path, tuple[str, ...]]
) -> None:
    for name in "ab":
        set_state(slurm, name, "DRAIN")
    run_dir = slurm.directory / "local/run"
    overrides = ("recipe=quickstart", f"run_dir={run_dir}", *PLAIN, *tiny_run[1])
    jobs = jobs_of(slurm.run(ROOT / "slurm/pipeline.sh", *overrides, NPROC="1", MTPTRAIN_LOCAL_RUN_DIR="1"))
    slurm.wait(jobs["prompts"], lambda: slurm.state(jobs["prompts"]) != "PENDING")
    for name in "ab":
        set_state(slurm, name, "RESUME")
    slurm.wait_completed(jobs["hidden_states"])
    assert [slurm.shown(jobs[stage], "NodeList") for stage in ("prompts", "hidden_states")] == ["c", "c"]
    assert [slurm.shown(jobs[stage], "ReqNodeList") for stage in ("train", "acceptance", "export")] == ["c", "c", "c"]
    slurm.run("scancel", *jobs.values())
    assert not run_dir.exists()  # on the shared disk
    assert "manifest.json" in slurm.run("srun", "--nodelist=c", "ls", run_dir / "hidden_states").split()
    log = next((slurm.directory / "logs/run").glob("prompts-*.out"))
    assert "the later jobs of the chain run on c too" in log.read_text()
