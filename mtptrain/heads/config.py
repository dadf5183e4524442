"""Settings that every head has."""

from dataclasses import dataclass


@dataclass
class HeadConfig:
    """Settings that every head has."""

    name: str = ""
    ttt_steps: int = 4
    """Depths T that are trained: the head drafts this many tokens on its own states, as in serving."""
    num_attention_heads: int | None = None
    """Sizes are the target's unless set; heads so that the head dim is 64 or 128, else hidden size / 128 or / 64."""
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    init_from: str | None = None
    """Start from a published head, one's own (`run_dir/train/best`) or the MTP layer of a checkpoint: a directory or a hub name; see
    `mtptrain.convert.warm_start`. Random weights unless set."""
    start_from_target: bool = False
    """Start the layer as the target's last one, and let it pass the target's states on: trains several times faster at first."""
