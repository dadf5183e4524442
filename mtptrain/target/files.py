"""A target on disk: where it is, and its config, tokenizer and fingerprint for whoever holds it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mtptrain.target.families import read_target_config
from mtptrain.target.gguf import is_gguf
from mtptrain.target.hub import DEMO, load_tokenizer, resolve_target, weights_fingerprint


@dataclass(frozen=True)
class TargetFiles:
    """A target's directory, and what is read from it when it is first needed."""

    directory: Path
    path: str = ""
    """The setting that chose the target: `demo`, a directory, a GGUF file or a hub name; empty for a directory."""
    revision: str | None = None
    """Revision of the hub repository."""

    @staticmethod
    def find(path: str, revision: str | None = None) -> "TargetFiles":
        """Returns the target at `path`, after downloading or dequantising it if necessary: see `resolve_target`."""
        return TargetFiles(resolve_target(path, revision), path, revision)

    @property
    def name_for_engines(self) -> str:
        """The name or path by which a serving engine loads the target."""
        return str(self.directory) if self.path in ("", DEMO) or is_gguf(self.path) else self.path

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The config, checked by `read_target_config`."""
        return read_target_config(self.directory)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, read by `load_tokenizer`."""
        return load_tokenizer(self.directory)

    @cached_property
    def weights_sha256(self) -> str:
        """The hash of `weights_fingerprint`."""
        return weights_fingerprint(self.directory)
