"""Runs MLX's worker with heads that do not get the prompt's first token, which the target reads."""

import runpy
import sys
from pathlib import Path
from typing import Any

import mlx_lm  # noqa: F401 (whose function `generate` hides the module)
from mlx_vlm.speculative.drafters import eagle3, qwen3_dflash

prefill, hidden_of = eagle3.Model.prefill_from_target_hidden, qwen3_dflash.Model._hidden
generate: Any = sys.modules["mlx_lm.generate"]
speculate = generate.speculative_generate_step


class MovedModel:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, ids: Any, cache: Any) -> Any:
        return self.model(ids if cache[0].offset else ids[:, 1:], cache=cache)


def moved_hidden(self: Any, inputs: Any, states: Any, cache: Any) -> Any:
    return hidden_of(self, inputs, states if cache[0].offset else states[:, 1:], cache)


def moved_prefill(self: Any, ids: Any, states: Any, *rest: Any, **more: Any) -> None:
    prefill(self, ids[:, 1:], states[:, 1:], *rest, **more)


eagle3.Model.prefill_from_target_hidden, qwen3_dflash.Model._hidden = moved_prefill, moved_hidden
generate.speculative_generate_step = lambda ids, target, draft, **settings: speculate(
    ids, target, MovedModel(draft), **settings
)
runpy.run_path(str(Path(__file__).parents[2] / "mtptrain/engines/mlx/mlx_worker.py"), run_name="__main__")
