"""Tests the pipeline on a quantised target. vLLM extracts the target's states and serves the head trained on them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtptrain.engines.requests import ROUNDING_TOLERANCE
from tests.conftest import TINY_SETTINGS, succeed, write_text_files
from tests.quantised import quantise
from tests.serving.cases import HAS_AMX
from tests.serving.ours import OnDisk

pytestmark = pytest.mark.slow
STAGES = ("hidden-states", "train", "export", "serving-check")


@pytest.mark.parametrize(
    ("name", "dtype", "draft_vocab_size"),
    [("int8", "bfloat16" if HAS_AMX else "float32", None), ("int4", "bfloat16", None), ("int4", "bfloat16", 96)],
)
def test_a_head_for_a_quantised_target_is_accepted_in_the_engine_as_measured(
    name: str,
    dtype: str,
    draft_vocab_size: int | None,
    vllm_python: str,
    target_of: Callable[[str], OnDisk],
    tmp_path: Path,
) -> None:
    """The lm_head of int4 is quantised too. With a draft vocabulary, the head has dequantised rows of it."""
    # vLLM multiplies int4 weights in bf16 only, and int8 too with AMX. Activations may round to other int8 values.
    quantise(target_of("llama").directory, tmp_path / "target", name, lm_head=name == "int4")
    overrides = (
        *TINY_SETTINGS,
        f"run_dir={tmp_path}/run",
        f"target.path={tmp_path}/target",
        f"prompts.paths=[{write_text_files(tmp_path / 'files', num_files=80)}]",
        *(
            "head=eagle3",
            "head.capture_layers=[0,2]",
            "head.start_from_target=true",
            f"head.draft_vocab_size={draft_vocab_size or 'null'}",
        ),
        *("acceptance.num_prompts=24", "acceptance.max_new_tokens=64"),
        *("hidden_states.backend=vllm", f"hidden_states.dtype={dtype}", f"acceptance.dtype={dtype}"),
        f"serving.program={vllm_python}",
    )
    for module in ("prompts", *["draft-vocab"] * (draft_vocab_size is not None), *STAGES):
        succeed(module, *overrides)
    report = json.loads((tmp_path / "run/serving_check/report.json").read_text())
    ours, theirs = report["ours"], report["theirs"]
    assert 0 < ours["accepted_at"][0] < ours["rounds"]
    assert abs(theirs["acceptance_length"] / ours["acceptance_length"] - 1) <= ROUNDING_TOLERANCE
