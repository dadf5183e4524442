"""What the Slurm scripts ask of Slurm, with its commands replaced by scripts that note how they are called."""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, environment_without_slurm, wait_for

PLAN = """runs/quickstart
responses server
prompts process
hidden_states ranks
train ranks
acceptance ranks
export process
"""


@dataclass(frozen=True)
class Stand:
    """Runs a script of `slurm/` with stand-ins: Slurm's commands record their arguments, and Python prints `PLAN`."""

    directory: Path
    environment: dict[str, str]

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command, environment = [ROOT / "slurm" / script, *arguments], {**self.environment, **variables}
        return subprocess.run(command, env=environment, cwd=self.directory, capture_output=True, text=True, check=False)

    def add(self, program: str, does: str) -> None:
        """Put a program before those of the machine."""
        path = self.directory / program
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(0o755)

    def asked(self, command: str) -> list[str]:
        """Returns the arguments of each call of the command."""
        path = self.directory / f"{command}.txt"
        return path.read_text().splitlines() if path.is_file() else []


def array_of(task_ids: str, task: str) -> dict[str, str]:
    first, last = task_ids.split("-")
    names = {"MIN": first, "MAX": last, "COUNT": str(int(last) - int(first) + 1), "ID": task}
    return {f"SLURM_ARRAY_TASK_{name}": value for name, value in names.items()}


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    environment = environment_without_slurm()
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "MTPTRAIN_PYTHON": str(tmp_path / "python")}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2"}
    environment |= {"MTPTRAIN_CHECKOUT": str(ROOT), "MTPTRAIN_LOCAL_RUN_DIR": "0"}
    made = Stand(tmp_path, environment)
    made.add("python", f"cat <<'END'\n{PLAN}END")
    for name in ("sbatch", "srun", "scontrol", "scancel", "sinfo"):
        noted = tmp_path / f"{name}.txt"
        made.add(name, f'echo "$*" >>{noted}\n[ {name} != sbatch ] || wc -l <{noted}')
    return made


ALL = ("responses", "prompts", "draft_vocab", "hidden_states", "train", "acceptance", "export")
COMES_FIRST = "options of sbatch must come first, each as one word (--time=12:00:00), but this one follows"
NODES_MUST = "error: NODES: must be a number of at least 1, or a range such as 1-2, but is"
NPROC_MUST = "must be a number of at least 1, but is"
LOCAL = "MTPTRAIN_LOCAL_RUN_DIR"
ON_A_NODE = {"MTPTRAIN_PYTHON": "python", LOCAL: "1"}
SERVERS = ("recipe=quickstart", "hidden_states.backend=vllm", "hidden_states.num_servers=2")
RANKS_OF_A_STEP = "train.micro_batches_per_step: must be a multiple of the number of ranks"
REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("train.epochs=0", {}, "error: train.epochs: must be a number of at least 1, but is 0; correct it in the"),
    ("train.stream=true", {}, "error: train.stream: must be false for a chain of jobs, in which training waits for"),
    ("head=mtp export.engine=llama_cpp", {}, "error: export.engine: must be vllm or sglang or transformers to export"),
    ("train.lrr=1", {}, "error: train.lrr: must be the name of a setting, but no setting has this name; did you mean"),
    ("--nodes=2", {}, "--nodes=2: the number of nodes for training must be set by NODES, as in NODES=2,"),
    ("recipe=quickstart --time=30", {}, f"--time=30: {COMES_FIRST} 'recipe=quickstart'; join it or move it"),
    ("", {"SKIP": "prompts,train"}, "error: SKIP: must name only stages among responses prompts draft_vocab"),
    ("", {"SKIP": " ".join(ALL)}, "SKIP: must leave at least one stage, but is 'responses prompts"),
    ("train.micro_batches_per_step=8", {"NODES": "1-2"}, f"error: {RANKS_OF_A_STEP}, 16, but is 8"),
    ("train.micro_batches_per_step=8", {"NODES": "3", "NPROC": "1"}, f"error: {RANKS_OF_A_STEP}, 3, but is 8"),
    ("train.micro_batches_per_step=4", {"NPROC": "gpu"}, f"error: {RANKS_OF_A_STEP}, 8, but is 4; set it to 8"),
    ("", {"NODES": "0"}, f"{NODES_MUST} '0'; correct it"),
    ("", {"NODES": "2-1"}, f"{NODES_MUST} '2-1'; correct it"),
    ("", {"NPROC_train": "²", "NPROC": "1"}, f"error: NPROC_train: {NPROC_MUST} '²'; set it, or leave it out"),
    ("", {"SKIP": "train", "ARRAY_TASKS": "0"}, "ARRAY_TASKS: must be a number of at least 1, but is '0'; correct it"),
    (
        " ".join(SERVERS[1:]),
        {LOCAL: "1"},
        f"error: hidden_states.num_servers: must be 0 with {LOCAL}=1, as servers share run_dir",
    ),
    ("", ON_A_NODE | {LOCAL: "yes"}, f"{LOCAL}: must be 1 where run_dir is on a node's own disk, 0 where"),
    ("", ON_A_NODE | {"ARRAY_TASKS": "8"}, f"NODES and ARRAY_TASKS: must be 1 with {LOCAL}=1, but are 1 and 8; leave"),
    ("", ON_A_NODE | {"SKIP": "prompts"}, "--nodelist: must name the node whose disk holds "),
]
"""Words of the command line and variables, and the beginning of the message."""


def test_what_is_wrong_is_refused_in_one_line_before_anything_is_queued(stand: Stand) -> None:
    for words, variables, expected in REFUSED:
        settings = {"MTPTRAIN_PYTHON": sys.executable, **variables}
        result = stand.run("pipeline.sh", *words.split(), "recipe=quickstart", **settings)
        assert result.returncode == (2 if "train.lrr" in words else 1) and result.stdout == "", (words, variables)
        assert result.stderr.startswith(expected) and result.stderr.count("\n") == 1
        assert stand.asked("sbatch") == []


def test_a_chain_has_only_jobs_that_can_run(stand: Stand) -> None:
    """No engine serves `hydra`, and training alone may read states that another job streams."""
    settings = ("recipe=quickstart", "head=hydra", "head.start_from_target=false", "train.micro_batches_per_step=8")
    settings += (f"run_dir={stand.directory}/run",)
    result = stand.run("pipeline.sh", *settings, MTPTRAIN_PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    stages = [line.split()[0] for line in result.stdout.splitlines()[:-2]]
    assert stages == ["prompts", "hidden_states", "train", "acceptance"]
    keeping = ("train.validation_prompts=0", "train.validate_every=500", "train.micro_batches_per_step=8")
    of_mtp = ("recipe=quickstart", *keeping, settings[-1])
    result = stand.run("pipeline.sh", *of_mtp, "hardware=auto", MTPTRAIN_PYTHON=sys.executable)
    stages = [line.split()[0] for line in result.stdout.splitlines()[:-2]]
    assert stages == ["prompts", "hidden_states", "train", "choose_head", "acceptance", "export"], result.stderr
    assert "WARNING hardware: should be" in result.stderr
    alone = {"MTPTRAIN_PYTHON": sys.executable, "SKIP": "prompts hidden_states"}
    assert stand.run("pipeline.sh", *settings, "train.stream=true", **alone).returncode == 0


def test_options_and_dependencies_reach_the_jobs(stand: Stand) -> None:
    """A dependency that is given holds for the first job alone. Answers of a server are one process, which is asked to
    stop ahead of time, and so is the choice of a head."""
    options = ("--dependency=afterok:77", "--time=30")
    variables = {"GPU_OPTIONS": "--dependency=singleton", "CPU_OPTIONS": "--mem=9G"}
    result = stand.run("pipeline.sh", *options, "recipe=quickstart", **variables)
    assert result.returncode == 0, result.stderr
    first, *_ = jobs = stand.asked("sbatch")
    last = [re.findall(r"--dependency=(\S+)", line)[-1] for line in jobs]
    assert last == ["afterok:77", "afterok:1", "afterok:2", "afterok:3", "afterok:4", "afterok:5"]
    assert all("--time=30" in line for line in jobs)
    assert "--mem=9G" in first and f"{ROOT}/slurm/asking.sbatch responses recipe=quickstart" in first
    for script, stage in (("asking.sbatch responses", "responses"), ("choose_head.sbatch", "choose-head")):
        assert stand.run(*script.split(), "recipe=quickstart", NPROC="8").returncode == 0
        assert re.search(rf"--nproc-per-node 1 .* -m mtptrain {stage} recipe=quickstart$", stand.asked("srun")[-1])
    header = (ROOT / "slurm/asking.sbatch").read_text()
    assert "--requeue --signal=B:USR1@120" in header and "gpus" not in header
    assert stand.run("pipeline.sh", "recipe=quickstart", SKIP="draft_vocab train").returncode == 0
    assert len(stand.asked("sbatch")) == len(jobs) + 5, "a stage that the settings leave out may be skipped too"


def test_servers_wait_for_prompts_and_the_first_of_them_starts_the_job_that_asks_and_has_no_gpu(stand: Stand) -> None:
    variables = {"MTPTRAIN_PYTHON": sys.executable, "CPU_OPTIONS": "--mem=9G", "GPU_OPTIONS": "--gpus-per-node=4"}
    run_dir = f"run_dir={stand.directory}/run"
    result = stand.run("pipeline.sh", *SERVERS, run_dir, "train.micro_batches_per_step=8", **variables)
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[:4]] == [
        *("prompts", "states_server", "hidden_states", "train")
    ]
    _, servers, asking, train, *_ = stand.asked("sbatch")
    assert "--array=0-1 --gpus-per-node=4 --dependency=afterok:1 " in servers and "%x-%A_%a.out" in servers
    assert "--mem=9G --dependency=after:2_0?after:2_1 " in asking and "asking.sbatch hidden_states recipe=" in asking
    assert "--dependency=afterok:3 " in train and "--array" not in asking
    assert (stand.directory / "run/slurm/asker-2").read_text() == "3\n"


@pytest.mark.parametrize(("queue", "cancelled"), [("7", ["7"]), ("3 7", []), ("", [])])
def test_a_server_ends_once_the_job_that_asks_has_left_the_queue_but_not_when_slurm_does_not_answer(
    stand: Stand, queue: str, cancelled: list[str]
) -> None:
    (stand.directory / "asker-5").write_text("3\n")
    stand.add("squeue", f"echo >>squeue.txt\n[ $(wc -l <squeue.txt) = 2 ] && printf '%s\\n' {queue}")
    stand.add("sleep", "echo >>sleep.txt\n[ $(wc -l <sleep.txt) -le 2 ]")
    variables = array_of("0-1", "1") | {"SLURM_ARRAY_JOB_ID": "5", "MTPTRAIN_CHAIN_DIR": str(stand.directory)}
    assert stand.run("states_server.sbatch", *SERVERS, **variables).returncode == 0
    assert stand.asked("scancel") == cancelled
    assert "-m mtptrain hidden-states hidden_states.server=1 recipe=quickstart" in stand.asked("srun")[0]


@pytest.mark.parametrize(("restarts", "asked"), [("4", ["requeue 7"]), ("5", [])])
def test_a_server_that_ends_by_itself_starts_again_a_few_times(stand: Stand, restarts: str, asked: list[str]) -> None:
    for name in ("srun", "sleep"):
        stand.add(name, "exit 1")
    assert stand.run("states_server.sbatch", *SERVERS, SLURM_RESTART_COUNT=restarts).returncode == 1
    assert [line for line in stand.asked("scontrol") if "requeue" in line] == asked


def test_the_parts_of_an_extraction_count_from_the_first_task_of_an_array_without_gaps(stand: Stand) -> None:
    for index, (task_ids, task, part) in enumerate((("0-3", "3", 3), ("1-4", "4", 3), ("3-3", "3", 0))):
        variables = array_of(task_ids, task)
        assert stand.run("hidden_states.sbatch", "recipe=quickstart", **variables).returncode == 0
        parts = f" hidden_states.part={part} hidden_states.num_parts={variables['SLURM_ARRAY_TASK_COUNT']} recipe="
        assert parts in stand.asked("srun")[index]
    gap = array_of("0-4", "2") | {"SLURM_ARRAY_TASK_COUNT": "3"}
    result = stand.run("hidden_states.sbatch", "recipe=quickstart", **gap)
    assert result.returncode == 1 and len(stand.asked("srun")) == 3
    assert "--array: must be task numbers without gaps, as in 0-3, but is 3 tasks from 0 to 4" in result.stderr


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, ["requeue 7"]), (signal.SIGTERM, [])])
def test_a_signal_that_comes_before_the_work_begins_stops_the_job(
    stand: Stand, number: signal.Signals, requeued: list[str]
) -> None:
    reached, go = stand.directory / "reached", stand.directory / "go"
    (stand.directory / "python").write_text(
        f"#!/bin/sh\ntouch {reached}\nwhile ! [ -e {go} ]; do sleep 0.1; done\necho runs/it\n"
    )
    command = [ROOT / "slurm/train.sbatch", "recipe=quickstart"]
    with subprocess.Popen(
        command, env=stand.environment, cwd=stand.directory, stdout=subprocess.PIPE, text=True
    ) as job:
        wait_for(reached.exists)
        job.send_signal(number)
        go.touch()
        printed, _ = job.communicate(timeout=30)
    assert job.returncode == 75
    assert f"train: stopped by {number.name.removeprefix('SIG')}" in printed
    assert stand.asked("srun") == [] and stand.asked("scontrol") == requeued


TASK = array_of("0-3", "2") | {"SLURM_ARRAY_JOB_ID": "7"}


def test_a_job_that_stops_again_with_nothing_finished_fails_and_says_so(stand: Stand) -> None:
    (stand.directory / "srun").write_text("#!/bin/sh\nkill -USR1 $PPID\nexit 1\n")
    for restarts, code in (("4", 75), ("5", 1)):
        variables = TASK | {"SLURM_SUBMIT_DIR": str(stand.directory), "SLURM_RESTART_COUNT": restarts}
        result = stand.run("hidden_states.sbatch", "recipe=quickstart", **variables)
        assert (result.returncode, stand.asked("scontrol")) == (code, ["requeue 7"])
    assert (
        "hidden_states: stopped by USR1 with nothing finished since it started, after 5 restarts: not put back into "
        "the queue; give it a longer --time\n"
    ) in result.stderr
    assert "task 2 of 0-3 has failed with exit code 1" in result.stderr


def test_a_container_runs_every_step_with_the_checkout_the_folder_and_the_users_mounts(stand: Stand) -> None:
    noted = stand.directory / "srun.txt"
    (stand.directory / "srun").write_text(
        f'#!/bin/sh\necho "$*" >>{noted}\ncase "$*" in *stages.py*) cat {noted}.plan;; esac\n'
    )
    Path(f"{noted}.plan").write_text(PLAN)
    variables = {"MTPTRAIN_CONTAINER_IMAGE": "/images/mtptrain.sqsh", "MTPTRAIN_CONTAINER_MOUNTS": "/models:/models:ro"}
    on_node = variables | {"MTPTRAIN_PYTHON": "/not/there"}
    for job in ("train.sbatch recipe=quickstart", "process.sbatch prompts recipe=quickstart"):
        result = stand.run(*job.split(), **on_node)
        assert result.returncode == 0, result.stderr
    options = (
        f"--container-image=/images/mtptrain.sqsh --container-workdir={stand.directory} --container-env=PYTHONPATH "
        f"--container-mounts={ROOT}:{ROOT},{stand.directory}:{stand.directory},/models:/models:ro python3 "
    )
    assert [line.split(options)[1].split(" --standalone")[0] for line in stand.asked("srun")] == [
        f"{ROOT}/slurm/stages.py recipe=quickstart",
        "-m torch.distributed.run",
        "-m mtptrain prompts recipe=quickstart",
    ]
    # pipeline.sh itself runs outside the container, on the machine that submits.
    assert stand.run("pipeline.sh", "recipe=quickstart", **variables).returncode == 0
    assert len(stand.asked("sbatch")) == 6 and len(stand.asked("srun")) == 3


def test_a_task_that_fails_says_what_to_do_and_one_that_was_stopped_does_not(stand: Stand) -> None:
    variables = TASK | {"SLURM_SUBMIT_DIR": str(stand.directory)}
    again = "slurm/pipeline.sh --dependency=afterany:7 [SBATCH OPTIONS] recipe=quickstart prompts.paths=\\[a\\ b\\]\n"
    for code in ("3", "75", "0"):
        (stand.directory / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
        result = stand.run("hidden_states.sbatch", "recipe=quickstart", "prompts.paths=[a b]", **variables)
        is_told = code == "3"
        assert result.returncode == int(code)
        assert ("task 2 of 0-3 has failed with exit code 3" in result.stderr) is is_told
        assert ("with the NODES, NPROC and other variables of the first start:\n" in result.stderr) is is_told
        assert result.stderr.endswith(again) is is_told


def test_several_nodes_do_not_work_on_a_disk_of_one_of_them(stand: Stand) -> None:
    (stand.directory / "sinfo").write_text("#!/bin/sh\nprintf 'first\\nsecond\\n'\n")
    several: dict[str, dict[str, str]] = {"pipeline.sh": {}, "train.sbatch": {"SLURM_JOB_NUM_NODES": "2"}}
    several["hidden_states.sbatch"] = array_of("0-1", "0")
    message = "run_dir: must be on a disk that all nodes share .* but runs/quickstart is on a disk of .* alone; move it"
    for script, variables in several.items():
        result = stand.run(script, "recipe=quickstart", **variables, MTPTRAIN_LOCAL_RUN_DIR="")
        assert result.returncode == 1 and re.search(message, result.stderr)
    assert stand.asked("sbatch") == stand.asked("srun") == []
    for script, variables in several.items():
        assert "run_dir: must be" not in stand.run(script, "recipe=quickstart", **variables).stderr


def test_a_chain_on_one_nodes_disk_is_one_task_on_the_node_that_is_named(stand: Stand) -> None:
    variables = {"MTPTRAIN_LOCAL_RUN_DIR": "1", "SKIP": "responses prompts"}
    assert stand.run("pipeline.sh", "--nodelist=n7", "recipe=quickstart", **variables).returncode == 0
    first, *_ = jobs = stand.asked("sbatch")
    assert all("--nodelist=n7" in line and "--hold" not in line for line in jobs)
    assert "--array=0-0 " in first and f"--output={stand.directory}/logs/quickstart/" in first
    assert not (stand.directory / "runs").exists()  # the submitting machine does not see the node's disk


def test_an_own_disk_keeps_a_job_that_goes_back_into_the_queue_on_its_node(stand: Stand) -> None:
    (stand.directory / "srun").write_text("#!/bin/sh\nkill -USR1 $PPID\nexit 1\n")
    variables = {"MTPTRAIN_LOCAL_RUN_DIR": "1", "SLURMD_NODENAME": "n7"}
    assert stand.run("train.sbatch", "recipe=quickstart", **variables).returncode == 75
    assert stand.asked("scontrol") == ["requeue 7", "update JobId=7 ReqNodeList=n7"]
