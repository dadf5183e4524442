"""The table of engines, and the questions that the rest of mtptrain asks of all of them.

An engine's module is imported when it is first asked for.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.config import PipelineConfig
from mtptrain.engines.base import Engine, RunningEngine
from mtptrain.engines.format import Format
from mtptrain.engines.limits import Refusal
from mtptrain.settings.evaluation import ExportEngine, ServingConfig, ServingEngine
from mtptrain.settings.hardware import has_gpu
from mtptrain.settings.heads import HEAD_CONFIGS, DraftModelConfig, HeadConfig
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.gguf import gguf_of
from mtptrain.target.hub import config_dir
from mtptrain.utils.errors import UserError, warn

ENGINES = {
    ExportEngine.vllm: "vllm.engine",
    ExportEngine.sglang: "sglang",
    ExportEngine.llama_cpp: "llama_cpp.engine",
    ExportEngine.tensorrt_llm: "tensorrt_llm",
    ExportEngine.openvino: "openvino.engine",
    ExportEngine.mlx: "mlx.engine",
    ExportEngine.transformers: "transformers",
}
"""The module of each engine, in this package. Its `ENGINE` is the engine."""
ADVISED = (ExportEngine.vllm, ExportEngine.sglang, ExportEngine.llama_cpp, ExportEngine.openvino)
"""Engines that a refusal names instead of another."""

ANSWERING: dict[bool, list[ServingEngine]] = {True: [ServingEngine.vllm], False: []}
"""Engines that answer questions faster than our own loop, with and without a GPU: see docs/data.md."""


def choose_answering(target: TargetFiles, sampling: Mapping[str, Any], serving: ServingConfig) -> tuple[str, str]:
    """Returns the engine that `responses.engine=auto` stands for, and why.

    It is our own loop (`transformers`) if no engine is installed that answers as the target does.
    """
    reasons = list[str]()
    for key in ANSWERING[has_gpu()]:
        engine = running_engine(key)
        if not (why := engine.why_not_answers(target, sampling)):
            try:
                engine.find_program(serving.of(key))
            except UserError:
                why = f"it is not installed here, as responses.engine={key} says"
            else:
                return str(key), "; ".join(["which is installed and answers as the target is sampled", *reasons])
        reasons.append(f"not {key}: {why}")
    return str(ExportEngine.transformers), "; ".join(["our own loop", *reasons])


@cache
def engine_of(key: str) -> Engine:
    """Returns an engine by its value of `export.engine`."""
    engine = import_module(f"mtptrain.engines.{ENGINES[ExportEngine(key)]}").ENGINE
    assert isinstance(engine, Engine)
    return engine


def running_engine(key: str) -> RunningEngine:
    """Returns an engine that mtptrain starts or asks, by its value of `serving.engine`."""
    engine = engine_of(key)
    assert isinstance(engine, RunningEngine), "see ServingEngine"
    return engine


def engines_with(head: str) -> list[str]:
    """Returns the engines that a head can be exported for."""
    return [key for key in ENGINES if head in engine_of(key).formats]


def has_format(head: str) -> bool:
    """Returns whether a head can be exported for some engine."""
    return bool(engines_with(head))


def format_for(engine: str, head: HeadConfig, target: PreTrainedConfig, target_gguf: Path | None = None) -> Format:
    """Returns the format of a head for an engine and a target, of which llama.cpp has a GGUF file.

    Raises UserError, with the reason and what to do, if the engine cannot serve the head with the target.
    """
    if (refusal := first_refusal(engine, head, target)) is not None:
        raise UserError(
            f"{refusal.setting}: must be {refusal.must_be} to export head {head.name} for {engine}, but is "
            f"{refusal.value}: {refusal.reason}; {remedies(refusal, engine, head, target)}"
        )
    form = engine_of(engine).formats[head.name].for_target(head, target)
    form.target_gguf = target_gguf
    form.check()
    return form


def remedies(refusal: Refusal, engine: str, head: HeadConfig, target: PreTrainedConfig) -> str:
    """Returns what to do instead, with only those engines and heads that would not refuse this target in turn."""
    engines = [key for key in ADVISED if refusal.may_change_engine and first_refusal(key, head, target) is None]
    is_other = refusal.setting in ("target.path", "export.engine", "head")
    heads = _as_arguments(heads_served(engine, target)) if is_other else ""
    found = [f"set export.engine={' or '.join(engines)}"] * bool(engines)
    found += filter(None, [refusal.instead, heads and f"train {heads}"])
    if not engines and not heads and refusal.may_change_engine:
        served = {key: _as_arguments(heads_served(key, target)) for key in ADVISED}
        found += [f"train {names} for export.engine={key}" for key, names in served.items() if names]
    return ", or ".join(found) or "choose another target"


def first_refusal(engine: str, head: HeadConfig, target: PreTrainedConfig) -> Refusal | None:
    """Returns the first thing that an engine does not serve of a head and a target; None if it serves all."""
    engines = engines_with(head.name)
    if not engines:
        exported = ", ".join(sorted({name for key in ENGINES for name in engine_of(key).formats}))
        instead = "measure it with mtptrain acceptance"
        return Refusal("head", f"one of {exported}", head.name, "no engine has a class for it", instead)
    if engine not in engines:
        serving = [key for key in engines if first_refusal(key, head, target) is None]
        must_be = " or ".join(serving) or "an engine with a class for both"
        return Refusal("export.engine", must_be, engine, "mtptrain does not write this head for it")
    return next(engine_of(engine).why_not(head, target), None)


def heads_served(engine: str, target: PreTrainedConfig) -> dict[str, list[str]]:
    """Returns the heads that an engine serves with a target, each with the settings that must be false for it."""
    found = {}
    for name in engine_of(engine).formats.keys() - {DraftModelConfig.name}:  # which needs a model to start from
        head, switched_off = HEAD_CONFIGS[name](), list[str]()
        with suppress(UserError):  # such as captured layers that the target does not have
            while (refusal := first_refusal(engine, head, target)) is not None and refusal.must_be == "false":
                switched_off.append(refusal.setting.removeprefix("head."))
                setattr(head, switched_off[-1], False)
            if refusal is None:
                found[name] = switched_off
    return found


def _as_arguments(served: Mapping[str, Sequence[str]]) -> str:
    heads = [" ".join([name, *(f"head.{each}=false" for each in served[name])]) for name in sorted(served)]
    return f"head={' or '.join(heads)}" if heads else ""


def check_exportable(config: PipelineConfig) -> None:
    """Refuse a head that the engine of `export.engine` cannot serve with the target, before a whole run."""
    target = read_target_config(config_dir(config.target.path, config.target.revision))
    format_for(config.export.engine, config.head, target, gguf_of(config.target.path, config.target.gguf))


def warn_of_limits(engine: str, head: HeadConfig, target: PreTrainedConfig, target_gguf: Path | None = None) -> None:
    """Warn before a long computation that the head could not be exported for the engine afterwards."""
    try:
        format_for(engine, head, target, target_gguf)
    except UserError as error:
        warn(f"this head can be trained and measured, but not exported: {error}")
