"""The frozen target: the whole model, or only what training needs of it.

Training reads embeddings, final norm and lm_head alone from the target's safetensors (`load_frozen_parts`); extraction and
acceptance run the whole model (`load_target`).
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mtptrain.causal_attention import CAUSAL_OR_MASKED
from mtptrain.position_cache import PositionCache as PositionCache
from mtptrain.position_cache import TreeRows as TreeRows

HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)
"""What the hub, or the way to it, may answer."""
DEMO = "demo"
DEMO_DIR = Path(__file__).parent / "demo_target"

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "deepseek_v2")
OFFSET_NORM_MODEL_TYPES = ("gemma3_text",)
"""Their RMSNorm multiplies by 1 + weight, in fp32."""
WINDOW_IN_ALL_LAYERS = ("mistral", "qwen3_moe")
"""Their sliding window is that of every layer."""
WINDOW_BY_LAYER_TYPE = ("qwen2", "qwen3", "gemma3_text")
"""Their `layer_types` say which layers have the sliding window."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

EMBED_TOKENS, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes in safetensors files whose numbers need no scale."""


def resolve_target(path: str, revision: str | None = None, setting: str = "target.path") -> Path:
    """The target's local directory: the demo target, a directory, or a snapshot of a hub repository.

    Args:
        setting: to name in errors.

    Raises:
        FileNotFoundError: `path` is neither.
    """
    if path == DEMO:
        return DEMO_DIR
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise FileNotFoundError(f"{setting}: must be a model directory, but {path!r} has no config.json; correct the path")
        return Path(path)
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except HUB_ERRORS as error:
        raise unknown_target(path, error, "download the model first", setting) from error


def unknown_target(path: str, answer: Exception, advice: str, setting: str = "target.path") -> FileNotFoundError:
    """What to raise where `path` is no directory and the hub gave this answer."""
    return FileNotFoundError(
        f"{setting}: must be a local directory, a hub name or `{DEMO}`, but {path!r} is not a directory and the hub answered: "
        f"{str(answer).splitlines()[0]}; correct the path or {advice}"
    )


def read_target_config(target_dir: Path) -> PreTrainedConfig:
    """The target's config.

    Raises:
        ValueError: the model's family is not supported, or not with these settings.
    """
    config = AutoConfig.from_pretrained(target_dir)
    path, family = target_dir / "config.json", config.model_type
    if family not in SUPPORTED_MODEL_TYPES:
        text_family = getattr(getattr(config, "text_config", None), "model_type", None)
        is_usable = text_family in SUPPORTED_MODEL_TYPES
        raise ValueError(
            f"target.path: the target's family must be one of {', '.join(SUPPORTED_MODEL_TYPES)}, but is {family!r} in {path}; choose "
            + (f"its text model alone, a checkpoint with model_type {text_family!r}" if is_usable else "another target")
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError(
            f"target.path: a token must not see those behind it, but use_bidirectional_attention is set in {path}; choose another target"
        )
    check_static_rope(config)
    if _ignores_windows(config):
        raise ValueError(
            f"target.path: sliding windows must be those of family {family!r} in transformers, but the ones in {path} are ignored "
            "there, and engines do not ignore them; remove sliding_window and layer_types from it, or choose another target"
        )
    return config


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Tokens that the layers with a sliding window see, the reading one included; None where no layer has one."""
    is_used = config.model_type in WINDOW_IN_ALL_LAYERS or (
        config.model_type in WINDOW_BY_LAYER_TYPE and "sliding_attention" in config.layer_types
    )
    return config.sliding_window if is_used else None


def _ignores_windows(config: PreTrainedConfig) -> bool:
    """Whether the config asks for windows that are not in the family's code."""
    if config.model_type in WINDOW_BY_LAYER_TYPE:
        return False
    window = None if config.model_type in WINDOW_IN_ALL_LAYERS else getattr(config, "sliding_window", None)
    is_short = window is not None and window < config.max_position_embeddings
    return is_short or "sliding_attention" in (getattr(config, "layer_types", None) or ())


def head_rope_parameters(target_config: PreTrainedConfig) -> dict[str, Any]:
    """The target's RoPE as a head takes it: flat, with `rope_type` and `rope_theta`; of the layers with full attention."""
    rope_parameters = target_config.rope_parameters
    return dict(rope_parameters.get("full_attention", rope_parameters))


def check_static_rope(config: PreTrainedConfig) -> None:
    """Refuse positions whose rotation depends on the length of the text: a packed forward and a cache see another length.

    Raises:
        ValueError: the target's RoPE is of such a type.
    """
    rope_type = head_rope_parameters(config)["rope_type"]
    if rope_type not in STATIC_ROPE_TYPES:
        raise ValueError(
            f"target.path: the target's RoPE must be one of {', '.join(STATIC_ROPE_TYPES)}, but is {rope_type!r}, which changes with "
            "the length of the text; choose another target"
        )


def load_tokenizer(target_dir: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target_dir)
    return tokenizer


def weight_files(target_dir: Path) -> list[Path]:
    """The safetensors files of a checkpoint, single or sharded.

    Raises:
        FileNotFoundError: there are none.
    """
    index = target_dir / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [target_dir / name for name in names]
    else:
        files = sorted(target_dir.glob("*.safetensors"))
    missing = [path for path in files if not path.is_file()]
    if missing or not files:
        raise FileNotFoundError(
            f"target.path: weights must be safetensors files, but {missing[0] if missing else target_dir / '*.safetensors'} does not "
            "exist; convert or download the checkpoint"
        )
    return files


@dataclass(frozen=True)
class FrozenParts:
    """Embeddings, final norm and lm_head of the target: all that a head is tied to."""

    embed_tokens: torch.Tensor  # [V, H]
    norm_weight: torch.Tensor  # [H]
    norm_eps: float
    lm_head: torch.Tensor  # [V, H]
    has_offset_norm: bool = False
    """The norm multiplies by 1 + weight."""
    logit_softcap: float | None = None
    """The target's own logits are kept within +- this."""

    @classmethod
    def of(cls, config: PreTrainedConfig, weights: Mapping[str, torch.Tensor]) -> "FrozenParts":
        """From the target's tensors by name; tied ones need the embeddings alone."""
        embed_tokens = weights[EMBED_TOKENS]
        return cls(
            embed_tokens,
            weights[FINAL_NORM],
            config.rms_norm_eps,
            embed_tokens if config.tie_word_embeddings else weights[LM_HEAD],
            config.model_type in OFFSET_NORM_MODEL_TYPES,
            getattr(config, "final_logit_softcapping", None),
        )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table as they are: what engines share with a head.

        Gemma multiplies by sqrt(H) behind its table, in its own forward only (vLLM's Gemma3Model.embed_input_ids).
        """
        return F.embedding(input_ids, self.embed_tokens)  # [..., H]

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Post-norm states from those after the last layer, rounded where the family's own norm rounds."""
        states, dtype = hidden_states.float(), self.norm_weight.dtype
        normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.norm_eps)  # [..., H]
        if self.has_offset_norm:
            return (normed * (1.0 + self.norm_weight.float())).to(dtype)
        return self.norm_weight * normed.to(dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's own, soft-capped where it does so."""
        logits = F.linear(states, self.lm_head)  # [..., V]
        return logits if self.logit_softcap is None else torch.tanh(logits / self.logit_softcap) * self.logit_softcap

    def to(self, device: torch.device, dtype: torch.dtype) -> "FrozenParts":
        embed_tokens, norm_weight = self.embed_tokens.to(device, dtype), self.norm_weight.to(device, dtype)
        lm_head = embed_tokens if self.lm_head is self.embed_tokens else self.lm_head.to(device, dtype)
        return replace(self, embed_tokens=embed_tokens, norm_weight=norm_weight, lm_head=lm_head)


def load_frozen_parts(target_dir: Path) -> FrozenParts:
    """Read embeddings, final norm and lm_head from the target's safetensors, and no other tensor.

    Raises:
        ValueError: a tensor is missing or quantised, or the family is not supported.
    """
    config = read_target_config(target_dir)
    refuse_quantised_parts(target_dir)
    wanted = {EMBED_TOKENS, FINAL_NORM} | (set() if config.tie_word_embeddings else {LM_HEAD})
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(target_dir):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in wanted.intersection(file.keys())}
    _refuse_missing(target_dir, wanted - tensors.keys())
    return FrozenParts.of(config, tensors)


def refuse_quantised_parts(target_dir: Path) -> None:
    """Refuse a checkpoint with quantised embeddings or a quantised lm_head; reads the headers of its files alone.

    Raises:
        ValueError: one of them is quantised.
    """
    _refuse_quantised(target_dir, tuple(name.removesuffix("weight") for name in (EMBED_TOKENS, FINAL_NORM, LM_HEAD)))


def _refuse_quantised(target_dir: Path, prefixes: tuple[str, ...]) -> None:
    """Refuse tensors of these modules that are no plain numbers, and scales that belong to others."""
    for path in weight_files(target_dir):
        with safe_open(path, framework="pt") as file:
            names = sorted(name for name in file.keys() if name.startswith(prefixes))  # noqa: SIM118
            dtypes = {name: file.get_slice(name).get_dtype() for name in names}
        for name, dtype in dtypes.items():
            module, _, parameter = name.rpartition(".")
            if dtype not in PLAIN_DTYPES or "scale" in parameter:
                raise ValueError(
                    f"target.path: {module} must be stored unquantised, for training reads it without scales, but {path} has {name} in "
                    f"{dtype}; choose the checkpoint before quantisation, or one that leaves this module out of it"
                )


def load_last_layer(target_dir: Path) -> dict[str, torch.Tensor]:
    """Read the target's last decoder layer: tensors in fp32 by their names inside the layer, norms as what they multiply by.

    Raises:
        ValueError: a tensor is quantised, or the family is not supported.
    """
    config = read_target_config(target_dir)
    prefix, offset = f"model.layers.{config.num_hidden_layers - 1}.", float(config.model_type in OFFSET_NORM_MODEL_TYPES)
    _refuse_quantised(target_dir, (prefix,))
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(target_dir):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors |= {name.removeprefix(prefix): file.get_tensor(name).float() for name in names}
    return {name: tensor + offset * name.endswith("norm.weight") for name, tensor in tensors.items()}


def _refuse_missing(target_dir: Path, tensor_names: Collection[str]) -> None:
    if tensor_names:
        named = sorted(tensor_names)[:3]
        rest = f" and {len(tensor_names) - 3} more" if len(tensor_names) > 3 else ""
        raise ValueError(
            f"{target_dir}: the checkpoint must hold {', '.join(named)}{rest}, but does not; it is incomplete, fetch it again"
        )


class Target:
    """The whole frozen target for drafting and verification.

    Its layers may be on several devices; what it takes and returns is on `device`, that of its embeddings, and so are its `parts`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over a model.

        Raises:
            ValueError: accelerate has left what drafting needs off the GPUs.
        """
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.window = sliding_window(model.config)
        weights = dict(model.named_parameters(remove_duplicate=False))  # tied: under both names
        parts = FrozenParts.of(model.config, weights)
        device = parts.embed_tokens.device
        if "meta" in (device.type, parts.norm_weight.device.type, parts.lm_head.device.type):
            raise ValueError(
                "target.path: embeddings, final norm and lm_head of the target must fit the GPUs of one machine, but accelerate has "
                "left some of them out; take more GPUs, or a smaller dtype"
            )
        # Nothing is copied on one device; on several, an untied lm_head of the last device is also kept on the first.
        self.parts = replace(parts, norm_weight=parts.norm_weight.to(device), lm_head=parts.lm_head.to(device))

    @property
    def device(self) -> torch.device:
        return self.parts.embed_tokens.device

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: PositionCache,
        capture_layers: tuple[int, ...] = (),
        tree: TreeRows | None = None,
    ) -> "TargetStates":
        """States of tokens [B, S] at positions [B, S], reading and writing the cache; a whole tree where one is given."""
        mask = self._family_mask(cache.begin(positions, tree), positions, tree)
        with self.capturing(capture_layers) as streams, self._causal_or_masked_attention():
            output = self.model.model(
                input_ids=input_ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
            )
        captured = torch.stack([streams[k].to(self.device) for k in capture_layers], dim=-2) if capture_layers else None
        return TargetStates(output.last_hidden_state.to(self.device), captured)

    @contextmanager
    def _causal_or_masked_attention(self) -> Iterator[None]:
        """Swaps the model's attention; other callers of the model keep their own."""
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = CAUSAL_OR_MASKED
        try:
            yield
        finally:
            self.model.config._attn_implementation = before

    def _family_mask(
        self, mask: torch.Tensor | None, positions: torch.Tensor, tree: TreeRows | None
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """What the family's forward takes for the mask of `PositionCache.begin`: with the sliding window where layers have one."""
        if mask is None or self.window is None:
            return mask
        slot_positions = torch.arange(mask.shape[-1], device=mask.device).repeat(len(mask), 1)  # [B, slots]
        if tree is not None:
            slot_positions.scatter_(1, tree.root[:, None] + torch.arange(positions.shape[1], device=mask.device), positions)
        in_window = mask & (slot_positions[:, None, None] > positions[:, None, :, None] - self.window)  # [B, 1, S, slots]
        if self.config.model_type in WINDOW_IN_ALL_LAYERS:
            return in_window
        return {"full_attention": mask, "sliding_attention": in_window}

    @contextmanager
    def capturing(self, after_layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Keep residual streams of a forward of the model, by the number of decoder layers that they are behind.

        0 is what the first layer reads, the number of layers the state before the final norm.
        """
        readers = [*self.model.model.layers, self.model.model.norm]  # the stream after k layers is what module k reads
        streams: dict[int, torch.Tensor] = {}

        def keep(layer: int, args: tuple[torch.Tensor, ...]) -> None:
            streams[layer] = args[0]

        handles = [readers[k].register_forward_pre_hook(lambda _, args, k=k: keep(k, args)) for k in sorted(set(after_layers))]
        try:
            yield streams
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True)
class TargetStates:
    """What a forward of the target gives to a drafter."""

    hidden_states: torch.Tensor
    """Post-norm states [B, S, H]."""
    aux_hidden_states: torch.Tensor | None
    """Captured residual streams [B, S, L, H]; None where none were asked for."""

    def of_rows(self, index: torch.Tensor) -> "TargetStates":
        """Of the rows [B, R] of each sequence."""
        rows, captured = torch.arange(len(index), device=index.device)[:, None], self.aux_hidden_states
        return TargetStates(self.hidden_states[rows, index], None if captured is None else captured[rows, index])


def load_target(target_dir: Path, dtype: torch.dtype, device: torch.device) -> Target:
    """The whole target on one device; on several, where it does not fit, by accelerate's placement.

    Raises:
        ValueError: the family is not supported, a tensor is missing, or several ranks would share several devices.
    """
    read_target_config(target_dir)
    check_placement(target_dir, dtype, device)
    placement = "auto" if _needs_several_devices(target_dir, dtype, device) else device
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        target_dir,
        dtype=dtype,
        device_map=placement,
        attn_implementation="sdpa",  # takes boolean masks; eager attention would add them to its scores
        output_loading_info=True,
    )
    model, loading = loaded
    _refuse_missing(target_dir, loading["missing_keys"])  # transformers only logs that it drew them at random
    return Target(model)


def load_draft_model(path: str, target_dir: Path, context_tokens: int, dtype: torch.dtype, device: torch.device) -> Target:
    """A small language model that drafts for the target.

    Args:
        context_tokens: that it must be able to read, drafts included.

    Raises:
        FileNotFoundError: `path` is neither a directory nor a hub name.
        ValueError: it has another tokenizer, fewer embeddings than that has tokens, too short a context, or a family that is not
            supported.
    """
    directory = resolve_target(path, setting="acceptance.draft_model")
    vocab = load_tokenizer(directory).get_vocab()
    if vocab != load_tokenizer(target_dir).get_vocab():
        raise ValueError(
            f"acceptance.draft_model: must have the target's tokenizer, but the tokens of {directory} are not those of {target_dir}; "
            "choose a smaller model of the same family"
        )
    config = read_target_config(directory)
    if config.vocab_size <= max(vocab.values()):
        raise ValueError(
            f"acceptance.draft_model: must have an embedding for each token of its tokenizer, ids up to {max(vocab.values())}, but "
            f"{directory} has vocab_size {config.vocab_size}; choose another model"
        )
    own_context = config.max_position_embeddings
    if own_context < context_tokens:
        raise ValueError(
            f"acceptance.draft_model: must read the longest prompt with its answer and drafts, {context_tokens} tokens, but {directory} "
            f"has a context of {own_context}; leave out long prompts or choose another model"
        )
    return load_target(directory, dtype, device)


def check_placement(target_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a target that `load_target` could not place, before long work.

    Raises:
        FileNotFoundError: it has no weights.
        ValueError: several ranks would share several devices.
    """
    weight_files(target_dir)
    if _needs_several_devices(target_dir, dtype, device) and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"target.path: {target_dir} must fit one device where several ranks share a machine, but does not; start one process, "
            "over which accelerate spreads it; in training set train.validation_prompts=0"
        )


def _needs_several_devices(target_dir: Path, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return False
    weights_bytes = sum(path.stat().st_size for path in weight_files(target_dir)) * (2 if dtype is torch.float32 else 1)
    return weights_bytes > 0.8 * torch.cuda.get_device_properties(device).total_memory
