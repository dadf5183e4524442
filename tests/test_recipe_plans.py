"""Tests the heads, the export formats and the plans of recipes for real targets, at their published sizes.

`WRITE_RECIPE_PLANS=1 python -m pytest tests/test_recipe_plans.py` writes the plans into docs/plans.md.
"""

import os
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtptrain.config import RECIPES, Backend, Dtype, PipelineConfig, PromptSource
from mtptrain.convert.formats import format_for
from mtptrain.heads.files import build_head
from mtptrain.planning.costs import target_costs
from mtptrain.planning.plan import Plan, make_plan
from mtptrain.planning.planner import plan_rows, plan_warnings
from mtptrain.target.loading import FITTING_SHARE
from tests.published_targets import PUBLISHED_TARGETS
from tests.test_recipes import compose_recipe

HEADS = ("mtp", "eagle3")
DRAFT_MODELS = {"draft_1b": "llama3_2_1b"}
"""Small language models that draft, by the last part of their recipe's name."""
HEAD_CASES = [(target, head) for target in PUBLISHED_TARGETS for head in HEADS]
CASES = [*HEAD_CASES, ("llama3_3_70b", "draft_1b")]
ANY_TARGET = {"mtp", "eagle3", "peagle", "dflash", "dspark", "dflash2", "medusa"}
"""Recipes that name no target."""
SERVER = "http://localhost:8000/v1"
NODE_DISK_BYTES = 28 * 10**12
"""Size of all local disks of a usual node with 8 GPUs. A plan should use at most half of it."""
PAGE = Path(__file__).parents[1] / "docs/plans.md"
START = """\
# Plans of the recipes

Each recipe for 8 H100 has its commands here, and what its run needs: disk, memory and time, all of
it estimated from the target's published sizes. Until `mtptrain prompts` has been run, a plan
assumes `prompts.max_train_tokens` tokens in documents of `prompts.max_document_tokens`, all
supervised. `mtptrain run recipe=NAME plan=true` prints the plan for your settings.

`make recipe-plans` writes this page.
"""
COLUMNS = 96
"""Width of the plans."""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[PipelineConfig, Plan]]:
    """Returns a function that plans a recipe for the disks of a node, from published config.json files alone."""
    made: dict[str, tuple[PipelineConfig, Plan]] = {}

    def of(target: str, head: str) -> tuple[PipelineConfig, Plan]:
        name = f"{target}_{head}"
        if name not in made:
            config = compose_recipe(name, "plan=true")
            assert config.target.path == PUBLISHED_TARGETS[target].name
            directory = tmp_path_factory.mktemp(name)
            PUBLISHED_TARGETS[target].config().save_pretrained(directory)
            config.target.path, config.run_dir = str(directory), str(directory / "run")
            if head in DRAFT_MODELS:
                model = PUBLISHED_TARGETS[DRAFT_MODELS[head]]
                assert config.head.init_from == model.name
                model.config().save_pretrained(directory / "draft")
                config.head.init_from = str(directory / "draft")
            made[name] = config, make_plan(config, free_bytes=NODE_DISK_BYTES)
        return made[name]

    return of


@pytest.mark.parametrize("target", PUBLISHED_TARGETS)
def test_the_published_dimensions_give_the_published_size(target: str) -> None:
    published = PUBLISHED_TARGETS[target]
    assert target_costs(published.config()).num_parameters == pytest.approx(published.num_parameters, rel=0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("target", "head"), HEAD_CASES)
def test_both_engines_have_a_format_for_the_head_of_every_recipe(target: str, head: str, engine: str) -> None:
    config, target_config = compose_recipe(f"{target}_{head}"), PUBLISHED_TARGETS[target].config()
    assert (
        format_for(engine, config.head, target_config).config_json("bfloat16")["hidden_size"]
        == target_config.hidden_size
    )
    assert config.export.engine == "vllm"


def test_sglang_is_refused_an_eagle3_head_for_deepseek_that_reads_the_first_layer() -> None:
    """Tests why the table of served heads in docs/serving.md has *no* for `eagle3` on DeepSeek-V2 with SGLang."""
    config, target_config = compose_recipe("deepseek_v2_lite_eagle3"), PUBLISHED_TARGETS["deepseek_v2_lite"].config()
    head = replace(config.head, capture_layers=[1, 13, 24])
    assert format_for("vllm", head, target_config)
    with pytest.raises(ValueError, match=r"to export head eagle3 for sglang, but is \[1, 13, 24\]"):
        format_for("sglang", head, target_config)


def test_the_recipe_of_a_draft_model_builds_the_published_model(
    planned: Callable[[str, str], tuple[PipelineConfig, Plan]],
) -> None:
    config, plan = planned("llama3_3_70b", "draft_1b")
    target_config = PUBLISHED_TARGETS["llama3_3_70b"].config()
    with torch.device("meta"):
        built = build_head(config.head, target_config)
    count = sum(parameter.numel() for parameter in built.parameters())
    assert count == plan.head_parameters == pytest.approx(PUBLISHED_TARGETS["llama3_2_1b"].num_parameters, rel=0.01)
    written = format_for("vllm", config.head, target_config).config_json("bfloat16")
    assert (written["architectures"], written["vocab_size"]) == (["LlamaForCausalLM"], target_config.vocab_size)


@pytest.mark.parametrize(("target", "head"), CASES)
def test_every_plan_keeps_well_below_the_disks_of_a_node_and_within_a_day(
    target: str, head: str, planned: Callable[[str, str], tuple[PipelineConfig, Plan]]
) -> None:
    config, plan = planned(target, head)
    assert plan.store_bytes[config.hidden_states.store_dtype] < NODE_DISK_BYTES / 2
    assert plan.extraction_speed.seconds + plan.training_speed.seconds < 24 * 3600
    assert plan.is_spread == ((target, head) == ("llama3_3_70b", "eagle3"))
    assert plan.workload.longest_tokens == (16384 if (target, head) == ("qwen3_32b", "eagle3") else 32768)
    assert config.train.batch_tokens == 32768


@pytest.mark.parametrize(("target", "head"), CASES)
def test_every_plan_warns_of_dense_attention_alone(
    target: str, head: str, planned: Callable[[str, str], tuple[PipelineConfig, Plan]]
) -> None:
    config, plan = planned(target, head)
    others = [text for text in plan_warnings(plan, config) if "on GPUs it is dense" not in text]
    assert others == []


@pytest.mark.parametrize("head", sorted(ANY_TARGET))
def test_an_8b_target_fits_one_gpu_of_24_gb(head: str, tmp_path: Path) -> None:
    PUBLISHED_TARGETS["qwen3_8b"].config().save_pretrained(tmp_path)
    here = (f"target.path={tmp_path}", f"run_dir={tmp_path}/run", "plan=true")
    config = compose_recipe(head, "hardware=gpu_1", *here)
    plan = make_plan(config, free_bytes=NODE_DISK_BYTES)
    warnings = plan_warnings(plan, config)
    assert [text for text in warnings if "on GPUs it is dense" not in text] == []
    config.planner.gpu_memory_gb = 12
    assert len(plan_warnings(plan, config)) > len(warnings)


def test_the_page_has_the_commands_and_the_plan_of_every_recipe(
    planned: Callable[[str, str], tuple[PipelineConfig, Plan]],
) -> None:
    page = "\n".join([START, *(section(target, head, *planned(target, head)) for target, head in CASES)])
    if os.environ.get("WRITE_RECIPE_PLANS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run make recipe-plans"


def section(target: str, head: str, config: PipelineConfig, plan: Plan) -> str:
    """Returns the part of the page about a recipe."""
    rows = [f"{name}: {value}" for name, value in plan_rows(plan, config)]
    texts = [*rows, *(f"WARNING {warning}" for warning in plan_warnings(plan, config))]
    lines = [
        line for text in texts for line in textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    ]
    shell = "\n".join(commands(f"{target}_{head}", target, config, plan))
    for_gpus = f"Plan for {config.planner.num_gpus} GPUs of {config.planner.gpu_memory_gb:g} GB:"
    body = "\n".join(lines)
    return f"## {target}_{head}\n\n```sh\n{shell}\n```\n\n{for_gpus}\n\n```text\n{body}\n```\n"


def commands(recipe: str, target: str, config: PipelineConfig, plan: Plan) -> list[str]:
    """Returns the commands of the whole run, in order."""
    num_gpus, settings = config.planner.num_gpus, config.hidden_states
    engines = num_gpus // settings.tensor_parallel_size
    extracting = engines if plan.backend is Backend.vllm else 1 if plan.is_spread else num_gpus
    assert config.acceptance.dtype is Dtype.bfloat16
    fits_one = 2 * plan.target.num_parameters < FITTING_SHARE * config.planner.gpu_memory_gb * 1e9
    measuring = num_gpus if fits_one else 1
    serve = f"vllm serve {PUBLISHED_TARGETS[target].name} --tensor-parallel-size {settings.tensor_parallel_size}"
    lines = ["mtptrain hidden-states", "mtptrain prompts"]
    if config.prompts.source is PromptSource.responses:
        lines[1:1] = ["mtptrain responses"]
    if getattr(config.head, "draft_vocab_size", None):
        lines.append("mtptrain draft-vocab")
    lines += [
        f"{launcher(extracting)} hidden-states",
        f"{launcher(num_gpus)} train",
    ]
    if config.train.validation_prompts == 0 and config.train.validate_every > 0:
        lines.append("mtptrain choose-head")
    lines += [f"{launcher(measuring)} acceptance", "export"]
    with_recipe = [f"{line} recipe={recipe}" for line in lines]
    with_recipe[0] += " plan=true"
    if config.prompts.source is PromptSource.responses:
        with_recipe[1] += f" responses.url={SERVER}"
        with_recipe.insert(1, f"{serve} --data-parallel-size {engines}")
        with_recipe.insert(1, "# The server is needed until the responses are generated.")
    ranks = "".join(
        f"NPROC_{stage}={ranks} "
        for stage, ranks in (("hidden_states", extracting), ("acceptance", measuring))
        if ranks < num_gpus
    )
    chain = f"SKIP=responses ARRAY_TASKS=1 {ranks}slurm/pipeline.sh recipe={recipe}"
    lines = [*with_recipe, "# Or, under Slurm, everything after the responses:", chain]
    return [part for line in lines for part in _continued(line)]


def _continued(line: str) -> list[str]:
    """Returns a line of shell, continued on others if it is wider than the page."""
    parts = textwrap.wrap(line, COLUMNS, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return [f"{part} \\" for part in parts[:-1]] + parts[-1:]


def launcher(num_ranks: int) -> str:
    return f"torchrun --nproc-per-node {num_ranks} -m mtptrain" if num_ranks > 1 else "mtptrain"


def test_a_recipe_stands_for_every_published_target_and_head() -> None:
    on_cpus = ("quickstart", "smollm2")  # they have no plan for GPUs
    recipes = {path.stem for path in (Path(RECIPES) / "recipe").glob("*.yaml") if not path.stem.startswith(on_cpus)}
    recipes -= ANY_TARGET
    assert recipes == {f"{target}_{head}" for target, head in CASES}
