"""Reads the tokenizer of a GGUF file with transformers, and refuses what transformers would read differently."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mtptrain.target.gguf_header import CHOOSE_ANOTHER, DOWNLOAD_AGAIN, GGUFHeader
from mtptrain.utils.errors import UserError, error_summary
from mtptrain.utils.files import read_json

BYTE_LEVEL = "gpt2"
"""The value of `tokenizer.ggml.model` for byte-level BPE. With SentencePiece, llama.cpp puts other spaces after special
tokens than transformers does."""

OWN_SPLITS = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
}
"""Rules for cutting text into words, by `tokenizer.ggml.pre`, that transformers would replace by GPT-2's."""
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Rules with which llama.cpp looks up a word before it merges its bytes, and by default begins a text with BOS."""
SPLITS = ("gpt-2", "qwen2", "deepseek-r1-qwen", *OWN_SPLITS, *WHOLE_WORDS_FIRST)
"""Rules with which transformers, corrected here, cuts text as llama.cpp does."""

LISTS = ("tokens", "token_type", "merges")
CONTROL = 3
"""The `token_type` of tokens that stand for themselves, such as the end of a turn."""
SWITCHED_OFF = ("add_space_prefix", "add_eos_token", "add_sep_token", "remove_extra_whitespaces")
ALLOWED = (
    *("model", "pre", *LISTS, "scores", "token_type_count", "add_bos_token", *SWITCHED_OFF),
    *("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id", "padding_token_id"),
    *("prefix_token_id", "suffix_token_id", "middle_token_id", "seperator_token_id", "mask_token_id", "cls_token_id"),
    *("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
    *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"),
)

END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TOKENS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "<|end_of_text|>", "<end_of_utterance>"),
)
"""Texts of the tokens at which llama.cpp stops even if no key names them (`special_eog_ids` in llama-vocab.cpp)."""


def check_tokenizer(header: GGUFHeader) -> None:
    """Refuse a tokenizer that transformers would not read as llama.cpp does.

    Raises:
        UserError: the file has no tokenizer, or one of its settings is not understood.
    """
    path, settings = header.path, _settings(header)
    if (kind := settings.get("model")) != BYTE_LEVEL:
        raise UserError(f"{path}: tokenizer.ggml.model must be {BYTE_LEVEL}, but is {kind!r}; {CHOOSE_ANOTHER}")
    if missing := [key for key in LISTS if not isinstance(settings.get(key), list)]:
        raise UserError(f"{path}: must have the list tokenizer.ggml.{missing[0]}, but does not; {DOWNLOAD_AGAIN}")
    if unknown := sorted(settings.keys() - set(ALLOWED)):
        raise UserError(
            f"{path}: settings of the tokenizer must be among those that this program can translate, but "
            f"tokenizer.ggml.{unknown[0]} is not; {CHOOSE_ANOTHER}"
        )
    if (split := settings.get("pre")) not in SPLITS:
        raise UserError(
            f"{path}: tokenizer.ggml.pre must be one of {', '.join(SPLITS)}, but is {split!r}; {CHOOSE_ANOTHER}"
        )
    for key in SWITCHED_OFF:
        if settings.get(key, False):
            raise UserError(f"{path}: tokenizer.ggml.{key} must be False, but is {settings[key]}; {CHOOSE_ANOTHER}")
    if not isinstance(template := header.metadata.get("tokenizer.chat_template", ""), str):
        raise UserError(f"{path}: tokenizer.chat_template must be a text, but is {template!r}; {DOWNLOAD_AGAIN}")
    num_tokens = len(settings["tokens"])
    if len(settings["token_type"]) != num_tokens:
        raise UserError(
            f"{path}: tokenizer.ggml.token_type must have an entry for each of the {num_tokens} tokens, but has "
            f"{len(settings['token_type'])}; {DOWNLOAD_AGAIN}"
        )
    for key, value in settings.items():
        if key.endswith("_token_id") and not (isinstance(value, int) and 0 <= value < num_tokens):
            raise UserError(
                f"{path}: tokenizer.ggml.{key} must be below the number of tokens {num_tokens}, but is {value!r}; "
                f"{DOWNLOAD_AGAIN}"
            )


def write_tokenizer(header: GGUFHeader, directory: Path) -> None:
    """Write the tokenizer of a GGUF file that `check_tokenizer` has accepted.

    Raises:
        UserError: transformers cannot build it, or would cut a control token into pieces.
    """
    path, settings = header.path, _settings(header)
    split, tokens = settings["pre"], settings["tokens"]
    begins_with_bos = settings.get("add_bos_token", split in WHOLE_WORDS_FIRST)
    try:
        # AutoTokenizer would build the same class, but read the file with the package gguf first, which takes seconds.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            path.absolute().parent, gguf_file=path.name, add_bos_token=begins_with_bos
        )
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UserError(
            f"{path}: the tokenizer must be readable by transformers, which reports {error_summary(error)}; "
            f"{DOWNLOAD_AGAIN}"
        ) from error
    tokenizer.save_pretrained(directory)
    saved = read_json(directory / "tokenizer.json")
    # transformers adds GPT-2's <|endoftext|> to a vocabulary without it
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < len(tokens)]
    saved["pre_tokenizer"] = OWN_SPLITS.get(split, saved["pre_tokenizer"])
    saved["model"]["ignore_merges"] = split in WHOLE_WORDS_FIRST
    (directory / "tokenizer.json").write_text(json.dumps(saved, ensure_ascii=False), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    for token, (text, kind) in enumerate(zip(tokens, settings["token_type"], strict=True)):
        if kind == CONTROL and (found := tokenizer.encode(text, add_special_tokens=False)) != [token]:
            raise UserError(
                f"{path}: transformers must read the control token {text!r} as {token}, but reads it as {found}; "
                f"{CHOOSE_ANOTHER}"
            )


def special_token_ids(header: GGUFHeader) -> dict[str, Any]:
    """Returns the tokens that begin, end and pad a text, by their names in a generation config."""
    settings = _settings(header)
    ends = [settings[key] for key in END_IDS if key in settings]
    ends += [token for token, text in enumerate(settings["tokens"]) if text in END_TOKENS]
    return {
        "bos_token_id": settings.get("bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
        "pad_token_id": settings.get("padding_token_id"),
    }


def _settings(header: GGUFHeader) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    return {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
