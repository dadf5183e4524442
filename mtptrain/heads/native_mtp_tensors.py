"""The tensors of head `native_mtp` as a checkpoint of the target's family stores its MTP module, and back.

transformers' own tables say how the tensors of a layer, such as those of its experts, are renamed and joined.
"""

from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mtptrain.heads.base import Tensors
from mtptrain.heads.native_mtp import LAYER, NATIVE_MTP, module_config
from mtptrain.target.form import build_on_meta
from mtptrain.target.loading import without_transformers_bar

REPEATED = ("embed_tokens.", "shared_head.head.")
"""Prefixes of what some modules repeat from the target, after that of the layer."""


class ModuleTensors:
    """The names and layout of the MTP module in the checkpoints of one target."""

    def __init__(self, target: PreTrainedConfig) -> None:
        self.target = target
        layers = str(target.num_hidden_layers)
        names = NATIVE_MTP[target.model_type].names
        self.prefixes = {ours: theirs.replace("{N}", layers) for ours, theirs in names.items()}
        """The checkpoint's prefix for each prefix of the head's tensors."""

    @cached_property
    def model(self) -> PreTrainedModel:
        """A model of one layer, without weights: transformers knows how a checkpoint of its class is stored."""
        return build_on_meta(module_config(self.target))

    def stored(self, state: Tensors) -> Tensors:
        """Returns the checkpoint's tensors for a head's `state_dict`, with one for each weight of an expert."""
        layer = {name: tensor for name, tensor in state.items() if name.startswith(LAYER)}
        rest = {name: tensor for name, tensor in state.items() if name not in layer}
        return self.with_prefixes(rest | revert_weight_conversion(self.model, layer))

    def with_prefixes(self, state: Tensors) -> Tensors:
        """Returns tensors with the checkpoint's prefixes in place of the head's."""
        return {_replaced_prefix(name, self.prefixes): tensor for name, tensor in state.items()}

    def state(self, stored: Tensors) -> Tensors:
        """Returns a head's `state_dict` for all tensors of the module, and what these repeat from the target."""
        ours = {self.head_name(name): tensor for name, tensor in stored.items()}
        layer = {name: tensor for name, tensor in ours.items() if name.startswith(LAYER)}
        rest = {name: tensor for name, tensor in ours.items() if name not in layer}
        return rest | joined(self.model, layer)

    def head_name(self, name: str) -> str:
        """Returns the head's name for a tensor of the checkpoint."""
        ours = {theirs: ours for ours, theirs in self.prefixes.items()}
        return _replaced_prefix(name, ours | {self.prefixes[LAYER] + part: part for part in REPEATED})

    def is_of_module(self, name: str) -> bool:
        """Returns whether a tensor of the checkpoint is one of its module, and none that repeats the target's."""
        return name.startswith(tuple(self.prefixes.values())) and not self.head_name(name).startswith(REPEATED)


def _replaced_prefix(name: str, prefixes: dict[str, str]) -> str:
    """Returns a name with the longest of these prefixes replaced, if it has one."""
    old = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
    return name if old is None else prefixes[old] + name.removeprefix(old)


def joined(model: PreTrainedModel, layer: Tensors) -> Tensors:
    """Returns all tensors of a layer under the names of transformers' model, which joins those of single experts."""
    expected = {name for name in model.state_dict() if name.startswith(LAYER)}
    if layer.keys() == expected:
        return layer
    # What is joined or renamed has the dtype of the experts, not that of a router's bias.
    dtype = next(tensor.dtype for name, tensor in layer.items() if not name.endswith("bias"))
    others = {name: torch.zeros(x.shape) for name, x in model.state_dict().items() if not name.startswith(LAYER)}
    with without_transformers_bar():
        loading: Any = type(model).from_pretrained(
            None, config=model.config, state_dict=others | layer, dtype=torch.float32, output_loading_info=True
        )
    loaded, found = loading
    assert not found["missing_keys"] & expected
    state = loaded.state_dict()
    return {name: state[name].to(layer[name].dtype if name in layer else dtype) for name in expected} | {
        name: layer[name] for name in found["unexpected_keys"]
    }
