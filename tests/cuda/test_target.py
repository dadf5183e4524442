"""Tests extraction from targets of every family, and decoding with caches, on fake CUDA tensors.

The fake kernels have the names and dtypes of real ones.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.hidden_states.extraction.transformers_streams import PACKED, TransformersStreams, residual_streams
from mtptrain.target.model import Target, Verified
from mtptrain.target.position_cache import PositionCache
from mtptrain.training.held_out import read_by_target
from tests.conftest import FAMILIES
from tests.cuda.fake_cuda import Meter, fake_cuda, place
from tests.published_targets import PUBLISHED_TARGETS

DEVICE = "cuda:0"
LENGTHS = (300, 300, 40)


def placed_target(config: PreTrainedConfig) -> Target:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    place(model, DEVICE)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return Target(model)


def family_config(family: str) -> PreTrainedConfig:
    model_type, settings = FAMILIES[family]
    sizes = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    latent = {"v_head_dim": 16} if model_type == "deepseek_v2" else {}  # values are smaller than queries, as published
    return AutoConfig.for_model(model_type, **{**sizes, "num_key_value_heads": 2, "head_dim": 64, **settings, **latent})


def extract(config: PreTrainedConfig) -> tuple[torch.Tensor, Meter, Counter[str]]:
    """Returns the streams of packed documents, the meter, and how often each attention kernel was called."""
    meter, kernels = Meter(), Counter[str]()
    layers = (0, 1, config.num_hidden_layers)
    with fake_cuda():
        target = placed_target(config)
        TransformersStreams(target, layers, batch_tokens=1024)  # switches the target to packed attention
        assert target.model.config._attn_implementation == PACKED
        with meter:
            states = residual_streams(target, [torch.zeros(length, dtype=torch.int32) for length in LENGTHS], layers)
    for name, count in meter.num_calls.items():
        kernels[name] += count if "attention" in name or "varlen" in name or "attn" in name else 0
    return states, meter, +kernels


def check_states(states: torch.Tensor, config: PreTrainedConfig) -> None:
    assert states.shape == (sum(LENGTHS), 3, config.hidden_size)
    assert (states.dtype, str(states.device)) == (torch.bfloat16, DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_extracted_with_packed_attention(family: str) -> None:
    config = family_config(family)
    states, _, kernels = extract(config)
    check_states(states, config)
    if family == "deepseek_v2":  # flash attention has no kernel for queries and values of different sizes
        assert not any("varlen" in name for name in kernels)
    else:
        assert sum(kernels.values()) == config.num_hidden_layers, kernels  # one call per layer


@pytest.mark.parametrize(("head_name", "settings"), [("mtp", {}), ("eagle3", {"capture_layers": [0, 1, 2]})])
def test_validation_reads_answers_into_documents_on_the_cpu(head_name: str, settings: dict[str, Any]) -> None:
    """Documents of the store are on the CPU too, and `make_batch` packs them there."""
    config = family_config("llama")
    with fake_cuda(), patch("mtptrain.target.model.PositionCache", OpenCache), torch.no_grad():
        target = placed_target(config)
        head = place(build_head(HEADS[head_name].Config(**settings), config), DEVICE).eval()
        document = read_by_target(head, target, [1, 2, 3], [4, 5])
        found = [x for x in vars(document).values() if isinstance(x, torch.Tensor)]
        assert target.device.type == "cuda"
        assert len(found) == 4 if settings else 3
        assert {x.device.type for x in found} == {"cpu"}


class OpenCache(PositionCache):
    """Treats all slots as used, because the highest used slot cannot be read from a fake tensor."""

    def begin(self, positions: torch.Tensor, tree: Any = None) -> torch.Tensor | None:
        with patch.object(torch.Tensor, "__int__", lambda _: self.num_slots - 1):
            return super().begin(positions, tree)


@pytest.mark.parametrize("head_name", HEADS)
@pytest.mark.parametrize("name", ["llama3_1_8b", "llama3_3_70b"])
def test_target_and_head_decode_with_their_caches(head_name: str, name: str) -> None:
    """Reads a prompt and then a round at the target's published width, and drafts at two depths after each.

    Heads eagle3, peagle and dflash read captured layers.
    """
    config = PUBLISHED_TARGETS[name].config()
    config.num_hidden_layers = 4
    captures = head_name in ("eagle3", "peagle", "dflash")
    settings = {"capture_layers": [1, 2, 4], "draft_vocab_size": 32_000} if captures else {}
    with fake_cuda():
        target = placed_target(config)
        head = place(build_head(HEADS[head_name].Config(**settings), config), DEVICE).eval()
        cache, of_head = OpenCache(64), OpenCache(64)
        with torch.no_grad():
            for length in (16, 4):
                tokens = torch.zeros(2, length, dtype=torch.long, device=DEVICE)
                positions = torch.arange(length, device=DEVICE).expand(2, -1)
                states = target.forward(tokens, positions, cache, head.capture_layers)
                sequence = F.pad(tokens, (0, 2))
                verified = Verified(sequence, torch.full_like(positions[:, 0], length + 1), positions, states)
                first = head.draft_first(verified, target.parts, of_head, 2)
                drafted, recycled = first.states, first.fed_back[:, None]
                if drafted.shape[1] == 1:
                    drafted, recycled = head.draft_next(
                        recycled, tokens[:, -1:], positions[:, -1:] + 1, target.parts, of_head
                    )
                logits = head.logits(drafted, target.parts)[:, -1:]
                chosen = head.target_tokens(logits.argmax(-1))
    assert logits.shape == (2, 1, settings.get("draft_vocab_size", config.vocab_size))
    for x in (logits, chosen, recycled, states.postnorm_states):
        assert str(x.device) == DEVICE
    assert (logits.dtype, recycled.dtype) == (torch.bfloat16, torch.bfloat16)
