"""The command line of every program: Hydra's overrides, and commands as strings."""

import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import hydra
from omegaconf import DictConfig

from mtptrain.config import RECIPES

RENAMED = {
    "acceptance.beside": "acceptance.baselines",
    "train.clip_norm": "train.max_grad_norm",
    "train.depth_decay": "train.ttt_loss_decay",
    "train.recompute": "train.activation_checkpointing",
}
"""Old names of settings, and their names now."""


def program(main: Callable[[DictConfig], None]) -> Callable[[], None]:
    """Make a function of the composed config the entry point of a program, which reads the command line."""
    run = hydra.main(config_path=RECIPES, config_name="pipeline", version_base="1.3")(main)

    @functools.wraps(main)
    def entry_point() -> None:
        refuse_renamed(sys.argv[1:])
        run()

    return entry_point


def refuse_renamed(arguments: Sequence[str]) -> None:
    """Exit with the new name if an override uses the old name of a setting, which Hydra would only call unknown."""
    for argument in arguments:
        name = argument.split("=")[0].lstrip("+~")
        if name in RENAMED:
            sys.exit(f"{name}: must be given by its new name, {RENAMED[name]}, but is given as {argument}; rename it")


def command() -> str:
    """Returns the command that started this process."""
    spec = sys.modules["__main__"].__spec__
    return shlex.join(["python", *([sys.argv[0]] if spec is None else ["-m", spec.name]), *sys.argv[1:]])


def python_module(name: str) -> str:
    """Returns the module name for `python -m`: the wheel has `data_prep` and `eval` inside mtptrain."""
    spec = find_spec(name.split(".")[0])
    is_in_this_checkout = (
        spec is not None and spec.origin is not None and Path(spec.origin).parents[1] == Path(__file__).parents[1]
    )
    return name if is_in_this_checkout else f"mtptrain.{name}"


def quoted(path: Path | str) -> str:
    """Returns a path as the value of an override."""
    return "'" + str(path).replace("'", "\\'") + "'"
