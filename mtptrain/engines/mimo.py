"""Gives `mtp` the names and the layout of MiMo's MTP layer, alone or in a MiMo checkpoint."""

from mtptrain.engines.format import LAYER_PARTS, Format
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
