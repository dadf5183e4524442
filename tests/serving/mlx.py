"""Builds what MLX serves, and asks its two packages in their own Python."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.exports import LAYER_IDS
from mtptrain.engines.mlx.engine import ENGINE
from mtptrain.engines.mlx.formats import rope_for_mlx_lm
from mtptrain.engines.process import CHECKOUT
from mtptrain.engines.requests import EngineCounts, EngineRun
from mtptrain.heads.base import Head
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.loading import load_target
from tests.mtptrain.engines.conftest import export_head
from tests.serving.breaks import rolled
from tests.serving.cases import EOS, HEADS, Case
from tests.serving.ours import QUESTIONS, OnDisk, Serve, drafted_here, served_from

ASKED = QUESTIONS._replace(prompts=[prompt[:64] for prompt in QUESTIONS.prompts[:20]])


@pytest.fixture(scope="session")
def mlx_python() -> Path:
    """Returns the Python of the checkout's environment, or skips the test if it was not made."""
    if not (CHECKOUT / ".venv-mlx/.installed").is_file():
        pytest.skip("NOTHING IS SERVED BY MLX: run `make .venv-mlx/.installed`")
    return ENGINE.find_program(ServingConfig())


@pytest.fixture(scope="session")
def mlx_target_of(
    target_of: Callable[[str], OnDisk], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], OnDisk]:
    """Returns a function that makes each target with RoPE where mlx-lm reads it, unlike transformers 5."""

    @cache
    def make(name: str) -> OnDisk:
        directory = shutil.copytree(target_of(name).directory, tmp_path_factory.mktemp("mlx") / name)
        config = json.loads((directory / "config.json").read_text())
        config |= rope_for_mlx_lm(config["rope_parameters"])
        (directory / "config.json").write_text(json.dumps(config))
        return OnDisk(directory, load_target(directory, torch.float32, torch.device("cpu")))

    return make


@pytest.fixture(scope="session")
def serve_by_mlx(
    mlx_python: Path,
    mlx_target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path_factory: pytest.TempPathFactory,
) -> Serve:
    """Returns a function that serves a case, and returns our answers, MLX's, and our counts by its rules."""

    def serve(case: Case) -> tuple[list[Generation], EngineRun, EngineCounts]:
        on_disk, directory = mlx_target_of(case.target), tmp_path_factory.mktemp("head")
        state = head_of(case.head, case.target).state_dict()
        form = export_head(directory, "mlx", HEADS[case.head], state, on_disk.directory)
        if case.broken in ("layer_ids", "norm"):
            spoil(directory, case)
        first = (lambda token: (token + 1) % EOS) if case.broken == "first_token" else int
        asked = ASKED._replace(prompts=[[first(prompt[0]), *prompt[1:]] for prompt in ASKED.prompts])
        served = replace(served_from(mlx_python, on_disk.directory, directory), facts={"method": form.method})
        [theirs] = ENGINE.generate(served, case.num_speculative_tokens, [asked])
        ours = drafted_here(case, mlx_target_of, head_of, ASKED.prompts)
        return ours, theirs, ENGINE.counted(ours, case.num_speculative_tokens, ASKED)[0]

    return serve


NORMS = {"eagle3": "layers.0.hidden_norm.weight", "dflash": "hidden_norm.weight", "draft_model": "model.norm.weight"}


def spoil(directory: Path, case: Case) -> None:
    """Moves a head's layer ids by one layer, or one of its norms by one place."""
    if case.broken == "norm":
        tensors, name = load_file(directory / "model.safetensors"), NORMS[case.head]
        save_file(tensors | {name: rolled(tensors[name])}, directory / "model.safetensors", {"format": "pt"})
        return
    config = json.loads((directory / "config.json").read_text())
    section, key = (config, LAYER_IDS) if case.head == "eagle3" else (config["dflash_config"], "target_layer_ids")
    section[key] = [layer + 1 for layer in section[key]]
    (directory / "config.json").write_text(json.dumps(config))
