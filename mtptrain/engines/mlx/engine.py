"""Apple's MLX, which runs on Macs, and on CPUs of Linux for tests: what it serves, how it is started and counts.

mlx-lm decodes with a draft model, and mlx-vlm with heads that read captured layers, in an environment of their own
(`make .venv-mlx/.installed`).
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mtptrain.engines import limits
from mtptrain.engines.base import Applied, WorkerEngine
from mtptrain.engines.format import Format
from mtptrain.engines.limits import Refusal, models_of, must_be_false
from mtptrain.engines.mlx.formats import MlxDflash, MlxDraftModel, MlxEagle3, keys_for_mlx_lm
from mtptrain.engines.process import run_worker
from mtptrain.heads.layers import head_dims
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.settings.heads import CausalLayers, DflashConfig, DraftModelConfig, Eagle3Config, HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import GenerationDefaults, as_ids
from mtptrain.target.loading import without_transformers_bar
from mtptrain.utils.errors import UserError, warn
from mtptrain.utils.files import read_json

FAMILIES = (
    *("deepseek_v3", "dots1", "ernie4_5", "glm4", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama"),
    *("ministral3", "mistral", "mixtral", "nemotron", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "seed_oss", "smollm3", "stablelm"),
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
                yield from limits.why_not_keys(self.name, *each, with_biases=FAMILIES)
            yield from why_not_saved(target)
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

    def compare(self, directory: Path, form: Format, target: TargetFiles, serving: ServingConfig) -> None:
        is_quantised = getattr(target.config, "quantization_config", None) is not None
        if is_quantised:
            warn(f"{target.directory} was not compared with MLX, because it is quantised: run mtptrain serving-check")
        if not isinstance(form, MlxDraftModel):
            return
        try:
            python = self.find_program(serving.of("mlx"))
        except UserError as error:
            warn(f"the export was not compared with mlx-lm, as mtptrain serving-check does: {error}")
            return
        self.compare_model(python, directory, form.model_config, form.model_config.num_hidden_layers)
        if not is_quantised:
            # A layer of each kind: the first ones of some families have no experts.
            num_layers = 2 + getattr(target.config, "first_k_dense_replace", 0)
            self.compare_model(python, target.directory, target.config, num_layers)

    def compare_model(self, python: Path, directory: Path, config: PreTrainedConfig, num_layers: int) -> None:
        """Raises UserError if mlx-lm computes the first layers of a model otherwise than transformers."""
        whole, total = config.to_dict(), config.num_hidden_layers
        by_layer = {key: each for key, each in whole.items() if isinstance(each, list) and len(each) == total}
        changes: dict[str, Any] = {"num_hidden_layers": num_layers} if num_layers < total else {}
        changes |= {key: each[:num_layers] for key, each in by_layer.items() if changes}
        few = type(config).from_dict(whole | changes)
        logging.disable(logging.WARNING)  # transformers would list the tensors of the other layers
        with without_transformers_bar():
            model = AutoModelForCausalLM.from_pretrained(directory, config=few, dtype=torch.float32)
        logging.disable(logging.NOTSET)
        ids = torch.arange(min(256, config.max_position_embeddings)) * 37 % config.vocab_size
        with torch.no_grad():
            ours = model(ids[None]).logits[0, -16:][:, ids]
        job = {"model": str(directory), "ids": ids.tolist(), "changes": changes}
        apart = (torch.tensor(run_worker(python, self.worker, "logits", job, self.name)) - ours).abs()
        # A median, because rounding may choose other experts for a token. By rounding it is about 1e-6.
        if not (share := float(apart.median() / ours.std())) < 1e-3:
            raise UserError(
                f"export.engine: mlx-lm must have the logits of transformers for the model in {directory}, but they "
                f"differ by {share:.2g} of their standard deviation; set another export.engine, or use another model"
            )

    def ends_of(self, target: TargetFiles) -> list[int]:
        """Returns the ends of config.json where generation_config.json names none, as both packages do."""
        own = target.own_generation.eos_token_ids or as_ids(own_config(target.config)[1].get("eos_token_id"))
        return [*dict.fromkeys((*own, *as_ids(target.tokenizer.eos_token_id)))]

    def defaults_note(self, generation: GenerationDefaults) -> str:
        return ""  # the two packages differ: see the notes of their formats


def own_config(target: PreTrainedConfig) -> tuple[Path, dict[str, Any]]:
    """Returns the path and the contents of a target's config.json; nothing of a target without a folder."""
    path = Path(target.name_or_path or "") / "config.json"
    config = read_json(path) if target.name_or_path and path.is_file() else {}
    return path, config | config.get("text_config", {})


def why_not_qwen(target: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields what mlx-vlm's class of Qwen3.5 makes of a target's config.json, unlike transformers."""
    path, config = own_config(target)
    rope, interval = (config or target.to_dict()).get("rope_parameters") or {}, config.get("full_attention_interval", 4)
    kind, needed = rope.get("rope_type", rope.get("type")), ("mrope_section", "rope_theta", "partial_rotary_factor")
    is_full = [(layer + 1) % interval == 0 for layer in range(target.num_hidden_layers)]
    is_same = [each == "full_attention" for each in target.layer_types] == is_full
    for fits, must_have, value, reason in (
        (kind == "default", "rope_parameters of type default", kind, "has plain RoPE alone, and would not scale it"),
        (rope.keys() >= set(needed), " and ".join(needed), [*rope], "does not load it without these rope_parameters"),
        (not all(is_full), "full_attention_interval above 1", interval, "fails without a layer of linear attention"),
        (is_same, "the full_attention_interval of its layer_types", interval, "reads only the first of these"),
    ):
        if not fits:
            must_be, instead = f"a target with {must_have}", f"correct {path} if it is wrong"
            yield Refusal("target.path", must_be, value, f"mlx-vlm {reason}", instead)


def why_not_saved(target: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields the keys that mlx-lm misses in the config.json of a target, as transformers 5 saves it.

    findings/mlx_lm_ignores_rope_parameters.sh shows it.
    """
    path, config = own_config(target)
    if "text_config" in config:
        reason = "mlx-lm reads other keys of a target with text_config, and none was compared with ours"
        yield Refusal(
            "target.path", "a target that reads text alone", f"a {target.model_type} with text_config", reason
        )
    keys = keys_for_mlx_lm(config)
    own = {"rope_theta": 1e4} if target.model_type in ("llama", "mistral") else {}
    missing = {name: value for name, value in keys.items() if value != (own | config).get(name)}
    if missing and target.model_type not in READS_ROPE:
        reason = f"mlx-lm reads these in a {target.model_type}, and without them fails, or rotates otherwise, unsaid"
        instead = f"add the entries {json.dumps(missing)} to {path}, which change nothing in transformers and vLLM"
        must_be = f"a target whose config.json has {' and '.join(missing)}"
        yield Refusal("target.path", must_be, "one without", reason, instead, may_change_engine=False)


ENGINE = Mlx()
