"""Tests extraction, drafting and verification on fake GPUs, with targets on one of them and on two."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import dispatch_model
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.drafters import (
    HeadDrafter,
    HybridDrafter,
    NoDrafter,
    PromptLookupDrafter,
    TreeDrafter,
)
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Round, speculate
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head
from mtptrain.hidden_states.extraction.transformers_streams import PACKED, TransformersStreams, residual_streams
from mtptrain.target.form import find_form
from mtptrain.target.model import Target
from mtptrain.target.position_cache import PositionCache
from tests.conftest import FAMILIES
from tests.cuda.fake_cuda import fake_cuda, place

FIRST, SECOND = "cuda:0", "cuda:1"
DEPTHS, NUM_ROUNDS, NEW_TOKENS = 3, 2, 24
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8]]
LENGTHS = (300, 300, 40)


def family_config(family: str, num_layers: int, **more: Any) -> PreTrainedConfig:
    model_type, settings = FAMILIES[family]
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    if "layer_types" in settings:
        more |= {"layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2)}
    return AutoConfig.for_model(model_type, **{**sizes, **heads, **settings, "num_hidden_layers": num_layers, **more})


def fake_target(config: PreTrainedConfig, num_devices: int = 1) -> Target:
    """Returns a bf16 target. accelerate spreads it over two GPUs with two layers each; the final norm and an untied
    lm_head are on the second."""
    model, is_tied = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), config.tie_word_embeddings
    place(model, FIRST)
    if num_devices == 2:
        on_first = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1")
        device_map = {**dict.fromkeys(on_first, FIRST), "lm_head": FIRST if is_tied else SECOND}
        device_map |= dict.fromkeys(("model.layers.2", "model.layers.3", "model.norm"), SECOND)
        for name, device in device_map.items():
            place(model.get_submodule(name), device)
        model = dispatch_model(model, device_map, main_device=FIRST, skip_keys=model._skip_keys_device_placement)
    if is_tied:  # tie only now: accelerate finds tied weights by their addresses, which fake tensors lack
        model.lm_head.weight = model.model.embed_tokens.weight
    with unset_fake_temporarily():
        find_form(model.config)  # the result is kept: with fake tensors, it could not be found
    return Target(model)


def fake_head(name: str, target: Target) -> Head:
    head = build_head(HEADS[name].Config(ttt_steps=DEPTHS), target.config).eval()
    place(head, FIRST)
    if isinstance(head, DraftModelHead):
        with unset_fake_temporarily():
            find_form(head.config)
    return head


@dataclass
class Answered(TorchDispatchMode):
    """Supplies the values that the host reads, because fake tensors have none.

    Decoding reads numbers (slots and tokens) and, before each round, a truth value: whether any sequence continues.
    After the last item of `truths`, every truth value is False.
    """

    truths: list[bool]
    number: int = 20

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default:
            return True
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        if args[0].dtype is not torch.bool:
            return self.number
        return self.truths.pop(0) if self.truths else False


def check_rounds(name: str, target: Target, drafter: Drafter, truths: list[bool], sampler: Sampler) -> None:
    """Decodes, and checks that every tensor of every round is on the first GPU."""
    rounds: list[Round] = []
    sizes = {"num_speculative_tokens": DEPTHS, "max_new_tokens": NEW_TOKENS, "eos_token_ids": [5]}
    with Answered(truths):
        speculate(target, drafter, PROMPTS, **sizes, sampler=sampler, observe=rounds.append)  # type: ignore[arg-type]
    assert len(rounds) == NUM_ROUNDS, name
    assert {str(x.device) for each in rounds for x in (each.target_logits, each.draft.tokens)} == {FIRST}, name


@torch.no_grad()
def test_whole_rounds_of_every_drafter_run_with_a_target_on_two_devices() -> None:
    with fake_cuda():
        target = fake_target(family_config("llama", 4), num_devices=2)
        head = fake_head("mtp", target)
        chain, model = HeadDrafter(head, target.parts, DEPTHS), fake_head("draft_model", target)
        drafters: dict[str, Drafter] = {
            "chain": chain,
            "sampled chain": HeadDrafter(head, target.parts, DEPTHS, sample_drafts=True),
            "tree": TreeDrafter(head, target.parts, DEPTHS, num_nodes=10, top_k=3),
            "hybrid": HybridDrafter(chain, min_match=2),
            "model": HeadDrafter(model, target.parts, DEPTHS),
            "prompt lookup": PromptLookupDrafter(DEPTHS),
            "none": NoDrafter(),
        }
        for name, drafter in drafters.items():
            # The hybrid also reads whether prompt lookup drafts for all sequences. Say yes in the first round only.
            truths = [True, True, True, False] if name == "hybrid" else [True] * NUM_ROUNDS
            sampler = Sampler(1.0 if name == "sampled chain" else 0.0, generator=torch.Generator())
            if name in ("sampled chain", "tree"):
                sampler = replace(sampler, min_p=0.1, repetition_penalty=1.2, logit_bias={3: 1.0})
            check_rounds(name, target, drafter, truths, sampler)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "is_tied"), [("llama", False), ("llama", True), ("gemma3_text", True), ("mistral with window", False)]
)
def test_a_spread_target_returns_states_on_the_device_of_its_parts(family: str, is_tied: bool) -> None:
    with fake_cuda():
        target = fake_target(family_config(family, 4, tie_word_embeddings=is_tied), num_devices=2)
        assert (target.parts.lm_head is target.parts.embed_tokens) == is_tied and str(target.device) == FIRST
        cache, positions = PositionCache(64), torch.arange(40, device=FIRST).repeat(2, 1)
        with Answered([], number=43):
            for rows in (positions, positions[:, :4] + 40):  # the rows of a prompt, then of a round
                read = target.forward(torch.zeros_like(rows), rows, cache, (0, 2, 4))
                assert read.aux_hidden_states is not None
                logits = target.parts.logits(read.postnorm_states)
                assert {str(x.device) for x in (read.postnorm_states, read.aux_hidden_states, logits)} == {FIRST}
        assert [str(cache._keys[layer].device) for layer in range(4)] == [FIRST, FIRST, SECOND, SECOND]


def test_a_family_is_extracted_with_packed_attention() -> None:
    config, layers = family_config("llama", 2), (0, 1, 2)
    with fake_cuda():
        target = fake_target(config)
        TransformersStreams(target, layers, batch_tokens=1024)  # switches the target to packed attention
        assert target.model.config._attn_implementation == PACKED
        with patch("torch.nn.attention.varlen.varlen_attn", autospec=True, side_effect=varlen_attn) as called:
            states = residual_streams(target, [torch.zeros(length, dtype=torch.int32) for length in LENGTHS], layers)
    assert states.shape == (sum(LENGTHS), 3, config.hidden_size)
    assert (states.dtype, str(states.device)) == (torch.bfloat16, FIRST)
    assert called.call_count == config.num_hidden_layers
