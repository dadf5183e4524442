"""Exports `mtp` as MiMo's MTP layer.

For SGLang 0.5.23 the layer is exported alone and drafts for any target. For vLLM 0.32 it is part of a MiMo checkpoint.

Sources: sglang/srt/models/mimo_mtp.py; vllm/model_executor/models/mimo.py and mimo_mtp.py.
"""

from pathlib import Path
from typing import Any

from mtptrain.engines.format import LAYER_PARTS, Format
from mtptrain.engines.target_files import WholeCheckpoint, add_target_files
from mtptrain.heads.base import Tensors
from mtptrain.heads.mtp import swap_halves
from mtptrain.settings.heads import MtpConfig
from mtptrain.target.mimo import ARCHITECTURE, MTP_LAYERS

MIMO_LAYER = f"{MTP_LAYERS}0."
BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")


class MimoLayer(Format):
    """Gives `mtp` the tensor names and the layout of MiMo's multi-token-prediction layer.

    In MiMo's layout, the first columns of the input projection read the hidden state, not the embedding. A head without
    biases gets zero query, key and value biases, because engines would initialize missing ones at random.
    """

    architecture = ARCHITECTURE
    names = {  # noqa: RUF012 (never changed)
        "enorm.weight": MIMO_LAYER + "token_layernorm.weight",
        "hnorm.weight": MIMO_LAYER + "hidden_layernorm.weight",
        "eh_proj.weight": MIMO_LAYER + "input_proj.weight",
        "norm.weight": MIMO_LAYER + "final_layernorm.weight",
        **{part: MIMO_LAYER + part for part in (*LAYER_PARTS, *BIASES)},
    }
    model_entries = {"model_type": "qwen2", "num_nextn_predict_layers": 1}  # noqa: RUF012 (never changed)
    """Entries of config.json for the model that has the layer."""
    head: MtpConfig
    _INPUT_PROJ = MIMO_LAYER + "input_proj.weight"

    def tensors(self, state: Tensors) -> Tensors:
        tensors = super().tensors(state)
        tensors[self._INPUT_PROJ] = swap_halves(tensors[self._INPUT_PROJ])
        for bias in (self.names[own] for own in BIASES):
            weight = tensors[f"{bias.removesuffix('bias')}weight"]
            tensors.setdefault(bias, weight.new_zeros(len(weight)))
        return tensors

    def state(self, tensors: Tensors) -> Tensors:
        kept = {
            name: tensor for name, tensor in tensors.items() if self.head.attention_bias or not name.endswith(".bias")
        }
        return super().state(kept | {self._INPUT_PROJ: swap_halves(kept[self._INPUT_PROJ])})


class VllmMimo(WholeCheckpoint, MimoLayer):
    """Replaces a MiMo checkpoint's own MTP layer with `mtp`.

    The directory is a whole checkpoint. Its `config.json` has Qwen2's model type, so that engines need no code from the
    checkpoint: MiMo's config differs from Qwen2's only by name. The model class is still MiMo's.
    """

    def config_json(self, dtype: str) -> dict[str, Any]:
        config = self.target.to_dict() | {"architectures": [ARCHITECTURE], **self.model_entries}
        return {name: value for name, value in config.items() if name not in ("_name_or_path", "auto_map")}

    def add_target(self, directory: Path, target_dir: Path) -> None:
        """Add the target's tokenizer, its weights except those of its own MTP layer, and the index of all tensors."""
        add_target_files(directory, target_dir, self.weights_name, lambda name: name.startswith(MTP_LAYERS))

    def notes(self) -> list[str]:
        return [
            *super().notes(),
            "Serve this with vLLM. Its MiMo class passes the states before the target's final norm to the MTP layer, "
            "and the head was trained and measured with these. SGLang's class passes the states after the norm.",
        ]
