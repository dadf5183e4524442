"""Export formats of TensorRT-LLM 1.3, from its documentation and source: none has been run.

Source: tensorrt_llm/_torch/models/modeling_speculative.py and `Eagle3DecodingConfig` of its API reference.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.engines.base import Engine
from mtptrain.engines.format import Format
from mtptrain.engines.limits import Refusal, why_not_captured
from mtptrain.engines.vllm.formats import VllmDraftModel, VllmEagle3
from mtptrain.settings.heads import DraftModelConfig, HeadConfig


def launch(form: Format, target: str, directory: Path, num_speculative_tokens: int, **more: object) -> str:
    """Returns the commands that write a file of settings and start TensorRT-LLM with it."""
    head = json.dumps(str(directory), ensure_ascii=False)  # YAML reads JSON's texts
    settings = {"decoding_type": form.method, "speculative_model": head, "max_draft_len": num_speculative_tokens}
    lines = "\n".join(f"  {name}: {value}" for name, value in {**settings, **more}.items())
    return (
        f"cat > speculative.yaml <<'END'\nspeculative_config:\n{lines}\nEND\n"
        f"trtllm-serve {shlex.quote(target)} --config speculative.yaml"
    )


class TensorRtEagle3(VllmEagle3):
    """Exports `eagle3` with vLLM's tensors. The layers are settings of the engine, not of the head."""

    method = "Eagle3"

    def config_json(self, dtype: str) -> dict[str, Any]:
        config = super().config_json(dtype)
        eagle_config = config.get("eagle_config", {}) | {"norm_before_fc": self.head.norm_before_fc}
        return config | {"eagle_config": eagle_config}  # TensorRT-LLM reads norm_before_fc only there

    @property
    def engine_layers(self) -> list[int]:
        """Layers as TensorRT-LLM counts them: id k is the output of layer k, from 0."""
        return [layer - 1 for layer in self.layers]

    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        more = {"eagle3_layers_to_capture": self.engine_layers}
        return launch(self, target, directory, num_speculative_tokens, **more)

    def notes(self) -> list[str]:
        return [
            f"TensorRT-LLM must be told the layers: `eagle3_layers_to_capture: {self.engine_layers}`. Without "
            "this setting, it reads its default layers and says nothing. The files were checked, but not served."
        ]


class TensorRtDraftModel(VllmDraftModel):
    method = "Draft_Target"
    launch = launch

    def notes(self) -> list[str]:
        return ["The files were checked, but not served by TensorRT-LLM."]


class TensorRtLlm(Engine):
    """TensorRT-LLM, which mtptrain does not start."""

    name = "TensorRT-LLM"
    version = "1.3"
    formats = {"eagle3": TensorRtEagle3, "draft_model": TensorRtDraftModel}  # noqa: RUF012 (never changed)

    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        if not isinstance(head, DraftModelConfig):
            yield from why_not_captured(self.name, head, target, has_embeddings=False)


ENGINE = TensorRtLlm()
