"""Counts the memory that a head takes in serving: its weights, and its keys and values per token."""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from mtptrain.heads.config import HeadConfig
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.planning.costs import _DefaultDtype, _frozen_parts, head_parameters
from mtptrain.planning.validation_costs import cached_values, read_prompt


@dataclass(frozen=True)
class ServingCosts:
    """Bytes that an engine holds for a head, without the tensors that the head shares with the target."""

    weights: int
    cached_per_token: int
    """Bytes of keys and values per token, over all layers."""


def serving_costs(config: HeadConfig, target_config: PreTrainedConfig, dtype: torch.dtype) -> ServingCosts:
    """Returns the costs of a head. The size of its cache is measured with fake tensors, which hold no data."""
    with FakeTensorMode(allow_non_fake_inputs=True), _DefaultDtype(dtype), torch.no_grad():
        drafter = read_prompt(build_head(config, target_config), _frozen_parts(target_config), target_config, 2)
        cached = drafter.cache.values_per_slot
    return ServingCosts(head_parameters(config, target_config) * dtype.itemsize, cached * dtype.itemsize)


def describe_serving(config: HeadConfig, target_config: PreTrainedConfig, dtype: torch.dtype) -> str | None:
    """Returns text that compares the memory of head `draft_model` with that of an `mtp` head and of the target's cache.

    Returns None if the config is of any other head.
    """
    if not isinstance(config, DraftModelHead.Config):
        return None
    own = serving_costs(config, target_config, dtype)
    text = f"{_gb(own.weights)} of weights and {own.cached_per_token:,} bytes of keys and values per token"
    if target_config.hidden_size % 64 == 0:  # an mtp head can only be built for these sizes
        head = serving_costs(MtpHead.Config(), target_config, dtype)
        text += f"; an mtp head takes {_gb(head.weights)} and {head.cached_per_token:,} bytes"
    return f"{text}; the target caches {cached_values(target_config) * dtype.itemsize:,} bytes per token"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
