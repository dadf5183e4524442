"""The command line of every program: its entry point, checks of Hydra's overrides, and commands as strings.

A program is imported only after its settings have been composed and checked, because most need seconds to import.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtptrain.cli.arguments import expanded, refuse_additions
from mtptrain.cli.help import print_help
from mtptrain.cli.mistakes import Arguments, mistake
from mtptrain.cli.stages import KEPT_STAGES, STAGES
from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.settings.hardware import announce_hardware
from mtptrain.utils.errors import (
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    UserError,
    errors_as_lines,
    exit_with_error,
    exit_with_line,
    refusal,
    show_warning,
)
from mtptrain.utils.startup import guarded_imports, start_stage, started_stage


def run_stage(name: str) -> None:
    """Run the stage of this name on the settings in `sys.argv[1:]`."""
    warnings.showwarning = show_warning
    start_stage(name)
    module = python_module(STAGES[name].program)

    def load() -> Any:
        with guarded_imports():
            return import_module(module)

    arguments = [each for each in sys.argv[1:] if each not in ("--help", "-h")]
    if STAGES[name].takes_settings and arguments != sys.argv[1:]:
        try:
            print_help(name, arguments)
        except UserError as error:
            exit_with_error(error, str(error), EXIT_MISTAKE)
    elif STAGES[name].takes_settings:
        run_program(lambda config: load().main(config))
    else:
        load().main()


def run_program(main: Callable[[PipelineConfig], None]) -> None:
    """Read the command line and call `main` with the checked settings.

    If the program cannot finish, it exits with one line on stderr, or argparse's usage for an unknown option: with
    status 1 if it refuses its input, 2 if the command line is wrong, and 130 after Ctrl-C. A fault of the program
    itself shows its stack, with status 1.
    """

    given = Arguments([])

    def task(cfg: DictConfig) -> None:
        try:
            run_dir = OmegaConf.select(cfg, "run_dir")
        except OmegaConfBaseException:  # reported when `main` reads it
            run_dir = None
        with errors_as_lines(lambda: after_ctrl_c(run_dir), run_dir):
            try:
                config = load_config(cfg)
                announce_hardware(HydraConfig.get().runtime.choices.get("hardware"))
                main(config)
            except (HydraException, OmegaConfBaseException) as error:
                exit_with_error(error, mistake(error, given), EXIT_MISTAKE)

    def after_ctrl_c(run_dir: str | None) -> str:
        stage = started_stage()
        return (KEPT_STAGES if stage is None else STAGES[stage].kept).format(run_dir=run_dir)

    run = hydra.main(config_path=RECIPES, config_name="pipeline", version_base="1.3")(task)

    warnings.showwarning = show_warning
    warnings.simplefilter("ignore", FutureWarning)  # for the authors of libraries; ours are UserWarnings
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    try:
        given = expanded(sys.argv[1:])
        sys.argv[1:] = given.overrides
        # argparse takes the beginning of an option, too
        is_multirun = any(each == "-m" or (len(each) > 2 and "--multirun".startswith(each)) for each in sys.argv[1:])
        if is_multirun and started_stage() not in ("run", "plan"):
            raise UserError(
                "--multirun: must be given to `mtptrain run`, which runs every stage as a process of its own, but "
                "is given to another program; leave it out"
            )
        refuse_additions(given)
        with TemporaryDirectory() if is_multirun else nullcontext("") as sweep_dir:
            os.environ["MTPTRAIN_SWEEP_DIR"] = sweep_dir  # for Hydra's multirun.yaml, which could hold a password
            run()
    except KeyboardInterrupt:
        exit_with_line("stopped by Ctrl-C before anything started", EXIT_INTERRUPTED)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # some of Hydra's are OSErrors too
        exit_with_error(error, mistake(error, given), EXIT_MISTAKE)
    except OSError as error:  # Hydra could not create its directory
        exit_with_error(error, refusal(error, None), EXIT_MISTAKE)


def stage_command(stage: str, overrides: Sequence[str], num_ranks: int = 1) -> list[str]:
    """Returns the command that runs a stage in another process, on several ranks by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *(launcher if num_ranks > 1 else []), "-m", "mtptrain", stage, *overrides]


def python_module(name: str) -> str:
    """Returns the module name for `python -m`: the wheel has `data_prep` and `eval` inside mtptrain."""
    package = name.split(".")[0]
    if (Path(__file__).parents[1] / package).is_dir():  # a wheel, beside which others may have a package of this name
        return f"mtptrain.{name}"
    spec = find_spec(package)
    if spec and spec.origin and Path(spec.origin).parents[1] == Path(__file__).parents[2]:
        return name
    # Python then says that mtptrain lacks the module, instead of running another package of this name.
    return f"mtptrain.{name}"
