"""Tests that `native_mtp` computes what each family's module does, with its norms, its feedback and its layer."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from mtptrain.heads.attention.depths import blocks_attention
from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.base import Tensors
from mtptrain.heads.files import build_head, fill_head
from mtptrain.heads.native_mtp import NativeMtpHead
from mtptrain.heads.packing import PackedTokens, Packing
from mtptrain.target.causal_attention import FULL, Extras
from mtptrain.target.families import norm_eps
from mtptrain.target.frozen_parts import load_frozen_parts
from tests.conftest import tiers
from tests.families import EXACT, SIZES, AutoConfig
from tests.mtptrain.heads.drafted import drafted_states
from tests.native_modules import LAST_LAYER, MODULES, NUM_LAYERS, write_checkpoint

DEPTHS, TOKENS = 4, 22
"""More tokens than the tiny windows have."""


READ_ZEROS = ("deepseek_v3", "glm4_moe", "ernie4_5_moe")
"""Families whose modules read zeros in place of the embedding at position 0."""


def decoder_of_the_module(directory: Path, family: str, config: PreTrainedConfig, tensors: Tensors) -> nn.Module:
    """Returns a model of transformers, read from disk, whose last decoder layer is the module's."""
    prefix, index = MODULES[family][-1], NUM_LAYERS - 1
    layer = {
        name.removeprefix(prefix).replace("pre_mlp_layernorm", "post_attention_layernorm"): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    if family.startswith("ernie"):
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
        sizes = {name: getattr(config, name) for name in names} | {"vocab_size": 260, "num_hidden_layers": 1}
        llama = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=16, rope_parameters=config.rope_parameters))
        llama.load_state_dict({f"model.layers.0.{name}": tensor for name, tensor in layer.items()}, strict=False)
        return llama.eval().model
    ours = {name: tensor for name, tensor in tensors.items() if f".layers.{index}." not in name}
    ours |= {f"model.layers.{index}.{name}": tensor.clone() for name, tensor in layer.items()}
    save_file(ours, directory / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval().get_submodule("model")


def plain_states(
    decoder: nn.Module,
    family: str,
    config: PreTrainedConfig,
    tensors: Tensors,
    states: torch.Tensor,
    embeddings: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """Returns the states of all depths [T, H] of one draft position, by running the layer over whole sequences.

    The layer is the decoder's last one. States and embeddings are those of each token [S, H].
    """
    project, embedding_norm, hidden_norm, final_norm, _ = MODULES[family]
    offset, kinds = float(family.startswith("qwen")), ("sliding_attention",) if family in LAST_LAYER else ()

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=norm_eps(config)) * (offset + tensors[f"{name}.weight"])

    def combined(state: torch.Tensor, index: int) -> torch.Tensor:
        embedding = embeddings[index + 1]
        if index == 0 and family in READ_ZEROS:
            embedding = torch.zeros_like(embedding)
        both = torch.cat([norm(embedding_norm, embedding), norm(hidden_norm, state)])
        return tensors[f"{project}.weight"] @ both

    inputs = [combined(states[index], index) for index in range(position + 1)]
    found = []
    for depth in range(DEPTHS):
        x = torch.stack(inputs)[None]
        positions = torch.arange(x.shape[1])[None]
        window = config.sliding_window if family in LAST_LAYER else x.shape[1]
        is_seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(1 - window)
        mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, float("-inf"))[None, None]
        rotary = decoder.rotary_emb(x, positions, *kinds)  # type: ignore[operator]
        given = {"position_embeddings": rotary, "attention_mask": mask}
        out = decoder.layers[-1](x, **given, position_ids=positions)  # type: ignore[union-attr,operator]
        last = (out[0] if isinstance(out, tuple) else out)[0, -1]
        normed = norm(final_norm, last) if final_norm else last
        found.append(normed)
        fed_back = last if family == "glm4_moe" else normed
        if depth + 1 < DEPTHS:
            inputs.append(combined(fed_back, position + depth + 1))
    return torch.stack(found)


IN_CORE = ("deepseek_v3", "qwen3_5_text", "mimo_v2_flash")
# Others with a scale of their own, sinks, a window, a soft cap with a window, and a temperature of each position.
MORE_LAYERS = ("granite", "gpt_oss", "mistral", "gemma2", "llama4_text")


@pytest.mark.parametrize("family", tiers(MODULES, IN_CORE))
@torch.no_grad()
def test_every_depth_is_that_of_the_familys_own_layer(tmp_path: Path, family: str) -> None:
    config, state = write_checkpoint(tmp_path, family)
    tensors, parts = load_file(tmp_path / "model.safetensors"), load_frozen_parts(tmp_path)
    head = fill_head(
        build_head(NativeMtpHead.Config(ttt_steps=DEPTHS), config), state, torch.float32, torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 256, (TOKENS + DEPTHS,), generator=generator)
    states = torch.randn(TOKENS, config.hidden_size, generator=generator)
    decoder = decoder_of_the_module(tmp_path, family, config, tensors)
    for position in (0, 1, TOKENS - 2):
        drafted = torch.stack(drafted_states(head, parts, states, ids, position, DEPTHS))
        plain = plain_states(decoder, family, config, tensors, states, parts.embed(ids), position)
        torch.testing.assert_close(drafted, plain, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", tiers([*MODULES, *MORE_LAYERS], (*IN_CORE, "gemma2")))
def test_training_computes_what_decoding_does_and_gives_every_weight_a_gradient(tmp_path: Path, family: str) -> None:
    settings = {"moe_layers": [], "floor_scale": 2} if family == "llama4_text" else {}
    config, state = write_checkpoint(tmp_path, family, **settings)
    parts, head = load_frozen_parts(tmp_path), build_head(NativeMtpHead.Config(ttt_steps=DEPTHS), config)
    head.load_state_dict(state)
    lengths = [TOKENS, 5]
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(0, 256, (sum(lengths),), generator=generator)
    states = torch.randn(len(ids), config.hidden_size, generator=generator)
    trained = head(PackedTokens(states, ids, torch.roll(ids, -1), Packing.of_spans(lengths)), parts, DEPTHS)
    for position in (0, 3, 16, TOKENS - 2):  # 16 is the first row of a window's second block
        known = TOKENS - 1 - position  # number of depths that read tokens of this document only
        drafted = drafted_states(head, parts, states[:TOKENS], F.pad(ids[:TOKENS], (0, DEPTHS)), position, DEPTHS)
        torch.testing.assert_close(trained[:known, position], torch.stack(drafted[:known]), atol=2e-5, rtol=1e-4)
    trained.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())


def test_a_last_layer_that_is_no_module_is_refused() -> None:
    for family in ("lfm2", "llama4_text"):
        config = AutoConfig.for_model(EXACT[family][0], **{**SIZES, **EXACT[family][1]})
        message = f"^head: .* must have attention, keep no state, .* a {family} does not; tra"
        with pytest.raises(ValueError, match=message):
            build_head(NativeMtpHead.Config(), config)


def test_masks_over_stored_scores_attend_as_the_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtptrain.heads.attention.depths.MOST_SCORES", 300)  # several blocks per document
    generator, lengths = torch.Generator().manual_seed(1), [9, 4, 12]
    drafting = [np.array([1, 2, 6]), np.array([3]), np.array([0, 5, 11])]
    for packing in (Packing.of_points(lengths, drafting), Packing.of_spans(lengths, [(0, 2, 3), (2, 0, 4), (2, 7, 5)])):
        count = len(packing.draft_positions)
        query, keys, values = (torch.randn(n, h, 8, generator=generator) for n, h in ((count, 4), (25, 2), (25, 2)))
        own = [[torch.randn(count, 2, 8, generator=generator) for _ in range(2)] for _ in range(2)]
        plain = depth_attention(query, keys, values, *own, packing)
        torch.testing.assert_close(blocks_attention(query, keys, values, *own, packing, FULL, Extras()), plain)


def test_frequencies_and_routers_stay_exact_in_bf16_and_in_training_mode() -> None:
    model_type, settings = EXACT["glm4_moe"]
    head = NativeMtpHead(NativeMtpHead.Config(), AutoConfig.for_model(model_type, **{**SIZES, **settings}))
    head.model.layers[0].mlp.gate.e_score_correction_bias.uniform_()  # type: ignore[union-attr,operator]
    exact = {name: buffer.clone() for name, buffer in head.named_buffers()}
    changed = head.to(torch.bfloat16).train()
    assert {"model.rotary_emb.inv_freq", "model.layers.0.mlp.gate.e_score_correction_bias"} <= exact.keys()
    assert all(torch.equal(changed.get_buffer(name), buffer) for name, buffer in exact.items())
    assert not any(module.training for module in changed.model.modules())
