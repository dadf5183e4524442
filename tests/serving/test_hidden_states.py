"""Tests that stock vLLM extracts the same residual streams as transformers, also the one before the final norm."""

import random
import re
from collections.abc import Mapping
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


def make_target_of(directory: Path, family: str) -> Path:
    model_type, settings = FAMILIES[family]
    return make_target(directory, model_type, settings, **HEAD_SIZES.get(family, {}))


@pytest.mark.parametrize("family", EXTRACTED)
def test_extracted_streams_are_those_of_transformers(vllm_python: str, tmp_path: Path, family: str) -> None:
    target_dir = make_target_of(tmp_path / "target", family)
    settings = HiddenStatesConfig(dtype=Dtype.float32, batch_tokens=BATCH_TOKENS)
    scratch_dir = tmp_path / "rank"
    with VllmStreams(target_dir, LAYERS, settings, CONTEXT_TOKENS, scratch_dir, 0, vllm_python) as streams:
        (found,) = map(dict, streams.extract([[np.array(prompt, dtype=np.int32) for prompt in PROMPTS]]))
    target = load_target(target_dir, torch.float32, torch.device("cpu"))
    assert len(found) == len(PROMPTS)
    for index, states in found.items():
        tokens = torch.tensor([PROMPTS[index]])
        positions, cache = torch.arange(tokens.shape[1])[None], PositionCache(tokens.shape[1])
        wanted = target.forward(tokens, positions, cache, LAYERS).aux_hidden_states
        assert wanted is not None
        largest = wanted[0].abs().amax((0, 2), keepdim=True)  # [1, L, 1]
        torch.testing.assert_close(states / largest, wanted[0] / largest, rtol=0, atol=1e-5)
    last = found[3][:, 0]  # before the final norm
    post_norm = target.model.model(input_ids=torch.tensor([PROMPTS[3]])).last_hidden_state[0]
    torch.testing.assert_close(target.parts.final_norm(last), post_norm, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", REFUSED)
def test_targets_that_vllm_cannot_extract_from_are_refused_by_name(tmp_path: Path, family: str) -> None:
    name, reason = family.split()[0], re.escape(REFUSED[family])
    with pytest.raises(ValueError, match=rf"but family '{name}' {reason}.*; set hidden_states\.backend=transformers"):
        choose_backend(Backend.vllm, read_target_config(make_target_of(tmp_path, family)))
