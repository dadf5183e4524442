"""Tests that stored states match those of transformers, and which facts are stored with them."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from data_prep import hidden_states
from data_prep.hidden_states import extract_hidden_states
from mtptrain.config import PipelineConfig
from mtptrain.heads import HEADS
from mtptrain.hidden_states.extraction.transformers_streams import TransformersStreams, residual_streams
from mtptrain.hidden_states.store import HiddenStore, find_damage
from mtptrain.run_dir import Run
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.data_prep.hidden_states.stage import (
    CPU,
    LENGTHS,
    ONE_RANK,
    ConfigFor,
    make_documents,
    read_store,
    write_prompts,
)


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


def refused(config: PipelineConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        extract_hidden_states(Run(config), ONE_RANK)


def test_states_of_another_target_other_prompts_or_layers_are_refused_and_kept(
    prepared: ConfigFor, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepared()
    extract_hidden_states(Run(config), ONE_RANK)
    before = read_store(config.stage_dir("hidden_states"))
    tuned = prepared(f"target.path={make_target(tmp_path / 'tuned', seed=1)}")
    refused(tuned, r"the hash of the target's weights must be .*, but is .*delete .*hidden_states")
    refused(prepared("hidden_states.shard_tokens=61"), "hidden_states.shard_tokens must be 61, but is 60")
    with monkeypatch.context() as patch:
        patch.setattr(HEADS["mtp"], "resolve_capture_layers", lambda *_: (1,))
        refused(config, r"the list of captured layers must be \(1,\), but is \(\)")
    write_prompts(Path(config.run_dir), tiny_target, make_documents(LENGTHS, seed=1))
    refused(config, r"the hash of the prompts \(train.safetensors\) must be")
    assert read_store(config.stage_dir("hidden_states")) == before


def test_prompts_and_dtypes_that_do_not_fit_the_target_and_the_head_are_refused(
    prepared: ConfigFor, tiny_target: Path, tmp_path: Path
) -> None:
    message = r"at most 512 tokens, .* but the longest has 513; set it to 512 or less and run mtptrain prompts"
    refused(prepared(lengths=[5, 513]), message)
    message = "store_dtype: must be bfloat16 or fp8 for a head that captures no layers, but is fp8_aux"
    refused(prepared("hidden_states.store_dtype=fp8_aux"), message)
    other = str(make_target(tmp_path / "template", chat_template="{{ messages }}"))
    message = r"prompts/manifest.json: chat_template_sha256 must be \w+, but is \w+; run mtptrain prompts again with t"
    refused(prepared(f"target.path={other}"), message)


def test_a_head_that_could_not_be_exported_is_warned_of_before_extraction(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This comes before anything is computed.
    monkeypatch.setattr(hidden_states, "announce", Mock(side_effect=KeyboardInterrupt))
    message = r"not exported: head\.zero_first_embedding: must be true for a mimo target"
    with pytest.warns(UserWarning, match=message), pytest.raises(KeyboardInterrupt):
        extract_hidden_states(Run(prepared("head.zero_first_embedding=true")), ONE_RANK)
