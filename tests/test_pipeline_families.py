"""Runs all five stages for targets of other families than the demo's, up to an export."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY_SETTINGS, run_program, write_text_files
from tests.families import EXACT, IMAGE_MODELS, write_image_model, write_member

FAMILIES = {
    "granite": "mtp",  # factors of embeddings, residuals, scores and logits
    "phi": "eagle3",  # LayerNorm, biases, partial rotary
    "gpt2": "mtp",  # learned positions
    "olmo3": "mtp",  # norms after the layers, windows
    "gemma2": "mtp",  # soft caps
    "gpt_oss": "eagle3",  # sinks, experts
    "glm4_moe": "mtp",  # experts, partial rotary
    "deepseek_v3": "eagle3",  # experts, latent attention
    "llama4_text": "mtp",  # chunks, experts
    "qwen3_5_text": "eagle3",  # states by the delta rule
    "nemotron_h": "mtp",  # Mamba, other tensor names
    "lfm2": "medusa",  # short convolutions
    "gemma4_text": "peagle",  # proportional rotary, windows
    "gemma3": "mtp",  # the language model of an image model
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_target_of_any_family_goes_through_all_stages(tmp_path: Path, name: str) -> None:
    if name in IMAGE_MODELS:
        target = write_image_model(tmp_path / "target", *IMAGE_MODELS[name])
    else:
        target = write_member(tmp_path / "target", *EXACT[name])
    files = write_text_files(tmp_path / "files")
    head, engine = FAMILIES[name], "sglang" if name == "gemma3" else "vllm"
    settings = (f"run_dir={tmp_path}/run", f"target.path={target}", f"prompts.paths=[{files}]", "train.max_steps=4")
    for module in ("prompts", "hidden-states", "train", "acceptance", "export"):
        result = run_program(module, *TINY_SETTINGS, *settings, f"head={head}", f"export.engine={engine}")
        assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "run/acceptance/report.json").read_text())
    assert report["rounds"] > 0
    notes = (tmp_path / f"run/export/{engine}/README.md").read_text()
    assert ("The target also reads images" in notes) == (name in IMAGE_MODELS)
