"""Tests the pipeline on a quantised target. vLLM extracts the target's states and serves the head trained on them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtptrain.engines.requests import ROUNDING_TOLERANCE
from tests.conftest import TINY_SETTINGS, succeed, write_text_files
from tests.quantised import quantise
from tests.serving.ours import OnDisk

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "dtype"), [("int8", "float32"), ("int4", "bfloat16")])
def test_a_head_for_a_quantised_target_is_accepted_in_the_engine_as_measured(
    name: str, dtype: str, vllm_python: str, target_of: Callable[[str], OnDisk], tmp_path: Path
) -> None:
    # vLLM multiplies int4 weights in bf16 only. Even in fp32, activations may round to different int8 values.
    quantise(target_of("llama").directory, tmp_path / "target", name)
    overrides = (
        *TINY_SETTINGS,
        f"run_dir={tmp_path}/run",
        f"target.path={tmp_path}/target",
        f"prompts.paths=[{write_text_files(tmp_path / 'files', num_files=80)}]",
        *("head=eagle3", "head.capture_layers=[0,2]", "acceptance.num_prompts=12", "acceptance.max_new_tokens=32"),
        *("hidden_states.backend=vllm", f"hidden_states.dtype={dtype}", f"acceptance.dtype={dtype}"),
        f"serving.program={vllm_python}",
    )
    for module in ("prompts", "hidden-states", "train", "export", "serving-check"):
        succeed(module, *overrides)
    report = json.loads((tmp_path / "run/serving_check/report.json").read_text())
    ours, theirs = report["ours"], report["theirs"]
    assert 0 < ours["accepted_at"][0] < ours["rounds"]
    assert abs(theirs["acceptance_length"] / ours["acceptance_length"] - 1) <= ROUNDING_TOLERANCE
