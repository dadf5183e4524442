"""Provides heads of all kinds, and turns warnings into errors in every test of how heads start."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import make_target
from tests.mimo import MIMO_HEAD, add_mimo_layer
from tests.mtptrain.init_from.written_heads import EXPORTS, MTP, Stored, random_state, write


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """Raises warnings as errors, except where a test expects them with `pytest.warns`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> dict[str, Stored]:
    """Returns a head of each kind: exports, and MTP layers of whole checkpoints in DeepSeek's layout and MiMo's."""
    root = tmp_path_factory.mktemp("heads")
    exports = {
        kind: Stored(root / kind, config, tiny_target, write(root / kind, engine, config, tiny_target))
        for kind, (engine, config) in EXPORTS.items()
    }
    weights = make_target(root / "deepseek") / "model.safetensors"
    deepseek, tensors = random_state(MTP, tiny_target), load_file(weights)
    names = {"norm.weight": "shared_head.norm.weight"}
    tensors |= {f"model.layers.2.{names.get(name, name)}": tensor.clone() for name, tensor in deepseek.items()}
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.2.{name}.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, weights, metadata={"format": "pt"})
    mimo = add_mimo_layer(make_target(root / "mimo", "mimo"))
    return exports | {
        "deepseek": Stored(root / "deepseek", MTP, tiny_target, deepseek),
        "mimo": Stored(root / "mimo", MIMO_HEAD, make_target(root / "mimo target", "mimo"), mimo),
    }
