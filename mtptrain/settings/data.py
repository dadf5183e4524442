"""Settings of the target and of the stages that prepare training data."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from mtptrain.utils.setting_bounds import at_least, between, each_named, each_value_of, share


class Dtype(StrEnum):
    """The precision of a program. `mtptrain.settings.precision` says what `auto` stands for."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class StoreDtype(StrEnum):
    bfloat16 = "bfloat16"
    fp8 = "fp8"
    """e4m3 with one fp32 scale per token and layer; takes half the disk space."""
    fp8_aux = "fp8_aux"
    """fp8 for the captured layers, bfloat16 for the last layer, from which the teacher's logits are computed."""


class Backend(StrEnum):
    auto = "auto"
    """vllm, or transformers for a target from which vLLM cannot extract hidden states."""
    transformers = "transformers"
    vllm = "vllm"


class AnsweringEngine(StrEnum):
    """What generates responses with the target."""

    auto = "auto"
    """vLLM on GPUs, if it is installed and answers as the target is sampled; else `transformers`."""
    vllm = "vllm"
    llama_cpp = "llama_cpp"
    """For a target that is a GGUF file, or with `target.gguf`."""
    transformers = "transformers"
    """mtptrain's own loop, in this process or its ranks."""


class PromptSource(StrEnum):
    text_files = "text_files"
    conversations = "conversations"
    responses = "responses"
    """The conversations of `prompts.paths` with the responses that mtptrain responses generated in this run_dir."""
    tokens = "tokens"
    """Rows that are tokenized already, with `input_ids` and `loss_mask`, and traces with token ids: docs/traffic.md."""

    @property
    def is_chat(self) -> bool:
        """Whether the target's chat template renders the prompts."""
        return self in (PromptSource.conversations, PromptSource.responses)


class ConversationSchema(StrEnum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"


ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages, by the names that chat templates read."""


@dataclass
class TargetConfig:
    """The frozen language model."""

    path: str = MISSING
    """A local directory, a GGUF file, a hub name, or `demo` for the target that ships with the package."""
    gguf: str | None = None
    """The target as a GGUF file, for llama.cpp; null is `target.path` if that is one."""
    revision: str | None = None
    """Hub revision; ignored for a local directory or file."""


@dataclass
class PromptsConfig:
    """Stage 1: documents -> token ids and loss masks."""

    source: PromptSource = PromptSource.text_files
    """What `paths` holds. `responses` is conversations that the target answers anew."""
    paths: list[str] = field(default_factory=list, metadata=each_named())
    """`text_files`: directories; `standard_library` stands for the directory of Python's standard library.
    All others: jsonl, json or parquet files, and names of datasets on the hub."""
    pattern: str = "*"
    """`text_files`: glob for file names."""
    exclude: list[str] = field(default_factory=list)
    """`text_files`: globs for paths to skip. Each is matched with a path relative to the directory in `paths`."""
    schema: ConversationSchema = ConversationSchema.auto
    """Keys of a conversation: `role` and `content`, or `from` and `value`. `auto` finds out."""
    split: str = "train"
    """All but `text_files`: name of the split to read from hub datasets."""
    metadata: list[str] = field(default_factory=list, metadata=each_named())
    """All but `text_files`: names of columns and message keys to pass over, although their names say that they change
    what is trained. Others that are not read are passed over anyway, and named in the report."""
    drop_failed: bool = False
    """`tokens`: leave out traces of Verifiers whose `ok` is false. Otherwise, they are trained on too."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """`conversations`, `responses`: variables of the target's chat template, such as `{enable_thinking: false}`. These
    are a server's `chat_template_kwargs`. A head that is trained with them must be served with them."""
    roles: dict[str, str] = field(default_factory=dict, metadata=each_value_of(ROLES))
    """`conversations`, `responses`: further names of roles in the data, such as `{bot: assistant}`."""
    max_document_tokens: int = at_least(4, default=2048)
    """Longer documents are cut into windows of at most this many tokens."""
    validation_fraction: float = share(default=0.05, hint="both training and validation need documents", is_proper=True)
    """Share of files or rows held out for validation. Files are chosen by a hash of their name. Conversations are
    chosen by a hash of their question (normalised system prompt and first user turn), and rows of tokens by that of the
    tokens before their first supervised one, so that no held-out question is trained on."""
    near_duplicate_similarity: float = between(0.5, 1.0, default=1.0)
    """`conversations`, `responses`: questions of at least this similarity stay in one split. It is the share of runs of
    three words that two first user turns have in common. 1 joins only questions that are equal."""
    max_train_tokens: int = at_least(0, default=0)
    """Maximum number of training tokens; 0 keeps all. Files or rows are taken in the order of the hashes that
    `validation_fraction` describes, until a window would exceed the maximum."""


@dataclass
class ResponsesConfig:
    """Optional stage before stage 1: the target regenerates the assistant turns of `prompts.paths`."""

    engine: AnsweringEngine = AnsweringEngine.auto
    """The engine that runs the target. It is found as `serving` says and started, one for each GPU or for each
    `serving.tensor_parallel_size` of them. With torchrun, `auto` is `transformers`."""
    url: str | None = None
    """Base URL of a running OpenAI-compatible server (vLLM, SGLang) to ask instead, such as
    `http://localhost:8000/v1`. The environment variable `OPENAI_API_KEY` holds the server's key, if it needs one."""
    model: str | None = None
    """The target's model name on the server; null uses the server's only model."""
    concurrency: int | None = at_least(1, default=None)
    """Number of conversations in flight at each server; null is 64 at a `url`, else 256 on GPUs and 16 on a CPU."""
    batch_size: int | None = at_least(1, default=None)
    """With transformers: number of conversations generated together; null is 32, but at least 8 and no more than have
    answers of 16,384 tokens in all. Larger batches are faster, and take more memory."""
    dtype: Dtype = Dtype.auto
    """Dtype of the target, unless a `url` serves it. `auto` is bfloat16 where this machine computes it fast, else
    float32."""
    temperature: float | None = at_least(0.0, default=None)
    """null samples as the target's generation_config.json says, penalties included: greedily if it says nothing. With a
    number there are no penalties, and all tokens are kept unless `top_p` or `top_k` are set."""
    top_p: float | None = share(default=None, hint="1 keeps all tokens")
    """Sample from the most likely tokens that together have this probability; 1 keeps all."""
    top_k: int | None = at_least(0, default=None)
    """0 keeps all tokens."""
    max_new_tokens: int = at_least(1, default=2048)
    """Maximum length of a response in tokens. A response that reaches it is the last of its conversation."""
    timeout_s: float = at_least(0.01, default=600.0)
    """Timeout of one request."""

    @property
    def batch_rows(self) -> int:
        """`batch_size`, or what null stands for."""
        return self.batch_size or max(8, min(32, 16_384 // self.max_new_tokens))

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings of sampling; None where they are left out."""
        return {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}


@dataclass
class HiddenStatesConfig:
    """Stage 2: hidden states of the frozen target over the training prompts."""

    backend: Backend = Backend.transformers
    """Engine that runs the target: transformers in this process, or vLLM in a separate one (`serving.program`)."""
    dtype: Dtype = Dtype.auto
    """Dtype of the target's weights and arithmetic. `auto` is bfloat16 where this machine computes it fast, else
    float32."""
    store_dtype: StoreDtype = StoreDtype.bfloat16
    """Dtype of the states on disk."""
    batch_tokens: int = at_least(1, default=16_384)
    """Maximum number of tokens in one forward. With `transformers`, a forward packs whole documents without padding,
    and a longer document is alone in its forward."""
    shard_tokens: int = at_least(1, default=262_144)
    """A shard ends with the document that reaches this many tokens."""
    compile: bool = False
    """`transformers`: torch.compile the decoder layers."""
    num_parts: int = at_least(1, default=1)
    """Number of groups of processes among which the shards are divided, such as the tasks of a Slurm array. The last
    group to finish finalizes the store."""
    part: int = at_least(0, default=0)
    """Index of this group, from 0."""
    tensor_parallel_size: int = at_least(1, default=1)
    """`vllm`: number of GPUs per engine; each rank starts its own engine."""
    servers: list[str] = field(default_factory=list)
    """`vllm`: addresses of running servers to ask, which write to a disk that is here too; empty starts engines."""
    num_servers: int = at_least(0, default=0)
    """`vllm`: number of servers to ask that write their addresses into `run_dir/servers`, such as tasks of Slurm."""
    server: int | None = at_least(0, default=None)
    """With a number from 0, run this one of `num_servers` with `tensor_parallel_size` GPUs, and extract nothing."""
    kv_cache_memory_bytes: int | None = None
    """`vllm`: the engine's setting of the same name. With null, the engine chooses on a GPU; on a CPU, it gets what
    two batches need."""
    scratch_dir: str | None = None
    """`vllm`: directory where the engine first writes the states of up to two shards per rank. `/dev/shm` saves
    disk traffic; null creates a directory inside the store."""

    @property
    def asks_servers(self) -> bool:
        """Whether one process asks servers, and starts no engine."""
        return bool(self.servers or self.num_servers)
