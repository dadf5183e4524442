"""Tests, without vLLM, how its process reports failures, and what it is told to serve."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from mtptrain.engines.base import Served
from mtptrain.engines.exports import cache_bytes, served_model, speculative_config
from mtptrain.engines.vllm import client as vllm
from mtptrain.engines.vllm.client import GenerateJob, VllmProcess
from mtptrain.engines.vllm.engine import serve_arguments
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from tests.programs import fake_python

JOB = GenerateJob(name="job", target_dir="/none", prompts=[[1]], max_new_tokens=1, max_model_len=8)


def test_an_engine_that_fails_is_reported_with_the_export_that_it_served(tmp_path: Path) -> None:
    result = json.dumps({"version": "0.32.0", "results": [{"error": "no kernel image is available"}]})
    python = fake_python(tmp_path, f"#!/bin/sh\necho '{result}' >\"$4\"\n")
    for holds_target, does in ((False, f"{tmp_path} for /target"), (True, str(tmp_path))):
        facts = {"method": "mtp", "holds_target": holds_target}
        draft, served = speculative_config(facts, tmp_path, 3), str(served_model(facts, tmp_path, "/target"))
        with pytest.raises(UserError) as failed:
            VllmProcess(python, replace(JOB, target_dir=served, speculative_config=draft)).generate([[1]], 1, [])
        assert str(failed.value) == f"vLLM: must serve {does}, but raised:\nno kernel image is available"


def test_a_worker_that_dies_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "#!/bin/sh\necho libsomething.so: cannot open\nexit 3\n")
    with pytest.raises(UserError, match=r"(?s)must end with a result, but ended with status 3; .*libsomething\.so: c"):
        vllm.generate([JOB], python)


def test_the_layers_of_a_large_draft_model_count_in_the_cache(tmp_path: Path) -> None:
    shared = {"hidden_size": 64, "num_attention_heads": 2}
    target = AutoConfig.for_model("qwen2", **shared, num_key_value_heads=2, num_hidden_layers=2)
    num_tokens, bytes_of_layer = 72 + 128, 2 * 4 * 64
    for sizes in ({}, {"head_dim": 32, "num_key_value_heads": 2}):
        (tmp_path / "config.json").write_text(json.dumps({**shared, "num_hidden_layers": 24, **sizes}))
        assert cache_bytes(target, tmp_path, 72, 1) - (64 << 20) == num_tokens * (2 + 24) * bytes_of_layer


def test_a_server_without_drafts_loads_the_export_where_that_holds_the_target(
    tiny_target: Path, tmp_path: Path
) -> None:
    """vLLM refuses the folder of a published MiMo, whose config.json asks for code; that of the export does not."""
    head_dir = Path(shutil.copytree(tiny_target, tmp_path / "export"))
    for holds_target in (True, False):
        facts, target = {"method": "eagle", "holds_target": holds_target}, TargetFiles(tiny_target)
        served = Served(Path("python"), target, head_dir, facts, ServingConfig(), "float32", 64, 2, Path(), ["--x"])
        models = set()
        for num_drafts in (0, 3):
            arguments = serve_arguments(served, num_drafts)
            models.add(arguments[1])
            assert ("--speculative-config" in arguments) == bool(num_drafts) and arguments[-1] == "--x"
        assert models == {str(head_dir if holds_target else tiny_target)}
