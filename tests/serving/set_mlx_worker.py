"""Runs MLX's worker with settings of generation in MLX_SETTINGS, as JSON, which its own replace."""

import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mlx_lm  # noqa: F401 (whose function `generate` hides the module)
from mlx_vlm.generate import ar


def generate(step: Any, *given: Any, **named: Any) -> Any:
    return step(*given, **named | json.loads(os.environ["MLX_SETTINGS"]))


lm: Any = sys.modules["mlx_lm.generate"]
for module, name in ((lm, "generate_step"), (lm, "speculative_generate_step"), (ar, "generate_step")):
    setattr(module, name, partial(generate, getattr(module, name)))
runpy.run_path(str(Path(__file__).parents[2] / "mtptrain/engines/mlx/mlx_worker.py"), run_name="__main__")
