"""Settings of acceptance, export and serving."""

import math
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from huggingface_hub import get_token

from mtptrain.settings.data import Dtype
from mtptrain.utils.errors import UserError
from mtptrain.utils.masking import hide_passwords
from mtptrain.utils.setting_bounds import at_least, between, directory_path, each_at_least, share


class Baseline(StrEnum):
    """A decoding method that is measured on the same prompts as the head."""

    none = "none"
    """Plain decoding."""
    prompt_lookup = "prompt_lookup"
    """Drafts the tokens that followed an earlier occurrence of the newest tokens."""
    model = "model"
    """A small language model, `acceptance.draft_model`."""
    tree = "tree"
    """The head with a tree of drafts (EAGLE-2) instead of a chain."""
    hybrid = "hybrid"
    """Prompt lookup where its match is long, otherwise the head."""
    initial = "initial"
    """The head of `head.init_from`, from which training started."""


class ExportEngine(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    llama_cpp = "llama_cpp"
    """A GGUF file for `llama-server`."""
    tensorrt_llm = "tensorrt_llm"
    openvino = "openvino"
    """A directory that optimum-intel converts for OpenVINO GenAI."""
    mlx = "mlx"
    """For Macs: mlx-lm or mlx-vlm, as the head needs."""
    transformers = "transformers"
    """`generate(use_mtp=True)`: the directory includes the target."""


class ServingEngine(StrEnum):
    vllm = "vllm"
    llama_cpp = "llama_cpp"
    openvino = "openvino"
    mlx = "mlx"


@dataclass
class AcceptanceConfig:
    """Stage 4: measure acceptance by drafting and verifying as in serving."""

    num_speculative_tokens: int = at_least(1, default=3)
    """Number of tokens K that are drafted in a round."""
    temperature: float = at_least(0.0, default=0.0)
    """0 decodes greedily."""
    top_p: float = share(default=1.0, hint="1 keeps all tokens")
    """At a temperature above 0: sample from the most likely tokens that together have this probability."""
    top_k: int = at_least(0, default=0)
    """At a temperature above 0: sample from this many most likely tokens; 0 keeps all."""
    temperatures: list[float] = field(default_factory=list)
    """Further temperatures, each measured with greedy drafts and with sampled drafts."""
    sample_drafts: bool = False
    """Sample drafts too if temperature is above 0, as the engine of `export.engine` does with an option."""
    max_new_tokens: int = at_least(1, default=128)
    """Maximum length of an answer in tokens."""
    dtype: Dtype = Dtype.auto
    """Dtype of target and head, also in validation. `auto` is bfloat16 on a GPU, and float32 on a CPU, where all
    counters then equal the engine's."""
    num_prompts: int | None = at_least(1, default=None)
    """Maximum number of prompts, chosen by the hash of their ids, so that they are of all kinds. null is 100 prompts
    from held-out documents, or a whole `prompts_file`."""
    prompt_tokens: int = at_least(2, default=256)
    """Length of a prompt cut from a document without turns. A conversation is cut before its first assistant turn."""
    batch_size: int = at_least(1, default=8)
    """Maximum number of prompts decoded together."""
    batch_tokens: int = at_least(1, default=32768)
    """Maximum number of tokens decoded together. Each prompt counts as the longest prompt of its batch plus
    `max_new_tokens`; a prompt that exceeds the limit is decoded alone. This limits the memory of keys and values, also
    in validation during training."""
    seed: int = between(0, 2**63 - 1, default=0)
    """Seed of what is sampled."""
    prompts_file: str | None = None
    """jsonl file to use instead of the held-out documents, such as Spec-Bench's `question.jsonl`. Each line has `id` or
    `question_id`; exactly one of `input_ids`, `text`, `messages` or `turns` (consecutive user turns, each answered by
    the target); and optionally `category`. `prompts.metadata` and `prompts.roles` apply to this file too."""
    baselines: list[Baseline] = field(default_factory=lambda: [Baseline.prompt_lookup])
    """Methods to compare the head with on the same prompts."""
    draft_model: str | None = None
    """Baseline `model`: a directory or hub name of a model with the target's tokenizer."""
    tree_nodes: int = at_least(1, default=32)
    """Baseline `tree`: number of tokens in a tree, the most likely of k + (K - 1) * k ** 2 candidates, where k is
    `tree_top_k`."""
    tree_top_k: int = at_least(1, default=6)
    """Baseline `tree`: number of branches that are extended at each depth, and number of candidates per branch."""
    confidence_thresholds: list[float] = field(default_factory=list)
    """Head `dspark`: further rows, in each of which a draft ends before the first token whose confidence is below the
    threshold, as llama.cpp's `--spec-draft-p-min` does."""
    output_dir: str | None = directory_path(default=None)
    """Directory of report.json; null is `run_dir/acceptance`."""

    @property
    def limits(self) -> dict[str, Any]:
        """The arguments of `generate_in_batches` that say how much is decoded, and how much together."""
        names = ("num_speculative_tokens", "max_new_tokens", "batch_size", "batch_tokens")
        return {name: getattr(self, name) for name in names}


def check_acceptance(settings: AcceptanceConfig) -> None:
    """Raises UserError for settings that contradict each other."""
    names = [f"{each:g}" for each in (settings.temperature, *settings.temperatures)]  # as the report names its rows
    if len(set(names)) < len(names) or not all(0.01 <= each < math.inf for each in settings.temperatures):
        raise UserError(
            "acceptance.temperatures: must be finite numbers of at least 0.01 that differ from each other and from "
            f"acceptance.temperature={settings.temperature:g}, which is always measured, but are "
            f"{settings.temperatures}; correct them"
        )
    thresholds = settings.confidence_thresholds
    names = [f"{each:g}" for each in thresholds]
    if len(set(names)) < len(names) or not all(0 < each < 1 for each in thresholds):
        raise UserError(
            "acceptance.confidence_thresholds: must be different numbers above 0 and below 1, but are "
            f"{thresholds}; correct them"
        )
    if (settings.top_p < 1 or settings.top_k) and settings.temperature == 0 and not settings.temperatures:
        raise UserError(
            "acceptance.top_p: must be 1, and acceptance.top_k 0, if every temperature is 0, but are "
            f"{settings.top_p} and {settings.top_k}; leave them out, or set acceptance.temperature"
        )
    if settings.sample_drafts and Baseline.tree in settings.baselines:
        raise UserError(
            "acceptance.sample_drafts: must be false if acceptance.baselines names `tree`, but is true: a tree "
            "holds the most likely tokens; drop `tree`, or set acceptance.sample_drafts=false"
        )
    if settings.sample_drafts and settings.temperature == 0:
        raise UserError(
            "acceptance.sample_drafts: must be false at acceptance.temperature=0, where a draft is the most likely "
            "token, but is true; leave it out, or set acceptance.temperature"
        )
    if (settings.draft_model is not None) != (Baseline.model in settings.baselines):
        raise UserError(
            "acceptance.draft_model: must be set if and only if acceptance.baselines names `model`, but is "
            f'{settings.draft_model}; set both, for example acceptance.draft_model=DIR "acceptance.baselines=[model]"'
        )
    most = settings.tree_top_k + (settings.num_speculative_tokens - 1) * settings.tree_top_k**2
    if Baseline.tree in settings.baselines and settings.tree_nodes > most:
        raise UserError(
            f"acceptance.tree_nodes: must be at most {most}, the candidates of {settings.num_speculative_tokens} "
            f"depths with acceptance.tree_top_k={settings.tree_top_k}, but is {settings.tree_nodes}; lower it or raise "
            "acceptance.tree_top_k"
        )


class ExportDtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    q8_0 = "q8_0"
    """8 bits in blocks of 32, for llama.cpp. Vectors stay in float32."""


@dataclass
class ExportConfig:
    """Stage 5: write the head to a directory that a serving engine loads."""

    engine: ExportEngine = ExportEngine.vllm
    """The engine that will serve the head."""
    dtype: ExportDtype = ExportDtype.auto
    """Dtype of the written weights; `auto` keeps the dtype in which training saved them."""
    output_dir: str | None = directory_path(default=None)
    """null is `run_dir/export/<engine>`."""
    hub: str | None = None
    """Repository on the Hugging Face Hub to upload the export to, as USER/NAME. It is made if it does not exist."""
    only_if_better: bool = False
    """Export only a head of which more is accepted than of the head of `head.init_from`, on the same prompts."""


def check_export(settings: ExportConfig) -> None:
    """Raises UserError for settings that contradict each other."""
    if settings.dtype is ExportDtype.q8_0 and settings.engine is not ExportEngine.llama_cpp:
        raise UserError(
            "export.dtype: must be float32, bfloat16, float16 or auto for engines other than llama_cpp, but is q8_0 "
            f"for {settings.engine}; set export.engine=llama_cpp, or another dtype"
        )
    if settings.hub is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", settings.hub):
        raise UserError(f"export.hub: must be the name of a repository, USER/NAME, but is {settings.hub!r}; correct it")
    if settings.hub is not None and get_token() is None:
        raise UserError(
            f"export.hub: a token of the hub must be there to upload to {settings.hub}, but none is; log in with "
            "`hf auth login`, or set HF_TOKEN"
        )


class OpenvinoWeights(StrEnum):
    """The type of weights after the conversion for OpenVINO, as `--weight-format` of optimum-cli names it."""

    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


@dataclass
class ServingConfig:
    """The engine of mtptrain serving-check, which compares its acceptance with ours, and of mtptrain serving-bench."""

    engine: ServingEngine = ServingEngine.vllm
    """The engine that is started, or runs at `url`."""
    program: str | None = None
    """The engine's program: a Python interpreter with vLLM, with OpenVINO GenAI and optimum-intel, or with mlx-lm and
    mlx-vlm; or llama.cpp's `llama-server`. null uses what `make` installed in the checkout, or else `llama-server` on
    PATH. That of vLLM also serves `hidden_states.backend=vllm`."""
    openvino_weights: OpenvinoWeights = OpenvinoWeights.fp32
    """Type of the weights of target and head after their conversion for OpenVINO. Only fp32 is exact."""
    url: str | None = None
    """Running server to use instead of starting an engine, such as `http://localhost:8000` (without `/v1`)."""
    tensor_parallel_size: int = at_least(1, default=1)
    """Number of GPUs for the engine that is started. Only vLLM takes more than one."""
    head_dir: str | None = None
    """The exported head; null is `export.output_dir` if `export.engine` is the same engine, or else
    `run_dir/export/<engine>`."""
    output_dir: str | None = directory_path(default=None)
    """Directory in which `serving_check` and `serving_bench` are made; null is `run_dir`."""

    def of(self, engine: str) -> "ServingConfig":
        """Returns these settings for an engine, which may be another than `engine`: `program` is then not its own."""
        return self if self.engine == engine else replace(self, engine=ServingEngine(engine), program=None)


@dataclass
class ServingCheckConfig:
    """mtptrain serving-check: `acceptance` sets the prompts, and `serving` the engine."""

    concurrency: int | None = at_least(1, default=None)
    """Number of requests in flight; null is 8 with vLLM and 1 with other engines."""


@dataclass
class ServingBenchConfig:
    """mtptrain serving-bench: the speed that a server's clients get, with and without the exported head.

    `acceptance` sets the prompts, answer length, sampling and dtype, and `serving` sets the engine.
    """

    concurrency: list[int] = field(default_factory=lambda: [1, 2, 4, 8], metadata=each_at_least(1))
    """Numbers of requests in flight. Each is measured separately."""
    num_speculative_tokens: list[int] = field(default_factory=list, metadata=each_at_least(1, may_be_empty=True))
    """Values of K, each served by a separate engine; empty measures
    acceptance.num_speculative_tokens. An engine without drafts, K = 0, is always measured too, except with
    `serving.url`, which measures only the running server."""
    num_requests: int | None = None
    """Number of requests at each concurrency. Prompts repeat if there are fewer of them. null sends each prompt once,
    but at least four requests, and as many as the largest concurrency."""
    repeats: int = at_least(1, default=1)
    """Number of runs at each K and concurrency; the fastest counts. An engine runs all concurrencies, then all of them
    again."""
    ignore_eos: bool = False
    """Make every answer acceptance.max_new_tokens long. The text after an answer's end often repeats itself, so more
    drafts are accepted than users would see."""
    server_args: list[str] = field(default_factory=list)
    """Further arguments of `vllm serve` or `llama-server` for each that is started, such as `[--enforce-eager]`."""


ENGINES_WITH = {
    "serving.url": (ServingEngine.vllm, ServingEngine.llama_cpp),
    "serving.tensor_parallel_size": (ServingEngine.vllm,),
    "serving.openvino_weights": (ServingEngine.openvino,),
    "serving_check.concurrency": (ServingEngine.vllm, ServingEngine.llama_cpp),
    "serving_bench.server_args": (ServingEngine.vllm, ServingEngine.llama_cpp),
}
"""The engines that have a setting. OpenVINO has no server, and those of MLX take no token ids."""


def check_serving(settings: ServingBenchConfig, serving: ServingConfig, check: ServingCheckConfig) -> None:
    """Raises UserError for settings that contradict each other."""
    depths, largest = settings.num_speculative_tokens, max(settings.concurrency)
    if settings.num_requests is not None and settings.num_requests < largest:
        raise UserError(
            f"serving_bench.num_requests: must be at least {largest}, the largest of serving_bench.concurrency, but is "
            f"{settings.num_requests}, too few to keep {largest} in flight; raise it or lower the concurrency"
        )
    sections = {"serving": serving, "serving_bench": settings, "serving_check": check}
    for name, engines in ENGINES_WITH.items():
        section, field_name = name.split(".")
        owner = sections[section]
        value = getattr(owner, field_name)
        if serving.engine not in engines and value != getattr(type(owner)(), field_name):
            raise UserError(
                f"{name}: must be left out with serving.engine={serving.engine}, but is {hide_passwords(value)}; leave "
                f"it out, or set serving.engine={' or '.join(engines)}"
            )
    if serving.url is not None and (depths or settings.server_args):
        name = "num_speculative_tokens" if depths else "server_args"
        raise UserError(
            f"serving_bench.{name}: must be left out with serving.url, because a running server keeps its own "
            f"settings, but is {depths or settings.server_args}; leave one of them out"
        )
