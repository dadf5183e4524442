"""Tests that stored states match those of transformers, and which facts are stored with them."""

import shutil
from pathlib import Path

import pytest
import torch

from data_prep.hidden_states import extract_hidden_states
from mtptrain.heads import HEADS
from mtptrain.hidden_states.extraction.transformers_streams import TransformersStreams, residual_streams
from mtptrain.hidden_states.store import HiddenStore, find_damage
from mtptrain.run import Run
from mtptrain.target.loading import load_target
from tests.conftest import make_target
from tests.data_prep.hidden_states.stage import CPU, LENGTHS, ONE_RANK, ConfigFor, make_documents, read_store


@pytest.mark.parametrize("capture_layers", [(), (2, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_states_of_each_document_are_those_of_its_own_forward(
    prepared: ConfigFor, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, capture_layers: tuple[int, ...]
) -> None:
    monkeypatch.setattr(HEADS["mtp"], "resolve_capture_layers", lambda *_: capture_layers)
    config = prepared(f"hidden_states.dtype={dtype}")
    extract_hidden_states(Run(config), ONE_RANK)
    store, documents = HiddenStore.open(config.stage_dir("hidden_states")), make_documents(LENGTHS)
    assert not find_damage(store) and len(store.manifest.shards) > 2
    assert store.document_lengths.tolist() == LENGTHS
    target = TransformersStreams(load_target(tiny_target, getattr(torch, dtype), CPU), (), 1).target
    for index in range(len(documents)):
        stored = store.document(index)
        assert stored.document_id == 100 + index
        assert stored.input_ids.tolist() == documents.token_ids(index).tolist()
        assert stored.loss_mask.tolist() == documents.mask(index).tolist()
        streams = residual_streams(target, [stored.input_ids], (*capture_layers, 2)).float()
        # Batching several documents changes the states only by rounding, by at most one unit of bf16.
        torch.testing.assert_close(stored.hidden_states.float(), streams[:, -1], rtol=2**-7, atol=2**-7)
        if capture_layers:
            assert stored.aux_hidden_states is not None
            torch.testing.assert_close(stored.aux_hidden_states.float(), streams[:, :-1], rtol=2**-7, atol=2**-7)


def test_the_number_of_threads_that_a_process_starts_with_changes_no_bit(prepared: ConfigFor, tmp_path: Path) -> None:
    # At these sizes, bf16 matrix products with one thread differ from those with four.
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4}
    target_dir, found = make_target(tmp_path / "wide", family_settings=sizes), []
    for threads in (1, 4):
        config = prepared(f"target.path={target_dir}", lengths=[64, 100, 100, 200, 333])
        torch.set_num_threads(threads)
        extract_hidden_states(Run(config), ONE_RANK)
        found.append(read_store(config.stage_dir("hidden_states")))
        shutil.rmtree(config.stage_dir("hidden_states"))
    assert found[0] == found[1]
