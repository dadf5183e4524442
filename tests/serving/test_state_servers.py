"""Tests that vLLM servers that are killed, stopped or, on Slurm, cut off give the bytes of an undisturbed run."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import numpy as np
import psutil
import pytest
import torch

from data_prep.hidden_states import extract_hidden_states
from mtptrain.engines.process import Started
from mtptrain.engines.vllm.engine import ENVIRONMENT
from mtptrain.hidden_states.extraction.server_streams import server_command
from mtptrain.run_dir import Run
from mtptrain.target.files import TargetFiles
from mtptrain.utils.distributed import free_port
from tests.conftest import make_config, make_target
from tests.data_prep.hidden_states.stage import ONE_RANK, make_documents, read_store, write_prompts
from tests.slurm.cluster import ROOT, running_slurm, wait_for

LENGTHS = np.random.default_rng(0).integers(40, 500, 150).tolist()


@contextmanager
def state_server(python: str, target_dir: Path, states: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server as the printed command starts it."""
    words = shlex.split(server_command(TargetFiles(target_dir, str(target_dir)), [2], torch.float32, max(LENGTHS)))
    settings = dict(word.split("=", 1) for word in words[:2])
    command = [python, *words[3:], "--port", str(port)]
    log = states.parent / f"log_{port}"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [word.replace("STATES", str(states)) for word in command],
            env={**os.environ, **ENVIRONMENT, **settings, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_slow_target(directory: Path) -> Path:
    """Makes a target of which servers are not done before a test has disturbed them."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_size": 512}
    return make_target(directory, **sizes)


def num_shards(store: Path) -> int:
    return len(list(store.glob("shard_*.safetensors")))


def wait_for_server(port: int, process: subprocess.Popen[bytes]) -> None:
    Started(f"http://127.0.0.1:{port}", "vLLM", process).wait()


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_changes_no_byte(vllm_python: str, tmp_path: Path) -> None:
    target = make_slow_target(tmp_path / "target")
    ports, states = (free_port(), free_port()), tmp_path / "states"
    urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    backend = ("hidden_states.backend=vllm", f"hidden_states.servers=[{urls}]", "hidden_states.dtype=float32")
    config = make_config(
        f"run_dir={tmp_path}/run", f"target.path={target}", "hidden_states.shard_tokens=2000", *backend
    )
    write_prompts(Path(config.run_dir), target, make_documents(LENGTHS))
    store = config.stage_dir("hidden_states")
    with state_server(vllm_python, target, states, ports[0]) as kept:
        with state_server(vllm_python, target, states, ports[1]) as killed:
            wait_for_server(ports[0], kept)
            wait_for_server(ports[1], killed)
            extract_hidden_states(Run(config), ONE_RANK)
            expected = read_store(store)
            shutil.rmtree(store)
            if (child := os.fork()) == 0:
                extract_hidden_states(Run(config), ONE_RANK)
                os._exit(0)
            while num_shards(store) < 4:
                sleep(0.01)
            os.killpg(kept.pid, signal.SIGSTOP)  # so that the other one has something left to do
        with state_server(vllm_python, target, states, ports[1]) as again:
            wait_for_server(ports[1], again)
            before = num_shards(store)
            while num_shards(store) < before + 2:
                sleep(0.01)
            os.killpg(kept.pid, signal.SIGCONT)
            assert os.waitpid(child, 0)[1] == 0
    assert read_store(store) == expected and len(expected) > 2 * before


def processes_of(address: str) -> list[psutil.Process]:
    """Returns the server at an address of a node, and its engine."""
    of_all = psutil.process_iter(["cmdline"])
    found = [each for each in of_all if (each.info["cmdline"] or [])[-2:] == ["--port", address.rpartition(":")[2]]]
    return [*{child for each in found for child in (each, *each.children(recursive=True))}]


@pytest.mark.slow
def test_servers_of_slurm_that_are_slow_or_requeued_or_cut_off_change_no_byte(vllm_python: str, tmp_path: Path) -> None:
    target = make_slow_target(tmp_path / "target")
    run_dir = tmp_path / "run"
    write_prompts(run_dir, target, make_documents(LENGTHS))
    store, places = run_dir / "hidden_states", [run_dir / f"servers/{number}" for number in range(2)]
    backend = ("hidden_states.backend=vllm", "hidden_states.dtype=float32", f"serving.program={vllm_python}")
    overrides = ("recipe=quickstart", f"run_dir={run_dir}", f"target.path={target}", *backend)
    overrides += ("hidden_states.shard_tokens=2000",)
    variables = {"SKIP": "prompts train acceptance export", "VLLM_CPU_KVCACHE_SPACE": "1"}

    def grows(number: int) -> None:
        """Wait for this number of further shards."""
        enough = num_shards(store) + number
        slurm.wait(asking, lambda: num_shards(store) >= enough)

    with running_slurm(tmp_path, "abc") as slurm:
        command = (ROOT / "slurm/pipeline.sh", "--hold", *overrides, "hidden_states.num_servers=2")
        servers, asking = re.findall(r"^\w+ +(\d+)$", slurm.run(*command, **variables), re.MULTILINE)
        slurm.run("scontrol", "release", servers)
        wait_for(lambda: all(place.is_file() for place in places))
        urls = [place.read_text() for place in places]
        asked = f"hidden_states.servers=[{','.join(urls)}]"
        slurm.run(sys.executable, "-m", "mtptrain", "hidden-states", *overrides, asked, PYTHONPATH=str(ROOT))
        expected = read_store(store)
        shutil.rmtree(store)

        slurm.run("scontrol", "release", asking)
        grows(3)
        stopped = processes_of(urls[0])
        for each in stopped:
            each.suspend()
        slurm.run("scontrol", "requeue", f"{servers}_1")
        slurm.wait(asking, lambda: places[1].read_text() != urls[1])
        grows(2)  # by the server that has come back, alone
        for each in stopped:
            each.resume()
        node = slurm.run("squeue", "--noheader", "--format=%N", f"--jobs={servers}_1").strip()
        slurm.controller.ip("link", "set", f"to_{node}", "down")
        grows(2)
        slurm.controller.ip("link", "set", f"to_{node}", "up")
        slurm.wait_completed(asking)
        assert num_shards(store) > 12 and read_store(store) == expected
        wait_for(lambda: slurm.state(servers) == "CANCELLED")
    assert not list((run_dir / "servers").glob("*/*"))
