"""Tests that every recipe and every choice of a group composes, and that errors say what would be valid."""

import ast
import inspect
import textwrap
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, MissingConfigException

from mtptrain import config as config_module
from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.heads import HEADS
from mtptrain.utils.settings import bounded_settings
from tests.conftest import make_config
from tests.mtptrain.settings.test_hardware import gpus
from tests.programs import run_ranks

ROOT = Path(__file__).parents[1]


def choices(group: str) -> list[str]:
    directory = Path(RECIPES) / group
    return sorted(path.relative_to(directory).with_suffix("").as_posix() for path in directory.rglob("*.yaml"))


GROUPS = sorted(path.name for path in Path(RECIPES).iterdir() if path.is_dir() and path.name != "recipe")

# For each setting that has a range, values outside the range and a part of the error message.
OUT_OF_RANGE = {
    "distributed_timeout_hours": {
        "0": "from 0.0002777777777777778 to 10,000, but is 0.0",
        "10001": "to 10,000, but is 10001.0",
        "nan": "to 10,000, but is nan",
    },
    "run_dir": {
        "''": "must name a directory, but is ''; choose",
        "README.md": "must name a directory, but is",
        "/": "but is '/'; choose a path that is not a file and not the root",
        "/usr/..": "but is '/usr/..'; choose a path that is not a file and not the root",
    },
    "acceptance.output_dir": {"''": "but is ''", "README.md": "must name a directory, but is 'README.md'"},
    "export.output_dir": {"README.md": "must name a directory, but is 'README.md'"},
    "serving.output_dir": {"README.md": "must name a directory, but is 'README.md'"},
    "cpu_ranks": {"-1": "at least 0, but is -1"},
    "seed": {"-1": "at least 0 and below 2**63, but is -1", f"{2**63}": "below 2**63, but is 9223372036854775808"},
    "acceptance.seed": {"-1": "at least 0 and below 2**63, but is -1", f"{2**63}": "below 2**63, but is"},
    "train.betas": {"[0.9,1.0]": "in [0, 1), but is [0.9, 1.0]"},
    "train.lk_eta": {"-1": "at least 0.0, but is -1"},
    "train.feature_weight": {"-0.1": "at least 0.0, but is -0.1"},
    "bench.vocab_size": {"1": "at least 2, but is 1"},
    "bench.depths": {"0": "at least 1, but is 0"},
    "bench.draft_depths": {
        "[]": "at least one number, each at least 1, but is []",
        "[1,0]": "each at least 1, but is [1, 0]",
    },
    "bench.batch_sizes": {"[]": "at least one number", "[0]": "each at least 1, but is [0]"},
    "bench.decode_prompts": {"0": "at least 1, but is 0"},
    "bench.longest_tokens": {"512": "at least 1024, but is 512"},
    "prompts.paths": {"['']": "a list of paths or names, none of them empty, but is"},
    "prompts.metadata": {"['']": "a list of paths or names, none of them empty, but is"},
    "prompts.max_document_tokens": {"3": "at least 4, but is 3"},
    "prompts.max_train_tokens": {"-1": "at least 0, but is -1"},
    "prompts.validation_fraction": {"0": "above 0 and below 1, but is 0.0", "1": "above 0 and below 1, but is 1.0"},
    "hidden_states.batch_tokens": {"0": "at least 1, but is 0"},
    "hidden_states.shard_tokens": {"0": "at least 1, but is 0"},
    "hidden_states.num_parts": {"0": "at least 1, but is 0"},
    "hidden_states.part": {"-1": "at least 0, but is -1", "1": "below hidden_states.num_parts=1, but is 1"},
    "hidden_states.tensor_parallel_size": {"0": "at least 1, but is 0"},
    "serving.tensor_parallel_size": {"0": "at least 1, but is 0"},
    "serving_bench.concurrency": {
        "[]": "at least one number, each at least 1, but is []",
        "[0,1]": "each at least 1, but is [0, 1]",
        "[2,1]": "must increase, but is [2, 1]; sort it",
        "[1,1]": "must increase, but is [1, 1]; sort it and name each number once",
    },
    "serving_bench.repeats": {"0": "at least 1, but is 0"},
    "serving_bench.warmup_requests": {"-1": "at least 0, but is -1"},
    "serving_bench.start_timeout_s": {"0": "at least 1, but is 0.0"},
    "serving_bench.output_dir": {"README.md": "must name a directory, but is 'README.md'"},
    "responses.concurrency": {"0": "at least 1, but is 0"},
    "responses.batch_size": {"0": "at least 1, but is 0"},
    "responses.temperature": {"-0.1": "at least 0.0, but is -0.1"},
    "responses.top_p": {"0": "above 0 and at most 1, but is 0.0", "1.1": "at most 1, but is 1.1"},
    "responses.top_k": {"-1": "at least 0, but is -1"},
    "responses.max_new_tokens": {"0": "at least 1, but is 0"},
    "responses.max_retries": {"-1": "at least 0, but is -1"},
    "responses.timeout_s": {"0": "at least 0.01, but is 0.0"},
    "bench.documents": {"0": "at least 1, but is 0"},
    "bench.median_tokens": {"0": "at least 1, but is 0"},
    "bench.max_tokens": {"0": "at least 1, but is 0"},
    "bench.repeats": {"0": "at least 1, but is 0"},
    "bench.read_tokens": {"8191": "at least 8192, but is 8191"},
    "planner.num_gpus": {"0": "at least 1, but is 0"},
    "planner.gpu_memory_gb": {"0": "at least 1, but is 0.0"},
    "planner.gpu_tflops": {"-1": "at least 0.0, but is -1.0"},
    "planner.hidden_states_peak_share": {
        "0": "above 0 and at most 1, but is 0.0",
        "1.1": "at most 1, but is 1.1",
    },
    "planner.train_peak_share": {"0": "above 0 and at most 1, but is 0.0", "1.1": "at most 1, but is 1.1"},
    "planner.disk_gb_per_s": {"-1": "at least 0.0, but is -1.0"},
    "planner.hidden_states_tokens_per_s": {"-1": "at least 0.0, but is -1.0"},
    "planner.train_tokens_per_s": {"-1": "at least 0.0, but is -1.0"},
    "head.ttt_steps": {"0": "from 1 to 64, but is 0", "100000000000": "from 1 to 64, but is 100000000000"},
    "head.num_attention_heads": {"0": "null or a number from 1 to 1,048,576, but is 0", "1048577": "but is 1048577"},
    "head.num_key_value_heads": {"-1": "null or a number from 1 to 1,048,576, but is -1", "1048577": "but is 1048577"},
    "head.intermediate_size": {"-5": "from 1 to 1,048,576, but is -5", "99999999999": "but is 99999999999"},
    "train.epochs": {"0": "at least 1, but is 0"},
    "train.max_steps": {"-1": "at least 0, but is -1"},
    "train.batch_tokens": {"0": "at least 1, but is 0"},
    "train.micro_batches_per_step": {"0": "at least 1, but is 0"},
    "train.loss_chunk_rows": {"0": "at least 1, but is 0"},
    "train.log_every": {"0": "at least 1, but is 0"},
    "train.keep_checkpoints": {"0": "at least 1, but is 0"},
    "train.lr": {"-1e-3": "at least 0.0, but is -0.001", "nan": "at least 0.0, but is nan"},
    "train.warmup_steps": {"-1": "at least 0, but is -1"},
    "train.min_lr_ratio": {"-1": "at least 0.0, but is -1.0"},
    "train.weight_decay": {"-1": "at least 0.0, but is -1.0"},
    "train.max_grad_norm": {"-1": "at least 0.0, but is -1.0"},
    "train.ttt_loss_decay": {"-1": "at least 0.0, but is -1.0"},
    "train.validate_every": {"-1": "at least 0, but is -1"},
    "train.validation_prompts": {"-1": "at least 0, but is -1"},
    "train.validation_new_tokens": {"0": "at least 1, but is 0"},
    "train.save_every": {"-1": "at least 0, but is -1"},
    "acceptance.num_speculative_tokens": {"0": "at least 1, but is 0"},
    "acceptance.max_new_tokens": {"0": "at least 1, but is 0"},
    "acceptance.temperature": {"-0.1": "at least 0.0, but is -0.1", "inf": "at least 0.0, but is inf"},
    "acceptance.top_p": {"0": "above 0 and at most 1, but is 0.0", "1.1": "at most 1, but is 1.1"},
    "acceptance.top_k": {"-1": "at least 0, but is -1"},
    "acceptance.num_prompts": {"0": "at least 1, but is 0"},
    "acceptance.prompt_tokens": {"1": "at least 2, but is 1"},
    "acceptance.batch_size": {"0": "at least 1, but is 0"},
    "acceptance.batch_tokens": {"0": "at least 1, but is 0"},
    "train.stream_shards": {"0": "at least 1, but is 0"},
    "hidden_states.writer_threads": {"0": "at least 1, but is 0"},
    "acceptance.tree_nodes": {"0": "at least 1, but is 0"},
    "acceptance.tree_top_k": {"0": "at least 1, but is 0"},
    "acceptance.hybrid_min_match": {"0": "at least 1, but is 0"},
}


def compose_recipe(recipe: str, *overrides: str) -> PipelineConfig:
    with initialize_config_dir(RECIPES, version_base="1.3"):
        return load_config(compose("pipeline", [f"recipe={recipe}", *overrides]))


@pytest.mark.parametrize("recipe", choices("recipe"))
def test_every_recipe_composes(recipe: str) -> None:
    assert compose_recipe(recipe).run_dir


@pytest.mark.parametrize("hardware", choices("hardware"))
@pytest.mark.parametrize("recipe", ["mtp", "eagle3", "peagle", "dflash", "medusa"])
def test_a_recipe_for_any_target_composes_with_every_hardware(recipe: str, hardware: str) -> None:
    config = compose_recipe(recipe, f"hardware={hardware}")
    assert config.head.name == recipe
    if hardware != "h100_8":
        assert config.train.batch_tokens == config.prompts.max_document_tokens
    assert config.train.micro_batches_per_step % config.planner.num_gpus == 0


def test_hardware_that_does_not_exist_is_refused() -> None:
    with pytest.raises(MissingConfigException, match="hardware/h100_9"):
        compose_recipe("mtp", "hardware=h100_9")


def test_a_setting_of_the_hardware_yields_to_the_recipe_and_to_the_command_line() -> None:
    assert compose_recipe("mtp", "hardware=h100_8").hidden_states.backend == "vllm"
    assert compose_recipe("deepseek_v2_lite_mtp").hidden_states.backend == "transformers"
    assert compose_recipe("mtp", "hardware=gpu_1", "train.batch_tokens=8192").train.batch_tokens == 8192


def test_the_demo_is_the_same_on_every_machine() -> None:
    on_cpu = compose_recipe("quickstart")
    with gpus(8, 80):
        assert compose_recipe("quickstart").train == on_cpu.train
        assert compose_recipe("mtp").train != compose_recipe("mtp", "hardware=cpu").train


def test_no_two_recipes_share_a_run_dir() -> None:
    recipes = choices("recipe")
    assert "quickstart" in recipes
    assert len({compose_recipe(recipe).run_dir for recipe in recipes}) == len(recipes)


@pytest.mark.parametrize("choice", [f"{group}={choice}" for group in GROUPS for choice in choices(group)])
def test_every_choice_of_a_group_composes_with_the_quickstart(choice: str) -> None:
    make_config(choice)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_composes_with_the_quickstart(head: str) -> None:
    assert type(make_config(f"head={head}").head) is HEADS[head].Config


@pytest.mark.parametrize(
    ("setting", "value"), [(setting, value) for setting, values in OUT_OF_RANGE.items() for value in values]
)
def test_a_value_out_of_range_is_refused_by_name(setting: str, value: str) -> None:
    with pytest.raises(ValueError) as refused:
        make_config(f"{setting}={value}")
    assert str(refused.value).startswith(f"{setting}: must ")
    assert OUT_OF_RANGE[setting][value] in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["temperatures=[0.7,0.70000001]"],
            r"must be finite numbers of at least 0.01 that differ from each other and from .*, but are \[0.7, 0.7",
        ),
        (
            ["temperatures=[0]"],
            r"acceptance.temperature=0, which is always measured, but are \[0.0\]; correct them",
        ),
        (
            ["top_p=0.9"],
            "acceptance.top_p: must be 1, and acceptance.top_k 0, if every temperature is 0, but are 0.9 and 0",
        ),
        (
            ["baselines=[tree,none,tree]"],
            r"acceptance.baselines: must name each baseline at most once, but is \[tree,none,tree\]; remove",
        ),
        (
            ["baselines=[tree]", "sample_drafts=true"],
            "acceptance.sample_drafts: must be false if acceptance.baselines names `tree`",
        ),
        (
            ["baselines=[model]"],
            "acceptance.draft_model: must be set if and only if acceptance.baselines names `model`, but is None",
        ),
        (["draft_model=demo"], "acceptance.draft_model: must be set if and only if .*, but is demo"),
        (
            ["baselines=[tree]", "tree_top_k=2"],
            "acceptance.tree_nodes: must be at most 10, the candidates of 3 depths .*, but is 32",
        ),
    ],
)
def test_what_cannot_be_measured_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(*(f"acceptance.{override}" for override in overrides))


def test_a_head_without_a_chain_drafts_no_more_than_it_was_trained_for() -> None:
    with pytest.raises(ValueError, match=r"acceptance\.num_speculative_tokens: must be at most head\.ttt_steps=3 "):
        make_config("head=peagle", "head.ttt_steps=3", "acceptance.num_speculative_tokens=4")
    make_config("head=eagle3", "head.ttt_steps=3", "acceptance.num_speculative_tokens=4")
    with pytest.raises(ValueError, match=r"serving_bench\.num_speculative_tokens: must be at most head\.ttt_steps=3 "):
        make_config("head=peagle", "head.ttt_steps=3", "serving_bench.num_speculative_tokens=[1,4]")


@pytest.mark.parametrize("drafts", [2, 4])
def test_a_block_drafter_drafts_exactly_as_many_tokens_as_it_was_trained_for(drafts: int) -> None:
    with pytest.raises(
        ValueError,
        match=r"acceptance\.num_speculative_tokens: must equal head\.ttt_steps=3 with head dflash, which learns blocks "
        rf"of 4 tokens, but is {drafts}; set it to 3, or train with head\.ttt_steps={drafts}",
    ):
        make_config("head=dflash", "head.ttt_steps=3", f"acceptance.num_speculative_tokens={drafts}")
    make_config("head=dflash", "head.ttt_steps=3", "acceptance.num_speculative_tokens=3")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("anchors_per_document=0", r"head\.anchors_per_document: must be null or at least 1, but is 0; correct it"),
        ("num_layers=0", r"head\.num_layers: must be a number from 1 to 256, but is 0; correct it"),
    ],
)
def test_a_block_drafter_without_anchors_or_layers_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config("head=dflash", "head.ttt_steps=3", f"head.{setting}")


def test_every_setting_that_is_checked_is_provoked_here() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_module._check_relations)))
    related = {
        f"{node.value.attr}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
    }
    bounded = bounded_settings(make_config())
    assert len(bounded) > 60
    assert bounded.keys() | related == set(OUT_OF_RANGE)


def test_a_value_of_the_wrong_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigCompositionException, match=r"train\.lr=fast"):
        make_config("train.lr=fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: recipe: must be chosen, but is not; add recipe=NAME, where NAME is one of "),
        (["recipe=nope"], "error: recipe: must be one of "),
    ],
)
def test_a_program_answers_a_wrong_command_line_with_what_would_be_right(arguments: list[str], message: str) -> None:
    result = run_ranks("data_prep.prompts", arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    available = result.stderr.removeprefix(message).replace(",", "").split()
    assert set(choices("recipe")) <= set(available)
