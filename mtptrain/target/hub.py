"""Finds a target (the demo, a directory, a GGUF file or a hub repository), its tokenizer and its weight files."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import transformers
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mtptrain.target.gguf import dequantised_dir, is_gguf
from mtptrain.utils.errors import UserError, refusing
from mtptrain.utils.files import read_json, tensor_shapes

HUB_ERRORS = (HTTPError, HFValidationError, OSError)
"""Errors of the hub, of the connection to it, or of writing a download. A proxy's answers are no OSErrors."""

DOWNLOAD_AGAIN = "download it again, or choose another target"

MASK_EMBEDDING = "mask_embedding.pt"
"""A head's trained embedding of its mask token, which engines read from a file of its own."""

MODEL_OPT_QUANTISATION = "hf_quant_config.json"
"""ModelOpt's description of quantised weights, beside config.json. vLLM reads it, but transformers does not."""

INDEX = "model.safetensors.index.json"
"""The file of a sharded checkpoint that names the file of each tensor."""

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "special_tokens_map.json", CONFIG_FILE, "added_tokens.json", "vocab.json"),
    *("chat_template.json", "chat_template.jinja", "merges.txt"),
)
TYPES: Mapping[str, tuple[type | UnionType, str]] = {
    **{f"{name}_token": (str, "a text") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
    **{"tokenizer_class": (str, "a text"), "model_max_length": (int | float, "a number")},
}
"""What the values of a tokenizer's settings must be. Those of tokens may also be objects with a `content`."""

DEMO = "demo"
DEMO_DIR = Path(__file__).parents[1] / "demo_target"


def resolve_target(path: str, revision: str | None = None, setting: str = "target.path", is_whole: bool = True) -> Path:
    """Returns a model's local directory. `path` is `demo`, a directory, a GGUF file, or a hub name.

    If needed, a hub repository is downloaded, as a whole or only its config.json, and a GGUF file dequantised.
    """
    if path == DEMO:
        return DEMO_DIR
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise UserError(f"{setting}: must be a model directory, but {path!r} has no config.json; correct the path")
        return Path(path)
    if is_gguf(path):
        return dequantised_dir(Path(path), setting)
    with refusing(
        f"{setting}: must be a local directory, a GGUF file, a hub name or `{DEMO}`, unlike {path!r}",
        "correct the path, log in with `hf auth login` if it is gated or private, or download "
        f"{'it' if is_whole else 'its config'} first",
        "the hub",
    ):
        if not is_whole:
            return Path(hf_hub_download(path, "config.json", revision=revision)).parent
        return Path(
            snapshot_download(
                path,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", MASK_EMBEDDING],
                ignore_patterns=["original/*", "consolidated*"],  # the same weights again, in another layout
            )
        )


def config_dir(path: str, revision: str | None = None, setting: str = "target.path") -> Path:
    """Returns the directory of `resolve_target`, but downloads only config.json of a hub repository."""
    return resolve_target(path, revision, setting, is_whole=False)


def tokenizer_dir(path: str, revision: str | None = None) -> Path:
    """Returns the directory of `resolve_target` with the tokenizer, but downloads no weights of a hub repository."""
    directory = config_dir(path, revision)
    if path == DEMO or Path(path).exists() or any(directory.glob("tokenizer*")):
        return directory
    return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.jinja", "*.model", "*.txt"]))


def load_tokenizer(target_dir: Path) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a checkpoint.

    A class in the checkpoint's own code is refused: without that code, transformers might choose another class, which
    would give other tokens.
    """
    path = target_dir / CONFIG_FILE
    settings = read_json(path, DOWNLOAD_AGAIN) if path.is_file() else {}
    name = settings.get("tokenizer_class")
    if settings.get("auto_map") and not (isinstance(name, str) and hasattr(transformers, name)):
        raise UserError(
            f"{path}: tokenizer_class must be a class of transformers, because mtptrain never runs a target's own "
            f"code, but is {name!r}, which auto_map looks for in {settings['auto_map']}; choose another target"
        )
    try:
        with refusing(f"{target_dir}: the tokenizer must be readable by transformers", DOWNLOAD_AGAIN):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target_dir, trust_remote_code=False)
            tokenizer("a")  # reads settings, such as model_max_length, that loading does not
    except UserError:
        name_damaged_file(target_dir)
        raise
    return tokenizer


def name_damaged_file(target_dir: Path) -> None:
    """Raises UserError for the first file of a tokenizer that is damaged, if one is."""
    for path in (each for name in TOKENIZER_FILES if (each := target_dir / name).is_file()):
        must_be = "an object of JSON" if path.suffix == ".json" else "text"
        with refusing(f"{path}: must be {must_be} in UTF-8, without a byte order mark", DOWNLOAD_AGAIN, "Python"):
            text = path.read_text(encoding="utf-8")
            content = dict(json.loads(text)) if path.suffix == ".json" else {}
        for key, value in content.items() if path.name in (CONFIG_FILE, TOKENIZER_FILES[1]) else ():
            kind, words = TYPES.get(key, (object, ""))
            stored = value.get("content") if isinstance(value, dict) and kind is str else value
            if value is not None and not isinstance(stored, kind):
                raise UserError(f"{path}: {key} must be {words}, but is {value!r}; {DOWNLOAD_AGAIN}")
        if path.name == "tokenizer.json":
            with refusing(f"{path}: must be readable by tokenizers", DOWNLOAD_AGAIN, "tokenizers"):
                Tokenizer.from_file(str(path))


def weight_files(target_dir: Path) -> list[Path]:
    """Returns a checkpoint's safetensors files; without an index, `model.safetensors` alone if there is one.

    Raises UserError for files of which engines would read others.
    """
    index, single = target_dir / INDEX, target_dir / "model.safetensors"
    if index.is_file():
        files = [target_dir / name for name in indexed_files(index)]
        if single.is_file() and single not in files:
            raise UserError(
                f"{target_dir}: must have either {single.name} or {index.name}, but has both, and transformers "
                "would read only the first; remove the one that does not belong to the checkpoint"
            )
    else:
        found = sorted(target_dir.glob("*.safetensors"))
        refuse_repeated([path for path in found if not path.name.startswith("consolidated")])
        files = [single] if single in found else found
    missing = [path for path in files if not path.is_file()]
    if missing or not files:
        raise UserError(
            f"{target_dir}: weights must be safetensors files, but "
            f"{missing[0] if missing else target_dir / '*.safetensors'} does not exist; convert or download the "
            "checkpoint"
        )
    return files


def refuse_repeated(files: Sequence[Path]) -> None:
    """Raises UserError if two files without an index hold the same tensor: engines take it from one or the other."""
    first = dict[str, Path]()
    for path in files if len(files) > 1 else ():
        for name in tensor_shapes(path):
            if (other := first.setdefault(name, path)) != path:
                raise UserError(
                    f"{path.parent}: without {INDEX}, must have one file with each tensor, but {name} is in "
                    f"{other.name} and {path.name}, and vLLM reads both, transformers one; remove the file that does "
                    "not belong to the checkpoint"
                )


def indexed_files(index: Path, advice: str = DOWNLOAD_AGAIN) -> list[str]:
    """Returns the names of the files in an index of tensors, each once. `advice` is for a damaged one."""
    weight_map: Any = read_json(index, advice).get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(x, str) for x in weight_map.values())):
        raise UserError(f"{index}: must name the file of each tensor in weight_map, but does not; {advice}")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    if outside:
        raise UserError(
            f"{index}: must name files in its own directory, but names {outside[0]!r}; copy the file there and correct "
            "the index"
        )
    return names


_SAMPLES_PER_TENSOR, _SAMPLE_BYTES = 8, 4096


def weights_fingerprint(target_dir: Path) -> str:
    """Returns a hash of every safetensors header and of eight samples of each tensor, each of at most 4 KiB."""
    digest = hashlib.sha256()
    for path in weight_files(target_dir):
        tensor_shapes(path)
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
