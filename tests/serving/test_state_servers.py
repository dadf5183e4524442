"""Tests that two vLLM servers, of which one is killed and one stopped, give the bytes of an undisturbed extraction."""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import numpy as np
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


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    Started(f"http://127.0.0.1:{port}", "vLLM", process).wait()


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_changes_no_byte(vllm_python: str, tmp_path: Path) -> None:
    target = make_target(
        tmp_path / "target", num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2, hidden_size=512
    )
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
            wait_for(ports[0], kept)
            wait_for(ports[1], killed)
            extract_hidden_states(Run(config), ONE_RANK)
            expected = read_store(store)
            shutil.rmtree(store)
            if (child := os.fork()) == 0:
                extract_hidden_states(Run(config), ONE_RANK)
                os._exit(0)
            while len(list(store.glob("shard_*.safetensors"))) < 4:
                sleep(0.01)
            os.killpg(kept.pid, signal.SIGSTOP)  # so that the other one has something left to do
        with state_server(vllm_python, target, states, ports[1]) as again:
            wait_for(ports[1], again)
            before = len(list(store.glob("shard_*.safetensors")))
            while len(list(store.glob("shard_*.safetensors"))) < before + 2:
                sleep(0.01)
            os.killpg(kept.pid, signal.SIGCONT)
            assert os.waitpid(child, 0)[1] == 0
    assert read_store(store) == expected and len(expected) > 2 * before
