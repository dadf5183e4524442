"""The table of stages: what `mtptrain STAGE` runs, which stages a whole run has, and what Ctrl-C keeps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # `mtptrain --help` needs no settings
    from mtptrain.config import PipelineConfig

Runner = Literal["process", "ranks", "server"]
"""How a stage of a whole run runs: as one process without a GPU, as ranks on the GPUs, or as one process that queries a
server.

There is a rank for each GPU, or for each vLLM engine of several GPUs, but only one if transformers runs a target that
needs several GPUs, all of which that rank then uses. choose-head is for such targets, so it always has one: see
`num_ranks` in `all_stages`, and `choose_head.sbatch`.
"""
KEPT_STAGES = "finished stages are kept in {run_dir}; the same command starts this one again"


@dataclass(frozen=True)
class Stage:
    program: str
    """Its module, named as in a checkout: `python_module` adds the package of a wheel."""
    does: str
    """Its description in `mtptrain --help`."""
    runner: Runner = "process"
    is_needed: Callable[["PipelineConfig"], bool] | None = None
    """Returns whether a whole run with these settings has this stage; None if no whole run has it."""
    output: str = ""
    """The file in `run_dir` that a finished stage of a whole run leaves, with `{engine}` for `export.engine`."""
    reads: tuple[str, ...] = ()
    """The entries of the config that it reads: those that its help shows and, in a whole run, that shape its output."""
    also_shows: tuple[str, ...] = ()
    """Further entries that its help shows, which shape no output: where engines are found."""
    kept: str = KEPT_STAGES
    """The line after Ctrl-C. mtptrain train looks for checkpoints instead."""
    takes_settings: bool = True
    """Whether its arguments are settings; `main` then takes the checked `PipelineConfig`, otherwise nothing."""


def _always(config: "PipelineConfig") -> bool:
    return True


STAGES = {
    "run": Stage("mtptrain.all_stages", "run all stages that a recipe needs, up to the export, on this machine"),
    "responses": Stage(
        "data_prep.responses.regenerate",
        "optional: let the target regenerate the responses in conversations",
        "ranks",
        lambda config: config.prompts.source == "responses",
        "responses/manifest.json",
        ("seed", "target", "prompts", "responses"),
        ("serving",),
        "finished responses are kept in {run_dir}/responses; the same command adds the rest",
    ),
    "prompts": Stage(
        "data_prep.prompts",
        "1. turn documents or conversations into token ids",
        "process",
        _always,
        "prompts/manifest.json",
        ("target", "prompts"),
    ),
    "draft-vocab": Stage(
        "data_prep.draft_vocab",
        "optional: choose the tokens that the head can draft",
        "process",
        lambda config: getattr(config.head, "draft_vocab_size", None) is not None and config.head.init_from is None,
        "draft_vocab/manifest.json",
        ("head",),
    ),
    "hidden-states": Stage(
        "data_prep.hidden_states",
        "2. run the target over the prompts and store its hidden states",
        "ranks",
        _always,
        "hidden_states/manifest.json",
        ("target", "head", "hidden_states"),
        ("serving",),
        "finished shards are kept in {run_dir}/hidden_states; the same command writes the rest",
    ),
    "train": Stage(
        "mtptrain.train", "3. train the head", "ranks", _always, "train/last/head.json", ("head", "train", "deepspeed")
    ),
    "choose-head": Stage(
        "eval.choose_head",
        "optional: choose among the heads that training kept",
        "ranks",
        lambda config: config.train.validation_prompts == 0 and config.train.validate_every > 0,
        "train/choice.json",
        ("acceptance",),
    ),
    "acceptance": Stage(
        "eval.acceptance",
        "4. measure the acceptance of the head",
        "ranks",
        _always,
        "acceptance/report.json",
        ("acceptance",),
    ),
    "export": Stage(
        "mtptrain.export",
        "5. write the head for a serving engine",
        "process",
        _always,
        "export/{engine}/serving.json",
        ("export",),
    ),
    "plan": Stage(
        "mtptrain.all_stages", "print the disk, memory and hours that a run needs; run nothing", reads=("planner",)
    ),
    "verify": Stage("data_prep.hidden_states", "check every byte of the stored hidden states against its hash"),
    "init": Stage(
        "mtptrain.init",
        "write a commented my.yaml for a target; takes the target and data instead of settings",
        takes_settings=False,
    ),
    "compare": Stage(
        "eval.compare",
        "compare measurements on one page; takes directories of runs instead of settings",
        takes_settings=False,
    ),
    "serving-check": Stage(
        "eval.serving_check",
        "serve the exported head and compare the engine's counters with ours",
        reads=("acceptance", "serving", "serving_check"),
    ),
    "serving-bench": Stage(
        "eval.serving_bench",
        "measure latency and tokens/s of an engine with and without the head",
        reads=("acceptance", "serving", "serving_bench"),
    ),
    "doctor": Stage(
        "mtptrain.doctor",
        "print what this machine has: memory, versions, engines, environment; takes no settings",
        takes_settings=False,
    ),
    "clean": Stage(
        "mtptrain.clean",
        "free what a run can make again, after asking; takes the run's directory instead of settings",
        takes_settings=False,
    ),
}
"""All stages by the name that users type. Those of a whole run are in the order in which it runs them."""


def stages_of(config: "PipelineConfig") -> list[tuple[str, Stage, Runner]]:
    """Returns the stages of a whole run with these settings, in order: name, stage, and what runs it."""
    asking = ["responses"] * is_served(config) + ["hidden-states"] * config.hidden_states.asks_servers
    return [
        (name, stage, "server" if name in asking else stage.runner)
        for name, stage in STAGES.items()
        if stage.is_needed is not None and stage.is_needed(config)
    ]


def is_served(config: "PipelineConfig") -> bool:
    """Returns whether the settings have a server generate the responses; with `auto`, an engine is looked for later."""
    return config.responses.url is not None or config.responses.engine not in ("auto", "transformers")


def settings_of(name: str) -> tuple[str, ...]:
    """Returns the entries of the config that shape a stage's output: its own, and those of the stages before it."""
    names = list(STAGES)
    return tuple(dict.fromkeys(entry for stage in names[: names.index(name) + 1] for entry in STAGES[stage].reads))
