"""The config of every program: the schema, its documentation and all defaults.

`mtptrain.settings` has the sections, and `recipes/` has the values for each target and head. Each `main` begins by
calling `load_config(cfg)`, which returns checked dataclasses. The functions that `main` calls take these dataclasses or
single values, or a `Run` made of them, never Hydra's objects.
"""

from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from mtptrain.settings.data import (
    AnsweringEngine,
    Backend,
    ConversationSchema,
    Dtype,
    HiddenStatesConfig,
    PromptsConfig,
    PromptSource,
    ResponsesConfig,
    StoreDtype,
    TargetConfig,
)
from mtptrain.settings.evaluation import (
    AcceptanceConfig,
    Baseline,
    ExportConfig,
    ExportEngine,
    ServingBenchConfig,
    ServingCheckConfig,
    ServingConfig,
    check_acceptance,
    check_export,
    check_serving,
)
from mtptrain.settings.hardware import has_gpu, this_machine
from mtptrain.settings.heads import HEAD_CONFIGS, DraftModelConfig, HeadConfig
from mtptrain.settings.loss import OWN_PARTS, LossPart, loss_mix
from mtptrain.settings.planning import PlannerConfig
from mtptrain.settings.precision import (
    resolve_acceptance_dtype,
    resolve_answering,
    resolve_deepspeed,
    resolve_dtype,
)
from mtptrain.settings.training import Tracker, TrainConfig
from mtptrain.utils.errors import UserError
from mtptrain.utils.setting_bounds import at_least, between, check_bounds, directory_path
from mtptrain.utils.startup import started_stage

_PACKAGE = Path(__file__).parent
RECIPES = str(next(each for each in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes") if each.is_dir()))
"""`recipes/` inside the installed package, or at the top of a checkout."""


@dataclass
class PipelineConfig:
    """One config for all programs, so that stages cannot disagree."""

    run_dir: str = directory_path(default=MISSING)
    """Folder of the run. Each stage writes to a folder in it."""
    seed: int = between(0, 2**63 - 1, default=0)
    """Seed of a head's random weights, of the order of the training data, and of sampled responses."""
    distributed_timeout_hours: float = between(1 / 3600, 10_000, default=24.0)
    """How long ranks wait for each other before the run fails: extraction may finish hours earlier on one rank than on
    another. A rank that fails ends the run at once, regardless of the timeout."""
    cpu_ranks: int = at_least(0, default=0)
    """On a CPU, the number of ranks that responses, hidden-states, train and acceptance become if torchrun has not
    started several; 0 for one per core, as far as memory allows. Training takes the largest number up to this one that
    divides `train.micro_batches_per_step`."""
    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadConfig = MISSING
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    hidden_states: HiddenStatesConfig = field(default_factory=HiddenStatesConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """The contents of a DeepSpeed config file: `bf16`, `zero_optimization`, ...; the trainer adds what `train` sets.
    `auto` in `bf16.enabled` and `zero_optimization.stage` follows the machine, as `hidden_states.dtype` does."""
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    serving_check: ServingCheckConfig = field(default_factory=ServingCheckConfig)
    serving_bench: ServingBenchConfig = field(default_factory=ServingBenchConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)

    def stage_dir(self, stage: str) -> Path:
        return Path(self.run_dir) / stage

    @property
    def acceptance_dir(self) -> Path:
        return Path(self.acceptance.output_dir or self.stage_dir("acceptance"))


def register() -> None:
    """Register the schema, every head's `Config` and what `hardware=auto` follows with Hydra."""
    OmegaConf.register_new_resolver("this_machine", lambda field: getattr(this_machine(), field), replace=True)
    store = ConfigStore.instance()
    store.store(name="pipeline_schema", node=PipelineConfig)
    for name, head in HEAD_CONFIGS.items():
        store.store(group="head", name=name, node=head)


def load_config(cfg: DictConfig) -> PipelineConfig:
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, PipelineConfig)
    check_bounds(config)
    if HEAD_CONFIGS.get(config.head.name) is not type(config.head):
        raise UserError(
            f"head.name: must be {type(config.head)().name}, the head whose settings are chosen, but is "
            f"{config.head.name}; set head={config.head.name} instead"
        )
    check_acceptance(config.acceptance)
    check_export(config.export)
    check_serving(config.serving_bench, config.serving, config.serving_check)
    _check_relations(config)
    _check_loss(config)
    _resolve_precision(config)
    return config


def _resolve_precision(config: PipelineConfig) -> None:
    """Replace every `auto` by what it stands for, on this machine or on the GPUs that a plan is made for."""
    on_gpu = has_gpu() or (started_stage() == "plan" and config.planner.gpu_tflops > 0)
    responses, hidden_states = config.responses, config.hidden_states
    extracts_on_gpu = on_gpu or hidden_states.num_servers > 0  # of other nodes
    responses.engine = resolve_answering(responses.engine, config.stage_dir("responses"))
    responses.dtype = resolve_dtype(responses.dtype, config.stage_dir("responses"), on_gpu)
    hidden_states.dtype = resolve_dtype(hidden_states.dtype, config.stage_dir("hidden_states"), extracts_on_gpu)
    config.acceptance.dtype = resolve_acceptance_dtype(config.acceptance.dtype, on_gpu)
    config.deepspeed = resolve_deepspeed(config.deepspeed, config.stage_dir("train"), on_gpu)


def _check_relations(config: PipelineConfig) -> None:
    if config.responses.url is not None and config.responses.engine is not AnsweringEngine.auto:
        raise UserError(
            f"responses.engine: must be left out with responses.url, whose server answers, but is "
            f"{config.responses.engine}; leave one of them out"
        )
    states = config.hidden_states
    if states.asks_servers and states.backend is not Backend.vllm:
        raise UserError(
            "hidden_states.backend: must be vllm with hidden_states.servers or num_servers, which run vLLM, but is "
            f"{states.backend}; set hidden_states.backend=vllm"
        )
    if states.servers and states.num_servers:
        raise UserError(
            "hidden_states.num_servers: must be left out with hidden_states.servers, whose addresses are known, but is "
            f"{states.num_servers}; leave one of them out"
        )
    for name, limit in ("part", "num_parts"), ("server", "num_servers"):
        number, below = getattr(states, name), getattr(states, limit)
        if number is not None and number >= below:
            raise UserError(
                f"hidden_states.{name}: must be below hidden_states.{limit}={below}, but is {number}; count from 0"
            )
    if len(config.train.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in config.train.betas):
        raise UserError(
            f"train.betas: must be two numbers in [0, 1), but is {config.train.betas}; the default is [0.9,0.95]"
        )
    for name in ("train.epochs", "hidden_states.num_parts"):
        if config.train.stream and (value := attrgetter(name)(config)) != 1:
            raise UserError(
                f"{name}: must be 1 with train.stream=true, which reads every shard once and deletes it, but is "
                f"{value}; set {name}=1, or train.stream=false"
            )
    check_depths(config.head, "acceptance.num_speculative_tokens", config.acceptance.num_speculative_tokens)
    for num_drafts in config.serving_bench.num_speculative_tokens:
        check_depths(config.head, "serving_bench.num_speculative_tokens", num_drafts)
    if config.acceptance.confidence_thresholds and config.head.own_loss_part != LossPart.confidence:
        raise UserError(
            f"acceptance.confidence_thresholds: must be left out with head {config.head.name}, which has no "
            f"confidence, but are {config.acceptance.confidence_thresholds}; leave them out, or set "
            f"head={_heads_with(LossPart.confidence)}"
        )
    if Baseline.tree in config.acceptance.baselines and not config.head.drafts_trees:
        raise UserError(
            f"acceptance.baselines: must not contain tree with head {config.head.name}, which drafts chains only, but "
            "does; remove it"
        )
    if Baseline.initial in config.acceptance.baselines and config.head.init_from is None:
        raise UserError(
            "head.init_from: must be the head to measure as acceptance.baselines=[initial], but is left out; set it to "
            "the export or folder of a head, or remove that baseline"
        )
    if config.export.only_if_better and Baseline.initial not in config.acceptance.baselines:
        raise UserError(
            "acceptance.baselines: must contain initial with export.only_if_better=true, which compares the head with "
            "it, but does not; set acceptance.baselines=[initial]"
        )


def check_depths(head: HeadConfig, setting: str, num_drafts: int) -> None:
    """Raises UserError if a head cannot draft exactly as many tokens as the setting asks for."""
    depths = head.ttt_steps
    if head.drafts_whole_blocks and num_drafts != depths:
        raise UserError(
            f"{setting}: must equal head.ttt_steps={depths} with head {head.name}, which always drafts a whole "
            f"block, but is {num_drafts}; set it to {depths}, or train with head.ttt_steps={num_drafts}"
        )
    if head.is_bound_to_depths and num_drafts > depths:
        raise UserError(
            f"{setting}: must be at most head.ttt_steps={depths} with head {head.name}, which can draft only at "
            f"depths that it was trained for, but is {num_drafts}; lower it, or train with head.ttt_steps={num_drafts}"
        )


def _heads_with(part: LossPart) -> str:
    return " or ".join(name for name, kind in HEAD_CONFIGS.items() if kind.own_loss_part == part)


PUBLISHED_LOSS = {
    LossPart.confidence: "{data_ce:0.1,tv:1.8,confidence:1}",
    LossPart.selector: "{data_ce:1,selector:1}",
}
"""The loss with which heads that have a part of their own were published."""


def _check_loss(config: PipelineConfig) -> None:
    mix = loss_mix(config.train.loss, config.train.feature_weight)
    own = config.head.own_loss_part
    if isinstance(config.head, DraftModelConfig) and LossPart.features in mix:
        name = "feature_weight" if config.train.feature_weight else "loss.features"
        raise UserError(
            f"train.{name}: must be 0 with head draft_model, whose states are not compared with the target's, but is "
            f"{mix[LossPart.features]:g}; set train.{name}=0"
        )
    if own is not None and LossPart(own) not in mix:
        raise UserError(
            f"train.loss: must name the part {own} with head {config.head.name}, whose {own} otherwise stays untrained"
            f', but is {config.train.loss}; set "train.loss={PUBLISHED_LOSS[LossPart(own)]}", as published, or add '
            f"{own} to your mix"
        )
    if own is not None and not mix.keys() - set(OWN_PARTS):
        raise UserError(
            f"train.loss: must name another part than {own}, which does not teach the head to draft, but is "
            f'{config.train.loss}; set "train.loss={PUBLISHED_LOSS[LossPart(own)]}", or add a part such as kl'
        )
    for part in OWN_PARTS:
        if part in mix and part != own:
            raise UserError(
                f"train.loss: must not name the part {part} with head {config.head.name}, which has no {part}, but is "
                f"{config.train.loss}; leave it out, or set head={_heads_with(part)}"
            )


register()
