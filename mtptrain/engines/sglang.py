"""Export formats of SGLang 0.5.23 (sglang/srt/models/: mimo_mtp.py, llama_eagle.py, llama_eagle3.py, dflash.py)."""

import shlex
from pathlib import Path
from typing import Any

from mtptrain.engines.format import Format
from mtptrain.engines.mimo import MimoLayer
from mtptrain.engines.vllm.formats import EAGLE_NAMES, VllmDflash, VllmDflash2, VllmDspark, VllmEagle3
from mtptrain.heads.base import Tensors
from mtptrain.heads.eagle3 import FROM_1_IN_SGLANG, LAYER_IDS

BLOCK_METHODS = ("DFLASH", "DSPARK")
"""Methods that draft a whole block in one step. SGLang warns of any other number of steps, and sets it to 1."""


class SglangFormat(Format):
    """The launch command that SGLang's formats share."""

    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        """Returns the command that starts SGLang with a chain of drafts, not a tree."""
        target, head = shlex.quote(target), shlex.quote(str(directory))
        steps = "" if self.method in BLOCK_METHODS else f"--speculative-num-steps {num_speculative_tokens} "
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {self.method} "
            f"--speculative-draft-model-path {head} {steps}"
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {num_speculative_tokens + 1}"
        )


class SglangMtp(SglangFormat, MimoLayer):
    """Exports `mtp` as MiMo's multi-token-prediction layer, which SGLang combines with targets of any family."""

    method = "EAGLE"

    def config_json(self, dtype: str) -> dict[str, Any]:
        return self.llama_config(dtype) | self.model_entries

    def notes(self) -> list[str]:
        if self.head.zero_first_embedding:
            return []
        return [
            "At position 0, SGLang's model reads zeros in place of the embedding; training and evaluation do not. Only "
            "the key and value of that position differ. To avoid this, train with head.zero_first_embedding=true."
        ]


class SglangEagle(SglangFormat):
    """Exports `eagle` with a zero bias for fc, because SGLang would initialize a missing bias at random."""

    architecture = "LlamaForCausalLMEagle"
    method = "EAGLE"
    names = EAGLE_NAMES

    def tensors(self, state: Tensors) -> Tensors:
        tensors = super().tensors(state)
        return tensors | {"fc.bias": tensors["fc.weight"].new_zeros(self.dims.hidden_size)}

    def state(self, tensors: Tensors) -> Tensors:
        return super().state({name: tensor for name, tensor in tensors.items() if name != "fc.bias"})

    def config_json(self, dtype: str) -> dict[str, Any]:
        return self.llama_config(dtype)


class InFormatOfVllm(SglangFormat):
    """Leaves out the notes about vLLM of heads in vLLM's format."""

    def notes(self) -> list[str]:
        return []


class SglangDflash(InFormatOfVllm, VllmDflash):
    """Exports `dflash`."""

    method = "DFLASH"


class SglangDflash2(InFormatOfVllm, VllmDflash2):
    """Exports `dflash2`."""

    method = "DFLASH"


class SglangDspark(InFormatOfVllm, VllmDspark):
    """Exports `dspark`."""

    method = "DSPARK"


class SglangEagle3(InFormatOfVllm, VllmEagle3):
    """Exports `eagle3` in vLLM's format, except for the layer ids."""

    method = "EAGLE3"

    def layer_ids(self, layers: tuple[int, ...]) -> dict[str, Any]:
        """Returns the key for the layer ids, which are one less than ours: id k is the output of layer k, from 0.

        SGLang's classes for `FROM_1_IN_SGLANG` add 1 back only if the first id is 1, and otherwise expect our ids.
        """
        if self.target.model_type in FROM_1_IN_SGLANG and layers[0] != 2:
            ids = list(layers)
        else:
            ids = [layer - 1 for layer in layers]
        return {"eagle_config": {LAYER_IDS: ids}}
