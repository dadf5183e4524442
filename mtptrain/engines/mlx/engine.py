"""Apple's MLX, which runs on Macs, and on CPUs of Linux for tests: what it serves, how it is started and counts.

mlx-lm decodes with a draft model, and mlx-vlm with heads that read captured layers, in an environment of their own
(`make .venv-mlx/.installed`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.engines import limits
from mtptrain.engines.base import Applied, WorkerEngine
from mtptrain.engines.limits import Refusal, models_of, must_be_false
from mtptrain.engines.mlx.formats import MlxDflash, MlxDraftModel, MlxEagle3, rope_for_mlx_lm
from mtptrain.heads.layers import head_dims
from mtptrain.settings.heads import CausalLayers, DflashConfig, DraftModelConfig, Eagle3Config, HeadConfig
from mtptrain.target.generation import GenerationDefaults
from mtptrain.utils.files import read_json

FAMILIES = (
    *("deepseek_v3", "dots1", "ernie4_5", "glm4", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama"),
    *("ministral3", "mistral", "mixtral", "nemotron", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("seed_oss", "smollm3", "stablelm"),
)
"""Families whose layers all keep keys and values, and whose logits in mlx-lm equal those of transformers within 1e-5.
With tiny models in fp32, those of glm and ernie4_5_moe did not, and many others failed to load."""
READS_ROPE = ("qwen3", "ministral3")
"""Those whose class reads rope_parameters."""
WITH_STREAMS = "qwen3_5_text"
"""The family of which mlx-vlm's class returns residual streams, and whose counters were compared with ours."""


class Mlx(WorkerEngine):
    name = "MLX"
    version = "0.32.4"
    packages = MappingProxyType({"mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-vlm": "0.7.10"})
    worker = Path(__file__).with_name("mlx_worker.py")
    rule = (
        "In MLX, accepted drafts behind the end of an answer do not count, nor do ours; drafted tokens are not "
        "compared. The target writes the first token of an answer, which mlx-lm's own first round drafts."
    )
    formats = {"draft_model": MlxDraftModel, "eagle3": MlxEagle3, "dflash": MlxDflash}  # noqa: RUF012
    applies = dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "eos_token_ids", "tokenizer_eos_token_id"), Applied.yes
    )
    """What mlx-vlm applies; mlx-lm applies the ends alone."""
    one_at_a_time = tuple(formats)
    defaults = {"temperature": 0.0}  # noqa: RUF012

    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        if isinstance(head, DraftModelConfig):
            others = "others fail to load in mlx-lm, have other logits there, or have not been compared"
            windows = "mlx-lm cannot take rejected drafts out of a window that is full, and says nothing"
            for each in models_of(head, target):
                yield from limits.why_not_family(*each, FAMILIES, others, windows)
                yield from limits.why_not_keys(self.name, *each)
            yield from why_not_rope(target)
            return
        if target.model_type != WITH_STREAMS:
            reason = "mlx-vlm's class of others returns no residual streams, or has not been compared with ours"
            if target.model_type == "gemma4_text":  # findings/mlx_vlm_gemma4_eagle3_changes_answers.sh
                reason = "with a head, mlx-vlm changes the answers of Gemma 4 once a sliding window is full"
            yield Refusal("target.path", f"a {WITH_STREAMS}", f"a {target.model_type}", reason)
        yield from limits.why_not_keys(self.name, "target.path", "target", target)
        yield from why_not_qwen(target)
        yield from limits.why_not_captured(
            self.name, head, target, has_embeddings=False, has_three=True, has_own_lm_head=False
        )
        assert isinstance(head, Eagle3Config | DflashConfig)
        if (rope := head_dims(head, target).rope)["rope_type"] != "default":
            reason = "mlx-vlm's class of these heads has plain RoPE alone, and would not scale it"
            yield Refusal("head.rope_parameters", "of type default", rope["rope_type"], reason, "train with that")
        if isinstance(head, Eagle3Config):
            for setting in ("fc_norm", "norm_output"):
                yield from must_be_false(head, setting, "mlx-vlm's class of EAGLE-3 heads does not have it")
        else:
            yield from limits.no_anchor(self.name, head)
            if head.sliding_window is not None or head.causal != CausalLayers.none:
                value = f"sliding_window={head.sliding_window}, causal={head.causal}"
                reason = "blocks with windows or causal layers differed from ours in mlx-vlm"
                yield Refusal("head", "one without windows and causal layers", value, reason, "train without them")

    def defaults_note(self, generation: GenerationDefaults) -> str:
        return ""  # the two packages differ: see the notes of their formats


def own_config(target: PreTrainedConfig) -> tuple[Path, dict[str, Any]]:
    """Returns the path and the contents of a target's config.json; nothing of a target without a folder."""
    path = Path(target.name_or_path or "") / "config.json"
    return path, read_json(path) if target.name_or_path and path.is_file() else {}


def why_not_qwen(target: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields what mlx-vlm's class of Qwen3.5 makes of a target's config.json, unlike transformers."""
    path, found = own_config(target)
    config = found.get("text_config", found) or target.to_dict()
    rope, interval = config.get("rope_parameters") or {}, config.get("full_attention_interval", 4)
    if rope.get("rope_type", rope.get("type")) != "default":
        reason = "mlx-vlm's class of it has plain RoPE alone, and would not scale it"
        yield Refusal("target.path", "a target with rope_parameters of type default", rope, reason)
    needed = ("mrope_section", "rope_theta", "partial_rotary_factor")
    if missing := [name for name in needed if name not in rope]:
        reason, instead = "mlx-vlm does not load it without them", f"add them to rope_parameters in {path}"
        yield Refusal("target.path", f"a target with {' and '.join(missing)}", "one without", reason, instead, False)
    if any((kind == "full_attention") != (layer % interval == 0) for layer, kind in enumerate(target.layer_types, 1)):
        reason, instead = "mlx-vlm reads no layer_types", f"set that in {path} if the layers are so"
        must_be = "a target whose full_attention_interval is that of its layer_types"
        yield Refusal("target.path", must_be, interval, reason, instead, False)


def why_not_rope(target: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields the keys that mlx-lm misses in a target's config.json, where transformers 5 has rope_parameters alone.

    findings/mlx_lm_ignores_rope_parameters.sh shows it.
    """
    path, config = own_config(target)
    keys = rope_for_mlx_lm(config.get("rope_parameters") or {})
    own = {"rope_theta": 1e4} if target.model_type in ("llama", "mistral") else {}
    missing = json.dumps({name: value for name, value in keys.items() if value != (own | config).get(name)})
    if missing != "{}" and target.model_type not in READS_ROPE:
        reason = f"mlx-lm reads no rope_parameters, and rotates {target.model_type} otherwise, without a word"
        instead = f"add the entries {missing} to {path}, which change nothing in transformers and vLLM"
        yield Refusal("target.path", "a target whose config.json has rope_theta", "one without", reason, instead, False)


ENGINE = Mlx()
