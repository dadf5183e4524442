"""Exports head `native_mtp` as the MTP module of a checkpoint, under the names of its family.

Sources: vllm/model_executor/models/*_mtp.py in vLLM 0.32; transformers' own table of renamed and joined tensors.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from mtptrain.convert.base import Tensors, renamed
from mtptrain.convert.target_files import WholeCheckpoint, add_target_files
from mtptrain.heads.native_mtp import LAYER, NATIVE_MTP, NativeModule, module_config
from mtptrain.target.form import build_on_meta
from mtptrain.target.loading import without_transformers_bar
from mtptrain.utils.files import read_json, write_json

REPEATED = ("embed_tokens.", "shared_head.head.")
"""Prefixes of what some modules repeat from the target. An export leaves these tensors as they are."""


class VllmNativeMtp(WholeCheckpoint):
    """Replaces a checkpoint's own MTP module with `native_mtp`."""

    @property
    def native(self) -> NativeModule:
        """How the family's modules are built."""
        return NATIVE_MTP[self.target.model_type]

    @cached_property
    def prefixes(self) -> dict[str, str]:
        """The checkpoint's prefix for each prefix of the head's tensors."""
        layers = str(self.target.num_hidden_layers)
        return {ours: theirs.replace("{N}", layers) for ours, theirs in self.native.names.items()}

    @cached_property
    def model(self) -> PreTrainedModel:
        """A model of one layer, without weights: transformers knows how a checkpoint of its class is stored."""
        return build_on_meta(module_config(self.target))

    @property
    def architecture(self) -> str:  # type: ignore[override]
        return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.target.model_type])

    def tensors(self, state: Tensors) -> Tensors:
        layer = {name: tensor for name, tensor in state.items() if name.startswith(LAYER)}
        stored = {name: tensor for name, tensor in state.items() if name not in layer}
        stored |= revert_weight_conversion(self.model, layer)
        return renamed(stored, lambda name: _replaced_prefix(name, self.prefixes))

    def state(self, tensors: Tensors) -> Tensors:
        ours = renamed(tensors, self.head_name)
        layer = {name: tensor for name, tensor in ours.items() if name.startswith(LAYER)}
        rest = {name: tensor for name, tensor in ours.items() if name not in layer}
        return rest | joined(self.model, layer)

    def head_name(self, name: str) -> str:
        """Returns the head's name for a tensor of the checkpoint."""
        ours = {theirs: ours for ours, theirs in self.prefixes.items()}
        return _replaced_prefix(name, ours | {self.prefixes[LAYER] + part: part for part in REPEATED})

    def is_replaced(self, name: str) -> bool:
        """Returns whether a tensor of the checkpoint is one of its own module that this head replaces."""
        return name.startswith(tuple(self.prefixes.values())) and not self.head_name(name).startswith(REPEATED)

    def config_json(self, dtype: str) -> dict[str, Any]:
        """Returns nothing: `add_target` writes the target's own config.json."""
        return {}

    def add_target(self, directory: Path, target_dir: Path) -> None:
        """Add the target's config, tokenizer and weights, except those of its own module, and the index of all."""
        config = read_json(target_dir / "config.json")
        declaring = config.get("text_config", config)
        declaring[self.native.count] = declaring.get(self.native.count) or 1
        write_json(directory / "config.json", config)
        add_target_files(directory, target_dir, self.weights_name, self.is_replaced)


def _replaced_prefix(name: str, prefixes: dict[str, str]) -> str:
    """Returns a name with the longest of these prefixes replaced, if it has one."""
    old = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
    return name if old is None else prefixes[old] + name.removeprefix(old)


def joined(model: PreTrainedModel, layer: Tensors) -> Tensors:
    """Returns the tensors of a layer under the names of transformers' model, which joins those of single experts.

    Raises:
        KeyError: a tensor of the model is missing.
    """
    expected = {name for name in model.state_dict() if name.startswith(LAYER)}
    if layer.keys() == expected:
        return layer
    # What is joined or renamed has the dtype of the experts, not that of a router's bias.
    dtype = next(tensor.dtype for name, tensor in layer.items() if not name.endswith("bias"))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the embeddings and lm_head are not there
    try:
        with without_transformers_bar():
            loading: Any = type(model).from_pretrained(
                None, config=model.config, state_dict=layer, dtype=torch.float32, output_loading_info=True
            )
    finally:
        logging.set_verbosity(verbosity)
    loaded, found = loading
    if missing := sorted(found["missing_keys"] & expected):
        raise KeyError(missing[0])
    state = loaded.state_dict()
    return {name: state[name].to(layer[name].dtype if name in layer else dtype) for name in expected} | {
        name: layer[name] for name in found["unexpected_keys"]
    }
