"""Finds out which head a directory or hub repository holds, and reads it.

It must have safetensors files and `head.json`, as one of our heads has, or a config.json. A head of others is
recognised by the class in it (`CLASSES`), or by its tensors: those of an MTP layer behind a model's layers, of a plain
Llama with an fc, or of FasterDecoding's Medusa. Like our heads, all apply RoPE to halves rather than interleaved pairs,
so projections need no conversion.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedConfig

from mtptrain.engines.exports import refuse_changed_export
from mtptrain.heads import HEADS
from mtptrain.heads.base import Tensors
from mtptrain.heads.dflash import layer_types
from mtptrain.heads.files import checked_weights, stored_config
from mtptrain.heads.layers import head_dims
from mtptrain.init_from.config_json import KINDS, ConfigJson, read_config, rope_of_head
from mtptrain.init_from.readers import DSPARK_CLASSES, FASTER_DECODING, READERS, Settings, renamed
from mtptrain.settings.heads import DflashConfig, HeadConfig, LayerConfig, MlpConfig, PeagleConfig, mask_token_id
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import MASK_EMBEDDING, resolve_target, weight_files
from mtptrain.target.mimo import ARCHITECTURE as MIMO
from mtptrain.target.mimo import MTP_LAYERS
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import tensor_shapes

MTP_LAYER = re.compile(r"^(model\.(?:layers|mtp_layers)\.\d+\.)(eh_proj|input_proj)\.weight$")
"""The input projection of an MTP layer, in DeepSeek's layout or in MiMo's."""
FOREIGN_PARTS = re.compile(r"^mtp\.|\.experts\.|\bself_attn\.kv_")
"""Names of tensors of MTP layers that are no Llama layers: Qwen3-Next's, mixtures of experts, latent attention."""
CLASSES = {
    "EagleDeepSeekMTPModel": "mtp",
    **dict.fromkeys(("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"), "eagle"),
    **dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"), "eagle3"),
    "MedusaModel": "medusa",
    **dict.fromkeys(("DFlashDraftModel", "Qwen3DFlashDraftModel"), "dflash"),
    **dict.fromkeys(DSPARK_CLASSES, "dspark"),
    **dict.fromkeys(("DFlash2DraftModel", "Qwen3DFlash2DraftModel"), "dflash2"),
}
"""The head of each model class that config.json may name, with those of NeMo Automodel."""
IGNORED_SETTINGS = ("name", "ttt_steps", "init_from", "ignored_keys", "start_from_target", "anchors_per_document")
"""Settings that need not match a head's weights, or that are compared separately."""


@dataclass(frozen=True)
class Published:
    """A head as a directory holds it, under our names."""

    directory: Path
    name: str
    """The head's name in `HEADS`."""
    settings: Settings
    tensors: Tensors


def read_published(path: str, target: TargetFiles, ignored_keys: Sequence[str] = ()) -> Published:
    """Returns the head in a directory or hub repository. Its format is recognised from its files."""
    directory = resolve_init(path)
    if (directory / "head.json").is_file():
        own = stored_config(directory)
        settings = {name: [value] for name, value in effective_settings(own, target.config).items()}
        return Published(directory, own.name, settings, read_tensors([checked_weights(directory)]))
    refuse_changed_export(directory)
    files = weight_files(directory)
    if not (directory / "config.json").is_file():
        raise UserError(
            f"head.init_from: must hold head.json or config.json, but {directory} has neither; choose another directory"
        )
    config = read_config(directory / "config.json")
    names = {name for path in files for name in tensor_shapes(path)}
    prefix = mtp_prefix(directory, config, names, target.config.num_hidden_layers)
    name = "mtp" if prefix else recognise(directory, config, names)
    config.is_of_model = bool(prefix) and any(each.startswith("model.layers.") for each in names)
    tensors = renamed(read_tensors(files, prefix), lambda each: each.removeprefix(prefix or "model."))
    settings, tensors = READERS[name](name, config, tensors, target)
    config.refuse_unknown(ignored_keys)
    if name in ("dflash", "dspark", "dflash2") and (directory / MASK_EMBEDDING).is_file():
        raise UserError(
            f"{directory / MASK_EMBEDDING}: must not exist, because head {name} takes the embedding of its mask token "
            "from the target, but does; choose another head"
        )
    if name != "medusa":
        default_theta = 1e6 if issubclass(HEADS[name].Config, DflashConfig) else 1e4
        settings |= {"rope_parameters": [*rope_of_head(config, target.config, default_theta)]}
    return Published(directory, name, settings, tensors)


def mtp_prefix(directory: Path, config: ConfigJson, names: Collection[str], num_layers: int) -> str:
    """Returns the prefix of the tensors of an MTP layer; empty without one."""
    found = {match[1]: match[2] for name in names if (match := MTP_LAYER.match(name))}
    prefixes = sorted(prefix for prefix, part in found.items() if part == "eh_proj" or config.architecture == MIMO)
    behind = f"model.layers.{num_layers}."
    if prefixes not in ([], [behind], [f"{MTP_LAYERS}0."]):
        raise UserError(
            f"head.init_from: must hold one MTP layer, {behind} behind the layers of this target, but {directory} has "
            f"{', '.join(prefixes)}; choose another checkpoint"
        )
    prefix = "".join(prefixes)
    foreign = sorted(name for name in names if name.startswith(prefix or "mtp.") and FOREIGN_PARTS.search(name))
    if foreign:
        raise UserError(
            "head.init_from: to become head mtp, an MTP layer must be a dense Llama layer in DeepSeek's or MiMo's "
            f"layout, but that of the {config.architecture} in {directory} has {foreign[0]}; set head=native_mtp"
        )
    return prefix


def recognise(directory: Path, config: ConfigJson, names: Collection[str]) -> str:
    """Returns the name of a head that is no MTP layer of a checkpoint, by its class or its tensors."""
    architecture, values = config.architecture, config.values
    if values.get("model_type") == "medusa" or any(m[3] for name in names if (m := FASTER_DECODING.match(name))):
        return "medusa"
    name = architecture if architecture in KINDS else CLASSES.get(architecture)
    if architecture == "LlamaForCausalLM" and {"fc.weight", "model.fc.weight"} & set(names):
        name = "eagle3" if any(each.endswith(".hidden_norm.weight") for each in names) else "eagle"
    if name == "eagle3" and {"mask_hidden", "model.mask_hidden"} & set(names):
        return "peagle"
    if name == "dflash" and values.get("projector_type") == "dspark":  # ModelOpt
        return "dspark"
    if name == "dspark" and values.get("markov_rank") == 0:
        return "dflash"
    announced = next((key for key in ("num_nextn_predict_layers", "num_mtp_layers") if values.get(key)), None)
    if name is None and announced is not None:
        missing = "input_proj" if architecture == MIMO else "eh_proj"
        raise UserError(
            f"{directory}: the files must hold the MTP layer that config.json announces by "
            f"{announced}={values[announced]}, but lack its {missing}.weight; download the checkpoint again"
        )
    if name is None:
        raise UserError(
            "head.init_from: must hold head.json, a model with an MTP layer (DeepSeek's eh_proj or MiMo's), or a head "
            f"of class {', '.join(CLASSES)}, but {directory} holds a {architecture}; choose another head, or set "
            "head=draft_model if this is a language model"
        )
    return name


def resolve_init(path: str, setting: str = "head.init_from") -> Path:
    """Returns the local directory of a head; a hub repository is downloaded if needed."""
    return Path(path) if Path(path).exists() else resolve_target(path, setting=setting)


def read_tensors(files: list[Path], prefixes: str | tuple[str, ...] = "") -> Tensors:
    """Returns the tensors whose names start with one of the prefixes. A name must be in one file only."""
    tensors: Tensors = {}
    for path in files:
        names = {name for name in tensor_shapes(path) if name.startswith(prefixes)}
        if twice := sorted(tensors.keys() & names):
            raise UserError(f"{path}: {twice[0]} must be in one file only, but another has it too; remove one of them")
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names}
    return {name: x for name, x in tensors.items() if not name.endswith("rotary_emb.inv_freq")}  # our heads compute it


def check_values(directory: Path, tensors: Tensors, advice: str) -> None:
    """Refuse weights with which a head cannot draft. `advice` is what to do about them."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise UserError(
                f"{directory}: {name} must hold floating-point numbers of 16 bits or more, because scales of quantised "
                f"weights are not read, but has {tensor.dtype}; {advice}"
            )
        if not tensor.isfinite().all():
            raise UserError(f"{directory}: {name} must hold finite numbers, but has NaN or infinity; {advice}")


def effective_settings(config: HeadConfig, target_config: PreTrainedConfig) -> dict[str, object]:
    """Returns the settings that must match a head's weights, with the target's sizes in place of unset ones."""
    # One MLP per depth, or blocks of one size. The weights of peagle fit any number of depths.
    weights_fix_depths = isinstance(config, MlpConfig) or config.drafts_whole_blocks
    ignored = set(IGNORED_SETTINGS) - ({"ttt_steps"} if weights_fix_depths else set())
    settings = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in ignored}
    sizes = vars(head_dims(config, target_config)) if isinstance(config, LayerConfig) else {}
    layers = HEADS[config.name].resolve_capture_layers(config, target_config)
    resolved: dict[str, object] = {"capture_layers": list(layers)} if "capture_layers" in settings else {}
    if isinstance(config, PeagleConfig | DflashConfig):
        resolved["mask_token_id"] = mask_token_id(config.mask_token_id, target_config.vocab_size)
    if isinstance(config, DflashConfig):
        resolved["layer_types"] = layer_types(config)
    return settings | {name: size for name, size in sizes.items() if name in settings} | resolved
