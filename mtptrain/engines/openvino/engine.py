"""OpenVINO GenAI: what it serves and needs, how it is started, and how it counts.

OpenVINO's converter needs other versions of transformers than training does. It therefore has an environment of its own
(`make .venv-openvino/.installed`), in which a worker decodes: OpenVINO has no server.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.base import Applied, RunningEngine, Served
from mtptrain.engines.limits import Refusal, must_be_false, no_anchor, why_not_captured, window_of
from mtptrain.engines.openvino.formats import OpenvinoDflash, OpenvinoDraftModel, OpenvinoEagle3
from mtptrain.engines.process import EngineCrashed, find_python, run_worker, warn_of_version
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
from mtptrain.heads.dflash import layer_kinds
from mtptrain.heads.draft_model import model_config
from mtptrain.settings.evaluation import OpenvinoWeights, ServingConfig
from mtptrain.settings.heads import DflashConfig, DraftModelConfig, Eagle3Config, HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import FILE, NEUTRAL, PENALTIES
from mtptrain.utils.errors import UserError, warn
from mtptrain.utils.files import read_json

VERSION = "2026.4.1"
WORKER = Path(__file__).with_name("openvino_worker.py")
FIND_OPENVINO = "from importlib.metadata import version; print(version('openvino-genai'))"
RULE = (
    "OpenVINO reports the tokens of each round and neither the drafted ones nor those past the end of an answer: in "
    "each round, ours are counted as its tokens without the last one, and drafted tokens are not compared."
)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose counters in OpenVINO GenAI were compared with ours. It finds no residual streams among the operations
of a layer with experts."""


class Openvino(RunningEngine):
    name = "OpenVINO"
    package = "openvino_genai"
    version = VERSION
    formats = {  # noqa: RUF012 (never changed)
        "eagle3": OpenvinoEagle3,
        "dflash": OpenvinoDflash,
        "draft_model": OpenvinoDraftModel,
    }
    applies = {  # noqa: RUF012 (never changed)
        **dict.fromkeys((*NEUTRAL, "do_sample", "max_new_tokens", "max_length"), Applied.without_drafts),
        **{"min_new_tokens": Applied.without_drafts, "eos_token_ids": Applied.yes},
    }
    defaults = {"temperature": 0.0}  # noqa: RUF012
    has_server = False
    advice = "export the head again"

    def why_not(self, head: HeadConfig, target: PreTrainedConfig) -> Iterator[Refusal]:
        if not isinstance(head, DraftModelConfig):
            at_last = "optimum takes the state after the final norm for the stream after the last layer"
            yield from why_not_captured(
                *(self.name, head, target),
                has_embeddings=False,
                at_last=at_last if isinstance(head, DflashConfig) else "",
                has_three=True,
                has_own_lm_head=False,
            )
        yield from no_anchor(self.name, head)
        if isinstance(head, DflashConfig) and any(kind.is_causal for kind in layer_kinds(head)):
            reason = "in OpenVINO's class a token always sees its whole block"
            yield Refusal("head.causal", "none", str(head.causal), reason, "train without it")
        models = [("target.path", "target", target)]
        if isinstance(head, DraftModelConfig):
            models.append(("head.init_from", "model", model_config(head, target)))
        for setting, kind, model in models:
            if model.model_type not in FAMILIES:
                reason = "in OpenVINO no other family has been compared with ours"
                yield Refusal(setting, f"one of {', '.join(FAMILIES)}", f"a {model.model_type}", reason)
            if (value := window_of(model)) is not None:
                reason = "its window in OpenVINO has not been compared with ours"
                yield Refusal(setting, f"a {kind} without a sliding window", value, reason)
        if isinstance(head, Eagle3Config):
            for setting in ("norm_before_fc", "norm_before_residual", "fc_norm", "norm_output"):
                reason = "optimum's class of EAGLE-3 heads does not have it, and would leave it out without an error"
                yield from must_be_false(head, setting, reason)

    def notes(self, target: TargetFiles) -> list[str]:
        path = target.directory / FILE
        own = {name: value or 0 for name, value in (read_json(path) if path.is_file() else {}).items()}
        samples, beams, most = (
            own.get("do_sample"),
            own.get("num_beams", 0) not in (0, 1),
            own.get("max_new_tokens") or math.inf,
        )
        has_penalty = any(name in target.own_generation.sampling for name in PENALTIES)
        fails = {
            # Both are there if transformers 4 saved all its defaults.
            "num_assistant_tokens beside assistant_confidence_threshold": own.get("num_assistant_tokens")
            and own.get("assistant_confidence_threshold"),
            "do_sample with temperature 0": samples and own.get("temperature") == 0,
            "num_beams with do_sample or a penalty": beams and (samples or has_penalty),
            "min_new_tokens above max_new_tokens": own.get("min_new_tokens", 0) > most,
        }
        named = "; ".join(setting for setting, holds in fails.items() if holds)
        note = f"Without drafts, {self.name} {self.version} refuses every request, for {named} in the target's {FILE}."
        return super().notes(target) + [note] * bool(named)

    def find_program(self, serving: ServingConfig) -> Path:
        packages = f"openvino-genai=={VERSION}.* and optimum-intel"
        return find_python(serving.program, "openvino", "OpenVINO GenAI", packages, FIND_OPENVINO)[0]

    def check_bench(self, head_name: str, concurrency: int, temperature: float) -> None:
        """Refuse what OpenVINO cannot do: sample with drafts, or decode several requests at a time with `dflash`."""
        if temperature > 0:
            raise UserError(
                "acceptance.temperature: must be 0 in OpenVINO 2026.4, which with a draft samples other texts than "
                f"without (with an EAGLE-3 head, garbage), but is {temperature:g}; leave it out, or set another "
                "serving.engine"
            )
        if head_name == "dflash" and concurrency > 1:
            raise UserError(
                "serving_bench.concurrency: must be [1] with head dflash in OpenVINO, which decodes one request at a "
                f"time with it, but goes up to {concurrency}; set serving_bench.concurrency=[1]"
            )

    def report_types(self, target: TargetFiles, serving: ServingConfig, dtype: str) -> dict[str, str | None]:
        return {"dtype": None, "openvino_weights": str(serving.openvino_weights)}

    def may_round(self, served: Served) -> bool:
        return served.serving.openvino_weights is not OpenvinoWeights.fp32

    def generate(self, served: Served, num_drafts: int, asked: Sequence[Questions]) -> list[EngineRun]:
        with tempfile.TemporaryDirectory(prefix="mtptrain-openvino-") as directory:
            job = job_of(served, num_drafts, Path(directory))
            return [decode(served.program, job | each._asdict()) for each in asked]

    def counted(self, generations: Sequence[Generation], num_drafts: int, asked: Questions) -> tuple[EngineCounts, str]:
        return EngineCounts.of_rounds(accepted_within(generations, num_last=1), num_drafts), RULE

    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        """Decode in one process, which keeps the converted models for the next K in `scratch_dir`."""
        job = job_of(served, num_drafts, scratch_dir)
        job |= {"requests": asdict(requests), "loads": [asdict(load) for load in loads]}
        result = run(served.program, "load", job)
        results = [load_result(each, accepted_of(each["tokens_of_steps"]), num_drafts) for each in result["results"]]
        return result["version"], results


def job_of(served: Served, num_drafts: int, directory: Path) -> dict[str, Any]:
    """Returns what all jobs of the worker have. It converts into `directory` what is not there yet."""
    return {
        "target": str(served.target.directory),
        "head": str(served.head_dir),
        "converted_target": str(directory / "target"),
        "converted_head": str(directory / "head"),
        "weights": str(served.serving.openvino_weights),
        "num_speculative_tokens": num_drafts,
    }


def run(python: Path, mode: str, job: dict[str, Any]) -> dict[str, Any]:
    """Returns the worker's result for a job, and warns of a version that was not tested.

    If OpenVINO crashes, it is started once more: 2026.4 seldom but at random damages its own memory and ends.
    Source: github.com/openvinotoolkit/openvino.genai/issues/4425.
    """
    try:
        result: dict[str, Any] = run_worker(python, WORKER, mode, job, ENGINE.name)
    except EngineCrashed as crash:
        warn(f"OpenVINO crashed, and is started once more: {crash}")
        result = run_worker(python, WORKER, mode, job, ENGINE.name)
    if result["version"].rsplit(".", 1)[0] != VERSION:
        warn_of_version("OpenVINO GenAI", VERSION, result["version"], f"serving.program={python}")
    return result


def decode(python: Path, job: dict[str, Any]) -> EngineRun:
    result = run(python, "decode", job)
    accepted = accepted_of(result["steps"])
    counts = EngineCounts.of_rounds(accepted, job["num_speculative_tokens"])
    return EngineRun(result["version"], result["tokens"], counts, accepted)


def accepted_of(steps: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the number of accepted drafts in each round of each answer, from the number of tokens of each step.

    The first step reads the prompt. In every other one, the last token is the target's own.
    """
    return [[num_tokens - 1 for num_tokens in of_answer[1:]] for of_answer in steps]


ENGINE = Openvino()
