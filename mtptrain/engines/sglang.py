"""Export formats of SGLang 0.5.23 (sglang/srt/models/: mimo_mtp.py, llama_eagle.py, llama_eagle3.py, dflash.py)."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.engines.base import Applied, Engine
from mtptrain.engines.exports import FROM_1_IN_SGLANG, LAYER_IDS
from mtptrain.engines.format import Format
from mtptrain.engines.limits import Refusal, captured_layers, layers_must, must_be_false, no_anchor, why_not_captured
from mtptrain.engines.mimo import MimoLayer
from mtptrain.engines.vllm.formats import EAGLE_NAMES, VllmDflash, VllmDflash2, VllmDspark, VllmEagle3
from mtptrain.heads.base import Tensors
from mtptrain.settings.heads import HeadConfig, MtpConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import as_ids, stored_generation
from mtptrain.target.quantised import names_lm_head

_STREAMS_FOR_ALL = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma4_text", "gemma4_unified_text", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt_oss", "internlm3", "iquestcoder", "llama", "mellum", "minimax_m3_vl_text", "ministral3"),
    *("mistral", "phi3", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
)
_STREAMS_FOR_BLOCKS = ("inkling_text", "laguna", "lfm2", "lfm2_moe", "mimo_v2_flash", "nemotron_h", *_STREAMS_FOR_ALL)
WITH_STREAMS = {
    "eagle3": (
        *("apertus", "exaone_moe", "gemma3_text", "glm4_moe", "llama4_text", "longcat_flash", "minimax_m2", "qwen2"),
        "qwen2_moe",
        *_STREAMS_FOR_ALL,
    ),
    "dflash": _STREAMS_FOR_BLOCKS,
    "dspark": ("kimi_linear", *_STREAMS_FOR_BLOCKS),
    "dflash2": _STREAMS_FOR_BLOCKS,
}
"""Families whose class in SGLang returns residual streams to a head, or that of the model with images around them.

Those classes have `set_eagle3_layers_to_capture`, `set_dflash_layers_to_capture` or `set_dspark_layers_to_capture`.
"""
BLOCK_METHODS = ("DFLASH", "DSPARK")
"""Methods that draft a whole block in one step. SGLang warns of any other number of steps, and sets it to 1."""

ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Added tokens at which SGLang ends answers, whatever the files say (srt/utils/hf_transformers/common.py)."""
MAX_PENALTY = 2
CONTEXTS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
"""Keys of which the first that config.json has is the context of a target (srt/utils/hf_transformers/common.py)."""
NAMED = (
    r"\bpoints\b|moss.*vl|internvl|janus|vicuna|llava-(v1\.5|next-video-(7b|34b)|v1\.6-(yi-)?34b|onevision-qwen2)|"
    r"deepseek(.*vl2|-ocr)|minicpm-[vo](?!-4[._][67])|phi-4-multimodal|unlimited|paddleocr|whisper"
)
"""Parts of a target's path for which SGLang takes a chat template of its own (srt/parser/conversation.py)."""


class SglangFormat(Format):
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
        return super().config_json(dtype) | self.model_entries

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
    added = ("fc.bias",)

    def tensors(self, state: Tensors) -> Tensors:
        tensors = super().tensors(state)
        return tensors | {"fc.bias": tensors["fc.weight"].new_zeros(self.dims.hidden_size)}


class InFormatOfVllm(SglangFormat):
    """Leaves out the notes about vLLM of heads in vLLM's format."""

    def notes(self) -> list[str]:
        return []


class SglangDflash(InFormatOfVllm, VllmDflash):
    method = "DFLASH"


class SglangDflash2(InFormatOfVllm, VllmDflash2):
    method = "DFLASH"


class SglangDspark(InFormatOfVllm, VllmDspark):
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


class Sglang(Engine):
    """SGLang, which mtptrain does not start."""

    name = "SGLang"
    version = "0.5.23"
    takes_dtype = True
    formats = {  # noqa: RUF012 (never changed)
        "mtp": SglangMtp,
        "eagle": SglangEagle,
        "eagle3": SglangEagle3,
        "dflash": SglangDflash,
        "dspark": SglangDspark,
        "dflash2": SglangDflash2,
    }

    applies = {  # noqa: RUF012 (sglang/srt/configs/model_config.py, managers/schedule_batch.py, speculative/)
        **dict.fromkeys(("temperature", "top_k", "top_p", "repetition_penalty"), Applied.yes),
        **{"min_p": Applied.without_drafts, "eos_token_ids": Applied.yes, "tokenizer_eos_token_id": Applied.yes},
    }
    defaults = {"temperature": 1.0}  # noqa: RUF012
    own_renderers = {  # noqa: RUF012 (srt/entrypoints/openai/chat_encoding.py)
        "DeepseekV4|KimiK3|InklingForCond": "a program of its own, not by the chat template: give it token ids"
    }
    reads_architectures = True

    def context_key(self, config: PreTrainedConfig) -> str:
        return next(key for key in CONTEXTS if getattr(config, key, None) is not None)

    def ends_of(self, target: TargetFiles) -> list[int]:
        """Returns the ends of config.json too, which SGLang joins with those of generation_config.json."""
        added = target.tokenizer.get_added_vocab()
        own = [*as_ids(target.config.eos_token_id), *(added[text] for text in ENDS if text in added)]
        return [*dict.fromkeys(super().ends_of(target) + own)]

    def why_it_fails(self, target: TargetFiles) -> str:
        """Returns the error of requests that leave out a value that its `SamplingParams` refuse."""
        own, penalty = target.generation, target.generation.repetition_penalty or 1
        if stored_generation(target.directory, target.config).top_k == 0 and own.temperature != 0:
            return "top_k must be -1 (all tokens) or at least 1, got 0"
        return f"repetition_penalty must be in (0, 2], got {penalty}" if penalty > MAX_PENALTY else ""

    def notes(self, target: TargetFiles) -> list[str]:
        notes = super().notes(target)
        if named := re.search(NAMED, target.name_for_engines, re.IGNORECASE):
            notes.append(
                f"{self.name} {self.version} makes prompts of chats by a template of its own if the target's path has "
                f"`{named[0]}`: start it with `--chat-template FILE.jinja` and the target's own template."
            )
        return notes

    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        if head.name in WITH_STREAMS:
            yield from why_not_streams(head, target)
        yield from no_anchor(self.name, head)
        if head.name != "dflash" and names_lm_head(target):
            # eagle_worker_v2.py reads it even where the head has its own; dspark_worker_v2.py; models/dflash.py
            reason = "SGLang reads the weight of lm_head to draft with this head, and a packed one has none"
            must_be, instead = "a target with an unquantised lm_head", "set export.engine=vllm"
            yield Refusal("target.path", must_be, "one with a quantised one", reason, instead, may_change_engine=False)
        if isinstance(head, MtpConfig):
            reason = "SGLang passes the states after the target's final norm to a head"
            yield from must_be_false(head, "prenorm_states", reason)


def why_not_streams(head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields what SGLang does not serve of a head that reads captured layers."""
    if target.model_type not in WITH_STREAMS[head.name]:
        must_be, value = "of a family whose layers can be captured", f"a {target.model_type}"
        reason = f"SGLang has no class for it that returns residual streams to head {head.name}"
        yield Refusal("target.path", must_be, value, reason)
    at_last, layers = "SGLang captures a stream at the input of the next layer", captured_layers(head, target)
    yield from why_not_captured("SGLang", head, target, has_embeddings=False, at_last=at_last, has_own_lm_head=False)
    if head.name == "eagle3" and target.model_type in FROM_1_IN_SGLANG and layers[0] == 1:
        must_be = f"a list that does not start with 1 for a {' or '.join(FROM_1_IN_SGLANG)} target"
        reason = "for this family SGLang counts layers from 0 if the list starts with 1, and from 1 otherwise"
        yield layers_must(layers, must_be, reason)


ENGINE = Sglang()
