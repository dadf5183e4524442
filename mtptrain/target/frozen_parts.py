"""The target's embeddings, final norm and lm_head, which a head shares without training them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from mtptrain.target.checkpoint_check import PLAIN_DTYPES, StoredTensor, check_weights, stored_tensors
from mtptrain.target.families import read_target_config
from mtptrain.target.form import TargetForm, find_form
from mtptrain.utils.errors import UserError


@dataclass(frozen=True)
class FrozenParts:
    """The target's embeddings, final norm and lm_head."""

    embed_tokens: torch.Tensor  # [V, H]
    norm_weight: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [V, H]
    form: TargetForm
    """How logits follow from the states."""
    norm_bias: torch.Tensor | None = None  # [H]
    lm_head_bias: torch.Tensor | None = None  # [V]

    @classmethod
    def of(cls, config: PreTrainedConfig, weights: Mapping[str, torch.Tensor]) -> "FrozenParts":
        """Builds the parts from the target's tensors, keyed by name. That of lm_head may be missing if it is tied."""
        form = find_form(config)
        embed_tokens = weights[f"{form.embed_tokens}.weight"]
        return cls(
            embed_tokens,
            weights[f"{form.norm}.weight"],
            embed_tokens if config.tie_word_embeddings else weights[f"{form.lm_head}.weight"],
            form,
            weights[f"{form.norm}.bias"] if form.has_norm_bias else None,
            weights[f"{form.lm_head}.bias"] if form.has_lm_head_bias else None,
        )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the unscaled embeddings [..., H], which engines share with a head.

        Some families, such as Gemma, multiply them by a factor, but only in the target's own forward (vLLM's
        Gemma3Model.embed_input_ids).
        """
        return F.embedding(input_ids, self.embed_tokens)  # [..., H]

    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalizes the states after the last layer, with the same rounding as the family's own norm."""
        return self.form.normed(hidden_states, self.norm_weight, self.norm_bias)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the target's own logits [..., V] of post-norm states [..., H]."""
        return self.form.scaled_logits(F.linear(self.form.scaled_states(states), self.lm_head, self.lm_head_bias))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "FrozenParts":
        """Returns the parts on a device, in a dtype; None keeps theirs."""

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, dtype)

        parts = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "form"}
        if self.lm_head is self.embed_tokens:
            del parts["lm_head"]
        parts = {name: moved(tensor) for name, tensor in parts.items()}
        return replace(self, **{"lm_head": parts["embed_tokens"], **parts})


def load_frozen_parts(target_dir: Path) -> FrozenParts:
    """Read only the embeddings, final norm and lm_head from the target's safetensors files."""
    config = read_target_config(target_dir)
    refuse_quantised_parts(target_dir)
    wanted, tensors = find_form(config).tensor_names(config.tie_word_embeddings), check_weights(target_dir)
    refuse_missing(target_dir, wanted - tensors.keys())
    return FrozenParts.of(config, {name: tensors[name].read() for name in wanted})


def refuse_quantised_parts(target_dir: Path) -> None:
    """Refuse a checkpoint with quantised embeddings, final norm or lm_head. Reads only the headers of its files."""
    form = find_form(read_target_config(target_dir))
    prefixes = (f"{form.embed_tokens}.", f"{form.norm}.", f"{form.lm_head}.")
    refuse_quantised(stored_tensors(target_dir), prefixes)


def refuse_quantised(tensors: Mapping[str, StoredTensor], prefixes: tuple[str, ...]) -> None:
    """Refuse quantised tensors and their scales in modules with one of these prefixes."""
    for in_model, (path, name, dtype, _) in sorted(tensors.items()):
        module, _, parameter = name.rpartition(".")
        if in_model.startswith(prefixes) and (dtype not in PLAIN_DTYPES or "scale" in parameter):
            raise UserError(
                f"target.path: {module} must be unquantised, because training reads it without scales, but {path} "
                f"has {name} in {dtype}; choose the unquantised checkpoint, or one in which this module is not "
                "quantised"
            )


def load_last_layer(target_dir: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of the last decoder layer in fp32, by their names inside it; norm weights include the 1."""
    config = read_target_config(target_dir)
    form = find_form(config)
    prefix = f"{form.layers}.{config.num_hidden_layers - 1}."
    tensors = stored_tensors(target_dir)
    refuse_quantised(tensors, (prefix,))
    return {
        name.removeprefix(prefix): tensor.read().float() + form.norm_offset * name.endswith("norm.weight")
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def refuse_missing(target_dir: Path, tensor_names: Collection[str]) -> None:
    if tensor_names:
        first_names = sorted(tensor_names)[:3]
        rest = f" and {len(tensor_names) - 3} more" if len(tensor_names) > 3 else ""
        raise UserError(
            f"{target_dir}: the checkpoint must hold {', '.join(first_names)}{rest}, but does not; download it again"
        )
