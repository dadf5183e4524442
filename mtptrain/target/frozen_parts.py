"""The target's embeddings, final norm and lm_head, which a head shares without training them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import PreTrainedConfig

from mtptrain.target.checkpoint_check import EMBED_TOKENS, FINAL_NORM, LM_HEAD, PLAIN_DTYPES, check_weights
from mtptrain.target.families import OFFSET_NORM_MODEL_TYPES, read_target_config
from mtptrain.target.hub import weight_files
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import tensor_shapes


@dataclass(frozen=True)
class FrozenParts:
    """The target's embeddings, final norm and lm_head."""

    embed_tokens: torch.Tensor  # [V, H]
    norm_weight: torch.Tensor  # [H]
    norm_eps: float
    lm_head: torch.Tensor  # [V, H]
    has_offset_norm: bool = False
    """Whether the norm multiplies by 1 + weight."""
    logit_softcap: float | None = None
    """Soft cap c of the target's own logits, which become c * tanh(logits / c); None if the target has none."""

    @classmethod
    def of(cls, config: PreTrainedConfig, weights: Mapping[str, torch.Tensor]) -> "FrozenParts":
        """Builds the parts from the target's tensors, keyed by name. LM_HEAD may be missing if it is tied."""
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
        """Returns the unscaled embeddings [..., H], which engines share with a head.

        Gemma multiplies them by sqrt(H) only in the target's own forward (vLLM's Gemma3Model.embed_input_ids).
        """
        return F.embedding(input_ids, self.embed_tokens)  # [..., H]

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalizes the states after the last layer, with the same rounding as the family's own norm."""
        states, dtype = hidden_states.float(), self.norm_weight.dtype
        normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.norm_eps)  # [..., H]
        if self.has_offset_norm:
            return (normed * (1.0 + self.norm_weight.float())).to(dtype)
        return self.norm_weight * normed.to(dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the target's own logits [..., V], soft-capped if the target caps them."""
        return self.soft_capped(F.linear(states, self.lm_head))

    def soft_capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.logit_softcap is None else torch.tanh(logits / self.logit_softcap) * self.logit_softcap

    def to(self, device: torch.device, dtype: torch.dtype) -> "FrozenParts":
        embed_tokens, norm_weight = self.embed_tokens.to(device, dtype), self.norm_weight.to(device, dtype)
        lm_head = embed_tokens if self.lm_head is self.embed_tokens else self.lm_head.to(device, dtype)
        return replace(self, embed_tokens=embed_tokens, norm_weight=norm_weight, lm_head=lm_head)


def load_frozen_parts(target_dir: Path) -> FrozenParts:
    """Read only the embeddings, final norm and lm_head from the target's safetensors files.

    Raises:
        UserError: the target has no weights, or a tensor is missing or quantised, the weights do not match the config,
            or the family is not supported.
    """
    config = read_target_config(target_dir)
    refuse_quantised_parts(target_dir)
    check_weights(target_dir)
    wanted = {EMBED_TOKENS, FINAL_NORM} | (set() if config.tie_word_embeddings else {LM_HEAD})
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(target_dir):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in wanted.intersection(file.keys())}
    _refuse_missing(target_dir, wanted - tensors.keys())
    return FrozenParts.of(config, tensors)


def refuse_quantised_parts(target_dir: Path) -> None:
    """Refuse a checkpoint with quantised embeddings, final norm or lm_head. Reads only the headers of its files.

    Raises:
        UserError: the target has no weights, or one of these tensors is quantised.
    """
    _refuse_quantised(target_dir, tuple(name.removesuffix("weight") for name in (EMBED_TOKENS, FINAL_NORM, LM_HEAD)))


def _refuse_quantised(target_dir: Path, prefixes: tuple[str, ...]) -> None:
    """Refuse quantised tensors and their scales in modules with one of these prefixes."""
    for path in weight_files(target_dir):
        for name, (dtype, _) in sorted(tensor_shapes(path).items()):
            module, _, parameter = name.rpartition(".")
            if name.startswith(prefixes) and (dtype not in PLAIN_DTYPES or "scale" in parameter):
                raise UserError(
                    f"target.path: {module} must be unquantised, because training reads it without scales, but {path} "
                    f"has {name} in {dtype}; choose the unquantised checkpoint, or one in which this module is not "
                    "quantised"
                )


def load_last_layer(target_dir: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of the target's last decoder layer in fp32, by their names inside the layer.

    For families whose norms multiply by 1 + weight, the returned norm weights include the 1.

    Raises:
        UserError: the target has no weights, or a tensor is quantised, or the family is not supported.
    """
    config = read_target_config(target_dir)
    prefix, offset = (
        f"model.layers.{config.num_hidden_layers - 1}.",
        float(config.model_type in OFFSET_NORM_MODEL_TYPES),
    )
    _refuse_quantised(target_dir, (prefix,))
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(target_dir):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors |= {name.removeprefix(prefix): file.get_tensor(name).float() for name in names}
    return {name: tensor + offset * name.endswith("norm.weight") for name, tensor in tensors.items()}


def _refuse_missing(target_dir: Path, tensor_names: Collection[str]) -> None:
    if tensor_names:
        first_names = sorted(tensor_names)[:3]
        rest = f" and {len(tensor_names) - 3} more" if len(tensor_names) > 3 else ""
        raise UserError(
            f"{target_dir}: the checkpoint must hold {', '.join(first_names)}{rest}, but does not; download it again"
        )
