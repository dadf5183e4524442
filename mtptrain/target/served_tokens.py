"""Finds where servers cut a text into other tokens, or begin or end it otherwise, than it is done here."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import takewhile
from typing import Any

import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import as_words
from mtptrain.target.gguf import TOKENIZER, has_known_tokenizer, tokenizer_of
from mtptrain.target.llama_tokens import llama_tokens
from mtptrain.target.probe_chats import SPACED, accepted, question_chats, rendered
from mtptrain.utils.errors import error_summary
from mtptrain.utils.files import read_json

CONFIG = "tokenizer_config.json"
OVERRIDE = "--override-kv tokenizer.ggml.add_{}_token=bool:{}"
TEXT = "It's  12345 words\n\n a"
"""Is cut in other places by other rules for words, numbers and spaces."""
UNNAMED = {"llama": "CodeLlamaTokenizer"}
"""The class that transformers 5.5 takes for a family, and later ones do not, if no file names one."""
RESTORED = r"((Code)?Llama|Gemma)Tokenizer(Fast)?|CohereTokenizerFast"
"""Classes whose add_bos_token SGLang reads, true by default, where transformers takes the post-processor alone."""
MISTRAL = ("consolidated*.safetensors", "params.json", "tekken.json", "tokenizer.model.v*")
"""What vLLM 0.32 reads of a folder, if the first is there: weights, config and tokenizer of Mistral's own format."""
FLAGS, NOT_OF_PHI = ("lstrip", "rstrip", "single_word"), ("<unk>", "<s>", "<|endoftext|>")
"""What llama.cpp b11434 does not read of added tokens; in a file that `general.name` calls a phi-3, all but three strip
the space after them (src/llama-vocab.cpp)."""
LLAMA = f"llama.cpp, which passes over {', '.join(FLAGS)} of added tokens, normalizers and add_prefix_space,"
IN_GGUF = "llama.cpp, by the tokens of target.gguf,"
AS_IT_IS = (
    f"set tokenizer_class in {CONFIG} to PreTrainedTokenizerFast, with which all read tokenizer.json as it is (except "
    "for a qwen2, which keeps its class)"
)
AS_STORED = {
    *(family for family, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items() if name == "TokenizersBackend"),
    *(tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS | {"deepseek_v2", "deepseek_v3", "deepseek_v32"}),
} - {"internlm3", "iquestcoder"}
"""Families for which transformers 5.19, too, does not choose the class that tokenizer_config.json names."""


def tokens_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Yields what cuts texts and chats into other tokens than here: another class, tokenizer.json, or llama.cpp."""
    tokenizer, stored, family = target.tokenizer, target.directory / "tokenizer.json", target.config.model_type
    files = [path for path in (target.directory / CONFIG, target.directory / "config.json") if path.is_file()]
    declared = next(filter(None, (read_json(path).get("tokenizer_class") for path in files)), None)
    name, others = declared or UNNAMED.get(family, ""), dict[str, Callable[[], Any]]()
    named = getattr(transformers, name, type(tokenizer))
    if family not in AS_STORED and not isinstance(tokenizer, named):
        versions = ["5.19 (of vLLM 0.32)"] * bool(declared) + ["5.5 (of OpenVINO 2026.4.1)"] * (family in UNNAMED)
        cutter = f"{name}, which transformers {' and '.join(versions)} chooses,"
        others[cutter] = partial(named.from_pretrained, target.directory)
    if stored.is_file():
        others["tokenizer.json itself"] = partial(PreTrainedTokenizerFast, tokenizer_file=str(stored))
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if (plain := _as_llama_reads(content, str(target.gguf_metadata.get("general.name")))) != content:
        others[LLAMA] = partial(PreTrainedTokenizerFast, tokenizer_object=Tokenizer.from_str(json.dumps(plain)))
    if target.given_gguf and target.gguf and has_known_tokenizer(target.gguf_metadata):
        others[IN_GGUF] = partial(tokenizer_of, target.gguf)
    elif target.given_gguf and target.gguf_metadata:
        kind = as_words({name: target.gguf_metadata.get(TOKENIZER + name, "missing") for name in ("model", "pre")})
        yield (
            f"{target.gguf}: the tokens of a text in llama.cpp should be known here, but are not for a tokenizer of "
            f"{kind}; see what `mtptrain serving-check` says of chats, or give llama-server prompts as token ids"
        )
    chat = accepted(tokenizer, *SPACED[1:], SPACED[1])
    chats = [rendered(tokenizer, *each, add_generation_prompt=True) for each in (chat, question_chats(tokenizer)[0])]
    texts = (TEXT, *chats)  # with a space after each special token, and without
    ours = _cut(lambda: tokenizer, texts)
    splits = getattr(tokenizer, "split_special_tokens", False)
    mend = f"set split_special_tokens in {CONFIG} to false" if splits else AS_IT_IS
    mends, known = {LLAMA: "give it prompts as token ids", IN_GGUF: "convert the target again"}, [ours]
    for cutter, load in others.items():
        if (cut := _cut(load, texts)) in known:
            continue
        known.append(cut)
        text, own, theirs = next(each for each in zip(texts, ours, cut, strict=True) if each[1] != each[2])
        yield (
            f"{target.directory}: servers should cut {text!r} into {own}, as {type(tokenizer).__name__} here, but "
            f"{cutter} gives {theirs}; {mends.get(cutter, mend)}"
        )
    mistral = [path.name for name in MISTRAL for path in sorted(target.directory.glob(name))]
    if any(name.startswith("consolidated") for name in mistral):
        has_own = any(name.startswith("tek") or ".v" in name for name in mistral)
        as_text = ", the tokenizer by mistral_common, which takes names of special tokens in a chat for plain text"
        yield (
            f"{target.directory}: servers should read the weights, settings and tokenizer that are read here, but vLLM "
            f"0.32 reads {', '.join(mistral)} instead{as_text * has_own}; start it with --load-format hf "
            "--config-format hf --tokenizer-mode hf, or remove these files"
        )


def _as_llama_reads(tokenizer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a tokenizer.json as llama.cpp b11434 reads it from a GGUF file whose `general.name` this is.

    It knows no flags of added tokens, except `rstrip` for Phi-3, and of byte-level BPE no normalizer or first space.
    With SentencePiece, the space that begins a text is after each special token too.
    """
    is_phi = re.search("phi-?3", name.lower()) is not None
    added = [
        token | dict.fromkeys(FLAGS, False) | {"rstrip": is_phi and token["content"] not in NOT_OF_PHI}
        for token in tokenizer["added_tokens"]
    ]
    changed = deepcopy({**tokenizer, "added_tokens": added})
    steps = changed["pre_tokenizer"] or {}
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "ByteLevel":
            step["add_prefix_space"], changed["normalizer"] = False, None
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "always"
    return changed


def _cut(load: Callable[[], Any], texts: Sequence[str]) -> list[Any]:
    """Returns the tokens of texts by a tokenizer, or the error of one that is for other files."""
    try:
        tokenizer = load()
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    except Exception as error:
        return [error_summary(error)] * len(texts)


def _added(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the tokens that a tokenizer puts before and after a text."""
    ids, plain = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (True, False))
    start = next((place for place in range(len(ids)) if ids[place : place + len(plain)] == plain), 0)
    return ids[:start], ids[start + len(plain) :]


def _restored(target: TargetFiles) -> PreTrainedTokenizerBase:
    """Returns the tokenizer with the post-processor that SGLang 0.5.23 gives it (srt/utils/hf_transformers)."""
    tokenizer, path = deepcopy(target.tokenizer), target.directory / CONFIG
    settings = read_json(path) if path.is_file() else {}
    adds_bos = settings.get("add_bos_token")
    wanted = {"add_bos_token": adds_bos is None or adds_bos, "add_eos_token": False}
    if re.fullmatch(RESTORED, settings.get("tokenizer_class") or "") and any(
        getattr(tokenizer, name, None) != value for name, value in wanted.items()
    ):
        for name, value in wanted.items():
            setattr(tokenizer, name, value)
    return tokenizer


def texts_elsewhere(documents: Sequence[NDArray[Any]], target: TargetFiles) -> Iterator[str]:
    """Yields how a server begins or ends texts otherwise than documents [S each] and each other, and what to do."""
    yield from tokens_elsewhere(target)
    tokenizer, llama = target.tokenizer, llama_tokens(target)
    (first, last), (restored_first, restored_last) = map(_added, (tokenizer, _restored(target)))
    firsts = {"SGLang": (restored_first, f"set add_bos_token in {CONFIG} to {str(bool(first)).lower()}")}
    if llama.unknown:
        yield llama.unknown
    else:
        override = OVERRIDE.format("bos", str(bool(first)).lower())
        if first and first != [llama.ids["bos"]]:
            override += f" and --override-kv {TOKENIZER}bos_token_id=int:{first[0]}"
        firsts["llama-server"] = llama.first, f"start it with {override}"
    for server, (tokens, mend) in firsts.items():
        if tokens != first:
            ours, theirs = (repr(tokenizer.decode(each)) if each else "no token" for each in (first, tokens))
            yield (
                f"{target.directory}: {server} should begin texts with {ours}, as the tokenizer, and so vLLM, but "
                f"begins them with {theirs}; {mend}"
            )
    sides = {"vLLM, as the tokenizer does": bool(last), "SGLang": bool(restored_last)}
    sides["llama-server"] = llama.adds["eos"] and not llama.unknown
    if enders := ", and ".join(name for name, side in sides.items() if side):
        end = tokenizer.decode(last or [llama.ids["eos"]])
        yield (
            f"{target.directory}: the text of a prompt should end without {end}, as documents go on "
            f"after it, but it is added by {enders}; correct the post-processor in tokenizer.json, start "
            f"llama-server with {OVERRIDE.format('eos', 'false')}, or give prompts as token ids"
        )
    bos_id = tokenizer.bos_token_id
    expected = first.count(bos_id)
    num_bos = [sum(1 for _ in takewhile(lambda token: token == bos_id, ids[:2])) for ids in documents]
    for number in {*num_bos} - {expected}:
        advice = "correct the data"
        if number == 1:  # as `text_files` does
            advice = f"begin the text of each prompt with {tokenizer.bos_token}"
        yield (
            f"prompts: documents should begin with {expected} {tokenizer.bos_token}, as the tokenizer begins texts, "
            f"here and in servers, but {num_bos.count(number):,} of {len(documents):,} begin with {number}; "
            f"{advice}, or give prompts as token ids"
        )
