"""Finds a target (the demo, a directory or a hub repository), its tokenizer and its weight files."""

import hashlib
import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)
"""Errors of the hub or of the connection to it."""

DEMO = "demo"
DEMO_DIR = Path(__file__).parents[1] / "demo_target"


def resolve_target(path: str, revision: str | None = None, setting: str = "target.path") -> Path:
    """Returns the target's local directory; a hub repository is downloaded if needed.

    Args:
        path: `demo`, a directory, or a hub name.
        revision: revision of the hub repository.
        setting: name of the setting for errors.

    Raises:
        FileNotFoundError: `path` is none of them.
    """
    if path == DEMO:
        return DEMO_DIR
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise FileNotFoundError(
                f"{setting}: must be a model directory, but {path!r} has no config.json; correct the path"
            )
        return Path(path)
    try:
        return Path(
            snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"])
        )
    except HUB_ERRORS as error:
        raise unknown_target(path, error, "download the model first", setting) from error


def unknown_target(path: str, answer: Exception, advice: str, setting: str = "target.path") -> FileNotFoundError:
    """Returns the error for a `path` that is no directory and for which the hub raised `answer`."""
    return FileNotFoundError(
        f"{setting}: must be a local directory, a hub name or `{DEMO}`, but {path!r} is not a directory and the hub "
        f"answered: {str(answer).splitlines()[0]}; correct the path or {advice}"
    )


def load_tokenizer(target_dir: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target_dir)
    return tokenizer


def weight_files(target_dir: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint, single or sharded.

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
            "target.path: weights must be safetensors files, but "
            f"{missing[0] if missing else target_dir / '*.safetensors'} does not exist; convert or download the "
            "checkpoint"
        )
    return files


_SAMPLES_PER_TENSOR, _SAMPLE_BYTES = 8, 4096


def weights_fingerprint(target_dir: Path) -> str:
    """Returns a hash of every safetensors header and of eight samples of each tensor: fast for any checkpoint."""
    digest = hashlib.sha256()
    for path in weight_files(target_dir):
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = file.read(header_bytes)
            digest.update(header)
            for name, entry in sorted(json.loads(header).items()):
                if name == "__metadata__":
                    continue
                start, end = entry["data_offsets"]
                for i in range(_SAMPLES_PER_TENSOR):
                    offset = start + (end - start) * i // _SAMPLES_PER_TENSOR
                    file.seek(8 + header_bytes + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()
