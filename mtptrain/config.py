"""The config of every program: schema, documentation and the only home of defaults.

`recipes/` holds the choices that differ. Hydra ends at the first line of each `main`: `config = load_config(cfg)` gives real
dataclasses, checked, and the functions below `main` take the values that they need.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from mtptrain.heads import HEADS
from mtptrain.heads.config import HeadConfig
from mtptrain.utils.distributed import TIMEOUT_HOURS


def _recipes_dir() -> str:
    """`recipes/` inside the installed package, or at the top of a checkout."""
    package_dir = Path(__file__).parent
    installed = package_dir / "recipes"
    return str(installed if installed.is_dir() else package_dir.parent / "recipes")


RECIPES = _recipes_dir()


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class StoreDtype(StrEnum):
    bfloat16 = "bfloat16"
    fp8 = "fp8"
    """e4m3, with an fp32 scale per token and layer: half the disk."""
    fp8_aux = "fp8_aux"
    """The captured layers as with fp8, the last layer, which gives the teacher's logits, in bfloat16."""


class Backend(StrEnum):
    transformers = "transformers"
    vllm = "vllm"


class PromptSource(StrEnum):
    text_files = "text_files"
    conversations = "conversations"
    responses = "responses"
    """The conversations of `prompts.paths` as data_prep.responses has answered them anew in this run_dir."""


class ConversationSchema(StrEnum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"


class Resume(StrEnum):
    auto = "auto"
    """From the newest complete checkpoint of the run, or from the start where there is none."""
    never = "never"
    """From the start; refuses to run over existing checkpoints."""


class Tracker(StrEnum):
    none = "none"
    wandb = "wandb"


class LossKind(StrEnum):
    kl = "kl"
    """Forward KL from the target's distribution to the head's."""
    lk = "lk"
    """w KL + (1 - w) TV with w = exp(-eta a), where a = sum min(p, q) is the draft's chance to be accepted (arXiv 2602.23881)."""
    ce = "ce"
    """Cross-entropy with the target's most likely token; one outside the head's vocabulary teaches nothing."""


class ExportEngine(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    transformers = "transformers"
    """`generate(use_mtp=True)`: the directory holds the target too."""


class ServingEngine(StrEnum):
    vllm = "vllm"


@dataclass
class TargetConfig:
    """The frozen language model."""

    path: str = MISSING
    """A local directory, a hub name, or `demo` for the target that ships with the package."""
    revision: str | None = None
    """Hub revision; ignored for a local directory."""


@dataclass
class PromptsConfig:
    """Stage 1: documents -> token ids and loss masks."""

    source: PromptSource = PromptSource.text_files
    paths: list[str] = field(default_factory=list)
    """`text_files`: directories, `standard_library` for that of the running Python. `conversations`: jsonl, json or parquet
    files, and names of data sets on the hub."""
    pattern: str = "*"
    """`text_files`: glob for file names."""
    exclude: list[str] = field(default_factory=list)
    """`text_files`: globs for paths inside their directory."""
    schema: ConversationSchema = ConversationSchema.auto
    split: str = "train"
    """`conversations` from the hub: the split of the data set."""
    max_document_tokens: int = 2048
    """Longer documents are cut into windows of this many tokens."""
    validation_fraction: float = 0.05
    """Of files, chosen by the hash of their name, or of conversations, chosen by the hash of their question (the normalised system
    prompt and first user turn), so that no held-out question is trained."""
    max_train_tokens: int = 0
    """Keep documents, in an order fixed by the same hashes, until this many tokens; 0 keeps all."""


@dataclass
class ResponsesConfig:
    """Optional, before stage 1: the assistant's turns of `prompts.paths`, generated anew by the target."""

    url: str | None = None
    """Base URL of a running OpenAI-compatible server (vLLM, SGLang) that serves the target: `http://localhost:8000/v1`; the target is
    run here with transformers unless given."""
    model: str | None = None
    """Name under which the server serves the target; its only model unless given."""
    concurrency: int = 64
    """Conversations in flight at the server at once."""
    batch_size: int = 8
    """Conversations generated together, with transformers."""
    dtype: Dtype = Dtype.bfloat16
    """Of the target, with transformers."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    max_new_tokens: int = 2048
    """Of one answer; one that is cut there ends its conversation."""
    max_retries: int = 3
    """Of a request that fails."""
    timeout_s: float = 600.0
    """Of a request."""
    api_key_variable: str = "OPENAI_API_KEY"
    """The environment variable with the server's key; unset, none is sent."""


@dataclass
class HiddenStatesConfig:
    """Stage 2: hidden states of the frozen target over the training prompts."""

    backend: Backend = Backend.transformers
    """What runs the target: transformers here, or vLLM in a process of its own with the Python of `serving.python`."""
    dtype: Dtype = Dtype.bfloat16
    """Of the target's weights and arithmetic."""
    store_dtype: StoreDtype = StoreDtype.bfloat16
    """Of the states on disk."""
    batch_tokens: int = 16_384
    """Tokens of one forward, of whole documents packed without padding."""
    shard_tokens: int = 262_144
    """A shard ends with the document that reaches this many tokens."""
    writer_threads: int = 4
    """CPU threads of each rank that check, encode and write states; the bytes on disk are the same for any number."""
    compile: bool = False
    """`transformers`: torch.compile the decoder layers."""
    num_parts: int = 1
    """Independent groups of processes that share the shards, as tasks of a Slurm array do; the last to end finishes the store."""
    part: int = 0
    """Which of them this is."""
    tensor_parallel_size: int = 1
    """`vllm`: GPUs of one engine; each rank starts an engine of its own."""
    kv_cache_memory_bytes: int | None = None
    """`vllm`: as the engine's own setting; its choice unless given."""
    scratch_dir: str | None = None
    """`vllm`: where the engine leaves states until a shard takes them, at most two shards per rank (`/dev/shm` saves disk traffic);
    inside the store unless given."""


@dataclass
class PlannerConfig:
    """What `plan=true` counts with."""

    num_gpus: int = 8
    gpu_memory_gb: float = 80.0
    gpu_tflops: float = 0.0
    """Dense bf16 peak of one GPU; 0 measures that of the device at hand."""
    gpu_memory_gb_per_s: float = 0.0
    """Memory bandwidth of one GPU; 0 leaves the bounds of memory traffic, PCIe and the CPU that writes states out of the times."""
    hidden_states_peak_share: float = 0.4
    """Of the peak, what extraction's matrix products reach, where its tokens/s are not given."""
    train_peak_share: float = 0.65
    """Likewise, the matrix products of the head's training."""
    disk_gb_per_s: float = 0.0
    """Of reading or writing the states, bounds both estimates; 0 leaves it out."""
    hidden_states_tokens_per_s: float = 0.0
    """Of all GPUs together, as measured; 0 estimates it from the target's FLOPs and the peak."""
    train_tokens_per_s: float = 0.0
    """Likewise, of the head's training."""


@dataclass
class TrainConfig:
    """Stage 3: the head in a DeepSpeed engine."""

    lr: float = 1e-3
    """Peak of a linear warm-up and a cosine."""
    min_lr_ratio: float = 0.1
    """Last learning rate over the peak."""
    warmup_steps: int = 50
    max_steps: int = 0
    """0: as many as `epochs` give."""
    epochs: int = 1
    batch_tokens: int = 16_384
    """Tokens of one packed micro-batch, of whole documents."""
    micro_batches_per_step: int = 1
    """Over all ranks: the world size must divide it; the quotient is accumulated."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    """0 does not clip."""
    ttt_loss_decay: float = 0.8
    """Weight of depth k in the loss is ttt_loss_decay ** k, then normalised to sum to one."""
    loss: LossKind = LossKind.kl
    lk_eta: float = 3.0
    """Of `loss=lk`: how fast the weight goes from KL to the chance of rejection while that falls."""
    feature_weight: float = 0.0
    """Of the smooth L1 distance between the head's states and the target's post-norm states, beside the loss (EAGLE-1's)."""
    stream: bool = False
    """Train while data_prep.hidden_states, started at the same time with the same settings, extracts: shards are deleted once they are
    trained on, so that the disk holds a few of them. One epoch."""
    stream_shards: int = 16
    """`stream`: shards of a window. Documents are shuffled within a window, and the disk holds three windows at most."""
    loss_chunk_rows: int = 1536
    """Rows of one [rows, V] block of logits: of all depths that the same positions teach."""
    compile: bool | None = None
    """torch.compile the elementwise work of the step, which takes about half a minute at the start; on GPUs only where it is null. The
    loss moves some 9 bytes per logit then, and 128 without."""
    activation_checkpointing: bool = False
    """Keep few activations for the backward pass and compute the rest again: long documents fit, at about a quarter more time."""
    profile: bool = False
    """Write a trace of three steps to `run_dir/train/trace_<rank>.json`, for chrome://tracing or Perfetto."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    validate_every: int = 0
    """Steps between measurements of acceptance; 0 measures at the end only. With `validation_prompts=0` the head of each such step,
    and of the last one, is kept in `run_dir/train/heads` instead, which takes as much disk each time as the export."""
    validation_prompts: int = 32
    """Held-out prompts, of a quarter of the held-out files or conversations, which reports leave out. 0 measures nothing during
    training, for a target that does not fit beside it: the last head is then the best, until `eval.choose_head` has measured those
    that `validate_every` keeps."""
    validation_new_tokens: int = 64
    save_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; the best one by acceptance is kept besides."""
    resume: Resume = Resume.auto
    tracker: Tracker = Tracker.wandb


class Baseline(StrEnum):
    """What is measured beside the head, in the same loop."""

    none = "none"
    """Plain decoding."""
    prompt_lookup = "prompt_lookup"
    """What followed the newest tokens earlier in the text."""
    model = "model"
    """A small language model, `acceptance.draft_model`."""
    tree = "tree"
    """The head, a tree of drafts (EAGLE-2) in place of a chain."""
    hybrid = "hybrid"
    """Prompt lookup where its match is long, the head elsewhere."""


@dataclass
class AcceptanceConfig:
    """Stage 4: draft and verify with the real inference path."""

    num_speculative_tokens: int = 3
    temperature: float = 0.0
    top_p: float = 1.0
    """At a temperature: of the likeliest tokens, as many as hold this share of the probability."""
    top_k: int = 0
    """At a temperature: so many of the likeliest tokens; 0 keeps all."""
    temperatures: list[float] = field(default_factory=list)
    """At which the head is measured too, with its likeliest tokens as drafts and with sampled ones."""
    sample_drafts: bool = False
    """At a temperature, sample the drafts too (vLLM's `draft_sample_method: probabilistic`); engines draft the most likely tokens
    unless told so."""
    max_new_tokens: int = 128
    dtype: Dtype = Dtype.float32
    num_prompts: int = 100
    """Held-out documents, in an order fixed by the hash of their ids."""
    prompt_tokens: int = 256
    """Tokens of a prompt cut from a document without turns; a conversation is cut before its first answer."""
    batch_size: int = 8
    """Prompts that are decoded together, at most."""
    batch_tokens: int = 32768
    """Tokens that are decoded together, at most: each prompt counts as the longest one of its batch, with `max_new_tokens`. A longer
    prompt is decoded alone. This bounds the memory of keys and values, in validation during training too."""
    seed: int = 0
    prompts_file: str | None = None
    """jsonl in place of the held-out documents: each line `id` and one of `input_ids`, `text`, `messages` and `turns` (what a user says
    in turn, answered by the target), and perhaps a `category`. Spec-Bench's `question.jsonl` is one."""
    baselines: list[Baseline] = field(default_factory=lambda: [Baseline.prompt_lookup])
    """What else is measured on the same prompts."""
    draft_model: str | None = None
    """Of `model`: a directory or a hub name, a model with the target's tokenizer."""
    tree_nodes: int = 32
    """Tokens of a tree, the likeliest of top_k + (K - 1) * top_k ** 2."""
    tree_top_k: int = 6
    """Branches of a tree that are continued at each depth, and tokens that are tried behind each."""
    hybrid_min_match: int = 4
    """Newest tokens that must occur earlier in the text for `hybrid` to draft what followed."""
    output_dir: str | None = None
    """Where report.json goes; `run_dir/acceptance` unless given."""


@dataclass
class ExportConfig:
    """Stage 5: the head as a directory that a serving engine loads."""

    engine: ExportEngine = ExportEngine.vllm
    dtype: Dtype | None = None
    """Of the written weights; as they were trained and measured unless given."""
    output_dir: str | None = None
    """`run_dir/export/<engine>` unless given."""


@dataclass
class ServingConfig:
    """The check of an export: the prompts of `acceptance`, drafted here and served by a real engine."""

    engine: ServingEngine = ServingEngine.vllm
    python: str | None = None
    """The Python that vLLM is installed for, for `hidden_states.backend=vllm` too; that of `.venv-vllm` in the checkout unless given."""
    url: str | None = None
    """Of a running server, asked in place of an engine of its own: `http://localhost:8000`."""
    tensor_parallel_size: int = 1
    """GPUs of an engine of its own."""
    head_dir: str | None = None
    """The exported head; `run_dir/export/<engine>` unless given."""
    output_dir: str | None = None
    """Where report.json goes; `run_dir/serving_check` unless given."""


@dataclass
class BenchConfig:
    """What eval/bench_*.py measure, all candidates in turns in one run."""

    target: str | None = None
    """`8b` for random weights in the dimensions of an 8B Llama, in bench_train `70b` too; the recipe's target, or in bench_train
    `hidden_sizes`, unless given."""
    documents: int = 64
    """Of random tokens, lengths log-normal."""
    median_tokens: int = 250
    max_tokens: int = 2000
    repeats: int = 3
    """Of each candidate; the fastest counts."""
    read_tokens: int = 32_768
    """Of the store that is read."""
    open_tokens: int = 1_000_000
    """Of the store that is opened."""
    hidden_sizes: list[int] = field(default_factory=lambda: [256, 512, 1024])
    """Of the targets that bench_train takes in turn; MLPs 2.75 times as wide, heads of 64, one key for four of them."""
    train_tokens: list[int] = field(default_factory=lambda: [1024, 4096])
    """Of the steps that bench_train measures with full supervision, in documents of 512."""
    vocab_size: int = 4096
    depths: int = 3
    peer_python: str = ".venv-peer/bin/python"
    """The Python that speculators is installed for; the comparison is left out where there is none."""
    prompt_sizes: list[int] = field(default_factory=lambda: [1024, 32_000])
    """Hidden size and vocabulary at which bench_train measures what a prompt token costs."""
    longest_tokens: int = 32_768
    """Of one document, in the curve of cost and memory against length."""
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32])
    """Prompts that bench_decode decodes together."""
    draft_depths: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    """K of the head in bench_decode."""
    decode_prompts: int = 32
    """That bench_decode measures, and as many others that it predicts from."""
    out: str | None = None
    """JSON file for the figures."""


class CheckSize(StrEnum):
    full = "full"
    tiny = "tiny"
    """In float32 and at sizes for a CPU, to see that the checks themselves run."""


@dataclass
class CheckConfig:
    """eval.gpu_check: what one machine with GPUs shows in a few minutes."""

    size: CheckSize = CheckSize.full


@dataclass
class StudyConfig:
    """eval.study: variants of a recipe, trained and measured beside each other; `recipes/study/` has some."""

    name: str = "study"
    """Folder below `run_dir/study/`."""
    common: list[str] = field(default_factory=list)
    """Overrides of all variants."""
    variants: dict[str, list[str]] = field(default_factory=dict)
    """Overrides of each, by its name."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    prompt_tokens: list[int] = field(default_factory=list)
    """Of the prompts that acceptance is measured on."""
    num_prompts: int = 80
    """Of each length."""
    num_ranks: int = 1
    """Processes of each program."""


@dataclass
class PipelineConfig:
    """One config for all programs, so that stages cannot disagree."""

    run_dir: str = MISSING
    seed: int = 0
    plan: bool = False
    """data_prep.hidden_states prints what the run will need, and does nothing."""
    verify: bool = False
    """data_prep.hidden_states compares every byte of the finished store with its hashes, and computes nothing."""
    distributed_timeout_hours: float = TIMEOUT_HOURS
    """How long ranks wait for each other in any process group before the run fails. A rank that ends with an error ends the run at
    once, whatever this is."""
    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadConfig = MISSING
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    hidden_states: HiddenStatesConfig = field(default_factory=HiddenStatesConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's own config file: `bf16`, `zero_optimization`, ...; what `train` sets is filled in by the trainer."""
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    study: StudyConfig = field(default_factory=StudyConfig)

    def stage_dir(self, stage: str) -> Path:
        return Path(self.run_dir) / stage


def register() -> None:
    """Put the schema and every head's `Config` where Hydra composes them."""
    store = ConfigStore.instance()
    store.store(name="pipeline_schema", node=PipelineConfig)
    for name, head in HEADS.items():
        store.store(group="head", name=name, node=head.Config)


def load_config(cfg: DictConfig) -> PipelineConfig:
    """The composed config as dataclasses.

    Raises:
        ValueError: a value is out of its range.
    """
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, PipelineConfig)
    _check(config)
    return config


def _check(config: PipelineConfig) -> None:
    at_least = {
        "distributed_timeout_hours": (config.distributed_timeout_hours, 1 / 3600),
        "prompts.max_document_tokens": (config.prompts.max_document_tokens, 4),
        "prompts.max_train_tokens": (config.prompts.max_train_tokens, 0),
        "hidden_states.batch_tokens": (config.hidden_states.batch_tokens, 1),
        "hidden_states.shard_tokens": (config.hidden_states.shard_tokens, 1),
        "hidden_states.writer_threads": (config.hidden_states.writer_threads, 1),
        "hidden_states.num_parts": (config.hidden_states.num_parts, 1),
        "hidden_states.part": (config.hidden_states.part, 0),
        "hidden_states.tensor_parallel_size": (config.hidden_states.tensor_parallel_size, 1),
        "serving.tensor_parallel_size": (config.serving.tensor_parallel_size, 1),
        "responses.concurrency": (config.responses.concurrency, 1),
        "responses.batch_size": (config.responses.batch_size, 1),
        "responses.temperature": (config.responses.temperature, 0.0),
        "responses.top_k": (config.responses.top_k, 0),
        "responses.max_new_tokens": (config.responses.max_new_tokens, 1),
        "responses.max_retries": (config.responses.max_retries, 0),
        "responses.timeout_s": (config.responses.timeout_s, 0.01),
        "bench.documents": (config.bench.documents, 1),
        "bench.median_tokens": (config.bench.median_tokens, 1),
        "bench.max_tokens": (config.bench.max_tokens, 1),
        "bench.repeats": (config.bench.repeats, 1),
        "bench.read_tokens": (config.bench.read_tokens, 8192),
        "bench.open_tokens": (config.bench.open_tokens, 8192),
        "bench.vocab_size": (config.bench.vocab_size, 2),
        "bench.depths": (config.bench.depths, 1),
        "bench.decode_prompts": (config.bench.decode_prompts, 1),
        "bench.longest_tokens": (config.bench.longest_tokens, 1024),
        "planner.num_gpus": (config.planner.num_gpus, 1),
        "planner.gpu_memory_gb": (config.planner.gpu_memory_gb, 1),
        "planner.gpu_tflops": (config.planner.gpu_tflops, 0.0),
        "planner.disk_gb_per_s": (config.planner.disk_gb_per_s, 0.0),
        "planner.gpu_memory_gb_per_s": (config.planner.gpu_memory_gb_per_s, 0.0),
        "planner.hidden_states_tokens_per_s": (config.planner.hidden_states_tokens_per_s, 0.0),
        "planner.train_tokens_per_s": (config.planner.train_tokens_per_s, 0.0),
        "head.ttt_steps": (config.head.ttt_steps, 1),
        "train.epochs": (config.train.epochs, 1),
        "train.max_steps": (config.train.max_steps, 0),
        "train.batch_tokens": (config.train.batch_tokens, 1),
        "train.micro_batches_per_step": (config.train.micro_batches_per_step, 1),
        "train.loss_chunk_rows": (config.train.loss_chunk_rows, 1),
        "train.stream_shards": (config.train.stream_shards, 1),
        "train.log_every": (config.train.log_every, 1),
        "train.keep_checkpoints": (config.train.keep_checkpoints, 1),
        "train.warmup_steps": (config.train.warmup_steps, 0),
        "train.min_lr_ratio": (config.train.min_lr_ratio, 0.0),
        "train.weight_decay": (config.train.weight_decay, 0.0),
        "train.max_grad_norm": (config.train.max_grad_norm, 0.0),
        "train.ttt_loss_decay": (config.train.ttt_loss_decay, 0.0),
        "train.lk_eta": (config.train.lk_eta, 0.0),
        "train.feature_weight": (config.train.feature_weight, 0.0),
        "train.validate_every": (config.train.validate_every, 0),
        "train.validation_prompts": (config.train.validation_prompts, 0),
        "train.validation_new_tokens": (config.train.validation_new_tokens, 1),
        "train.save_every": (config.train.save_every, 0),
        "train.lr": (config.train.lr, 0.0),
        "acceptance.num_speculative_tokens": (config.acceptance.num_speculative_tokens, 1),
        "acceptance.max_new_tokens": (config.acceptance.max_new_tokens, 1),
        "acceptance.temperature": (config.acceptance.temperature, 0.0),
        "acceptance.top_k": (config.acceptance.top_k, 0),
        "acceptance.num_prompts": (config.acceptance.num_prompts, 1),
        "acceptance.prompt_tokens": (config.acceptance.prompt_tokens, 2),
        "acceptance.batch_size": (config.acceptance.batch_size, 1),
        "acceptance.batch_tokens": (config.acceptance.batch_tokens, 1),
        "acceptance.tree_nodes": (config.acceptance.tree_nodes, 1),
        "acceptance.tree_top_k": (config.acceptance.tree_top_k, 1),
        "acceptance.hybrid_min_match": (config.acceptance.hybrid_min_match, 1),
        "study.num_prompts": (config.study.num_prompts, 1),
        "study.num_ranks": (config.study.num_ranks, 1),
    }
    for name, (value, least) in at_least.items():
        if not least <= value < math.inf:
            raise ValueError(
                f"{name}: must be a number of at least {least}, but is {value}; correct it in the recipe or on the command line"
            )
    if config.hidden_states.part >= config.hidden_states.num_parts:
        raise ValueError(
            f"hidden_states.part: must be below hidden_states.num_parts={config.hidden_states.num_parts}, but is "
            f"{config.hidden_states.part}; parts are counted from 0"
        )
    if len(config.train.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in config.train.betas):
        raise ValueError(
            f"train.betas: must be two numbers from 0 to below 1, but is {config.train.betas}; AdamW's are (0.9, 0.95)"
        )
    for name, sizes in {
        "bench.draft_depths": config.bench.draft_depths,
        "bench.batch_sizes": config.bench.batch_sizes,
    }.items():
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{name}: must hold at least one number, each at least 1, but is {sizes}; correct it")
    for name, share in {
        "acceptance.top_p": config.acceptance.top_p,
        "responses.top_p": config.responses.top_p,
    }.items():
        if not 0.0 < share <= 1.0:
            raise ValueError(f"{name}: must lie above 0 and at most at 1, but is {share}; 1 keeps all tokens")
    for name, share in {
        "planner.hidden_states_peak_share": config.planner.hidden_states_peak_share,
        "planner.train_peak_share": config.planner.train_peak_share,
    }.items():
        if not 0.0 < share <= 1.0:
            raise ValueError(f"{name}: must lie above 0 and at most at 1, but is {share}; 1 is the whole peak")
    if not 0.0 < config.prompts.validation_fraction < 1.0:
        raise ValueError(
            f"prompts.validation_fraction: must lie between 0 and 1, but is {config.prompts.validation_fraction}; "
            "both training and validation need documents"
        )
    _check_acceptance(config.acceptance)
    _check_stream(config)


def _check_stream(config: PipelineConfig) -> None:
    for name, value in {"train.epochs": config.train.epochs, "hidden_states.num_parts": config.hidden_states.num_parts}.items():
        if config.train.stream and value != 1:
            raise ValueError(
                f"{name}: must be 1 with train.stream=true, which reads every shard once and deletes it, but is {value}; set {name}=1, "
                "or train.stream=false"
            )


def _check_acceptance(settings: AcceptanceConfig) -> None:
    named = {f"{each:g}" for each in (settings.temperature, *settings.temperatures)}
    if len(named) <= len(settings.temperatures) or not all(0.01 <= each < math.inf for each in settings.temperatures):
        raise ValueError(
            f"acceptance.temperatures: must be different numbers of at least 0.01, but are {settings.temperatures} beside "
            f"acceptance.temperature={settings.temperature:g}, which is measured in any case; correct them"
        )
    if (settings.top_p < 1 or settings.top_k) and settings.temperature == 0 and not settings.temperatures:
        raise ValueError(
            f"acceptance.top_p: must be 1, and acceptance.top_k 0, where every temperature is 0, but are {settings.top_p} and "
            f"{settings.top_k}; leave them out, or set acceptance.temperature"
        )
    if len(set(settings.baselines)) < len(settings.baselines):
        raise ValueError(
            f"acceptance.baselines: must name each once, but is [{','.join(settings.baselines)}]; remove what stands twice"
        )
    if settings.sample_drafts and Baseline.tree in settings.baselines:
        raise ValueError(
            "acceptance.sample_drafts: must be false where acceptance.baselines names `tree`, but is true: a tree holds the likeliest "
            "tokens; leave one of them out"
        )
    if (settings.draft_model is not None) != (Baseline.model in settings.baselines):
        raise ValueError(
            f"acceptance.draft_model: must be set where acceptance.baselines names `model`, and only there, but is {settings.draft_model}; "
            'set both, for example acceptance.draft_model=DIR "acceptance.baselines=[model]"'
        )
    most = settings.tree_top_k + (settings.num_speculative_tokens - 1) * settings.tree_top_k**2
    if Baseline.tree in settings.baselines and settings.tree_nodes > most:
        raise ValueError(
            f"acceptance.tree_nodes: must be at most {most}, what {settings.num_speculative_tokens} depths of "
            f"acceptance.tree_top_k={settings.tree_top_k} hold, but is {settings.tree_nodes}; lower it or raise acceptance.tree_top_k"
        )


register()
