"""Settings of the planner."""

from dataclasses import dataclass

from mtptrain.utils.setting_bounds import at_least


@dataclass
class PlannerConfig:
    """The hardware that `mtptrain plan` plans for, and its speed."""

    num_gpus: int = at_least(1, default=8)
    """Number of GPUs of the run; a machine without a GPU counts as one."""
    gpu_memory_gb: float = at_least(1, default=80.0)
    """Memory of one GPU, or of the machine without a GPU, in units of 10**9 bytes."""
    gpu_tflops: float = at_least(0.0, default=0.0)
    """Dense bf16 peak of one GPU; 0 measures the peak of this machine's GPU or CPU. Above 0, `auto` precision in a plan
    is that of GPUs."""
    disk_gb_per_s: float = at_least(0.0, default=0.0)
    """Disk bandwidth, which limits extraction (it writes states) and training (it reads them); 0 ignores this limit."""
    responses_tokens_per_s: float = at_least(0.0, default=0.0)
    """Measured speed at which the target writes responses, on all GPUs together; 0 estimates it from the peak."""
    hidden_states_tokens_per_s: float = at_least(0.0, default=0.0)
    """Measured extraction speed of all GPUs together; 0 estimates it from the rates above, a share
    of the peak that is usual, and each token's FLOPs and disk bytes."""
    train_tokens_per_s: float = at_least(0.0, default=0.0)
    """Measured training speed of all GPUs together; 0 estimates it as that of extraction."""
