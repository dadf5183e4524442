"""The frozen target: the whole model, or only what training needs of it.

Training reads embeddings, final norm and lm_head alone from the target's safetensors (`load_frozen_parts`); extraction and
acceptance run the whole model (`load_target`).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

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
from transformers.cache_utils import Cache, DynamicLayer

DEMO = "demo"
DEMO_DIR = Path(__file__).parent / "demo_target"

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Families with plain RMSNorm (weight, not 1 + weight), unscaled embeddings and uncapped logits."""

EMBED_TOKENS, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def resolve_target(path: str, revision: str | None = None) -> Path:
    """The target's local directory: the demo target, a directory, or a snapshot of a hub repository.

    Raises:
        FileNotFoundError: `path` is neither.
    """
    if path == DEMO:
        return DEMO_DIR
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise FileNotFoundError(f"target.path: must be a model directory, but {path!r} has no config.json; correct the path")
        return Path(path)
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"target.path: must be a local directory, a hub name or `{DEMO}`, but {path!r} is not a directory and the hub "
            f"answered: {str(error).splitlines()[0]}; correct the path or download the model first"
        ) from error


def read_target_config(target_dir: Path) -> PreTrainedConfig:
    """The target's config.

    Raises:
        ValueError: the model's family is not supported.
    """
    config = AutoConfig.from_pretrained(target_dir)
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"target.path: the target's family must be one of {', '.join(SUPPORTED_MODEL_TYPES)}, but is {config.model_type!r} in "
            f"{target_dir / 'config.json'}; choose another target"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"target.path: the target's attention must reach over its whole context of {config.max_position_embeddings} tokens, but has "
            f"sliding_window {window} in {target_dir / 'config.json'}; choose another target, or cap max_position_embeddings there"
        )
    return config


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

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.embed_tokens)  # [..., H]

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Post-norm states from those after the last layer, the mean square in fp32 as in every family supported."""
        normed = F.rms_norm(hidden_states.float(), (hidden_states.shape[-1],), eps=self.norm_eps)  # [..., H]
        return self.norm_weight * normed.to(self.norm_weight.dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.lm_head)  # [..., V]

    def to(self, device: torch.device, dtype: torch.dtype) -> "FrozenParts":
        moved = [tensor.to(device, dtype) for tensor in (self.embed_tokens, self.norm_weight, self.lm_head)]
        return FrozenParts(moved[0], moved[1], self.norm_eps, moved[0] if self.lm_head is self.embed_tokens else moved[2])


def load_frozen_parts(target_dir: Path) -> FrozenParts:
    """Read embeddings, final norm and lm_head from the target's safetensors, and no other tensor.

    Raises:
        ValueError: a tensor is missing, or the family is not supported.
    """
    config = read_target_config(target_dir)
    wanted = {EMBED_TOKENS, FINAL_NORM} | (set() if config.tie_word_embeddings else {LM_HEAD})
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(target_dir):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in wanted.intersection(file.keys())}
    missing = sorted(wanted - tensors.keys())
    if missing:
        raise ValueError(
            f"{target_dir}: the checkpoint must hold {', '.join(missing)}, but does not; it is incomplete, fetch it again"
        )
    embed_tokens = tensors[EMBED_TOKENS]
    return FrozenParts(embed_tokens, tensors[FINAL_NORM], config.rms_norm_eps, tensors.get(LM_HEAD, embed_tokens))


class PositionCache(Cache):
    """Keys and values in the slot of their position, per row.

    Writing a position again replaces it, and a query sees the slots up to its own position only: going back after a rejected
    draft is done by continuing at an earlier position, with no copy and no crop, and each row has its own length.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.num_slots = num_slots
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._positions = torch.empty(0)
        self._used_slots = 0

    def begin(self, positions: torch.Tensor) -> torch.Tensor:
        """Say at which positions [B, S] the next forward writes; returns the mask [B, 1, S, slots in use], True where seen."""
        self._positions = positions
        self._used_slots = max(self._used_slots, int(positions.max()) + 1)
        assert self._used_slots <= self.num_slots, "positions beyond the cache"
        slots = torch.arange(self._used_slots, device=positions.device)
        return slots <= positions[:, None, :, None]  # [B, 1, S, slots]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, heads, S, head_dim] at the positions of `begin`; returns all slots in use."""
        if layer_idx not in self._keys:
            batch, heads = key_states.shape[:2]
            self._keys[layer_idx] = key_states.new_zeros(batch, heads, self.num_slots, key_states.shape[-1])
            self._values[layer_idx] = value_states.new_zeros(batch, heads, self.num_slots, value_states.shape[-1])
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]  # [B, 1]
        keys[rows, :, self._positions] = key_states.transpose(1, 2)
        values[rows, :, self._positions] = value_states.transpose(1, 2)
        return keys[:, :, : self._used_slots], values[:, :, : self._used_slots]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._used_slots


class Target:
    """The whole frozen target for drafting and verification."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        weights = dict(model.named_parameters(remove_duplicate=False))  # tied ones under both names
        self.parts = FrozenParts(weights[EMBED_TOKENS], weights[FINAL_NORM], model.config.rms_norm_eps, weights[LM_HEAD])

    @property
    def device(self) -> torch.device:
        return self.parts.embed_tokens.device

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, cache: PositionCache) -> torch.Tensor:
        """Post-norm hidden states [B, S, H] of tokens [B, S] at positions [B, S], reading and writing the cache."""
        mask = cache.begin(positions)
        output = self.model.model(
            input_ids=input_ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        return output.last_hidden_state


def load_target(target_dir: Path, dtype: torch.dtype, device: torch.device) -> Target:
    """The whole target on one device; on several, where it does not fit, by accelerate's placement."""
    read_target_config(target_dir)
    weight_files(target_dir)
    if _needs_several_devices(target_dir, dtype, device) and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"target.path: {target_dir} must fit one device where several ranks share a machine, but does not; start one process, "
            "over which accelerate spreads it"
        )
    placement = "auto" if _needs_several_devices(target_dir, dtype, device) else device
    return Target(AutoModelForCausalLM.from_pretrained(target_dir, dtype=dtype, device_map=placement))


def _needs_several_devices(target_dir: Path, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return False
    weights_bytes = sum(path.stat().st_size for path in weight_files(target_dir)) * (2 if dtype is torch.float32 else 1)
    return weights_bytes > 0.8 * torch.cuda.get_device_properties(device).total_memory
