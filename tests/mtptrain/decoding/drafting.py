"""Builds random heads, and decodes prompts with drafts."""

import torch

from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation, speculate
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.target.model import Target
from tests.mtptrain.heads.test_contract import draw_norms


def random_head(target: Target, name: str = "mtp", seed: int = 0) -> Head:
    torch.manual_seed(seed)
    settings = {"capture_layers": [1, 2]} if name in ("peagle", "dflash") else {}
    head = build_head(HEADS[name].Config(**settings), target.config).eval()
    if name in ("medusa", "hydra"):  # without this, a new head would return the target's state unchanged
        draw_norms(head)
    return head


PARALLEL_OR_MLP = ("peagle", "dflash", "medusa", "hydra")


def decode(target: Target, drafter: Drafter, prompts: list[list[int]], **settings: object) -> list[Generation]:
    defaults: dict[str, object] = {"num_speculative_tokens": 3, "max_new_tokens": 24, "sampler": Sampler()}
    return speculate(target, drafter, prompts, **{**defaults, **settings})  # type: ignore[arg-type]
