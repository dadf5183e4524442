"""Tests what a target's files say of generating with it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import GenerationDefaults, read_generation
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.mtptrain.target.inputs import write_config


def read(directory: Path, config_eos: Any = None, **settings: Any) -> GenerationDefaults:
    path = directory / "generation_config.json"
    path.unlink(missing_ok=True)
    config = write_config(directory, model_type="llama", eos_token_id=config_eos)
    path.write_text(json.dumps(settings))
    return read_generation(directory, config)


def test_a_text_ends_at_the_files_tokens_and_at_the_tokenizers(tmp_path: Path) -> None:
    for ends, expected in (([3, 4], (3, 4)), (0, (0,)), ([], ()), (None, ())):  # without ends, vLLM reads none either
        assert read(tmp_path, [5, 6], eos_token_id=ends).eos_token_ids == expected
    (tmp_path / "generation_config.json").unlink()
    found = read_generation(tmp_path, write_config(tmp_path, model_type="llama", eos_token_id=[5, 6]))
    assert [found.ending_at(token).eos_token_ids for token in (None, 6, 7)] == [(5, 6), (5, 6), (5, 6, 7)]
    assert read_generation(tmp_path, write_config(tmp_path, model_type="llama", eos_token_id=None)).eos_token_ids == ()

    directory = make_target(tmp_path / "target")
    tokenizer_end = TargetFiles(directory).tokenizer.eos_token_id
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    assert TargetFiles(directory).generation.eos_token_ids == (3, tokenizer_end)
    assert load_target(directory, torch.float32, torch.device("cpu")).eos_token_ids == (3, tokenizer_end)
    (directory / "tokenizer_config.json").unlink()
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<user>"}))
    assert TargetFiles(directory).generation.eos_token_ids == (3, 258)


def test_all_that_changes_an_answer_is_read_and_what_changes_none_is_not(tmp_path: Path) -> None:
    neutral = {
        "temperature": 1.0,
        "top_k": -1,
        "min_p": None,
        "repetition_penalty": 1,
        "num_beams": 1,
        "use_cache": True,
    }
    of_config = {"_name_or_path": "x", "torch_dtype": "bfloat16", "dtype": "float16", "renormalize_logits": True}
    assert (
        read(tmp_path, transformers_version="5", pad_token_id=3, bad_words_ids=[], **neutral | of_config).changes == {}
    )
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "presence_penalty": 1.5}
    others = {
        "max_new_tokens": 9,
        "suppress_tokens": [5],
        "no_repeat_ngram_size": 3,
        "forced_eos_token_id": 0,
        "c": "x",
    }
    found = read(tmp_path, **sampling, **others)
    assert found.sampling == {name: value for name, value in sampling.items() if name != "do_sample"}
    assert found.changes == found.sampling | others and found.max_new_tokens == 9 and found.do_sample


def test_settings_of_config_json_count_where_there_is_no_other_file_as_in_transformers_and_vllm(tmp_path: Path) -> None:
    own = {"max_new_tokens": 5, "min_p": 0.2, "min_new_tokens": 3}
    popped = {"temperature": 0.5, "top_k": 3, "max_length": 9, "repetition_penalty": 1.5, "suppress_tokens": [1]}
    found = read_generation(tmp_path, write_config(tmp_path, model_type="llama", **own, **popped))
    assert found.changes == own and found.source == "config.json"
    text = {"model_type": "qwen2_5_vl_text", "eos_token_id": 5, "max_new_tokens": 6, "min_p": 0.3}
    whole = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": {}, "min_p": 0.2}
    found = read_generation(tmp_path, write_config(tmp_path, **whole, eos_token_id=[3, 4]))
    assert found.changes == {"max_new_tokens": 6, "min_p": 0.2} and found.eos_token_ids == (3, 4)
    assert read_generation(tmp_path, write_config(tmp_path, **whole)).eos_token_ids == (5,)
    with pytest.raises(UserError, match=r"config\.json: settings of generation must be valid, .*max_new_tokens"):
        write_config(tmp_path, model_type="llama", max_new_tokens=0)
    (tmp_path / "config.json").unlink()
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_generation(tmp_path, write_config(tmp_path, model_type="llama", **own)).changes == {}


def test_values_that_no_engine_takes_are_refused(tmp_path: Path) -> None:
    for name, value in (
        *(("temperature", "hot"), ("top_p", 1.5), ("repetition_penalty", 0), ("min_p", True)),
        *(("top_k", 20.5), ("max_new_tokens", "4"), ("do_sample", "false"), ("top_p", 0.0), ("temperature", math.inf)),
    ):
        with pytest.raises(
            UserError, match=f"generation_config.json: {name} must be .* but is {re.escape(repr(value))}"
        ):
            read(tmp_path, **{name: value})
    (tmp_path / "generation_config.json").write_text("{}")
    config = write_config(tmp_path, model_type="llama")
    (tmp_path / "generation_config.json").write_text("\ufeff{}")
    with pytest.raises(UserError, match=r"must be readable by .*; save it again as UTF-8 without a byte order mark"):
        read_generation(tmp_path, config)
