"""Tests the files that optimum-intel converts for OpenVINO. tests/serving/test_openvino.py serves them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from mtptrain.engines.table import format_for
from mtptrain.export import check_tensors, reload_head, write_head
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import load_frozen_parts
from tests.conftest import make_target
from tests.mtptrain.engines.conftest import head_config, random_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_without_an_lm_head_gets_a_copy_of_the_targets(tmp_path: Path, dtype: torch.dtype) -> None:
    target_dir = make_target(tmp_path / "target", num_hidden_layers=4)
    target = read_target_config(target_dir)
    form, head = format_for("openvino", head_config("eagle3"), target), random_head(head_config("eagle3"), target)
    write_head(tmp_path / "out", form, head.to(dtype).state_dict())
    form.add_target(tmp_path / "out", target_dir)
    check_tensors(tmp_path / "out", form)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], load_frozen_parts(target_dir).lm_head.to(dtype))
    assert tensors["d2t"].tolist() == [0] * target.vocab_size and "t2d" not in tensors
    assert form.config_json("float32")["draft_vocab_size"] == target.vocab_size
    assert reload_head(tmp_path / "out", form).state_dict().keys() == head.state_dict().keys()


def test_layers_are_written_even_if_they_are_the_default(target: LlamaConfig) -> None:
    target.num_hidden_layers = 10
    form = format_for("openvino", head_config("eagle3", capture_layers=[2, 5, 7]), target)
    assert form.config_json("float32")["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert 'model.set_rt_info([1, 4, 6], "hidden_layers_list")' in form.launch("TARGET", Path("/DIR"), 3)
    assert any("hidden_layers_list" in note for note in form.notes())


@pytest.mark.parametrize("name", ["dflash", "draft_model"])
def test_only_eagle3_has_layers_to_write(target: LlamaConfig, name: str) -> None:
    form = format_for("openvino", head_config(name), target)
    command = form.launch("TARGET", Path("/DIR"), 5)
    assert "set_rt_info" not in command and "num_assistant_tokens=5" in command
    assert "--trust-remote-code -m /DIR head_openvino" in command and "-m TARGET target_openvino" in command
