"""Apple's MLX, which runs on Macs, and on CPUs of Linux for tests: what it serves, how it is started and counts.

mlx-lm decodes with a draft model, and mlx-vlm with heads that read captured layers, in an environment of their own
(`make .venv-mlx/.installed`). A worker asks both in Python: their servers take no token ids and report no rounds.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.base import Applied, RunningEngine, Served
from mtptrain.engines.limits import Refusal, must_be_false, no_anchor, why_not_captured, window_of
from mtptrain.engines.mlx.formats import MlxDflash, MlxDraftModel, MlxEagle3, rope_for_mlx_lm
from mtptrain.engines.process import find_python, run_worker, warn_of_version
from mtptrain.engines.requests import (
    EngineCounts,
    EngineRun,
    Load,
    LoadResult,
    Questions,
    Requests,
    accepted_within,
    load_result,
)
from mtptrain.heads.draft_model import model_config
from mtptrain.heads.layers import head_dims
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.settings.heads import CausalLayers, DflashConfig, DraftModelConfig, Eagle3Config, HeadConfig
from mtptrain.target.generation import GenerationDefaults
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_json

VERSION = "0.32.4 0.32.2 0.7.10"
"""Those of mlx, mlx-lm and mlx-vlm."""
PACKAGES = "mlx==0.32.4, mlx-lm==0.32.2 and mlx-vlm==0.7.10"
WORKER = Path(__file__).with_name("mlx_worker.py")
FIND_MLX = "from importlib.metadata import version; print(*map(version, ('mlx', 'mlx-lm', 'mlx-vlm')))"
RULE = (
    "In MLX, accepted drafts behind the end of an answer do not count, nor do ours; drafted tokens are not compared. "
    "The target writes the first token of an answer, which mlx-lm's own first round drafts."
)
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


class Mlx(RunningEngine):
    name = "MLX"
    version = "0.32.4"
    formats = {"draft_model": MlxDraftModel, "eagle3": MlxEagle3, "dflash": MlxDflash}  # noqa: RUF012
    applies = dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "eos_token_ids", "tokenizer_eos_token_id"), Applied.yes
    )
    """What mlx-vlm applies; mlx-lm applies the ends alone."""
    defaults = {"temperature": 0.0}  # noqa: RUF012
    advice = "export the head again"

    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        if isinstance(head, DraftModelConfig):
            for each in (("target.path", "target", target), ("head.init_from", "model", model_config(head, target))):
                yield from (*why_not_model(*each), *why_not_activation(*each))
            yield from why_not_rope(target)
            return
        if target.model_type != WITH_STREAMS:
            reason = "mlx-vlm's class of others returns no residual streams, or has not been compared with ours"
            yield Refusal("target.path", f"a {WITH_STREAMS}", f"a {target.model_type}", reason)
        yield from why_not_activation("target.path", "target", target)
        yield from why_not_captured(
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
            yield from no_anchor(self.name, head)
            if head.sliding_window is not None or head.causal != CausalLayers.none:
                value = f"sliding_window={head.sliding_window}, causal={head.causal}"
                reason = "blocks with windows or causal layers differed from ours in mlx-vlm"
                yield Refusal("head", "one without windows and causal layers", value, reason, "train without them")

    def find_program(self, serving: ServingConfig) -> Path:
        return find_python(serving.program, "mlx", self.name, PACKAGES, FIND_MLX)[0]

    def defaults_note(self, generation: GenerationDefaults) -> str:
        return ""  # the two packages differ: see the notes of their formats

    def check_bench(self, head_name: str, concurrency: int, temperature: float) -> None:
        if concurrency > 1:
            raise UserError(
                "serving_bench.concurrency: must be [1] in MLX, which decodes one request at a time with drafts, but "
                f"goes up to {concurrency}; set serving_bench.concurrency=[1]"
            )

    def generate(self, served: Served, num_drafts: int, asked: Sequence[Questions]) -> list[EngineRun]:
        version, results = run(served, "decode", num_drafts, asked=[each._asdict() for each in asked])
        return [
            EngineRun(
                version, each["tokens"], EngineCounts.of_rounds(each["accepted"], num_drafts), each["accepted"],
                each["chat_ids"],
            )
            for each in results
        ]  # fmt: skip

    def counted(self, generations: Sequence[Generation], num_drafts: int, asked: Questions) -> tuple[EngineCounts, str]:
        return EngineCounts.of_rounds(accepted_within(generations), num_drafts), RULE

    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        load_dicts = [asdict(load) for load in loads]
        version, results = run(served, "load", num_drafts, requests=asdict(requests), loads=load_dicts)
        return version, [load_result(each, each["accepted"], num_drafts) for each in results]


def why_not_model(setting: str, kind: str, model: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields why mlx-lm does not decode with a target, or a draft model: its caches must forget rejected drafts."""
    if model.model_type not in FAMILIES:
        reason = "others fail to load in mlx-lm, have other logits there, or have not been compared"
        yield Refusal(setting, f"a {kind} of one of {', '.join(FAMILIES)}", f"a {model.model_type}", reason)
    elif (value := window_of(model)) is not None:
        reason = "mlx-lm cannot take rejected drafts out of a window that is full, and says nothing"
        yield Refusal(setting, f"a {kind} without a sliding window", value, reason)


def why_not_activation(setting: str, kind: str, model: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields what the classes of MLX leave out without a word, or fail to load: they read neither of the two keys."""
    usual = getattr(type(model)(), "hidden_act", None)
    if getattr(model, "hidden_act", usual) != usual:
        reason = "MLX computes that in this family, whatever the config says"
        yield Refusal(setting, f"a {kind} with hidden_act={usual}", model.hidden_act, reason)
    if getattr(model, "attention_bias", False) and model.model_type != "llama":
        reason = "MLX's classes of other families do not load these biases"
        yield Refusal(setting, f"a {kind} with attention_bias=false, unless it is a Llama", "true", reason)


def why_not_rope(target: PreTrainedConfig) -> Iterator[Refusal]:
    """Yields the keys that mlx-lm misses in a target's config.json, where transformers 5 has rope_parameters alone.

    findings/mlx_lm_ignores_rope_parameters.sh shows it.
    """
    path = Path(target.name_or_path or "") / "config.json"
    config = read_json(path) if target.name_or_path and path.is_file() else {}
    keys = rope_for_mlx_lm(config.get("rope_parameters") or {})
    own = {"rope_theta": 1e4} if target.model_type in ("llama", "mistral") else {}
    missing = json.dumps({name: value for name, value in keys.items() if value != (own | config).get(name)})
    if missing != "{}" and target.model_type not in READS_ROPE:
        reason = f"mlx-lm reads no rope_parameters, and rotates {target.model_type} otherwise, without a word"
        instead = f"add the entries {missing} to {path}, which change nothing in transformers and vLLM"
        yield Refusal("target.path", "a target whose config.json has rope_theta", "one without", reason, instead, False)


def run(served: Served, mode: str, num_drafts: int, **more: Any) -> tuple[str, list[dict[str, Any]]]:
    """Returns the versions of the packages and the worker's results, and warns of a version that was not tested."""
    job = {
        "target": str(served.target.directory),
        "head": str(served.head_dir),
        "method": served.facts["method"],
        "dtype": served.dtype,
        "num_speculative_tokens": num_drafts,
    }
    result = run_worker(served.program, WORKER, mode, job | more, ENGINE.name)
    if result["version"] != VERSION:
        warn_of_version(PACKAGES, VERSION, result["version"], f"serving.program={served.program}")
    return result["version"], result["results"]


ENGINE = Mlx()
