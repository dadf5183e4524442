"""Export for `generate(use_mtp=True)` in transformers 5.23: the head is an extra layer in the target's checkpoint.

Sources: `MTPCandidateGenerator` in generation/candidate_generator.py, `MtpModel` in modeling_layers.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from mtptrain.engines.base import GENERATION_SETTINGS, Applied, Engine
from mtptrain.engines.format import LAYER_PARTS, Format
from mtptrain.engines.limits import SIZES, Refusal, different_sizes, quantised
from mtptrain.engines.target_files import add_target_files
from mtptrain.settings.heads import HeadConfig, MtpConfig
from mtptrain.target.families import sliding_window
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import GenerationDefaults, stored_generation
from mtptrain.utils.errors import UserError, error_summary

MODEL_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
"""Model classes of the families whose decoder layer equals the head's. transformers builds the head from that layer."""


FURTHER = (
    *("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "min_length", "exponential_decay_length_penalty"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "guidance_scale", "watermarking_config"),
    *("max_time", "assistant_ensemble_weight"),
)
"""Settings of generation_config.json that transformers applies too, with drafts."""
REFUSED = (
    *("stop_strings", "token_healing", "penalty_alpha", "dola_layers", "num_beam_groups", "constraints"),
    "force_words_ids",
)
"""Settings with which `generate` fails, unless it is given a tokenizer, or may run code of the hub."""
OWN_SETTINGS = ("attention_bias", "zero_first_embedding", "prenorm_states", "rope_parameters")
"""Settings of MiMo's MTP layer, and a RoPE of its own, which an additional layer of the target does not have."""


class TransformersMtp(Format):
    """Exports `mtp` as a layer after the target's last one, in a directory with the target's weights.

    One layer drafts one token. K copies of the head would draft K tokens, but copy k would read keys of depth k
    for all earlier tokens, whereas the head was trained to read their keys of depth 0.
    """

    method = "use_mtp"
    weights_name = "mtp.safetensors"

    def __init__(self, head: HeadConfig, target: PreTrainedConfig) -> None:
        super().__init__(head, target)
        self.architecture = MODEL_CLASSES[target.model_type]
        prefix = f"model.layers.{target.num_hidden_layers}."
        self.names = {part: prefix + part for part in ("enorm.weight", "hnorm.weight", "eh_proj.weight", *LAYER_PARTS)}
        self.names["norm.weight"] = prefix + "post_norm.weight"

    def config_json(self, dtype: str) -> dict[str, Any]:
        config = self.target.to_dict() | {"architectures": [self.architecture], "num_mtp_layers": 1}
        return {name: value for name, value in config.items() if name != "_name_or_path"}  # omits a local path

    def launch(self, target: str, directory: Path, num_speculative_tokens: int) -> str:
        return f"""\
from transformers import AutoTokenizer, {self.architecture}

# This pattern tells use_mtp which tensors of the checkpoint belong to the head.
{self.architecture}._keys_to_ignore_on_load_unexpected = [r"model\\.layers\\.{self.target.num_hidden_layers}\\."]
tokenizer = AutoTokenizer.from_pretrained("{directory}")
model = {self.architecture}.from_pretrained("{directory}", dtype="auto")
prompt = tokenizer("def main", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, use_mtp=True, do_sample=False, max_new_tokens=64)[0]))"""

    def add_target(self, directory: Path, target_dir: Path) -> None:
        """Add the target's weights (as hard links, if possible), its tokenizer, and the index of all tensors."""
        if TargetFiles(target_dir).has_image_encoder:
            raise UserError(
                "target.path: must be the checkpoint of a language model alone to export head mtp for transformers, "
                f"but {target_dir} is an image+text checkpoint, in whose tensor names {self.architecture} would not "
                "find its own; set export.engine=vllm"
            )
        add_target_files(directory, target_dir, self.weights_name)

    def notes(self) -> list[str]:
        return [
            "One sequence at a time. `use_mtp` drafts one token per round with this export, so the acceptance length "
            "is 1 plus the acceptance rate at position 0.",
            "The target's weights here are hard links to the target's files, or copies where links are not possible.",
        ]


class Transformers(Engine):
    """`generate(use_mtp=True)`, which tests run in their own process."""

    name = "transformers"
    version = "5.23"
    formats = {"mtp": TransformersMtp}  # noqa: RUF012 (never changed)
    has_server = False
    applies = {  # noqa: RUF012
        **{
            setting: Applied.yes
            for setting in (*GENERATION_SETTINGS, *FURTHER)
            if not setting.startswith(("presence", "frequency", "tokenizer", "forced_bos"))
        },
        **{"num_return_sequences": Applied.refused} | dict.fromkeys(REFUSED, Applied.always_refused),
    }
    defaults = {"temperature": 1.0, "top_k": 50}  # noqa: RUF012 (if do_sample is true; else it is greedy)
    sampling = {"order": ("temperature", "top_k", "top_p", "min_p")}  # noqa: RUF012

    def read_by(self, target: TargetFiles) -> GenerationDefaults:
        """Returns the settings without those of sampling, unless do_sample is true: transformers is greedy without."""
        own = target.generation
        return own if own.do_sample else replace(own, temperature=None, top_p=None, top_k=None, min_p=None)

    def notes(self, target: TargetFiles) -> list[str]:
        own = target.own_generation
        note = f"A prompt of {own.max_length} tokens or more, the max_length, is an error without max_new_tokens."
        return super().notes(target) + [note] * bool(own.max_length and own.max_new_tokens is None)

    def why_it_fails(self, target: TargetFiles) -> str:
        """Returns the error of `generate` with drafts, which a tiny model shows, or that it would not use the head.

        The tiny model drafts by prompt lookup, with the same checks. Settings that need code of the hub are left out.
        """
        if target.own_generation.processors.keys() & {*REFUSED}:
            return ""
        sizes: dict[str, Any] = {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        with torch.random.fork_rng(devices=[]):
            model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=target.config.vocab_size, **sizes))
            model.generation_config = own = stored_generation(target.directory, target.config)
            own.use_mtp = False
            try:
                if (mode := own.get_generation_mode()) not in ("greedy_search", "sample"):
                    how = "as num_beams, prompt_lookup_num_tokens and assistant_early_exit do"
                    return f"it selects {mode.value}, {how}, which does not use the head"
                own.update(prompt_lookup_num_tokens=1, assistant_ensemble_weight=None)
                model.generate(torch.tensor([[0]]), max_new_tokens=2, min_new_tokens=0, pad_token_id=0)
            except Exception as error:  # of code that checks no types
                return error_summary(error)
        return ""

    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        assert isinstance(head, MtpConfig)
        reason = "transformers builds the head from the target's own decoder layer"
        if own := [name for name in OWN_SETTINGS if getattr(head, name)]:
            must_be, settings = "without a RoPE or other settings of its own", f"one with {', '.join(own)}"
            yield Refusal("head", must_be, settings, reason, "train without them")
        if (value := other_layer(target)) is not None:
            yield Refusal("target.path", "a Llama or Mistral with full attention, SiLU and no biases", value, reason)
            return
        quantised_like = "the head's layer would have to be quantised like the target's"
        yield from quantised(target, quantised_like, "export for the target in bf16")
        if (value := different_sizes(head, target)) is not None:
            yield Refusal("head", f"a layer with the target's sizes {SIZES}", value, reason, "train again with these")


def other_layer(target: PreTrainedConfig) -> str | None:
    """Returns how the target's decoder layer differs from the head's, for a message; None if it does not."""
    if target.model_type not in MODEL_CLASSES:
        return f"a {target.model_type}"
    if target.hidden_act != "silu":
        return f"one with hidden_act {target.hidden_act}"
    if getattr(target, "attention_bias", False) or getattr(target, "mlp_bias", False):
        return "one with biases"
    return None if sliding_window(target) is None else f"one with a sliding window of {sliding_window(target)} tokens"


ENGINE = Transformers()
