"""The table of engines, and the questions that the rest of mtptrain asks of all of them.

An engine's module is imported when it is first asked for.
"""

import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

from transformers import PreTrainedConfig

from mtptrain.engines.base import Engine, RunningEngine
from mtptrain.engines.format import Format
from mtptrain.engines.limits import Refusal
from mtptrain.settings.evaluation import ExportEngine
from mtptrain.settings.heads import HeadConfig
from mtptrain.utils.errors import UserError

ENGINES = {
    ExportEngine.vllm: "vllm.engine",
    ExportEngine.sglang: "sglang",
    ExportEngine.llama_cpp: "llama_cpp.engine",
    ExportEngine.tensorrt_llm: "tensorrt_llm",
    ExportEngine.openvino: "openvino.engine",
    ExportEngine.transformers: "transformers",
}
"""The module of each engine, in this package. Its `ENGINE` is the engine."""
ADVISED = (ExportEngine.vllm, ExportEngine.sglang, ExportEngine.llama_cpp, ExportEngine.openvino)
"""Engines that a refusal names instead of another."""


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
    return [key for key in ENGINES if head in engine_of(key).formats]


def has_format(head: str) -> bool:
    return any(head in engine_of(key).formats for key in ENGINES)


def format_for(engine: str, head: HeadConfig, target: PreTrainedConfig, target_gguf: Path | None = None) -> Format:
    """Returns the format of a head for an engine and a target, of which llama.cpp has a GGUF file."""
    if head.name not in engine_of(engine).formats:
        raise UserError(why_no_format(engine, head.name))
    check_servable(engine, head, target)
    form = engine_of(engine).formats[head.name].for_target(head, target)
    form.target_gguf = target_gguf
    form.check()
    return form


def why_no_format(engine: str, head: str) -> str:
    engines = engines_with(head)
    if not engines:
        exported = ", ".join(sorted({name for key in ENGINES for name in engine_of(key).formats}))
        return (
            f"head: must be one of {exported} to be exported, but is {head}, which no engine has a class for; measure "
            "it with mtptrain acceptance, or train another head"
        )
    return (
        f"export.engine: must be {' or '.join(engines)} for head {head}, but is {engine}, for which mtptrain does not "
        f"write it; set export.engine={engines[0]} if it serves this target (see docs/serving.md)"
    )


def first_refusal(engine: str, head: HeadConfig, target: PreTrainedConfig) -> Refusal | None:
    """Returns the first thing that an engine with a format for a head does not serve; None if it serves all."""
    return next(engine_of(engine).why_not(head, target), None)


def check_servable(engine: str, head: HeadConfig, target: PreTrainedConfig) -> None:
    """Raises UserError, with the reason and what to do, if an engine cannot serve a head with a target."""
    refusal = first_refusal(engine, head, target)
    if refusal is None:
        return
    others = [
        key
        for key in ADVISED
        if refusal.may_change_engine and head.name in engine_of(key).formats and not first_refusal(key, head, target)
    ]
    remedies = [f"set export.engine={' or '.join(others)}"] * bool(others) + [refusal.instead] * bool(refusal.instead)
    raise UserError(
        f"{refusal.setting}: must be {refusal.must_be} to export head {head.name} for {engine}, but is "
        f"{refusal.value}: {refusal.reason}; {', or '.join(remedies) or 'train another head'}"
    )


def warn_of_limits(engine: str, head: HeadConfig, target: PreTrainedConfig, target_gguf: Path | None = None) -> None:
    """Warn before a long computation that the head could not be exported for the engine afterwards."""
    try:
        format_for(engine, head, target, target_gguf)
    except UserError as error:
        warnings.warn(f"this head can be trained and measured, but not exported: {error}", stacklevel=2)
