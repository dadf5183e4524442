"""The Slurm scripts on a real Slurm: two nodes that declare 8 GPUs each, on this machine, with ranks on its CPU.

Debian's packages are installed where they are missing, by root; daemons, keys and state live in a temporary folder.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PLAIN, TINY_SETTINGS, run_program, write_text_files
from tests.data_prep.speaking import fake_server, make_speaking_target

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for path in (ROOT / "slurm").iterdir() if path.suffix in {".sh", ".sbatch"})
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd_%n.pid
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool_%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
GresTypes=gpu
NodeName=first NodeHostName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 Gres=gpu:8
NodeName=second NodeHostName={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 Gres=gpu:8
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
"""
# A job that is requeued waits for cred_expire seconds, of which 5 is the least.


@dataclass(frozen=True)
class Slurm:
    """A running Slurm."""

    directory: Path
    environment: dict[str, str]

    def run(self, *command: str | Path, **variables: str) -> str:
        """Output of a command that must succeed."""
        result = subprocess.run(
            command, env={**self.environment, **variables}, cwd=self.directory, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"
        return result.stdout

    def state(self, job: str) -> str:
        """Of the job, or of all tasks of the array where they agree."""
        found = set(re.findall(r"JobState=(\w+)", self.run("scontrol", "show", "job", job)))
        return found.pop() if len(found) == 1 else "MIXED"

    def wait(self, job: str, is_reached: Callable[[], bool], timeout_s: float = 180) -> None:
        """Wait for something that the job does; it must not end badly before."""
        end = time.monotonic() + timeout_s
        while not is_reached():
            state = self.state(job)
            assert state not in {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}, f"{job} is {state}\n{self.logs()}"
            assert time.monotonic() < end, f"{job} is {state} after {timeout_s} s\n{self.run('squeue')}\n{self.logs()}"
            time.sleep(0.05)

    def wait_completed(self, job: str) -> None:
        self.wait(job, lambda: self.state(job) == "COMPLETED")

    def logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.directory.rglob("*.out")))


def require_packages() -> None:
    """Install what is missing, or skip."""
    if all(map(shutil.which, PROGRAMS)):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        pytest.skip("*** THE SLURM SCRIPTS ARE NOT TESTED: this needs slurm-wlm and munge, or root and apt-get to install them ***")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # of runlevel 1: no services are started
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", "slurm-wlm", "munge"]):
        command = ["timeout", "300", "apt-get", "-o", "Acquire::Retries=1", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"*** THE SLURM SCRIPTS ARE NOT TESTED: apt-get {arguments[0]} failed: {result.stderr.strip()[-300:]} ***")


def make_devices(directory: Path) -> None:
    """Eight of /dev/null: Slurm wants device files for GPUs."""
    directory.mkdir()
    try:
        for index in range(8):
            os.mknod(directory / f"nvidia{index}", 0o666 | 0o020000, os.stat("/dev/null").st_rdev)
    except PermissionError:
        pytest.skip("*** THE SLURM SCRIPTS ARE NOT TESTED: device files must be made, which only root may do ***")


def free_ports(number: int) -> list[int]:
    listeners = [socket.socket() for _ in range(number)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    require_packages()
    directory = tmp_path_factory.mktemp("slurm")
    make_devices(directory / "dev")
    (directory / "state").mkdir()
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    (directory / "slurm.conf").write_text(SLURM_CONF.format(host=host, directory=directory, ports=free_ports(3)))
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/dev/nvidia[0-7]\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "NPROC"))}
    environment |= {"SLURM_CONF": f"{directory}/slurm.conf", "MTPTRAIN_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    files = {"key": "munge.key", "socket": "munge.socket", "pid": "munged.pid", "seed": "munge.seed", "log": "munged.log"}
    munge_options = [f"--{name}{'' if name == 'socket' else '-file'}={directory}/{file}" for name, file in files.items()]
    running = Slurm(directory, environment)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(
            (
                ["munged", "--foreground", "--force", *munge_options],
                ["slurmctld", "-D", "-i"],
                ["slurmd", "-D", "-N", "first"],
                ["slurmd", "-D", "-N", "second"],
            )
        ):
            with (directory / f"daemon_{number}.log").open("wb") as log:
                daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_for_daemons(directory, (directory / "munge.socket").exists)
        wait_for_daemons(directory, lambda: are_idle(running))
        yield running
    finally:
        end_daemons(running, daemons)


def are_idle(slurm: Slurm) -> bool:
    result = subprocess.run(
        ["sinfo", "--noheader", "--format", "%T %D"], env=slurm.environment, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() == "idle 2"


def wait_for(is_reached: Callable[[], bool], timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not is_reached():
        assert time.monotonic() < end
        time.sleep(0.1)


def wait_for_daemons(directory: Path, is_reached: Callable[[], bool]) -> None:
    """Slurm itself cannot run on every machine (a container without privileges, say), which is no fault of the scripts."""
    try:
        wait_for(is_reached, 60)
    except AssertionError:
        logs = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-500:]}" for path in sorted(directory.glob("*.log")))
        pytest.skip(f"*** THE SLURM SCRIPTS ARE NOT TESTED: Slurm's daemons do not start here: {logs} ***")


def end_daemons(slurm: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    """Kill what jobs still run, then end the daemons, the last first."""
    squeue = ["squeue", "--noheader", "--format", "%i"]
    for _ in range(50):
        jobs = subprocess.run(squeue, env=slurm.environment, capture_output=True, text=True, check=False).stdout.split()
        if not jobs:
            break
        for options in (["--full", "--signal=KILL"], []):
            subprocess.run(["scancel", *options, *jobs], env=slurm.environment, capture_output=True, check=False)
        time.sleep(0.2)
    for daemon in reversed(daemons):
        daemon.terminate()
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def records(run_dir: Path) -> list[dict[str, object]]:
    path = run_dir / "train/metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def figures(run_dir: Path) -> list[list[object]]:
    """Every loss, by depth too, and what validation measured, step by step."""
    names = ("step", "loss", "kl_at", "grad_norm", "acceptance_rate_at")
    return [[record.get(name) for name in names] for record in records(run_dir)]


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("shard_*"))}


@dataclass(frozen=True)
class Chain:
    """A pipeline that Slurm has run to its end."""

    run_dir: Path
    overrides: tuple[str, ...]
    printed: str
    restarts: int
    """Of the extraction's second task."""


SETTINGS = (
    *PLAIN,
    *TINY_SETTINGS,
    "train.max_steps=120",
    "train.validate_every=40",
    "deepspeed=zero1",
    "deepspeed.bf16.enabled=false",
)


@pytest.fixture(scope="module")
def chain(slurm: Slurm, tiny_target: Path) -> Chain:
    """Every stage, started from another folder than the checkout; one task of the extraction is requeued on its way."""
    files = write_text_files(slurm.directory / "files", num_files=150)
    overrides = ("recipe=quickstart", "run_dir=chain", f"target.path={tiny_target}", f"prompts.paths=[{files}]", *SETTINGS)
    printed = slurm.run(
        ROOT / "slurm/pipeline.sh", "--time=30", *overrides, NODES="2", ARRAY_TASKS="2", NPROC="1", CPU_OPTIONS="--cpus-per-task=1"
    )
    jobs = dict(line.split() for line in printed.splitlines() if len(line.split()) == 2)
    run_dir, task = slurm.directory / "chain", f"{jobs['hidden_states']}_1"
    slurm.wait(task, lambda: (run_dir / "hidden_states/shard_00003.safetensors").is_file())
    slurm.run("scontrol", "requeue", task)
    slurm.wait(task, lambda: slurm.state(task) == "PENDING")
    slurm.wait_completed(task)
    restarts = int(re.findall(r"Restarts=(\d+)", slurm.run("scontrol", "show", "job", task))[0])
    for job in jobs.values():
        slurm.wait_completed(job)
    return Chain(run_dir, overrides, printed, restarts)


def test_every_stage_of_the_chain_ends_and_leaves_its_output(chain: Chain) -> None:
    stages = re.findall(r"^(\w+) +\d+$", chain.printed, re.MULTILINE)
    assert stages == ["prompts", "hidden_states", "train", "acceptance", "export"]
    assert re.search(r"to follow: squeue --jobs=\d+(,\d+){4}; tail -F chain/slurm/\*\.out\n", chain.printed)
    assert json.loads((chain.run_dir / "hidden_states/manifest.json").read_text())["num_documents"] > 150
    assert [record["step"] for record in records(chain.run_dir) if "loss" in record] == list(range(1, 121))
    assert json.loads((chain.run_dir / "acceptance/report.json").read_text())["prompts"] == 8
    assert (chain.run_dir / "export/vllm/config.json").is_file()
    names = sorted(re.sub(r"\d+", "N", path.name) for path in (chain.run_dir / "slurm").iterdir())
    assert names == sorted(
        ["prompts-N.out", "hidden_states-N_N.out", "hidden_states-N_N.out", "train-N.out", "acceptance-N.out", "export-N.out"]
    )


def test_a_preempted_task_of_the_extraction_goes_on_and_the_store_is_byte_for_byte_that_of_one_process(
    chain: Chain, tmp_path: Path
) -> None:
    assert chain.restarts == 1
    shutil.copytree(chain.run_dir / "prompts", tmp_path / "run/prompts")
    overrides = [override for override in chain.overrides if not override.startswith(("recipe=", "run_dir="))]
    result = run_program("data_prep.hidden_states", f"run_dir={tmp_path}/run", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    alone, shared = bytes_of(tmp_path / "run/hidden_states"), bytes_of(chain.run_dir / "hidden_states")
    assert len(alone) >= 8 and alone == shared


def test_a_job_gets_the_eight_gpus_that_its_script_asks_for(slurm: Slurm) -> None:
    script = slurm.directory / "gpus.sbatch"
    script.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES"\n')
    options = re.search(r"--gpus-per-node=\d+", (ROOT / "slurm/train.sbatch").read_text())
    assert options
    slurm.run("sbatch", "--wait", options[0], f"--output={slurm.directory}/gpus.txt", script)
    assert (slurm.directory / "gpus.txt").read_text() == "0,1,2,3,4,5,6,7\n"


def test_a_training_job_that_is_stopped_in_each_way_resumes_with_bit_identical_metrics(slurm: Slurm, chain: Chain) -> None:
    """Two ranks on one node, disturbed three times, against two ranks on two nodes, undisturbed."""
    run_dir = slurm.directory / "disturbed"
    for stage in ("prompts", "hidden_states"):
        shutil.copytree(chain.run_dir / stage, run_dir / stage)
    overrides = ("recipe=quickstart", "run_dir=disturbed", *chain.overrides[2:])
    log, script = slurm.directory / "train.out", ROOT / "slurm/train.sbatch"
    submitted = slurm.run("sbatch", "--parsable", f"--output={log}", script, *overrides, NPROC="2", MTPTRAIN_CHECKOUT=str(ROOT))
    job = submitted.strip()

    stop_commands = (
        ("scancel", "--batch", "--signal=USR1", job),  # what `--signal=B:USR1@120` does ahead of the time limit
        ("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"),  # preempts
        ("scontrol", "requeue", job),
    )
    for number, command in enumerate(stop_commands):
        slurm.wait(job, lambda: len(records(run_dir)) >= (stopped_at(log) or [0])[-1] + 10)
        slurm.run(*command)
        slurm.wait(job, lambda: slurm.state(job) == "PENDING" and len(stopped_at(log)) > number)  # noqa: B023
    slurm.wait_completed(job)

    assert re.findall(r"mtptrain.train: stopped by (\w+)", log.read_text(errors="replace")) == ["USR1", "preemption", "TERM"]
    steps = stopped_at(log)
    assert len(steps) == 3 and 10 <= steps[0] < steps[1] < steps[2] < 120
    assert "Restarts=3" in slurm.run("scontrol", "show", "job", job)
    assert figures(run_dir) == figures(chain.run_dir)
    last = "train/last/head.safetensors"
    assert (run_dir / last).read_bytes() == (chain.run_dir / last).read_bytes()


def stopped_at(log: Path) -> list[int]:
    """The steps at which a training job saved because of a signal."""
    return (
        [int(step) for step in re.findall(r"step (\d+): SIG\w+, checkpoint saved", log.read_text(errors="replace"))]
        if log.is_file()
        else []
    )


def test_a_job_that_fails_by_itself_is_not_requeued_and_what_waits_for_it_is_cancelled(slurm: Slurm, chain: Chain) -> None:
    overrides = ("recipe=quickstart", "run_dir=chain", *chain.overrides[2:], "seed=1")
    printed = slurm.run(ROOT / "slurm/pipeline.sh", *overrides, SKIP="prompts hidden_states acceptance", NPROC="1")
    jobs = dict(line.split() for line in printed.splitlines() if len(line.split()) == 2)
    assert list(jobs) == ["train", "export"]
    wait_for(lambda: slurm.state(jobs["export"]) == "CANCELLED", timeout_s=120)
    assert slurm.state(jobs["train"]) == "FAILED"
    assert "Restarts=0" in slurm.run("scontrol", "show", "job", jobs["train"])
    log = (chain.run_dir / f"slurm/train-{jobs['train']}.out").read_text()
    assert "to go on from this checkpoint, seed must be 0, but is 1" in log


def test_answers_of_a_server_go_on_after_a_stop_ahead_of_the_time_limit(slurm: Slurm) -> None:
    chats, log = slurm.directory / "chats.jsonl", slurm.directory / "answers.out"
    rows = [{"messages": [{"role": "user", "content": f"question {row}"}]} for row in range(60)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with fake_server() as server:
        server.delay_s = 0.2
        sources = (f"target.path={make_speaking_target(slurm.directory / 'speaking')}", f"prompts.paths=[{chats}]")
        asking = (
            "prompts.source=responses",
            f"responses.url={server.url}",
            "responses.concurrency=2",
            "responses.max_new_tokens=24",
        )
        command = ("sbatch", "--parsable", "--cpus-per-task=1", f"--output={log}", ROOT / "slurm/responses_server.sbatch")
        overrides = ("recipe=quickstart", "run_dir=answers", *sources, *asking)
        job = slurm.run(*command, *overrides, MTPTRAIN_CHECKOUT=str(ROOT)).strip()
        slurm.wait(job, lambda: len(server.requests) > 10)
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        slurm.wait(job, lambda: slurm.state(job) == "PENDING")
        slurm.wait_completed(job)
    assert "data_prep.responses: stopped by USR1, put back into the queue" in log.read_text(errors="replace")
    assert len((slurm.directory / "answers/responses/conversations.jsonl").read_text().splitlines()) == 60
    assert len(server.requests) <= 60 + 2 * 2  # what was in flight is asked again


PLAN = """runs/quickstart
responses data_prep.responses server
prompts data_prep.prompts process
hidden_states data_prep.hidden_states ranks
train mtptrain.train ranks
acceptance eval.acceptance ranks
export mtptrain.export process
"""


@dataclass(frozen=True)
class Stand:
    """Slurm's commands and slurm/stages.py as scripts that note what they are asked: what a script does before those have a part."""

    directory: Path
    environment: dict[str, str]

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command, environment = [ROOT / "slurm" / script, *arguments], {**self.environment, **variables}
        return subprocess.run(command, env=environment, cwd=self.directory, capture_output=True, text=True, check=False)

    def asked(self, command: str) -> list[str]:
        """What the command has been given, call by call."""
        path = self.directory / f"{command}.txt"
        return path.read_text().splitlines() if path.is_file() else []


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    for name in ("sbatch", "srun", "scontrol", "scancel"):
        noted = tmp_path / f"{name}.txt"
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$*" >>{noted}\n[ {name} != sbatch ] || wc -l <{noted}\n')
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "NPROC"))}
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "MTPTRAIN_PYTHON": str(tmp_path / "python")}
    environment |= {"MTPTRAIN_CHECKOUT": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2"}
    (tmp_path / "python").write_text(f"#!/bin/sh\ncat <<'END'\n{PLAN}END\n")
    (tmp_path / "python").chmod(0o755)
    return Stand(tmp_path, environment)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epochs=0", "train.epochs: must be a number of at least 1, but is 0"),
        ("plan=true", "plan: must be false for jobs, but is true; run python -m data_prep.hidden_states with the same settings"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_queued(stand: Stand, override: str, expected: str) -> None:
    result = stand.run("pipeline.sh", "recipe=quickstart", override, MTPTRAIN_PYTHON=sys.executable)
    assert result.returncode != 0
    assert expected in result.stderr
    assert result.stdout == "" and stand.asked("sbatch") == []


def test_a_dependency_that_is_given_holds_for_the_first_job_alone(stand: Stand) -> None:
    result = stand.run(
        "pipeline.sh", "--dependency=afterok:77", "--time=30", "recipe=quickstart", GPU_OPTIONS="--dependency=singleton"
    )
    assert result.returncode == 0, result.stderr
    last = [re.findall(r"--dependency=(\S+)", line)[-1] for line in stand.asked("sbatch")]
    assert last == ["afterok:77", "afterok:1", "afterok:2", "afterok:3", "afterok:4", "afterok:5"]
    assert all("--time=30" in line for line in stand.asked("sbatch"))


def test_answers_of_a_server_are_one_process_that_is_asked_to_stop_ahead_of_time(stand: Stand) -> None:
    assert stand.run("pipeline.sh", "recipe=quickstart", CPU_OPTIONS="--mem=9G").returncode == 0
    first = stand.asked("sbatch")[0]
    assert "--mem=9G" in first and f"{ROOT}/slurm/responses_server.sbatch recipe=quickstart" in first
    assert stand.run("responses_server.sbatch", "recipe=quickstart").returncode == 0
    assert re.search(r"--nproc-per-node 1 .* -m data_prep.responses recipe=quickstart$", stand.asked("srun")[0])
    header = (ROOT / "slurm/responses_server.sbatch").read_text()
    assert "--requeue --signal=B:USR1@120" in header and "gpus" not in header


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ("prompts,hidden_states", "SKIP: must name stages, of responses prompts .* export, but holds 'prompts,hidden_states'"),
        (
            "responses prompts draft_vocab hidden_states train acceptance export",
            "SKIP: must leave at least one stage, but is 'responses prompts",
        ),
    ],
)
def test_words_that_leave_no_chain_are_refused_before_anything_is_queued(stand: Stand, skip: str, expected: str) -> None:
    result = stand.run("pipeline.sh", "recipe=quickstart", SKIP=skip)
    assert result.returncode == 1
    assert re.search(expected, result.stderr)
    assert stand.asked("sbatch") == []


def test_a_stage_that_the_settings_leave_out_may_be_skipped_too(stand: Stand) -> None:
    assert stand.run("pipeline.sh", "recipe=quickstart", SKIP="draft_vocab train").returncode == 0
    assert len(stand.asked("sbatch")) == 5


@pytest.mark.parametrize(("task_ids", "task", "part"), [("0-3", "3", 3), ("1-4", "4", 3), ("3-3", "3", 0)])
def test_the_parts_of_an_extraction_count_from_the_first_task_of_its_array(
    stand: Stand, task_ids: str, task: str, part: int
) -> None:
    result = stand.run("hidden_states.sbatch", "recipe=quickstart", **array_of(task_ids, task))
    assert result.returncode == 0, result.stderr
    num_parts = array_of(task_ids, task)["SLURM_ARRAY_TASK_COUNT"]
    assert f" hidden_states.part={part} hidden_states.num_parts={num_parts} recipe=quickstart" in stand.asked("srun")[0]


def test_an_array_with_gaps_is_refused(stand: Stand) -> None:
    result = stand.run("hidden_states.sbatch", "recipe=quickstart", **array_of("0-4", "2") | {"SLURM_ARRAY_TASK_COUNT": "3"})
    assert result.returncode == 1 and stand.asked("srun") == []
    assert "--array: must be task numbers without gaps, as in 0-3, but is 3 tasks from 0 to 4" in result.stderr


def array_of(task_ids: str, task: str) -> dict[str, str]:
    first, last = task_ids.split("-")
    names = {"MIN": first, "MAX": last, "COUNT": str(int(last) - int(first) + 1), "ID": task}
    return {f"SLURM_ARRAY_TASK_{name}": value for name, value in names.items()}


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, ["requeue 7"]), (signal.SIGTERM, [])])
def test_a_signal_that_comes_before_the_work_begins_stops_the_job(
    stand: Stand, number: signal.Signals, requeued: list[str]
) -> None:
    reached, go = stand.directory / "reached", stand.directory / "go"
    (stand.directory / "python").write_text(f"#!/bin/sh\ntouch {reached}\nwhile ! [ -e {go} ]; do sleep 0.1; done\necho runs/it\n")
    command = [ROOT / "slurm/train.sbatch", "recipe=quickstart"]
    with subprocess.Popen(command, env=stand.environment, cwd=stand.directory, stdout=subprocess.PIPE, text=True) as job:
        wait_for(reached.exists)
        job.send_signal(number)
        go.touch()
        printed, _ = job.communicate(timeout=30)
    assert job.returncode == 75
    assert f"mtptrain.train: stopped by {number.name.removeprefix('SIG')}" in printed
    assert stand.asked("srun") == [] and stand.asked("scontrol") == requeued


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["recipe=quickstart"], "prompts process, hidden_states ranks, train ranks, acceptance ranks, export process"),
        (
            ["recipe=quickstart_eagle3", "prompts.source=responses"],
            "responses ranks, prompts process, draft_vocab process, hidden_states ranks, train ranks, acceptance ranks, export process",
        ),
        (
            ["recipe=quickstart", "prompts.source=responses", "responses.url=http://localhost:8000/v1"],
            "responses server, prompts process, hidden_states ranks, train ranks, acceptance ranks, export process",
        ),
    ],
)
def test_the_stages_follow_from_the_settings(overrides: list[str], expected: str) -> None:
    command = [sys.executable, ROOT / "slurm/stages.py", *overrides]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    run_dir, *rows = result.stdout.splitlines()
    assert run_dir == f"runs/{overrides[0].removeprefix('recipe=')}"
    assert ", ".join(f"{row.split()[0]} {row.split()[2]}" for row in rows) == expected
    for row in rows:
        assert (ROOT / f"{row.split()[1].replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_is_clean_and_names_no_place_of_one_machine(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert not re.search(r"/(home|root|Users|work|scratch|mnt|data)/", script.read_text())
    if shutil.which("shellcheck"):
        result = subprocess.run(["shellcheck", "-x", script], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout
