"""Estimates the disk, GPU memory and time of a run before anything is loaded. `planner.py` prints the plan.

Until mtptrain prompts has been run, upper bounds stand in for unknown numbers: every document has
`prompts.max_document_tokens` tokens, all supervised. The number of tokens is a guess (`UNKNOWN_TOKENS`) if
`prompts.max_train_tokens` sets no limit.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from mtptrain.config import Backend, PipelineConfig, PlannerConfig, StoreDtype
from mtptrain.convert.export_proof import proof_bytes
from mtptrain.convert.formats import warn_of_limits
from mtptrain.heads import HEADS
from mtptrain.hidden_states.extraction.vllm_streams import choose_backend
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES, bytes_per_token, check_store_dtype
from mtptrain.planning.costs import MicroBatch, StepCosts, TargetCosts, head_parameters, step_costs, target_costs
from mtptrain.planning.decoding_memory import draft_model_bytes, validation_bytes
from mtptrain.planning.workload import Workload, count_workload, estimate_steps, read_train_documents
from mtptrain.settings.precision import train_dtype
from mtptrain.target.families import read_target_config
from mtptrain.target.gguf import gguf_of
from mtptrain.target.hub import config_dir, weight_files
from mtptrain.target.loading import FITTING_SHARE
from mtptrain.training.flops import matmul_peak
from mtptrain.training.losses import LossSettings

ENGINE_SHARE = 0.9
"""Share of a GPU's memory for vLLM's weights and cache. vLLM uses 0.92 in total, including a batch's activations."""


@dataclass(frozen=True)
class Speed:
    """An estimate of a stage's time."""

    tokens_per_s: float
    """Tokens per second of all GPUs together."""
    seconds: float
    basis: str
    """Text that says what limits the speed, or that tokens/s were given."""


@dataclass(frozen=True)
class TrainMemory:
    """Bytes on each GPU during training."""

    zero_stage: int
    weights: int
    gradients: int
    optimizer: int
    """Two Adam moments, and fp32 master weights with bf16 or ZeRO."""
    frozen_parts: int
    """The target's embeddings, final norm and lm_head."""
    activations: int
    """Peak of forward, loss and backward over one micro-batch."""
    validation_target: int
    """The whole target, in `acceptance.dtype`; 0 if `train.validation_prompts` is 0."""
    validation: int
    """Peak of validation, which runs between steps, when no activations are alive; 0 without validation."""

    @property
    def state(self) -> int:
        """Bytes that stay allocated: everything but activations and the peak of validation."""
        return self.weights + self.gradients + self.optimizer + self.frozen_parts + self.validation_target


@dataclass(frozen=True)
class Plan:
    """The resources that a run needs."""

    workload: Workload
    bytes_per_token: dict[StoreDtype, int]
    store_bytes: dict[StoreDtype, int]
    free_bytes: int
    target: TargetCosts
    backend: Backend
    """The engine that runs the target in extraction: vllm or transformers."""
    target_bytes: int
    """Size of the target's weights as extraction loads them."""
    target_bytes_per_gpu: int
    states_in_flight_bytes: int
    """Hidden states in vLLM's KV cache, on each GPU; with backend transformers, those that vLLM would hold."""
    is_spread: bool
    """Whether accelerate spreads the target over all GPUs, which then take turns. Never true with backend vllm."""
    max_position_embeddings: int
    head_parameters: int
    memory: TrainMemory
    num_steps: int
    scratch_bytes_per_token: int
    """Disk space of vLLM's files in `hidden_states.scratch_dir`. They are deleted once their states are stored."""
    extraction_speed: Speed
    training_speed: Speed
    """Speed of training, over all epochs."""
    export_bytes: int
    """Host memory that the export needs to prove that the written head drafts the same tokens as the trained one."""
    draft_model_bytes: tuple[int, int] | None
    """Bytes that head `draft_model` takes in serving: its weights, and keys and values per token; None for others."""


def make_plan(config: PipelineConfig, free_bytes: int | None = None) -> Plan:
    """Returns the plan of a run.

    Args:
        config: the run's settings.
        free_bytes: free bytes on the disk of run_dir; looked up by default.

    Raises:
        UserError: the target does not exist, or mtptrain or the backend does not support the target's family, or the
            head does not fit the target.
    """
    # 1. Check that the settings fit the target.
    settings, planner = config.hidden_states, config.planner
    target_dir = config_dir(config.target.path, config.target.revision)
    target_config = read_target_config(target_dir)
    backend = choose_backend(settings.backend, target_config)
    HEADS[config.head.name].check_trainable(config.head, target_config)
    gguf = gguf_of(config.target.path, config.target.gguf)
    warn_of_limits(config.export.engine, config.head, target_config, gguf)
    captured = HEADS[config.head.name].resolve_capture_layers(config.head, target_config)
    check_store_dtype(settings.store_dtype, captured)
    # 2. Extraction: disk, memory and time.
    documents, target = read_train_documents(config), target_costs(target_config)
    workload = count_workload(config, documents)
    dtypes = [dtype for dtype in StoreDtype if captured or dtype is not StoreDtype.fp8_aux]
    stored_bytes = {dtype: bytes_per_token(target_config.hidden_size, len(captured), dtype) for dtype in dtypes}
    weights = target_weights_bytes(config, target_dir, target_config, target)
    per_gpu, is_spread = extraction_bytes(config, weights, backend)
    scratch = streams_bytes_per_token(config, target_config, captured) if backend is Backend.vllm else 0
    # 3. Training: memory and time.
    num_parameters = head_parameters(config.head, target_config)
    costs_by_length = {
        length: micro_batch_costs(config, target_config, length, workload)
        for length in {workload.longest_tokens, round(workload.mean_tokens)}
    }
    activations = costs_by_length[workload.longest_tokens].peak_bytes
    step_tokens = config.train.batch_tokens * config.train.micro_batches_per_step
    trained_tokens = config.train.max_steps * step_tokens or config.train.epochs * workload.tokens
    step_flops = costs_by_length[round(workload.mean_tokens)].flops
    return Plan(
        workload=workload,
        bytes_per_token=stored_bytes,
        store_bytes={
            dtype: size * workload.tokens + DOCUMENT_BYTES * workload.documents for dtype, size in stored_bytes.items()
        },
        free_bytes=free_disk(Path(config.run_dir)) if free_bytes is None else free_bytes,
        target=target,
        backend=backend,
        target_bytes=weights,
        target_bytes_per_gpu=per_gpu,
        states_in_flight_bytes=states_in_flight_bytes(config, target_config, captured, workload.longest_tokens),
        is_spread=is_spread,
        max_position_embeddings=target_config.max_position_embeddings,
        head_parameters=num_parameters,
        memory=train_memory(config, target_config, target, num_parameters, activations, workload.longest_tokens),
        num_steps=estimate_steps(config, documents, workload.tokens),
        scratch_bytes_per_token=scratch,
        extraction_speed=estimate(
            planner,
            workload.tokens,
            planner.hidden_states_tokens_per_s,
            target.flops_per_token(workload.mean_tokens),
            stored_bytes[settings.store_dtype] + scratch,
            planner.hidden_states_peak_share,
            1 if is_spread else planner.num_gpus,  # a spread target keeps only one GPU busy at a time
            getattr(torch, settings.dtype.value),
        ),
        training_speed=estimate(
            planner,
            trained_tokens,
            planner.train_tokens_per_s,
            step_flops / config.train.batch_tokens,
            stored_bytes[settings.store_dtype],
            planner.train_peak_share,
            planner.num_gpus,
            getattr(torch, train_dtype(config.deepspeed)),
        ),
        export_bytes=proof_bytes(
            target_config.vocab_size, target_config.hidden_size, num_parameters, _num_tables(target_config)
        ),
        draft_model_bytes=draft_model_bytes(config.head, target_config, getattr(torch, train_dtype(config.deepspeed))),
    )


def estimate(
    planner: PlannerConfig,
    tokens: int,
    given: float,
    flops: float,
    disk_bytes: float,
    share: float,
    gpus_at_work: int,
    dtype: torch.dtype,
) -> Speed:
    """Returns the estimate of a stage's time: the slower of matrix products and the disk, unless tokens/s are given.

    Args:
        planner: rates of the hardware.
        tokens: number of tokens that the stage processes.
        given: tokens/s; 0 to estimate them.
        flops: FLOPs of one token.
        disk_bytes: bytes of one token that are written to the disk or read from it.
        share: share of the peak FLOP/s that the stage reaches.
        gpus_at_work: number of GPUs that work at once.
        dtype: dtype of the matmuls.
    """
    if given:
        return Speed(given, tokens / given, "as given")
    peak, description = device_peak(planner, gpus_at_work, dtype)
    rate, basis = share * peak / flops, f"limited by {flops / 1e9:,.3g} GFLOP/token at {share:.0%} of {description}"
    disk_rate = planner.disk_gb_per_s * 1e9 / disk_bytes if planner.disk_gb_per_s else math.inf
    if disk_rate < rate:
        rate, basis = disk_rate, f"limited by a disk of {planner.disk_gb_per_s:g} GB/s"
    return Speed(rate, tokens / rate, basis)


def device_peak(planner: PlannerConfig, gpus_at_work: int, dtype: torch.dtype) -> tuple[float, str]:
    """Returns the total peak FLOP/s of the GPUs at work, and text that describes it.

    CPU ranks share one CPU, so its rate is not multiplied.
    """
    if planner.gpu_tflops:
        return gpus_at_work * planner.gpu_tflops * 1e12, f"{gpus_at_work} x {planner.gpu_tflops:g} TFLOP/s"
    if torch.cuda.is_available():
        peak, name = matmul_peak(torch.device("cuda"), dtype), torch.cuda.get_device_name()
        return gpus_at_work * peak, f"{gpus_at_work} x {peak / 1e12:.0f} TFLOP/s measured on {name}"
    peak = matmul_peak(torch.device("cpu"), dtype)
    return peak, f"{peak / 1e12:.3g} TFLOP/s measured on this CPU (set planner.gpu_tflops to plan for GPUs)"


def streams_bytes_per_token(config: PipelineConfig, target_config: PreTrainedConfig, captured: Sequence[int]) -> int:
    """Returns the bytes of a token's streams, the captured ones and the last, in the dtype of extraction.

    vLLM's worker writes each of them once to `hidden_states.scratch_dir`.
    """
    hidden_size: int = target_config.hidden_size
    num_streams = len({*captured, target_config.num_hidden_layers})
    return num_streams * hidden_size * _itemsize(config.hidden_states.dtype.value)


def free_disk(path: Path) -> int:
    """Returns the free bytes of the disk on which `path` is or will be."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def target_weights_bytes(
    config: PipelineConfig, target_dir: Path, target_config: PreTrainedConfig, target: TargetCosts
) -> int:
    """Returns the bytes of the target's weights in extraction, read from its files if they are local and quantised."""
    if getattr(target_config, "quantization_config", None) is not None and any(target_dir.glob("*.safetensors")):
        return sum(path.stat().st_size for path in weight_files(target_dir))
    return target.num_parameters * _itemsize(config.hidden_states.dtype.value)


def extraction_bytes(config: PipelineConfig, weights: int, backend: Backend) -> tuple[int, bool]:
    """Returns the bytes of the target's weights on each GPU, and whether accelerate spreads them over all GPUs."""
    if backend is Backend.vllm:
        return weights // config.hidden_states.tensor_parallel_size, False
    is_spread = weights > FITTING_SHARE * config.planner.gpu_memory_gb * 1e9 and config.planner.num_gpus > 1
    return weights // config.planner.num_gpus if is_spread else weights, is_spread


def states_in_flight_bytes(
    config: PipelineConfig, target_config: PreTrainedConfig, captured: Sequence[int], longest_tokens: int
) -> int:
    """Returns the bytes of hidden states in vLLM's cache on each GPU, without keys and values.

    The cache holds the states of the longest document and of two batches: one runs while the other is written. vLLM
    allocates a page in every layer for each block of states, but fills only one of them. Tensor parallelism does not
    divide states: every GPU holds all of them (`get_kv_cache_groups` in vLLM 0.32).
    """
    token_bytes: int = target_config.num_hidden_layers * streams_bytes_per_token(config, target_config, captured)
    return token_bytes * (2 * config.hidden_states.batch_tokens + longest_tokens)


def micro_batch_costs(
    config: PipelineConfig, target_config: PreTrainedConfig, document_tokens: int, workload: Workload
) -> StepCosts:
    """Returns the costs of one full micro-batch of documents of this length."""
    size = config.train.batch_tokens
    length = min(max(2, document_tokens), size)
    lengths, remainder = [length] * (size // length), size % length
    if remainder > 1:  # one token has no draft position
        lengths.append(remainder)
    micro_batch = MicroBatch(
        head=config.head,
        target_config=target_config,
        dtype=getattr(torch, train_dtype(config.deepspeed)),
        lengths=lengths,
        supervised_share=workload.supervised_tokens / max(1, workload.tokens),
        loss=LossSettings.of(config.train),
        activation_checkpointing=config.train.activation_checkpointing,
    )
    return step_costs(micro_batch)


def train_memory(
    config: PipelineConfig,
    target_config: PreTrainedConfig,
    target: TargetCosts,
    num_parameters: int,
    activations: int,
    longest_tokens: int,
) -> TrainMemory:
    """Returns the bytes on each GPU for a head with `num_parameters` parameters.

    ZeRO 1 shards the optimizer state over the GPUs, and ZeRO 2 also shards the gradients. fp32 without ZeRO has no
    master weights.
    """
    stage = int(config.deepspeed.get("zero_optimization", {}).get("stage", 0))
    width, num_gpus = getattr(torch, train_dtype(config.deepspeed)).itemsize, config.planner.num_gpus
    optimizer = num_parameters * (8 + (4 if width == 2 or stage else 0))
    validates = config.train.validation_prompts > 0
    return TrainMemory(
        zero_stage=stage,
        weights=num_parameters * width,
        gradients=num_parameters * width // (num_gpus if stage >= 2 else 1),
        optimizer=optimizer // (num_gpus if stage >= 1 else 1),
        frozen_parts=target_config.hidden_size * (target_config.vocab_size * _num_tables(target_config) + 1) * width,
        activations=activations,
        validation_target=target.num_parameters * _itemsize(config.acceptance.dtype.value) if validates else 0,
        validation=validation_bytes(config, target_config, longest_tokens) if validates else 0,
    )


def _num_tables(target_config: PreTrainedConfig) -> int:
    """Returns the number of tables [V, H]: one if lm_head is the embeddings."""
    return 1 if target_config.tie_word_embeddings else 2


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
