"""Tests that a YAML file of one's own, a folder of recipes and single values compose what they say, or are refused."""

from pathlib import Path

import pytest

from mtptrain.cli.arguments import compose_config, expanded
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
    "recipe: mtp\ntrain: {lrr: 1}": f"my.yaml: train.lrr: {NO_SETTING} did you mean train.lr?",
    "recipe: mtp\ntrian: {lr: 1}": f"my.yaml: trian: {NO_SETTING} did you mean train?",
    "recipe: mtp\ntrain: {lr: fast}": "my.yaml: train.lr: must have a valid value, but OmegaConf reports: .* to Float",
    "recipe: mtp\nrecipe: mtp": "my.yaml: must be YAML, but OmegaConf reports .*duplicate key.*; correct it",
    "- recipe": "my.yaml: must hold settings such as `recipe: mtp`, but holds none; correct it",
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
