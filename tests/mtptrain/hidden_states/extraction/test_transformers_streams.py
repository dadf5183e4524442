"""Tests that packed extraction gives each document the states that transformers computes for it alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mtptrain.hidden_states.extraction.transformers_streams import (
    TransformersStreams,
    residual_streams,
    token_budget_batches,
)
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from tests.conftest import FAMILIES, make_target

LENGTHS = [50, 50, 33, 33, 33, 7, 1]
"""Lengths of documents with and without neighbours of equal length, above and below the families' window of 16."""
DOCUMENTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(LENGTHS)]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Allows an error of 1e-5 of the largest value, because threads and kernels may sum in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, PreTrainedModel]:
    """Returns a tiny target for extraction, and the same model loaded by transformers."""
    directory = make_target(tmp_path_factory.mktemp("target"), *FAMILIES[request.param])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    return load_target(directory, torch.float32, torch.device("cpu")), model


def test_streams_of_packed_documents_are_those_of_transformers_for_each_alone(
    family: tuple[Target, PreTrainedModel],
) -> None:
    target, model = family
    num_layers = target.config.num_hidden_layers
    streams = TransformersStreams(target, (0, 1, num_layers), batch_tokens=120)
    prompts = [document.numpy().astype(np.int32) for document in DOCUMENTS]
    (shard,) = streams.extract([prompts])
    found = dict(shard)
    assert sorted(found) == list(range(len(LENGTHS)))
    for index, document in enumerate(DOCUMENTS):
        with torch.no_grad():
            *expected, post_norm = model(input_ids=document[None], output_hidden_states=True).hidden_states
        for column, layer in enumerate((0, 1)):
            assert_near(found[index][:, column], expected[layer][0])
        # The last entry of transformers is after the final norm, and ours is before it.
        assert_near(model.model.norm(found[index][:, 2]), post_norm[0])
        assert (found[index][:, 2] - post_norm[0]).abs().max() > 0.1


def test_a_document_is_the_same_beside_others_and_alone(family: tuple[Target, PreTrainedModel]) -> None:
    target, _ = family
    TransformersStreams(target, (1, 2), batch_tokens=1)
    together = residual_streams(target, DOCUMENTS, (1, 2))
    alone = torch.cat([residual_streams(target, [document], (1, 2)) for document in DOCUMENTS])
    assert_near(together, alone)  # choosing another expert would change a state by about its size


def test_compiled_layers_give_the_same_streams(tmp_path: Path) -> None:
    directory = make_target(tmp_path)
    found = []
    for compile_layers in (False, True):
        target = load_target(directory, torch.float32, torch.device("cpu"))
        TransformersStreams(target, (0, 1, 2), 1000, compile_layers)
        found.append(residual_streams(target, DOCUMENTS, (0, 1, 2)))
    torch.testing.assert_close(*found, rtol=1e-3, atol=2e-4)


def test_batches_hold_whole_documents_up_to_their_tokens_and_each_document_once() -> None:
    lengths = [5, 40, 17, 40, 1, 40, 17, 64, 3, 40]
    batches = list(token_budget_batches(lengths, batch_tokens=80))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert batches == [[7], [1, 3], [5, 9], [2, 6, 0, 8, 4]]
    assert [len(batch) for batch in token_budget_batches(lengths, batch_tokens=1)] == [1] * len(lengths)
    assert list(token_budget_batches([], 10)) == []
