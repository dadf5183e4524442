"""Tests that the programs measure, fine-tune, export and serve the MTP layer of a checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mtptrain.engines.mimo import MIMO_LAYER
from tests.conftest import TINY_SETTINGS, run_program, write_text_files
from tests.serving.cases import Case
from tests.serving.ours import OnDisk
from tests.serving.served_directories.writing import make_head, write_served_head

pytestmark = pytest.mark.slow
SETTINGS = ("head.attention_bias=true", "head.zero_first_embedding=true", "head.prenorm_states=true")


def run(*command: str) -> None:
    result = run_program(*command)
    assert result.returncode == 0, result.stderr[-3000:]


def report(run_dir: Path, stage: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((run_dir / stage / "report.json").read_text())
    return found


Native = tuple[Path, Path, tuple[str, ...]]


@pytest.fixture(scope="module", params=["mimo", "glm4_moe"])
def native(
    request: pytest.FixtureRequest,
    vllm_python: str,
    target_of: Callable[[str], OnDisk],
    tmp_path_factory: pytest.TempPathFactory,
) -> Native:
    """Returns a checkpoint with a partly trained MTP layer, a run folder with hidden states, and the overrides."""
    directory, name = tmp_path_factory.mktemp("native"), str(request.param)
    is_mimo = name == "mimo"
    checkpoint, on_disk = directory / name, target_of(name)
    case = Case("mtp_mimo" if is_mimo else "native_mtp", name)
    head = make_head(on_disk.target, case.head, num_steps=12)
    write_served_head(checkpoint, on_disk.target, on_disk.directory, case, head)
    overrides = (
        *TINY_SETTINGS,
        *(SETTINGS if is_mimo else ("head=native_mtp", "head.start_from_target=false")),
        f"run_dir={directory}/run",
        f"target.path={checkpoint}",
        f"head.init_from={checkpoint}",
        f"prompts.paths=[{write_text_files(directory / 'files', num_files=80)}]",
        "acceptance.num_prompts=12",
        "acceptance.max_new_tokens=32",
        "train.lr=3e-3",
        f"serving.python={vllm_python}",
    )
    run("prompts", *overrides)
    run("hidden-states", *overrides)
    return checkpoint, directory / "run", overrides


def test_a_checkpoints_own_layer_is_measured_fine_tuned_and_served_with_equal_counters(
    native: Native,
) -> None:
    checkpoint, run_dir, overrides = native
    layer = load_file(checkpoint / "mtp.safetensors")
    measured = {}
    for name in ("as it is", "fine-tuned"):
        if name == "fine-tuned":
            run("train", *overrides)
        run("acceptance", *overrides)
        run("export", *overrides)
        run("serving-check", *overrides)
        check, served = report(run_dir, "serving_check"), load_file(run_dir / "export/vllm/mtp.safetensors")
        assert check["is_equal"] and check["ours"] == check["theirs"]
        ours = check["ours"]
        assert isinstance(ours, dict) and 0 < ours["accepted_at"][0] < ours["rounds"]
        assert ours["accepted_at"] == report(run_dir, "acceptance")["accepted_at"]
        trained = [tensor for tensor in layer if "e_score_correction_bias" not in tensor]
        is_same = [(served[tensor] == layer[tensor]).all().item() for tensor in trained]
        assert served.keys() == layer.keys() and (all(is_same) if name == "as it is" else not any(is_same))
        measured[name] = ours["acceptance_length"]
    print(measured)
    assert measured["fine-tuned"] != measured["as it is"]
    records = map(json.loads, (run_dir / "train/metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < 0.9 * losses[0]
    assert f"{MIMO_LAYER}self_attn.q_proj.bias" in layer or "model.layers.4.mlp.experts.0.up_proj.weight" in layer


@pytest.mark.parametrize("native", ["mimo"], indirect=True)
def test_the_settings_of_the_layer_are_named_where_they_are_missing(native: Native, tmp_path: Path) -> None:
    _, run_dir, overrides = native
    shutil.copytree(run_dir / "prompts", tmp_path / "prompts")
    others = [setting for setting in overrides if setting not in (*SETTINGS, f"run_dir={run_dir}")]
    result = run_program("acceptance", *others, f"run_dir={tmp_path}")
    assert result.returncode != 0 and f"set {' '.join(SETTINGS)}" in result.stderr
