"""Tests that every function that `train.compile` fuses on a GPU is compiled to machine code for an H100."""

import ast
import inspect
import pkgutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mtptrain import heads, training
from tests.cuda import guard
from tests.cuda.inductor import Kernel, compile_step
from tests.cuda.steps import in_child

pytestmark = pytest.mark.slow
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "mtp": ({}, "kl"),
    "eagle3": ({"draft_vocab_size": 32_000, "fc_norm": True}, "lk"),
    "dflash": ({}, "kl"),
    "medusa": ({}, "kl"),
}
"""Settings and loss of each head whose step is compiled."""
NOT_IN_STEPS = {"_softmax", "_own_probs"}
"""Fused functions that compute the teacher on a CPU. A training step on a GPU does not call them."""


def fused_functions() -> set[str]:
    """Returns the names of all functions of heads and training that are decorated with `fused`."""
    names = set()
    for package in (heads, training):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            tree = ast.parse(inspect.getsource(import_module(module.name)))
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and any(
                    ast.unparse(name).startswith("fused") for name in node.decorator_list
                ):
                    names.add(node.name)
    return names


def test_every_fused_function_becomes_machine_code_that_moves_each_logit_a_few_times(tmp_path: Path) -> None:
    if guard.LIBRARY is None or not find_spec("triton"):
        pytest.skip(f"*** NO FUSED FUNCTION IS COMPILED FOR GPUS: {guard.WHY_NOT or 'triton is not installed'} ***")
    kernels_of = {head: in_child(compile_step, head, *case, tmp_path) for head, case in CASES.items()}
    kernels = [kernel for compiled in kernels_of.values() for kernel in compiled]
    assert {kernel.target for kernel in kernels} == {".target sm_90a"}
    assert min(kernel.cubin_bytes for kernel in kernels) > 1000
    assert fused_functions() - {kernel.function for kernel in kernels} == NOT_IN_STEPS
    backward = {kernel.function for kernel in kernels if kernel.is_backward}
    assert {"_project", "_finish", "_keys_values"} <= backward
    # In bf16, a logit of the drafts is read twice, and its gradient is written once; one of the teacher is read once
    # at each depth and once before. A vocabulary of the head's own is gathered once for all depths.
    assert [bytes_of(kernels_of["mtp"], name) for name in ("_rows_and_grad", "_totals")] == [2 + 2 + 2 + 2, 2]
    assert bytes_of(kernels_of["eagle3"], "_totals") == 2 and bytes_of(kernels_of["eagle3"], "_own_logits") <= 6


def bytes_of(kernels: list[Kernel], function: str) -> int:
    """Returns the bytes that a function of the loss moves for each logit."""
    return sum(kernel.bytes_per_element for kernel in kernels if kernel.function == function)
