"""Compares the headers of a target's weight files with its config, before any tensor is read."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig

from mtptrain.target.families import read_target_config
from mtptrain.target.hub import DOWNLOAD_AGAIN, weight_files
from mtptrain.utils.errors import UserError, error_summary
from mtptrain.utils.files import tensor_shapes

EMBED_TOKENS, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
MODEL_OPT_QUANTISATION = "hf_quant_config.json"
"""ModelOpt's description of quantised weights, beside config.json."""
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""Safetensors dtypes of tensors that are stored without scales."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check_weights(target_dir: Path) -> None:
    """Refuse weights that do not belong to the target's config.

    This reads only the headers of the files, except for an lm_head that should not be there.

    Raises:
        UserError: the target has no weights, or a file is damaged, transformers cannot build a model with the config,
            or a dtype, a shape, the number of layers or an lm_head does not match the config.
    """
    config = read_target_config(target_dir)
    tensors = {
        name: (path, dtype, shape)
        for path in weight_files(target_dir)
        for name, (dtype, shape) in tensor_shapes(path).items()
    }
    _check_layers(target_dir, config, tensors)
    is_quantised = (
        getattr(config, "quantization_config", None) is not None or (target_dir / MODEL_OPT_QUANTISATION).is_file()
    )
    expected = _expected_shapes(target_dir, config)
    for name, (path, dtype, shape) in tensors.items():
        if dtype not in PLAIN_DTYPES:
            if not is_quantised and (name in expected or _LAYER.match(name)):
                raise UserError(
                    f"{path}: {name} must have one of the dtypes {', '.join(PLAIN_DTYPES)}, because config.json "
                    f"has no quantization_config, but has {dtype}; {DOWNLOAD_AGAIN}"
                )
        elif shape != expected.get(name, shape):
            raise UserError(
                f"{path}: {name} must have the shape {expected[name]} that config.json describes, but has {shape}; "
                f"{DOWNLOAD_AGAIN}"
            )
    if config.tie_word_embeddings and {EMBED_TOKENS, LM_HEAD} <= tensors.keys():
        embed_tokens, lm_head = (_read(tensors[name][0], name) for name in (EMBED_TOKENS, LM_HEAD))
        if not torch.equal(embed_tokens, lm_head):
            raise UserError(
                f"{tensors[LM_HEAD][0]}: {LM_HEAD} must equal {EMBED_TOKENS}, because config.json says "
                "tie_word_embeddings=true, so that engines ignore it, but differs; set tie_word_embeddings=false in "
                "config.json, or remove the tensor"
            )


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _check_layers(target_dir: Path, config: PreTrainedConfig, tensor_names: Iterable[str]) -> None:
    """Refuse a number of layers that does not match the config.

    DeepSeek stores MTP layers after the decoder layers. If no tensor has the name of a layer, loading reports the
    missing names instead.
    """
    found = {int(match[1]) for name in tensor_names if (match := _LAYER.match(name))}
    most = config.num_hidden_layers + (getattr(config, "num_nextn_predict_layers", None) or 0)
    if found and not config.num_hidden_layers <= len(found) <= most:
        raise UserError(
            f"{target_dir}: the weights must have num_hidden_layers={config.num_hidden_layers} layers, as config.json "
            f"says, but have {len(found)}; {DOWNLOAD_AGAIN}"
        )


def _expected_shapes(target_dir: Path, config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a model with this config.

    The model is built on the meta device, so its weights take no memory.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # with a wrong config, the model's code may raise anything
        raise UserError(
            f"{target_dir / 'config.json'}: must describe a model that transformers can build, but transformers "
            f"reports {error_summary(error)}; {DOWNLOAD_AGAIN}"
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
