"""Gives a head its initial weights, from `head.init_from` or, with `head.start_from_target`, from the target.

Training starts from these weights. The weights of `head.init_from` must fit the head of the config;
`mtptrain.convert.published.heads` lists the formats that can be read. If a run has no trained head, acceptance and
export use the head of `head.init_from`.
"""

import hashlib
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from mtptrain.convert.base import Tensors
from mtptrain.convert.draft_model import initial_weights, start_from_target_model
from mtptrain.convert.published.config_json import rope_and_eps
from mtptrain.convert.published.heads import PublishedHead, effective_settings, read_published
from mtptrain.convert.published.native_mtp import read_native_mtp
from mtptrain.data.draft_vocab import check_draft_token_ids
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import (
    best_or_last,
    build_head,
    check_head_target,
    check_values,
    fill_head,
    first_misfit,
    load_head,
    stored_calibration,
)
from mtptrain.heads.layer_head import LayerHead
from mtptrain.settings.heads import DraftModelConfig, HeadConfig, NativeMtpConfig
from mtptrain.target.families import head_dim as target_head_dim
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts, load_last_layer
from mtptrain.target.hub import weights_fingerprint
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256

REPEATED = {
    r"embed_tokens\.weight": "embed_tokens",
    r"lm_head\.weight|lm_heads\.\d+\.weight|shared_head\.head\.weight": "lm_head",
}
"""Name patterns of tensors in a head's file that repeat a tensor of the target, with its name in `FrozenParts`."""
ROUNDING = 0.01
"""A relative difference of a row up to this one passes as rounding to another dtype."""
NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|^t2d$")
"""Names of tensors in a head's file that follow from its other tensors and settings, so that our heads need none."""
NAMES_IN_TARGET = {
    "hidden_norm.weight": ("input_layernorm.weight",),
    "post_attention_layernorm.weight": (
        "pre_feedforward_layernorm.weight",
        "post_attention_layernorm.weight",
    ),  # Gemma's name, then the other families'; OLMo 2's is a norm of the attention's output, taken as a start
}
"""Names in the target's layer, in order of preference, for head tensors that are named differently there."""


@dataclass(frozen=True)
class RunHead:
    """The head that a run evaluates and exports."""

    head: Head
    directory: Path
    """The directory that the head was read from."""
    sha256: str
    """Hash of the stored weights and of the calibration: it differs if either does."""
    is_trained: bool
    """Whether this run trained the head; otherwise it comes from `head.init_from`."""


def trained_or_initial_head(
    train_dir: Path, config: HeadConfig, target: TargetFiles, dtype: torch.dtype | None, device: torch.device
) -> RunHead:
    """Returns the best head that a run trained, its last one if none was measured, or that of `head.init_from`.

    `RunHead.directory` says which one it is. A confidence is calibrated as validation found best.

    Args:
        train_dir: `run_dir/train`.
        config: the head's settings.
        target: the target that the head drafts for.
        dtype: dtype of the head; None keeps the stored one.
        device: device of the head.

    Raises:
        UserError: neither head exists, or the head has another config or belongs to another target.
    """
    trained = best_or_last(train_dir)
    if config.init_from is None or (trained / "head.json").is_file():
        check_head_target(trained, target)
        head = load_head(trained, config, target.config, dtype, device)
        sha256 = _calibrate_and_hash(head, trained, file_sha256(trained / "head.safetensors"))
        return RunHead(head, trained, sha256, is_trained=True)
    directory, state = _read(config.init_from, config, target)
    if (directory / "head.json").is_file():
        check_head_target(directory, target)
    head = fill_head(build_head(config, target.config), state, dtype, device)
    sha256 = _calibrate_and_hash(head, directory, weights_fingerprint(directory))
    return RunHead(head, directory, sha256, is_trained=False)


def _calibrate_and_hash(head: Head, directory: Path, sha256: str) -> str:
    """Calibrate a head's confidence as its `head.json` says, and return the hash of both for `RunHead`.

    Without a calibration, it is `sha256`, the hash of the stored weights.
    """
    if not (directory / "head.json").is_file() or (calibration := stored_calibration(directory)) is None:
        return sha256
    head.calibrate(*calibration)
    return hashlib.sha256(f"{sha256} {calibration}".encode()).hexdigest()


@torch.no_grad()
def start_from_target(head: Head, target: TargetFiles) -> None:
    """Copy the target's final norm, and those weights of its last layer that have the head's shapes and head dim.

    A warning names the projections that stay random.

    In head `eagle3`, the first columns of the query, key and value projections read the embedding and stay random. The
    random weights of `fc` or `eh_proj` are halved, and the identity is added to the columns for the hidden state (in
    `eagle3`, for the last captured stream), so that the layer reads the target's states.

    Head `draft_model` starts from other weights of the target: see `start_from_target_model`.

    Raises:
        UserError: no projection of the target's layer has the shape and head dim of the head's, the head has neither
            `fc` nor `eh_proj`, a tensor of the target is quantised, or a draft model differs from the target.
    """
    if isinstance(head, DraftModelHead):
        start_from_target_model(head, target)
        return
    assert isinstance(head, LayerHead)
    head_dim, target_dim = head.self_attn.head_dim, target_head_dim(target.config)
    layer, parts = fold_query_key_norms(load_last_layer(target.directory)), load_frozen_parts(target.directory)
    copied, parameters = [], dict(head.named_parameters())
    for name, parameter in parameters.items():
        weight = next((layer[source] for source in NAMES_IN_TARGET.get(name, (name,)) if source in layer), None)
        if name == "norm.weight":
            parameter.copy_(parts.norm_weight.float() + parts.form.norm_offset)
        elif (
            weight is not None and fits(name, parameter, weight) and (head_dim == target_dim or "self_attn" not in name)
        ):
            parameter[..., -weight.shape[-1] :].copy_(weight)
            copied.append(name)
    projections = [name for name in parameters if re.fullmatch(r"(self_attn|mlp)\..*proj\.weight", name)]
    left_random = [name.removesuffix(".weight") for name in projections if name not in copied]
    if len(left_random) == len(projections):
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(layer.items())[:4])
        raise UserError(
            "head.start_from_target: the target's last layer must have projections of the head's shapes and head dim, "
            f"but {target.directory} has {sizes} and head dim {target_dim}; set head.start_from_target=false"
        )
    if left_random:
        warnings.warn(
            "head.start_from_target: the target's last layer should have each projection of the head, in its shape and "
            f"with its head dim {head_dim}, but lacks {', '.join(left_random)}, which stay random; compare with "
            "head.start_from_target=false",
            stacklevel=2,
        )
    fuse = parameters.get("eh_proj.weight", parameters.get("fc.weight"))
    if fuse is None:
        raise UserError(
            "head.start_from_target: the head must have a projection of the target's states, eh_proj or fc, but "
            f"{type(head).__name__} has none; set head.start_from_target=false"
        )
    hidden_size = fuse.shape[0]
    fuse.mul_(0.5)
    fuse[:, -hidden_size:].add_(torch.eye(hidden_size))


def fold_query_key_norms(layer: Tensors) -> Tensors:
    """Returns a target's layer with its query and key norms folded into the projections.

    Qwen3 and Gemma 3 have such norms; the heads that can start from a target do not. The weights of the norms fold
    exactly. The norms also divide each row by its root mean square, which depends on the input. A constant per
    attention head replaces this divisor: the root mean square over inputs of random direction. OLMo 2 has one norm over
    all attention heads, and no input norm; Command R+ has a weight for each attention head.
    """
    folded, input_weight = dict(layer), layer.get("input_layernorm.weight", torch.ones(()))
    for name in ("q", "k"):
        norm = layer.get(f"self_attn.{name}_norm.weight")
        if norm is not None:
            heads = layer[f"self_attn.{name}_proj.weight"].unflatten(0, (-1, norm.shape[-1]))  # [heads, head_dim, H]
            mean_squares = (heads * input_weight).square().sum(-1).mean(-1)  # [heads]
            scaled = heads * norm[..., None] * mean_squares.rsqrt()[:, None, None]
            folded[f"self_attn.{name}_proj.weight"] = scaled.flatten(0, 1)
    return folded


def fits(name: str, parameter: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether the shapes match. An attention projection may have extra leading columns for the embedding."""
    reads_embedding = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    widths = (weight.shape[-1], 2 * weight.shape[-1]) if reads_embedding else (weight.shape[-1],)
    return parameter.shape[:-1] == weight.shape[:-1] and parameter.shape[-1] in widths


def check_one_start(config: HeadConfig) -> None:
    if config.start_from_target and not config.starts_from_target:
        raise UserError(
            f"head.start_from_target: must be false with head {config.name}, which cannot start as the target's last "
            "layer, but is true; set head.start_from_target=false"
        )
    if config.start_from_target and config.init_from is not None:
        raise UserError(
            "head.start_from_target: must be false when head.init_from is set, but is true and head.init_from is "
            f"{config.init_from}; unset one of them"
        )


def load_init(path: str, config: HeadConfig, target: TargetFiles) -> Tensors:
    """Returns the initial `state_dict` of a head of this config, with `d2t` and `lm_head` if the head has them.

    Args:
        path: `head.init_from`, a directory or a hub name.
        config: the head's settings.
        target: the target that the head drafts for.

    Raises:
        UserError: the directory or repository does not exist, or the files hold no head of a known format, or one with
            other settings or other tensors.
    """
    return _read(path, config, target)[1]


def _read(path: str, config: HeadConfig, target: TargetFiles) -> tuple[Path, Tensors]:
    """Returns the directory of a published head or language model, and its `state_dict`."""
    if isinstance(config, DraftModelConfig):
        return initial_weights(replace(config, init_from=path), target)
    target_config = target.config
    is_own = (Path(path) / "head.json").is_file()
    is_native = isinstance(config, NativeMtpConfig) and not is_own
    published = (read_native_mtp if is_native else read_published)(path, target_config)
    if not is_own:
        published = allow_target_lm_head(published, target)
    check_settings(published, config, target_config)
    warn_of_other_arithmetic(published, target_config)
    with torch.device("meta"):
        expected = build_head(config, target_config).state_dict()
    tensors = {name: tensor for name, tensor in published.tensors.items() if not NOT_WEIGHTS.search(name)}
    if not is_native and not getattr(config, "attention_bias", False):
        tensors = without_zero_biases(tensors, expected, published.directory)
    try:
        state = replace(published, tensors=tensors).state(config, target_config)
    except (KeyError, RuntimeError) as error:
        raise UserError(
            f"head.init_from: {published.directory} must hold every tensor of its format, but does not ({error}); "
            "download it again"
        ) from error
    state = without_repeated_tensors(state, expected, published.directory, target)
    check_tensors(state, expected, published.directory, config)
    check_values(published.directory, expected, state, "copy or download it again")
    check_draft_token_ids(state, published.tensors.get("t2d"), target_config.vocab_size, published.directory)
    return published.directory, state


def allow_target_lm_head(published: PublishedHead, target: TargetFiles) -> PublishedHead:
    """Returns a head whose lm_head, if it repeats the target's, need not become a vocabulary of its own."""
    vocab_size, lm_head = target.config.vocab_size, published.tensors.get("lm_head.weight")
    if lm_head is None or published.settings.get("draft_vocab_size") != [vocab_size]:
        return published
    if num_differing_rows(lm_head, load_frozen_parts(target.directory).lm_head):
        return published
    return replace(published, settings=published.settings | {"draft_vocab_size": [None, vocab_size]})


def check_settings(published: PublishedHead, config: HeadConfig, target_config: PreTrainedConfig) -> None:
    """Refuse a different kind of head or different settings, and name the arguments that would match."""
    directory, settings = published.directory, published.settings
    if published.name != config.name:
        defaults = HEADS[published.name].Config()
        chosen = {
            name: value
            for name, (value, *_) in settings.items()
            if value is not None and (value is not False or getattr(defaults, name))  # most defaults are false
        }
        choices = "".join(f" {_override(name, value)}" for name, value in chosen.items())
        raise UserError(
            f"head.init_from: {directory} must hold the head {config.name}, as in the recipe, but holds the head "
            f"{published.name}; set head={published.name}{choices}, or choose another head"
        )
    ours = effective_settings(config, target_config)
    different = {name: values for name, values in settings.items() if ours[name] not in values}
    if different:
        raise UserError(
            f"head.init_from: the head's settings must be those of {directory}, but differ in "
            + ", ".join(
                f"head.{name} ({_either(values)} there, {ours[name]} here)" for name, values in different.items()
            )
            + f"; set {' '.join(_override(name, values[0]) for name, values in different.items())}, or choose another "
            "head"
        )


def _either(values: list[object]) -> str:
    """Returns the values that fit a head: one, or two, which are the two meanings of layer ids if they are lists."""
    layers = sorted(value for value in values if isinstance(value, list))
    if len(layers) == 2:
        return f"{layers[0]} (vLLM's count) or {layers[1]} (SGLang's count)"
    return " or ".join(map(str, values))


def _override(name: str, value: object) -> str:
    """Returns a setting as a command-line argument."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, list):
        text = f"[{','.join(map(str, value))}]"
    return f"head.{name}={text}"


def warn_of_other_arithmetic(published: PublishedHead, target_config: PreTrainedConfig) -> None:
    """Warn if the RoPE or norm settings in the head's config.json differ from the target's, which our heads use."""
    if published.config is None:
        return
    default_theta = 1e6 if issubclass(HEADS[published.name], DflashHead) else 1e4
    path = published.directory / "config.json"
    for name, (theirs, ours) in rope_and_eps(path, published.config, target_config, default_theta).items():
        if theirs != ours:
            warnings.warn(
                f"{path}: {name} should be {ours}, the target's value, which is used, "
                f"but is {theirs}; the head may draft worse than published until it is trained",
                stacklevel=2,
            )


def without_repeated_tensors(state: Tensors, expected: Tensors, directory: Path, target: TargetFiles) -> Tensors:
    """Returns the tensors without copies of the target's embeddings and lm_head; warns if the copies differ."""
    repeated = {
        name: part
        for name in state
        for pattern, part in REPEATED.items()
        if re.fullmatch(pattern, name) and name not in expected
    }
    parts = load_frozen_parts(target.directory) if repeated else None
    for name, part in repeated.items():
        ours = getattr(parts, part)
        if differing := num_differing_rows(state[name], ours):
            warnings.warn(
                f"{directory}: {name} should equal the target's, which is used, but differs in {differing:,} of "
                f"{len(ours):,} rows; the head may draft worse than published until it is trained",
                stacklevel=2,
            )
    return {name: tensor for name, tensor in state.items() if name not in repeated}


def num_differing_rows(tensor: torch.Tensor, reference: torch.Tensor) -> int:
    """Returns how many rows differ by more than `ROUNDING` of their norm; all of them if the shapes differ.

    A head may have trained one row alone, that of its mask token.
    """
    if tensor.shape != reference.shape:
        return len(reference)
    differing = 0
    for ours, theirs in zip(reference.split(4096), tensor.split(4096), strict=True):
        distance = (theirs.float() - ours.float()).norm(dim=-1)
        differing += int((distance > ROUNDING * ours.float().norm(dim=-1)).sum())
    return differing


def without_zero_biases(tensors: Tensors, expected: Tensors, directory: Path) -> Tensors:
    """Returns the tensors without zero biases, which some engines need in the file but the head does not have.

    Raises:
        UserError: such a bias is not zero.
    """
    biases = [name for name in tensors if name.endswith(".bias") and name not in expected]
    for name in biases:
        if tensors[name].any():
            raise UserError(
                f"head.init_from: {name} of {directory} must be zero, because the head has no such bias, but is not; "
                "choose another head"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in biases}


def check_tensors(state: Tensors, expected: Tensors, directory: Path, config: HeadConfig) -> None:
    """Refuse unknown tensors, tensors of the wrong shape, and missing tensors, which would stay random."""
    if misfit := first_misfit(expected, state):
        name, wanted, found = misfit
        raise UserError(
            f"head.init_from: {name} of {directory} must be {wanted} for head {config.name} and this target, but is "
            f"{found}; choose another head"
        )
