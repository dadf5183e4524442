"""Settings of training."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mtptrain.settings.loss import LossPart
from mtptrain.utils.setting_bounds import at_least, share


class OptimizerKind(StrEnum):
    adamw = "adamw"
    muon = "muon"
    """Muon for the matrices of the head's layers, AdamW for everything else."""


class Tracker(StrEnum):
    none = "none"
    wandb = "wandb"


@dataclass
class TrainConfig:
    """Settings of stage 3, which trains the head in a DeepSpeed engine."""

    optimizer: OptimizerKind = OptimizerKind.adamw
    """`muon` is for the matrices of the head's layers, and AdamW for everything else."""
    lr: float = at_least(0.0, default=1e-3)
    """Peak learning rate, of either optimizer. The schedule is linear warm-up, then cosine decay."""
    min_lr_ratio: float = at_least(0.0, default=0.1)
    """Final learning rate divided by the peak."""
    warmup_steps: int = at_least(0, default=50)
    """The most steps over which the rate rises; a short run has fewer, as `warmup_share` says."""
    warmup_share: float = share(default=0.1, hint="1 leaves all to warmup_steps")
    """The largest share of a run's steps that is warm-up. A run of fewer than 100 steps has ten such steps, but at most
    half of it."""
    max_steps: int = at_least(0, default=0)
    """Number of steps; 0 trains for `epochs` epochs."""
    epochs: int = at_least(1, default=1)
    """Number of passes over the training documents."""
    batch_tokens: int = at_least(2, default=16_384)
    """Maximum number of tokens in one packed micro-batch of whole documents."""
    micro_batches_per_step: int = at_least(1, default=1)
    """Number of micro-batches per step over all ranks, a multiple of the world size. Each rank runs an equal share."""
    weight_decay: float = at_least(0.0, default=0.0)
    """Share of the weights that is subtracted, times the learning rate, at each step."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the averages of gradients and of their squares."""
    max_grad_norm: float = at_least(0.0, default=1.0)
    """0 disables clipping."""
    ttt_loss_decay: float = at_least(0.0, default=0.8)
    """The loss weight of depth k is ttt_loss_decay ** k; the weights are normalised to sum to one."""
    loss: Any = LossPart.kl.value
    """The name of a `LossPart`, or a mix that gives parts their weights, as in `train.loss={ce:0.1,tv:0.9}`."""
    feature_weight: float = at_least(0.0, default=0.0)
    """Weight of the part `features` of the loss, in addition to the parts that `loss` names."""
    loss_chunk_rows: int = at_least(0, default=0)
    """Maximum number of rows in one block of logits, a row for each depth of a draft position. 0 chooses 1,536, or
    fewer if the vocabulary is so large that a block would not fit in memory."""
    stream: bool = False
    """Train on shards while mtptrain hidden-states, started at the same time with the same settings, extracts them.
    Shards are deleted after use. Only one epoch is possible."""
    stream_shards: int = at_least(1, default=16)
    """With `stream`: number of shards per window. Documents are shuffled within a window. At most three windows are on
    disk."""
    compile: bool | None = None
    """Use torch.compile for the elementwise operations of the step. Compiling takes one or two minutes at the start.
    null compiles on GPUs, and on a CPU runs of at least 100 steps. Computing the loss reads and writes about 9 bytes of
    memory per logit with compilation, and 128 without."""
    activation_checkpointing: bool = False
    """Recompute most activations in the backward pass: longer documents fit, but steps take about a quarter longer."""
    profile: bool = False
    """Write a trace of the sixth to the eighth step of each start to `run_dir/train/trace_<rank>.json`, for
    chrome://tracing or Perfetto."""
    log_every: int = at_least(1, default=10)
    """Number of steps between lines of metrics.jsonl. A step that is validated or saved gets a line too."""
    validate_every: int = at_least(0, default=0)
    """Number of steps between measurements of acceptance; 0 measures at the end only. With `validation_prompts=0`
    nothing is measured; a value above 0 then keeps the heads of these steps and of the last step in
    `run_dir/train/heads`, where each takes as much disk space as an export."""
    validation_prompts: int = at_least(0, default=32)
    """Maximum number of prompts to measure acceptance on. They come from about a quarter of the held-out files or
    questions; `mtptrain acceptance` measures on the others. 0 measures nothing during training, for a target that does
    not fit in memory together with the head. Acceptance and export then take the last head, or the best of those
    that `validate_every` keeps once `mtptrain choose-head` has measured them."""
    validation_new_tokens: int = at_least(1, default=64)
    """Maximum length of an answer in tokens, in validation."""
    save_every: int = at_least(0, default=0)
    """Number of steps between checkpoints; 0 saves only at the end and when a signal stops the run. With `stream`, a
    checkpoint also follows the last step of each window."""
    keep_checkpoints: int = at_least(1, default=2)
    """Number of newest checkpoints to keep; the best head by acceptance is kept separately."""
    tracker: Tracker = Tracker.wandb
    """Where metrics go besides metrics.jsonl. wandb is offline unless it is set up."""
