"""Tests the files for TensorRT-LLM against its documentation; it was not run."""

from pathlib import Path

from transformers import LlamaConfig

from mtptrain.engines.table import format_for
from tests.mtptrain.engines.conftest import head_config


def test_layers_are_outputs_in_the_command_and_the_readme(target: LlamaConfig) -> None:
    form = format_for("tensorrt_llm", head_config("eagle3", capture_layers=[1, 2, 4]), target)
    command = form.launch("TARGET", Path("/DIR"), 3)
    assert "eagle3_layers_to_capture: [0, 1, 3]" in command and "max_draft_len: 3" in command
    assert "trtllm-serve TARGET --config" in command and "[0, 1, 3]" in form.notes()[0]
    assert '  speculative_model: "/my: heads"\n' in form.launch("TARGET", Path("/my: heads"), 3)


def test_the_norm_before_fc_is_read_inside_eagle_config(target: LlamaConfig) -> None:
    for is_normed in (True, False):
        config = format_for("tensorrt_llm", head_config("eagle3", norm_before_fc=is_normed), target).config_json(
            "float32"
        )
        assert config["eagle_config"]["norm_before_fc"] is is_normed
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_a_draft_model_is_a_checkpoint_of_its_own(target: LlamaConfig) -> None:
    form = format_for("tensorrt_llm", head_config("draft_model"), target)
    assert "decoding_type: Draft_Target" in form.launch("TARGET", Path("/DIR"), 3)
    assert form.config_json("float32")["architectures"] == ["LlamaForCausalLM"]
