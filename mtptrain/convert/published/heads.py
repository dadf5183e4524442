"""Reads published heads in the formats that engines serve.

A directory or hub repository must have safetensors files and one of these (class names are those in config.json):

- `head.json`: one of our heads, such as `run_dir/train/best`;
- `EagleDeepSeekMTPModel`: head `mtp` for vLLM;
- `MiMoForCausalLM`: head `mtp` for SGLang, or the MTP layer of a MiMo checkpoint;
- `EagleLlamaForCausalLM`, `LlamaForCausalLMEagle`, or `LlamaForCausalLM` with an fc: EAGLE-1;
- `LlamaForCausalLMEagle3`, `Eagle3LlamaForCausalLM`, or `LlamaForCausalLM` with an fc and a hidden_norm: EAGLE-3, with
  its layer named `midlayer` or `layers.0`, or P-EAGLE if there is a `mask_hidden`;
- `MedusaModel`, or FasterDecoding's tensor names: Medusa;
- `DFlashDraftModel`, NeMo Automodel's `Qwen3DFlashDraftModel`: head `dflash`;
- `Qwen3DSparkModel`, `DSparkDraftModel`: head `dspark`, or `dflash` if the Markov head has rank 0;
- `DFlash2DraftModel`, NeMo Automodel's `Qwen3DFlash2DraftModel`: head `dflash2`;
- a `speculators_model_type` of vLLM Speculators: `eagle3`, `peagle`, `dflash`, `dspark` or `dflash2`;
- a model with an MTP layer in DeepSeek's layout after its decoder layers (`model.layers.N.eh_proj`): head `mtp`.

Like our heads, they all apply RoPE to halves rather than interleaved pairs, so projections need no conversion.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mtptrain.convert.base import Format, Tensors, rename, renamed
from mtptrain.convert.mimo import MIMO_LAYER, mimo_settings
from mtptrain.convert.published.config_json import WITHOUT_MARKOV, Config, read_config
from mtptrain.convert.published.inferred_settings import (
    Settings,
    dflash_settings,
    eagle3_settings,
    layer_sizes,
    mask_token_id,
)
from mtptrain.convert.published.medusa import check_lm_heads, is_medusa, medusa_settings, own_name
from mtptrain.convert.published.speculators import engine_config
from mtptrain.convert.sglang import SglangEagle, SglangMtp
from mtptrain.convert.target_files import INDEX
from mtptrain.convert.vllm import (
    VllmDflash,
    VllmDflash2,
    VllmDspark,
    VllmEagle,
    VllmEagle3,
    VllmMedusa,
    VllmMtp,
    VllmPeagle,
)
from mtptrain.heads import HEADS
from mtptrain.heads.dflash import layer_types
from mtptrain.heads.files import checked_weights, stored_config
from mtptrain.heads.layers import head_dims
from mtptrain.serving.exports import refuse_changed_export
from mtptrain.settings.heads import DflashConfig, HeadConfig, LayerConfig, MlpConfig
from mtptrain.target.hub import HUB_ERRORS, indexed_files
from mtptrain.utils.errors import UserError, reason_of
from mtptrain.utils.files import tensor_shapes

DEEPSEEK_MTP = re.compile(r"^(model\.layers\.\d+\.)eh_proj\.weight$")
MIMO_MTP = re.compile(r"^(model\.mtp_layers\.\d+\.)")
UNKNOWN_MTP = re.compile(r"^mtp\.")
"""Tensors of MTP layers in a layout that head `mtp` does not have, such as that of Qwen3-Next and Qwen3.5."""
FOREIGN_PARTS = {".experts.": "experts", "self_attn.kv_": "latent attention"}
"""Parts of MTP layers that head `mtp` does not have, by a substring of their tensor names."""
LEGACY_NAMES = {
    f"aux_norm_{name}.weight": f"fc_norm.{index}.weight" for index, name in enumerate(("low", "mid", "high"))
}
"""Names that SGLang still reads beside `use_aux_norm`."""
NATIVE_NAMES = {"shared_head.norm.weight": "norm.weight", "post_norm.weight": "norm.weight"}
KNOWN = {
    VllmMtp.architecture: ("mtp", VllmMtp),
    SglangMtp.architecture: ("mtp", SglangMtp),
    VllmEagle.architecture: ("eagle", VllmEagle),
    SglangEagle.architecture: ("eagle", SglangEagle),
    VllmEagle3.architecture: ("eagle3", VllmEagle3),
    "Eagle3LlamaForCausalLM": ("eagle3", VllmEagle3),
    VllmMedusa.architecture: ("medusa", VllmMedusa),
    VllmDflash.architecture: ("dflash", VllmDflash),
    "Qwen3DFlashDraftModel": ("dflash", VllmDflash),
    VllmDspark.architecture: ("dspark", VllmDspark),
    "DSparkDraftModel": ("dspark", VllmDspark),
    VllmDflash2.architecture: ("dflash2", VllmDflash2),
    "Qwen3DFlash2DraftModel": ("dflash2", VllmDflash2),
}
"""The head and format of each model class that config.json may name."""
OTHER_DRAFTERS = {
    "LiLiCorrDraftModel": ("LiLiCorr", "vLLM on a GPU and SGLang serve it"),
    "Qwen3XPressModel": ("XPress", "vLLM 0.33 serves it on a GPU"),
    "DFlash2BeamDraftModel": ("DFlash 2 that drafts beams", "vLLM 0.33 serves it on a GPU"),
    "domino": ("Domino", "SGLang serves it with CUDA"),
}
"""Drafters that mtptrain does not train, with what serves them, by their class or `dflash_config.projector_type`."""
MASK_EMBEDDING = "mask_embedding.pt"
PLAIN_LLAMA = "LlamaForCausalLM"
"""The model class in the config.json of heads that EAGLE's authors published."""
IGNORED_SETTINGS = ("name", "ttt_steps", "init_from", "start_from_target", "anchors_per_document")
"""Settings that need not match a head's weights, or that are compared separately."""


@dataclass(frozen=True)
class PublishedHead:
    """A head as it is stored in a directory."""

    directory: Path
    name: str
    """The head's name in `HEADS`."""
    settings: Settings
    """For each setting of the head, the values that fit its weights, most likely first."""
    tensors: Tensors
    format: type[Format] | None
    """The format of `tensors`; None if they have our names."""
    config: Config | None
    """The head's config.json, whose norm eps and RoPE are compared with the target's; None skips this."""

    def state(self, config: HeadConfig, target_config: PreTrainedConfig) -> Tensors:
        """Returns the head's `state_dict`. The caller must have checked that `settings` match `config`.

        Raises:
            KeyError, RuntimeError: a tensor that the format splits is missing or has another shape.
        """
        return self.tensors if self.format is None else self.format(config, target_config).state(self.tensors)


def read_published(path: str, target_config: PreTrainedConfig) -> PublishedHead:
    """Returns the head in a directory or hub repository. Its format is recognised from its files.

    Raises:
        UserError: the directory or repository does not exist, or the files hold no head of a known format, or one with
            parts that our heads do not have, or a head or export of ours that was changed.
    """
    directory = resolve_init(path)
    if (directory / "head.json").is_file():
        return _own(directory, target_config)
    refuse_changed_export(directory)
    files = tensor_files(directory)
    if not (directory / "config.json").is_file():
        raise UserError(
            f"head.init_from: must hold head.json or config.json, but {directory} has neither; choose another directory"
        )
    config = engine_config(directory)
    names = tensor_names(files)
    if any(DEEPSEEK_MTP.match(name) for name in names):
        return _deepseek_mtp(directory, files, names, target_config)
    if is_medusa(config, names):
        config = read_config(directory, "medusa", target_config)
        medusa = renamed(read_tensors(files), own_name)
        check_lm_heads(directory, medusa, target_config)
        return PublishedHead(directory, "medusa", medusa_settings(directory, config, medusa), medusa, None, None)
    architecture = _architecture(config)
    section = found if isinstance(found := config.get("dflash_config"), dict) else {}
    for kind in (architecture, str(section.get("projector_type"))):
        if kind in OTHER_DRAFTERS:
            drafter, served = OTHER_DRAFTERS[kind]
            raise UserError(
                f"head.init_from: must hold a head that mtptrain trains, but {directory} holds {drafter} ({kind}), "
                f"which it does not ({served}); choose another head, or train head=dspark or head=dflash2, whose "
                "drafts know the one before them too"
            )
    if any(UNKNOWN_MTP.match(name) for name in names):
        raise UserError(
            "head.init_from: an MTP layer must have DeepSeek's or MiMo's layout to become head mtp, but that of the "
            f"{architecture} in {directory} has another one (mtp.*); set head=native_mtp"
        )
    if architecture == PLAIN_LLAMA and {"fc.weight", "model.fc.weight"} & names:
        is_eagle3 = any(name.endswith(".hidden_norm.weight") for name in names)
        architecture = VllmEagle3.architecture if is_eagle3 else VllmEagle.architecture
    if architecture not in KNOWN:
        _refuse_class(directory, architecture)
    name, form = KNOWN[architecture]
    is_checkpoint = form is SglangMtp and any(name.startswith("model.layers.") for name in names)  # all of MiMo
    kind = "native" if is_checkpoint else name
    if name == "dspark" and 0 in (config.get("markov_rank"), section.get("markov_rank")):
        name, form, kind = "dflash", VllmDflash, WITHOUT_MARKOV
    config = read_config(directory, kind, target_config)
    _refuse_lost_biases(directory, config, names)
    settings = layer_sizes(directory, name, config)
    if form is SglangMtp:
        refuse_several({match[1] for name in names if (match := MIMO_MTP.match(name))}, directory)
        tensors = read_tensors(files, MIMO_LAYER)
        settings |= mimo_settings(is_checkpoint, tensors)
        return PublishedHead(directory, name, settings, tensors, form, config)
    tensors = renamed(read_tensors(files), lambda name: name.removeprefix("model."))
    if form is VllmEagle3:
        tensors = _eagle3_tensors(tensors, config)
        settings |= eagle3_settings(directory, config, tensors, target_config)
        token_id = mask_token_id(directory, config, "mask_hidden" in tensors)
        if token_id is not None:
            name, form = "peagle", VllmPeagle
            settings["mask_token_id"] = [token_id]
    if issubclass(form, VllmDflash):
        _refuse_mask_embedding(directory, name)
        settings |= dflash_settings(directory, kind, config, tensors, target_config)
    return PublishedHead(directory, name, settings, tensors, form, config)


def _refuse_lost_biases(directory: Path, config: Config, names: Collection[str]) -> None:
    """Refuse a config that announces biases which the files do not hold."""
    for key, layer in (("attention_bias", "q_proj"), ("mlp_bias", "gate_proj"), ("bias", "fc")):
        if config.get(key) is True and not any(name.endswith(f"{layer}.bias") for name in names):
            raise UserError(
                f"{directory / 'config.json'}: {key} must be false, because the files have no {layer}.bias, but is "
                "true; download the head again"
            )


def _refuse_mask_embedding(directory: Path, name: str) -> None:
    """Refuse a trained embedding of the mask token, which engines read from a file of its own."""
    if (directory / MASK_EMBEDDING).is_file():
        raise UserError(
            f"{directory / MASK_EMBEDDING}: must not exist, because head {name} takes the embedding of its mask token "
            "from the target, but does; choose another head"
        )


def _architecture(config: Config) -> str:
    """Returns the model class that a config.json names first."""
    named = config.get("architectures") or PLAIN_LLAMA
    return str(named[0] if isinstance(named, list) else named)


def _refuse_class(directory: Path, architecture: str) -> NoReturn:
    """Refuse a model class that is not a head, with the classes that are."""
    known = ", ".join(f"{' or '.join(classes_of(head))} (head {head})" for head in dict(KNOWN.values()))
    is_language_model = architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    advice = "set head=draft_model to draft with this language model, or " if is_language_model else ""
    raise UserError(
        f"head.init_from: must hold head.json, a model with an MTP layer (model.layers.N.eh_proj), or a published head "
        f"of class {known}, but {directory} holds a {architecture}; {advice}choose another head"
    )


def classes_of(head: str) -> list[str]:
    """Returns the model classes in config.json that are read as this head."""
    return [architecture for architecture, (name, _) in KNOWN.items() if name == head]


def resolve_init(path: str) -> Path:
    """Returns the local directory of a head; a hub repository is downloaded if needed.

    Raises:
        UserError: `path` is neither a directory nor a hub name.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", MASK_EMBEDDING]))
    except HUB_ERRORS as error:
        raise UserError(
            f"head.init_from: must be a local directory or a hub name, but {path!r} is not a directory and cannot be "
            f"downloaded: {reason_of(error)}; correct the path, log in with `hf auth login` if the head is gated or "
            "private, or download the head first"
        ) from error


def tensor_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a directory: those that its index names, or all of them without an index.

    Raises:
        UserError: the directory has none, or not all that the index names.
    """
    files, index = sorted(directory.glob("*.safetensors")), directory / INDEX
    if index.is_file():
        named = indexed_files(index, "download the head again")
        if absent := [name for name in named if directory / name not in files]:
            raise UserError(f"{index}: must name files beside it, but {absent[0]} is missing; download the head again")
        return [directory / name for name in named]
    if not files:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt") for path in directory.glob(pattern))
        pickled = "(it is a pickle, which can execute code, and is therefore not read)"
        advice = (
            f"convert {pickles[0]} to safetensors first {pickled}"
            if pickles
            else f"choose a head that has them, or convert its .bin or .pt file to safetensors first {pickled}"
        )
        raise UserError(f"head.init_from: weights must be safetensors files, but {directory} has none; {advice}")
    return files


def tensor_names(files: list[Path]) -> set[str]:
    return {name for path in files for name in tensor_shapes(path)}


def read_tensors(files: list[Path], wanted: str | Collection[str] = "") -> Tensors:
    """Returns the tensors of these names, or those whose names start with a prefix."""
    tensors: Tensors = {}
    read: set[str] = set()
    for path in files:
        names = tensor_names([path])
        if twice := sorted(names & read):
            raise UserError(f"{path}: {twice[0]} must be in one file only, but another has it too; remove one of them")
        read |= names
        with safe_open(path, framework="pt") as file:
            is_read = (lambda name: name.startswith(wanted)) if isinstance(wanted, str) else wanted.__contains__
            tensors |= {name: file.get_tensor(name) for name in names if is_read(name)}
    return tensors


def _own(directory: Path, target_config: PreTrainedConfig) -> PublishedHead:
    """Returns a head that `save_head` wrote. Sizes that its settings leave unset are the target's."""
    config = stored_config(directory)
    settings = effective_settings(config, target_config)
    tensors = read_tensors([checked_weights(directory)])
    return PublishedHead(
        directory, config.name, {name: [value] for name, value in settings.items()}, tensors, None, None
    )


def effective_settings(config: HeadConfig, target_config: PreTrainedConfig) -> dict[str, object]:
    """Returns the settings that must match a head's weights, with the target's sizes in place of unset ones."""
    # One MLP per depth, or blocks of one size. The weights of peagle fit any number of depths.
    weights_fix_depths = isinstance(config, MlpConfig) or config.drafts_whole_blocks
    ignored = set(IGNORED_SETTINGS) - ({"ttt_steps"} if weights_fix_depths else set())
    settings = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in ignored}
    sizes = vars(head_dims(config, target_config)) if isinstance(config, LayerConfig) else {}
    layers = HEADS[config.name].resolve_capture_layers(config, target_config)
    resolved: dict[str, object] = {"capture_layers": list(layers)} if "capture_layers" in settings else {}
    if isinstance(config, DflashConfig):
        resolved["layer_types"] = layer_types(config)
    return settings | {name: size for name, size in sizes.items() if name in settings} | resolved


def _deepseek_mtp(
    directory: Path, files: list[Path], names: set[str], target_config: PreTrainedConfig
) -> PublishedHead:
    """Returns the MTP layer of a checkpoint, given its files and the names of its tensors."""
    prefixes = sorted({match[1] for name in names if (match := DEEPSEEK_MTP.match(name))})
    refuse_several(prefixes, directory)
    behind = f"model.layers.{target_config.num_hidden_layers}."
    if prefixes[0] != behind:
        raise UserError(
            f"head.init_from: the MTP layer of {directory} must be {behind.rstrip('.')}, behind the layers of this "
            f"target, but is {prefixes[0].rstrip('.')}; choose the checkpoint of this target"
        )
    foreign = [
        what
        for part, what in FOREIGN_PARTS.items()
        if any(name.startswith(prefixes[0]) and part in name for name in names)
    ]
    if foreign:
        raise UserError(
            "head.init_from: an MTP layer must be dense and have plain attention, as head mtp has, but that of "
            f"{directory} has {' and '.join(foreign)}; set head=native_mtp"
        )
    config = read_config(directory, "native", target_config)
    tensors = renamed(read_tensors(files, prefixes[0]), lambda name: name.removeprefix(prefixes[0]))
    tensors = rename(tensors, NATIVE_NAMES)
    return PublishedHead(directory, "mtp", layer_sizes(directory, "mtp", config), tensors, None, config)


def refuse_several(prefixes: Collection[str], directory: Path) -> None:
    """Refuse a checkpoint with several MTP layers, given the prefixes of their tensors."""
    if len(prefixes) > 1:
        raise UserError(
            f"head.init_from: must hold one MTP layer, as head mtp has, but {directory} has {len(prefixes)} "
            f"({', '.join(sorted(prefixes))}); choose another checkpoint"
        )


def _eagle3_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Returns the tensors under our export's names, without `d2t` if it maps the whole vocabulary to itself."""
    tensors = renamed(tensors, lambda name: re.sub(r"^layers\.0\.", "midlayer.", name))
    tensors = rename(tensors, LEGACY_NAMES)
    if "d2t" in tensors and len(tensors["d2t"]) == config.get("vocab_size") and not tensors["d2t"].any():
        tensors.pop("d2t")
    return tensors
