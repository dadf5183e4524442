"""Exports head `native_mtp` as the MTP module of a checkpoint, under the names of its family.

Sources: vllm/model_executor/models/*_mtp.py in vLLM 0.32.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mtptrain.engines.target_files import WholeCheckpoint, add_target_files
from mtptrain.heads.base import Tensors
from mtptrain.heads.native_mtp import NATIVE_MTP
from mtptrain.heads.native_mtp_tensors import ModuleTensors
from mtptrain.utils.files import read_json, write_json


class VllmNativeMtp(WholeCheckpoint):
    """Replaces a checkpoint's own MTP module with `native_mtp`."""

    @cached_property
    def module(self) -> ModuleTensors:
        return ModuleTensors(self.target)

    @property
    def architecture(self) -> str:  # type: ignore[override]
        return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.target.model_type])

    def tensors(self, state: Tensors) -> Tensors:
        return self.module.stored(state)

    def state(self, tensors: Tensors) -> Tensors:
        return self.module.state(tensors)

    def config_json(self, dtype: str) -> dict[str, Any]:
        """Returns nothing: `add_target` writes the target's own config.json."""
        return {}

    def add_target(self, directory: Path, target_dir: Path) -> None:
        """Add the target's config, tokenizer and weights, except those of its own module, and the index of all.

        The copies of the target's tensors that some modules have stay as they are.
        """
        config = read_json(target_dir / "config.json")
        declaring, count = config.get("text_config", config), NATIVE_MTP[self.target.model_type].count
        declaring[count] = declaring.get(count) or 1
        write_json(directory / "config.json", config)
        add_target_files(directory, target_dir, self.weights_name, self.module.is_of_module)
