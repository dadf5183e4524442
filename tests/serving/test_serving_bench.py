"""Tests `mtptrain serving-bench` with a real vLLM, both with engines that it starts and with a running server."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mtptrain.engines.vllm.engine import per_batch_size
from mtptrain.engines.vllm.formats import speculative_config
from mtptrain.engines.vllm.server import VllmServer
from tests.conftest import Run, program_command, run_program
from tests.programs import ROOT, is_running
from tests.serving.conftest import vllm_server
from tests.serving.ours import OnDisk

NUM_PROMPTS, NUM_REQUESTS = 4, 6
STARTED = ("serving_bench.num_speculative_tokens=[3]", "serving_bench.server_args=[--enforce-eager]")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(run_of: Callable[[str], Run]) -> Run:
    directory, overrides = run_of("vllm")
    return directory, (
        *overrides,
        f"acceptance.num_prompts={NUM_PROMPTS}",
        "serving_bench.concurrency=[1,2]",
        f"serving_bench.num_requests={NUM_REQUESTS}",
        "serving_bench.warmup_requests=0",
        "serving_bench.ignore_eos=true",
    )


def test_the_fastest_run_of_a_load_counts(run: Run) -> None:
    result = run_program("serving-bench", *run[1], *STARTED, "serving_bench.repeats=2")
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((run[0] / "serving_bench/report.json").read_text())
    for row in report["rows"]:
        name = f"load_K{row['num_speculative_tokens']}_concurrency{row['concurrency']}_run"
        runs = [json.loads((run[0] / f"serving_bench/{name}{number}.json").read_text()) for number in (1, 2)]
        assert row["duration_s"] == min(each["duration_s"] for each in runs)
    assert report["version"].startswith("0.32") and report["prompts"] == NUM_PROMPTS
    assert report["best_num_speculative_tokens"].keys() == {"1", "2"}


@pytest.fixture(scope="module")
def server(run: Run, vllm_python: str, target_of: Callable[[str], OnDisk]) -> Iterator[str]:
    """Yields the address of a vLLM server whose K is 3 for one request, 1 for two requests and 0 for three."""
    export = run[0] / "export/vllm"
    facts, ranges = json.loads((export / "serving.json").read_text()), per_batch_size({1: 3, 2: 1, 3: 0})
    draft = speculative_config(facts, export, 3) | {"num_speculative_tokens_per_batch_size": ranges}
    arguments = ["--speculative-config", json.dumps(draft)]
    with vllm_server(vllm_python, target_of("llama").directory, run[0] / "server.log", *arguments) as url:
        yield url


def test_a_running_server_with_a_k_for_each_batch_size_is_measured_by_its_own_counters(
    run: Run, server: str, tmp_path: Path
) -> None:
    settings = (*run[1], f"serving.url={server}", f"serving_bench.output_dir={tmp_path}")
    before = VllmServer(server).counters()
    result = run_program("serving-bench", *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    counts = VllmServer(server).counts_since(before, 2 * NUM_REQUESTS)
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert counts is not None
    assert sum(row["rounds"] for row in rows) == counts.rounds
    assert sum(row["drafted"] for row in rows) == counts.drafted
    assert [sum(row["accepted_at"][i] for row in rows) for i in range(3)] == counts.accepted_at
    assert [row["speed_up"] for row in rows] == [None, None]
    assert rows[0]["drafted"] == 3 * rows[0]["rounds"], "K must be 3 for one request"
    assert rows[1]["drafted"] < 2 * rows[1]["rounds"], (
        "K must be 1 for two requests, except while the last request runs alone"
    )


def test_ctrl_c_ends_every_process(run: Run, tmp_path: Path) -> None:
    command = program_command("serving-bench", *run[1], *STARTED, f"serving_bench.output_dir={tmp_path}")
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "server_K0.log"
    try:
        wait_until(lambda: log.exists() and "EngineCore" in log.read_text())
        children = psutil.Process(process.pid).children(recursive=True)
        groups = {os.getpgid(each.pid) for each in children} - {os.getpgid(process.pid)}
        assert len(groups) == 1, "the server must have a process group"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    assert process.stderr is not None and "stopped by Ctrl-C" in process.stderr.read()
    wait_until(lambda: not any(is_running(each.pid) for each in children))


def wait_until(holds: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
