"""Checks attention and loss against their definitions, and decoding against the training forward.

A GPU computes in bf16, which rounds with a relative error of up to 2^-8; several roundings add up.
"""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training_step import Case, narrow_target, random_batch, random_parts
from mtptrain.heads import HEADS
from mtptrain.heads.attention.training import depth_attention
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import PackedTokens, Packing, map_tensors
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch
from mtptrain.training.loss_blocks import DepthGroup
from mtptrain.training.losses import LossSettings, draft_losses
from tests.gpu.conftest import Record
from tests.mtptrain.heads.dense import dense_depth_attention
from tests.mtptrain.heads.drafted import drafted_states

DEPTHS = 3
LENGTHS = [129, 40, 300]
ANSWERS = [(0, 5, 12), (0, 20, 30), (0, 60, 69), (1, 0, 40), (2, 100, 200)]
POINTS = [np.arange(3, length, 7) for length in LENGTHS]


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.fixture
def bound(dtype: torch.dtype) -> float:
    return 0.02 if dtype is torch.bfloat16 else 1e-4


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().float().cpu(), wanted.detach().float().cpu()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("packing", [Packing.of_spans(LENGTHS, ANSWERS), Packing.of_points(LENGTHS, POINTS)])
def test_attention_and_its_gradients_are_those_of_a_dense_softmax(
    packing: Packing, device: torch.device, dtype: torch.dtype, bound: float, at_most: Record
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_drafts = len(packing.positions), len(packing.draft_positions)
    shapes = [(num_drafts, 4, 64), *[(num_tokens, 2, 64)] * 2, *[(num_drafts, 2, 64)] * (2 * (DEPTHS - 1))]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator)

    def results(attention: Any, where: torch.device, dtype: torch.dtype, num_own: int) -> list[torch.Tensor]:
        leaves = [x.to(where, dtype).requires_grad_() for x in inputs]
        query, key, value, *own = leaves
        keys, values = own[:num_own], own[DEPTHS - 1 :][:num_own]
        out = attention(query, key, value, keys, values, map_tensors(packing, lambda x: x.to(where)))
        return [out, *torch.autograd.grad((out.float() * weights.to(where)).sum(), leaves[:3])]

    found = results(depth_attention, device, dtype, DEPTHS - 1)
    for num_own in (DEPTHS - 1, 0):
        wanted = results(dense_depth_attention, torch.device("cpu"), torch.float32, num_own)
        error = max(relative_error(*pair) for pair in zip(found, wanted, strict=True))
        if num_own:
            at_most(error, bound, "error of output and gradients")
    assert error > 10 * bound, "attention without the draft position's own keys must be far off"


def random_case(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Head, FrozenParts, Batch]:
    """Returns a head for a small target, its frozen parts and a packed batch, all with random values."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_layers": 2, "sliding_window": 16} if name == "dflash" else {}
    config = HEADS[name].Config(ttt_steps=DEPTHS, **settings)
    case = Case(config, narrow_target(256, 512), [(length, 0) for length in LENGTHS])
    head = build_head(config, case.target).to(device, dtype)
    return head, random_parts(case.target, device, dtype), random_batch(case, head).to(device, dtype)


def test_the_loss_and_its_gradient_are_those_of_the_plain_formula(
    device: torch.device, dtype: torch.dtype, bound: float, at_most: Record
) -> None:
    """Depth k of draft position i has the teacher of depth 0 of i + k."""
    _, parts, batch = random_case("mtp", device, dtype)
    is_draft, plain_parts = batch.is_draft, parts.to(device, torch.float32)
    states = torch.randn(*is_draft.shape, parts.embed_tokens.shape[1], device=device).to(dtype).requires_grad_()
    scale = torch.ones(DEPTHS, device=device) / batch.num_drafts
    teacher_states = parts.final_norm(batch.hidden_states)[batch.packing.draft_positions + 1]
    settings = LossSettings(chunk_rows=96)
    group = DepthGroup(states, parts.lm_head, teacher_states, parts.logits, is_draft, scale)
    ours = draft_losses(group, settings).loss
    (our_grad,) = torch.autograd.grad(ours, states)
    for shift in (0, 1):
        plain = states.detach().float().requires_grad_()
        teacher = plain_parts.logits(teacher_states.float()).log_softmax(-1)  # [M, V]
        wanted = torch.zeros((), device=device)
        for depth, counts in enumerate(is_draft):
            log_p, log_q = teacher.roll(-depth - shift, 0), plain_parts.logits(plain[depth]).log_softmax(-1)
            wanted = wanted + scale[depth] * ((log_p.exp() * (log_p - log_q)).sum(-1) * counts).sum()
        (grad,) = torch.autograd.grad(wanted, plain)
        error = max(relative_error(ours, wanted), relative_error(our_grad, grad))
        if shift == 0:
            at_most(error, bound, "error of loss and gradient")
    assert error > 10 * bound, "the teacher of the next token must be far off"


@torch.no_grad()
@pytest.mark.parametrize("name", ["mtp", "eagle3", "dflash"])
def test_decoding_is_the_training_forward(
    name: str, device: torch.device, dtype: torch.dtype, bound: float, at_most: Record
) -> None:
    head, parts, batch = random_case(name, device, dtype)
    reads = parts.final_norm(batch.hidden_states) if batch.aux_hidden_states is None else batch.aux_hidden_states
    trained = head(PackedTokens(reads, batch.input_ids, batch.next_ids, batch.packing), parts, DEPTHS)  # [T, M, H]
    ids, starts = torch.cat([batch.input_ids[:1], batch.next_ids]), (0, 20, 100)  # positions in the first document
    wanted = torch.cat([trained[:, batch.packing.draft_positions == start][:, 0] for start in starts])
    for shift in (0, 1):
        shifted = ids.roll(shift)
        found = [state for start in starts for state in drafted_states(head, parts, reads, shifted, start, DEPTHS)]
        error = relative_error(torch.stack(found), wanted)
        if shift == 0:
            at_most(error, bound, "error of states")
    assert error > 10 * bound, "drafts that read other tokens must be far off"
