"""Tests the GGUF files for llama.cpp. tests/serving/test_llama_cpp.py compares what it makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig

from mtptrain.engines.llama_cpp.formats import TARGET_GGUF, GgufFormat
from mtptrain.engines.table import engine_of, format_for, warn_of_limits
from mtptrain.export import check_tensors, reload_head, write_head
from mtptrain.target.families import read_target_config
from mtptrain.target.gguf import read_header
from mtptrain.utils.errors import UserError
from tests.conftest import LLAMA3_ROPE, make_config, make_target
from tests.gguf_files import F32, write_gguf
from tests.mtptrain.engines.conftest import head_config, random_head

INSIDE = [1, 2, 3]
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {}, "llama"),
    ("eagle3", {"draft_vocab_size": 96, "head_dim": 128}, "llama"),
    ("eagle3", {"draft_vocab_size": 260, "norm_before_fc": True, "norm_before_residual": True}, "qwen3"),
    ("dflash", {}, "llama"),
    ("dflash", {"num_layers": 3, "draft_vocab_size": 96, "head_dim": 128}, "qwen3"),
    ("dflash", {"sample_from_anchor": True, "sliding_window": 9, "num_layers": 2, "draft_vocab_size": 96}, "llama"),
    ("dspark", {"markov_rank": 32}, "llama"),
    ("dspark", {"markov_rank": 32, "sample_from_anchor": False, "num_layers": 2, "draft_vocab_size": 96}, "qwen3"),
    ("dflash2", {"selector_rank": 32, "selector_top_k": 7, "num_layers": 2, "conv_group_size": 2}, "qwen3"),
    *(("draft_model", {"num_hidden_layers": 2}, family) for family in ("llama", "mistral", "qwen2", "qwen3")),
    ("draft_model", {"tie_word_embeddings": True}, "llama"),
    ("draft_model", {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}, "llama"),
]


@pytest.fixture
def target_gguf(tmp_path: Path) -> Path:
    """Returns a target's GGUF file, of which only sizes and tokenizer are read."""
    directory = make_target(tmp_path / "target", "llama", **SIZES)
    return write_gguf(tmp_path / "target.gguf", directory, F32)


SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}


def target_of(family: str, **settings: Any) -> PreTrainedConfig:
    sizes = {"vocab_size": 260, "intermediate_size": 96, "head_dim": 64, "max_position_embeddings": 512}
    return AutoConfig.for_model(family, **SIZES, **sizes, sliding_window=None, **settings)


@pytest.mark.parametrize(("name", "settings", "family"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_heads_state_comes_back_exactly(
    tmp_path: Path, target_gguf: Path, name: str, settings: dict[str, Any], family: str, dtype: torch.dtype
) -> None:
    config, target = head_config(name, **settings), target_of(family)
    form, head = format_for("llama_cpp", config, target, target_gguf), random_head(config, target).to(dtype)
    write_head(tmp_path / "out", form, head.state_dict())
    check_tensors(tmp_path / "out", form)
    restored, state = reload_head(tmp_path / "out", form).state_dict(), head.state_dict()
    assert restored.keys() == state.keys()
    # Vectors are written in fp32, and bf16 and fp16 are exact in it.
    assert all(torch.equal(restored[key], state[key].to(restored[key].dtype)) for key in state)
    tensors = GGUFReader(tmp_path / "out/model.gguf").tensors
    matrices = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) == 2}
    assert matrices == {{torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]}
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize(("name", "settings", "family"), CASES)
def test_a_head_in_8_bits_comes_back_as_it_was_rounded(
    tmp_path: Path, target_gguf: Path, name: str, settings: dict[str, Any], family: str
) -> None:
    config, target = head_config(name, **settings), target_of(family)
    form, state = format_for("llama_cpp", config, target, target_gguf), random_head(config, target).state_dict()
    assert isinstance(form, GgufFormat)
    form.is_quantised = True
    write_head(tmp_path / "out", form, state)
    restored, rounded = reload_head(tmp_path / "out", form).state_dict(), form.rounded(state)
    assert all(torch.equal(restored[key], rounded[key]) for key in state)
    tensors = GGUFReader(tmp_path / "out/model.gguf").tensors
    # A row of one value, of the correction that is 0, is no block of 32. The kernels of convolutions have three axes.
    assert {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) == 2 and tensor.shape[0] > 1} == {"Q8_0"}
    for key, tensor in state.items():
        error = (restored[key].float() - tensor.float()).abs().max() / tensor.float().abs().max().clamp(min=1)
        assert error < 5e-3 and (tensor.ndim > 1 or error == 0), key


def test_8_bits_are_for_llama_cpp_alone() -> None:
    with pytest.raises(
        UserError, match=r"export\.dtype: must be float32, .* but is q8_0 for vllm; set export\.engine="
    ):
        make_config("export.dtype=q8_0")
    assert make_config("export.dtype=q8_0", "export.engine=llama_cpp").export.dtype == "q8_0"


def test_the_file_of_a_target_is_written_as_it_was_read(tmp_path: Path) -> None:
    """Tests names and orders of rows with the reader of GGUF targets, which was written for files of llama.cpp."""
    directory = make_target(tmp_path / "target", "llama", **SIZES, rope_parameters=LLAMA3_ROPE)
    gguf, target = write_gguf(tmp_path / "target.gguf", directory, F32), read_target_config(directory)
    config = head_config("draft_model", num_hidden_layers=4, intermediate_size=target.intermediate_size)
    form = format_for("llama_cpp", config, target, gguf)
    write_head(tmp_path / "out", form, load_file(directory / "model.safetensors"))
    ours, theirs = read_header(tmp_path / "out/model.gguf"), read_header(gguf)
    assert ours.tensors.keys() - theirs.tensors.keys() == {"rope_freqs.weight"}
    assert all(np.array_equal(ours.dequantised(name), theirs.dequantised(name)) for name in theirs.tensors)
    same = theirs.metadata.keys() - {"llama.rope.scaling.attn_factor"}
    assert {key: ours.metadata[key] for key in same} == {key: pytest.approx(theirs.metadata[key]) for key in same}


@pytest.mark.parametrize("ids", [[0, 5, 99, 259], [99, 0, 259, 5]], ids=["ascending", "as in some published heads"])
def test_d2t_holds_the_ids_themselves(target_gguf: Path, ids: list[int]) -> None:
    config, target = head_config("eagle3", draft_vocab_size=4), target_of("llama")
    head = random_head(config, target)
    assert head.d2t is not None
    head.d2t.copy_(torch.tensor(ids) - torch.arange(4))
    form = format_for("llama_cpp", config, target, target_gguf)
    tensors = form.tensors(head.state_dict())
    assert tensors["d2t"].tolist() == ids
    assert torch.equal(form.state(tensors)["d2t"], head.d2t)


def test_layers_and_mask_token_are_in_the_metadata(tmp_path: Path, target_gguf: Path) -> None:
    target = target_of("llama")
    for name, settings in (("eagle3", {}), ("dflash", {"ttt_steps": 5, "mask_token_id": 7})):
        form = format_for("llama_cpp", head_config(name, **settings), target, target_gguf)
        write_head(tmp_path / name, form, random_head(form.head, target).state_dict())
        metadata = metadata_of(tmp_path / name / "model.gguf")
        assert metadata[f"{name}.target_layers"] == INSIDE
    assert metadata["dflash.block_size"] == 6 and metadata["tokenizer.ggml.mask_token_id"] == 7
    assert len(metadata["tokenizer.ggml.tokens"]) == 260


def metadata_of(path: Path) -> dict[str, Any]:
    return {field.name: field.contents() for field in GGUFReader(path).fields.values()}


@pytest.mark.parametrize("name", ["dflash", "draft_model"])
def test_a_head_that_needs_the_tokenizer_says_so_before_training(name: str) -> None:
    message = f"target.gguf: must be the target's GGUF file to export head {name} for llama_cpp, which needs its"
    with pytest.warns(UserWarning, match=message):
        warn_of_limits("llama_cpp", head_config(name), target_of("llama"))


def test_the_gguf_file_of_another_model_is_refused(target_gguf: Path) -> None:
    target = target_of("llama")
    target.num_hidden_layers = 6
    with pytest.raises(UserError, match=r"target\.gguf: .* whose block_count is 6, but in .* it is 4; convert"):
        format_for("llama_cpp", head_config("dflash"), target, target_gguf)


def test_a_gguf_file_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"target\.gguf: must be an existing GGUF file, but nowhere\.gguf does"):
        format_for("llama_cpp", head_config("dflash"), target_of("llama"), Path("nowhere.gguf"))


def test_the_command_names_the_targets_file_or_says_how_to_make_it(target_gguf: Path) -> None:
    for gguf, shown in ((None, TARGET_GGUF), (target_gguf, str(target_gguf))):
        form = format_for("llama_cpp", head_config("eagle3"), target_of("llama"), gguf)
        assert isinstance(form, GgufFormat)
        command = form.launch(form.target_name("hub/name"), Path("/DIR"), 3)
        assert f"llama-server -m {shown} -md /DIR/model.gguf --spec-type draft-eagle3" in command
        assert any("convert_hf_to_gguf.py" in note for note in form.notes()) == (gguf is None)


def test_every_kind_of_gguf_format_is_tested() -> None:
    assert set(engine_of("llama_cpp").formats) == {name for name, _, _ in CASES}
