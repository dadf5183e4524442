"""Tests that states of another target, other prompts or other settings are refused with the reason."""

import dataclasses
from pathlib import Path

import pytest

from mtptrain.data.identity import StoreIdentity, TargetIdentity
from mtptrain.hidden_states.store import HiddenStore
from mtptrain.hidden_states.writer import begin_store
from tests.mtptrain.hidden_states.small_store import EVERY_SHARD, IDENTITY, LENGTHS, SHARD_TOKENS, TARGET, make_store


def target_with(**change: str) -> StoreIdentity:
    return dataclasses.replace(IDENTITY, target=dataclasses.replace(TARGET, **change))


OTHERS = {
    "the hash of the target's config": target_with(config_sha256="x"),
    "the hash of the target's weights": target_with(weights_sha256="x"),
    "the hash of the tokenizer": target_with(tokenizer_sha256="x"),
    "the hash of the chat template": target_with(chat_template_sha256="x"),
    r"the mode of the chat template \(prompts.template_kwargs\)": target_with(template_kwargs="x"),
    "the list of captured layers": dataclasses.replace(IDENTITY, capture_layers=(1,)),
    r"the compute dtype \(hidden_states.dtype\)": dataclasses.replace(IDENTITY, compute_dtype="x"),
    r"the hash of the prompts \(train.safetensors\)": dataclasses.replace(IDENTITY, prompts_sha256="x"),
    "the kind of hidden states": dataclasses.replace(IDENTITY, hidden_states="x"),
    r"the stored dtype \(hidden_states.store_dtype\)": dataclasses.replace(IDENTITY, dtype="x"),
    r"the backend \(hidden_states.backend\)": dataclasses.replace(IDENTITY, backend="x"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_states_of_something_else_are_refused_with_the_reason(tmp_path: Path, what: str) -> None:
    value = "\\(1,\\)" if "layers" in what else "x"
    message = (
        rf"json: {what} must be {value}, but is [^;]+ \(target expected: .*delete .* run mtptrain hidden-states again"
    )
    begin_store(tmp_path / "unfinished", IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    with pytest.raises(ValueError, match="plan." + message):
        begin_store(tmp_path / "unfinished", OTHERS[what], SHARD_TOKENS, EVERY_SHARD)
    make_store(tmp_path / "finished")
    with pytest.raises(ValueError, match="manifest." + message):
        begin_store(tmp_path / "finished", OTHERS[what], SHARD_TOKENS, EVERY_SHARD)
    with pytest.raises(ValueError, match="manifest." + message):
        HiddenStore.open(tmp_path / "finished", OTHERS[what])


def test_every_difference_is_named_at_once(tmp_path: Path) -> None:
    make_store(tmp_path)
    other = dataclasses.replace(target_with(weights_sha256="x", path="models/tuned"), prompts_sha256="y")
    with pytest.raises(
        ValueError, match=r"weights must be x, .* must be y, .*expected: models/tuned, found: models/llama"
    ):
        HiddenStore.open(tmp_path, other)


def test_every_field_of_an_identity_is_compared() -> None:
    fields = {field.name for field in dataclasses.fields(StoreIdentity)} - {"target"}
    hashes = {field.name for field in dataclasses.fields(TargetIdentity)} - {"path", "revision"}
    assert len(IDENTITY.facts()) == len(OTHERS) == len(fields | hashes)


def test_the_same_target_under_another_path_is_accepted(tmp_path: Path) -> None:
    make_store(tmp_path)
    assert HiddenStore.open(tmp_path, target_with(path="/elsewhere", revision="main")).num_documents == len(LENGTHS)
