"""Settings that all heads share."""

from dataclasses import dataclass


@dataclass
class HeadConfig:
    """Settings that all heads share."""

    name: str = ""
    ttt_steps: int = 4
    """Number of depths T to train: the head drafts this many tokens, reading its own states as it does in serving."""
    num_attention_heads: int | None = None
    """Sizes are the target's by default, but hidden size / 128 or / 64 heads if its head dim is not 64 or 128."""
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    init_from: str | None = None
    """Directory or hub name of the weights to start from: a published head, a trained one (`run_dir/train/best`) or a
    checkpoint with an MTP layer; see `mtptrain.convert.warm_start`. Random weights by default."""
    start_from_target: bool = False
    """Start the layer as a copy of the target's last one that passes the target's states through. Trains several times
    faster at first."""
