"""Tests the GGUF files for llama.cpp. tests/serving/test_llama_cpp.py compares what it makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader

from mtptrain.engines.table import format_for, warn_of_limits
from mtptrain.export import check_tensors, reload_head, write_head
from mtptrain.utils.errors import UserError
from tests.gguf_files import F32, write_gguf
from tests.mtptrain.engines.conftest import head_config, random_head, target_config

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"draft_vocab_size": 96, "head_dim": 128}, "llama"),
    ("eagle3", {"draft_vocab_size": 260, "norm_before_fc": True, "norm_before_residual": True}, "qwen3"),
    ("dflash", {"num_layers": 3, "draft_vocab_size": 96, "head_dim": 128}, "qwen3"),
    ("dflash", {"sample_from_anchor": True, "sliding_window": 9, "num_layers": 2, "draft_vocab_size": 96}, "llama"),
    ("dspark", {"markov_rank": 32, "sample_from_anchor": False, "num_layers": 2, "draft_vocab_size": 96}, "qwen3"),
    ("dflash2", {"selector_rank": 32, "selector_top_k": 7, "num_layers": 2, "conv_group_size": 2}, "qwen3"),
    ("draft_model", {"num_hidden_layers": 2}, "qwen2"),
    ("draft_model", {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}, "llama"),
]


@pytest.fixture
def target_gguf(tmp_path: Path, deep_target: Path) -> Path:
    """Returns a target's GGUF file, of which only sizes and tokenizer are read."""
    return write_gguf(tmp_path / "target.gguf", deep_target, F32)


@pytest.mark.parametrize(("name", "settings", "family"), CASES)
def test_a_heads_state_comes_back_exactly_or_as_it_was_rounded(
    tmp_path: Path, target_gguf: Path, name: str, settings: dict[str, Any], family: str
) -> None:
    config, target = head_config(name, **settings), target_config(family, head_dim=64)
    for dtype, kind in ((torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.float16, "F16"), (None, "Q8_0")):
        form, head = format_for("llama_cpp", config, target, target_gguf), random_head(config, target)
        form.is_quantised = dtype is None
        state = head.to(dtype or torch.float32).state_dict()
        write_head(tmp_path / kind, form, state)
        check_tensors(tmp_path / kind, form)
        restored = reload_head(tmp_path / kind, form).state_dict()
        wanted = form.rounded(state) if dtype is None else state
        assert restored.keys() == state.keys()
        # Vectors are written in fp32, and bf16 and fp16 are exact in it.
        assert all(torch.equal(restored[key], wanted[key].to(restored[key].dtype)) for key in state)
        # A row of one value, of the correction that is 0, is no block of 32.
        tensors = [each for each in GGUFReader(tmp_path / kind / "model.gguf").tensors if len(each.shape) == 2]
        assert {each.tensor_type.name for each in tensors if dtype or each.shape[0] > 1} == {kind}
        for key, tensor in state.items():
            error = (restored[key].float() - tensor.float()).abs().max() / tensor.float().abs().max().clamp(min=1)
            assert error < 5e-3 and (dtype is None or error == 0), key


def test_a_targets_file_that_is_missing_or_another_models_is_refused_before_training(target_gguf: Path) -> None:
    with pytest.warns(UserWarning, match="target.gguf: must be the target's GGUF file to export head dflash"):
        warn_of_limits("llama_cpp", head_config("dflash"), target_config())
    target = target_config(num_hidden_layers=6)
    with pytest.raises(UserError, match=r"target\.gguf: .* whose block_count is 6, but in .* it is 4; convert"):
        format_for("llama_cpp", head_config("dflash"), target, target_gguf)


@pytest.mark.parametrize("ids", [[0, 5, 99, 259], [99, 0, 259, 5]], ids=["ascending", "as in some published heads"])
def test_d2t_holds_the_ids_themselves(target_gguf: Path, ids: list[int]) -> None:
    config, target = head_config("eagle3", draft_vocab_size=4), target_config()
    head = random_head(config, target)
    assert head.d2t is not None
    head.d2t.copy_(torch.tensor(ids) - torch.arange(4))
    form = format_for("llama_cpp", config, target, target_gguf)
    tensors = form.tensors(head.state_dict())
    assert tensors["d2t"].tolist() == ids
    assert torch.equal(form.state(tensors)["d2t"], head.d2t)
