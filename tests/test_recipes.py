"""Tests that every recipe and every choice of a group composes, and that errors say what would be valid."""

from pathlib import Path

import pytest

from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.settings.heads import HEAD_CONFIGS
from tests.conftest import compose_config, make_config

ROOT = Path(__file__).parents[1]


def choices(group: str) -> list[str]:
    directory = Path(RECIPES) / group
    return sorted(path.relative_to(directory).with_suffix("").as_posix() for path in directory.rglob("*.yaml"))


GROUPS = sorted(path.name for path in Path(RECIPES).iterdir() if path.is_dir() and path.name != "recipe")

OUT_OF_RANGE = [
    ("distributed_timeout_hours", "nan", "from 0.0002777777777777778 to 10,000, but is nan"),
    ("run_dir", "''", "must name a directory, but is ''; choose"),
    ("run_dir", "/usr/..", "but is '/usr/..'; choose a path that is not a file, a link to nothing or the root"),
    ("run_dir", "/dev/null/x", "must name a directory, but is '/dev/null/x'; choose"),
    ("head.name", "eagle3", "be mtp, the head whose settings are chosen, but is eagle3; set head=eagle3 instead"),
    ("seed", f"{2**63}", "a number from 0 to 9,223,372,036,854,775,807, but is 9223372036854775808"),
    ("train.batch_tokens", "1", "at least 2, but is 1"),
    ("prompts.paths", "['']", "a list of paths or names, none of them empty, but is"),
    ("deepspeed.bf16.enabled", "off", "true, false or auto, but is 'off'; correct it"),
    ("train.loss={kl:1,features:1} train.feature_weight", "0.5", "be 0 if train.loss names the part features, but is"),
    ("train.betas", "[0.9,1.0]", "in [0, 1), but is [0.9, 1.0]"),
    ("hidden_states.part", "1", "below hidden_states.num_parts=1, but is 1"),
    (
        "hidden_states.num_servers=1 hidden_states.backend",
        "transformers",
        "be vllm with hidden_states.servers or num_servers, wh",
    ),
    ("hidden_states.backend=vllm hidden_states.servers=[a] hidden_states.num_servers", "1", "be left out with hidden_"),
    ("hidden_states.server", "0", "be below hidden_states.num_servers=0, but is 0; count from 0"),
    ("head=peagle head.ttt_steps=3 acceptance.num_speculative_tokens", "4", "be at most head.ttt_steps=3 "),
    ("head=dflash head.ttt_steps=3 acceptance.num_speculative_tokens", "4", "or train with head.ttt_steps=4"),
    ("acceptance.temperatures", "[0.7,0.70000001]", "at least 0.01 that differ from each other and from "),
    ("acceptance.top_p", "0.9", "be 1, and acceptance.top_k 0, if every temperature is 0, but are 0.9 and 0"),
    ("acceptance.baselines=[tree] acceptance.sample_drafts", "true", "be false if acceptance.baselines names `tree`"),
    ("acceptance.baselines=[model] acceptance.draft_model", "null", "be set if and only if acceptance.baselines names"),
    (
        "head=mtp head.init_from=x acceptance.baselines=[initial] head.init_from",
        "null",
        "be the head to measure as acc",
    ),
    ("export.only_if_better=true acceptance.baselines", "[none]", "contain initial with export.only_if_better=true, "),
    ("acceptance.baselines=[tree] acceptance.tree_top_k=2 acceptance.tree_nodes", "32", "at most 10, the candidates "),
]
"""For each kind of bound and relation, settings of which the last is out of range, and a part of the error message."""


def compose_recipe(recipe: str, *overrides: str) -> PipelineConfig:
    return load_config(compose_config(f"recipe={recipe}", *overrides))


def test_a_recipe_for_any_target_composes_with_every_hardware_and_head() -> None:
    for recipe, *head in (["mtp"], ["dflash"], ["dspark"], ["dflash2"], ["mtp", "head=eagle3"], ["mtp", "head=medusa"]):
        for hardware in choices("hardware"):
            config = compose_recipe(recipe, f"hardware={hardware}", *head)
            name = "".join(head).removeprefix("head=") or recipe
            assert (config.head.name, config.run_dir) == (name, f"runs/{name}")
            if hardware != "h100_8":
                assert config.train.batch_tokens == config.prompts.max_document_tokens
            assert config.train.micro_batches_per_step % config.planner.num_gpus == 0


def test_no_two_recipes_share_a_run_dir() -> None:
    recipes = choices("recipe")
    assert "quickstart" in recipes
    assert len({compose_recipe(recipe).run_dir for recipe in recipes}) == len(recipes)


def test_every_choice_of_a_group_composes_with_the_quickstart() -> None:
    for group in GROUPS:
        for choice in choices(group):
            make_config(f"{group}={choice}")


def test_every_head_composes_with_the_quickstart_and_drafts_trees_only_if_it_can() -> None:
    for name, settings in HEAD_CONFIGS.items():
        loss = (f"train.loss={{kl:1,{own}:1}}",) if (own := settings.own_loss_part) else ()
        arguments = (f"head={name}", "head.ttt_steps=3", *loss)
        assert type(make_config(*arguments).head) is settings
        if not settings.drafts_trees:
            refused = (
                f"^acceptance.baselines: must not contain tree with head {name}, which drafts chains only, but does"
            )
            with pytest.raises(ValueError, match=refused):
                make_config(*arguments, "acceptance.baselines=[tree]")


def test_a_value_out_of_range_is_refused_by_name() -> None:
    for settings, value, message in OUT_OF_RANGE:
        *others, setting = settings.split()
        with pytest.raises(ValueError) as refused:
            make_config(*others, f"++{setting}={value}")
        assert str(refused.value).startswith(f"{setting}: must ")
        assert message in str(refused.value)
    make_config("head=eagle3", "head.ttt_steps=3", "acceptance.num_speculative_tokens=4")  # a chain goes on
