"""Runs all stages that a recipe needs on this machine, from the prompts to the export: `mtptrain run`.

    mtptrain run recipe=quickstart
    mtptrain plan recipe=mtp head=eagle3 target.path=mine run_dir=runs/mine "prompts.paths=[chats.jsonl]"
    mtptrain run recipe=mtp head=eagle3 target.path=mine run_dir=runs/mine "prompts.paths=[chats.jsonl]"
    mtptrain run --multirun recipe=quickstart train.lr=1e-3,3e-3 'run_dir=runs/lr/${train.lr}'

`mtptrain plan` prints what the run will need, and runs nothing. A stage that is finished (see `is_finished`) is passed
over, one that was interrupted goes on where it stopped, and one that fails ends the run with its exit code.

With `--multirun`, each setting with several values makes variants, which run one after the other; all of them are
checked before the first begins. `mtptrain compare` compares their measurements.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

import torch
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from rich.console import Console
from rich.table import Table

from mtptrain.cli import program
from mtptrain.cli.program import python_module, stage_command
from mtptrain.cli.stages import STAGES, Runner, Stage, settings_of, stages_of
from mtptrain.config import AnsweringEngine, Backend, PipelineConfig, load_config
from mtptrain.decoding.prompts_file import check_is_file
from mtptrain.engines.exports import export_dir, refuse_changed_export
from mtptrain.engines.table import check_exportable, has_format, running_engine
from mtptrain.engines.verdict import bench_of, verdict, why_not_better
from mtptrain.hidden_states.extraction.backend import choose_backend
from mtptrain.init_from.published import resolve_init
from mtptrain.init_from.start import check_one_start, check_start
from mtptrain.planning.plan import Plan, duration, print_plan
from mtptrain.run_dir import Run
from mtptrain.settings.evaluation import ServingEngine
from mtptrain.stage_dir import StageDir
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import check_parts, check_weights
from mtptrain.target.hub import config_dir
from mtptrain.target.loading import check_quantisation, needs_several_devices
from mtptrain.training.deepspeed_engine import check_deepspeed
from mtptrain.training.optimizer import warn_of_rate
from mtptrain.training.trainer import check_batch_ranks
from mtptrain.training.validation import measured_with
from mtptrain.utils.distributed import close_groups
from mtptrain.utils.errors import EXIT_INTERRUPTED, UserError, warn
from mtptrain.utils.figures import shown
from mtptrain.utils.files import read_sealed
from mtptrain.utils.startup import started_stage, typed_arguments

NUM_THREADS = torch.get_num_threads()
"""Threads with which stages compute. The process that forks them computes with one: a fork waits forever for others."""


def main(config: PipelineConfig) -> None:
    is_plan = started_stage() == "plan"
    torch.set_num_threads(NUM_THREADS if is_plan else 1)
    check(config)
    hydra = HydraConfig.get()
    if hydra.mode is RunMode.MULTIRUN:
        if hydra.job.num == 0:
            check_variants([each for each in sys.argv[1:] if "=" in each and not each.startswith("-")])
        print(f"\n==== {config.run_dir}")
    if is_plan:
        print_plan(config)
    else:
        overrides = [*(x for x in sys.argv[1:] if x.startswith("hydra.searchpath=")), *hydra.overrides.task]
        run_stages(config, overrides, overrides if hydra.mode is RunMode.MULTIRUN else typed_arguments())


def run_stages(config: PipelineConfig, overrides: Sequence[str], typed: Sequence[str]) -> None:
    """Run all stages that the config needs, each of which composes the same config from these overrides.

    `typed` are the arguments with which a user gets the same config; commands that are printed have them.
    """
    stages = [each for each in stages_of(config) if each[0] != "export" or has_format(config.head.name)]
    outputs = {name: output_of(name, stage, config) for name, stage, _ in stages}
    print_stages(config, stages, is_planned=not all(output.is_file() for output in outputs.values()))
    durations: list[tuple[str, str]] = []
    done_at = 0.0
    if not torch.cuda.is_available():
        for _, stage, _ in stages:
            import_module(python_module(stage.program))  # once, for all forks
    for name, stage, runner in stages:
        output = outputs[name]
        if is_finished(name, output, done_at, config):
            durations.append((name, "done before"))
        else:
            print(f"\n== mtptrain {name}: {what_it_does(stage)}")
            started = time.monotonic()
            run_stage(name, overrides, num_ranks(name, runner, config))
            durations.append((name, f"{time.monotonic() - started:,.0f} s"))
        done_at = max(done_at, output.stat().st_mtime) if output.is_file() else time.time()
    print_summary(config, durations, typed)


def check(config: PipelineConfig) -> None:
    """Refuse settings with which a later stage could not run, before the first one begins."""
    check_one_start(config.head)
    check_deepspeed(config.deepspeed)
    warn_of_rate(config.train)
    if config.acceptance.prompts_file is not None:
        check_is_file(Path(config.acceptance.prompts_file))
    is_plan = started_stage() == "plan"
    if config.train.stream and not is_plan:
        raise UserError(
            "train.stream: must be false for a whole run, which runs one stage after the other, but is true; run "
            "`mtptrain hidden-states` and `mtptrain train` at the same time instead"
        )
    if has_format(config.head.name):
        check_exportable(config)
    else:
        warn(f"head: no engine has a class for {config.head.name}, so the run ends with its acceptance")
    check_engines(config)
    directory = config_dir(config.target.path, config.target.revision)
    check_start(config.head, TargetFiles(directory))
    if any(directory.glob("*.safetensors")):
        check_parts(directory, check_weights(directory))
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        check_quantisation(directory, getattr(torch, config.acceptance.dtype), device)
    except UserError as error:
        if not is_plan:  # which may be for another machine, or for stages in vLLM alone
            raise
        warn(str(error))
    if not is_plan:  # which downloads no weights, and writes nothing
        if (start := config.head.init_from) is not None and not Path(start).exists():
            resolve_init(start)
        if has_format(config.head.name):
            exported = output_of("export", STAGES["export"], config).parent
            refuse_changed_export(exported, f"move {exported} away and run mtptrain export again")
            export_dir(config).check_replaceable()
    if num_gpus := torch.cuda.device_count():
        check_batch_ranks(config.train.micro_batches_per_step, num_gpus)


def check_engines(config: PipelineConfig) -> None:
    """Refuse an engine that a stage starts and this machine lacks, or a wrong `serving.program`, which may come later.

    A plan, which may be for another machine, warns.
    """
    target = read_target_config(config_dir(config.target.path, config.target.revision))
    backend = str(choose_backend(config.hidden_states.backend, target))
    starting = {} if config.responses.url else {"responses": ("responses.engine", str(config.responses.engine))}
    starting |= {} if config.hidden_states.asks_servers else {"hidden-states": ("hidden_states.backend", backend)}
    needed = {} if config.serving.program is None else {str(config.serving.engine): "leave serving.program out"}
    for name, stage, _ in stages_of(config):
        setting, engine = starting.get(name, ("", ""))
        if engine in ServingEngine.__members__ and not output_of(name, stage, config).is_file():
            needed[engine] = f"set {setting}=transformers"
    for engine, instead in needed.items():
        try:
            running_engine(engine).find_program(config.serving.of(engine))
        except UserError as error:
            message = f"{error}, or {instead}"
            if started_stage() != "plan":
                raise UserError(message) from error
            warn(message)


def check_variants(arguments: Sequence[str]) -> None:
    """Refuse the variants of `--multirun` if a setting of one is wrong, or if two write to the same folder."""
    overrides = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(arguments))
    made_by: dict[tuple[str, Path], str] = {}
    choices = {
        each.get_key_element(): each.sweep_string_iterator()
        if each.is_sweep_override()
        else [each.get_value_element_as_str()]
        for each in overrides
    }
    for values in product(*choices.values()):
        variant = [f"{name}={value}" for name, value in zip(choices, values, strict=True)]
        config, described = load_config(compose("pipeline", variant)), " ".join(variant)
        check(config)
        for setting in ("run_dir", "acceptance.output_dir", "export.output_dir"):
            given = attrgetter(setting)(config)
            other = described if given is None else made_by.setdefault((setting, Path(given).resolve()), described)
            if other != described:
                raise UserError(
                    f"{setting}: must differ between the variants of --multirun, but is {given} for both ({other}) and "
                    f"({described}); name it after what differs, for example '{setting}=runs/variants/${{head.name}}'"
                )


def output_of(name: str, stage: Stage, config: PipelineConfig) -> Path:
    """Returns the file that a stage leaves when it is finished."""
    output = Path(config.run_dir) / stage.output.format(engine=config.export.engine)
    chosen = {"acceptance": config.acceptance.output_dir, "export": config.export.output_dir}.get(name)
    return output if chosen is None else Path(chosen) / output.name


def is_finished(name: str, output: Path, done_at: float, config: PipelineConfig) -> bool:
    """Returns whether a stage need not run again: its output is newer than that of the stages before it, and was made
    with the same settings, its own and theirs.

    A head's folder does not record settings, so training always runs, and ends at once if it has made its last step.
    Nor does an export record that it was uploaded, so one with `export.hub` always runs.
    A folder that is a link belongs to another run. Later stages check what it holds. The stages before it were finished
    at `done_at`, in seconds since the epoch.
    """
    run_dir = Path(config.run_dir)
    in_run_dir = output.is_relative_to(run_dir)
    stage_dir = run_dir / output.relative_to(run_dir).parts[0] if in_run_dir else output.parent
    made_with_these = StageDir(output.parent).was_made_with(config, settings_of(name))
    is_made = stage_dir.is_symlink() or output.parent.is_symlink() or made_with_these
    is_new = output.is_file() and output.stat().st_mtime >= done_at
    is_uploaded = name != "export" or config.export.hub is None
    return is_new and is_made and is_uploaded and (name != "choose-head" or chose_with(output, config))


def chose_with(choice: Path, config: PipelineConfig) -> bool:
    """Returns whether `mtptrain choose-head` measured the heads with these settings."""
    stored = read_sealed(choice, "run mtptrain choose-head again")
    wanted = measured_with(config.acceptance, config.train.validation_new_tokens)
    return {name: stored.get(name) for name in wanted} == wanted


def num_ranks(name: str, runner: Runner, config: PipelineConfig) -> int:
    """Returns on how many ranks to start a stage on this machine, at least 1; on a CPU a stage may start more itself.

    There is a rank for each GPU, or for each engine of several GPUs. A stage that runs a target too large for one GPU
    has one rank, which spreads it over all of them, and so has choose-head, which is for such targets.
    """
    num_gpus, settings = torch.cuda.device_count(), config.hidden_states
    if runner != "ranks" or name == "choose-head" or num_gpus < 2:
        return 1
    if name == "responses" and Run(config).answering[0] != AnsweringEngine.transformers:
        return 1
    if name == "hidden-states" and Run(config).backend is Backend.vllm:
        return max(1, num_gpus // settings.tensor_parallel_size)
    dtypes = {
        "responses": config.responses.dtype,
        "hidden-states": settings.dtype,
        "acceptance": config.acceptance.dtype,
    }
    if name in dtypes and needs_several_devices(
        Run(config).target.directory, getattr(torch, dtypes[name].value), torch.device("cuda")
    ):
        return 1
    return num_gpus


def run_stage(name: str, overrides: Sequence[str], num_ranks: int) -> None:
    """Run a stage in a process of its own; if it fails or is stopped, end this process with its exit code.

    The stage gets Ctrl-C from the terminal itself, so this process ignores it meanwhile. Without GPUs, the stage is a
    fork of this process, which saves seconds of imports; CUDA does not work in forks.
    """
    if torch.cuda.is_available():
        process = subprocess.Popen(stage_command(name, overrides, num_ranks)).pid
    elif (process := os.fork()) == 0:
        _run_in_fork(name, overrides)
    earlier = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: os.kill(process, signal.SIGTERM)),
    }
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    for number, handler in earlier.items():
        signal.signal(number, handler)
    if code:
        sys.exit(EXIT_INTERRUPTED if code == -signal.SIGINT else code if code > 0 else 128 - code)


def _run_in_fork(name: str, overrides: Sequence[str]) -> NoReturn:
    """Run a stage as its own program would, and end the process without what its parent does at its end."""
    code: object = 1
    try:
        # A fork renews its pool when torch is told the number of threads, and aborts if several tell it at once.
        torch.set_num_threads(NUM_THREADS)
        GlobalHydra.instance().clear()
        sys.argv[1:] = overrides
        program.run_stage(name)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        close_groups()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def print_stages(config: PipelineConfig, stages: Sequence[tuple[str, Stage, Runner]], is_planned: bool) -> None:
    """Print what will be run and, with `is_planned`, how long stages will take on this machine.

    Another process plans: measuring the machine starts threads, which forks cannot use, or takes memory of a GPU.
    """
    planned: dict[str, float] = {}
    if is_planned:
        with ProcessPoolExecutor(1, get_context("spawn" if torch.cuda.is_available() else "fork")) as pool:
            planned = pool.submit(planned_seconds, config).result()
    table = Table("stage", "what it does", "estimated", title=f"{config.run_dir}: head {config.head.name}")
    for name, stage, _ in stages:
        table.add_row(name, what_it_does(stage), duration(planned[name]) if name in planned else "")
    Console().print(table)


def planned_seconds(config: PipelineConfig) -> dict[str, float]:
    """Returns the seconds of stages by their names. Raises UserError if the disk is too small."""
    torch.set_num_threads(NUM_THREADS)
    plan = Plan(config)
    plan.check_disk()
    return plan.seconds


def what_it_does(stage: Stage) -> str:
    return stage.does.partition(" ")[2]  # without `1.` or `optional:`


def print_summary(config: PipelineConfig, durations: Sequence[tuple[str, str]], typed: Sequence[str]) -> None:
    """Print how long each stage took, how well the head drafts, and where the report and the export are."""
    report_path, export = (output_of(name, STAGES[name], config) for name in ("acceptance", "export"))
    report = read_sealed(report_path, "run mtptrain acceptance again")
    table = Table("", "", title=f"Head {config.head.name}", show_header=False)
    for name, took in durations:
        table.add_row(name, took)
    table.add_row("acceptance length", shown(report["acceptance_length"]) or "not measured: no round had a draft")
    speed = {name: each["tokens_per_s"] for name, each in report["speed"].items()}
    if plain := speed.get("none"):
        table.add_row("our loop", f"{speed['head']:,.0f} tokens/s, {speed['head'] / plain:.2f} times plain decoding")
    Console().print(table)
    bench = bench_of(config, report)
    print(verdict(report, bench))
    page = report_path.with_name("report.html")  # a kill or a failure to draw may leave none
    print(f"{page if page.is_file() else report_path} shows it")
    if not has_format(config.head.name):
        print(f"no engine has a class for head {config.head.name}, so it is not exported")
        return
    if config.export.only_if_better and why_not_better(report):
        return  # the export has said so
    engine = str(config.export.engine)
    print(f"{export.parent} has the head, and its README.md the command that serves it.")
    if engine not in ServingEngine.__members__:
        return
    is_alone = config.head.name in running_engine(engine).one_at_a_time
    alone = " 'serving_bench.concurrency=[1]'" * (is_alone and max(config.serving_bench.concurrency) > 1)
    same = shlex.join([*typed, *([] if engine == config.serving.engine else [f"serving.engine={engine}"])])
    print(
        f"{'Measure again' if bench else 'What the engine makes of it'}:\n"
        f"  mtptrain serving-check {same}    # the engine's counters beside ours\n"
        f"  mtptrain serving-bench {same}{alone}    # latency and tokens/s with and without drafts"
    )
