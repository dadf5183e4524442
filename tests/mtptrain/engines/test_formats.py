"""Tests what each format writes: names, shapes and config as the engines' sources have them, and the whole head.

`formats.json` has what was compared with the sources of vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.3 and optimum-intel
2.2, and is served in tests/serving. WRITE_FORMATS=1 writes it anew.
"""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig

from mtptrain.engines.table import ENGINES, engine_of, format_for
from mtptrain.export import check_tensors, write_head
from mtptrain.target.families import read_target_config
from tests.conftest import make_target
from tests.mtptrain.engines.conftest import export_head, head_config, random_head, target_config

FORMATS = Path(__file__).with_name("formats.json")
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "eagle3": [
        *({"draft_vocab_size": size} for size in (96, 260)),
        *({flag: True} for flag in ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")),
        *({"fc_norm": True, "head_dim": 128, "capture_layers": [1, 3]}, {"capture_layers": [2]}),
    ],
    "peagle": [{"draft_vocab_size": 96}],
    "medusa": [{"ttt_steps": 2, "num_layers": 2, "fc_bias": True}],
    "dflash": [
        {"num_layers": 3, "draft_vocab_size": 96, "head_dim": 128, "ttt_steps": 7, "mask_token_id": 5},
        {"num_layers": 2, "sliding_window": 9},
    ],
    "dspark": [{"sample_from_anchor": False, "markov_rank": 16}],
    "dflash2": [
        {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "num_layers": 2, "sliding_window": 9}
    ],
}


TARGET = target_config()
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]}
QWEN3_5 = target_config("qwen3_5_text", head_dim=64, rope_parameters=ROPE)


def target_of(engine: str, name: str) -> PreTrainedConfig:
    return QWEN3_5 if engine == "mlx" and name != "draft_model" else TARGET


def all_cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Returns every engine, head and variant with a `config.json`. See test_llama_cpp.py for the others.

    The format of `native_mtp` depends on the target's family: see tests/mtptrain/init_from/test_native_mtp.py.
    """
    cases = []
    for engine in ENGINES:
        for name in engine_of(engine).formats:
            for settings in [{}, *VARIANTS.get(name, [])] if engine != "llama_cpp" and name != "native_mtp" else []:
                head, target = head_config(name, **settings), target_of(engine, name)
                if next(engine_of(engine).why_not(head, target), None) is None:
                    cases.append((str(engine), name, settings))
    return cases


CASES = all_cases()


def test_every_format_writes_the_names_shapes_and_settings_of_its_engine() -> None:
    found = {}
    for engine, name, settings in CASES:
        form = format_for(engine, head_config(name, **settings), target_of(engine, name))
        tensors = form.tensors(random_head(form.head, form.target).state_dict())
        found[f"{engine} {name} {json.dumps(settings)}"] = {
            "tensors": {key: [str(tensor.dtype)[6:], *tensor.shape] for key, tensor in sorted(tensors.items())},
            "config": {
                key: value for key, value in form.config_json("bfloat16").items() if key != "transformers_version"
            },
            "launch": form.launch("TARGET", Path("/DIR"), 3),
            "notes": form.notes(),
        }
    if os.environ.get("WRITE_FORMATS"):
        cases = [
            f" {json.dumps(case)}: {{\n"
            + ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in facts.items())
            + "\n }"
            for case, facts in found.items()
        ]
        FORMATS.write_text("{\n" + ",\n".join(cases) + "\n}\n")
    stored = json.loads(FORMATS.read_text())
    assert found.keys() == stored.keys()
    for case, facts in json.loads(json.dumps(found)).items():
        assert facts == stored[case], case


@pytest.mark.parametrize(("engine", "name", "settings"), CASES)
def test_a_heads_state_comes_back_exactly_from_what_is_written(
    tmp_path: Path, engine: str, name: str, settings: dict[str, Any]
) -> None:
    form = format_for(engine, head_config(name, **settings), target_of(engine, name))
    state = random_head(form.head, form.target).state_dict()
    tensors = form.tensors(state)
    restored = form.state(tensors)
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[key], state[key]) for key in state)
    assert form.tensors(restored).keys() == tensors.keys(), "neither direction may change its argument"
    write_head(tmp_path, form, state)
    check_tensors(tmp_path, form)


def test_every_launch_command_quotes_paths_for_the_shell() -> None:
    for engine, name, settings in [("llama_cpp", "eagle3", {}), *CASES]:
        if engine != "transformers":
            form = format_for(engine, head_config(name, **settings), target_of(engine, name))
            words = shlex.split(form.launch("/Ann's target", Path("/Ann's heads/DIR"), 3))
            assert "/Ann's target" in words and any("/Ann's heads/DIR" in word for word in words)


@pytest.mark.parametrize(
    ("model_type", "layers", "for_vllm", "for_sglang"),
    [
        ("llama", [1, 5, 11], [1, 5, 11], [0, 4, 10]),
        ("llama", [2, 6, 9], None, None),
        ("llama", [0, 5, 12], [0, 5, 12], "refused"),
        ("deepseek_v2", [2, 5, 11], [2, 5, 11], [1, 4, 10]),
        ("deepseek_v2", [3, 5, 11], [3, 5, 11], [3, 5, 11]),
        ("glm4_moe_lite", [3, 5, 11], "refused", [3, 5, 11]),
    ],
)
def test_layer_ids_are_counted_as_the_engine_counts_them_and_left_out_where_they_are_its_default(
    model_type: str, layers: list[int] | None, for_vllm: object, for_sglang: object
) -> None:
    """SGLang adds one to the ids of a config, but not to its default ids. Its DeepSeek class only if the first is 1."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    target = AutoConfig.for_model(model_type, **sizes)
    for engine, ids in (("vllm", for_vllm), ("sglang", for_sglang)):
        if ids != "refused":
            config = format_for(engine, head_config("eagle3", capture_layers=layers), target).config_json("bfloat16")
            key = "eagle_aux_hidden_state_layer_ids"
            assert config.get("eagle_config") == (None if ids is None else {key: ids})
            assert config.get(key) == (ids if engine == "vllm" else None), "llama.cpp's converter reads no other place"


@pytest.mark.parametrize(("size", "warns"), [(96, True), (None, False)])
def test_a_penalty_of_the_target_is_named_that_openvino_fails_with(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, size: int | None, warns: bool
) -> None:
    target_dir = make_target(tmp_path / "target", num_hidden_layers=4)
    (target_dir / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    config = head_config("eagle3", draft_vocab_size=size)
    state = random_head(config, read_target_config(target_dir)).state_dict()
    export_head(tmp_path / "head", "openvino", config, state, target_dir)
    assert any("repetition_penalty 1.05" in str(each.message) for each in recwarn) == warns


def test_a_head_gets_copies_of_embeddings_and_lm_head_that_the_target_ties(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "qwen3_5_text", num_hidden_layers=4, rope_parameters=ROPE)
    target, head = read_target_config(tmp_path / "target"), head_config("eagle3")
    export_head(tmp_path / "head", "mlx", head, random_head(head, target).state_dict(), tmp_path / "target")
    copies = load_file(tmp_path / "head/model-target.safetensors")
    assert torch.equal(copies["lm_head.weight"], copies["embed_tokens.weight"])
