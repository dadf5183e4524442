"""Tests heads that start with the weights of the target's last layer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.heads.layer_head import LayerHead
from mtptrain.init_from.from_target import start_from_target
from mtptrain.init_from.start import check_one_start
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import load_target
from tests.conftest import FAMILIES, make_target, tiers

CPU = torch.device("cpu")
LAYER_HEADS = [name for name, head in HEADS.items() if issubclass(head, LayerHead)]
STREAMS = {"capture_layers": [0, 1, 2]}


@pytest.mark.parametrize("name", LAYER_HEADS)
def test_a_head_starts_as_the_targets_last_layer_and_passes_its_states_on(name: str, tiny_target: Path) -> None:
    target = load_target(tiny_target, torch.float32, CPU)
    layer = dict(target.model.model.layers[-1].named_parameters())
    torch.manual_seed(3)
    config = HEADS[name].Config(**(STREAMS if name in ("eagle3", "peagle") else {}))
    head, before = (build_head(config, target.config) for _ in range(2))
    before.load_state_dict(head.state_dict())
    start_from_target(head, TargetFiles(tiny_target))  # a warning, that something stays random, would be an error
    weights, random = dict(head.named_parameters()), dict(before.named_parameters())
    for part in ("q_proj", "k_proj", "v_proj"):  # their first columns read the embedding in eagle3
        weight = weights[f"self_attn.{part}.weight"]
        assert torch.equal(weight[:, -64:], layer[f"self_attn.{part}.weight"])
        assert torch.equal(weight[:, :-64], random[f"self_attn.{part}.weight"][:, :-64])
    for part in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
        assert torch.equal(weights[f"{part}.weight"], layer[f"{part}.weight"])
    if name != "eagle":
        assert torch.equal(weights["norm.weight"], target.model.model.norm.weight)
    fuse = "eh_proj.weight" if name == "mtp" else "fc.weight"
    passed = weights[fuse] - random[fuse] / 2
    torch.testing.assert_close(passed[:, -64:], torch.eye(64))
    assert not passed[:, :-64].any()


NORMED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: FAMILIES[name] for name in ("qwen3", "gemma3_text")},
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {"use_qk_norm": True}),
}


@pytest.mark.parametrize("family", tiers(NORMED, core=["qwen3"]))
@torch.no_grad()
def test_a_head_attends_as_a_target_whose_queries_and_keys_are_normed(family: str, tmp_path: Path) -> None:
    """Compares the attention scores of random rows, which agree only approximately.

    The head's weights contain a constant in place of each row's root mean square. Scores differ by about a tenth, and
    by about half if the projections are copied unchanged.
    """
    model_type, settings = NORMED[family]
    sizes = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    target_dir = make_target(tmp_path / "target", model_type, {**settings, **sizes})
    layer = load_target(target_dir, torch.float32, CPU).model.model.layers[-1]
    head = build_head(HEADS["mtp"].Config(), read_target_config(target_dir))
    start_from_target(head, TargetFiles(target_dir))
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    if model_type != "olmo2":  # whose layers have no input norm
        x = layer.input_layernorm(x)

    def scores(attention: Any, is_normed: bool) -> torch.Tensor:
        query, key = attention.q_proj(x), attention.k_proj(x)
        if is_normed:
            size = attention.q_norm.weight.shape[-1]  # that of an attention head, or in OLMo 2 of all of them
            query = attention.q_norm(query.unflatten(-1, (-1, size))).flatten(-2)
            key = attention.k_norm(key.unflatten(-1, (-1, size))).flatten(-2)
        return torch.einsum("nhd,mhd->hnm", query.unflatten(-1, (2, 128)), key.unflatten(-1, (2, 128)))

    expected = scores(layer.self_attn, is_normed=True)
    assert (scores(head.self_attn, is_normed=False) - expected).norm() < 0.2 * expected.norm()


ATTENTION = "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj"
HEADS_OF_96 = {"hidden_size": 384, "num_attention_heads": 4, "head_dim": 96}
"""All shapes are those of the head, which has 3 heads of 128."""
FUSED = "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, mlp.gate_proj, mlp.up_proj"
OTHER_SHAPES: list[tuple[str, str, dict[str, Any], str]] = [
    ("eagle3", "llama", HEADS_OF_96, ATTENTION),
    ("mtp", "phi3", {"head_dim": 128, "pad_token_id": 0}, FUSED),
]


def test_projections_with_other_heads_or_names_stay_random_and_a_warning_names_them(tmp_path: Path) -> None:
    for name, model_type, settings, left_random in OTHER_SHAPES:
        sizes = {"hidden_size": 128, "num_key_value_heads": settings.get("num_attention_heads", 1)} | settings
        target_dir = make_target(tmp_path / model_type, model_type, sizes)
        down = load_target(target_dir, torch.float32, CPU).model.model.layers[-1].mlp.down_proj.weight
        head = build_head(HEADS[name].Config(**(STREAMS if name == "eagle3" else {})), read_target_config(target_dir))
        random = {name: weight.clone() for name, weight in head.named_parameters()}
        with pytest.warns(UserWarning, match=rf"but lacks {left_random}, which stay random; compare with"):
            start_from_target(head, TargetFiles(target_dir))
        weights = dict(head.named_parameters())
        assert torch.equal(weights["mlp.down_proj.weight"], down)
        assert all(torch.equal(weights[f"{part}.weight"], random[f"{part}.weight"]) for part in left_random.split(", "))


def test_heads_and_targets_whose_layers_differ_are_refused(tmp_path: Path) -> None:
    for name in ("dflash", "dspark", "dflash2", "hydra", "medusa", "native_mtp"):
        with pytest.raises(ValueError, match=rf"start_from_target: must be false with head {name}, .* is true; set"):
            check_one_start(HEADS[name].Config(start_from_target=True))
    target_dir = make_target(tmp_path, head_dim=20, intermediate_size=90, num_attention_heads=2, num_key_value_heads=2)
    config = HEADS["mtp"].Config(intermediate_size=96, num_attention_heads=1, num_key_value_heads=1)
    head = build_head(config, read_target_config(target_dir))
    with pytest.raises(ValueError, match=r"must have projections of the head's shapes .*, but .* head dim 20; set"):
        start_from_target(head, TargetFiles(target_dir))
