"""Keeps a dequantised copy of a GGUF file as a model directory, which all other code then reads.

The copy is in `gguf/` inside the cache directory: `$MTPTRAIN_CACHE`, or else `mtptrain` in `$XDG_CACHE_HOME` or
`~/.cache`. It may be deleted at any time.

The package gguf reads and dequantises the file, and transformers builds the tokenizer, which is corrected here.
Settings and tensors are translated here, by a whitelist. The readers of transformers ignore what they do not know, such
as RoPE factors, replace missing settings by the family's defaults, and hold all weights in memory at once.
"""

import hashlib
import json
import math
import os
import re
import reprlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader, ReaderTensor, dequantize
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from mtptrain.utils.errors import UserError, refusing
from mtptrain.utils.files import publish, read_json, save_tensors, sync, write_json, write_text

Rows = TypeVar("Rows", np.ndarray, torch.Tensor)

SUFFIX = ".gguf"
FORMAT = 6
"""Raised when the same GGUF file would be translated into another model directory."""
DOWNLOAD_AGAIN = "download it again"
CHOOSE_ANOTHER = "choose another file, or the model directory that it was converted from"
MERGE = "merge the parts with llama.cpp's `llama-gguf-split --merge`"

GEMMA3 = "gemma3"
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", GEMMA3: "gemma3_text"}
"""Names in llama.cpp, and those of transformers' configs. Mistral's files are of the architecture llama."""
INTERLEAVED = {"llama": ("attn_q", "attn_k"), "eagle3": ("attn_q", "attn_k")}
"""Modules of some architectures whose outputs llama.cpp rotates in pairs of neighbours: their rows are in another order
than in transformers."""
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_MODULES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Modules that are not those of `MODULES`."""
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Settings that a file must have, and their names in transformers."""
NUMBERS = (
    *(*SIZES, "vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.factor", "rope.scaling.original_context_length"),
)
GEMMA3_NUMBERS = ("attention.sliding_window", "rope.freq_base_swa")
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings that Llama 3.1, 3.2 and 3.3 share. They differ in `factor`."""

TOKENIZER, CHAT_TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
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
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
LISTS = {BYTE_LEVEL: ("tokens", "token_type", "merges"), SENTENCEPIECE: ("tokens", "token_type", "scores")}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""The `token_type` of tokens. All but the first stand for themselves, such as the end of a turn."""
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names in transformers of tokens with a meaning, and those of their keys."""
SPACE = "\u2581"
"""Stands for a space in the tokens of SentencePiece."""
SWITCHED_OFF = ("add_eos_token", "add_sep_token", "remove_extra_whitespaces")
END_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Names, without `_token_id`, of the keys of tokens at which llama.cpp stops."""
IN_TOKENIZER = ("tokens", "token_type", "merges", "scores", "token_type_count", "add_bos_token")
"""Keys of a tokenizer that may be there, beside those of ids of tokens and those with few allowed values."""
SAMPLED_BY = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
SAMPLING = {**SAMPLED_BY, "penalty_repeat": "repetition_penalty"}
"""Keys of `general.sampling` and their names in generation_config.json."""
OWN_SAMPLING = (
    *("sequence", "xtc_probability", "xtc_threshold", "penalty_last_n", "penalty_repeat"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
)
"""Further names of generation_config.json that llama.cpp's converter keeps in the file (gguf-py/gguf/metadata.py)."""
END_TOKENS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>", "<|end_of_text|>", "<end_of_utterance>", "<|flush|>"),
    *("<|calls|>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),  # noqa: RUF001
)
"""Texts of the tokens at which llama.cpp stops even if no key names them (`special_eog_ids` in llama-vocab.cpp), at
Gemma's `</s>` for struck text too."""
FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of further such tokens, by the key that takes their place. Of several, llama.cpp stops at one alone."""
NO_ENDS = (
    *(("<|end|>", {"<|return|>", "<|call|>"}), ("<|end|>", {"<|return|>", "<|calls|>"})),
    *(("<|end|>", {"<|flush|>", "<|call|>"}), ("<|end|>", {"<|flush|>", "<|calls|>"}), ("</s>", {"<|tool_response>"})),
    ("</s>", {"<|plamo:eos|>"}),
)
"""Those at which it does not stop if the vocabulary has certain others."""

_HEAD_BYTES, _NUM_SAMPLES, _SAMPLE_BYTES = 2**25, 4096, 4096


def is_gguf(path: str) -> bool:
    """Returns whether a target's path is that of a file. Those that Ollama keeps have no suffix."""
    return not Path(path).is_dir() and (path.lower().endswith(SUFFIX) or Path(path).is_file())


def gguf_of(path: str, given: str | None) -> Path | None:
    """Returns the target's GGUF file: that of `target.gguf`, or else of `target.path`; None if neither names one."""
    own = path if path and is_gguf(path) else None
    if given and own and Path(given).resolve() != Path(own).resolve():
        raise UserError(
            f"target.gguf: must be left out if target.path is a GGUF file, {own}, but is {given}; leave one of them out"
        )
    chosen = given or own
    return None if chosen is None else Path(chosen)


def dequantised_dir(path: Path, setting: str) -> Path:
    """Returns a model directory with the weights of a GGUF file in fp32, which is written when it is first needed."""
    if not path.is_file():
        raise UserError(
            f"{setting}: must be an existing file if it ends in {SUFFIX}, but {str(path)!r} does not exist; correct "
            "the path"
        )
    of_user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtptrain"
    cache = Path(os.environ.get("MTPTRAIN_CACHE") or of_user).expanduser()
    directory = cache / "gguf" / f"{path.stem}-{fingerprint(path)[:12]}"
    if directory.is_dir():
        return directory
    header = read_header(path)
    _check_settings(header)
    config, names = _model_of(header)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(directory.with_name(directory.name + ".lock")):  # ranks of a run come here at the same time
        if not directory.is_dir():  # otherwise another rank has written it
            _write_copy(directory, header, config, names)
    return directory


def fingerprint(path: Path) -> str:
    """Returns a hash of `FORMAT`, a file's size, its first 32 MiB with all settings, and 4,096 samples of 4 KiB."""
    num_bytes = path.stat().st_size
    digest = hashlib.sha256(f"{FORMAT} {num_bytes}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for i in range(_NUM_SAMPLES):
            file.seek(num_bytes * i // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def require_same_sizes(path: Path, target: PreTrainedConfig) -> None:
    """Refuse a GGUF file that does not exist, is damaged, or has other sizes than the target."""
    if not path.is_file():
        raise UserError(f"target.gguf: must be an existing GGUF file, but {path} does not exist; correct the path")
    metadata = read_header(path).metadata
    architecture = metadata.get("general.architecture")
    theirs = {name: metadata.get(f"{architecture}.{name}") for name in ("embedding_length", "block_count")}
    theirs["number of tokens"] = len(metadata.get(f"{TOKENIZER}tokens", ()))
    ours = dict(zip(theirs, (target.hidden_size, target.num_hidden_layers, target.vocab_size), strict=True))
    for name, size in ours.items():
        if theirs[name] != size:
            raise UserError(
                f"target.gguf: must be the target as a GGUF file, whose {name} is {size}, but in {path} it is "
                f"{theirs[name]}; convert the model of target.path with llama.cpp's convert_hf_to_gguf.py"
            )


def interleaved(rows: Rows, num_heads: int) -> Rows:
    """Returns the rows of a projection in llama.cpp's order, where the two outputs of a rotated pair are neighbours."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def uninterleaved(rows: Rows, num_heads: int) -> Rows:
    """Returns rows that are in llama.cpp's order in that of transformers, where halves of a head are rotated."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class GGUFHeader:
    """The metadata of a GGUF file and its tensors, whose data are read when they are needed."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor in torch's order."""
        return tuple(self.tensors[name].shape.tolist()[::-1])

    def dequantised(self, name: str) -> np.ndarray:
        """Returns a tensor in fp32."""
        return dequantize(self.tensors[name].data, self.tensors[name].tensor_type)

    def section(self, prefix: str) -> dict[str, Any]:
        """Returns the metadata whose keys begin with a prefix, by the rest of their keys."""
        return {key.removeprefix(prefix): x for key, x in self.metadata.items() if key.startswith(prefix)}

    @property
    def head_dim(self) -> int:
        sizes = self.section(f"{self.metadata['general.architecture']}.")
        return int(sizes.get("attention.key_length", sizes["embedding_length"] // sizes["attention.head_count"]))


def read_header(path: Path) -> GGUFHeader:
    """Returns the header of a GGUF file. Another file, or a damaged or incomplete one, is refused."""
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(1)  # gguf takes ten seconds for 262,144 tokens
def _read_header(path: Path, num_bytes: int, changed_ns: int) -> GGUFHeader:
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] != b"GGUF" or int.from_bytes(start[4:], "little") not in (2, 3):
        raise UserError(
            f"{path}: must be a GGUF file of version 2 or 3 in little-endian order, but begins with {start!r}; choose "
            "another file, or a model directory"
        )
    with refusing(f"{path}: must be a complete GGUF file", f"{DOWNLOAD_AGAIN}, or convert the model again", "gguf"):
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return GGUFHeader(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def adds_token(metadata: Mapping[str, Any], name: str) -> bool:
    """Returns whether llama.cpp adds the token `bos` or `eos` to texts and chats, as a file's metadata say."""
    model, split = metadata.get(f"{TOKENIZER}model"), metadata.get(f"{TOKENIZER}pre")
    by_default = {"bos": model == "llama" or split in WHOLE_WORDS_FIRST, "eos": model == "t5"}
    return bool(metadata.get(f"{TOKENIZER}add_{name}_token", by_default[name]))


def ends_of(vocabulary: Mapping[str, int], named: Mapping[str, int]) -> list[int]:
    """Returns the tokens at which llama.cpp ends an answer: those that keys name, and those that it knows by text."""
    texts = [*END_TOKENS, *(text for name, each in FIM_ENDS.items() if name not in named for text in each)]
    keys = [named[name] for name in END_IDS if name in named]
    ends = dict.fromkeys([*keys, *(vocabulary[text] for text in texts if text in vocabulary)])
    others = {vocabulary[text] for text, beside in NO_ENDS if text in vocabulary and beside <= vocabulary.keys()}
    return [token for token in ends if token not in others]


def _check_settings(header: GGUFHeader) -> None:
    """Refuse settings of a model or of a tokenizer that transformers would ignore, or read otherwise than llama.cpp."""
    path, metadata = header.path, header.metadata

    def must(key: str, be: str, holds: bool, advice: str = CHOOSE_ANOTHER) -> None:
        if not holds:
            raise UserError(f"{path}: {key} must be {be}, but is {reprlib.repr(metadata.get(key))}; {advice}")

    architecture = metadata.get("general.architecture")
    must("general.architecture", f"one of {', '.join(ARCHITECTURES)}", architecture in ARCHITECTURES)
    prefix, model = f"{architecture}.", str(metadata.get(f"{TOKENIZER}model"))
    numbers = (*NUMBERS, *(GEMMA3_NUMBERS if architecture == GEMMA3 else ()))
    for key in (prefix + name for name in numbers):
        value = metadata.get(key, None if key.removeprefix(prefix) in SIZES else 1)
        must(key, "a number above 0", isinstance(value, int | float) and 0 < value < math.inf, DOWNLOAD_AGAIN)
    allowed: dict[str, Sequence[object]] = {  # None: may be left out
        "general.type": ("model", None),
        "split.count": (0, 1, None),
        f"{prefix}attention.value_length": (header.head_dim, None),
        f"{prefix}rope.dimension_count": (header.head_dim, None),
        f"{prefix}rope.scaling.type": ("linear", "none", None),
        f"{prefix}rope.scaling.finetuned": (True, False, None),
        f"{prefix}expert_count": (0, None),
        f"{prefix}expert_used_count": (0, None),
        f"{TOKENIZER}model": tuple(LISTS),
        f"{TOKENIZER}add_space_prefix": (False, None, True) if model == SENTENCEPIECE else (False, None),
        **({f"{TOKENIZER}pre": SPLITS} if model == BYTE_LEVEL else {}),
        **{TOKENIZER + name: (False, None) for name in SWITCHED_OFF},
    }
    for key, values in allowed.items():
        be = " or ".join(str(value) for value in values if value is not None)
        must(key, be, metadata.get(key) in values, MERGE if key == "split.count" else CHOOSE_ANOTHER)
    settings = header.section(TOKENIZER)
    for name in LISTS[model]:
        must(TOKENIZER + name, "a list", isinstance(settings.get(name), list), DOWNLOAD_AGAIN)
    num_tokens, ids = len(settings["tokens"]), [name for name in settings if name.endswith("_token_id")]
    for name in LISTS[model] if model == SENTENCEPIECE else ("token_type",):
        is_whole = len(settings[name]) == num_tokens
        must(TOKENIZER + name, f"one number for each of the {num_tokens} tokens", is_whole, DOWNLOAD_AGAIN)
    for name in ids:
        is_token = isinstance(settings[name], int) and 0 <= settings[name] < num_tokens
        must(TOKENIZER + name, f"below the number of tokens {num_tokens}", is_token, DOWNLOAD_AGAIN)
    must(CHAT_TEMPLATE, "a text", isinstance(metadata.get(CHAT_TEMPLATE, ""), str), DOWNLOAD_AGAIN)
    known = {
        *allowed,
        *(prefix + name for name in numbers),
        *(TOKENIZER + name for name in (*IN_TOKENIZER, "pre", *ids)),
    }
    if unknown := [key for key in metadata if key.startswith((prefix, TOKENIZER)) and key not in known]:
        raise UserError(
            f"{path}: settings must be among those that this program can translate, but {', '.join(unknown)} are not; "
            f"{CHOOSE_ANOTHER}"
        )


def _model_of(header: GGUFHeader) -> tuple[PreTrainedConfig, dict[str, str]]:
    """Returns the config of the model that a GGUF file holds, and the names in transformers of its tensors."""
    path, architecture = header.path, header.metadata["general.architecture"]
    keys, rope = header.section(f"{architecture}."), _rope(header)
    must = f"{path}: settings must describe a model that transformers can build"
    with refusing(must, DOWNLOAD_AGAIN), torch.device("meta"):
        config = AutoConfig.for_model(
            ARCHITECTURES[architecture],
            **{name: keys[key] for key, name in SIZES.items()},
            vocab_size=keys.get("vocab_size", len(header.metadata[f"{TOKENIZER}tokens"])),
            num_key_value_heads=keys.get("attention.head_count_kv", keys["attention.head_count"]),
            head_dim=header.head_dim,
            **(_gemma3(keys, rope, header.head_dim) if architecture == GEMMA3 else {"rope_parameters": rope}),
            tie_word_embeddings="output.weight" not in header.tensors,
            dtype="float32",
        )
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    config.architectures = [type(model).__name__]
    modules = {**MODULES, **GEMMA3_MODULES} if architecture == GEMMA3 else MODULES
    names = {name: _translated(name, modules) for name in header.tensors}
    if rope["rope_type"] == "llama3":
        del names[ROPE_FACTORS]
    found = {translated: f"of shape {header.shape(name)}" for name, translated in names.items()}
    expected = {name: f"of shape {tuple(tensor.shape)}" for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    for name in sorted(found.keys() | expected.keys()):
        must, does = expected.get(name, "missing"), found.get(name, "missing")
        if must != does:
            raise UserError(f"{path}: {name} must be {must}, as the settings say, but is {does}; {CHOOSE_ANOTHER}")
    for name in names:
        kind = header.tensors[name].tensor_type
        advice = "quantise the model in another type, such as Q4_K_M"
        with refusing(f"{path}: {name} must have a type that the package gguf can dequantise", advice, "gguf"):
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    return config, names


def _rope(header: GGUFHeader) -> dict[str, Any]:
    architecture = header.metadata["general.architecture"]
    keys = header.section(f"{architecture}.")
    theta = float(keys.get("rope.freq_base", 10000.0))
    # llama.cpp's default kind is linear. Without a factor, it changes nothing.
    factor = 1.0 if keys.get("rope.scaling.type") == "none" else keys.get("rope.scaling.factor", 1.0)
    if factor != 1.0:
        return {"rope_type": "linear", "factor": factor, "rope_theta": theta}
    if architecture != "llama" or ROPE_FACTORS not in header.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    factors = header.dequantised(ROPE_FACTORS)
    expected = llama3_factors(float(factors.max()), theta, header.head_dim)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UserError(
            f"{header.path}: {ROPE_FACTORS} must hold the RoPE factors of Llama 3.1 or later, but holds others; "
            f"{CHOOSE_ANOTHER}"
        )
    return {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3_ROPE, "rope_theta": theta}


def llama3_factors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """Returns the factor [head_dim / 2] by which Llama 3.1's RoPE lengthens each wave, as llama.cpp stores it."""
    low, high, context = (float(LLAMA3_ROPE[name]) for name in LLAMA3_ROPE)
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = ((context / waves - low) / (high - low)).clip(0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _gemma3(keys: Mapping[str, Any], rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns what llama.cpp takes for granted in Gemma 3 (src/models/gemma3.cpp). RoPE is scaled in global layers."""
    num_layers, window = keys["block_count"], keys.get("attention.sliding_window")
    is_27b = num_layers == 62
    local = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base_swa", 10000.0))}
    return {
        "query_pre_attn_scalar": keys["embedding_length"] // keys["attention.head_count"] if is_27b else head_dim,
        "sliding_window": window,
        "layer_types": [
            "sliding_attention" if window and layer % 6 < 5 else "full_attention" for layer in range(num_layers)
        ],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _translated(name: str, modules: Mapping[str, str]) -> str:
    layer = re.match(r"blk\.(\d+)\.", name)
    module, _, parameter = name[layer.end() if layer else 0 :].rpartition(".")
    return (f"model.layers.{layer[1]}." if layer else "") + f"{modules.get(module, module)}.{parameter}"


def sampling_of(header: GGUFHeader) -> dict[str, Any]:
    """Returns how llama.cpp samples with a file unless a request says otherwise, as generation_config.json has it.

    Files hold numbers in fp32, so 0.95 is there as 0.949999988: it is the shortest number that becomes the same.
    """
    given = {
        SAMPLING.get(key, key): float(str(np.float32(value))) if isinstance(value, float) else value
        for key, value in header.section("general.sampling.").items()
    }
    if given.get("temperature", 1) <= 0:  # greedy, which transformers says in another way
        return {name: x for name, x in given.items() if name not in SAMPLED_BY.values()} | {"do_sample": False}
    return given | {"do_sample": True} if given.keys() & SAMPLED_BY.values() else given


def _write_copy(directory: Path, header: GGUFHeader, config: PreTrainedConfig, names: Mapping[str, str]) -> None:
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    weight_bytes = sum(4 * math.prod(header.shape(name)) for name in names)
    if weight_bytes > (free_bytes := shutil.disk_usage(directory.parent).free):
        raise UserError(
            f"{directory.parent}: {weight_bytes / 1e9:,.1f} GB must be free for the dequantised copy of {header.path}, "
            f"but {free_bytes / 1e9:,.1f} GB are; free some, or set MTPTRAIN_CACHE to a directory on a larger disk"
        )
    try:
        temporary.mkdir()
        settings = header.section(TOKENIZER)
        named = {name: settings[f"{name}_token_id"] for name in END_IDS if f"{name}_token_id" in settings}
        ends = ends_of({text: token for token, text in enumerate(settings["tokens"])}, named)
        tokens = {
            "bos_token_id": settings.get("bos_token_id"),
            "eos_token_id": ends or None,
            "pad_token_id": settings.get("padding_token_id"),
        }
        config.update(tokens)
        config.save_pretrained(temporary)
        GenerationConfig(**tokens, **sampling_of(header)).save_pretrained(temporary)
        _write_tokenizer(header, temporary)
        print(f"{header.path}: writing a copy in fp32, {weight_bytes / 1e9:,.2f} GB, to {directory}", flush=True)
        _write_weights(temporary, header, config, names)
        for file in temporary.iterdir():
            sync(file)
        publish(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_tokenizer(header: GGUFHeader, directory: Path) -> None:
    """Write the tokenizer with which texts become the same tokens as in llama.cpp."""
    path, settings = header.path, header.section(TOKENIZER)
    if settings["model"] == SENTENCEPIECE:
        _sentencepiece(header).save_pretrained(directory)
    else:
        _write_byte_level(header, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    for token, (text, kind) in enumerate(zip(settings["tokens"], settings["token_type"], strict=True)):
        if kind == CONTROL and (found := tokenizer.encode(text, add_special_tokens=False)) != [token]:
            raise UserError(
                f"{path}: transformers must read the control token {text!r} as {token}, but reads it as {found}; "
                f"{CHOOSE_ANOTHER}"
            )


def tokenizer_of(path: Path) -> PreTrainedTokenizerBase:
    """Returns the tokenizer with which texts become the same tokens as in llama.cpp, if `has_known_tokenizer`."""
    with TemporaryDirectory() as directory:
        _write_tokenizer(read_header(path), Path(directory))
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


def has_known_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Returns whether `tokenizer_of` knows how llama.cpp cuts texts with a file's tokenizer."""
    model, split = (metadata.get(TOKENIZER + key) for key in ("model", "pre"))
    return model == SENTENCEPIECE or (model == BYTE_LEVEL and split in SPLITS)


def _sentencepiece(header: GGUFHeader) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of llama.cpp's `llm_tokenizer_spm`, which joins the neighbours whose text scores highest.

    transformers' reader orders Gemma's pairs by token instead of score, does not find runs of spaces before it joins,
    and puts Llama's space before the first word alone, where llama.cpp puts one after each special token.
    """
    path, settings = header.path, header.section(TOKENIZER)
    tokens, kinds, scores = (settings[name] for name in LISTS[SENTENCEPIECE])
    ids = {text: token for token, text in enumerate(tokens)}
    pairs = {
        text: joined
        for text, token in sorted(ids.items(), key=lambda item: -scores[item[1]])
        if (joined := [(text[:i], text[i:]) for i in range(1, len(text)) if {text[:i], text[i:]} <= ids.keys()])
    }
    names = {name: settings.get(f"{key}_token_id") for name, key in SPECIAL.items()}
    # Runs of spaces have one score in Llama's files; the order of their tokens joins them as llama.cpp does.
    ranked = [scores[ids[text]] for text in pairs if kinds[ids[text]] == NORMAL and text.strip(SPACE)]
    for is_exact, must in (
        (len(ids) == len(tokens), "differ from each other"),
        (all(f"<0x{byte:02X}>" in ids for byte in range(256)), "stand for each byte"),
        (len({*ranked}) == len(ranked), "have different scores where they are joined of others"),
        (None not in (names["bos_token"], names["eos_token"]), "be named as bos_token_id and as eos_token_id"),
    ):
        if not is_exact:
            raise UserError(f"{path}: tokens of a SentencePiece tokenizer must {must}, but do not; {CHOOSE_ANOTHER}")
    merges = [pair for joined in pairs.values() for pair in joined]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True))
    has_prefix, first = settings.get("add_space_prefix", True), tokens[names["bos_token"] or 0]
    spaced = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaced] if has_prefix else [spaced])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_prefix else parts)
    added = [text for text in tokens if kinds[ids[text]] in (UNKNOWN, CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(x, normalized=False, special=kinds[ids[x]] != USER_DEFINED) for x in added])
    if adds_token(header.metadata, "bos"):
        tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A", special_tokens=[(first, ids[first])])
    special = {name: tokens[token] for name, token in names.items() if token is not None}
    template = header.metadata.get(CHAT_TEMPLATE)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **special
    )


def _write_byte_level(header: GGUFHeader, directory: Path) -> None:
    """Write the tokenizer as transformers reads it, corrected where that is not what llama.cpp reads."""
    path, settings = header.path, header.section(TOKENIZER)
    must = f"{path}: the tokenizer must be readable by transformers"
    with refusing(must, DOWNLOAD_AGAIN), TemporaryDirectory() as alone:
        (Path(alone) / path.name).symlink_to(path.absolute())  # else tokenizer.json beside it would be read instead
        # AutoTokenizer would build the same class, but read the file once more first, which takes seconds.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            alone, gguf_file=path.name, add_bos_token=adds_token(header.metadata, "bos")
        )
    tokenizer.save_pretrained(directory)
    saved, split = read_json(directory / "tokenizer.json"), settings["pre"]
    # transformers adds GPT-2's <|endoftext|> to a vocabulary without it
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < len(settings["tokens"])]
    saved["pre_tokenizer"] = OWN_SPLITS.get(split, saved["pre_tokenizer"])
    saved["model"]["ignore_merges"] = split in WHOLE_WORDS_FIRST
    write_text(directory / "tokenizer.json", json.dumps(saved, ensure_ascii=False))


def _write_weights(directory: Path, header: GGUFHeader, config: PreTrainedConfig, names: Mapping[str, str]) -> None:
    """Write each tensor to a safetensors file of its own, so that only one of them is in memory at a time."""
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, translated in names.items():
        weights, module = header.dequantised(name), name.split(".")[-2]
        if module in INTERLEAVED.get(header.metadata["general.architecture"], ()):
            weights = uninterleaved(weights, num_heads[module])
        if config.model_type == ARCHITECTURES[GEMMA3] and module.endswith("norm"):
            weights = weights - 1  # llama.cpp multiplies by what is stored, Gemma by 1 + weight
        weights = np.array(weights, np.float32)  # of the file itself, only reading is allowed
        save_tensors(directory / f"{translated}.safetensors", {translated: torch.from_numpy(weights)})
    files = {translated: f"{translated}.safetensors" for translated in names.values()}
    write_json(directory / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {}, "weight_map": files})
