"""Tests drafting and verification with a target whose layers are on two GPUs. All tensors are fake."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from eval.draft_quality import DraftQuality
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
from mtptrain.heads.files import build_head
from mtptrain.target.model import Target
from mtptrain.target.position_cache import PositionCache
from tests.conftest import FAMILIES
from tests.cuda.fake_cuda import Meter, fake_cuda, place

FIRST, SECOND = "cuda:0", "cuda:1"
DEPTHS, NUM_ROUNDS, NEW_TOKENS = 3, 2, 24
PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8]]


def spread_target(family: str = "llama", is_tied: bool = False) -> Target:
    """Returns a bf16 target that accelerate spreads over two GPUs.

    Each GPU has two layers. The final norm and an untied lm_head are on the second.
    """
    model_type, settings = FAMILIES[family]
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    layers = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2 if "layer_types" in settings else None,
    }
    config = AutoConfig.for_model(model_type, **{**sizes, **settings, **layers, "tie_word_embeddings": is_tied})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    on_first = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", *["lm_head"] * is_tied)
    on_second = ("model.layers.2", "model.layers.3", "model.norm", *["lm_head"] * (not is_tied))
    device_map = {**dict.fromkeys(on_first, FIRST), **dict.fromkeys(on_second, SECOND)}
    place(model, device_map)
    model = dispatch_model(model, device_map, main_device=FIRST, skip_keys=model._skip_keys_device_placement)
    if is_tied:  # tie only now: accelerate finds tied weights by their addresses, which fake tensors lack
        model.lm_head.weight = model.model.embed_tokens.weight
    return Target(model)


def placed_head(name: str, target: Target) -> Head:
    settings: dict[str, Any] = {"capture_layers": [1, 2, 4], "draft_vocab_size": 64} if name == "eagle3" else {}
    head = build_head(HEADS[name].Config(**settings), target.config)
    place(head, FIRST)
    return head.eval()


def drafter_of(kind: str, head: Head, target: Target) -> Drafter:
    chain = HeadDrafter(head, target.parts, DEPTHS, sample_drafts=kind == "sampled chain")
    drafters: dict[str, Drafter] = {
        "tree": TreeDrafter(head, target.parts, DEPTHS, num_nodes=10, top_k=3),
        "hybrid": HybridDrafter(chain, min_match=2),
        "model": HeadDrafter(placed_head("draft_model", target), target.parts, DEPTHS),
        "prompt lookup": PromptLookupDrafter(DEPTHS),
        "none": NoDrafter(),
    }
    return drafters.get(kind, chain)


@dataclass
class Answers(TorchDispatchMode):
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
        return self.number if args[0].dtype is not torch.bool else self.truth()

    def truth(self) -> bool:
        return self.truths.pop(0) if self.truths else False


@contextmanager
def rehearsal() -> Iterator[None]:
    with fake_cuda(), torch.no_grad():
        yield


def rounds_of(kind: str, head: Head, target: Target) -> list[Round]:
    """Returns the rounds of decoding with a drafter."""
    quality = DraftQuality(head, Sampler(1.0), len(target.parts.lm_head), DEPTHS) if "chain" in kind else None
    rounds: list[Round] = []

    def observe(seen: Round) -> None:
        rounds.append(seen)
        if quality is not None:
            quality(seen)

    # The hybrid also reads in each round whether prompt lookup drafts for all sequences. Say yes in the first only.
    truths = [True, True] + [True, False] * (NUM_ROUNDS - 1) if kind == "hybrid" else [True] * NUM_ROUNDS
    with Answers(truths):
        speculate(
            target,
            drafter_of(kind, head, target),
            PROMPTS,
            num_speculative_tokens=DEPTHS,
            max_new_tokens=NEW_TOKENS,
            sampler=Sampler(1.0 if kind == "sampled chain" else 0.0, generator=torch.Generator()),
            eos_token_ids=[5],
            observe=observe,
        )
    return rounds


@pytest.mark.parametrize(
    ("head_name", "kinds"),
    [
        ("mtp", ("chain", "sampled chain", "tree", "hybrid", "model", "prompt lookup", "none")),
        ("eagle3", ("chain", "tree")),
    ],
)
def test_whole_rounds_run_with_a_target_on_two_devices(head_name: str, kinds: tuple[str, ...]) -> None:
    with rehearsal():
        target = spread_target()
        head = placed_head(head_name, target)
        for kind in kinds:
            rounds = rounds_of(kind, head, target)
            assert len(rounds) == NUM_ROUNDS, kind
            assert {str(x.device) for each in rounds for x in (each.target_logits, each.draft.tokens)} == {FIRST}, kind


@pytest.mark.parametrize(
    ("family", "is_tied"), [("llama", False), ("llama", True), ("gemma3_text", True), ("mistral with window", False)]
)
def test_a_spread_target_returns_states_on_the_device_of_its_parts(family: str, is_tied: bool) -> None:
    with rehearsal():
        target = spread_target(family, is_tied)
        assert str(target.device) == FIRST
        cache = PositionCache(64)
        positions = torch.arange(40, device=FIRST).repeat(2, 1)
        with Answers([], number=43):
            for rows in (positions, positions[:, :4] + 40):  # the rows of a prompt, then of a round
                states = target.forward(torch.zeros_like(rows), rows, cache, (0, 2, 4))
                assert states.aux_hidden_states is not None
                for tensor in (
                    states.postnorm_states,
                    states.aux_hidden_states,
                    target.parts.logits(states.postnorm_states),
                ):
                    assert str(tensor.device) == FIRST
        assert [str(cache._keys[layer].device) for layer in range(4)] == [FIRST, FIRST, SECOND, SECOND]


def test_slot_indices_are_copied_to_another_device_once_in_a_forward() -> None:
    with rehearsal():
        cache, positions = PositionCache(16), torch.arange(8, device=FIRST).repeat(2, 1)
        of_layer = [torch.empty(2, 4, 8, 16, device=device) for device in (FIRST, SECOND, SECOND, SECOND)]
        with Meter() as meter:
            cache.begin(positions)
            for layer, states in enumerate(of_layer):
                keys, values = cache.update(states, states, layer)
                assert keys.device == values.device == states.device
        assert meter.num_calls["_to_copy"] == 1
        with Meter() as meter:
            cache.keep(positions[:, :2], positions[:, 2:4])
        assert meter.num_calls["_to_copy"] == 2  # one copy of the slots, one of the positions


def test_a_tied_table_is_not_copied_and_an_untied_one_is_moved() -> None:
    with rehearsal():
        tied, untied = spread_target(is_tied=True), spread_target(is_tied=False)
        assert tied.parts.lm_head is tied.parts.embed_tokens
        assert str(untied.model.lm_head.weight.device) == SECOND and str(untied.parts.lm_head.device) == FIRST
