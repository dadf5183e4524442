"""Settings that all heads share."""

from dataclasses import dataclass

from mtptrain.utils.settings import at_least


@dataclass
class HeadConfig:
    """Settings that all heads share."""

    name: str = ""
    ttt_steps: int = at_least(1, default=4)
    """Number of trained depths T: training drafts this many tokens from the head's own states, as serving does."""
    num_attention_heads: int | None = None
    """null takes the target's sizes, but changes the number of attention heads to get a head dim of 64 or 128."""
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    init_from: str | None = None
    """A published head, an own head (`run_dir/train/best`) or the MTP layer of a checkpoint to start from: a directory
    or a hub name; see `mtptrain.convert.warm_start`. null starts from random weights."""
    start_from_target: bool = False
    """Start from the target's last layer, set up to pass on the target's states. The loss falls faster at first."""
