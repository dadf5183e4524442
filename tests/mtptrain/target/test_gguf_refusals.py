"""Tests that a GGUF file that cannot become a target is refused with its path, before anything is written."""

import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from mtptrain.target.gguf_header import read_header
from mtptrain.target.hub import resolve_target
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.gguf_files import write_gguf
from tests.mtptrain.target.test_gguf import GROUPED, llama3_rope

TOKENS = "tokenizer.ggml.tokens"


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


def assert_refused(file: Path, message: str) -> None:
    """Check that the file is refused with its path and the message, and that nothing is left in the cache."""
    with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: {message}") as caught:
        resolve_target(str(file))
    assert "\n" not in str(caught.value)
    copies = Path(file.parent / "cache/gguf")
    assert not copies.exists() or all(path.suffix == ".lock" for path in copies.iterdir())


@pytest.mark.parametrize(
    ("content", "start"), [(b"", "b''"), (b"a text\n", "b'a te'"), (b"\x80\x00\x00\x00{}", r"b'\\x80\\x00\\x00\\x00'")]
)
def test_a_file_of_another_format_is_refused(tmp_path: Path, content: bytes, start: str) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    assert_refused(
        tmp_path / "tiny.gguf", f"must be a GGUF file, which begins with b'GGUF', but begins with {start}; choose"
    )


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UserError, match=r"target\.path: must be a model directory, but '.*/folder\.gguf' has"):
        resolve_target(f"{tmp_path}/folder.gguf")
    with pytest.raises(
        UserError,
        match=r"^head\.init_from: must be an existing file if it ends in \.gguf, but '.*/no\.GGUF' does not exist",
    ):
        resolve_target(f"{tmp_path}/no.GGUF", setting="head.init_from")


def test_another_version_or_byte_order_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for version, shown in ((struct.pack("<I", 1), 1), (struct.pack(">I", 3), 50331648)):
        file.write_bytes(content[:4] + version + content[8:])
        assert_refused(file, f"the version of the GGUF format must be 2 or 3, .* but is {shown}; convert the model")


def test_a_file_that_is_cut_off_anywhere_is_refused(file: Path) -> None:
    content = file.read_bytes()
    data_start = min(tensor.start for tensor in read_header(file).tensors.values())
    table = content.index(b"blk.0")
    for cut in (5, 30, 200, data_start // 2, table - 1, table + 3, table + 20, data_start - 64):
        file.write_bytes(content[:cut])
        assert_refused(
            file, rf"must be a complete GGUF file, but its header is cut off or damaged near byte .* of {cut:,};"
        )
    for cut in (data_start, data_start + 1000, len(content) - 100):
        file.write_bytes(content[:cut])
        assert_refused(file, f"must be a complete GGUF file, but has {cut:,} bytes, and its tensor .* ends at byte")


def change_header(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert content.count(old) == 1 and len(old) == len(new)
    file.write_bytes(content.replace(old, new))


def test_a_damaged_header_is_refused(file: Path, tmp_path: Path, target: Path) -> None:
    content = file.read_bytes()
    change_header(file, b"general.type", b"general.\xff\xffpe")
    assert_refused(file, "must be a complete GGUF file, but its header is cut off or damaged")

    file.write_bytes(content)
    name = b"blk.1.attn_k.weight"
    change_header(file, name + struct.pack("<I", 2), name + struct.pack("<I", 9))
    assert_refused(file, "must be a complete GGUF file, but its header is cut off or damaged")

    file.write_bytes(content.replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight"))
    assert_refused(file, "must name each key and tensor once, but repeats one; download it again")

    assert_refused(
        write_gguf(tmp_path / "aligned.gguf", target, settings={"general.alignment": 0}),
        "general.alignment must be at least 1, but is 0",
    )


@pytest.mark.parametrize(("kind", "shown"), [(27, "I64"), (999, "999")])
def test_a_type_that_cannot_be_dequantised_is_refused(file: Path, kind: int, shown: str) -> None:
    before = b"blk.0.ffn_up.weight" + struct.pack("<IQQ", 2, 64, 96)
    change_header(file, before + struct.pack("<I", GGMLQuantizationType.Q8_0), before + struct.pack("<I", kind))
    assert_refused(
        file,
        rf"tensors must have a type that the package gguf can dequantise, but blk\.0\.ffn_up\.weight has type {shown}; "
        "quantise the model in another type, such as Q4_K_M",
    )


def test_rows_that_end_within_a_block_are_refused(file: Path) -> None:
    name = b"blk.0.ffn_up.weight" + struct.pack("<I", 2)
    change_header(file, name + struct.pack("<QQ", 64, 96), name + struct.pack("<QQ", 63, 96))
    assert_refused(
        file, r"blk\.0\.ffn_up\.weight must have rows of whole Q8_0 blocks of 32 values, but has .*\(96, 63\)"
    )


def test_an_empty_tensor_is_refused(file: Path) -> None:
    name = b"blk.0.ffn_up.weight" + struct.pack("<I", 2)
    change_header(file, name + struct.pack("<QQ", 64, 96), name + struct.pack("<QQ", 64, 0))
    assert_refused(file, r"blk\.0\.ffn_up\.weight must hold values, but has the shape \(0, 64\); download it again")


@pytest.mark.parametrize("begins", ["at its neighbour", "between two places"])
def test_tensors_that_do_not_follow_one_another_are_refused(file: Path, begins: str) -> None:
    header, name = read_header(file), "blk.0.ffn_up.weight"
    places = sorted(tensor.start for tensor in header.tensors.values())
    right = header.tensors[name].start - places[0]
    wrong = right + 3 if begins == "between two places" else places[places.index(right + places[0]) - 1] - places[0]
    before = name.encode() + struct.pack("<IQQI", 2, 64, 96, GGMLQuantizationType.Q8_0)
    change_header(file, before + struct.pack("<Q", right), before + struct.pack("<Q", wrong))
    assert_refused(
        file,
        rf"tensors must follow one another, but blk\.0\.ffn_up\.weight begins at byte {wrong:,} of the data, "
        f"not at {right:,}; download it again",
    )


ARRAY = [2, 2]
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"general.type": "mmproj"}, "general.type must be 'model', but is 'mmproj'; give the file of the model itself"),
    ({"split.count": 3}, "must be a whole model in one file, but is one of 3 parts; merge them with llama.cpp's"),
    ({"general.architecture": "rwkv7"}, "general.architecture must be one of llama, qwen2, qwen3, but is 'rwkv7'"),
    ({"llama.attention.sliding_window": 64}, "settings must be .*, but llama.attention.sliding_window is not; choose"),
    ({"llama.rope.scale_linear": 2.0}, "settings must be among .*, but llama.rope.scale_linear is not"),
    ({"llama.block_count": None}, "must have the setting llama.block_count, but does not; download it again"),
    ({"llama.attention.head_count": 0}, "llama.attention.head_count must be a number above 0, but is 0"),
    ({"llama.attention.head_count_kv": ARRAY}, r"llama.attention.head_count_kv must be a number .* is \[2, 2\]"),
    ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base must be a number above 0, but is nan"),
    ({"llama.rope.scaling.type": 3}, "llama.rope.scaling.type must be a text, but is 3"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type must be none or linear, but is 'yarn'; choose"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count must be 16, but is 8"),
    ({"llama.attention.value_length": 32}, "llama.attention.value_length must be 16, but is 32"),
    ({"llama.expert_count": 8}, "llama.expert_count must be 0, but is 8"),
    ({"llama.expert_used_count": "two"}, "llama.expert_used_count must be 0, but is 'two'"),
    ({"llama.rope.scaling.finetuned": "no"}, "llama.rope.scaling.finetuned must be true or false, but is 'no'"),
    ({"llama.attention.head_count": 3}, "settings must describe a model that transformers can build, but transformers"),
    ({"llama.attention.key_length": 7, "llama.attention.value_length": 7}, "llama.rope.dimension_count must be 7"),
    ({"llama.vocab_size": 300}, r"token_embd.weight must have the shape \(300, 64\) .*, but has \(260, 64\); download"),
    ({"llama.block_count": 1}, "tensors must be those of a llama model with 1 layers, but blk.1.attn_norm"),
    ({"llama.block_count": 3}, "must hold the tensor of model.layers.2.input_layernorm.weight, but does not; download"),
    (
        {"tokenizer.ggml.model": None},
        "tokenizer.ggml.model must be gpt2, but is None; choose another file, or the model",
    ),
    ({"tokenizer.ggml.merges": None}, "must have the list tokenizer.ggml.merges, but does not; download it again"),
    ({"tokenizer.ggml.merges": ["one"]}, "the tokenizer must be readable by transformers, which reports"),
    ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre must be one of gpt-2, qwen2, .*, but is 'falcon'; choose"),
    ({"tokenizer.ggml.escape": True}, "settings of the tokenizer must be .*, but tokenizer.ggml.escape is not; choose"),
    ({"tokenizer.ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token must be False, but is True"),
    ({"tokenizer.ggml.eos_token_id": 260}, "tokenizer.ggml.eos_token_id must be below the number of tokens 260, but"),
    ({"tokenizer.ggml.token_type": [1] * 7}, "tokenizer.ggml.token_type must have an entry for each of the 260 tokens"),
    ({"tokenizer.chat_template": 5}, "tokenizer.chat_template must be a text, but is 5; download it again"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS, ids=[message[:40] for _, message in SETTINGS])
def test_settings_that_cannot_be_honoured_are_refused(
    tmp_path: Path, target: Path, settings: dict[str, Any], message: str
) -> None:
    assert_refused(write_gguf(tmp_path / "tiny.gguf", target, settings=settings), message)


def test_a_control_token_that_transformers_would_cut_is_refused(tmp_path: Path, file: Path, target: Path) -> None:
    tokens = [*read_header(file).metadata[TOKENS][:258], "<the user>", "<the assistant>"]
    file = write_gguf(tmp_path / "spaces.gguf", target, settings={TOKENS: tokens})
    assert_refused(file, r"transformers must read the control token '<the user>' as 258, but reads it as \[")


def test_other_rope_factors_than_llama_3s_are_refused(tmp_path: Path, target: Path) -> None:
    _, factors = llama3_rope(8.0)
    settings = {"llama.rope.freq_base": 500000.0}
    right = write_gguf(tmp_path / "right.gguf", target, settings=settings, tensors={"rope_freqs.weight": factors})
    assert resolve_target(str(right)).is_dir()
    both = {**settings, "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "both.gguf", target, settings=both, tensors={"rope_freqs.weight": factors})
    with pytest.raises(ValueError, match=r"both\.gguf: tensors must be those of .*, but rope_freqs\.weight is not"):
        resolve_target(str(file))
    for wrong in (np.linspace(1, 8, 8).astype(np.float32), factors[:4]):
        file = write_gguf(tmp_path / "wrong.gguf", target, settings=settings, tensors={"rope_freqs.weight": wrong})
        with pytest.raises(
            ValueError, match=r"wrong\.gguf: rope_freqs\.weight must hold the RoPE factors of Llama 3\.1 or later, but"
        ):
            resolve_target(str(file))


def test_a_copy_that_does_not_fit_the_disk_is_refused(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(
        ValueError,
        match=rf"^{cache}/gguf: 0\.1 GB must be free for the dequantised copy of {file}, but 0\.0 GB are; free some, "
        "or set MTPTRAIN_CACHE",
    ):
        resolve_target(str(file))
    assert [path.suffix for path in (cache / "gguf").iterdir()] == [".lock"]
