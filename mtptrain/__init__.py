"""Trains draft heads for speculative decoding. The names below are the Python interface: see docs/python.md.

    target = mtptrain.load_target("demo")
    head = mtptrain.load_head("runs/quickstart", target)
    print(mtptrain.generate(target, head, "def read(")[0].text)

Importing the package imports no torch: each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtptrain.api import Generated, LoadedTarget, acceptance, generate, load_head, load_target, run
    from mtptrain.decoding.acceptance import Acceptance
    from mtptrain.init_from.start import RunHead
    from mtptrain.utils.errors import UserError

__all__ = ["Acceptance", "Generated", "LoadedTarget", "RunHead", "UserError"]
__all__ += ["acceptance", "generate", "load_head", "load_target", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mtptrain' has no attribute {name!r}")
    return getattr(import_module("mtptrain.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
