"""Tests that the programs measure, fine-tune, export and serve the MTP layer of a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.conftest import TINY_SETTINGS, succeed, write_text_files
from tests.serving.cases import Case
from tests.serving.ours import OnDisk
from tests.serving.writing import make_head, write_served_head

pytestmark = pytest.mark.slow
SETTINGS = ("head.attention_bias=true", "head.zero_first_embedding=true", "head.prenorm_states=true")


def report(run_dir: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / stage / "report.json").read_text())
    return found


@pytest.mark.parametrize("name", ["mimo", "glm4_moe"])
def test_a_checkpoints_own_layer_is_measured_fine_tuned_and_served_with_equal_counters(
    name: str, vllm_python: str, target_of: Callable[[str], OnDisk], tmp_path: Path
) -> None:
    is_mimo = name == "mimo"
    checkpoint, run_dir, on_disk = tmp_path / name, tmp_path / "run", target_of(name)
    case = Case("mtp_mimo" if is_mimo else "native_mtp", name)
    head = make_head(on_disk.target, case.head, num_steps=12)
    write_served_head(checkpoint, on_disk.target, on_disk.directory, case, head)
    overrides = (
        *TINY_SETTINGS,
        *(SETTINGS if is_mimo else ("head=native_mtp", "head.start_from_target=false")),
        f"run_dir={run_dir}",
        f"target.path={checkpoint}",
        f"head.init_from={checkpoint}",
        f"prompts.paths=[{write_text_files(tmp_path / 'files', num_files=80)}]",
        *("acceptance.num_prompts=12", "acceptance.max_new_tokens=32", "train.lr=3e-3"),
        f"serving.program={vllm_python}",
    )
    succeed("prompts", *overrides)
    succeed("hidden-states", *overrides)
    layer, measured = load_file(checkpoint / "mtp.safetensors"), []
    for is_trained in (False, True):
        for stage in (*(["train"] if is_trained else []), "acceptance", "export", "serving-check"):
            succeed(stage, *overrides)
        check, served = report(run_dir, "serving_check"), load_file(run_dir / "export/vllm/mtp.safetensors")
        ours = check["ours"]
        assert check["is_equal"] and ours == check["theirs"] and 0 < ours["accepted_at"][0] < ours["rounds"]
        assert ours["accepted_at"] == report(run_dir, "acceptance")["accepted_at"]
        trained = [tensor for tensor in layer if "e_score_correction_bias" not in tensor]
        is_same = [(served[tensor] == layer[tensor]).all().item() for tensor in trained]
        assert served.keys() == layer.keys() and not (any(is_same) if is_trained else not all(is_same))
        measured.append(ours["acceptance_length"])
    assert measured[0] != measured[1]
    records = map(json.loads, (run_dir / "train/metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < 0.9 * losses[0]
