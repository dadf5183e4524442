"""OpenVINO GenAI: what it serves and needs, how it is started, and how it counts.

OpenVINO's converter needs other versions of transformers than training does. It therefore has an environment of its own
(`make .venv-openvino/.installed`), in which a worker decodes: OpenVINO has no server. 2026.4 seldom but at random
damages its own memory and ends: github.com/openvinotoolkit/openvino.genai/issues/4425.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.engines.base import Applied, Served, WorkerEngine
from mtptrain.engines.limits import Refusal, models_of, must_be_false, no_anchor, why_not_captured, why_not_family
from mtptrain.engines.openvino.formats import OpenvinoDflash, OpenvinoDraftModel, OpenvinoEagle3
from mtptrain.heads.dflash import layer_kinds
from mtptrain.settings.evaluation import OpenvinoWeights, ServingConfig
from mtptrain.settings.heads import DflashConfig, DraftModelConfig, Eagle3Config, HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import FILE, NEUTRAL, PENALTIES
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_json

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose counters in OpenVINO GenAI were compared with ours. It finds no residual streams among the operations
of a layer with experts."""


class Openvino(WorkerEngine):
    name = "OpenVINO"
    package = "openvino_genai"
    packages = MappingProxyType({"openvino-genai": "2026.4.1.0", "optimum-intel": "2.2.0"})
    version = "2026.4.1"
    worker = Path(__file__).with_name("openvino_worker.py")
    formats = {"eagle3": OpenvinoEagle3, "dflash": OpenvinoDflash, "draft_model": OpenvinoDraftModel}  # noqa: RUF012
    applies = {  # noqa: RUF012 (never changed)
        **dict.fromkeys((*NEUTRAL, "do_sample", "max_new_tokens", "max_length"), Applied.without_drafts),
        **dict.fromkeys(("min_new_tokens", "num_beams"), Applied.without_drafts),
        **{"eos_token_ids": Applied.yes, "tokenizer_eos_token_id": Applied.if_silent},
    }
    defaults = {"temperature": 0.0}  # noqa: RUF012
    has_server = False
    num_last = 1
    one_at_a_time = ("dflash",)
    rule = (
        "OpenVINO reports the tokens of each round and neither the drafted ones nor those past the end of an answer: "
        "in each round, ours are counted as its tokens without the last one, and drafted tokens are not compared."
    )

    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        if not isinstance(head, DraftModelConfig):
            at_last = "optimum takes the state after the final norm for the stream after the last layer"
            at_last = at_last if isinstance(head, DflashConfig) else ""
            yield from why_not_captured(
                self.name, head, target, has_embeddings=False, at_last=at_last, has_three=True, has_own_lm_head=False
            )
        yield from no_anchor(self.name, head)
        if isinstance(head, DflashConfig) and any(kind.is_causal for kind in layer_kinds(head)):
            reason = "in OpenVINO's class a token always sees its whole block"
            yield Refusal("head.causal", "none", str(head.causal), reason, "train without it")
        reason = "in OpenVINO no other family, and no window, has been compared with ours"
        for each in models_of(head, target):
            yield from why_not_family(*each, FAMILIES, reason, reason)
        if isinstance(head, Eagle3Config):
            reason = "optimum's class of EAGLE-3 heads does not have it, and would leave it out without an error"
            for setting in ("norm_before_fc", "norm_before_residual", "fc_norm", "norm_output"):
                yield from must_be_false(head, setting, reason)

    def notes(self, target: TargetFiles) -> list[str]:
        path = target.directory / FILE
        own = {name: value or 0 for name, value in (read_json(path) if path.is_file() else {}).items()}
        samples, beams, most = own.get("do_sample"), own.get("num_beams", 0) > 1, own.get("max_new_tokens") or math.inf
        groups, diversity = own.get("num_beam_groups", 1) or 1, own.get("diversity_penalty", 0)
        has_penalty = any(name in target.own_generation.sampling for name in PENALTIES)
        fails = {
            # Both are there if transformers 4 saved all its defaults.
            "num_assistant_tokens beside assistant_confidence_threshold": own.get("num_assistant_tokens")
            and own.get("assistant_confidence_threshold"),
            "do_sample with temperature 0": samples and own.get("temperature") == 0,
            "num_beams with do_sample or a penalty": beams and (samples or has_penalty),
            "num_beams with such num_beam_groups and diversity_penalty": beams
            and (own["num_beams"] % groups or (groups > 1) != (diversity != 0)),
            "min_new_tokens above max_new_tokens": own.get("min_new_tokens", 0) > most,
        }
        named = "; ".join(setting for setting, holds in fails.items() if holds)
        note = f"Without drafts, {self.name} {self.version} refuses every request, for {named} in the target's {FILE}."
        longest = own.get("max_length")
        too_long = f"Without drafts, a prompt of {longest} tokens or more, the max_length, is an error."
        own_program = (
            f"{self.name} {self.version} makes prompts of chats by a program of its own, which fails for some chat "
            "templates (GLM-4.6's, and all with `is undefined`) and makes other text of others (tools in SmolLM3's): "
            "render chats by transformers, and send token ids; to a text it adds the tokenizer's BOS, also beside one "
            "that the template wrote, and with apply_chat_template=False."
        )
        has_template = bool(target.tokenizer.chat_template)
        notes = super().notes(target) + [note] * bool(named) + [too_long] * (longest is not None)
        return notes + [own_program] * has_template

    def check_bench(self, head_name: str, concurrency: int, temperature: float) -> None:
        if temperature > 0:
            raise UserError(
                "acceptance.temperature: must be 0 in OpenVINO 2026.4, which with a draft samples other texts than "
                f"without (with an EAGLE-3 head, garbage), but is {temperature:g}; leave it out, or set another "
                "serving.engine"
            )
        super().check_bench(head_name, concurrency, temperature)

    def report_types(self, target: TargetFiles, serving: ServingConfig, dtype: str) -> dict[str, str | None]:
        return {"dtype": None, "openvino_weights": str(serving.openvino_weights)}

    def may_round(self, served: Served) -> bool:
        return served.serving.openvino_weights is not OpenvinoWeights.fp32

    def job(self, served: Served, num_drafts: int, scratch_dir: Path) -> dict[str, Any]:
        """Returns a job that keeps the converted models in `scratch_dir`, for the next K of a benchmark."""
        return super().job(served, num_drafts, scratch_dir) | {
            "converted_target": str(scratch_dir / "target"),
            "converted_head": str(scratch_dir / "head"),
            "weights": str(served.serving.openvino_weights),
        }


ENGINE = Openvino()
