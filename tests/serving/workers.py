"""Builds what OpenVINO GenAI and MLX serve, and asks the workers in their own Python environments."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from eval.as_served import CHAT
from mtptrain.decoding.speculate import Generation
from mtptrain.engines.base import WorkerEngine
from mtptrain.engines.mlx.engine import ENGINE as MLX
from mtptrain.engines.mlx.formats import keys_for_mlx_lm
from mtptrain.engines.openvino.engine import ENGINE as OPENVINO
from mtptrain.engines.process import CHECKOUT
from mtptrain.engines.requests import EngineCounts, EngineRun, Questions
from mtptrain.heads.base import Head
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.loading import load_target
from tests.mtptrain.engines.conftest import export_head
from tests.serving.breaks import damage
from tests.serving.cases import HEADS, Case
from tests.serving.ours import QUESTIONS, OnDisk, Serve, drafted_here, served_from

TargetOf = Callable[[str], OnDisk]
HeadOf = Callable[[str, str], Head]


def python_of(engine: WorkerEngine) -> Path:
    """Returns the Python of an engine's environment in the checkout, or skips the test if it was not made."""
    made = f".venv-{engine.worker.parent.name}/.installed"
    if not (CHECKOUT / made).is_file():
        pytest.skip(f"NOTHING IS SERVED BY {engine.name.upper()}: run `make {made}`")
    return engine.find_program(ServingConfig())


def serve_by(
    engine: WorkerEngine, python: Path, target_of: TargetOf, head_of: HeadOf, directory: Path, asked: Questions
) -> Serve:
    """Returns a function that serves a case, and returns our answers, the engine's, and our counts by its rules."""

    key = engine.worker.parent.name

    def serve(case: Case) -> tuple[list[Generation], EngineRun, EngineCounts]:
        target, num_drafts = target_of(case.target), case.num_speculative_tokens
        head_dir = directory / str(replace(case, num_speculative_tokens=0))
        if not head_dir.exists():
            export_head(head_dir, key, HEADS[case.head], head_of(case.head, case.target).state_dict(), target.directory)
        if case.broken:
            damage(head_dir, f"{key} {case.head}", case.broken)
        method = {"method": engine.formats[HEADS[case.head].name].method}
        served = replace(served_from(python, target.directory, head_dir), facts=method)
        job = engine.job(served, num_drafts, directory / case.target)
        if "converted_head" in job:
            job["converted_head"] = str(head_dir / "converted")
        [theirs] = engine.decode(served, job, [asked])
        ours = drafted_here(case, target_of, head_of, asked.prompts)
        return ours, theirs, engine.counted(ours, num_drafts, asked)[0]

    return serve


@pytest.fixture(scope="session")
def openvino_python() -> Path:
    return python_of(OPENVINO)


@pytest.fixture(scope="session")
def mlx_python() -> Path:
    return python_of(MLX)


@pytest.fixture(scope="session")
def openvino_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all converted targets and heads."""
    return tmp_path_factory.mktemp("openvino")


@pytest.fixture(scope="session")
def serve_by_openvino(openvino_python: Path, target_of: TargetOf, head_of: HeadOf, openvino_dir: Path) -> Serve:
    asked = QUESTIONS._replace(chat={"messages": CHAT, "chat_template_kwargs": {}})
    return serve_by(OPENVINO, openvino_python, target_of, head_of, openvino_dir, asked)


@pytest.fixture(scope="session")
def mlx_target_of(target_of: TargetOf, tmp_path_factory: pytest.TempPathFactory) -> TargetOf:
    """Returns a function that makes each target with RoPE where mlx-lm reads it, unlike transformers 5."""

    @cache
    def make(name: str) -> OnDisk:
        directory = shutil.copytree(target_of(name).directory, tmp_path_factory.mktemp("mlx") / name)
        config = json.loads((directory / "config.json").read_text())
        config |= keys_for_mlx_lm(config)
        (directory / "config.json").write_text(json.dumps(config))
        return OnDisk(directory, load_target(directory, torch.float32, torch.device("cpu")))

    return make


@pytest.fixture(scope="session")
def serve_by_mlx(
    mlx_python: Path, mlx_target_of: TargetOf, head_of: HeadOf, tmp_path_factory: pytest.TempPathFactory
) -> Serve:
    prompts = [*(prompt[:64] for prompt in QUESTIONS.prompts[:19]), max(QUESTIONS.prompts, key=len)]
    asked = QUESTIONS._replace(prompts=prompts)
    return serve_by(MLX, mlx_python, mlx_target_of, head_of, tmp_path_factory.mktemp("mlx"), asked)


def launch_of(export: Path) -> str:
    return (export / "README.md").read_text().split("```")[1]


def run_readme(export: Path, python: Path, directory: Path) -> str:
    """Runs the commands of an export's README in an engine's environment, and returns what they print."""
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    command = ["bash", "-e", "-c", launch_of(export)]
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, check=False, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
