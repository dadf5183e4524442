"""Reads the MTP module of a checkpoint as head `native_mtp`."""

import torch

from mtptrain.engines.exports import refuse_changed_export
from mtptrain.heads.files import build_head, first_misfit
from mtptrain.heads.native_mtp import NATIVE_MTP
from mtptrain.heads.native_mtp_tensors import ModuleTensors
from mtptrain.init_from.published import Published, check_values, read_tensors, resolve_init
from mtptrain.settings.heads import NativeMtpConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import weight_files
from mtptrain.utils.errors import UserError


def read_native_mtp(path: str, target: TargetFiles) -> Published:
    """Returns the MTP module in the directory or hub repository of a checkpoint."""
    directory, family = resolve_init(path), target.config.model_type
    if family not in NATIVE_MTP:
        raise UserError(
            f"head.init_from: the target must be of a family whose MTP modules are known ({', '.join(NATIVE_MTP)}), "
            f"but is a {family}; set head=mtp, or unset head.init_from"
        )
    refuse_changed_export(directory)
    files, module = weight_files(directory), ModuleTensors(target.config)
    tensors = read_tensors(files, tuple(module.prefixes.values()))
    check_values(directory, tensors, "choose the checkpoint in bf16")  # quantised weights may have other names
    with torch.device("meta"):
        state = build_head(NativeMtpConfig(), target.config).state_dict()
    # A checkpoint may have all experts in joined tensors, as transformers' model has, or one tensor for each.
    whole = module.with_prefixes(state)
    expected = whole if tensors.keys() >= whole.keys() else module.stored(state)
    own = {name: tensor for name, tensor in tensors.items() if module.is_of_module(name)}
    if misfit := first_misfit(expected, own):
        name, wanted, found = misfit
        raise UserError(
            f"{directory}: {name} of the target's MTP module must be {wanted}, but is {found}; choose the checkpoint "
            "of this target, or unset head.init_from to train a module from random weights"
        )
    return Published(directory, "native_mtp", {}, module.state(tensors))
