"""Writes random heads in the formats of engines, and changes the written files for one attempt to read them."""

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.heads.base import Tensors
from mtptrain.init_from.start import load_init
from mtptrain.settings import heads
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from tests.mtptrain.engines.conftest import export_head, random_head

BLOCK: dict[str, Any] = {"capture_layers": [1, 2], "mask_token_id": 7, "num_layers": 2, "ttt_steps": 3}
MTP, EAGLE = heads.MtpConfig(), heads.EagleConfig()
EAGLE3 = heads.Eagle3Config(capture_layers=[1, 2], draft_vocab_size=48, norm_before_fc=False, norm_output=False)
PEAGLE = heads.PeagleConfig(capture_layers=[1, 2], mask_token_id=7)
MEDUSA = heads.MedusaConfig(ttt_steps=3, num_layers=2, fc_bias=True)
DFLASH, DSPARK = heads.DflashConfig(**BLOCK), heads.DsparkConfig(**BLOCK, markov_rank=4)
DFLASH2 = heads.Dflash2Config(**BLOCK, selector_rank=4, selector_top_k=5)
EXPORTS: dict[str, tuple[str, heads.HeadConfig]] = {
    "mtp": ("vllm", MTP),
    "mtp for SGLang": ("sglang", MTP),
    "eagle": ("vllm", EAGLE),
    "eagle3": ("vllm", EAGLE3),
    "peagle": ("vllm", PEAGLE),
    "medusa": ("vllm", MEDUSA),
    "dflash": ("vllm", DFLASH),
    "dspark": ("vllm", DSPARK),
    "dflash2": ("vllm", DFLASH2),
}
"""The engine and the settings of one head of each kind."""


def random_state(config: heads.HeadConfig, target_dir: Path) -> Tensors:
    return random_head(config, read_target_config(target_dir)).state_dict()


def write(directory: Path, engine: str, config: heads.HeadConfig, target_dir: Path) -> Tensors:
    """Export a random head and return its weights."""
    state = random_state(config, target_dir)
    export_head(directory, engine, config, state, target_dir)
    return state


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def without(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}


Changes = dict[str, Any]
"""New values of keys of a config.json; a dictionary is added to the section that it names."""


@dataclass(frozen=True)
class Stored:
    """A head in a directory. The files are changed only for one attempt to read it."""

    directory: Path
    config: heads.HeadConfig
    """The settings of the recipe."""
    target_dir: Path
    state: Tensors
    """The weights that the head has."""

    def of(self, config: heads.HeadConfig) -> "Stored":
        return replace(self, config=config)

    @contextmanager
    def changed(
        self,
        changes: Changes | None = None,
        removed: Collection[str] = (),
        tensors: Callable[[Tensors], Tensors] | None = None,
    ) -> Iterator[None]:
        """Change config.json and the tensors within a `with` block."""
        paths = [self.directory / name for name in ("config.json", "model.safetensors")]
        before = [path.read_bytes() for path in paths]
        config = {name: value for name, value in json.loads(before[0]).items() if name not in removed}
        for name, value in (changes or {}).items():
            config[name] = {**(config.get(name) or {}), **value} if isinstance(value, dict) else value
        paths[0].write_text(json.dumps(config))
        if tensors is not None:
            stored = {name: tensor.contiguous() for name, tensor in tensors(load_file(paths[1])).items()}
            save_file(stored, paths[1], metadata={"format": "pt"})
        try:
            yield
        finally:
            for path, content in zip(paths, before, strict=True):
                path.write_bytes(content)

    def read(self) -> Tensors:
        return load_init(str(self.directory), self.config, TargetFiles(self.target_dir))[1]

    def is_read(self, changes: Changes | None = None, removed: Collection[str] = (), **tensors: Any) -> None:
        """Check that the head is read with its weights, although its files are changed."""
        with self.changed(changes, removed, **tensors):
            assert_equal(self.read(), self.state)

    def refuses(self, changes: Changes | None, message: str, removed: Collection[str] = (), **tensors: Any) -> None:
        """Check that the head is refused by a message that says what to do."""
        with self.changed(changes, removed, **tensors), pytest.raises(ValueError, match=message) as refusal:
            self.read()
        assert "; " in str(refusal.value)
