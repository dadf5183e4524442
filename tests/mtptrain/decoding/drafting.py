"""Builds random heads, decodes prompts with drafts, and has a plain reference of biases and penalties."""

from collections import Counter
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from mtptrain.decoding.draft import Draft, Drafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation, speculate
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.target.model import Target, Verified
from tests.mtptrain.engines.conftest import BLOCK_DRAFTERS
from tests.mtptrain.heads.test_contract import draw_norms


def random_head(target: Target, name: str = "mtp", seed: int = 0) -> Head:
    torch.manual_seed(seed)
    settings: dict[str, object] = {"capture_layers": [1, 2]} if name in ("peagle", *BLOCK_DRAFTERS) else {}
    if name == "dflash2":
        settings["selector_top_k"] = 4
    head = build_head(HEADS[name].Config(**settings), target.config).eval()
    # Without this, a new head would return the target's state unchanged, or draft as a `dflash`.
    if name in ("medusa", "hydra", "dspark", "dflash2"):
        draw_norms(head)
    return head


PARALLEL_OR_MLP = ("peagle", "dflash", "dspark", "dflash2", "medusa", "hydra")


def decode(target: Target, drafter: Drafter, prompts: list[list[int]], **settings: object) -> list[Generation]:
    defaults: dict[str, object] = {"num_speculative_tokens": 3, "max_new_tokens": 24, "sampler": Sampler()}
    return speculate(target, drafter, prompts, **{**defaults, **settings})  # type: ignore[arg-type]


def draft_after(target: Target, drafter: Drafter, text: list[int]) -> Draft:
    """Returns the draft after a text, of whose tokens the target has read all but the newest."""
    tokens, positions, length = torch.tensor([text]), torch.arange(len(text) - 1)[None], len(text) + drafter.draft_slots
    states = target.forward(tokens[:, :-1], positions, target.cache(length), drafter.read_layers)
    drafter.start(1, length)
    return drafter.draft(Verified(tokens, torch.tensor([len(text)]), positions, states), Sampler())


def penalised(texts: torch.Tensor, scores: torch.Tensor, prompt_length: int, settings: dict[str, Any]) -> torch.Tensor:
    """Returns the scores [N, V] after the texts [N, S], with the biases and penalties of a `Sampler`."""
    scores = scores.clone()
    for token, bias in settings.get("logit_bias", {}).items():
        scores[:, token] += bias
    scores = RepetitionPenaltyLogitsProcessor(settings.get("repetition_penalty", 1.0))(texts, scores)
    for row, output in enumerate(texts[:, prompt_length:].tolist()):
        for token, count in Counter(output).items():
            scores[row, token] -= settings.get("presence_penalty", 0) + count * settings.get("frequency_penalty", 0)
    return scores
