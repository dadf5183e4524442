"""Runs steps of recipes with DeepSpeed's own engine, as rank 0 of 8, on fake CUDA tensors.

Prints the peak memory and other figures of each recipe as a line of JSON. This is a program and not a test, because its
fake process group and its changes to DeepSpeed must not affect other tests.

    DS_ACCELERATOR=cuda python -m tests.cuda.zero_steps llama3_1_8b,mtp,zero1
"""

from tests.cuda import guard  # noqa: F401  # isort: skip  (must come before torch)

import json
import sys
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest.mock import patch

import deepspeed.accelerator
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mtptrain.config import RECIPES, load_config
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.target.form import find_form
from mtptrain.training.trainer import Trainer
from tests.cuda.fake_cuda import Meter, fake_cuda, place
from tests.cuda.rehearsal import DEVICE, GpuRanks, answers, frozen_parts, make_fake_batch
from tests.published_targets import PUBLISHED_TARGETS

NUM_RANKS = 8


class FakeStream:
    """Replaces a CUDA stream. Does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = record_event = wait_stream


def nothing(*_: object, **__: object) -> None:
    pass


CUDA: dict[str, Any] = {
    "Stream": FakeStream,
    "stream": FakeStream,
    "current_stream": FakeStream,
    "default_stream": FakeStream,
    "is_bf16_supported": lambda *_, **__: True,
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "empty_cache": nothing,
    "reset_peak_memory_stats": nothing,
}
"""Replacements for what DeepSpeed uses of torch.cuda and `fake_cuda` does not replace."""
ACCELERATOR: dict[str, Any] = {"is_available": lambda _: True, "range_push": nothing, "range_pop": nothing}


def rehearse(target: str, head_name: str, zero: str) -> dict[str, Any]:
    """Run a short step of a recipe, then one with the longest document that it allows, and return their figures.

    The first step creates the optimizer's moments, so the second step needs as much memory as all later ones.
    """
    config = recipe_config(f"{target}_{head_name}", f"deepspeed={zero}")
    target_config, train = PUBLISHED_TARGETS[target].config(), config.train
    find_form(target_config)  # the result is kept: with the replacements below, it could not be found
    accelerator = deepspeed.accelerator.get_accelerator()
    with fake_cuda(), ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **CUDA))
        stack.enter_context(patch.multiple(type(accelerator), **ACCELERATOR))
        stack.enter_context(
            patch.object(nn.Module, "_apply", lambda module, *_, **__: module)
        )  # every tensor is on its device already
        head = place(build_head(config.head, target_config), DEVICE)
        assert isinstance(head, Head)
        parts = frozen_parts(target_config)
        meter = Meter()
        meter.hold(*head.parameters(), parts.embed_tokens, parts.norm_weight, parts.lm_head)
        with meter:
            trainer = Trainer(head, parts, train, config.deepspeed, 10, GpuRanks(0, NUM_RANKS, 0))
            meter.syncs.clear()
            for length in (64, train.batch_tokens):
                mask = answers(length, [(0, length)])
                trainer.step([make_fake_batch(head, target_config.hidden_size, [mask], config.head.ttt_steps)])
    optimizer = trainer.engine.optimizer
    masters = [x for group in optimizer.optimizer.param_groups for x in group["params"]]
    return {
        "peak_bytes": meter.peak_bytes[DEVICE],
        "syncs": dict(meter.syncs),
        "stage": int(optimizer.partition_gradients) + 1,
        "masters": sorted({str(x.dtype) for x in masters}),
        "master_values": sum(x.numel() for x in masters),
        "values": sum(x.numel() for x in head.parameters()),
    }


def recipe_config(recipe: str, *overrides: str) -> Any:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(RECIPES, version_base="1.3"):
        return load_config(compose("pipeline", [f"recipe={recipe}", *overrides]))


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    for case in sys.argv[1:]:
        print(json.dumps(rehearse(*case.split(","))), flush=True)
