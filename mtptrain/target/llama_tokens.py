"""Finds the special tokens that a target has in llama.cpp: those of its GGUF file, or of the one that is converted.

The rules are those of b11434: gguf-py/gguf/vocab.py, whose release 0.19.0 has others, and src/llama-vocab.cpp.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtptrain.target.files import TargetFiles
from mtptrain.target.gguf import END_IDS, SENTENCEPIECE, TOKENIZER, adds_token, ends_of
from mtptrain.utils.files import read_json

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")

_GLM = {"eos": "<|endoftext|>", "eot": "<|user|>"}
_LLAMAS = "(Llama|Mistral|Mixtral|Apertus|Arcee|SmolLM3|Granite(?!MoeHybrid).*)ForCausalLM"
RULES: Mapping[str, Mapping[str, Any]] = {
    "GlmForCausalLM": _GLM,
    "Glm(4|4v|Ocr)For": {**_GLM, "bos": "<|endoftext|>"},
    "Glm(4Moe|4vMoe|4MoeLite|MoeDsa|5Next)For": {"bos": "[gMASK]", "eot": "<|user|>", "eom": "<|observation|>"},
    "SolarOpenForCausalLM": {"bos": "<|startoftext|>", "eos": "<|endoftext|>", "eot": "<|endoftext|>"},
    "Dots3Note": {"eot": "<|endofassistant|>"},
    "GemmaForCausalLM": {"eot": 107},
    f"{_LLAMAS}:32016$": {"eot": 32010},
    f"{_LLAMAS}:49152$": {"adds_bos": False},
    "Gemma4(Unified)?For": {"adds_bos": True},
}
"""What the converter's `conversion/` sets, by the architecture of config.json and the size of the vocabulary: tokens,
if the files name none, and whether BOS is added to texts."""
OWN_RULES = "HunYuan|InternLM|Kimi(K3|Linear)|Laguna|M(PT|pt)For|Muse|P[Ll]a[Mm]o|R(wkv|WKV)|Q(Wen|wen3(ASR|TTS|Omni))"
"""Architectures for which it sets BOS or ends by constants, lists or programs that are not followed here."""


@dataclass(frozen=True)
class LlamaTokens:
    """The special tokens of a target in llama.cpp."""

    ids: Mapping[str, int]
    """The tokens `bos` and `eos`."""
    adds: Mapping[str, bool]
    """Whether each is added to texts."""
    ends: list[int]
    """Tokens that end an answer."""
    unknown: str = ""
    """Why all that may be wrong, and what to do; "" if it is known."""

    @property
    def first(self) -> list[int]:
        """What is put before a text."""
        return [self.ids["bos"]] if self.adds["bos"] else []


def llama_tokens(target: TargetFiles) -> LlamaTokens:
    unknown, metadata = "", target.gguf_metadata
    if metadata:
        adds = {name: adds_token(metadata, name) for name in ("bos", "eos")}
        keys = {name: metadata.get(f"{TOKENIZER}{name}_token_id") for name in ("bos", *END_IDS)}
        vocabulary = {text: token for token, text in enumerate(metadata[f"{TOKENIZER}tokens"])}
        is_sentencepiece = metadata.get(f"{TOKENIZER}model") == SENTENCEPIECE
    else:
        vocabulary, is_sentencepiece = target.tokenizer.get_vocab(), (target.directory / "tokenizer.model").is_file()
        keys, adds, unknown = _converted(target)
        adds = {"bos": is_sentencepiece, "eos": False} | adds
    named = {name: token for name, token in keys.items() if token is not None}
    # Without a key, llama.cpp takes these.
    ids = ({"bos": 1, "eos": 2} if is_sentencepiece else {"bos": 11, "eos": 11}) | named
    return LlamaTokens(ids, adds, ends_of(vocabulary, ids), unknown)


def _converted(target: TargetFiles) -> tuple[dict[str, int | None], dict[str, bool], str]:
    """Returns the special tokens that the converter writes for a directory, which it adds, and what is unknown."""
    paths = [target.directory / name for name in FILES]
    stored, settings, config = (read_json(path) if path.is_file() else {} for path in paths)

    def text(*names: str) -> str | None:
        stored = (settings.get(f"{name}_token") for name in names)
        found = (each.get("content") if isinstance(each, dict) else each for each in stored)
        return next((each for each in found if each and isinstance(each, str)), None)

    texts, adds = {"bos": text("bos", "cls"), "eos": text("eos", "sep")}, dict[str, bool]()
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
                adds["bos"] = first in (settings.get("bos_token"), settings.get("cls_token") or first)  # as stored
            if last:
                if last != texts["eos"]:
                    texts |= {"eos": last, **({"eot": texts["eos"]} if settings else {})}
                adds["eos"] = True
    for name in ("bos", "eos"):
        if isinstance(setting := settings.get(f"add_{name}_token"), bool):
            adds.setdefault(name, setting)
    added = {each["content"]: each["id"] for each in stored.get("added_tokens", [])}
    ids, of_text = dict[str, int | None](), config.get("text_config") or {}
    for name, content in texts.items():
        of_config = [place.get(f"{name}_token_id") for place in (config, of_text)]
        own = added.get(content) if settings else None
        ids[name] = next((each for each in (own, *of_config) if type(each) is int), None)
    # Some architectures have further rules.
    [architecture, *_] = of_text.get("architectures") or config.get("architectures") or [""]
    key = f"{architecture}:{target.config.vocab_size}"
    for name, content in next((rule for each, rule in RULES.items() if re.match(each, key)), {}).items():
        if name == "adds_bos":
            adds["bos"] = content
        elif ids.get(name) is None:
            ids[name] = added.get(content, None if isinstance(content, str) else content)
    unknown = (
        f"{target.directory}: which tokens begin and end texts in llama.cpp is not known here, as its converter has "
        f"rules of its own for a {architecture}; convert the target, and set target.gguf to the file"
    )
    return ids, adds, unknown * (re.match(OWN_RULES, architecture) is not None)
