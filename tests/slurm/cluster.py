"""Runs a Slurm cluster on one machine. Linux namespaces give each node its own network address, host name and process
tree.

Every node resolves its own host name to 127.0.1.1, as Debian's installer sets it up, and declares 8 GPUs. All nodes
share the folder of the cluster. The rest of the machine does not see the namespaces of a node, which end when its first
process is killed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
CONTROLLER_ADDRESS = f"{NETWORK}.254"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "setpriv", "unshare", "nsenter")
SKIPPED = "*** THE SLURM SCRIPTS ARE NOT TESTED:"

SLURM_CONF = """
ClusterName=test
SlurmctldHost=controller({controller})
SlurmUser=root
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd_%n.pid
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool_%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
"""
# A requeued job waits for cred_expire seconds, which must be at least 5.

START_NODE = """
hostname "$1"
ip link set lo up
mount --bind "$2/hosts_$1" /etc/hosts
read -r _  # until the network is there
shift 2
exec "$@"
"""


@dataclass
class Node:
    """A compute node of the cluster, or the controller, which is also the network switch."""

    name: str
    process: subprocess.Popen[bytes]
    init: int
    """Id of the node's first process. All other processes of the node end with it."""

    @staticmethod
    def start(name: str, directory: Path, environment: dict[str, str], *command: str) -> "Node":
        """Start the node's first process, which waits for the network and then runs `command`."""
        (directory / f"hosts_{name}").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        # A node is killed when the tests end, even if they crash.
        unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "--pid", "--fork"]
        unshare += ["--kill-child", "--mount-proc"]
        with (directory / f"daemon_{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*unshare, "sh", "-ec", START_NODE, "sh", name, str(directory), *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(lambda: process.poll() is not None or bool(children.read_text()))
        if process.poll() is not None:
            raise OSError(f"namespaces must be made: {(directory / f'daemon_{name}.log').read_text()}")
        return Node(name, process, int(children.read_text()))

    def ip(self, *arguments: str) -> None:
        """Run `ip` in the node's network."""
        subprocess.run(["nsenter", "--target", str(self.init), "--net", "ip", *arguments], check=True)

    def run_command(self) -> None:
        """Let the node run its command, now that it has a network."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()


@dataclass
class Slurm:
    """Controls a running Slurm cluster."""

    directory: Path
    environment: dict[str, str]
    controller: Node

    def run(self, *command: str | Path, **variables: str) -> str:
        """Run a command on the controller, which must succeed, and return its output."""
        result = self.try_to_run(*command, **variables)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        return result.stdout

    def try_to_run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "--target", str(self.controller.init), "--net", "--uts"]
        environment = {**self.environment, **variables}
        return subprocess.run(
            [*enter, *command], env=environment, cwd=self.directory, capture_output=True, text=True, check=False
        )

    def state(self, job: str) -> str:
        """Returns the state of the job or of all tasks of an array, or MIXED if the tasks differ."""
        found = set(re.findall(r"JobState=(\w+)", self.run("scontrol", "show", "job", job)))
        return found.pop() if len(found) == 1 else "MIXED"

    def wait(self, job: str, is_reached: Callable[[], bool], timeout_s: float = 600) -> None:
        """Wait until `is_reached` returns True. The job must not fail before that."""
        end = time.monotonic() + timeout_s
        while not is_reached():
            state = self.state(job)
            assert state not in {"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}, f"{job} is {state}\n{self.logs()}"
            assert time.monotonic() < end, f"{job} is {state} after {timeout_s} s\n{self.logs()}"
            time.sleep(0.05)

    def wait_completed(self, job: str) -> None:
        self.wait(job, lambda: self.state(job) == "COMPLETED")

    def logs(self) -> str:
        """Returns the queue with its steps, and the end of every job's output."""
        ends = (
            f"{path}:\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.directory.rglob("*.out"))
        )
        return "\n".join((self.run("squeue"), self.run("squeue", "--steps"), *ends))


def address_of(name: str) -> str:
    return f"{NETWORK}.{1 + ord(name) - ord('a')}"


def environment_without_slurm() -> dict[str, str]:
    """Returns this process's variables without those that Slurm and its scripts read."""
    ours = ("SLURM_", "SBATCH_", "NPROC", "MTPTRAIN_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@contextmanager
def running_slurm(directory: Path, names: str) -> Iterator[Slurm]:
    """Yields a cluster whose nodes are named by the letters of `names`, or skips the test if none can run, for example
    in an unprivileged container."""
    nodes: list[Node] = []
    try:
        if missing := ", ".join(name for name in PROGRAMS if not shutil.which(name)):
            pytest.skip(f"{SKIPPED} {missing} must be installed (Debian's slurm-wlm, munge, iproute2, util-linux) ***")
        try:
            slurm = start_slurm(directory, names, nodes)
        except (OSError, AssertionError) as error:
            logs = [f"{path.name}: {path.read_text(errors='replace')[-500:]}" for path in directory.glob("*.log")]
            pytest.skip(f"{SKIPPED} a cluster does not start here, which only root may do: {error} {logs} ***")
        yield slurm
    finally:
        for node in nodes:
            if node.process.poll() is None:
                os.kill(node.init, signal.SIGKILL)
                node.process.wait()


def start_slurm(directory: Path, names: str, nodes: list[Node]) -> Slurm:
    """Start a cluster, and add each of its nodes and the controller to `nodes`."""
    (directory / "dev").mkdir()
    for index in range(8):  # copies of /dev/null, because Slurm requires device files for GPUs
        os.mknod(directory / f"dev/nvidia{index}", 0o666 | 0o020000, os.stat("/dev/null").st_rdev)
    (directory / "state").mkdir()
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o600)
    lines = "\n".join(f"NodeName={name} NodeAddr={address_of(name)} CPUs=16 Gres=gpu:8" for name in names)
    conf = SLURM_CONF.format(directory=directory, controller=CONTROLLER_ADDRESS, nodes=lines)
    (directory / "slurm.conf").write_text(conf)
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/dev/nvidia[0-7]\n")
    environment = environment_without_slurm()
    environment |= {"SLURM_CONF": f"{directory}/slurm.conf", "MTPTRAIN_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment |= {"MTPTRAIN_LOCAL_RUN_DIR": "0"}  # the nodes share the folder, whatever the type of its file system
    controller = Node.start("controller", directory, environment, "sh", "-c", start_controller(directory))
    nodes.append(controller)
    controller.ip("link", "add", "switch", "type", "bridge")
    controller.ip("addr", "add", f"{CONTROLLER_ADDRESS}/24", "dev", "switch")
    controller.ip("link", "set", "switch", "up")
    controller.run_command()
    for name in names:
        node = Node.start(name, directory, environment, "slurmd", "-D")
        nodes.append(node)
        link = ("type", "veth", "peer", "name", "eth0", "netns", str(node.init))
        controller.ip("link", "add", f"to_{name}", *link)
        controller.ip("link", "set", f"to_{name}", "master", "switch", "up")
        node.ip("addr", "add", f"{address_of(name)}/24", "dev", "eth0")
        node.ip("link", "set", "eth0", "up")
        node.run_command()
    slurm, idle = Slurm(directory, environment, controller), f"idle {len(names)}"
    wait_for(lambda: slurm.try_to_run("sinfo", "--noheader", "--format", "%T %D").stdout.strip() == idle)
    return slurm


def start_controller(directory: Path) -> str:
    """Returns a shell command that runs munged, then slurmctld."""
    files = {"key": "munge.key", "pid": "munged.pid", "seed": "munge.seed", "log": "munged.log"}
    options = [f"--{name}-file={directory}/{file}" for name, file in files.items()]
    return f"munged --force --socket={directory}/munge.socket {' '.join(options)} && exec slurmctld -D -i"


def wait_for(is_reached: Callable[[], bool], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not is_reached():
        assert time.monotonic() < end, f"not reached in {timeout_s} s"
        time.sleep(0.1)


def records(run_dir: Path) -> list[dict[str, object]]:
    path = run_dir / "train/metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def stopped_at(log: Path) -> list[int]:
    """Returns the steps at which a training job saved because of a signal."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return [int(step) for step in re.findall(r"step (\d+): SIG\w+, checkpoint saved", text)]
