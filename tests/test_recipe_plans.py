"""Tests the heads, the export formats and the plans of recipes for real targets, at their published sizes.

`WRITE_RECIPE_PLANS=1 python -m pytest tests/test_recipe_plans.py` writes the plans into docs/plans.md.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from mtptrain.config import RECIPES, Backend, Dtype, PromptSource
from mtptrain.engines.table import format_for
from mtptrain.planning.plan import Plan
from mtptrain.target.loading import FITTING_SHARE
from tests.published_targets import PUBLISHED_TARGETS
from tests.test_recipes import compose_recipe

DRAFT_MODELS = {"draft_1b": "llama3_2_1b"}
"""Small language models that draft, by the last part of their recipe's name."""
HEAD_CASES = [(target, head) for target in PUBLISHED_TARGETS for head in ("mtp", "eagle3")]
CASES = [*HEAD_CASES, ("llama3_3_70b", "draft_1b")]
ANY_TARGET = {"mtp", "dflash", "dspark", "dflash2"}
"""Recipes that name no target."""
NODE_DISK_BYTES = 28 * 10**12
"""Size of all local disks of a usual node with 8 GPUs. A plan should use at most half of it."""
PAGE = Path(__file__).parents[1] / "docs/plans.md"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Plan]:
    """Returns a function that plans a recipe for the disks of a node, from published config.json files alone."""
    made: dict[str, Plan] = {}

    def of(target: str, head: str) -> Plan:
        name = f"{target}_{head}"
        if name not in made:
            with patch("mtptrain.config.started_stage", lambda: "plan"):
                config, directory = compose_recipe(name), tmp_path_factory.mktemp(name)
            assert config.target.path == PUBLISHED_TARGETS[target].name
            PUBLISHED_TARGETS[target].config().save_pretrained(directory)
            config.target.path, config.run_dir = str(directory), str(directory / "run")
            if head in DRAFT_MODELS:
                model = PUBLISHED_TARGETS[DRAFT_MODELS[head]]
                assert config.head.init_from == model.name
                model.config().save_pretrained(directory / "draft")
                config.head.init_from = str(directory / "draft")
            made[name] = Plan(config, free_bytes=NODE_DISK_BYTES)
        return made[name]

    return of


def test_both_engines_have_a_format_for_the_head_of_every_recipe() -> None:
    for target, head in HEAD_CASES:
        config, target_config = compose_recipe(f"{target}_{head}"), PUBLISHED_TARGETS[target].config()
        assert config.export.engine == "vllm"
        for engine in ("vllm", "sglang"):
            written = format_for(engine, config.head, target_config).config_json("bfloat16")
            assert written["hidden_size"] == target_config.hidden_size
    # docs/serving.md has *no* for `eagle3` on DeepSeek-V2 with SGLang, whose model cannot return its first layer.
    first_layer = replace(compose_recipe("deepseek_v2_lite_eagle3").head, capture_layers=[1, 13, 24])  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"to export head eagle3 for sglang, but is \[1, 13, 24\]"):
        format_for("sglang", first_layer, PUBLISHED_TARGETS["deepseek_v2_lite"].config())


@pytest.mark.parametrize(
    ("target", "head"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case != ("llama3_1_8b", "mtp"))) for case in CASES],
)
def test_a_plan_keeps_well_below_the_disks_of_a_node_within_a_day_and_warns_of_dense_attention_alone(
    target: str, head: str, planned: Callable[[str, str], Plan]
) -> None:
    plan = planned(target, head)
    assert plan.target.num_parameters == pytest.approx(PUBLISHED_TARGETS[target].num_parameters, rel=0.01)
    assert plan.store_bytes[plan.config.hidden_states.store_dtype] < NODE_DISK_BYTES / 2
    assert sum(plan.seconds[stage] for stage in ("hidden-states", "train")) < 24 * 3600
    assert plan.is_spread == ((target, head) == ("llama3_3_70b", "eagle3"))
    assert plan.longest_tokens == (16384 if (target, head) == ("qwen3_32b", "eagle3") else 32768)
    assert plan.config.train.batch_tokens == 32768
    assert plan.config.prompts.source is PromptSource.responses
    assert plan.config.acceptance.dtype is Dtype.bfloat16
    assert [text for text in plan.warnings if "on GPUs it is dense" not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("head", [*sorted(ANY_TARGET), "eagle3", "peagle", "medusa"])
def test_an_8b_target_fits_one_gpu_of_24_gb(head: str, tmp_path: Path) -> None:
    PUBLISHED_TARGETS["qwen3_8b"].config().save_pretrained(tmp_path)
    here = (f"target.path={tmp_path}", f"run_dir={tmp_path}/run")
    recipe, *chosen = (head,) if head in ANY_TARGET else ("mtp", f"head={head}")
    if head in ("dflash", "dflash2"):  # as the plan then advises
        chosen.append("train.loss_chunk_rows=128")
    with patch("mtptrain.config.started_stage", lambda: "plan"):
        config = compose_recipe(recipe, "hardware=gpu_1", *chosen, *here)
    warnings = Plan(config, free_bytes=NODE_DISK_BYTES).warnings
    assert [text for text in warnings if "on GPUs it is dense" not in text] == []
    config.planner.gpu_memory_gb = 12
    assert len(Plan(config, free_bytes=NODE_DISK_BYTES).warnings) > len(warnings)


@pytest.mark.slow
def test_the_page_has_the_plan_of_every_recipe(planned: Callable[[str, str], Plan]) -> None:
    rows = [f"| {' | '.join(row(f'{target}_{head}', planned(target, head)))} |" for target, head in CASES]
    before, line, rest = PAGE.read_text().partition(f"| {' | '.join(['---'] * len(rows[0].split(' | ')))} |\n")
    page = before + line + "\n".join(rows) + rest[rest.index("\n\n") :]
    if os.environ.get("WRITE_RECIPE_PLANS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run make recipe-plans"


def row(recipe: str, plan: Plan) -> list[str]:
    settings, gpus = plan.config.hidden_states, plan.config.planner.num_gpus
    memory = [
        plan.rows.get(f"{stage}, each GPU", "").split(" GB")[0] for stage in ("extraction", "training", "validation")
    ]
    hours = [plan.rows[f"time of {stage}"].split(" at ")[0] for stage in ("hidden states", "training")]
    extracting = 1 if plan.is_spread else gpus
    if plan.backend is Backend.vllm:
        extracting = gpus // settings.tensor_parallel_size
    fits_one = 2 * plan.target.num_parameters < FITTING_SHARE * plan.config.planner.gpu_memory_gb * 1e9
    return [
        recipe,
        plan.rows["head"].split(", ")[1].removesuffix(" parameters"),
        plan.rows["training"].split(" ")[0],
        f"{plan.store_bytes[settings.store_dtype] / 1e12:.1f} TB",
        *memory,
        ", ".join(hours),
        str(settings.tensor_parallel_size),
        f"{extracting}, {gpus if fits_one else 1}",
    ]


def test_a_recipe_stands_for_every_published_target_and_head() -> None:
    on_cpus = ("quickstart", "smollm2", "gemma3")  # they have no plan for GPUs
    recipes = {path.stem for path in (Path(RECIPES) / "recipe").glob("*.yaml") if not path.stem.startswith(on_cpus)}
    assert recipes - ANY_TARGET - {"continual"} == {f"{target}_{head}" for target, head in CASES}
