"""Finds the special tokens that a target has in llama.cpp: those of its GGUF file, or of the one that is converted.

The rules are those of b11434: gguf-py/gguf/vocab.py, whose release 0.19.0 has others, and src/llama-vocab.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtptrain.target.files import TargetFiles
from mtptrain.target.gguf import SENTENCEPIECE, TOKENIZER, adds_token, ends_of, read_header
from mtptrain.utils.files import read_json

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


@dataclass(frozen=True)
class LlamaTokens:
    """The special tokens of a target in llama.cpp."""

    ids: Mapping[str, int]
    """The tokens `bos` and `eos`."""
    adds: Mapping[str, bool]
    """Whether each is added to texts."""
    ends: list[int]
    """Tokens that end an answer."""

    @property
    def first(self) -> list[int]:
        """What is put before a text."""
        return [self.ids["bos"]] if self.adds["bos"] else []


def llama_tokens(target: TargetFiles) -> LlamaTokens:
    if target.gguf is not None and target.gguf.is_file():
        metadata = read_header(target.gguf).metadata
        adds = {name: adds_token(metadata, name) for name in ("bos", "eos")}
        keys = {name: metadata.get(f"{TOKENIZER}{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
        vocabulary = {text: token for token, text in enumerate(metadata[f"{TOKENIZER}tokens"])}
        is_sentencepiece = metadata.get(f"{TOKENIZER}model") == SENTENCEPIECE
    else:
        vocabulary, is_sentencepiece = target.tokenizer.get_vocab(), (target.directory / "tokenizer.model").is_file()
        keys, adds = _converted(target)
        adds = {"bos": is_sentencepiece, "eos": False} | adds
    named = {name: token for name, token in keys.items() if token is not None}
    # Without a key, llama.cpp takes these.
    ids = ({"bos": 1, "eos": 2} if is_sentencepiece else {"bos": 11, "eos": 11}) | named
    return LlamaTokens(ids, adds, ends_of(vocabulary, [token for name, token in ids.items() if name != "bos"]))


def _converted(target: TargetFiles) -> tuple[dict[str, int | None], dict[str, bool]]:
    """Returns the special tokens, and which are added to texts, that the converter writes for a directory."""
    paths = [target.directory / name for name in FILES]
    stored, settings, config = (read_json(path) if path.is_file() else {} for path in paths)

    def text(*names: str) -> str | None:
        stored = (settings.get(f"{name}_token") for name in names)
        found = (each.get("content") if isinstance(each, dict) else each for each in stored)
        return next((each for each in found if each and isinstance(each, str)), None)

    texts, adds = {"bos": text("bos", "cls"), "eos": text("eos", "sep"), "eot": None}, dict[str, bool]()
    processor: dict[str, Any] = stored.get("post_processor") or {}
    for each in processor.get("processors", [processor]):
        if each.get("type") == "ByteLevel":
            adds = {"bos": False, "eos": False} | adds
        elif each.get("type") == "RobertaProcessing":
            adds |= {"bos": True, "eos": True}
        elif each.get("type") == "TemplateProcessing" and len(each["single"]) > 1:
            first, last = (each["single"][place].get("SpecialToken", {}).get("id") for place in (0, -1))
            if first:
                texts["bos"] = texts["bos"] or first
                adds["bos"] = first in (texts["bos"], text("cls") or first)
            if last:
                if last != texts["eos"]:
                    texts |= {"eos": last, "eot": texts["eos"]}
                adds["eos"] = True
    for name in ("bos", "eos"):
        if isinstance(setting := settings.get(f"add_{name}_token"), bool):
            adds.setdefault(name, setting)
    added = {each["content"]: each["id"] for each in stored.get("added_tokens", [])} if settings else {}
    ids: dict[str, int | None] = {}
    for name, content in texts.items():
        of_config = [place.get(f"{name}_token_id") for place in (config, config.get("text_config") or {})]
        ids[name] = next((each for each in (added.get(content), *of_config) if type(each) is int), None)
    return ids, adds
