"""What stored hidden states belong to: hashes of the target, its tokenizer and chat template, and of the prompts."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtptrain.target.hub import weights_fingerprint
from mtptrain.utils.files import file_sha256


@dataclass(frozen=True)
class TokenizerIdentity:
    """Hashes that tell whether token ids and chat formats still mean the same."""

    tokenizer_sha256: str
    chat_template_sha256: str

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase) -> "TokenizerIdentity":
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
        template = json.dumps(tokenizer.chat_template, sort_keys=True)
        return TokenizerIdentity(_sha256(vocabulary.encode()), _sha256(template.encode()))


@dataclass(frozen=True)
class TargetIdentity:
    """What must be equal for stored hidden states to belong to a target."""

    path: str
    revision: str | None
    config_sha256: str
    weights_sha256: str
    """Of the headers and of samples of every tensor: fine-tuning changes it, reading it takes milliseconds."""
    tokenizer_sha256: str
    chat_template_sha256: str

    @staticmethod
    def of(path: str, revision: str | None, target_dir: Path, tokenizer: PreTrainedTokenizerBase) -> "TargetIdentity":
        config = json.loads((target_dir / "config.json").read_text())
        config.pop("transformers_version", None)
        return TargetIdentity(
            path=path,
            revision=revision,
            config_sha256=_sha256(json.dumps(config, sort_keys=True).encode()),
            weights_sha256=weights_fingerprint(target_dir),
            **asdict(TokenizerIdentity.of(tokenizer)),
        )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class StoreIdentity:
    """What must be equal for stored hidden states to be usable; independent of when and where they were computed."""

    target: TargetIdentity
    capture_layers: tuple[int, ...]
    """Layers of `aux_hidden_states`, in its order: id k is the residual stream after k decoder layers."""
    compute_dtype: str
    """Of the target's weights and arithmetic."""
    prompts_sha256: str
    """Of stage 1's train.safetensors."""
    hidden_states: str = "before_final_norm"
    dtype: str = "bfloat16"
    backend: str = "transformers"

    @staticmethod
    def of(
        target: TargetIdentity,
        capture_layers: tuple[int, ...],
        compute_dtype: str,
        prompts_file: Path,
        dtype: str = "bfloat16",
        backend: str = "transformers",
    ) -> "StoreIdentity":
        """For the documents in `prompts_file`, whose bytes are hashed."""
        prompts_sha256 = file_sha256(prompts_file)
        return StoreIdentity(
            target, tuple(capture_layers), str(compute_dtype), prompts_sha256, dtype=str(dtype), backend=str(backend)
        )

    def facts(self) -> dict[str, object]:
        """What is compared, by the name that a message gives it; a target may move, so its path and revision are not."""
        return {
            "the hash of the target's config": self.target.config_sha256,
            "the hash of the target's weights": self.target.weights_sha256,
            "the hash of the tokenizer": self.target.tokenizer_sha256,
            "the hash of the chat template": self.target.chat_template_sha256,
            "the captured layers": self.capture_layers,
            "the computing dtype (hidden_states.dtype)": self.compute_dtype,
            "the hash of the prompts (train.safetensors)": self.prompts_sha256,
            "the norm state": self.hidden_states,
            "the stored dtype (hidden_states.store_dtype)": self.dtype,
            "the backend (hidden_states.backend)": self.backend,
        }


def refuse_other(path: Path, expected: StoreIdentity, found: StoreIdentity, *shard_tokens: int) -> None:
    """Raise for what differs; `shard_tokens`, expected and found, counts only where shards are still to be written."""
    wanted, present = expected.facts(), found.facts()
    if shard_tokens:
        wanted["hidden_states.shard_tokens"], present["hidden_states.shard_tokens"] = shard_tokens
    differences = [f"{name} must be {value}, but is {present[name]}" for name, value in wanted.items() if present[name] != value]
    if differences:
        raise ValueError(
            f"{path}: {'; '.join(differences)} (target expected: {expected.target.path}, found: {found.target.path}); undo the "
            f"change, choose another run_dir, or delete {path.parent} and run data_prep.hidden_states again"
        )


def identity_from_json(content: dict[str, Any]) -> StoreIdentity:
    target, layers = TargetIdentity(**content["target"]), tuple(content["capture_layers"])
    return StoreIdentity(**{**content, "target": target, "capture_layers": layers})
