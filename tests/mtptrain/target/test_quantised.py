"""Tests targets with a quantised lm_head or last layer, in the formats that docs/hidden_states.md names."""

import re
from pathlib import Path

import pytest
import torch

from mtptrain.target.frozen_parts import load_frozen_parts, load_last_layer
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.mtptrain.target.inputs import CPU, TOKENS
from tests.quantised import compress, quantise

PAGE = Path(__file__).parents[3] / "docs/hidden_states.md"
ROWS = re.findall(r"^\| (`W.*|`FP.*|`NV.*|`MX.*) \| (exact|refused) \|", PAGE.read_text(), re.MULTILINE)
SCHEMES = [(scheme, how) for schemes, how in ROWS for scheme in re.findall(r"`(\w+)`", schemes)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("plain") / "target", tie_word_embeddings=False, vocab_size=288)


@pytest.mark.parametrize(("scheme", "how"), SCHEMES, ids=lambda each: each)
@torch.no_grad()
def test_an_lm_head_is_read_as_transformers_computes_with_it_or_refused(
    plain: Path, tmp_path: Path, scheme: str, how: str
) -> None:
    compress(plain, tmp_path / "target", scheme)
    if how == "refused":
        for read in (load_frozen_parts, lambda directory: load_target(directory, torch.bfloat16, CPU)):
            with pytest.raises(UserError, match=r"lm_head .* has quantised activations for it; choose a checkpoint"):
                read(tmp_path / "target")
        return
    parts = load_frozen_parts(tmp_path / "target")
    for dtype in (torch.float32, torch.bfloat16):
        target = load_target(tmp_path / "target", dtype, CPU)
        output = target.model(TOKENS, output_hidden_states=True)
        assert torch.equal(parts.to(CPU, dtype).lm_head, target.parts.lm_head)
        assert torch.equal(parts.to(CPU, dtype).logits(output.hidden_states[-1]), output.logits)


def test_an_lm_head_that_engines_would_not_load_is_warned_of(plain: Path, tmp_path: Path) -> None:
    quantise(plain, tmp_path / "target", "int4", lm_head=True)
    config = tmp_path / "target/config.json"
    config.write_text(config.read_text().replace('["Linear", "lm_head"]', '["Linear"]'))
    with pytest.warns(match=r"targets of config_groups in .* should name lm_head, .*; add \"lm_head\" to them"):
        load_frozen_parts(tmp_path / "target")


def test_quantised_embeddings_are_refused_by_name(plain: Path, tmp_path: Path) -> None:
    compress(plain, tmp_path / "target", "W8A16", kind="Embedding")
    message = r"model\.embed_tokens must be unquantised, .* has model\.embed_tokens\.weight_packed in I32"
    for read in (load_frozen_parts, lambda directory: load_target(directory, torch.bfloat16, CPU)):
        with pytest.raises(UserError, match=message):
            read(tmp_path / "target")


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_head_can_start_from_a_quantised_last_layer(plain: Path, tmp_path: Path, name: str) -> None:
    expected = quantise(plain, tmp_path / "target", name, lm_head=name == "int4")
    last_layer = load_last_layer(tmp_path / "target")
    for part in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
        assert torch.equal(last_layer[f"{part}.weight"], expected[f"model.layers.1.{part}.weight"])
    assert torch.equal(load_frozen_parts(tmp_path / "target").lm_head, expected["lm_head.weight"])
