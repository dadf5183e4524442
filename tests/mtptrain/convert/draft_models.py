"""Loads draft models in fp32 on the CPU, and defines the settings of a short training run of one."""

from pathlib import Path

import torch

from mtptrain.convert.draft_model import load_draft_model
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.target.files import TargetFiles

CPU = torch.device("cpu")
Config = DraftModelHead.Config


def load(path: Path | str, target: Path) -> DraftModelHead:
    return load_draft_model(str(path), TargetFiles(target), torch.float32, CPU, "acceptance.draft_model")


DRAFT = ("head=draft_model", "head.ttt_steps=1", "head.num_hidden_layers=1", "train.max_steps=6")
