"""Tests that the packaged target is what benchmarks/demo_target.py makes, and has the published loss."""

import json
import sysconfig
from pathlib import Path

import pytest
import torch

from benchmarks import demo_target
from benchmarks.demo_target import CONTEXT_TOKENS, EXCLUDE, GENERATED, Phase, demo_config, encode
from mtptrain.data.prompt_files import is_held_out
from mtptrain.target.hub import DEMO_DIR, load_tokenizer
from mtptrain.target.loading import load_target
from tests.conftest import make_config

FIGURES = json.loads((DEMO_DIR / "figures.json").read_text())


def test_the_packaged_target_is_a_small_llama_whose_published_loss_never_rises_with_position() -> None:
    config, made = json.loads((DEMO_DIR / "config.json").read_text()), demo_config(256, 6).to_dict()
    sizes = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "intermediate_size", "vocab_size", "model_type")
    assert {name: config[name] for name in sizes} == {name: made[name] for name in sizes}
    assert config["max_position_embeddings"] == CONTEXT_TOKENS >= 2048 and config["dtype"] == "bfloat16"
    assert sum(path.stat().st_size for path in DEMO_DIR.iterdir()) < 16 * 2**20
    losses = list(FIGURES["held_out_source_by_position"]["nats_per_token"].values())
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert max(losses) <= 2.5


def test_its_weights_have_that_loss_on_files_of_this_machines_library() -> None:
    """Allows 25 % plus 0.5 nats more, because another Python has other files. Random weights have ln 4096 = 8.3."""
    target = load_target(DEMO_DIR, torch.float32, torch.device("cpu"))
    files = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if is_held_out(path.name, 0.1)]
    documents = encode(load_tokenizer(DEMO_DIR), [path.read_text()[:1000] for path in files])
    losses = []
    for document in documents:
        ids = torch.from_numpy(document[:160]).long()
        losses.append(torch.nn.functional.cross_entropy(target.model(ids[None]).logits[0, :-1], ids[1:]))
    published = FIGURES["held_out_source_by_position"]["nats_per_token"].values()
    assert len(losses) > 10 and sum(losses) / len(losses) < 1.25 * max(published) + 0.5


def test_the_recipe_leaves_out_what_is_generated_and_holds_out_what_its_training_held_out() -> None:
    config = make_config()
    assert tuple(config.prompts.exclude) == EXCLUDE + GENERATED
    assert config.prompts.validation_fraction == 0.05, "the recipe must hold out the fraction that training held out"


@pytest.mark.slow
def test_a_draft_model_is_made_with_the_targets_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {f"file_{i}.py": f"def f_{i}(x):\n    return x + {i}\n" * 400 for i in range(40)}
    monkeypatch.setattr(demo_target, "read_text_files", lambda *_: (texts, {}))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    demo_target.make(tmp_path, DEMO_DIR, demo_config(64, 1), (Phase(5 * 16_384, {0.0: 256}, lr_scale=1.0),))
    figures = json.loads((tmp_path / "figures.json").read_text())
    by_position = figures["held_out_source_by_position"]["nats_per_token_by_256_positions"]
    assert len(by_position) == 8 and by_position[0] == max(by_position) < 8.0
    assert figures["training"]["tokens_seen"] == 81_920
    assert (tmp_path / "tokenizer.json").read_text() == (DEMO_DIR / "tokenizer.json").read_text()
