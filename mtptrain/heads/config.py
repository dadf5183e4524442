"""Settings that heads share."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from mtptrain.utils.errors import UserError
from mtptrain.utils.setting_bounds import between, between_or_none

MAX_SIZE = 2**20
"""Upper bound of widths, such as the intermediate size. No published model comes near it."""
MAX_LAYERS = 256
"""Upper bound of the number of layers."""
MAX_DEPTHS = 64
"""Upper bound of `ttt_steps`. Published heads draft at most 16 tokens."""


@dataclass
class HeadConfig:
    """Settings that all heads share."""

    name: str = ""
    ttt_steps: int = between(1, MAX_DEPTHS, default=4)
    """Number of trained depths T: in training, each draft position drafts this many tokens. `dflash`, `dspark`
    and `dflash2` draft exactly T tokens in serving too; `peagle`, `medusa` and `hydra` draft at most T."""
    init_from: str | None = None
    """The head to start from, as a directory or a hub name: a published head, a head of another run
    (`run_dir/train/best`) or a checkpoint's MTP layer; see `mtptrain.convert.warm_start`. null starts from random
    weights, or as `start_from_target` says."""
    start_from_target: bool = False
    """Start from a copy of the target's last layer, with an input projection that passes the target's states on to it.
    The loss falls faster at first. `draft_model` copies more (see its settings). Heads `dflash`, `dspark`, `dflash2`,
    `hydra`, `medusa` and `native_mtp` do not support this."""


@dataclass
class LayerConfig(HeadConfig):
    """Settings that all heads with decoder layers share, except `draft_model` and `native_mtp`."""

    num_attention_heads: int | None = between_or_none(1, MAX_SIZE)
    """null takes the target's number if hidden size / number is then 64 or 128; otherwise hidden size / 128, or
    hidden size / 64 if 128 does not divide the hidden size."""
    num_key_value_heads: int | None = between_or_none(1, MAX_SIZE)
    """null takes the target's number, or one per attention head if that number does not divide the attention heads."""
    intermediate_size: int | None = between_or_none(1, MAX_SIZE)
    """null takes the target's (the largest, if its layers differ), or 4 x hidden size if it has none."""


ConfigT = TypeVar("ConfigT", bound=HeadConfig)


def config_of(kind: type[ConfigT], stored: Mapping[str, Any], path: Path) -> ConfigT:
    """Returns the settings of a head that `save_head` stored in the file `path`; settings added since have defaults.

    Raises:
        UserError: a stored setting is unknown.
    """
    unknown = sorted(stored.keys() - {field.name for field in fields(kind)})
    if unknown:
        raise UserError(
            f"{path}: must hold only settings of head {kind().name} that this version of mtptrain has, but has "
            f"{unknown[0]}={stored[unknown[0]]}; use the version that trained the head, or train again"
        )
    return kind(**stored)
