"""Tests `mtptrain serving-bench` with a running vLLM, whose K varies with the batch size."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtptrain.engines.vllm.engine import per_batch_size
from mtptrain.engines.vllm.formats import speculative_config
from mtptrain.engines.vllm.server import VllmServer
from tests.conftest import Run, succeed
from tests.serving.conftest import vllm_server
from tests.serving.ours import OnDisk

NUM_REQUESTS = 6
SETTINGS = (
    *("acceptance.num_prompts=4", "serving_bench.concurrency=[1,2]", f"serving_bench.num_requests={NUM_REQUESTS}"),
    "serving_bench.ignore_eos=true",
)
pytestmark = pytest.mark.slow


def test_a_running_server_with_a_k_for_each_batch_size_is_measured_by_its_own_counters(
    run_of: Callable[[str], Run], vllm_python: str, target_of: Callable[[str], OnDisk], tmp_path: Path
) -> None:
    run_dir, overrides = run_of("vllm")
    export = run_dir / "export/vllm"
    facts, ranges = json.loads((export / "serving.json").read_text()), per_batch_size({1: 3, 2: 1, 3: 0})
    draft = speculative_config(facts, export, 3) | {"num_speculative_tokens_per_batch_size": ranges}
    arguments = ["--speculative-config", json.dumps(draft)]
    with vllm_server(vllm_python, target_of("llama").directory, tmp_path / "server.log", *arguments) as url:
        before = VllmServer(url).counters()
        settings = (*SETTINGS, f"serving.url={url}", f"serving.output_dir={tmp_path}")
        succeed("serving-bench", *overrides, *settings)
        counts = VllmServer(url).counts_since(before, 2 + 2 * NUM_REQUESTS)  # two warm up
    rows = json.loads((tmp_path / "serving_bench/report.json").read_text())["rows"]
    warmup = json.loads((tmp_path / "serving_bench/load_server_warmup.json").read_text())["counts"]
    assert counts is not None
    for name in ("rounds", "drafted"):
        assert sum(each[name] for each in (warmup, *rows)) == getattr(counts, name)
    assert [sum(each["accepted_at"][i] for each in (warmup, *rows)) for i in range(3)] == counts.accepted_at
    assert [row["speed_up"] for row in rows] == [None, None]
    assert rows[0]["drafted"] == 3 * rows[0]["rounds"], "K must be 3 for one request"
    # K must be 1 for two requests, except while the last request runs alone.
    assert rows[1]["drafted"] < 2 * rows[1]["rounds"]
