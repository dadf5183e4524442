"""Reads the MTP module of a checkpoint as head `native_mtp`."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from mtptrain.convert.native_mtp import VllmNativeMtp
from mtptrain.convert.published.heads import PublishedHead, read_tensors, resolve_init, tensor_files, tensor_names
from mtptrain.heads.files import build_head
from mtptrain.heads.native_mtp import NATIVE_MTP
from mtptrain.serving.exports import refuse_changed_export
from mtptrain.settings.heads import NativeMtpConfig
from mtptrain.target.families import read_target_config
from mtptrain.utils.errors import UserError

MOST_NAMED = 8
"""Number of missing tensors that an error names."""


def read_native_mtp(path: str, target_config: PreTrainedConfig) -> PublishedHead:
    """Returns the MTP module in the directory or hub repository of a checkpoint.

    Raises:
        UserError: the directory or repository does not exist, MTP modules of the target's family are not known, or the
            checkpoint is of another model, or the files do not hold the whole module, or hold it quantised.
    """
    directory, family = resolve_init(path), target_config.model_type
    if family not in NATIVE_MTP:
        raise UserError(
            f"head.init_from: the target must be of a family whose MTP modules are known ({', '.join(NATIVE_MTP)}), "
            f"but is a {family}; set head=mtp, or unset head.init_from"
        )
    refuse_changed_export(directory)
    config, files = NativeMtpConfig(), tensor_files(directory)
    form, declared = VllmNativeMtp(config, target_config), declared_modules(directory, target_config)
    found = {name for name in tensor_names(files) if name.startswith(tuple(form.prefixes.values()))}
    with torch.device("meta"):
        state = build_head(config, target_config).state_dict()
    shapes = {name: tensor.shape for name, tensor in form.tensors(state).items()}
    single = {name for name in shapes if form.head_name(name) not in state}
    # A checkpoint may have all experts in joined tensors, as transformers' model has, or one tensor for each.
    wanted = set(shapes) - single if {form.head_name(name) for name in found} >= state.keys() else set(shapes)
    tensors = read_tensors(files, found)
    for name, tensor in tensors.items():  # first, because quantised weights may have other names than those wanted
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise UserError(
                f"head.init_from: the MTP module of {directory} must have floating-point numbers of 16 bits or more, "
                f"because the scales of quantised weights are not read, but {name} has {tensor.dtype}; choose the "
                "checkpoint in bf16"
            )
    if missing := sorted(wanted - found):
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise UserError(
            f"head.init_from: {directory} must hold every tensor of its MTP module, of which its config.json declares "
            f"{declared} ({form.native.count}), but lacks {', '.join(missing[:MOST_NAMED])}{more}; download the files "
            "that hold them, or unset head.init_from to train a module from random weights"
        )
    for name, tensor in tensors.items():
        if name in single and (name not in wanted or tensor.shape != shapes[name]):
            must = f"of shape {tuple(shapes[name])}" if name in wanted else "absent beside the joined experts"
            raise UserError(
                f"head.init_from: {name} of {directory} must be {must} for this target, but is of shape "
                f"{tuple(tensor.shape)}; choose the checkpoint of this target"
            )
    return PublishedHead(directory, config.name, {}, tensors, VllmNativeMtp, None)


def declared_modules(directory: Path, target_config: PreTrainedConfig) -> object:
    """Returns how many MTP modules a checkpoint's config.json declares, and refuses a checkpoint of another model."""
    if not (directory / "config.json").is_file():
        raise UserError(
            f"head.init_from: must be a checkpoint with its config.json, but {directory} has none; choose another "
            "directory"
        )
    config = read_target_config(directory)
    for name in ("model_type", "num_hidden_layers", "hidden_size"):
        theirs, ours = getattr(config, name), getattr(target_config, name)
        if theirs != ours:
            raise UserError(
                f"head.init_from: the checkpoint must be of the target's model, with {name} {ours}, but {directory} "
                f"has {theirs}; choose the target's own checkpoint"
            )
    return getattr(config, NATIVE_MTP[config.model_type].count, None) or 0
