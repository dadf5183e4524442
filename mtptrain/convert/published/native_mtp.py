"""Reads the MTP module of a checkpoint as head `native_mtp`."""

import torch
from transformers import PreTrainedConfig

from mtptrain.convert.native_mtp import DECLARED, VllmNativeMtp, declared_modules
from mtptrain.convert.published.heads import PublishedHead, read_tensors, resolve_init, tensor_files, tensor_names
from mtptrain.heads.files import build_head
from mtptrain.heads.native_mtp import NATIVE_MTP, NativeMtpHead
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_json

MOST_NAMED = 8
"""Number of missing tensors that an error names."""


def read_native_mtp(path: str, target_config: PreTrainedConfig) -> PublishedHead:
    """Returns the MTP module in the directory or hub repository of a checkpoint.

    Raises:
        UserError: the directory or repository does not exist, MTP modules of the target's family are not known, or the
            files do not hold the whole module, or hold it quantised.
    """
    directory, family = resolve_init(path), target_config.model_type
    if family not in NATIVE_MTP:
        raise UserError(
            f"head.init_from: the target must be of a family whose MTP modules are known ({', '.join(NATIVE_MTP)}), "
            f"but is a {family}; set head=mtp, or unset head.init_from"
        )
    config, files = NativeMtpHead.Config(), tensor_files(directory)
    form = VllmNativeMtp(config, target_config)
    found = {name for name in tensor_names(files) if name.startswith(tuple(form.prefixes.values()))}
    with torch.device("meta"):
        state = build_head(config, target_config).state_dict()
    wanted, here = set(form.tensors(state)), {form.head_name(name) for name in found}
    if {name for name in state if ".experts." in name} <= here:  # joined already, not one tensor for each expert
        wanted = {name for name in wanted if form.head_name(name) in state}
    if missing := sorted(wanted - found):
        declared = declared_modules(read_json(directory / "config.json", "download the checkpoint again"))
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise UserError(
            f"head.init_from: {directory} must hold every tensor of its MTP module, of which its config.json declares "
            f"{declared} ({' or '.join(DECLARED)}), but lacks {', '.join(missing[:MOST_NAMED])}{more}; download the "
            "files that hold them, or unset head.init_from to train a module from random weights"
        )
    tensors = read_tensors(files, found)
    for name, tensor in tensors.items():
        if tensor.dtype.itemsize == 1:
            raise UserError(
                f"head.init_from: the MTP module of {directory} must have numbers of 16 bits or more, because the "
                f"scales of quantised weights are not read, but {name} has {tensor.dtype}; choose the checkpoint in "
                "bf16"
            )
    return PublishedHead(directory, config.name, {}, tensors, VllmNativeMtp, None)
