"""Export formats for OpenVINO GenAI 2026.4.1: vLLM's layout, with what optimum-intel 2.2 needs to convert it.

The export is not converted yet. The commands in its README do that with `optimum-cli`, in an environment of its own;
`mtptrain serving-check` and `serving-bench` convert it themselves, into a temporary folder. Sources:
`LlamaEagle3Model` and `Qwen3DFlashDraftModel` in optimum's exporters/openvino/model_patcher.py;
src/cpp/src/speculative_decoding/ in openvino.genai.
"""

import shlex
from pathlib import Path
from typing import Any

import torch

from mtptrain.engines.format import Format
from mtptrain.engines.vllm.formats import VllmDflash, VllmDraftModel, VllmEagle3
from mtptrain.heads.base import Tensors
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.generation import FILE, PENALTIES, as_words, read_generation
from mtptrain.utils.errors import warn
from mtptrain.utils.files import save_tensors

CONVERT = "optimum-cli export openvino --task text-generation-with-past --weight-format fp32"
SET_LAYERS = """\
import os, openvino
model = openvino.Core().read_model("head_openvino/openvino_model.xml")
model.set_rt_info({layers}, "hidden_layers_list")
openvino.save_model(model, "head_openvino/new.xml", compress_to_fp16=False)
for kind in ("xml", "bin"):
    os.replace(f"head_openvino/new.{{kind}}", f"head_openvino/openvino_model.{{kind}}")
"""
RUN = """\
import openvino_genai
scheduler = openvino_genai.SchedulerConfig()
scheduler.enable_prefix_caching = False
draft = openvino_genai.draft_model("head_openvino", "CPU")
pipeline = openvino_genai.LLMPipeline("target_openvino", "CPU", draft_model=draft, scheduler_config=scheduler)
# of generation_config.json, only the ends are read with drafts; a limit is needed, and penalties are to be given here
# a text as it is; without apply_chat_template=False, it becomes the message of a user in the chat template
greedy = {{"do_sample": False, "max_new_tokens": 64, "apply_chat_template": False}}
print(pipeline.generate("def main", num_assistant_tokens={num_speculative_tokens}, **greedy))
"""


FAILS_WITH_PENALTIES = (
    "the first request with a repetition, presence or frequency penalty fails in OpenVINO GenAI 2026.4.1, which then "
    "accepts no draft until the pipeline is built anew; send none, or train with head.draft_vocab_size=null"
)


class OpenvinoFormat(Format):
    @property
    def hidden_layers(self) -> list[int]:
        """Layers that must be written into the converted head."""
        return []

    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        program = RUN.format(num_speculative_tokens=num_speculative_tokens)
        if self.hidden_layers:
            program = SET_LAYERS.format(layers=self.hidden_layers) + program
        return (
            f"{CONVERT} -m {shlex.quote(target)} target_openvino\n"
            f"{CONVERT} --trust-remote-code -m {shlex.quote(str(directory))} head_openvino\n"
            f"python - <<'END'\n{program}END"
        )

    def notes(self) -> list[str]:
        notes = [
            "These commands need `openvino-genai==2026.4.1.0 optimum-intel==2.2.0 einops 'diffusers<0.38'`.",
            "Decode greedily: with drafts, OpenVINO GenAI 2026.4 samples other texts than without (seen with EAGLE-3 "
            "heads at temperature 0.3 and 0.8: garbage).",
            'With `INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32"` for both models, OpenVINO accepts '
            "exactly the drafts that mtptrain does. By default it rounds to the types in which the CPU is fastest.",
            "With drafts, OpenVINO reads only the ends of the target's `generation_config.json`, needs "
            "`max_new_tokens` in each request, and mostly ends an answer too early with `min_new_tokens`.",
        ]
        if self.hidden_layers:
            notes.append(
                "Without `--trust-remote-code`, optimum converts an EAGLE-3 head as a plain Llama, without an error. "
                "Without `hidden_layers_list`, OpenVINO takes its default streams of the target without an error. They "
                "are one layer later than vLLM's, because it counts layers from their outputs."
            )
        return notes


class OpenvinoEagle3(OpenvinoFormat, VllmEagle3):
    """Exports `eagle3`, always with an lm_head and d2t, because optimum's class has both."""

    @property
    def hidden_layers(self) -> list[int]:
        return [layer - 1 for layer in self.layers]  # OpenVINO's id k is the stream after k + 1 decoder layers

    @property
    def vocab_size(self) -> int:
        return self.head.draft_vocab_size or int(self.target.vocab_size)

    def tensors(self, state: Tensors) -> Tensors:
        tensors = super().tensors(state)
        if "d2t" not in tensors:
            tensors["d2t"] = torch.zeros(self.vocab_size, dtype=torch.long)
        return tensors

    def state(self, tensors: Tensors) -> Tensors:
        state = super().state(tensors)  # without a draft vocabulary, and so without t2d, `tensors` has added d2t
        return state if "t2d" in tensors else {name: tensor for name, tensor in state.items() if name != "d2t"}

    def read(self, directory: Path) -> Tensors:
        """Returns the engine's tensors that `write` wrote, without the target's lm_head."""
        tensors = super().read(directory)
        if self.head.draft_vocab_size is None:
            tensors.pop("lm_head.weight", None)
        return tensors

    def config_json(self, dtype: str) -> dict[str, Any]:
        # optimum-intel does not read these ids: `head.init_from` and `openvino_worker`, which tells OpenVINO, do.
        return super().config_json(dtype) | {"draft_vocab_size": self.vocab_size} | self.layer_ids(self.layers)

    def notes(self) -> list[str]:
        return super().notes() + [FAILS_WITH_PENALTIES] * (self.head.draft_vocab_size is not None)

    def add_target(self, directory: Path, target_dir: Path) -> None:
        """Add the target's lm_head to a head without its own, and warn of penalties that others do not take."""
        sampling = read_generation(target_dir, self.target).sampling
        penalties = {name: sampling[name] for name in PENALTIES if name in sampling}
        if self.head.draft_vocab_size is not None and penalties:
            warn(
                f"{target_dir / FILE}: must not have a penalty for an eagle3 head with a draft vocabulary, but has "
                f"{as_words(penalties)}: {FAILS_WITH_PENALTIES}"
            )
        if self.head.draft_vocab_size is None:
            tensors, lm_head = self.read(directory), load_frozen_parts(target_dir).lm_head
            dtype = tensors["fc.weight"].dtype
            save_tensors(directory / self.weights_name, tensors | {"lm_head.weight": lm_head.to(dtype)})


class OpenvinoDflash(OpenvinoFormat, VllmDflash):
    """Exports `dflash`. OpenVINO takes embeddings and lm_head from the target."""


class OpenvinoDraftModel(OpenvinoFormat, VllmDraftModel):
    """Exports `draft_model` as a standard transformers checkpoint with the target's tokenizer."""
