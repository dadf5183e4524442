"""Identity of stored data: hashes of the target, its tokenizer and chat template, and of the prompts."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_json


@dataclass(frozen=True)
class TokenizerIdentity:
    """Hashes that change when the meaning of token ids or the chat format changes."""

    tokenizer_sha256: str
    chat_template_sha256: str
    template_kwargs: str = "{}"
    """JSON of `prompts.template_kwargs`, which say in which mode the chat template is used."""

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, mode: str = "{}") -> "TokenizerIdentity":
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
        template = json.dumps(tokenizer.chat_template, sort_keys=True)
        return TokenizerIdentity(_sha256(vocabulary.encode()), _sha256(template.encode()), mode)


@dataclass(frozen=True)
class TargetIdentity:
    """Identifies the target that stored data belongs to."""

    path: str
    revision: str | None
    config_sha256: str
    weights_sha256: str
    """Hash of the file headers and of samples of every tensor. It is fast to compute, and fine-tuning changes it."""
    tokenizer_sha256: str
    chat_template_sha256: str
    template_kwargs: str = "{}"

    @staticmethod
    def of(target: TargetFiles) -> "TargetIdentity":
        config = read_json(target.directory / "config.json")
        config.pop("transformers_version", None)
        return TargetIdentity(
            path=target.path,
            revision=target.revision,
            config_sha256=_sha256(json.dumps(config, sort_keys=True).encode()),
            weights_sha256=target.weights_sha256,
            **asdict(TokenizerIdentity.of(target.tokenizer, target.template_kwargs_json)),
        )

    def facts(self) -> dict[str, object]:
        """Returns the values to compare, by their names in error messages. Path and revision are not compared."""
        return {
            "the hash of the target's config": self.config_sha256,
            "the hash of the target's weights": self.weights_sha256,
            "the hash of the tokenizer": self.tokenizer_sha256,
            "the hash of the chat template": self.chat_template_sha256,
            "the mode of the chat template (prompts.template_kwargs)": self.template_kwargs,
        }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Identity:
    """Everything that must match between stored data and the run that uses them."""

    program: ClassVar[str]
    """Program that writes the data."""
    target: TargetIdentity

    def facts(self) -> dict[str, object]:
        """Returns the values to compare, by their names in error messages."""
        return self.target.facts()


@dataclass(frozen=True)
class StoreIdentity(Identity):
    program = "mtptrain hidden-states"
    capture_layers: tuple[int, ...]
    """Layers of `aux_hidden_states`, in order: k is the residual stream after k decoder layers."""
    compute_dtype: str
    """Dtype of the target's weights and arithmetic."""
    prompts_sha256: str
    """Hash of train.safetensors from mtptrain prompts."""
    hidden_states: str = "before_final_norm"
    """Where in the target the last hidden states were taken."""
    dtype: str = "bfloat16"
    """Dtype of the stored states."""
    backend: str = "transformers"
    """Program that ran the target: transformers or vllm."""

    def facts(self) -> dict[str, object]:
        return {
            **super().facts(),
            "the list of captured layers": self.capture_layers,
            "the compute dtype (hidden_states.dtype)": self.compute_dtype,
            "the hash of the prompts (train.safetensors)": self.prompts_sha256,
            "the kind of hidden states": self.hidden_states,
            "the stored dtype (hidden_states.store_dtype)": self.dtype,
            "the backend (hidden_states.backend)": self.backend,
        }


def refuse_other(path: Path, expected: Identity, found: Identity, *shard_tokens: int) -> None:
    """Refuse stored data whose identity, or tokens per shard if more will be written, are not those of this run."""
    expected_facts, found_facts = expected.facts(), found.facts()
    if shard_tokens:
        expected_facts["hidden_states.shard_tokens"], found_facts["hidden_states.shard_tokens"] = shard_tokens
    remedy = f"undo the change, choose another run_dir, or delete {path.parent} and run {expected.program} again"
    targets = f" (target expected: {expected.target.path}, found: {found.target.path})"
    refuse_different_facts(path, expected_facts, found_facts, remedy, targets)


def refuse_different_facts(
    path: Path, expected: Mapping[str, object], found: Mapping[str, object], remedy: str, note: str = ""
) -> None:
    """Raise UserError if facts in `path` differ. The message lists every difference, then `note` and `remedy`."""
    differences = [
        f"{name} must be {expected.get(name)}, but is {found.get(name)}"
        for name in {**expected, **found}
        if expected.get(name) != found.get(name)
    ]
    if differences:
        raise UserError(f"{path}: {'; '.join(differences)}{note}; {remedy}")
