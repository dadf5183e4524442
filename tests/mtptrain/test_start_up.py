"""Tests what a command loads before it knows its settings, sets for OpenMP, and does when Ctrl-C ends its imports."""

import os
import signal
import subprocess
import sys
import time
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


def test_no_stage_loads_wandb_before_it_tracks() -> None:
    """It makes folders in the temporary directory when it is imported."""
    assert run("import sys, mtptrain.train, eval.acceptance\nprint('wandb' in sys.modules)").stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "message", "loaded"),
    [
        (["--help"], "usage: mtptrain STAGE", "[]"),
        (["train", "recipe=quickstart", "train.lrr=1"], "did you mean train.lr?", "['hydra']"),
        (["train", "recipe=quickstrat"], "but is quickstrat; did you mean quickstart?", "['hydra']"),
        (["train", "recipe=quickstart", "train.lr=-1"], "train.lr: must be a number of at least 0.0", "['hydra']"),
        (["train", "recipe=quickstart", "--help"], "  lr                        0.003           Peak", "['hydra']"),
        (["train", "--help"], "  lr                        0.001           Peak", "['hydra']"),
    ],
)
def test_help_and_refusals_load_no_heavy_library(arguments: list[str], message: str, loaded: str) -> None:
    result = run(MAIN, *arguments)
    assert message in result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == loaded


def test_importing_the_library_changes_nothing_in_the_process() -> None:
    facts = "dict(os.environ), signal.getsignal(signal.SIGINT), set(threading.enumerate()), sys.excepthook"
    code = f"import os, signal, sys, threading; before = {facts}; import mtptrain; assert before == ({facts})"
    code += f"; assert not {{*{(*HEAVY, 'hydra')}}} & set(sys.modules) and 'generate' in dir(mtptrain)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_waiting_threads_of_programs_give_up_their_core_soon_unless_the_user_says_otherwise() -> None:
    """OpenMP prints its settings when torch is loaded."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    for code, given, count in (
        ("import data_prep, eval", {}, 1000),
        ("from mtptrain.__main__ import main; main()", {}, 1000),
        ("import eval", {"GOMP_SPINCOUNT": "77"}, 77),
        ("import eval", {"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ):
        environment, command = alone | {"OMP_DISPLAY_ENV": "verbose", **given}, f"{code}; import torch"
        shown = subprocess.run([sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True).stderr
        assert (f"GOMP_SPINCOUNT = '{count or 1000}'".encode() in shown) == (count is not None)


def test_ctrl_c_while_torch_is_imported_ends_the_process_at_once() -> None:
    command = [sys.executable, "-m", "mtptrain", "prompts", "recipe=quickstart", "run_dir=not_there"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None, "the process ended before Ctrl-C was sent"
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=120)[1], process.returncode) == ("", -signal.SIGINT)


def test_a_rank_ends_with_a_launcher_that_is_killed() -> None:
    rank = (
        "import time, mtptrain.utils.startup as s; s.prepare_process(); print(1, flush=True); time.sleep(9); print(2)"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "run"}
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        process.kill()
        assert process.stdout.read() == b"", "a rank that lives on would write more"
