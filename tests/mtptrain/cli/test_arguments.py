"""Tests that a YAML file of one's own, a folder of recipes and single values compose what they say, or are refused."""

import re
from pathlib import Path

import pytest

from mtptrain.cli.arguments import compose_config, expanded
from mtptrain.cli.mistakes import TYPES
from mtptrain.utils.errors import UserError

OWN = """
recipe: mtp
run_dir: runs/${head.name} # an interpolation
head: {name: eagle3, draft_vocab_size: 5}
target: {path: "it's \\\\here, true"}
prompts:
  paths: chats.jsonl
  roles: {bot: assistant}
train: # no setting
acceptance.temperatures: [0.5, 1e0]
deepspeed: {zero_optimization: {reduce_bucket_size: 7}}
"""
NO_SETTING = "must be the name of a setting, but no setting has this name;"
MISTAKES = {
    "recipe: mttp": "my.yaml: recipe: must be one of .*, but is mttp; did you mean mtp?",
    "recipe: 3": "my.yaml: recipe: must be one of .*, but is 3; choose one of them",
    "seed: 1": "my.yaml: recipe: must be one of .*, but is left out; set recipe=NAME, or let `mtptrain init .*",
    "recipe: mtp\ntrain: {lrr: 1}": f"my.yaml: train.lrr: {NO_SETTING} did you mean train.lr?",
    "recipe: mtp\ntrian: {lr: 1}": f"my.yaml: trian: {NO_SETTING} did you mean train?",
    "recipe: mtp\ntrain: {lr: fast}": "my.yaml: train.lr: must be a number, but is fast; correct it",
    "recipe: mtp\nrecipe: mtp": "my.yaml: must be YAML, but OmegaConf reports .*duplicate key.*; correct it",
    "- recipe": "my.yaml: must hold settings such as `recipe: mtp`, but holds none; correct it",
}


WRONG_TYPES = {
    "train.epochs=1.5": "train.epochs: must be a whole number, but is 1.5; correct it",
    "train.epochs=null": "train.epochs: must be a whole number, but is null; correct it",
    "train.compile=maybe": "train.compile: must be true or false or null, but is maybe; correct it",
    "hidden_states.dtype=fp4": "hidden_states.dtype: must be one of auto, float32, bfloat16, but is fp4; correct it",
    "export.hub=[a]": "export.hub: must be a text or null, but is ['a']; correct it",
    "acceptance.temperatures=[a]": "acceptance.temperatures: must be a list in which each value is a number, but is a; "
    "correct it",
    "prompts.roles=3": "prompts.roles: must be names with values, but is 3; correct it",
    "prompts.paths={a:1}": "prompts.paths: must be a list in which each value is a text, but is not (Cannot merge "
    "DictConfig with ListConfig); correct it",
    "run_dir=${none.x}": "run_dir: must be a text, but is not (Interpolation key 'none.x' not found); correct it",
    "head.draft_vocab_size=5": "head.draft_vocab_size: must be the name of a setting, but no setting of the chosen "
    "head has this name; only head=eagle3 or peagle or dflash or dspark or dflash2 has it",
    "target.path=???": "target.path: must be set, but is left out; set target.path=VALUE",
}
MEANT = {
    "train.lr": ("learning_rate", "train.learning_rate"),
    "train.epochs": ("num_epochs", "train.num_train_epochs"),
    "train.batch_tokens": ("train.batch_size", "batch_size", "per_device_train_batch_size"),
    "prompts.max_document_tokens": ("max_seq_length", "train.max_seq_len", "max_length"),
    "target.path": ("model", "model.path", "model_name_or_path", "target.model"),
    "prompts.paths": ("dataset", "data.path", "dataset_name", "prompts.files"),
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_yaml_file_is_composed_on_its_recipe_and_the_command_line_wins() -> None:
    Path("my.yaml").write_text(OWN)
    config = compose_config("my.yaml", "head.ttt_steps=6")
    assert (config.run_dir, config.head.name, config.head.ttt_steps) == ("runs/eagle3", "eagle3", 6)
    assert config.target.path == "it's \\here, true"
    assert (config.prompts.paths, config.prompts.roles) == (["chats.jsonl"], {"bot": "assistant"})
    assert config.acceptance.temperatures == [0.5, 1.0]
    assert config.deepspeed["zero_optimization"]["reduce_bucket_size"] == 7
    assert "stage" in config.deepspeed["zero_optimization"]  # of the recipe
    other = compose_config("recipe=quickstart", "my.yaml", "head=peagle", "train.lr=1")
    assert (other.head.name, other.train.lr, other.acceptance.num_prompts) == ("peagle", 1.0, 200)


def test_a_mistake_in_a_yaml_file_is_a_line_that_names_the_file() -> None:
    for text, message in MISTAKES.items():
        Path("my.yaml").write_text(text)
        pattern = message.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")
        with pytest.raises(UserError, match=f"^{pattern}$"):
            compose_config("my.yaml")
    with pytest.raises(UserError, match=r"^mi.yaml: .* no such file; did you mean my.yaml\?"):
        compose_config("mi.yaml")


def test_recipes_of_ones_own_are_found_by_every_stage_of_a_run() -> None:
    Path("own/recipe").mkdir(parents=True)
    Path("own/recipe/mine.yaml").write_text("# @package _global_\ndefaults: [quickstart]\ntrain: {lr: 0.5}\n")
    given = expanded(["--config-dir", "own", "recipe=mine", "--multirun"])
    assert given.overrides[0] == "--multirun"  # Hydra takes options before overrides
    assert compose_config(*given.overrides[1:]).train.lr == 0.5
    with pytest.raises(UserError, match="--config-dir: must name a folder"):
        expanded(["--config-dir=onw", "recipe=mine"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("prompts.paths=chats.jsonl", "prompts.paths=[chats.jsonl]"),
        ("prompts.paths=[a, b]", "prompts.paths=[a, b]"),
        ("prompts.paths=a,b", "prompts.paths=a,b"),  # of --multirun
        ("prompts.paths=null", "prompts.paths=null"),
        ("serving_bench.concurrency=2", "serving_bench.concurrency=[2]"),
        ("head.capture_layers=2", "head.capture_layers=[2]"),
        ("acceptance.baselines=none", "acceptance.baselines=[none]"),
        ("prompts.pattern=*.py", "prompts.pattern=*.py"),
    ],
)
def test_a_single_value_is_a_list_where_one_is_expected(given: str, expected: str) -> None:
    assert expanded([given]).overrides == [expected]


def test_a_value_of_a_wrong_type_and_a_name_of_other_programs_are_explained() -> None:
    named = {f"{other}=1": f"{NO_SETTING} did you mean {name}?" for name, others in MEANT.items() for other in others}
    assert set(MEANT) < set(TYPES) and not {each.removesuffix("=1") for each in named} & set(TYPES)
    for argument, message in (WRONG_TYPES | named).items():
        with pytest.raises(UserError, match=re.escape(message) + "$"):
            compose_config("recipe=mtp", "target.path=demo", argument)
