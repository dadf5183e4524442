"""All export formats, by engine and head. For MiMo targets, `VllmMimo` replaces `VllmMtp`."""

import warnings

from transformers import PreTrainedConfig

from mtptrain.convert.base import Format
from mtptrain.convert.limits import check_servable
from mtptrain.convert.mimo import VllmMimo
from mtptrain.convert.native_mtp import VllmNativeMtp
from mtptrain.convert.sglang import SglangEagle, SglangEagle3, SglangMtp
from mtptrain.convert.transformers import TransformersMtp
from mtptrain.convert.vllm import (
    VllmDflash,
    VllmDraftModel,
    VllmEagle,
    VllmEagle3,
    VllmMedusa,
    VllmMtp,
    VllmPeagle,
)
from mtptrain.heads.config import HeadConfig
from mtptrain.target.mimo import MiMoConfig
from mtptrain.utils.errors import UserError

FORMATS: dict[tuple[str, str], type[Format]] = {
    ("vllm", "mtp"): VllmMtp,
    ("vllm", "native_mtp"): VllmNativeMtp,
    ("vllm", "eagle"): VllmEagle,
    ("vllm", "eagle3"): VllmEagle3,
    ("vllm", "peagle"): VllmPeagle,
    ("vllm", "medusa"): VllmMedusa,
    ("vllm", "dflash"): VllmDflash,
    ("vllm", "draft_model"): VllmDraftModel,
    ("sglang", "mtp"): SglangMtp,
    ("sglang", "eagle"): SglangEagle,
    ("sglang", "eagle3"): SglangEagle3,
    ("transformers", "mtp"): TransformersMtp,
}


def format_for(engine: str, head: HeadConfig, target: PreTrainedConfig) -> Format:
    """Returns the format of a head for an engine and a target.

    Raises:
        UserError: the engine cannot serve the head; the message gives the reason and an alternative.
    """
    if (engine, head.name) not in FORMATS:
        engines = [served for served, name in FORMATS if name == head.name]
        if not engines:
            exported = ", ".join(sorted({name for _, name in FORMATS}))
            raise UserError(
                f"head: must be one of {exported} to be exported, but is {head.name}, which no engine has a class for; "
                "measure it with mtptrain acceptance, or train another head"
            )
        raise UserError(
            f"export.engine: must be {' or '.join(engines)} for head {head.name}, but is {engine}, which has no class "
            f"for it; set export.engine={engines[0]} if it serves this target (see docs/serving.md)"
        )
    check_servable(engine, head, target)
    if (engine, head.name, target.model_type) == ("vllm", "mtp", MiMoConfig.model_type):
        return VllmMimo(head, target)
    return FORMATS[engine, head.name](head, target)


def warn_of_limits(engine: str, head: HeadConfig, target: PreTrainedConfig) -> None:
    """Warn before a long computation that the head could not be exported for the engine afterwards."""
    try:
        format_for(engine, head, target)
    except UserError as error:
        warnings.warn(f"this head can be trained and measured, but not exported: {error}", stacklevel=2)
