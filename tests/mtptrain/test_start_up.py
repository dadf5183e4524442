"""Tests what a command loads before it knows its settings: torch and transformers take seconds to import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "matplotlib", "wandb", "accelerate")
COMPOSE_ALL = f"""
import sys
from pathlib import Path
from hydra import compose, initialize_config_dir
from mtptrain.config import RECIPES, load_config

recipes = [path.stem for path in Path(RECIPES, "recipe").glob("*.yaml")]
assert "quickstart" in recipes
for recipe in recipes:
    with initialize_config_dir(RECIPES, version_base="1.3"):
        load_config(compose("pipeline", [f"recipe={{recipe}}", "run_dir=not_there", "target.path=demo"]))
print(sorted(set(sys.modules) & set({HEAVY})))
"""
MAIN = f"""
import sys
from mtptrain.__main__ import main
try:
    main()
finally:
    print(sorted(set(sys.modules) & set({(*HEAVY, "hydra")})))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MTPTRAIN_CPU_BF16": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_composing_every_recipe_loads_no_heavy_library() -> None:
    result = run(COMPOSE_ALL)
    assert (result.stderr, result.stdout) == ("", "[]\n")


@pytest.mark.parametrize(
    ("arguments", "message", "loaded"),
    [
        (["--help"], "usage: mtptrain STAGE", "[]"),
        (["train", "recipe=quickstart", "train.lrr=1"], "did you mean train.lr?", "['hydra']"),
        (["train", "recipe=quickstrat"], "did you mean quickstart?", "['hydra']"),
        (["train", "recipe=quickstart", "train.lr=-1"], "train.lr: must be a number of at least 0.0", "['hydra']"),
        (["train", "recipe=quickstart", "--help"], "lr: 0.003", "['hydra']"),
    ],
)
def test_help_and_refusals_load_no_heavy_library(arguments: list[str], message: str, loaded: str) -> None:
    result = run(MAIN, *arguments)
    assert message in result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == loaded
