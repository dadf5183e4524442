"""Defines the tokens that targets read in tests, and writes configs without weights."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from mtptrain.target.families import read_target_config

CPU = torch.device("cpu")
NUM_TOKENS = 60
TOKENS = torch.randint(0, 256, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(NUM_TOKENS)[None]


def write_config(directory: Path, **settings: object) -> PreTrainedConfig:
    (directory / "config.json").write_text(json.dumps(settings))
    return read_target_config(directory)
