"""All export formats, by engine and head."""

from transformers import PreTrainedConfig

from mtptrain.convert.base import Format
from mtptrain.convert.limits import check_served
from mtptrain.convert.sglang import SglangEagle, SglangEagle3, SglangMtp
from mtptrain.convert.transformers import TransformersMtp
from mtptrain.convert.vllm import VllmDraftModel, VllmEagle, VllmEagle3, VllmMtp, VllmPeagle
from mtptrain.heads.config import HeadConfig

FORMATS: dict[tuple[str, str], type[Format]] = {
    ("vllm", "mtp"): VllmMtp,
    ("vllm", "eagle"): VllmEagle,
    ("vllm", "eagle3"): VllmEagle3,
    ("vllm", "peagle"): VllmPeagle,
    ("vllm", "draft_model"): VllmDraftModel,
    ("sglang", "mtp"): SglangMtp,
    ("sglang", "eagle"): SglangEagle,
    ("sglang", "eagle3"): SglangEagle3,
    ("transformers", "mtp"): TransformersMtp,
}


def format_for(engine: str, head: HeadConfig, target: PreTrainedConfig) -> Format:
    """Returns the format of a head for an engine and a target.

    Raises:
        ValueError: the engine does not serve the head; the message gives the reason and an alternative.
    """
    if (engine, head.name) not in FORMATS:
        engines = [served for served, name in FORMATS if name == head.name]
        raise ValueError(
            f"export.engine: must be {' or '.join(engines)} for head {head.name}, but is {engine}, which has no class "
            f"for it; set export.engine={engines[0]}"
        )
    check_served(engine, head, target)
    return FORMATS[engine, head.name](head, target)
