"""Tests that stock vLLM extracts the same residual streams as transformers, also the one before the final norm."""

import random
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from mtptrain.config import Backend, Dtype, HiddenStatesConfig
from mtptrain.hidden_states.extraction.backend import choose_backend
from mtptrain.hidden_states.extraction.vllm_streams import VllmStreams
from mtptrain.target.families import read_target_config
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.target.position_cache import PositionCache
from tests.conftest import FAMILIES, make_target

CONTEXT_TOKENS, BATCH_TOKENS = 512, 200
LAYERS = (2, 0, 1)
"""The residual streams after the last layer (before the final norm), after the embeddings and after the first layer."""
HEAD_SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType({"llama": {"head_dim": 32}, "qwen2": {"head_dim": 32}})
"""vLLM needs attention heads of at least 32 on CPUs, and of hidden_size / num_attention_heads for Qwen2."""
REFUSED = {
    "deepseek_v2": "has multi-head latent attention",
    "gemma3_text": "has layers that vLLM cannot capture",
    "mimo": "has layers that vLLM cannot capture",
    "qwen2 with window": "has a sliding window in some of its layers",
    "qwen3 with window": "has a sliding window in some of its layers",
}
EXTRACTED = [
    pytest.param(family, marks=() if family == "llama" else pytest.mark.slow)
    for family in FAMILIES
    if family not in REFUSED
]
_RANDOM = random.Random(0)
PROMPTS = [[_RANDOM.randrange(256) for _ in range(length)] for length in (CONTEXT_TOKENS, 5, 1, 150, 17, 333)]
"""The first prompt fills the target's context, and takes three forward passes."""


@pytest.fixture(scope="module")
def target_of_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that makes a target of a family, once for each family."""

    def make(family: str) -> Path:
        model_type, settings = FAMILIES[family]
        return make_target(tmp_path_factory.mktemp("target"), model_type, settings, **HEAD_SIZES.get(family, {}))

    return cache(make)


@pytest.fixture(scope="module")
def extracted(
    vllm_python: str, target_of_family: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[int, torch.Tensor]]:
    """Returns a function that extracts the streams [n, L, H] of `LAYERS` of every prompt, once for each family."""
    settings = HiddenStatesConfig(dtype=Dtype.float32, batch_tokens=BATCH_TOKENS)

    def extract(family: str) -> dict[int, torch.Tensor]:
        scratch_dir = tmp_path_factory.mktemp("scratch") / "rank"
        with VllmStreams(
            target_of_family(family), LAYERS, settings, CONTEXT_TOKENS, scratch_dir, 0, "cpu", vllm_python
        ) as streams:
            (found,) = map(dict, streams.extract([[np.array(prompt, dtype=np.int32) for prompt in PROMPTS]]))
            return found

    return cache(extract)


def streams_here(target: Target, prompt: list[int]) -> torch.Tensor:
    """Returns the residual streams [T, L, H] of `LAYERS`, computed by transformers."""
    positions = torch.arange(len(prompt))[None]
    states = target.forward(torch.tensor([prompt]), positions, PositionCache(len(prompt)), LAYERS)
    assert states.aux_hidden_states is not None
    return states.aux_hidden_states[0]


@pytest.mark.parametrize("family", EXTRACTED)
def test_extracted_streams_are_those_of_transformers(
    extracted: Callable[[str], dict[int, torch.Tensor]], target_of_family: Callable[[str], Path], family: str
) -> None:
    target = load_target(target_of_family(family), torch.float32, torch.device("cpu"))
    assert len(extracted(family)) == len(PROMPTS)
    for index, states in extracted(family).items():
        wanted = streams_here(target, PROMPTS[index])
        largest = wanted.abs().amax((0, 2), keepdim=True)  # [1, L, 1]
        torch.testing.assert_close(states / largest, wanted / largest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", REFUSED)
def test_targets_that_vllm_cannot_extract_from_are_refused_by_name(
    target_of_family: Callable[[str], Path], family: str
) -> None:
    name, reason = family.split()[0], re.escape(REFUSED[family])
    with pytest.raises(ValueError, match=rf"but family '{name}' {reason}.*; set hidden_states\.backend=transformers"):
        choose_backend(Backend.vllm, read_target_config(target_of_family(family)))
