"""Tests that the packaged target is small, works over its whole context, and is decoded exactly with drafts."""

import json
from pathlib import Path

import pytest
import torch

from data_prep.text_files import STANDARD_LIBRARY, read_text_files
from mtptrain.data.prompt_files import is_held_out
from mtptrain.target.hub import DEMO_DIR, load_tokenizer
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from tests.conftest import make_config
from tools.demo_target import CONTEXT_TOKENS, EXCLUDE, GENERATED, VOCAB_SIZE, encode

FIGURES = json.loads((DEMO_DIR / "figures.json").read_text())


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(DEMO_DIR, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Returns the first 16 to 160 tokens of one hundred held-out files of this machine's standard library."""
    texts = read_text_files([STANDARD_LIBRARY], "*.py", EXCLUDE + GENERATED)[0]
    held_out = {name: text for name, text in texts.items() if is_held_out(name, 0.2) and len(text) > 2000}
    names = sorted(held_out)[:100]
    documents = encode(load_tokenizer(DEMO_DIR), [held_out[name] for name in names])
    found = [document[: 16 + 144 * i // 99].tolist() for i, document in enumerate(documents)]
    assert len(found) == 100
    return found


def test_it_is_a_small_llama_with_bf16_safetensors() -> None:
    config = json.loads((DEMO_DIR / "config.json").read_text())
    assert config["model_type"] == "llama" and config["vocab_size"] == VOCAB_SIZE == 4096
    assert config["max_position_embeddings"] == CONTEXT_TOKENS >= 2048 and config["dtype"] == "bfloat16"
    assert sum(path.stat().st_size for path in DEMO_DIR.iterdir()) < 16 * 2**20


def test_its_published_held_out_loss_never_rises_with_position_and_is_at_most_2_nats() -> None:
    by_position = FIGURES["held_out_source_by_position"]
    losses = list(by_position["nats_per_token"].values())
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    fine = by_position["nats_per_token_by_256_positions"]
    assert len(fine) == 8 and max(fine[5:]) < fine[4], (
        "the loss from position 1280 on must be below that of positions 1024 to 1279"
    )
    assert FIGURES["held_out_source"]["nats_per_token"] <= 2.0


def test_its_weights_still_have_the_published_loss_on_this_machines_library(
    target: Target, prompts: list[list[int]]
) -> None:
    """Allows 25 % plus 0.5 nats more, because another Python has other files. Random weights have ln 4096 = 8.3."""
    total, count = 0.0, 0
    for prompt in prompts[50:]:
        logits = target.model(torch.tensor([prompt])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(prompt[1:]), reduction="sum").item()
        count += len(prompt) - 1
    assert total / count < 1.25 * max(FIGURES["held_out_source_by_position"]["nats_per_token"].values()) + 0.5


def test_the_recipe_leaves_out_what_is_generated_and_holds_out_what_its_training_held_out() -> None:
    config = make_config()
    assert tuple(config.prompts.exclude) == EXCLUDE + GENERATED
    assert config.prompts.validation_fraction == 0.05, "the recipe must hold out the fraction that training held out"


def test_its_tokenizer_gives_back_every_text_and_starts_it_with_the_beginning_of_text() -> None:
    tokenizer = load_tokenizer(DEMO_DIR)
    text = Path(__file__).read_text() + "\n\tünïcode ✓\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids[1:]) == text
