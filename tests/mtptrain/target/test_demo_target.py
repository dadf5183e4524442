"""Tests that the packaged target has the published loss."""

import json
import sysconfig
from pathlib import Path

import torch

from mtptrain.data.prompt_files import is_held_out
from mtptrain.target.hub import DEMO_DIR, load_tokenizer
from mtptrain.target.loading import load_target

FIGURES = json.loads((DEMO_DIR / "figures.json").read_text())


def test_the_packaged_target_has_the_published_loss_on_files_of_this_machines_library() -> None:
    """Allows 25 % plus 0.5 nats more, because another Python has other files. Random weights have ln 4096 = 8.3."""
    target = load_target(DEMO_DIR, torch.float32, torch.device("cpu"))
    files = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if is_held_out(path.name, 0.1)]
    tokenizer, losses = load_tokenizer(DEMO_DIR), []
    for path in files:
        ids = torch.tensor(tokenizer(path.read_text()[:1000])["input_ids"][:160])
        losses.append(torch.nn.functional.cross_entropy(target.model(ids[None]).logits[0, :-1], ids[1:]))
    published = FIGURES["held_out_source_by_position"]["nats_per_token"].values()
    assert len(losses) > 10 and sum(losses) / len(losses) < 1.25 * max(published) + 0.5
