"""Tests that vLLM's store has the layout and states of transformers' store."""

import shutil
from pathlib import Path

import pytest
import torch

from mtptrain.hidden_states.store import HiddenStore, find_damage
from tests.conftest import TINY_SETTINGS, make_target, succeed, write_text_files

SEPARATE = ("stage.json",)
"""Files that record how the program was called. Every run writes them anew."""


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> list[str]:
    """Returns the overrides of a run whose stage 1 is done."""
    directory = tmp_path_factory.mktemp("vllm_store")
    target_dir = make_target(directory / "target", num_attention_heads=2, num_key_value_heads=2)
    files = write_text_files(directory / "files")
    given = [*TINY_SETTINGS, f"target.path={target_dir}", f"prompts.paths=[{files}]", f"run_dir={directory}/run"]
    given += ["head=eagle3", "head.capture_layers=[0,1]", "hidden_states.batch_tokens=512"]
    given.append(f"serving.program={vllm_python}")
    succeed("prompts", *given)
    return given


def store_dir(overrides: list[str]) -> Path:
    return (
        Path(next(word for word in overrides if word.startswith("run_dir=")).removeprefix("run_dir=")) / "hidden_states"
    )


def extract(overrides: list[str], *more: str, num_ranks: int = 1) -> dict[str, bytes]:
    result = succeed("hidden-states", *overrides, *more, num_ranks=num_ranks)
    assert "computed now" in result.stdout
    return {
        path.name: path.read_bytes() for path in sorted(store_dir(overrides).iterdir()) if path.name not in SEPARATE
    }


@pytest.fixture(scope="module")
def undisturbed(overrides: list[str]) -> dict[str, bytes]:
    files = extract(overrides, "hidden_states.backend=vllm")
    assert len(files) > 6
    store_dir(overrides).rename(store_dir(overrides).with_name("by_vllm"))
    return files


def test_layout_and_states_are_those_of_the_other_backend(overrides: list[str], undisturbed: dict[str, bytes]) -> None:
    by_transformers = extract(overrides)
    assert {name: len(content) for name, content in by_transformers.items() if name.startswith("shard_")} == {
        name: len(content) for name, content in undisturbed.items() if name.startswith("shard_")
    }
    stores = [HiddenStore.open(store_dir(overrides).with_name(name)) for name in ("hidden_states", "by_vllm")]
    assert not any(find_damage(store, show_progress=False) for store in stores)
    assert [store.manifest.identity.backend for store in stores] == ["transformers", "vllm"]
    for index in range(stores[0].num_documents):
        one, other = (store.document(index) for store in stores)
        assert one.document_id == other.document_id
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.loss_mask, other.loss_mask)
        for name in ("hidden_states", "aux_hidden_states"):  # computed in float32, so only bf16 rounding differs
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=2**-7, atol=2**-7)
    shutil.rmtree(store_dir(overrides))
