"""Hidden states that stock vLLM extracts are those of transformers: every residual stream, the one before the final norm too."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtptrain.engines import vllm
from mtptrain.engines.vllm import HiddenStatesJob
from mtptrain.target import PositionCache, Target
from tests.serving.cases import CONTEXT_TOKENS, PROMPTS
from tests.serving.conftest import KV_CACHE_BYTES, OnDisk

FAMILIES = ["llama", "qwen3"]
LAYERS = [0, 1, 3, 4]
"""Embeddings, two streams in between, and the last layer before the final norm."""


@pytest.fixture(scope="module")
def extracted(
    vllm_python: str, target_of: Callable[[str], OnDisk], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Path]]:
    jobs = [
        HiddenStatesJob(
            name=name,
            target_dir=str(target_of(name).directory),
            prompts=PROMPTS,
            layer_ids=LAYERS,
            max_model_len=CONTEXT_TOKENS,
            output_dir=str(tmp_path_factory.mktemp(name)),
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        )
        for name in FAMILIES
    ]
    return dict(zip(FAMILIES, vllm.hidden_states(jobs, vllm_python), strict=True))


def streams(target: Target, prompt: list[int]) -> torch.Tensor:
    """The residual streams of `LAYERS` [T, L, H] by transformers."""
    positions = torch.arange(len(prompt))[None]
    states = target.forward(torch.tensor([prompt]), positions, PositionCache(len(prompt)), tuple(LAYERS))
    assert states.aux_hidden_states is not None
    return states.aux_hidden_states[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_extracted_streams_are_those_of_transformers(
    extracted: dict[str, list[Path]], target_of: Callable[[str], OnDisk], family: str
) -> None:
    target = target_of(family).target
    for prompt, path in zip(PROMPTS, extracted[family], strict=True):
        found = load_file(path)
        assert found["token_ids"].tolist() == prompt
        torch.testing.assert_close(found["hidden_states"], streams(target, prompt), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_0_is_the_embeddings_and_the_last_one_is_before_the_final_norm(
    extracted: dict[str, list[Path]], target_of: Callable[[str], OnDisk], family: str
) -> None:
    target = target_of(family).target
    tokens = torch.tensor([PROMPTS[0]])
    found = load_file(extracted[family][0])["hidden_states"]
    post_norm = target.model.model(input_ids=tokens).last_hidden_state[0]
    torch.testing.assert_close(found[:, 0], target.parts.embed(tokens[0]), rtol=0, atol=0)
    torch.testing.assert_close(target.parts.final_norm(found[:, -1]), post_norm, rtol=1e-5, atol=1e-5)
    assert (found[:, -1] - post_norm).abs().max() > 0.1


def test_an_engine_that_fails_is_named_with_what_it_raised(vllm_python: str, tmp_path: Path) -> None:
    job = HiddenStatesJob(
        name="nothing", target_dir=str(tmp_path), prompts=[[1]], layer_ids=[0], max_model_len=8, output_dir=str(tmp_path)
    )
    with pytest.raises(RuntimeError, match=r"(?s)nothing: vLLM must extract hidden states of .*, but raised:\n.*config\.json"):
        vllm.hidden_states([job], vllm_python)
