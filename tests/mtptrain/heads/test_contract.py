"""Tests that decoding with every head computes the same states at depth k as training does."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.layers import Attention
from mtptrain.heads.packing import PackedTokens, Packing
from mtptrain.settings import heads
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from tests.conftest import tiers
from tests.mtptrain.heads.drafted import drafted_states

DEPTHS = 5
LENGTHS = [9, 9, 6, 2, 1]
VOCAB_SIZE, HIDDEN_SIZE = 50, 128
PARTS = FrozenParts(
    embed_tokens=torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(4)),
    norm_weight=torch.ones(HIDDEN_SIZE),
    lm_head=torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(5)) / 10,
    form=find_form(LlamaConfig(num_hidden_layers=1)),
)


def tiny_config(**settings: object) -> LlamaConfig:
    sizes = {"hidden_size": HIDDEN_SIZE, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    context = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
    return LlamaConfig(**{**sizes, **context, "num_hidden_layers": 2, **settings})


def layers(*capture_layers: int, **settings: object) -> dict[str, object]:
    """Returns settings of a head that captures these layers of the target."""
    return {"capture_layers": [*capture_layers], **settings}


OWN: dict[str, object] = {"draft_vocab_size": 20}
SLIDING = {"sliding_window": DEPTHS + 1, "causal": "sliding", "layer_types": ["full_attention", "sliding_attention"]}
SMALL_SELECTOR = {"selector_rank": 6, "selector_top_k": 5}
NARROW = {"hidden_size": 64, "intermediate_size": 80}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "mtp": ("mtp", {}),
    "mtp, as MiMo": ("mtp", {"attention_bias": True, "zero_first_embedding": True, "prenorm_states": True}),
    "native_mtp": ("native_mtp", {}),
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", layers(0, 1, 2)),
    "eagle3, draft vocabulary": ("eagle3", layers(1, 2, **OWN)),
    "eagle3, norms before": ("eagle3", layers(0, 2, norm_output=False, norm_before_residual=True)),
    "eagle3.1": ("eagle3", layers(0, 1, 2, fc_norm=True, norm_before_fc=False)),
    "peagle, draft vocabulary": ("peagle", layers(1, 2, norm_output=True, **OWN)),
    "medusa": ("medusa", {"num_layers": 2, "fc_bias": True}),
    "hydra": ("hydra", {"num_layers": 2}),
    "dflash": ("dflash", layers(0, 1, 2)),
    "dflash, draft vocabulary": ("dflash", layers(2, num_layers=2, **OWN)),
    "dflash, causal": ("dflash", layers(0, 1, num_layers=2, causal="all")),
    "dflash, a window": ("dflash", layers(1, num_layers=3, sliding_window=DEPTHS + 2)),
    "dflash, all variants": ("dflash", layers(1, 2, num_layers=2, sample_from_anchor=True, **SLIDING)),
    "dspark": ("dspark", layers(0, 1, num_layers=2, markov_rank=6)),
    "dspark, fill-in, draft vocabulary": ("dspark", layers(1, 2, markov_rank=8, sample_from_anchor=False, **OWN)),
    "dflash2": ("dflash2", layers(0, 1, num_layers=2, conv_kernel_size=3, conv_group_size=8, **SMALL_SELECTOR)),
    "dflash2, a window, causal": ("dflash2", layers(1, sliding_window=DEPTHS + 2, causal="all", **SMALL_SELECTOR)),
    "draft_model": ("draft_model", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "draft_model, smaller, untied": ("draft_model", {"num_hidden_layers": 2, "tie_word_embeddings": False, **NARROW}),
}

IN_CORE = (
    *("mtp", "native_mtp", "eagle", "eagle3, draft vocabulary", "peagle, draft vocabulary", "medusa", "hydra"),
    *("dflash, all variants", "dspark", "dflash2", "draft_model"),
)
"""One case of each head, which `make test` runs."""
CASES_OF_ALL_TIERS = tiers(CASES, IN_CORE)


def random_head(case: str) -> Head:
    torch.manual_seed(0)
    name, settings = CASES[case]
    head = build_head(HEADS[name].Config(ttt_steps=DEPTHS, **settings), tiny_config())
    draw_norms(head)
    return head


@torch.no_grad()
def draw_norms(head: Head, generator: torch.Generator | None = None) -> None:
    """Randomise norms, biases and weights that start at 0, so that a weight in the wrong place changes the result."""
    for parameter in head.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        elif parameter.ndim == 3 or not parameter.any():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)


def packed_inputs(head: Head) -> PackedTokens:
    """Returns random tokens and states of packed documents, in which every token is a draft position."""
    generator = torch.Generator().manual_seed(1)
    streams = (len(head.read_layers),) if head.read_layers else ()
    target_states = torch.randn(sum(LENGTHS), *streams, HIDDEN_SIZE, generator=generator)
    ids = torch.randint(0, VOCAB_SIZE, (sum(LENGTHS),), generator=generator)
    return PackedTokens(target_states, ids, torch.roll(ids, -1), Packing.of_spans(LENGTHS, window=head.shared_window))


def run(head: Head, tokens: PackedTokens) -> torch.Tensor:
    """Returns the states of training [T, M, H]."""
    return head(tokens, PARTS, DEPTHS)


def largest_difference(head: Head, states: torch.Tensor) -> float:
    """Returns the largest difference between training states [T, N, H] and decoded states, over all drafts."""
    tokens, differences = packed_inputs(head), []
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    for start, length in zip(starts.tolist(), LENGTHS, strict=False):
        document = slice(start, start + length)
        ids = F.pad(tokens.input_ids[document], (0, DEPTHS))
        for position in range(length - 1):
            served = drafted_states(head, PARTS, tokens.target_states[document], ids, position, DEPTHS)
            # Later depths would read tokens beyond the end of the document.
            for depth, state in enumerate(served[: length - 1 - position]):
                differences.append((states[depth, start + position] - state).abs().max().item())
    assert len(differences) > 50
    return max(differences)


def test_every_head_is_among_the_cases() -> None:
    assert {name for name, _ in CASES.values()} == set(HEADS) == {CASES[case][0] for case in IN_CORE}


@pytest.mark.parametrize("name", CASES_OF_ALL_TIERS)
@torch.no_grad()
def test_the_decode_step_at_depth_k_equals_the_training_forward_at_depth_k(name: str) -> None:
    """An alignment shifted by one token must be caught."""
    head = random_head(name)
    tokens = packed_inputs(head)
    assert largest_difference(head, run(head, tokens)) < 2e-5
    read = "target_states" if CASES[name][0] == "medusa" else "next_ids"
    shifted = replace(tokens, **{read: torch.roll(getattr(tokens, read), -1, 0)})
    assert largest_difference(head, run(head, shifted)) > 1e-2


@pytest.mark.parametrize("name", IN_CORE)
def test_casting_a_head_to_bf16_does_not_round_its_rotary_frequencies(name: str) -> None:
    head, positions = random_head(name), torch.arange(40)

    def frequencies() -> list[torch.Tensor]:
        ropes = [module.rope for module in head.modules() if isinstance(module, Attention)]
        buffers = (buffer.clone() for buffer in head.buffers() if buffer.is_floating_point())
        return [*(rope.tables(positions, torch.float32)[0] for rope in ropes), *buffers]

    before = frequencies()
    head.bfloat16()
    assert all(weight.dtype == torch.bfloat16 for weight in head.parameters())
    assert bool(before) == (CASES[name][0] not in ("medusa", "hydra"))
    assert all(torch.equal(x, y) for x, y in zip(frequencies(), before, strict=True))


def test_a_new_head_with_an_mlp_per_depth_starts_as_the_targets_own_state() -> None:
    state = torch.randn(5, HIDDEN_SIZE)
    medusa, hydra = (build_head(HEADS[name].Config(num_layers=2), tiny_config()) for name in ("medusa", "hydra"))
    for depth in range(hydra.ttt_steps):
        inputs = [state, *torch.randn(1 + depth, 5, HIDDEN_SIZE)]
        torch.testing.assert_close(medusa.blocks[depth](state), state)
        torch.testing.assert_close(hydra.mlps[depth](*inputs), state)


PAGE = Path(__file__).parents[3] / "docs" / "add_a_head.md"


def test_the_pages_head_decodes_what_it_was_trained_on_and_has_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is built and registered as the page says."""
    of_settings, of_head = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(of_settings, found := dict(vars(heads)))
    monkeypatch.setattr(heads, "GatedConfig", found["GatedConfig"], raising=False)
    exec(of_head, found := {"__name__": "gated"})
    monkeypatch.setitem(HEADS, "gated", found["GatedHead"])
    torch.manual_seed(0)
    head = build_head(HEADS["gated"].Config(ttt_steps=DEPTHS), tiny_config())
    draw_norms(head)
    tokens = packed_inputs(head)
    states = run(head, tokens)  # [T, M, H]
    with torch.no_grad():
        assert largest_difference(head, states) < 2e-5
        shifted = replace(tokens, next_ids=torch.roll(tokens.next_ids, -1))
        assert largest_difference(head, run(head, shifted)) > 1e-2
    states.square().mean().backward()
    grads = [weight.grad for weight in head.parameters()]
    assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in grads)
