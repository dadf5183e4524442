"""Plans the disk, GPU memory and time of a run before anything is loaded, and warns of everything that will not fit.

    mtptrain plan recipe=llama3_1_8b_mtp

It reads the target's config.json and, if mtptrain prompts has been run, the documents that it wrote. It loads no
weights and writes nothing, except that a GGUF file is first dequantised into the cache. Until mtptrain prompts has been
run, it renders some rows of the files of `prompts.paths`. Without files, every document has
`prompts.max_document_tokens` tokens, all supervised, and there are `prompts.max_train_tokens`, or `UNKNOWN_TOKENS`.
"""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from mtptrain.cli.stages import is_served
from mtptrain.config import AnsweringEngine, Backend, PipelineConfig, PromptSource, StoreDtype
from mtptrain.data.prompt_files import Documents, Split, require_prompts
from mtptrain.data.text_files import text_directory
from mtptrain.decoding.export_proof import proof_bytes
from mtptrain.decoding.prompts import DEFAULT_PROMPTS
from mtptrain.heads import HEADS
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.hidden_states.extraction.backend import choose_backend
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES, bytes_per_token, check_store_dtype
from mtptrain.hidden_states.stream import OPEN_WINDOWS
from mtptrain.planning.costs import activation_bytes, cached_values, step_flops, target_costs, validation_bytes
from mtptrain.planning.expected import Expected, expected_documents, expected_texts
from mtptrain.settings.planning import PlannerConfig
from mtptrain.settings.precision import train_dtype, with_fp32_sums
from mtptrain.target.families import read_target_config, routed_experts
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import config_dir, tokenizer_dir, weight_files
from mtptrain.target.loading import FITTING_SHARE
from mtptrain.training.flops import matmul_peak
from mtptrain.training.losses import LossSettings
from mtptrain.training.trainer import is_compiled
from mtptrain.utils.cpu import has_amx
from mtptrain.utils.errors import UserError

ENGINE_SHARE = 0.9
"""Share of a GPU's memory for vLLM's weights and cache. vLLM uses 0.92 in total, including a batch's activations."""
UNKNOWN_TOKENS = 1_000_000
"""Number of tokens assumed if the recipe sets no limit and mtptrain prompts has not been run."""
RECOMPUTING = 1.15
"""FLOPs of a step with activation checkpointing, relative to one without: 1.01 (`medusa`) to 1.26 (`dflash`)."""
FEW_ROWS = 128
"""`train.loss_chunk_rows` that a plan advises: with fewer rows, matrix products take longer."""

EXTRACTION_SHARE, EXPERTS_SHARE, TRAIN_SHARE = 0.4, 0.15, 0.5
"""Shares of a GPU's published peak that extraction, that of a target with experts, whose small matrix products run far
below the peak, and training reach. An H100 reached 0.43 to 0.52 in training."""
CPU_SHARE, AMX_SHARE = 0.25, 0.07
"""Shares of a CPU's measured peak that either reaches, because as much time goes into elementwise operations, and that
training reaches in bf16 with AMX, where nearly all of it does (0.068 with a target of 6M parameters, 0.073 of 135M)."""
ENGINE_ANSWERS, OWN_ANSWERS = (0.2, "published for vLLM"), (0.003, "measured with our own loop")
ON_CPU = "measured with our own loop on a CPU with AMX, nothing else running"
CPU_ANSWERS = {torch.bfloat16: 0.016, torch.float32: 0.05}
"""Shares of the peak that writing responses reaches, and their origin. With a target of 135M parameters, our own loop
wrote 8,757 tokens/s on an H200, and on two cores with AMX 102 in bf16 (of 1.7 TFLOP/s), with 150 short
questions; vLLM is published with 12,500 of one of 8B on an H100 (morphllm.com, 2026)."""

COMPILING_S = 75.0
"""The time in which the first step is compiled: a minute or two on CPUs, at most 96 s on an H200."""
EXPORT_BYTES_PER_S = 15e6
"""Rate at which an export's `proof_bytes` are read and compared: 0.2 GB in 13 s beside other programs, for SmolLM2."""


class Plan:
    """The needs of a run, as rows of a table, with a warning and a remedy for everything that will not fit."""

    def __init__(self, config: PipelineConfig, free_bytes: int | None = None) -> None:
        """Plan a run. `free_bytes` on the disk of run_dir are looked up by default."""
        self.config, self.rows = config, dict[str, str]()
        self.warnings: list[str] = []
        target_dir, kind = config_dir(config.target.path, config.target.revision), HEADS[config.head.name]
        self.target_config = read_target_config(target_dir)
        self.backend = choose_backend(config.hidden_states.backend, self.target_config)
        kind.check_trainable(config.head, self.target_config)
        self.captured = kind.resolve_capture_layers(config.head, self.target_config)
        check_store_dtype(config.hidden_states.store_dtype, self.captured)
        self.target = target_costs(self.target_config)
        self.on_gpu = config.planner.gpu_tflops > 0 or torch.cuda.is_available()
        self.each, self.of_each = ("each GPU", "of each GPU") if self.on_gpu else ("each rank", "of memory")
        with torch.device("meta"):
            self.head = build_head(config.head, self.target_config)
        self._count_documents()
        self._plan_disk(_free_disk(Path(config.run_dir)) if free_bytes is None else free_bytes)
        self._plan_extraction(target_dir)
        self._plan_training()
        self._check_steps()
        self._plan_time()

    def _count_documents(self) -> None:
        """Count the training documents of stage 1, or else take the recipe's bounds."""
        path, prompts = self.config.stage_dir("prompts") / f"{Split.train}.safetensors", self.config.prompts
        self.num_documents = 0
        self.num_tokens = self.num_supervised = prompts.max_train_tokens or UNKNOWN_TOKENS
        self.longest_tokens = self.mean_tokens = prompts.max_document_tokens
        """The mean length is averaged over tokens, not documents. Attention costs are proportional to it."""
        self.least_tokens = 0
        """Tokens that there are in any case."""
        self.expected = None if path.exists() else self._expected()
        if self.expected is not None:
            self.num_documents, self.num_tokens, self.num_supervised = self.expected[:3]
            self.longest_tokens, self.mean_tokens, _, self.least_tokens = self.expected[3:]
            self.rows["documents"] = (
                f"about {self.num_documents:,} with at most {self.num_tokens:,} tokens, {self.num_supervised:,} "
                f"supervised, by prompts.paths; the longest has at most {self.longest_tokens:,}"
            )
            return
        if not path.exists():
            self.rows["documents"] = (
                f"{'at most' if prompts.max_train_tokens else 'an assumed'} {self.num_tokens:,} tokens in documents of "
                f"up to {self.longest_tokens:,}, all supervised (mtptrain prompts counts them, also on the hub)"
            )
            return
        documents = Documents.load(require_prompts(path.parent, path.name))
        self.num_documents, self.num_tokens = len(documents.lengths), len(documents.input_ids)
        self.least_tokens = self.num_tokens
        self.num_supervised, self.longest_tokens = int(documents.loss_mask.sum()), int(documents.lengths.max(initial=1))
        self.mean_tokens = round((documents.lengths.astype(np.float64) ** 2).sum() / max(1, self.num_tokens))
        self.rows["documents"] = (
            f"{self.num_documents:,} with {self.num_tokens:,} tokens, {self.num_supervised:,} supervised "
            f"({self.num_supervised / max(1, self.num_tokens):.0%}); the longest has {self.longest_tokens:,}"
        )

    def _expected(self) -> Expected | None:
        config = self.config
        if not config.prompts.paths or not all(text_directory(path).exists() for path in config.prompts.paths):
            return None
        if config.prompts.source is PromptSource.text_files:
            return expected_texts(config.prompts)
        directory = tokenizer_dir(config.target.path, config.target.revision)
        target = TargetFiles(directory, template_kwargs=config.prompts.template_kwargs)
        return expected_documents(config.prompts, config.responses.max_new_tokens, target.tokenizer)

    def _plan_disk(self, free_bytes: int) -> None:
        config, chosen = self.config, self.config.hidden_states.store_dtype
        hidden_size, num_captured = self.target_config.hidden_size, len(self.captured)
        dtypes = [chosen, *(each for each in StoreDtype if each is not chosen)]
        self.bytes_per_token = {
            dtype: bytes_per_token(hidden_size, num_captured, dtype)
            for dtype in dtypes
            if num_captured or dtype is not StoreDtype.fp8_aux
        }
        documents = DOCUMENT_BYTES * self.num_documents
        self.store_bytes = {dtype: size * self.num_tokens + documents for dtype, size in self.bytes_per_token.items()}
        """Size of the whole store with each dtype."""
        self.rows["hidden states"] = "; ".join(
            f"{dtype} {_gb(whole)} ({self.bytes_per_token[dtype]:,} bytes/token)"
            for dtype, whole in self.store_bytes.items()
        )
        window = OPEN_WINDOWS * config.train.stream_shards * config.hidden_states.shard_tokens
        streamed = min(self.store_bytes[chosen], window * self.bytes_per_token[chosen])
        if config.train.stream:
            self.rows["streamed"] = f"{_gb(streamed)} at a time"
        self.rows["free disk"] = f"{_gb(free_bytes)} on the disk of run_dir"
        needed = streamed if config.train.stream else self.store_bytes[chosen]
        # Shards that are written already take no more.
        free_bytes += sum(file.stat().st_size for file in config.stage_dir("hidden_states").glob("*.safetensors"))
        least = self.bytes_per_token[chosen] * (0 if config.train.stream else self.least_tokens)
        self.has_disk = least <= free_bytes
        """Whether the disk has room for the hidden states of those tokens that there are in any case."""
        if needed > free_bytes:
            in_fp8 = _gb(self.store_bytes[StoreDtype.fp8])
            self.warnings.append(
                f"run_dir: {_gb(needed)} must be free for the hidden states, but {config.run_dir} has "
                f"{_gb(free_bytes)}; set hidden_states.store_dtype=fp8 ({in_fp8} in all), train.stream=true "
                f"train.epochs=1 ({_gb(streamed)} at a time), or a lower prompts.max_train_tokens"
            )

    def check_disk(self) -> None:
        """Raises UserError if the hidden states cannot fit on the disk."""
        if not self.has_disk:
            raise UserError(next(warning for warning in self.warnings if warning.startswith("run_dir: ")))

    def _plan_extraction(self, target_dir: Path) -> None:
        settings, planner, is_vllm = self.config.hidden_states, self.config.planner, self.backend is Backend.vllm
        gpus, parallel = planner.num_gpus, settings.tensor_parallel_size
        available, for_engine = FITTING_SHARE * planner.gpu_memory_gb * 1e9, ENGINE_SHARE * planner.gpu_memory_gb * 1e9
        # 1. Weights as extraction loads them, of which those of local and quantised files have the size of the files.
        total = self.target.num_parameters * getattr(torch, settings.dtype).itemsize
        if hasattr(self.target_config, "quantization_config") and any(target_dir.glob("*.safetensors")):
            total = sum(path.stat().st_size for path in weight_files(target_dir))
        self.is_spread = not is_vllm and gpus > 1 and total > available
        """Whether accelerate spreads the target over all GPUs, which then take turns. Never true with backend vllm."""
        weights = total // (parallel if is_vllm else gpus if self.is_spread else 1)
        how = f", spread by accelerate over {gpus} in one process" if self.is_spread else ""
        how = f", tensor parallel over {parallel}" if is_vllm and parallel > 1 else how
        size = f"{self.target.num_parameters / 1e9:.2f} B parameters, {_gb(weights)} of weights"
        self.rows["target"] = f"{size} on {self.each}{how}, {self.backend}"
        if weights > available:
            self.warnings.append(
                f"target.path: weights must fit into {_gb(available)} {self.of_each} in extraction, but take "
                f"{_gb(weights)}; use at least {math.ceil(total / available)} GPUs in one machine"
            )
        # 2. States in flight: those of the longest document and of two batches, one of which is written. vLLM allocates
        # a page in every layer, and tensor parallelism does not divide them (`get_kv_cache_groups` in vLLM 0.32).
        num_streams = len({*self.captured, self.target_config.num_hidden_layers})  # written once each
        streams = num_streams * int(self.target_config.hidden_size) * getattr(torch, settings.dtype).itemsize
        self.written_bytes = streams if is_vllm else 0
        if not is_vllm:
            return
        num_in_flight = 2 * settings.batch_tokens + self.longest_tokens
        states = self.target_config.num_hidden_layers * streams * num_in_flight
        self.rows["scratch"] = f"{streams:,} bytes/token in vLLM's files, deleted after each shard"
        self.rows[f"extraction, {self.each}"] = (
            f"{_gb(weights + states)}: weights {_gb(weights)}, states in flight {_gb(states)}"
        )
        if weights <= available and weights + states > for_engine:
            self.warnings.append(
                f"hidden_states.batch_tokens: weights and states in flight must fit into {_gb(for_engine)} "
                f"{self.of_each} with vLLM, but take {_gb(weights + states)}, of which {_gb(states)} are states; lower "
                "it or prompts.max_document_tokens, or raise hidden_states.tensor_parallel_size, which divides weights "
                "alone"
            )
        if gpus % parallel:
            self.warnings.append(
                f"hidden_states.tensor_parallel_size: must divide the {gpus} GPUs of planner.num_gpus, but is "
                f"{parallel}; change one of them"
            )

    def _plan_training(self) -> None:
        """Plan the memory of training, and of validation between its steps, on each GPU, and the number of steps.

        ZeRO 1 shards the optimizer state over the GPUs, and ZeRO 2 also shards the gradients. fp32 without ZeRO has no
        master weights.
        """
        config, train, gpus = self.config, self.config.train, self.config.planner.num_gpus
        available = config.planner.gpu_memory_gb * 1e9
        deepspeed = with_fp32_sums(config.deepspeed, max(1, train.micro_batches_per_step // gpus))
        stage = int(deepspeed.get("zero_optimization", {}).get("stage", 0))
        self.dtype: torch.dtype = getattr(torch, train_dtype(deepspeed))
        vocab_size, hidden_size = self.target_config.vocab_size, self.target_config.hidden_size
        num_tables = 1 if self.target_config.tie_word_embeddings else 2
        width, num_parameters = self.dtype.itemsize, sum(parameter.numel() for parameter in self.head.parameters())
        optimizer = num_parameters * (8 + (4 if width == 2 or stage else 0))  # two Adam moments, master weights
        activations = self._activations(width)
        self.memory = {
            "weights": num_parameters * width,
            "gradients": num_parameters * (4 if "data_types" in deepspeed else width) // (gpus if stage >= 2 else 1),
            f"optimizer (ZeRO {stage})": optimizer // (gpus if stage >= 1 else 1),
            "frozen parts": hidden_size * (vocab_size * num_tables + 1) * width,
            "activations": activations,
        }
        """Bytes on each GPU in training, by what takes them."""
        training, target, validating, used = sum(self.memory.values()), 0, 0, ""
        if train.validation_prompts > 0:
            target = self.target.num_parameters * getattr(torch, config.acceptance.dtype).itemsize
            self.memory["target for validation"] = target
            validating = validation_bytes(config, self.target_config, self.longest_tokens)
        held = training + target - activations
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in self.memory.items())
        self.rows["head"] = f"{config.head.name}, {num_parameters / 1e6:,.1f} M parameters"
        self.rows[f"training, {self.each}"] = f"{_gb(training + target)}: {parts}"
        if validating:
            used = f"{_gb(validating)} for KV caches and the forward pass over the prompts"
            self.rows[f"validation, {self.each}"] = f"{_gb(held + validating)}, including {used}"
        per_step = train.batch_tokens * train.micro_batches_per_step
        self.num_steps = train.max_steps or train.epochs * math.ceil(self.num_tokens / per_step)
        """Number of training steps, if all of an epoch but the last are full."""
        self.rows["training"] = f"{self.num_steps:,} steps of {per_step:,} tokens"
        if isinstance(self.head, DraftModelHead):
            cached = f"{cached_values(self.head.config) * width:,} bytes of keys and values per token"
            self.rows["serving"] = f"{_gb(num_parameters * width)} of weights, and {cached}"
        self.export_bytes = proof_bytes(vocab_size, hidden_size, num_parameters, num_tables)
        self.rows["export"] = f"{_gb(self.export_bytes)} of host memory; the target's decoder layers are not loaded"
        must = f"must fit into {_gb(available)} {self.of_each}, but takes"
        if training > available:
            self.warnings.append(
                f"train.batch_tokens: training {must} {_gb(training)}, {_gb(activations)} of them for activations; "
                f"{self._what_saves(width)}lower it, prompts.max_document_tokens or head.ttt_steps"
            )
        elif training + target > available:
            self.warnings.append(
                "train.validation_prompts: for validation, the target must fit on every GPU next to training, but "
                f"takes {_gb(target)} in {config.acceptance.dtype}, and only {_gb(available - training)} are left; "
                "lower train.batch_tokens, or set train.validation_prompts=0 and run mtptrain choose-head afterwards"
            )
        elif held + validating > available:
            self.warnings.append(
                f"acceptance.batch_tokens: validation {must} {_gb(held + validating)}, {used}; lower it or "
                "acceptance.batch_size, or set train.validation_prompts=0"
            )

    def _activations(self, width: int, **changed: Any) -> int:
        """Returns the bytes of activations in training, for values of `width` bytes and with changed settings."""
        train = replace(self.config.train, **changed)
        self.head.activation_checkpointing = train.activation_checkpointing
        packing = self._micro_batch(self.longest_tokens)
        return activation_bytes(self.head, self.target_config, packing, width, LossSettings.of(train), self.on_gpu)

    def _what_saves(self, width: int) -> str:
        """Returns the settings that save at least a tenth of the activations, with how much, before other advice."""
        before = self._activations(width)
        after = {
            "train.activation_checkpointing=true": self._activations(width, activation_checkpointing=True),
            f"train.loss_chunk_rows={FEW_ROWS}": self._activations(width, loss_chunk_rows=FEW_ROWS),
        }
        found = [f"{name} (saves {_gb(before - left)})" for name, left in after.items() if left < 0.9 * before]
        return f"set {' or '.join(found)}, or " if found else ""

    def _check_steps(self) -> None:
        """Warn of settings of steps that do not fit the documents or the GPUs."""
        train, gpus, longest = self.config.train, self.config.planner.num_gpus, self.longest_tokens
        context, per_step = self.target_config.max_position_embeddings, train.micro_batches_per_step
        documents, remeasure = "prompts.max_document_tokens", " and run mtptrain prompts again"
        again = remeasure if self.num_documents and self.expected is None else ""
        checks = {
            f"{documents}: documents must have at most {context:,} tokens, the target's max_position_embeddings, but "
            f"have up to {longest:,}; lower it{again}": longest > context,
            f"train.batch_tokens: must be at least the {longest:,} tokens of the longest document, but is "
            f"{train.batch_tokens:,}; raise it, or lower {documents}{again}": longest > train.batch_tokens,
            f"train.micro_batches_per_step: must be a multiple of the {gpus} GPUs of planner.num_gpus, but is "
            f"{per_step}; set it to {-(-per_step // gpus) * gpus}": per_step % gpus > 0,
            f"train.micro_batches_per_step: must be at most the {self.num_documents:,} documents, but is {per_step}; "
            "lower it, or train on more documents": 0 < self.num_documents < per_step,
        }
        self.warnings += [warning for warning, is_wrong in checks.items() if is_wrong]

    def _micro_batch(self, document_tokens: int) -> Packing:
        """Returns a full micro-batch of documents of this length, which end with their responses.

        With `Head.drafts_per_document`, at most that many of their tokens, at equal distances, are draft positions.
        """
        size, most = self.config.train.batch_tokens, self.head.drafts_per_document
        length = min(max(2, document_tokens), size)
        count = max(1, round((length - 1) * self.num_supervised / max(1, self.num_tokens)))
        spans = [(document, length - 1 - count, count) for document in range(size // length)]
        lengths = [length] * len(spans)
        if most is None:
            return Packing.of_spans(lengths, spans, self.head.shared_window)
        points = [first + np.arange(min(count, most)) * count // min(count, most) for _, first, count in spans]
        return Packing.of_points(lengths, points, self.head.shared_window)

    def _plan_answers(self) -> None:
        """Plan the time in which the target writes the responses, of which each is as long as it may be."""
        config, planner = self.config, self.config.planner
        made = any((config.stage_dir(name) / "manifest.json").exists() for name in ("responses", "prompts"))
        if config.prompts.source is not PromptSource.responses or made:
            return
        tokens = self.num_supervised if self.expected is None else self.expected.answers
        flops, dtype = self.target.flops_per_token(self.mean_tokens), getattr(torch, config.responses.dtype)
        is_auto = self.on_gpu and config.responses.engine is AnsweringEngine.auto
        share, known = ENGINE_ANSWERS if is_served(config) or is_auto else OWN_ANSWERS
        if not self.on_gpu:
            share, known = CPU_ANSWERS[dtype], ON_CPU
        known += ", which auto takes if it is installed" * is_auto
        measured = planner.responses_tokens_per_s
        self._add_time("responses", tokens, measured, flops, share, planner.num_gpus, dtype, 1, most="at most ")
        self.rows["time of responses"] += "" if measured else f": {known}"

    def _plan_time(self) -> None:
        settings, train, planner = self.config.hidden_states, self.config.train, self.config.planner
        stored, packing = self.bytes_per_token[settings.store_dtype], self._micro_batch(self.mean_tokens)
        self.seconds: dict[str, float] = {}
        """Time of the stages that are planned."""
        self._plan_answers()
        # 1. Extraction. A spread target keeps only one GPU busy at a time.
        target_flops, at_work = self.target.flops_per_token(self.mean_tokens), 1 if self.is_spread else planner.num_gpus
        share = EXPERTS_SHARE if routed_experts(self.target_config)[1] > 1 else EXTRACTION_SHARE
        measured, dtype = planner.hidden_states_tokens_per_s, getattr(torch, settings.dtype)
        written = stored + self.written_bytes
        self._add_time("hidden-states", self.num_tokens, measured, target_flops, share, at_work, dtype, written)
        # 2. Training.
        of_step = step_flops(self.head, self.target_config, LossSettings.of(train)).of(packing)
        flops = of_step / len(packing.positions) * (RECOMPUTING if train.activation_checkpointing else 1)
        tokens = train.max_steps * train.batch_tokens * train.micro_batches_per_step or train.epochs * self.num_tokens
        measured, gpus = planner.train_tokens_per_s, planner.num_gpus
        is_amx = not self.on_gpu and self.dtype is torch.bfloat16 and has_amx()
        share = AMX_SHARE if is_amx else TRAIN_SHARE
        self._add_time("train", tokens, measured, flops, share, gpus, self.dtype, stored)
        if is_compiled(train.compile, torch.device("cuda" if self.on_gpu else "cpu"), self.num_steps):
            self.seconds["train"] += COMPILING_S
            self.rows["time of training"] += (
                f", after {duration(COMPILING_S)} of compiling, which train.compile=false leaves out"
            )
        # 3. Acceptance: the target answers once with each drafter, whose drafts cost what they save.
        acceptance, file = self.config.acceptance, self.config.acceptance.prompts_file
        own = DEFAULT_PROMPTS if file is None else Path(file).read_bytes().count(b"\n")
        drafters = 1 + len(acceptance.baselines) + 2 * len(acceptance.temperatures)
        tokens = (acceptance.num_prompts or own) * acceptance.max_new_tokens * drafters
        dtype = getattr(torch, acceptance.dtype)
        share, known = OWN_ANSWERS if self.on_gpu else (CPU_ANSWERS[dtype], ON_CPU)
        self._add_time("acceptance", tokens, 0.0, target_flops, share, gpus, dtype, 1, most="about ")
        self.rows["time of acceptance"] += f": {known}"
        # 4. Export.
        self.seconds["export"] = max(1.0, self.export_bytes / EXPORT_BYTES_PER_S)
        self.rows["time of export"] = duration(self.seconds["export"])
        self.rows["time of these"] = duration(sum(self.seconds.values()))

    def _add_time(self, stage: str, tokens: int, measured: float, *estimate: Any, most: str = "") -> None:
        """Plan the time of a stage by its measured tokens/s or, if they are 0, as `tokens_per_s` estimates them."""
        rate, text = (measured, "as given") if measured else tokens_per_s(self.config.planner, *estimate)
        name = {"hidden-states": "hidden states", "train": "training"}.get(stage, stage)
        self.seconds[stage] = tokens / rate
        self.rows[f"time of {name}"] = f"{most}{duration(tokens / rate)} at {rate:,.0f} tokens/s, {text}"


def tokens_per_s(
    planner: PlannerConfig, flops: float, share: float, gpus: int, dtype: torch.dtype, disk_bytes: int
) -> tuple[float, str]:
    """Returns the tokens/s of a stage, and what limits it.

    The slower of two counts: matmuls in `dtype` on `gpus` GPUs at a share of their peak, on a CPU at most `CPU_SHARE`,
    and the disk, which reads or writes `disk_bytes` for a token.
    """
    peak, where = planner.gpu_tflops * 1e12, f"{gpus} x {planner.gpu_tflops:g} TFLOP/s"
    if not peak and torch.cuda.is_available():
        peak = matmul_peak(torch.device("cuda"), dtype)
        where = f"{gpus} x {peak / 1e12:.0f} TFLOP/s measured on {torch.cuda.get_device_name()}"
    elif not peak:
        peak, gpus, share = matmul_peak(torch.device("cpu"), dtype), 1, min(share, CPU_SHARE)
        where = f"{peak / 1e12:.3g} TFLOP/s measured on this CPU (set planner.gpu_tflops to plan for GPUs)"
    rate, disk_rate = share * gpus * peak / flops, planner.disk_gb_per_s * 1e9 / disk_bytes
    if 0 < disk_rate < rate:
        return disk_rate, f"limited by a disk of {planner.disk_gb_per_s:g} GB/s"
    return rate, f"limited by {flops / 1e9:,.3g} GFLOP/token at {100 * share:g}% of {where}"


def print_plan(config: PipelineConfig) -> None:
    """Print the plan of a run, and warn about everything that will not fit."""
    plan = Plan(config)
    table = Table(title=f"plan of {config.run_dir}: memory and time are estimates", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path in the command is not cut off
    for row in plan.rows.items():
        table.add_row(*row)
    console = Console(markup=False)
    console.print(table)
    for warning in plan.warnings:
        console.print(f"WARNING {warning}", highlight=False, soft_wrap=True)
    plan.check_disk()


def _free_disk(path: Path) -> int:
    """Returns the free bytes of the disk on which `path` is or will be."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 99.5e9 else f"{num_bytes / 1e9:.3g} GB"
