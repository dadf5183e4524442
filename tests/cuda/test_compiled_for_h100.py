"""Tests that `tests.cuda.inductor` compiles for an H100 every function that `train.compile` fuses on a GPU."""

import ast
import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from mtptrain.heads import dflash, layer_head, medusa
from mtptrain.heads.attention import draft_blocks
from mtptrain.heads.attention import training as attention
from mtptrain.training import loss_blocks, teacher
from tests.cuda import guard
from tests.cuda.kernels import HIDDEN_SIZE, NUM_DEPTHS, VOCAB_SIZE, Kernel

OWN_VOCABULARY = 32_000
CASES = {"mtp": ("mtp", None, "kl"), "eagle3": ("eagle3", OWN_VOCABULARY, "lk")}
"""Head, size of the draft vocabulary and loss of each training step that is compiled."""
NOT_IN_STEPS = {"_softmax", "_own_probs"}
"""Fused functions that compute the teacher on a CPU. A training step on a GPU does not call them."""


OTHER_HEADS = {"dflash": (dflash, draft_blocks), "medusa": (medusa,), "peagle": (), "draft_model": ()}
"""Heads with other fused functions or shapes, and the modules of those functions."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Kernel]]:
    return compile_steps(CASES, tmp_path_factory.mktemp("compiled"))


def compile_steps(cases: dict[str, tuple[str, int | None, str]], cache: Path) -> dict[str, list[Kernel]]:
    """Returns the kernels of each case. The cases are compiled at the same time."""
    why_not = (
        guard.WHY_NOT
        if guard.LIBRARY is None
        else ""
        if find_spec("triton")
        else "triton is not installed; run `make setup`"
    )
    if why_not:
        pytest.skip(f"*** NO FUSED FUNCTION IS COMPILED FOR GPUS: {why_not} ***")
    processes = {}
    for name, case in cases.items():
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/{name}",
            "TRITON_CACHE_DIR": f"{cache}/{name}/triton",
        }
        command = [sys.executable, "-m", "tests.cuda.inductor", case[0], json.dumps(case[1]), case[2]]
        with Path(f"{cache}/{name}.err").open("w") as errors:
            processes[name] = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
    found = {name: process.communicate()[0] for name, process in processes.items()}
    for name, process in processes.items():
        assert process.returncode == 0, Path(f"{cache}/{name}.err").read_text()[-3000:]
    return {name: [Kernel(**kernel) for kernel in json.loads(text.splitlines()[-1])] for name, text in found.items()}


def fused_functions(*modules: ModuleType) -> set[str]:
    """Returns the names of the functions in these modules that are decorated with `fused`."""
    names = set()
    for module in modules:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(name).startswith("fused") for name in node.decorator_list
            ):
                names.add(node.name)
    return names


def test_every_fused_function_of_a_step_becomes_machine_code_for_an_h100(kernels: dict[str, list[Kernel]]) -> None:
    every = [kernel for found in kernels.values() for kernel in found]
    assert {kernel.target for kernel in every} == {".target sm_90a"}
    assert min(kernel.cubin_bytes for kernel in every) > 1000
    assert (
        fused_functions(loss_blocks, teacher, layer_head, attention) - {kernel.function for kernel in every}
        == NOT_IN_STEPS
    )


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_the_other_heads_become_machine_code_for_an_h100_too(name: str, tmp_path: Path) -> None:
    found = compile_steps({name: (name, None, "kl")}, tmp_path)[name]
    assert {kernel.target for kernel in found} == {".target sm_90a"}
    missing = fused_functions(*OTHER_HEADS[name]) - {kernel.function for kernel in found}
    assert missing <= NOT_IN_STEPS, missing


def test_functions_with_gradients_are_compiled_backward_too(kernels: dict[str, list[Kernel]]) -> None:
    backward = {kernel.function for found in kernels.values() for kernel in found if kernel.is_backward}
    assert {"_project", "_finish", "_keys_values"} <= backward


def bytes_of(kernels: list[Kernel], function: str) -> int:
    """Returns the bytes that a function of the loss moves for each element of its matrix of logits."""
    return sum(kernel.bytes_per_element for kernel in kernels if kernel.function == function)


def test_the_loss_moves_at_most_12_bytes_for_each_drafted_logit(kernels: dict[str, list[Kernel]]) -> None:
    """In bf16, each logit of the drafts is read twice, and its gradient is written once. Each logit of the teacher is
    read once at each depth and once before all depths.

    Zeroing, copying and scaling a row's states and their gradients moves another 16 bytes for each of H values, which
    is 0.5 bytes for each logit.
    """
    at_depths, before = (bytes_of(kernels["mtp"], name) for name in ("_rows_and_grad", "_totals"))
    assert (at_depths, before) == (2 + 2 + 2 + 2, 2)
    assert at_depths + before / NUM_DEPTHS + 16 * HIDDEN_SIZE / VOCAB_SIZE < 12


def test_every_loss_moves_at_most_12_bytes_for_each_logit_that_is_computed(kernels: dict[str, list[Kernel]]) -> None:
    """Counts the drafts' logits at all depths over the head's vocabulary, and the teacher's over the target's."""
    for name, (_, draft_vocab_size, _) in CASES.items():
        drafted = NUM_DEPTHS * (draft_vocab_size or VOCAB_SIZE)
        gathered = bytes_of(kernels[name], "_own_logits") * (draft_vocab_size or 0)
        moved = bytes_of(kernels[name], "_rows_and_grad") * drafted + gathered
        moved += bytes_of(kernels[name], "_totals") * VOCAB_SIZE + 16 * NUM_DEPTHS * HIDDEN_SIZE
        assert moved / (drafted + VOCAB_SIZE) < 12, name


def test_a_vocabulary_of_the_heads_own_is_gathered_once_for_all_depths(kernels: dict[str, list[Kernel]]) -> None:
    assert bytes_of(kernels["eagle3"], "_totals") == 2
    assert bytes_of(kernels["eagle3"], "_own_logits") <= 6
