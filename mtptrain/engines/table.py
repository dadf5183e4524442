"""All export formats, by engine and head. For MiMo targets, `VllmMimo` replaces `VllmMtp`."""

import warnings
from pathlib import Path

from transformers import PreTrainedConfig

from mtptrain.engines.format import Format
from mtptrain.engines.limits import check_servable, is_mimo
from mtptrain.engines.llama_cpp.formats import (
    LlamaCppDflash,
    LlamaCppDflash2,
    LlamaCppDraftModel,
    LlamaCppDspark,
    LlamaCppEagle3,
)
from mtptrain.engines.mimo import VllmMimo
from mtptrain.engines.openvino.formats import OpenvinoDflash, OpenvinoDraftModel, OpenvinoEagle3
from mtptrain.engines.sglang import SglangDflash, SglangDflash2, SglangDspark, SglangEagle, SglangEagle3, SglangMtp
from mtptrain.engines.tensorrt_llm import TensorRtDraftModel, TensorRtEagle3
from mtptrain.engines.transformers import TransformersMtp
from mtptrain.engines.vllm.formats import (
    VllmDflash,
    VllmDflash2,
    VllmDraftModel,
    VllmDspark,
    VllmEagle,
    VllmEagle3,
    VllmMedusa,
    VllmMtp,
    VllmPeagle,
)
from mtptrain.engines.vllm.native_mtp import VllmNativeMtp
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.gguf import require_same_sizes
from mtptrain.utils.errors import UserError

FORMATS: dict[tuple[str, str], type[Format]] = {
    ("vllm", "mtp"): VllmMtp,
    ("vllm", "native_mtp"): VllmNativeMtp,
    ("vllm", "eagle"): VllmEagle,
    ("vllm", "eagle3"): VllmEagle3,
    ("vllm", "peagle"): VllmPeagle,
    ("vllm", "medusa"): VllmMedusa,
    ("vllm", "dflash"): VllmDflash,
    ("vllm", "dspark"): VllmDspark,
    ("vllm", "dflash2"): VllmDflash2,
    ("vllm", "draft_model"): VllmDraftModel,
    ("sglang", "mtp"): SglangMtp,
    ("sglang", "eagle"): SglangEagle,
    ("sglang", "eagle3"): SglangEagle3,
    ("sglang", "dflash"): SglangDflash,
    ("sglang", "dspark"): SglangDspark,
    ("sglang", "dflash2"): SglangDflash2,
    ("llama_cpp", "eagle3"): LlamaCppEagle3,
    ("llama_cpp", "dflash"): LlamaCppDflash,
    ("llama_cpp", "dspark"): LlamaCppDspark,
    ("llama_cpp", "dflash2"): LlamaCppDflash2,
    ("llama_cpp", "draft_model"): LlamaCppDraftModel,
    ("tensorrt_llm", "eagle3"): TensorRtEagle3,
    ("tensorrt_llm", "draft_model"): TensorRtDraftModel,
    ("openvino", "eagle3"): OpenvinoEagle3,
    ("openvino", "dflash"): OpenvinoDflash,
    ("openvino", "draft_model"): OpenvinoDraftModel,
    ("transformers", "mtp"): TransformersMtp,
}


def has_format(head: str) -> bool:
    """Returns whether a head can be exported for some engine."""
    return any(name == head for _, name in FORMATS)


def format_for(engine: str, head: HeadConfig, target: PreTrainedConfig, target_gguf: Path | None = None) -> Format:
    """Returns the format of a head for an engine and a target, of which llama.cpp has a GGUF file.

    Raises:
        UserError: the engine cannot serve the head; the message gives the reason and an alternative. Or the format
            needs the target's GGUF file, which is left out, missing, damaged, or that of another model.
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
            f"export.engine: must be {' or '.join(engines)} for head {head.name}, but is {engine}, for which "
            f"mtptrain does not write it; set export.engine={engines[0]} if it serves this target (see docs/serving.md)"
        )
    check_servable(engine, head, target)
    if (engine, head.name) == ("vllm", "mtp") and is_mimo(target):
        return VllmMimo(head, target)
    form = FORMATS[engine, head.name](head, target)
    form.target_gguf = target_gguf
    if form.needs_gguf:
        if target_gguf is None:
            raise UserError(
                f"target.gguf: must be the target's GGUF file to export head {head.name} for llama_cpp, which needs "
                "its tokenizer, but is left out; convert the target with llama.cpp's convert_hf_to_gguf.py and set "
                "target.gguf=FILE"
            )
        require_same_sizes(target_gguf, target)
    return form


def warn_of_limits(engine: str, head: HeadConfig, target: PreTrainedConfig, target_gguf: Path | None = None) -> None:
    """Warn before a long computation that the head could not be exported for the engine afterwards."""
    try:
        format_for(engine, head, target, target_gguf)
    except UserError as error:
        warnings.warn(f"this head can be trained and measured, but not exported: {error}", stacklevel=2)
