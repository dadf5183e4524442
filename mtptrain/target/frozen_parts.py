"""A target's weight files, compared with its config by their headers, and the parts that a head shares untrained."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from mtptrain.target.families import TEXT_MODEL_NAMES, read_target_config
from mtptrain.target.form import TargetForm, build_on_meta, find_form
from mtptrain.target.hub import DOWNLOAD_AGAIN, weight_files
from mtptrain.target.quantised import dequantised, quantised_modules
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import tensor_shapes

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
    is_quantised = getattr(config, "quantization_config", None) is not None
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


@dataclass(frozen=True)
class FrozenParts:
    """The target's embeddings, final norm and lm_head."""

    embed_tokens: torch.Tensor  # [V, H]
    norm_weight: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [V, H]
    form: TargetForm
    """How logits follow from the states."""
    norm_bias: torch.Tensor | None = None  # [H]
    lm_head_bias: torch.Tensor | None = None  # [V]

    @classmethod
    def of(cls, config: PreTrainedConfig, weights: Mapping[str, torch.Tensor]) -> "FrozenParts":
        """Builds the parts from the target's tensors, keyed by name. That of lm_head may be missing if it is tied."""
        form = find_form(config)
        names = form.part_names(config.tie_word_embeddings)
        return cls(form=form, **{part: weights[name] for part, name in names.items()})

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the unscaled embeddings [..., H], which engines share with a head.

        Some families, such as Gemma, multiply them by a factor, but only in the target's own forward (vLLM's
        Gemma3Model.embed_input_ids).
        """
        return F.embedding(input_ids, self.embed_tokens)  # [..., H]

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalizes the states after the last layer, with the same rounding as the family's own norm."""
        return self.form.normed(hidden_states, self.norm_weight, self.norm_bias)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the target's own logits [..., V] of post-norm states [..., H]."""
        return self.form.scaled_logits(F.linear(self.form.scaled_states(states), self.lm_head, self.lm_head_bias))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "FrozenParts":
        """Returns the parts on a device, in a dtype; None keeps theirs."""
        is_tied = self.lm_head is self.embed_tokens
        tensors = {
            part.name: getattr(self, part.name) for part in fields(self) if not (is_tied and part.name == "lm_head")
        }
        moved: dict[str, Any] = {
            name: x.to(device, dtype) for name, x in tensors.items() if isinstance(x, torch.Tensor)
        }
        return replace(self, **{"lm_head": moved["embed_tokens"], **moved})


def load_frozen_parts(target_dir: Path) -> FrozenParts:
    """Read only the embeddings, final norm and lm_head from the target's safetensors files.

    A quantised lm_head is dequantised in fp32.
    """
    config, tensors = read_target_config(target_dir), check_weights(target_dir)
    names = {*find_form(config).part_names(config.tie_word_embeddings).values()}
    lm_head = _dequantised(check_parts(target_dir, tensors), tensors)
    refuse_missing(target_dir, names - tensors.keys() - lm_head.keys())
    return FrozenParts.of(config, {name: tensors[name].read() for name in names - lm_head.keys()} | lm_head)


def check_parts(target_dir: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, nn.Module]:
    """Refuse quantised embeddings and final norms, by the `stored_tensors` of a target.

    Returns:
        A quantised lm_head, by its name: see `quantised_modules`. Empty if it is not quantised.
    """
    config = read_target_config(target_dir)
    form = find_form(config)
    plain = [form.embed_tokens, form.norm, *([form.lm_head] if config.tie_word_embeddings else [])]
    refuse_quantised(tensors, plain)
    quantised = [] if form.lm_head in plain or not _is_quantised(_of(form.lm_head, tensors)) else [form.lm_head]
    return quantised_modules(target_dir, config, quantised, are_outputs=True)


def _of(module: str, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns a module's own tensors, by their names in it."""
    return {
        name.removeprefix(f"{module}."): each for name, each in tensors.items() if name.rpartition(".")[0] == module
    }


def _is_quantised(tensors: Mapping[str, StoredTensor]) -> bool:
    return any(each.dtype not in PLAIN_DTYPES or "scale" in name for name, each in tensors.items())


def _dequantised(modules: Mapping[str, nn.Module], tensors: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """Returns the weights [D, H] of quantised modules in fp32, by name."""
    stored = {name: {part: each.read() for part, each in _of(name, tensors).items()} for name in modules}
    return {f"{name}.weight": dequantised(module, stored[name]) for name, module in modules.items()}


def refuse_quantised(tensors: Mapping[str, StoredTensor], modules: Iterable[str]) -> None:
    """Refuse quantised modules, by their names in transformers' model."""
    for found in (_of(module, tensors) for module in modules):
        if _is_quantised(found):
            path, name, dtype, _ = next(each for part, each in found.items() if _is_quantised({part: each}))
            raise UserError(
                f"target.path: {name.rpartition('.')[0]} must be unquantised, because it is read without scales, but "
                f"{path} has {name} in {dtype}; choose the unquantised checkpoint, or one in which this module is not "
                "quantised"
            )


def load_last_layer(target_dir: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of the last decoder layer in fp32, dequantised, by their names inside it.

    Norm weights include the 1.
    """
    config = read_target_config(target_dir)
    form = find_form(config)
    prefix = f"{form.layers}.{config.num_hidden_layers - 1}."
    tensors = {name: each for name, each in stored_tensors(target_dir).items() if name.startswith(prefix)}
    modules = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    quantised = [module for module in modules if _is_quantised(_of(module, tensors))]
    weights = _dequantised(quantised_modules(target_dir, config, quantised), tensors)
    plain = {name: each.read() for name, each in tensors.items() if name.rpartition(".")[0] not in quantised}
    return {
        name.removeprefix(prefix): tensor.float() + form.norm_offset * name.endswith("norm.weight")
        for name, tensor in (plain | weights).items()
    }


def refuse_missing(target_dir: Path, tensor_names: Collection[str]) -> None:
    if tensor_names:
        first_names = sorted(tensor_names)[:3]
        rest = f" and {len(tensor_names) - 3} more" if len(tensor_names) > 3 else ""
        raise UserError(
            f"{target_dir}: the checkpoint must hold {', '.join(first_names)}{rest}, but does not; download it again"
        )
