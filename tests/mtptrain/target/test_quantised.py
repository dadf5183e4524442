"""Tests that a target computes with quantised weights and activations."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.target.position_cache import PositionCache
from tests.conftest import make_target
from tests.quantised import quantise

CPU = torch.device("cpu")


def quantise_inputs(model: PreTrainedModel) -> None:
    """Rounds the input of every projection to 255 levels per token, as an engine with 8-bit activations does."""

    def rounded(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        scale = args[0].abs().amax(-1, keepdim=True) / 127.5
        return (args[0] / scale).round().clamp(-128, 127) * scale

    for name, module in model.named_modules():
        if name.endswith("proj"):
            module.register_forward_pre_hook(rounded)


def states_of(target: Target) -> torch.Tensor:
    tokens = torch.arange(40)[None]
    return target.forward(3 + tokens, tokens, PositionCache(40)).postnorm_states


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_target_computes_with_the_quantised_weights_and_activations(tmp_path: Path, name: str) -> None:
    plain = make_target(tmp_path / "plain", tie_word_embeddings=False)
    save_file(quantise(plain, tmp_path / "quantised", name), plain / "model.safetensors", {"format": "pt"})
    reference, quantised = (load_target(tmp_path / each, torch.float32, CPU) for each in ("plain", "quantised"))
    weights_only = states_of(reference)
    if name == "int8":
        quantise_inputs(reference.model)
    expected, found = states_of(reference), states_of(quantised)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (name == "int8") == ((found - weights_only).abs().max() > 1e-3)
    assert load_frozen_parts(tmp_path / "quantised").lm_head.dtype == torch.float32
