"""Tests which mixes of parts `train.loss` may give."""

import math
from typing import Any

import pytest

from mtptrain.config import LossPart
from mtptrain.settings.loss import loss_mix
from mtptrain.training.losses import LossSettings
from mtptrain.utils.errors import UserError
from tests.conftest import make_config

NAMES = "kl, rkl, jsd, tv, nla, lk, ce, data_ce, features, e2e, dpace, selector, confidence"


def test_the_command_line_gives_a_part_or_a_mix() -> None:
    for overrides, mix in (
        ([], {LossPart.kl: 1.0}),
        *(([f"train.loss={part}"], {part: 1.0}) for part in LossPart if part not in ("selector", "confidence")),
        (["train.feature_weight=0.1"], {LossPart.kl: 1.0, LossPart.features: 0.1}),
        (["train.loss={ce:0.1,tv:0.9}"], {LossPart.ce: 0.1, LossPart.tv: 0.9}),
        (["train.loss={kl:1,e2e:0}"], {LossPart.kl: 1.0}),
        (["train.loss={ce:1,data_ce:2}", "train.feature_weight=3"], {"ce": 1.0, "data_ce": 2.0, "features": 3.0}),
    ):
        assert LossSettings.of(make_config(*overrides).train).mix == mix


def test_a_mix_that_means_nothing_is_refused() -> None:
    wrong: tuple[tuple[Any, str], ...] = (
        ("lkk", f"train.loss: must be made of the parts {NAMES}, but names 'lkk'; did you mean lk?"),
        ({"kl": 1, "foo": 1}, f"train.loss: must be made of the parts {NAMES}, but names 'foo'; choose among these"),
        *(
            (loss, "train.loss: must be the name of a part, or give parts finite weights of at least 0, one of them")
            for loss in (
                *({"kl": 1, "tv": weight} for weight in (-0.5, math.nan, math.inf, "0.5", None, True, [1])),
                *({}, {"kl": 0}, None, 1.0, ["kl"]),
            )
        ),
    )
    for loss, message in wrong:
        with pytest.raises(UserError) as caught:
            loss_mix(loss)
        assert str(caught.value).startswith(message)
