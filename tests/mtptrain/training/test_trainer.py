"""Tests the trainer's check of losses, its learning rate, and when a step is compiled."""

import math
from dataclasses import dataclass
from typing import TypeVar, cast

import pytest
import torch

from mtptrain.training.trainer import Trainer, is_compiled, warmup_cosine
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from tests.conftest import make_config

T = TypeVar("T")


@dataclass(frozen=True)
class SecondOfTwo(Ranks):
    """A rank beside another whose bad steps are `others`."""

    others: tuple[tuple[int, bool, int, tuple[int, ...]], ...] = ()

    def gather(self, value: T) -> list[T]:
        return [cast(T, list(self.others)), value]


def test_a_loss_that_is_not_finite_is_that_of_the_rank_that_read_it() -> None:
    """The gradient norm is that of all ranks, and so is not finite on any of them."""
    for own_loss, named in ((1.0, r"\[7, 8\] on rank 0"), (math.nan, r"\[4, 5\] on rank 1")):
        trainer = object.__new__(Trainer)
        trainer.ranks = SecondOfTwo(1, 2, 1, ((1, math.isnan(own_loss), 0, (7, 8)),))
        trainer._unchecked = [((4, 5), torch.tensor([own_loss, math.nan]))]
        with pytest.raises(UserError, match=rf"^train: the loss .* at step 1 is not, with documents {named};"):
            trainer.check_finite(1)


def test_the_learning_rate_warms_up_and_follows_half_a_cosine_and_steps_are_compiled_on_gpus() -> None:
    assert [warmup_cosine(step, 4, 12, 0.1) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [warmup_cosine(step, 4, 12, 0.1) for step in (8, 12, 99)] == pytest.approx([0.55, 0.1, 0.1])
    assert not math.isnan(warmup_cosine(0, 0, 0, 0.1))
    for setting, compiled in (("null", [False, True]), ("true", [True, True]), ("false", [False, False])):
        of_config = make_config(f"train.compile={setting}").train.compile
        assert [is_compiled(of_config, torch.device(device)) for device in ("cpu", "cuda")] == compiled
