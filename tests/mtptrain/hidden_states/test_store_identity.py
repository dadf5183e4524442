"""Tests that states of another target, other prompts or other settings are refused with the reason."""

import dataclasses
from pathlib import Path

import pytest

from mtptrain.data.identity import StoreIdentity, TargetIdentity
from mtptrain.hidden_states.store import HiddenStore
from mtptrain.hidden_states.writer import begin_store
from mtptrain.utils.errors import UserError
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


def test_states_of_something_else_are_refused_with_the_reason(tmp_path: Path) -> None:
    fields = {field.name for field in dataclasses.fields(StoreIdentity)} - {"target"}
    hashes = {field.name for field in dataclasses.fields(TargetIdentity)} - {"path", "revision"}
    assert len(IDENTITY.facts()) == len(OTHERS) == len(fields | hashes), "every field must be compared"
    begin_store(tmp_path / "unfinished", IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    make_store(tmp_path / "finished")
    for what, identity in OTHERS.items():
        value = "\\(1,\\)" if "layers" in what else "x"
        found = rf"{what} must be {value}, but is [^;]+ \(target expected: .*delete .* run mtptrain hidden-states again"
        with pytest.raises(UserError, match=f"plan.json: {found}"):
            begin_store(tmp_path / "unfinished", identity, SHARD_TOKENS, EVERY_SHARD)
        with pytest.raises(UserError, match=f"manifest.json: {found}"):
            begin_store(tmp_path / "finished", identity, SHARD_TOKENS, EVERY_SHARD)
        with pytest.raises(UserError, match=f"manifest.json: {found}"):
            HiddenStore.open(tmp_path / "finished", identity)


def test_every_difference_is_named_at_once_and_the_path_of_a_target_is_none(tmp_path: Path) -> None:
    make_store(tmp_path)
    other = dataclasses.replace(target_with(weights_sha256="x", path="models/tuned"), prompts_sha256="y")
    message = r"weights must be x, .* must be y, .*expected: models/tuned, found: models/llama"
    with pytest.raises(UserError, match=message):
        HiddenStore.open(tmp_path, other)
    assert HiddenStore.open(tmp_path, target_with(path="/elsewhere", revision="main")).num_documents == len(LENGTHS)
