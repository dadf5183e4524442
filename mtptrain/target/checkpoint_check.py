"""Compares the headers of a target's weight files with its config, before any tensor is read."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from mtptrain.target.families import TEXT_MODEL_NAMES, read_target_config
from mtptrain.target.form import TargetForm, build_on_meta, find_form
from mtptrain.target.hub import DOWNLOAD_AGAIN, weight_files
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import tensor_shapes

MODEL_OPT_QUANTISATION = "hf_quant_config.json"
"""ModelOpt's description of quantised weights, beside config.json."""
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""Safetensors dtypes of tensors that are stored without scales."""


class StoredTensor(NamedTuple):
    """A tensor of a target's weight files."""

    path: Path
    name: str
    """Its name in the file."""
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        with safe_open(self.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
        return tensor


def stored_tensors(target_dir: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a target's weight files by their names in transformers' model, from the files' headers.

    Those that transformers joins with others, such as those of single experts, keep their names in the files.
    """
    return _stored_for(build_on_meta(read_target_config(target_dir)), target_dir)


def _stored_for(model: PreTrainedModel, target_dir: Path) -> dict[str, StoredTensor]:
    mapping = get_model_conversion_mapping(model, key_mapping=TEXT_MODEL_NAMES)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    found = {}
    for path in weight_files(target_dir):
        for name, (dtype, shape) in tensor_shapes(path).items():
            in_model, joined = rename_source_key(name, renamings, converters)
            found[name if joined else in_model] = StoredTensor(path, name, dtype, shape)
    return found


def check_weights(target_dir: Path) -> dict[str, StoredTensor]:
    """Returns `stored_tensors`, and refuses weights that do not belong to the target's config."""
    config = read_target_config(target_dir)
    model = build_on_meta(config)
    form, tensors = find_form(config), _stored_for(model, target_dir)
    _check_layers(target_dir, config, form, tensors)
    is_quantised = (
        getattr(config, "quantization_config", None) is not None or (target_dir / MODEL_OPT_QUANTISATION).is_file()
    )
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for in_model, (path, name, dtype, shape) in tensors.items():
        if dtype not in PLAIN_DTYPES:
            if not is_quantised and (in_model in expected or in_model.startswith(f"{form.layers}.")):
                raise UserError(
                    f"{path}: {name} must have one of the dtypes {', '.join(PLAIN_DTYPES)}, because config.json "
                    f"has no quantization_config, but has {dtype}; {DOWNLOAD_AGAIN}"
                )
        elif shape != expected.get(in_model, shape):
            raise UserError(
                f"{path}: {name} must have the shape {expected[in_model]} that config.json describes, but has {shape}; "
                f"{DOWNLOAD_AGAIN}"
            )
    names = f"{form.embed_tokens}.weight", f"{form.lm_head}.weight"
    if config.tie_word_embeddings and tensors.keys() >= {*names}:
        embed_tokens, lm_head = (tensors[name] for name in names)
        if not torch.equal(embed_tokens.read(), lm_head.read()):
            raise UserError(
                f"{lm_head.path}: {lm_head.name} must equal {embed_tokens.name}, because config.json says "
                "tie_word_embeddings=true, so that engines ignore it, but differs; set tie_word_embeddings=false in "
                "config.json, or remove the tensor"
            )
    return tensors


def _check_layers(target_dir: Path, config: PreTrainedConfig, form: TargetForm, tensor_names: Iterable[str]) -> None:
    """Refuse a number of layers that does not match the config. DeepSeek stores MTP layers after the others."""
    number = re.compile(rf"{re.escape(form.layers)}\.(\d+)\.")
    found = {int(match[1]) for name in tensor_names if (match := number.match(name))}
    most = config.num_hidden_layers + (getattr(config, "num_nextn_predict_layers", None) or 0)
    if found and not config.num_hidden_layers <= len(found) <= most:
        raise UserError(
            f"{target_dir}: the weights must have num_hidden_layers={config.num_hidden_layers} layers, as config.json "
            f"says, but have {len(found)}; {DOWNLOAD_AGAIN}"
        )
