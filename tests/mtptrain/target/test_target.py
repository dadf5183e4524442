"""Tests the frozen target: its parts, captured streams, cache, windows, quantised and packed weights, and drafts."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mtptrain.target.causal_attention import MaskOf, SeenSlots
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.loading import load_target
from mtptrain.target.model import MOST_ROWS, FrozenLinear, Target
from mtptrain.target.position_cache import PositionCache, TreeSlots
from mtptrain.utils.cpu import has_bf16_instructions
from tests.conftest import FAMILIES, make_target, tiers
from tests.mtptrain.target.inputs import CPU, NUM_TOKENS, POSITIONS, TOKENS
from tests.quantised import quantise

SOME = tiers(FAMILIES, ["llama", "qwen3 with window", "gemma3_text", "deepseek_v2"])


@pytest.mark.parametrize("family", SOME)
@torch.no_grad()
def test_frozen_parts_of_shards_give_the_whole_models_logits_in_bf16(tmp_path: Path, family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        make_target(tmp_path / "whole", *FAMILIES[family], tie_word_embeddings=False), dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    parts, model = load_frozen_parts(tmp_path / "shards").to(CPU, torch.bfloat16), model.to(torch.bfloat16)
    assert torch.equal(parts.embed(TOKENS), model.model.embed_tokens.weight[TOKENS]), "without the scale of Gemma"
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    output = model(TOKENS, output_hidden_states=True)
    post_norm = parts.final_norm(before_norm[0])
    assert post_norm.dtype == torch.bfloat16 and torch.equal(post_norm, output.hidden_states[-1])
    assert torch.equal(parts.logits(post_norm), output.logits)


def read_in_parts(target: Target) -> torch.Tensor:
    """Returns the last states of the tokens, which are read as a prompt of one token, one more, and the rest."""
    cache = PositionCache(NUM_TOKENS)
    parts = [(slice(None), slice(*part)) for part in pairwise([0, 1, 2, NUM_TOKENS])]
    states = [target.forward(TOKENS[part], POSITIONS[part], cache).postnorm_states for part in parts]
    return torch.cat(states, 1)[0]


@pytest.mark.parametrize("kind", [MaskOf(window=1), MaskOf(window=2), MaskOf(window=4), MaskOf(chunk=8)])
def test_windows_and_chunks_count_positions_at_the_second_depth_of_a_tree_too(kind: MaskOf) -> None:
    cache, branches = PositionCache(10), torch.eye(2, dtype=torch.bool)[None]
    cache.begin(torch.arange(6)[None])
    cache.begin(torch.tensor([[6, 6]]), TreeSlots(torch.tensor([6]), 0, branches))
    tree, own = TreeSlots(torch.tensor([6]), 2, torch.cat([branches, branches], 2)), torch.tensor([[7, 7]])
    mask = cache.begin(own, tree)
    assert mask is not None
    seen, _ = SeenSlots((kind,), mask, own, tree).of_layer(0, CPU)
    distances = 7 - torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 7, 7])  # positions of the slots
    assert seen is not None and torch.equal(seen, mask & (distances < (kind.window or 8)))


def test_the_product_and_its_gradient_are_torchs_own_and_a_target_uses_it(tiny_target: Path) -> None:
    weight = torch.randn(24, 48)
    for bias in (None, torch.randn(24)):
        for shape in ((1,), (1, 5), (MOST_ROWS,), (MOST_ROWS + 1,), (3, 20)):
            rows = torch.randn(*shape, 48, requires_grad=True)
            with torch.no_grad():
                torch.testing.assert_close(FrozenLinear(weight, bias)(rows.detach()), F.linear(rows, weight, bias))
            FrozenLinear(weight, bias)(rows).sum().backward()
            assert rows.grad is not None
            torch.testing.assert_close(rows.grad, weight.sum(0).expand(*shape, 48))
    rows, narrow = torch.randn(8, 48).bfloat16(), FrozenLinear(weight.bfloat16())
    with torch.no_grad():
        torch.testing.assert_close(narrow(rows), F.linear(rows, narrow.weight))
    assert (narrow._packed is not None) == has_bf16_instructions()
    target = load_target(tiny_target, torch.float32, CPU)
    linears = [module.forward for module in target.model.model.modules() if isinstance(module, torch.nn.Linear)]
    assert all(isinstance(linear, FrozenLinear) and linear._packed is not None for linear in linears)
    assert target._output._packed is not None


def quantise_inputs(model: PreTrainedModel) -> None:
    """Rounds the input of every projection to 255 levels per token, as an engine with 8-bit activations does."""

    def rounded(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        scale = args[0].abs().amax(-1, keepdim=True) / 127.5
        return (args[0] / scale).round().clamp(-128, 127) * scale

    for name, module in model.named_modules():
        if name.endswith("proj"):
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_target_computes_with_the_quantised_weights_and_activations(tmp_path: Path, name: str) -> None:
    plain = make_target(tmp_path / "plain", tie_word_embeddings=False)
    save_file(quantise(plain, tmp_path / "quantised", name), plain / "model.safetensors", {"format": "pt"})
    reference, quantised = (load_target(tmp_path / each, torch.float32, CPU) for each in ("plain", "quantised"))
    weights_only = read_in_parts(reference)
    if name == "int8":
        quantise_inputs(reference.model)
    expected, found = read_in_parts(reference), read_in_parts(quantised)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (name == "int8") == ((found - weights_only).abs().max() > 1e-3)
    assert load_frozen_parts(tmp_path / "quantised").lm_head.dtype == torch.float32
