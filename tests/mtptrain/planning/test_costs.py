"""Tests the costs of the micro-batch that a plan assumes."""

from collections.abc import Callable

import pytest

from mtptrain.config import PipelineConfig
from mtptrain.planning.plan import micro_batch_costs
from mtptrain.planning.workload import Workload
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import resolve_target


@pytest.mark.parametrize("head", ["mtp", "dflash"])
def test_a_remainder_of_one_token_is_no_document_of_the_micro_batch(
    config_for: Callable[..., PipelineConfig], head: str
) -> None:
    captures = ["head.capture_layers=[1,2]"] if head == "dflash" else []
    config = config_for(f"head={head}", "deepspeed=zero0", "train.batch_tokens=61", *captures)
    workload = Workload(True, 10, 200, 200, 20, 20.0)
    target_config = read_target_config(resolve_target(config.target.path))
    costs = [micro_batch_costs(config, target_config, length, workload) for length in (20, 61)]
    assert 0 < costs[0].peak_bytes <= costs[1].peak_bytes
