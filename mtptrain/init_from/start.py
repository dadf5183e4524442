"""Gives a head the initial weights of `head.init_from`, and finds the head that a run evaluates and exports.

The weights of `head.init_from` must fit the head of the config; `published` lists the formats that can be read.
"""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from mtptrain.data.draft_vocab import check_draft_token_ids
from mtptrain.data.identity import refuse_different_facts
from mtptrain.engines.exports import SERVING
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head, Tensors
from mtptrain.heads.corrected import Confident
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import (
    RESTORE,
    TARGET_WEIGHTS,
    WEIGHTS,
    best_or_last,
    build_head,
    check_head_target,
    fill_head,
    first_misfit,
    stored_calibration,
    stored_config,
)
from mtptrain.init_from.draft_model import read_draft_model
from mtptrain.init_from.native_mtp import read_native_mtp
from mtptrain.init_from.published import Published, check_values, effective_settings, read_published, resolve_init
from mtptrain.init_from.readers import Settings, num_differing_rows
from mtptrain.settings.heads import (
    HEAD_CONFIGS,
    MAX_DEPTHS,
    DraftModelConfig,
    HeadConfig,
    NativeMtpConfig,
    config_of,
)
from mtptrain.target.files import TargetFiles, override_of
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.hub import resolve_target, weights_fingerprint
from mtptrain.utils.errors import UserError, warn
from mtptrain.utils.files import file_sha256, read_json, read_sealed

REPEATED = {
    r"embed_tokens\.weight": "embed_tokens",
    r"lm_head\.weight|lm_heads\.\d+\.weight|shared_head\.head\.weight": "lm_head",
}
"""Name patterns of tensors in a head's file that repeat a tensor of the target, with its name in `FrozenParts`."""


@dataclass(frozen=True)
class RunHead:
    """A head that can draft, such as the one that a run evaluates and exports."""

    head: Head
    config: HeadConfig
    directory: Path  # from which the head was read
    sha256: str
    """Hash of the stored weights and of the calibration: it differs if either does."""
    is_trained: bool
    """Whether this run trained the head; otherwise it comes from `head.init_from`."""


def trained_or_initial_head(
    train_dir: Path, config: HeadConfig, target: TargetFiles, dtype: torch.dtype | None, device: torch.device
) -> RunHead:
    """Returns the best head that a run trained, its last one if none was measured, or that of `head.init_from`.

    A confidence is calibrated as validation found best. The dtype None keeps the stored one.
    """
    trained = best_or_last(train_dir)
    if config.init_from is not None and not (trained / "head.json").is_file():
        return initial_head(config, target, dtype, device)
    check_head_target(trained, target)
    depths = {"head.ttt_steps": stored_config(trained).ttt_steps}
    advice = f"set head.ttt_steps={depths['head.ttt_steps']}, or train again"
    refuse_different_facts(trained / "head.json", {"head.ttt_steps": config.ttt_steps}, depths, advice)
    return _opened_of_ours(trained, config, target, dtype, device)


def initial_head(config: HeadConfig, target: TargetFiles, dtype: torch.dtype | None, device: torch.device) -> RunHead:
    """Returns the head of `head.init_from`."""
    assert config.init_from is not None, "see check_config"
    return _opened(config.init_from, config, target, dtype, device)


def open_head(
    path: str, target: TargetFiles, dtype: torch.dtype | None, device: torch.device, kind: str | None = None
) -> RunHead:
    """Returns the head of a run, of an export or of others, with the settings that its files have.

    `path` is a `run_dir`, the directory of a head, or a hub name. `kind` is the head's name in `HEADS` if files do not
    say it: `native_mtp`, or `draft_model` for a language model.
    """
    directory = resolve_init(path, "head")
    if (directory / "train").is_dir():
        directory = best_or_last(directory / "train")
        stored_config(directory)  # refuses a run without a head
    if (directory / "head.json").is_file():
        return _opened_of_ours(directory, stored_config(directory), target, dtype, device)
    if kind is not None and kind not in HEAD_CONFIGS:
        raise UserError(f"kind: must be one of {', '.join(HEAD_CONFIGS)}, but is {kind!r}; correct it")
    config = HEAD_CONFIGS[kind or "mtp"](init_from=str(directory))
    if not isinstance(config, DraftModelConfig | NativeMtpConfig):
        config = _published_config(read_published(str(directory), target))
    return _opened(str(directory), config, target, dtype, device)


def _published_config(published: Published) -> HeadConfig:
    """Returns the settings of a published head. If its files leave its depths open, it drafts as many as asked for."""
    kind = HEADS[published.name].Config
    config = config_of(kind, {name: values[0] for name, values in published.settings.items()}, published.directory)
    is_open = kind.is_bound_to_depths and "ttt_steps" not in published.settings
    return replace(config, ttt_steps=MAX_DEPTHS) if is_open else config


def _opened_of_ours(
    directory: Path, config: HeadConfig, target: TargetFiles, dtype: torch.dtype | None, device: torch.device
) -> RunHead:
    """Returns a head that a run trained, for the target and the mode of its chat template."""
    mode = target.template_kwargs_json
    stored_mode = read_sealed(directory / "head.json", RESTORE).get("template_kwargs", mode)
    advice = f"set {override_of(stored_mode)}"
    refuse_different_facts(directory / "head.json", {"template_kwargs": mode}, {"template_kwargs": stored_mode}, advice)
    return _opened(str(directory), config, target, dtype, device, is_trained=True)


def _opened(
    path: str,
    config: HeadConfig,
    target: TargetFiles,
    dtype: torch.dtype | None,
    device: torch.device,
    is_trained: bool = False,
) -> RunHead:
    _refuse_other_target(Path(path), target)
    directory, head = load_head(path, config, target, dtype, device)
    sha256 = file_sha256(directory / WEIGHTS) if is_trained else weights_fingerprint(directory)
    if isinstance(head, Confident) and (calibration := stored_calibration(directory)) is not None:
        head.calibrate(*calibration)
        sha256 = hashlib.sha256(f"{sha256} {calibration}".encode()).hexdigest()
    return RunHead(head, config, directory, sha256, is_trained)


def _refuse_other_target(directory: Path, target: TargetFiles) -> None:
    """Refuse a head or an export of ours that was made for other weights than the target's."""
    if (directory / "head.json").is_file():
        check_head_target(directory, target)
    elif (record := directory / SERVING).is_file():
        expected, stored = {TARGET_WEIGHTS: target.weights_sha256}, read_json(record).get(TARGET_WEIGHTS)
        if stored is not None:  # exports of earlier versions do not say it
            refuse_different_facts(record, expected, {TARGET_WEIGHTS: stored}, "choose the head's own target")


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


def check_start(config: HeadConfig, target: TargetFiles) -> None:
    """Refuse a head of `head.init_from` that training would refuse, where both it and the target are on this disk."""
    if config.init_from is not None and Path(config.init_from).exists() and any(target.directory.glob("*.safetensors")):
        load_init(config.init_from, config, target)


def load_head(
    path: str, config: HeadConfig, target: TargetFiles, dtype: torch.dtype | None, device: torch.device
) -> tuple[Path, Head]:
    """Returns the directory of a head, and the head ready for inference, in the stored dtype if `dtype` is None."""
    directory, state = load_init(path, config, target)
    return directory, fill_head(build_head(config, target.config), state, dtype, device)


def load_init(path: str, config: HeadConfig, target: TargetFiles) -> tuple[Path, Tensors]:
    """Returns the directory of a published head or language model, and its weights as the `state_dict` of our head."""
    if isinstance(config, DraftModelConfig):
        published = read_draft_model(path, config, target)
    elif isinstance(config, NativeMtpConfig) and not (Path(path) / "head.json").is_file():
        published = read_native_mtp(path, target)
    else:
        published = read_published(path, target, config.ignored_keys)
    directory = published.directory
    check_settings(published, config, target.config)
    with torch.device("meta"):
        expected = build_head(config, target.config).state_dict()
    state = without_redundant_tensors(published, expected, target)
    if misfit := first_misfit(expected, state):  # a missing tensor would stay random
        name, wanted, found = misfit
        raise UserError(
            f"{directory}: {name} must be {wanted} for head {config.name} and this target, but is {found}; choose "
            "another head, or set target.path to the head's target"
        )
    weights = {name: tensor for name, tensor in state.items() if expected[name].is_floating_point()}
    check_values(directory, weights, "copy or download it again")
    check_draft_token_ids(state, published.tensors.get("t2d"), target.config.vocab_size, directory)
    return directory, state


def load_draft_model(path: str, target: TargetFiles, dtype: torch.dtype, device: torch.device) -> DraftModelHead:
    """Returns a published language model that drafts for the target, ready for inference. See `load_init`."""
    directory = (
        Path(path) if (Path(path) / "head.json").is_file() else resolve_target(path, setting="acceptance.draft_model")
    )
    _, head = load_head(str(directory), DraftModelConfig(init_from=str(directory)), target, dtype, device)
    assert isinstance(head, DraftModelHead)
    return head


def check_settings(published: Published, config: HeadConfig, target_config: PreTrainedConfig) -> None:
    """Refuse another kind of head than that of the config, or other settings, and name the arguments that match."""
    is_same_kind = published.name == config.name
    ours = effective_settings(config, target_config) if is_same_kind else vars(HEADS[published.name].Config())
    ours = {**ours, "name": config.name}
    theirs: Settings = {"name": [published.name]} | published.settings
    different = {name: values for name, values in theirs.items() if ours[name] not in values}
    if different:
        found = (
            f"{_setting(name)} ({' or '.join(map(str, values))} there, {ours[name]} here)"
            for name, values in different.items()
        )
        raise UserError(
            f"{published.directory}: the head's settings must be those of the config, but differ in "
            f"{', '.join(found)}; set {' '.join(_argument(name, values[0]) for name, values in different.items())}, or "
            "choose another head"
        )


def _setting(name: str) -> str:
    return "head" if name == "name" else f"head.{name}"


def _argument(name: str, value: object) -> str:
    """Returns a setting as a command-line argument."""
    text = f"{_setting(name)}={json.dumps(value, separators=(',', ':'))}".replace('"', "")
    return f"'+{text}'" if isinstance(value, dict) else text  # Hydra adds its keys, and a shell leaves its braces alone


def without_redundant_tensors(published: Published, expected: Tensors, target: TargetFiles) -> Tensors:
    """Returns a head's tensors without those that ours does not need.

    These are `t2d`, zero biases, which some engines need in the file, and copies of the target's embeddings and
    lm_head. A warning says if the copies differ.
    """
    state, repeated, directory = {}, {}, published.directory
    for name, tensor in published.tensors.items():
        part = next((part for pattern, part in REPEATED.items() if re.fullmatch(pattern, name)), None)
        if name in expected or (part is None and name != "t2d" and not name.endswith(".bias")):
            state[name] = tensor
        elif part is not None:
            repeated[name] = part
        elif name != "t2d" and tensor.any():
            raise UserError(
                f"{directory}: {name} must be zero, because the head has no such bias, but is not; choose another head"
            )
    parts = load_frozen_parts(target.directory) if repeated else None
    for name, part in repeated.items():
        ours = getattr(parts, part)
        if differing := num_differing_rows(published.tensors[name], ours):
            warn(
                f"{directory}: {name} should equal the target's, which is used, but differs in {differing:,} of "
                f"{len(ours):,} rows; the head may draft worse than published until it is trained"
            )
    return state
