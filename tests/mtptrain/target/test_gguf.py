"""Tests that a GGUF file is read as the model that llama.cpp serves, once, or refused before anything is written."""

import re
import struct
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.gguf import LLAMA3_ROPE, gguf_of, read_header
from mtptrain.target.hub import config_dir, load_tokenizer, resolve_target
from mtptrain.target.llama_tokens import llama_tokens
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from tests.conftest import make_target, make_tokenizer
from tests.gguf_files import F32, MERGED, PIECES, Q8, architecture_of, sentencepiece_settings, write_gguf
from tests.mtptrain.target.inputs import CPU, TOKENS
from tests.programs import largest_file
from tests.sealed import flip_bit

GROUPED: dict[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TEXT = "<user>in 2024,  7 of  12<|end|>\n\n 5 b<assistant>"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), **GROUPED)


@pytest.fixture
def file(tmp_path: Path, target: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", target)


def logits_of(directory: Path, **settings: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **settings)
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    ("family", "settings", "kind"),
    [
        ("llama", {}, Q8),
        ("llama", {"tie_word_embeddings": False}, F32),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}, Q8),
        ("qwen2", {"head_dim": 16}, Q8),
        ("qwen3", {"head_dim": 32}, Q8),
        ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16}, Q8),
    ],
)
def test_a_gguf_file_has_the_logits_of_its_dequantised_weights(
    tmp_path: Path, family: str, settings: dict[str, Any], kind: GGMLQuantizationType
) -> None:
    target = make_target(tmp_path / "target", family, {**GROUPED, **settings})
    config = read_target_config(target)
    metadata = {f"{architecture_of(config)}.rope.scaling.factor": config.rope_parameters.get("factor")}
    directory = resolve_target(str(write_gguf(tmp_path / "tiny.gguf", target, kind, metadata)))
    if kind is Q8:  # each matrix is what its blocks stand for
        weights = load_file(target / "model.safetensors")
        rounded = {name: dequantize(quantize(x, Q8), Q8) if x.ndim == 2 else x for name, x in weights.items()}
        save_file(rounded, target / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits_of(directory), logits_of(target), rtol=1e-4, atol=1e-3)
    assert load_target(directory, torch.float32, CPU).config.architectures == config.architectures
    found, expected = load_tokenizer(directory), make_tokenizer()
    assert found.encode(TEXT) == expected.encode(TEXT) and found.decode(found.encode(TEXT)) == TEXT
    assert found.chat_template == expected.chat_template and found.eos_token_id == 256
    assert len(found) == 260 and max(found.encode("<|endoftext|>")) < 256


def llama3_rope(factor: float) -> tuple[dict[str, Any], np.ndarray]:
    """Returns RoPE parameters and, computed by transformers, the factors that llama.cpp stores for them."""
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **LLAMA3_ROPE}
    config = LlamaConfig(**GROUPED, max_position_embeddings=2**17, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    return parameters, (plain / scaled).numpy()


def test_rope_factors_of_either_kind_become_rope_parameters(tmp_path: Path, target: Path) -> None:
    for kind, factor in ((None, 4.0), ("linear", 4.0), ("none", None)):
        settings = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
        directory = resolve_target(str(write_gguf(tmp_path / "tiny.gguf", target, settings=settings)))
        assert read_target_config(directory).rope_parameters.get("factor") == factor
    for factor in (8.0, 32.0):  # of Llama 3.1 and 3.2
        parameters, factors = llama3_rope(factor)
        longer = {"rope_parameters": parameters, "max_position_embeddings": 2**17}
        target = make_target(tmp_path / f"target {factor}", **GROUPED, **longer)
        file = write_gguf(tmp_path / "tiny.gguf", target, F32, tensors={"rope_freqs.weight": factors})
        directory = resolve_target(str(file))
        assert read_target_config(directory).rope_parameters == pytest.approx(parameters)
        torch.testing.assert_close(logits_of(directory), logits_of(target), rtol=1e-4, atol=1e-3)


def with_spaces(split: str, **settings: Any) -> dict[str, Any]:
    """Returns the settings of a tokenizer with a rule for words, and with tokens for two and for three spaces."""
    space = "Ġ"
    tokens = [*make_tokenizer().convert_ids_to_tokens(list(range(258))), space * 2, space * 3]
    return {
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"{space} {space}"],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 2 + [1] * 2,
        "tokenizer.chat_template": None,
        **settings,
    }


def test_words_are_cut_and_looked_up_and_a_text_begins_as_in_llama_cpp(tmp_path: Path, target: Path) -> None:
    pieces, tokens = {}, {}
    for split, bos in (("gpt-2", None), ("gpt-2", True), ("smollm", None), ("llama-bpe", None), ("llama-bpe", False)):
        settings = with_spaces(split, **{"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.add_bos_token": bos})
        tokenizer = load_tokenizer(resolve_target(str(write_gguf(tmp_path / "tiny.gguf", target, settings=settings))))
        pieces[split], tokens[split, bos] = tokenizer.tokenize("a  7"), tokenizer.encode("   ")
        assert tokenizer.chat_template is None
    assert pieces["gpt-2"] == ["a", "Ġ", "Ġ", "7"] and pieces["smollm"] == ["a", "ĠĠ", "7"]
    assert tokens["llama-bpe", None] == [257, 259] and tokens["llama-bpe", False] == [259]
    assert 257 not in tokens["gpt-2", None] and 259 not in tokens["gpt-2", None]
    assert tokens["gpt-2", True] == [257, *tokens["gpt-2", None]]


def pieces_of(text: str) -> list[str]:
    """Returns what llama.cpp's `llm_tokenizer_spm` makes of a text without special tokens, by a plain loop."""
    symbols = list(text.replace(" ", "\u2581"))
    while joined := [(PIECES.index(x + y), i) for i, (x, y) in enumerate(pairwise(symbols)) if x + y in PIECES]:
        place = min(joined)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    split = [[x] if x in PIECES else [f"<0x{byte:02X}>" for byte in x.encode()] for x in symbols]
    return [piece for pieces in split for piece in pieces]


SPECIAL_PARTS = r"(<s>|</s>|<turn>|<unk>|  |<b>)"
TEXTS = [
    "hello the tab",
    " a  ab   abba\n",
    "<turn>the <b> hell<b>to</s>\u2581\u2581",
    "\u00e9 <0x0A> \U0001f916",
    "<s>a",
]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_joins_the_pair_that_scores_highest_after_special_tokens(
    tmp_path: Path, target: Path, has_prefix: bool
) -> None:
    larger = make_target(tmp_path / "larger", **GROUPED, vocab_size=300)
    changed = {} if has_prefix else {"add_space_prefix": False, "add_bos_token": False}
    file = write_gguf(tmp_path / "tiny.gguf", larger, settings=sentencepiece_settings(**changed))
    tokenizer = load_tokenizer(resolve_target(str(file)))
    assert tokenizer.bos_token_id == 1 and TargetFiles(resolve_target(str(file))).generation.eos_token_ids == (2,)
    for text in TEXTS:
        expected = ["<s>"] if has_prefix else []
        for part in filter(None, re.split(SPECIAL_PARTS, text)):
            is_special = re.fullmatch(SPECIAL_PARTS, part)
            expected += [part] if is_special else pieces_of(" " * has_prefix + part)
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == expected
    assert tokenizer.decode(tokenizer.encode(TEXTS[0]), skip_special_tokens=True) == TEXTS[0]


SENTENCEPIECE: list[tuple[dict[str, Any], str]] = [
    ({"scores": [0.0] * 300}, "tokens of a SentencePiece tokenizer must have different scores where they are joined"),
    ({"scores": [0.0] * 7}, "tokenizer.ggml.scores must be one number for each of the 300 tokens"),
    ({"tokens": [str(i) for i in range(300)]}, "tokens of a SentencePiece tokenizer must stand for each byte, but"),
    ({"bos_token_id": None}, "tokens of a SentencePiece tokenizer must be named as bos_token_id and as eos_token_id"),
    ({"model": "t5"}, "tokenizer.ggml.model must be gpt2 or llama, but is 't5'"),
    ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces must be False, but is True"),
]


def test_a_tokenizer_of_sentencepiece_that_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", **GROUPED, vocab_size=300)
    for changed, message in SENTENCEPIECE:
        file = write_gguf(tmp_path / "tiny.gguf", target, settings=sentencepiece_settings(**changed))
        assert_refused(file, message)


def test_every_token_at_which_llama_cpp_stops_ends_a_text(tmp_path: Path, target: Path) -> None:
    tokens = [*make_tokenizer().convert_ids_to_tokens(list(range(257))), MERGED, "<|endoftext|>", "<assistant>"]
    settings = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eot_token_id": 257}
    directory = resolve_target(str(write_gguf(tmp_path / "tiny.gguf", target, settings=settings)))
    # <|end|> is 256, the key of the turn's end names 257, and llama.cpp knows the text of 258
    assert TargetFiles(directory).generation.eos_token_ids == (256, 257, 258)
    settings["tokenizer.ggml.tokens"] = [*tokens[:-1], "<|fim_pad|>"]
    for key, ends in (({}, [256, 257, 258, 259]), ({"tokenizer.ggml.fim_pad_token_id": 9}, [256, 257, 9, 258])):
        gguf = write_gguf(tmp_path / "tiny.gguf", target, settings=settings | key)
        assert llama_tokens(TargetFiles(target, given_gguf=str(gguf))).ends == ends
        assert TargetFiles(resolve_target(str(gguf))).generation.eos_token_ids == tuple(ends)


def test_the_sampling_of_a_file_is_that_of_the_target(tmp_path: Path, target: Path) -> None:
    for sampling, expected in (
        ({"temp": 0.7, "top_k": 20}, {"do_sample": True, "temperature": 0.7, "top_k": 20}),
        ({"temp": 0.0, "top_p": 0.5, "penalty_repeat": 1.1}, {"do_sample": False, "repetition_penalty": 1.1}),
    ):
        settings = {f"general.sampling.{name}": value for name, value in sampling.items()}
        directory = resolve_target(str(write_gguf(tmp_path / "tiny.gguf", target, settings=settings)))
        found = TargetFiles(directory).generation
        assert {name: getattr(found, name) for name in expected} == expected and found.top_p is None


def test_a_file_is_dequantised_once_and_again_when_it_changes(
    file: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(4) as pool:  # as ranks that come at once
        [directory] = set(pool.map(resolve_target, [str(file)] * 4))
    assert capsys.readouterr().out == f"{file}: writing a copy in fp32, 0.00 GB, to {directory}\n"
    assert directory.parent == cache / "gguf" and directory.name.startswith("tiny-")
    assert config_dir(str(file)) == directory == resolve_target(str(file))
    assert capsys.readouterr().out == ""
    flip_bit(file)
    assert resolve_target(str(file)) != directory
    plain = file.rename(file.with_name("sha256-0123"))  # as Ollama names its files
    monkeypatch.delenv("MTPTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    directory = resolve_target(str(plain))
    assert directory.parent == cache / "mtptrain/gguf" and directory.name.startswith("sha256-0123-")


def test_what_a_kill_left_is_written_anew_and_a_copy_that_cannot_be_written_leaves_nothing(
    file: Path, cache: Path
) -> None:
    directory = resolve_target(str(file))
    temporary = directory.rename(directory.with_name(directory.name + ".tmp"))
    (temporary / "model.safetensors").write_bytes(b"half")
    # There is room for all files but the weights.
    with largest_file(40_000), pytest.raises(OSError, match="File too large") as caught:
        resolve_target(str(file))
    assert Path(caught.value.filename).suffix == ".safetensors"
    assert {path.suffix for path in (cache / "gguf").iterdir()} <= {".lock"}
    temporary.mkdir()
    assert resolve_target(str(file)) == directory and logits_of(directory).shape == (1, 60, 260)
    assert not temporary.exists()


def test_an_engine_gets_the_copy_or_the_snapshot_of_a_revision(file: Path, tmp_path: Path) -> None:
    assert all(TargetFiles(tmp_path, path).name_for_engines == str(tmp_path) for path in (str(file), "demo"))
    assert TargetFiles(tmp_path, "org/model").name_for_engines == "org/model"
    assert TargetFiles(tmp_path, "org/model", "v2").name_for_engines == str(tmp_path)


def test_paths_that_name_two_files_or_none_are_refused(tmp_path: Path) -> None:
    a, b = (str(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    assert gguf_of(a, None) == gguf_of(a, a) == gguf_of(str(tmp_path), a) == Path(a)
    assert gguf_of("hub/name", None) is None
    with pytest.raises(UserError, match=r"target\.gguf: must be left out if target\.path is a GGUF file, .*a\.gguf, b"):
        gguf_of(a, b)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UserError, match=r"target\.path: must be a model directory, but '.*/folder\.gguf' has"):
        resolve_target(f"{tmp_path}/folder.gguf")
    with pytest.raises(UserError, match=r"^head\.init_from: must be an existing file if it ends in \.gguf, but '.*/no"):
        resolve_target(f"{tmp_path}/no.GGUF", setting="head.init_from")


def assert_refused(file: Path, message: str) -> None:
    """Check that the file is refused with its path and the message, and that nothing is left in the cache."""
    with pytest.raises(UserError, match=rf"^{re.escape(str(file))}: {message}") as caught:
        resolve_target(str(file))
    assert "\n" not in str(caught.value)
    copies = file.parent / "cache/gguf"
    assert not copies.exists() or all(path.suffix == ".lock" for path in copies.iterdir())


NORM = b"output_norm.weight" + struct.pack("<IQ", 1, 64)
COMPLETE = "must be a complete GGUF file, but gguf reports .*; download it again"
DAMAGES: list[tuple[bytes, bytes, str]] = [
    (b"GGUF", b"text", "must be a GGUF file .* but begins with b'text"),
    (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "must be .* of version 2 or 3 in little-endian"),
    (b"blk.1.attn_k.", b"blk.0.attn_k.", COMPLETE),  # a name twice
    (
        NORM + b"\0",
        NORM + b"\x1a",
        "output_norm.weight must have a type that the package gguf can dequantise, but gguf reports",
    ),
]


def test_a_damaged_file_or_one_that_is_cut_off_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    table, start = whole.index(b"blk.0"), min(tensor.data_offset for tensor in read_header(file).tensors.values())
    for old, new, message in DAMAGES:
        assert old in whole
        file.write_bytes(whole.replace(old, new))
        assert_refused(file, message)
    for cut in (12, 30, 200, table - 1, table + 3, table + 20, start - 64, start + 1000, -100):
        file.write_bytes(whole[:cut])
        assert_refused(file, COMPLETE)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"split.count": 3}, "split.count must be 0 or 1, but is 3; merge the parts with"),
    (
        {"general.architecture": "rwkv7"},
        "general.architecture must be one of llama, .*gemma3, but is 'rwkv7'",
    ),
    ({"llama.attention.sliding_window": 64}, "settings must be .*, but llama.attention.sliding_window are not; choose"),
    ({"llama.block_count": None}, "llama.block_count must be a number above 0, but is None; download it again"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type must be linear or none, but is 'yarn'; choose"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count must be 16, but is 8"),
    (
        {"llama.attention.head_count": 3},
        "settings must describe a model that transformers can build, but transformers reports",
    ),
    ({"llama.vocab_size": 300}, r"model.embed_tokens.weight must be of shape \(300, 64\), .*, but is of shape \(260"),
    ({"llama.block_count": 1}, r"model.layers.1.input_layernorm.weight must be missing, .*, but is of shape \(64,\)"),
    ({"llama.block_count": 3}, r"model.layers.2.input_layernorm.weight must be of shape \(64,\), .*, but is missing"),
    (
        {"tokenizer.ggml.model": None},
        "tokenizer.ggml.model must be gpt2 or llama, but is None; choose",
    ),
    ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges must be a list, but is None; download it again"),
    ({"tokenizer.ggml.merges": ["one"]}, "the tokenizer must be readable by transformers, but transformers reports"),
    ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre must be gpt-2 or qwen2 or .*, but is 'falcon'; choose"),
    ({"tokenizer.ggml.eos_token_id": 260}, "tokenizer.ggml.eos_token_id must be below the number of tokens 260, but"),
    ({"tokenizer.ggml.token_type": [1] * 7}, "tokenizer.ggml.token_type must be one number for each of the 260 tokens"),
    ({"tokenizer.chat_template": 5}, "tokenizer.chat_template must be a text, but is 5; download it again"),
]


def test_settings_that_cannot_be_honoured_are_refused(tmp_path: Path, target: Path) -> None:
    for settings, message in SETTINGS:
        assert_refused(write_gguf(tmp_path / "tiny.gguf", target, settings=settings), message)


def test_tokens_and_tensors_that_cannot_be_honoured_are_refused(tmp_path: Path, file: Path, target: Path) -> None:
    tokens = [*read_header(file).metadata["tokenizer.ggml.tokens"][:258], "<the user>", "<the assistant>"]
    file = write_gguf(tmp_path / "spaces.gguf", target, settings={"tokenizer.ggml.tokens": tokens})
    assert_refused(file, r"transformers must read the control token '<the user>' as 258, but reads it as \[")
    theta, (_, factors) = {"llama.rope.freq_base": 500000.0}, llama3_rope(8.0)
    both = {**theta, "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "both.gguf", target, settings=both, tensors={"rope_freqs.weight": factors})
    assert_refused(file, "rope_freqs.weight must be missing, as the settings say, but is")
    wrong = {"rope_freqs.weight": np.linspace(1, 8, 8).astype(np.float32)}
    file = write_gguf(tmp_path / "wrong.gguf", target, settings=theta, tensors=wrong)
    assert_refused(file, r"rope_freqs\.weight must hold the RoPE factors of Llama 3\.1 or later, but holds others")
