"""Tests that damaged weights are refused before extraction, and a missing draft vocabulary before the store is read."""

import shutil
from pathlib import Path

import pytest

from mtptrain.utils.files import file_sha256
from tests.hostile_inputs.damages import (
    GARBAGE,
    STATES,
    TRAIN,
    Damage,
    Place,
    in_config,
    in_target,
    in_weights,
    integer_weights,
    refused,
)

INCOMPLETE = r"\S+/model\.safetensors: must be a complete safetensors file"


def flipped_after_download(place: Place) -> list[str]:
    path = place.target / "model.safetensors"
    metadata = place.target / ".cache/huggingface/download/model.safetensors.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"{'a' * 40}\n{file_sha256(path)}\n0\n")
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    return ["target.verify=true"]


WEIGHTS: dict[str, tuple[Damage, str]] = {
    "empty": (in_weights(lambda content: b""), INCOMPLETE),
    "garbage": (
        in_weights(lambda content: GARBAGE * 99),
        INCOMPLETE,
    ),
    "truncated": (in_weights(lambda content: content[:-99]), INCOMPLETE),
    "header length": (
        in_weights(lambda content: content[:6] + b"\x7f" + content[7:]),
        INCOMPLETE,
    ),
    "flipped byte": (flipped_after_download, r"\S+/model\.safetensors: must have the hub's sha256"),
    "integers": (integer_weights, r"target\.path: model\.embed_tokens must be unquantised"),
    "index garbage": (in_target("model.safetensors.index.json", GARBAGE), r"\S+index\.json: must be UTF-8"),
    "index outside": (
        in_target("model.safetensors.index.json", b'{"weight_map": {"a": "/etc/a.safetensors"}}'),
        r"\S+index\.json: must name files in its own directory",
    ),
    "vocabulary": (
        in_config(vocab_size=1000),
        r"\S+: model\.embed_tokens\.weight must have the shape",
    ),
    "unknown quantisation": (
        in_config(quantization_config={"quant_method": "nope"}),
        r"target\.path: transformers must be able to run .*/config\.json describes, but reports .*nope",
    ),
    "fewer layers": (in_config(num_hidden_layers=1), r"\S+/target: the weights must have num_hidden_layers=1"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_damaged_weights_are_refused_before_anything_is_extracted(
    place: Place, tiny_run: tuple[Path, tuple[str, ...]], case: str
) -> None:
    """Tests each damage with prompts of the undamaged target, so that only the damage can cause the refusal."""
    shutil.copytree(tiny_run[0] / "prompts", place.directory / "prompts")
    damage, message = WEIGHTS[case]
    overrides = [*damage(place), f"run_dir={place.directory}/other"]
    shutil.copytree(place.directory / "prompts", place.directory / "other/prompts")
    before = sorted((place.directory / "other").rglob("*"))
    refused(place, STATES, overrides, message)
    assert [path for path in sorted((place.directory / "other").rglob("*")) if path not in before] == []


def test_a_draft_vocabulary_that_is_missing_is_told_before_the_store_is_read(
    place: Place, tiny_run: tuple[Path, tuple[str, ...]]
) -> None:
    shutil.copytree(tiny_run[0] / "prompts", place.directory / "other/prompts")
    overrides = ["head=eagle3", "head.capture_layers=[1,2]", "head.draft_vocab_size=64"]
    refused(
        place, TRAIN, [*overrides, f"run_dir={place.directory}/other"], r"\S*draft_vocab\S*: .*mtptrain draft-vocab"
    )
    assert not (place.directory / "other/train").exists()
