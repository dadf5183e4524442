"""What a run will need, counted before anything is loaded: disk, memory of the GPUs, time. mtptrain/planning/planner.py prints it.

Upper bounds stand where something is not known yet: before data_prep.prompts has been run, every document is as long as
`prompts.max_document_tokens` and every token is supervised.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from transformers import PreTrainedConfig

from mtptrain.config import Backend, PipelineConfig, StoreDtype
from mtptrain.convert.export_proof import proof_bytes
from mtptrain.data.prompt_files import Documents, Split
from mtptrain.heads import HEADS
from mtptrain.hidden_states.extraction.vllm_streams import check_vllm_can_extract
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES, bytes_per_token, check_store_dtype
from mtptrain.planning.costs import StepCosts, TargetCosts, head_parameters, step_costs, target_costs
from mtptrain.planning.speed import Speed, TokenCosts, estimate
from mtptrain.planning.validation_costs import validation_bytes
from mtptrain.planning.writing import writer_tokens_per_s
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import DEMO, HUB_ERRORS, resolve_target, unknown_target, weight_files
from mtptrain.training.step_packing import pack_documents, shuffled

FITTING_SHARE = 0.8
"""Of a GPU's memory, what the target's weights may take; beyond, `load_target` spreads them over several GPUs."""
ENGINE_SHARE = 0.9
"""Likewise, what the weights and the cache of vLLM may take; it takes 0.92 in all, activations of a batch included."""
UNKNOWN_TOKENS = 1_000_000
"""What is planned where nothing tells how many there will be."""


@dataclass(frozen=True)
class Workload:
    """The documents of stage 1, or bounds of them."""

    is_counted: bool
    """By data_prep.prompts; else bounds from the recipe."""
    documents: int
    """0 where it is not known."""
    tokens: int
    supervised_tokens: int
    longest_tokens: int
    mean_tokens: float
    """Length of the document that a token stands in, on the average over tokens: what attention costs."""


@dataclass(frozen=True)
class TrainMemory:
    """Bytes on each GPU in training."""

    zero_stage: int
    weights: int
    gradients: int
    optimizer: int
    """fp32 master weights and two Adam moments."""
    frozen_parts: int
    """The target's embeddings, final norm and lm_head."""
    activations: int
    """Peak of forward, loss and backward over one micro-batch."""
    validation_target: int
    """The whole target, in `acceptance.dtype`; 0 where `train.validation_prompts` is 0."""
    validation: int
    """Peak of validation, which runs between steps, when no activations are alive: keys, values and prompts; 0 likewise."""

    @property
    def state(self) -> int:
        """What stays: all but the activations and what validation takes for itself."""
        return self.weights + self.gradients + self.optimizer + self.frozen_parts + self.validation_target


@dataclass(frozen=True)
class Plan:
    """What a run will need."""

    workload: Workload
    bytes_per_token: dict[StoreDtype, int]
    store_bytes: dict[StoreDtype, int]
    free_bytes: int
    target: TargetCosts
    target_bytes: int
    """Of its weights in extraction."""
    target_bytes_per_gpu: int
    states_in_flight_bytes: int
    """On each GPU of an engine, with vLLM."""
    is_spread: bool
    """The target fits no single GPU: accelerate spreads it over all, and one works at a time."""
    max_position_embeddings: int
    head_parameters: int
    memory: TrainMemory
    num_steps: int
    scratch_bytes_per_token: int
    """That vLLM's files take on the disk of `hidden_states.scratch_dir` until they are in the store."""
    hidden_states: Speed
    train: Speed
    """Of all epochs."""
    export_bytes: int
    """Of the machine's memory, no GPU's: what the export takes to prove equal proposals."""


def make_plan(config: PipelineConfig, free_bytes: int | None = None) -> Plan:
    """Count what a run needs.

    Args:
        config: of the run.
        free_bytes: on the disk of run_dir; looked up unless given.

    Raises:
        FileNotFoundError: the target does not exist.
        ValueError: the target's family is not supported, or not by the backend, or the head does not fit the target.
    """
    settings = config.hidden_states
    target_dir = plan_target_dir(config.target.path, config.target.revision)
    target_config = read_target_config(target_dir)
    if config.hidden_states.backend is Backend.vllm:
        check_vllm_can_extract(target_config)
    captured = HEADS[config.head.name].layers_to_capture(config.head, target_config)
    workload, target = read_workload(config), target_costs(target_config)
    dtypes = [dtype for dtype in StoreDtype if captured or dtype is not StoreDtype.fp8_aux]
    check_store_dtype(config.hidden_states.store_dtype, captured)
    per_token = {dtype: bytes_per_token(target_config.hidden_size, len(captured), dtype) for dtype in dtypes}
    num_parameters = head_parameters(config.head, target_config)
    weights = target_weights_bytes(config, target_dir, target_config, target)
    per_gpu, is_spread = extraction_bytes(config, weights)
    stored_bytes = per_token[config.hidden_states.store_dtype]
    scratch_bytes = scratch_bytes_per_token(config, target_config, captured)
    trained_tokens = count_trained_tokens(config, workload.tokens)
    longest, mean = workload.longest_tokens, round(workload.mean_tokens)
    worst = micro_batch_costs(config, target_config, longest, workload)
    typical = worst if mean == longest else micro_batch_costs(config, target_config, mean, workload)
    return Plan(
        workload=workload,
        bytes_per_token=per_token,
        store_bytes={dtype: size * workload.tokens + DOCUMENT_BYTES * workload.documents for dtype, size in per_token.items()},
        free_bytes=free_disk(Path(config.run_dir)) if free_bytes is None else free_bytes,
        target=target,
        target_bytes=weights,
        target_bytes_per_gpu=per_gpu,
        states_in_flight_bytes=states_in_flight_bytes(config, target_config, captured, workload.longest_tokens),
        is_spread=is_spread,
        max_position_embeddings=target_config.max_position_embeddings,
        head_parameters=num_parameters,
        memory=train_memory(
            config,
            target_config,
            target,
            num_parameters,
            activations=worst.peak_bytes,
            validation=validation_bytes(config, target_config, longest) if config.train.validation_prompts else 0,
        ),
        num_steps=count_steps(config, trained_tokens),
        scratch_bytes_per_token=scratch_bytes,
        hidden_states=estimate(
            config.planner,
            workload.tokens,
            config.planner.hidden_states_tokens_per_s,
            TokenCosts(
                flops=target.flops_per_token(workload.mean_tokens),
                traffic_bytes=target.traffic_bytes_per_token,
                pcie_bytes=max(scratch_bytes, _itemsize(settings.dtype.value) * (1 + len(captured)) * target_config.hidden_size),
                disk_bytes=stored_bytes + scratch_bytes,
                writer_s=1
                / writer_tokens_per_s(target_config.hidden_size, len(captured), settings.store_dtype, settings.writer_threads),
            ),
            config.planner.hidden_states_peak_share,
            1 if is_spread else config.planner.num_gpus,
            1 if is_spread else config.planner.num_gpus // _gpus_per_rank(config),
            getattr(torch, config.hidden_states.dtype.value),
        ),
        train=estimate(
            config.planner,
            trained_tokens,
            config.planner.train_tokens_per_s,
            TokenCosts(
                flops=typical.flops / max(1, config.train.batch_tokens),
                traffic_bytes=typical.elementwise_bytes / max(1, config.train.batch_tokens),
                pcie_bytes=stored_bytes,
                disk_bytes=stored_bytes,
            ),
            config.planner.train_peak_share,
            config.planner.num_gpus,
            config.planner.num_gpus,
            _train_dtype(config),
        ),
        export_bytes=proof_bytes(
            target_config.vocab_size, target_config.hidden_size, num_parameters, 1 if target_config.tie_word_embeddings else 2
        ),
    )


def _gpus_per_rank(config: PipelineConfig) -> int:
    is_vllm = config.hidden_states.backend is Backend.vllm
    return min(config.planner.num_gpus, config.hidden_states.tensor_parallel_size) if is_vllm else 1


def scratch_bytes_per_token(config: PipelineConfig, target_config: PreTrainedConfig, captured: Sequence[int]) -> int:
    """What vLLM's worker writes to `hidden_states.scratch_dir` for each token: every stream once, as computed."""
    if config.hidden_states.backend is not Backend.vllm:
        return 0
    num_streams = len({*captured, target_config.num_hidden_layers})
    hidden_size: int = target_config.hidden_size
    return num_streams * hidden_size * _itemsize(config.hidden_states.dtype.value)


def plan_target_dir(path: str, revision: str | None) -> Path:
    """A directory with the target's config.json; of a hub name that file alone is fetched.

    Raises:
        FileNotFoundError: there is no such target.
    """
    if path == DEMO or Path(path).is_dir():
        return resolve_target(path, revision)
    try:
        return Path(hf_hub_download(path, "config.json", revision=revision)).parent
    except HUB_ERRORS as error:
        raise unknown_target(path, error, "download its config.json first") from error


def read_workload(config: PipelineConfig) -> Workload:
    """The documents of stage 1 where it has been run, else bounds from the recipe."""
    path = config.stage_dir("prompts") / f"{Split.train}.safetensors"
    if not path.exists():
        tokens, longest = config.prompts.max_train_tokens or UNKNOWN_TOKENS, config.prompts.max_document_tokens
        return Workload(False, 0, tokens, tokens, longest, float(longest))
    documents = Documents.load(path)
    lengths = documents.lengths.astype(np.float64)
    return Workload(
        is_counted=True,
        documents=len(documents),
        tokens=len(documents.input_ids),
        supervised_tokens=int(documents.loss_mask.sum()),
        longest_tokens=int(lengths.max(initial=1)),
        mean_tokens=float((lengths**2).sum() / max(1.0, lengths.sum())),
    )


def free_disk(path: Path) -> int:
    """Free bytes where `path` is, or will be."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def target_weights_bytes(config: PipelineConfig, target_dir: Path, target_config: PreTrainedConfig, target: TargetCosts) -> int:
    """As extraction loads them: those of the files where they are quantised and here, else every parameter in its dtype."""
    if getattr(target_config, "quantization_config", None) is not None and any(target_dir.glob("*.safetensors")):
        return sum(path.stat().st_size for path in weight_files(target_dir))
    return target.num_parameters * _itemsize(config.hidden_states.dtype.value)


def extraction_bytes(config: PipelineConfig, weights: int) -> tuple[int, bool]:
    """Bytes of the target's weights on a GPU, and whether accelerate spreads them over all."""
    if config.hidden_states.backend is Backend.vllm:
        return weights // config.hidden_states.tensor_parallel_size, False
    is_spread = weights > FITTING_SHARE * config.planner.gpu_memory_gb * 1e9 and config.planner.num_gpus > 1
    return weights // config.planner.num_gpus if is_spread else weights, is_spread


def states_in_flight_bytes(
    config: PipelineConfig, target_config: PreTrainedConfig, captured: Sequence[int], longest_tokens: int
) -> int:
    """Hidden states in vLLM's cache on each GPU: of two batches, one of which runs while the other is written, and the longest document.

    A block of states takes a page in every layer, of which states fill one, and every GPU of an engine holds whole states
    (`get_kv_cache_groups` in vLLM 0.32): tensor parallelism does not divide them. Keys and values come on top.
    """
    num_layers: int = target_config.num_hidden_layers
    num_streams = len({*captured, num_layers})
    token_bytes: int = num_layers * num_streams * target_config.hidden_size * _itemsize(config.hidden_states.dtype.value)
    return token_bytes * (2 * config.hidden_states.batch_tokens + longest_tokens)


def count_trained_tokens(config: PipelineConfig, tokens: int) -> int:
    step_tokens = config.train.batch_tokens * config.train.micro_batches_per_step
    return config.train.max_steps * step_tokens or config.train.epochs * tokens


def count_steps(config: PipelineConfig, trained_tokens: int) -> int:
    """Returns the number of steps: as training packs the documents where stage 1 has run, else as if every step were full."""
    train, path = config.train, config.stage_dir("prompts") / f"{Split.train}.safetensors"
    if train.max_steps:
        return train.max_steps
    lengths = Documents.load(path).lengths if path.exists() else np.zeros(0, np.int64)
    if not 0 < lengths.max(initial=0) <= train.batch_tokens:
        return trained_tokens // (train.batch_tokens * train.micro_batches_per_step)
    costs = lengths.astype(np.float64)
    return train.epochs * len(
        pack_documents(
            lengths, costs, train.batch_tokens, train.micro_batches_per_step, shuffled(len(lengths), config.seed, epoch=0)
        )
    )


def micro_batch_costs(
    config: PipelineConfig, target_config: PreTrainedConfig, document_tokens: int, workload: Workload
) -> StepCosts:
    """Of one full micro-batch of documents of this length."""
    size = config.train.batch_tokens
    length = max(1, min(document_tokens, size))
    lengths = [length] * (size // length) + [size % length] * (size % length > 0)
    share = workload.supervised_tokens / max(1, workload.tokens)
    chunk_rows, dtype, compile_step = config.train.loss_chunk_rows, _train_dtype(config), config.train.compile
    is_compiled = dtype is torch.bfloat16 if compile_step is None else compile_step
    return step_costs(
        config.head, target_config, dtype, lengths, share, chunk_rows, config.train.activation_checkpointing, is_compiled
    )


def train_memory(
    config: PipelineConfig,
    target_config: PreTrainedConfig,
    target: TargetCosts,
    num_parameters: int,
    activations: int,
    validation: int,
) -> TrainMemory:
    """Bytes on each GPU, of a head with so many parameters.

    ZeRO 1 shares out the optimizer's state over the GPUs, 2 the gradients too; plain fp32 without ZeRO has no master weights.
    """
    stage = int(config.deepspeed.get("zero_optimization", {}).get("stage", 0))
    width, num_gpus = _train_dtype(config).itemsize, config.planner.num_gpus
    state = num_parameters * (8 + (4 if width == 2 or stage else 0))
    tables = 1 if target_config.tie_word_embeddings else 2
    return TrainMemory(
        zero_stage=stage,
        weights=num_parameters * width,
        gradients=num_parameters * width // (num_gpus if stage >= 2 else 1),
        optimizer=state // (num_gpus if stage >= 1 else 1),
        frozen_parts=target_config.hidden_size * (target_config.vocab_size * tables + 1) * width,
        activations=activations,
        validation_target=target.num_parameters * _itemsize(config.acceptance.dtype.value)
        if config.train.validation_prompts
        else 0,
        validation=validation,
    )


def _train_dtype(config: PipelineConfig) -> torch.dtype:
    return torch.bfloat16 if config.deepspeed.get("bf16", {}).get("enabled") else torch.float32


def _itemsize(dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return itemsize
