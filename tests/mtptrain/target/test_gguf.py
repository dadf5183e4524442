"""Tests that a GGUF file is read as the model that llama.cpp serves, once, and then like any model directory."""

import errno
import fcntl
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mtptrain.target.families import eos_token_ids, read_generation_config, read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.gguf import cache_dir, gguf_of
from mtptrain.target.gguf_model import LLAMA3_ROPE
from mtptrain.target.hub import config_dir, load_tokenizer, resolve_target
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from tests.conftest import TINY_SETTINGS, make_target, make_tokenizer, run_program, write_text_files
from tests.gguf_files import MERGED, write_gguf
from tests.mtptrain.target.inputs import CPU, TOKENS
from tests.programs import largest_file
from tests.sealed import flip_bit

GROUPED: dict[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
NUM_BYTES = 256
TEXT = "<user>in 2024,  7 of  12<|end|>\n\n 5 b<assistant>"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", **GROUPED)


@pytest.fixture
def file(tmp_path: Path, target: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", target)


def q8_0(block: np.ndarray) -> np.ndarray:
    scale = np.abs(block).max(-1, keepdims=True) / 127
    return np.round(block / scale) * scale.astype(np.float16).astype(np.float32)


def q4_1(block: np.ndarray) -> np.ndarray:
    low, high = block.min(-1, keepdims=True), block.max(-1, keepdims=True)
    scale = (high - low) / 15
    levels = np.trunc((block - low) / scale + 0.5).clip(0, 15)
    return levels * scale.astype(np.float16).astype(np.float32) + low.astype(np.float16).astype(np.float32)


def round_matrices(target: Path, rounded: Callable[[np.ndarray], np.ndarray]) -> None:
    """Replace each matrix of a target by its rounded blocks of 32 values."""
    weights = load_file(target / "model.safetensors")
    for name, matrix in weights.items():
        if matrix.ndim == 2:
            weights[name] = rounded(matrix.reshape(-1, 32)).reshape(matrix.shape).astype(np.float32)
    save_file(weights, target / "model.safetensors", {"format": "pt"})


def logits_of(directory: Path, **settings: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **settings)
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(("kind", "rounded"), [("Q8_0", q8_0), ("Q4_1", q4_1), ("F32", lambda block: block)])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}),
        ("qwen2", {"head_dim": 16}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_a_gguf_file_has_the_logits_of_its_dequantised_weights(
    tmp_path: Path, family: str, settings: dict[str, Any], kind: str, rounded: Callable[[np.ndarray], np.ndarray]
) -> None:
    target = make_target(tmp_path / "target", family, {**GROUPED, **settings})
    rope = read_target_config(target).rope_parameters
    metadata = {f"{family}.rope.scaling.factor": rope.get("factor")}
    file = write_gguf(tmp_path / "tiny.gguf", target, GGMLQuantizationType[kind], metadata)
    round_matrices(target, rounded)
    directory = resolve_target(str(file))
    torch.testing.assert_close(logits_of(directory), logits_of(target), rtol=1e-4, atol=1e-3)
    assert load_target(directory, torch.float32, CPU).config.architectures == read_target_config(target).architectures


def test_a_gguf_file_has_the_logits_that_transformers_computes_from_it(file: Path) -> None:
    reference = logits_of(file.parent, gguf_file=file.name)
    torch.testing.assert_close(logits_of(resolve_target(str(file))), reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "factor"), [(None, 4.0), ("linear", 4.0), ("none", None)])
def test_a_rope_factor_counts_unless_the_scaling_is_none(
    tmp_path: Path, target: Path, kind: str | None, factor: float | None
) -> None:
    settings = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    directory = resolve_target(str(write_gguf(tmp_path / "tiny.gguf", target, settings=settings)))
    assert read_target_config(directory).rope_parameters.get("factor") == factor


def llama3_rope(factor: float) -> tuple[dict[str, Any], np.ndarray]:
    """Returns RoPE parameters and, computed by transformers, the factors that llama.cpp stores for them."""
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **LLAMA3_ROPE}
    config = LlamaConfig(**GROUPED, max_position_embeddings=2**17, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    return parameters, (plain / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rope_factors_of_llama_3_become_rope_parameters(tmp_path: Path, factor: float) -> None:
    parameters, factors = llama3_rope(factor)
    target = make_target(tmp_path / "target", **GROUPED, rope_parameters=parameters, max_position_embeddings=2**17)
    file = write_gguf(tmp_path / "tiny.gguf", target, tensors={"rope_freqs.weight": factors})
    directory = resolve_target(str(file))
    assert read_target_config(directory).rope_parameters == pytest.approx(parameters)
    round_matrices(target, q8_0)
    torch.testing.assert_close(logits_of(directory), logits_of(target), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_tokenizer_and_the_chat_template_are_the_originals(tmp_path: Path, family: str) -> None:
    target = make_target(tmp_path / "target", family, GROUPED)
    directory = resolve_target(str(write_gguf(tmp_path / "tiny.gguf", target)))
    found, expected = load_tokenizer(directory), make_tokenizer()
    assert found.chat_template == expected.chat_template
    assert found.encode(TEXT) == expected.encode(TEXT)
    assert found.decode(found.encode(TEXT)) == TEXT
    assert found.eos_token_id == 256
    assert len(found) == 260 and max(found.encode("<|endoftext|>")) < NUM_BYTES


def test_without_a_chat_template_the_tokenizer_has_none(tmp_path: Path, target: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", target, settings={"tokenizer.chat_template": None})
    assert load_tokenizer(resolve_target(str(file))).chat_template is None


def with_spaces(target: Path, split: str, **settings: Any) -> dict[str, Any]:
    """Returns the settings of a tokenizer with a rule for words, and with tokens for two and for three spaces."""
    space = "Ġ"
    tokens = [*make_tokenizer().convert_ids_to_tokens(list(range(258))), space * 2, space * 3]
    return {
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"{space} {space}"],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 2 + [1] * 2,
        **settings,
    }


def test_smollms_digits_are_cut_from_the_spaces_before_them(tmp_path: Path, target: Path) -> None:
    pieces = {}
    for split in ("gpt-2", "smollm"):
        file = write_gguf(tmp_path / f"{split}.gguf", target, settings=with_spaces(target, split))
        pieces[split] = load_tokenizer(resolve_target(str(file))).tokenize("a  7")
    assert pieces == {"gpt-2": ["a", "Ġ", "Ġ", "7"], "smollm": ["a", "ĠĠ", "7"]}


def test_llama_3_looks_up_whole_words_first_and_begins_with_bos_unless_the_file_says_otherwise(
    tmp_path: Path, target: Path
) -> None:
    tokens = {}
    for split, given in (("gpt-2", None), ("gpt-2", True), ("llama-bpe", None), ("llama-bpe", False)):
        settings = {"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.add_bos_token": given}
        file = write_gguf(tmp_path / f"{split}.gguf", target, settings=with_spaces(target, split, **settings))
        tokens[split, given] = load_tokenizer(resolve_target(str(file))).encode("   ")
    assert tokens["llama-bpe", None] == [257, 259] and tokens["llama-bpe", False] == [259]
    assert 257 not in tokens["gpt-2", None] and 259 not in tokens["gpt-2", None]
    assert tokens["gpt-2", True] == [257, *tokens["gpt-2", None]]


def test_every_token_at_which_llama_cpp_stops_ends_a_text(tmp_path: Path, target: Path) -> None:
    tokens = [*make_tokenizer().convert_ids_to_tokens(list(range(257))), MERGED, "<|endoftext|>", "<assistant>"]
    settings = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eot_token_id": 257}
    directory = resolve_target(str(write_gguf(tmp_path / "tiny.gguf", target, settings=settings)))
    # <|end|> is 256, the key of the turn's end names 257, and llama.cpp knows the text of 258
    assert eos_token_ids(read_target_config(directory), read_generation_config(directory)) == (256, 257, 258)


def test_a_file_is_dequantised_once_and_again_when_it_changes(
    file: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = resolve_target(str(file))
    assert capsys.readouterr().out == f"{file}: writing a copy in fp32, 0.00 GB, to {directory}\n"
    assert directory.parent == cache / "gguf" and directory.name.startswith("tiny-")
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert config_dir(str(file)) == directory == resolve_target(str(file))
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    assert capsys.readouterr().out == ""

    flip_bit(file)
    assert resolve_target(str(file)) != directory


def test_ranks_that_come_at_once_write_one_copy(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        directories = set(pool.map(resolve_target, [str(file)] * 4))
    assert len(directories) == 1
    assert capsys.readouterr().out.count("writing a copy") == 1


def test_a_cache_on_a_file_system_without_locks_is_refused(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    message = rf"^{cache}/gguf: must be on a file system with locks, but .* \(No locks available\); set MTPTRAIN_CACHE"
    with pytest.raises(UserError, match=message):
        resolve_target(str(file))


def test_what_a_killed_process_left_is_written_anew_in_its_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = resolve_target(str(file))
    temporary = directory.rename(directory.with_name(directory.name + ".tmp"))
    (temporary / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0 if temporary.exists() else 2**40))
    assert resolve_target(str(file)) == directory
    assert logits_of(directory).shape == (1, 60, 260)
    assert not temporary.exists()


def test_a_failed_write_leaves_no_copy(file: Path, cache: Path) -> None:
    # There is room for all files but the weights.
    with largest_file(40_000), pytest.raises(OSError, match="File too large") as caught:
        resolve_target(str(file))
    assert Path(caught.value.filename).name == "model.safetensors"
    assert [path.suffix for path in (cache / "gguf").iterdir()] == [".lock"]


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("MTPTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg/mtptrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home/.cache/mtptrain"


def test_an_engine_gets_the_copy_or_the_snapshot_of_a_revision(file: Path, tmp_path: Path) -> None:
    assert all(TargetFiles(tmp_path, path).name_for_engines == str(tmp_path) for path in (str(file), "demo"))
    assert TargetFiles(tmp_path, "org/model").name_for_engines == "org/model"
    assert TargetFiles(tmp_path, "org/model", "v2").name_for_engines == str(tmp_path)


def test_a_file_without_the_suffix_is_read_too(file: Path, tmp_path: Path) -> None:
    plain = file.rename(tmp_path / "sha256-0123")
    assert resolve_target(str(plain)).name.startswith("sha256-0123-")


def test_the_stages_run_on_a_gguf_file(tmp_path: Path, file: Path) -> None:
    overrides = [*TINY_SETTINGS, f"run_dir={tmp_path}/run", f"target.path={file}"]
    overrides.append(f"prompts.paths=[{write_text_files(tmp_path / 'files')}]")
    for module, more in (
        ("prompts", []),
        ("hidden-states", ["plan=true"]),
        ("hidden-states", []),
        ("train", ["train.max_steps=2"]),
    ):
        result = run_program(module, *overrides, *more)
        assert result.returncode == 0, result.stderr[-3000:]
    manifest = json.loads((tmp_path / "run/hidden_states/manifest.json").read_text())
    assert str(file) in json.dumps(manifest)


def test_two_settings_may_not_name_two_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    a, b = str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")
    assert (
        gguf_of(a, None) == gguf_of(a, a) == gguf_of(str(tmp_path), a) == Path(a) and gguf_of("hub/name", None) is None
    )
    with pytest.raises(
        UserError, match=r"target\.gguf: must be left out if target\.path is a GGUF file, .*a\.gguf, but"
    ):
        gguf_of(a, b)
