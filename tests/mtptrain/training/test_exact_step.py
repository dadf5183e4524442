"""Tests that the trainer's step equals a plain formula with every token at every depth, dense masks and all logits."""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from transformers import AutoModel, LlamaConfig

from mtptrain.config import LossPart
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import build_head
from mtptrain.heads.hydra import HydraHead
from mtptrain.heads.layer_head import LayerHead
from mtptrain.heads.native_mtp import NativeMtpHead
from mtptrain.hidden_states.store import StoredDocument
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import make_batch
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings
from mtptrain.training.step_packing import Anchors
from mtptrain.utils.clock import PhaseClock
from tests.mtptrain.heads.test_contract import CASES, CASES_OF_ALL_TIERS, draw_norms, tiny_config
from tests.mtptrain.training.plain_dflash import plain_block, plain_confidence, plain_logits, plain_selected
from tests.mtptrain.training.plain_losses import PARTS_OF_LOGITS, Draft, plain_losses

H, V = 128, 50
DECAY = 0.8

Document = tuple[list[int], list[int]]
"""Token ids and loss mask of a document."""


@dataclass(frozen=True)
class Step:
    """What a training step reads."""

    head: Head
    depths: int
    documents: list[StoredDocument]
    frozen: FrozenParts
    loss: LossSettings
    anchors: Anchors | None


def plain_step(step: Step) -> tuple[torch.Tensor, list[float]]:
    """Returns the weighted mean loss, and the sum of losses at each depth."""
    head, depths, frozen = step.head, step.depths, step.frozen
    sums, counts = [torch.zeros(()) for _ in range(depths)], [0] * depths
    for document in step.documents:
        ids, mask, n = document.input_ids.tolist(), document.loss_mask.tolist(), len(document.input_ids)
        hidden = read = frozen.final_norm(document.hidden_states)
        if head.read_layers:
            read = document.aux_hidden_states if head.capture_layers else document.hidden_states[:, None]
        teacher = (hidden @ frozen.lm_head.T).softmax(-1)
        drafting = [t for t in range(n - 2) if mask[t + 1] and mask[t + 2]]
        if step.anchors is not None and drafting:
            drafting = [drafting[i] for i in step.anchors.draw(document.document_id, len(drafting))]
        outs = plain_states(head, depths, ids, read, drafting, frozen)
        for t in drafting:
            counted = [depth for depth in range(depths) if t + 2 + depth < n and all(mask[t + 1 : t + 3 + depth])]
            drafts = [
                Draft(
                    teacher[t + 1 + depth],
                    plain_logits(head, outs[t][depth], ids[t + 1 + depth], frozen),
                    head.draft_token_ids,
                    ids[t + 2 + depth],
                    plain_confidence(head, outs[t][depth], ids[t + 1 + depth]),
                    plain_selected(head, outs[t][depth], ids[t + 1 + depth], frozen),
                )
                for depth in counted
            ]
            reads_features = LossPart.features in step.loss.mix  # states may have another size than the target's
            features = [F.smooth_l1_loss(outs[t][d], hidden[t + 1 + d]) for d in counted if reads_features]
            for depth, draft in enumerate(plain_losses(drafts, features, step.loss)):
                sums[depth] = sums[depth] + draft
                counts[depth] += 1
    weights_of = [DECAY**depth for depth in range(depths)]
    total = sum(w * s / max(1, c) for w, s, c in zip(weights_of, sums, counts, strict=True)) / sum(weights_of)
    assert isinstance(total, torch.Tensor)
    return total, [float(s.detach()) for s in sums]


def plain_states(
    head: Head, depths: int, ids: list[int], read: torch.Tensor, drafting: list[int], frozen: FrozenParts
) -> dict[int, torch.Tensor]:
    """Returns the states of all depths [T, H] at each draft position."""
    if isinstance(head, DflashHead):
        return {t: plain_block(head, depths, ids, read, t, frozen) for t in drafting}
    plain = plain_layer_states if isinstance(head, LayerHead) else plain_mlp_states
    if isinstance(head, DraftModelHead):
        plain = plain_model_states
    if isinstance(head, NativeMtpHead):
        plain = plain_module_states
    outs = torch.stack(list(plain(head, depths, ids, read, frozen)), 1)
    return {t: outs[t] for t in drafting}


def plain_model_states(head: DraftModelHead, depths: int, ids: list[int], *_: object) -> Iterator[torch.Tensor]:
    """Yields the states [n, H] of each depth by transformers. Depth k of token t is the output at token t + 1 + k."""
    stock = AutoModel.from_config(deepcopy(head.config), attn_implementation="eager")
    weights = {name.removeprefix("model."): x for name, x in head.named_parameters() if name.startswith("model.")}
    outputs = functional_call(stock, weights, kwargs={"input_ids": torch.tensor([ids]), "use_cache": False})[0][0]
    for depth in range(depths):
        yield F.pad(outputs[1 + depth :], (0, 0, 0, min(1 + depth, len(ids))))


def plain_module_states(
    head: NativeMtpHead, depths: int, ids: list[int], target_states: torch.Tensor, frozen: FrozenParts
) -> Iterator[torch.Tensor]:
    """Yields the states [n, H] of each depth, with a layer of transformers that reads a sequence per draft position."""
    stock, weights = deepcopy(head.model), dict(head.model.named_parameters())
    stock.config._attn_implementation = "eager"

    def combined(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return head.eh_proj(torch.cat([head.enorm(frozen.embed(tokens)), head.hnorm(states)], -1))

    first = combined(target_states, tokens_read(ids, 0))
    sequences = [first[: t + 1] for t in range(len(ids))]
    for depth in range(depths):
        outputs = [
            functional_call(stock, weights, kwargs={"inputs_embeds": x[None], "use_cache": False})[0][0, -1]
            for x in sequences
        ]
        states = head.norm(torch.stack(outputs))
        yield states
        following = combined(states, tokens_read(ids, depth + 1))
        sequences = [torch.cat([x, new[None]]) for x, new in zip(sequences, following, strict=True)]


def tokens_read(ids: list[int], depth: int) -> torch.Tensor:
    """Returns the token that each draft position reads at a depth, or 0 beyond the end of the document."""
    return torch.tensor([ids[t + 1 + depth] if t + 1 + depth < len(ids) else 0 for t in range(len(ids))])


def plain_layer_states(
    head: LayerHead, depths: int, ids: list[int], target_states: torch.Tensor, frozen: FrozenParts
) -> Iterator[torch.Tensor]:
    """Yields the states [n, H] of each depth of a head with one decoder layer."""
    n, attention, recycled = len(ids), head.self_attn, head.fuse(target_states)
    keys, values = [], []
    past = torch.ones(n, n, dtype=torch.bool).tril()
    for depth in range(depths):
        read, positions = tokens_read(ids, depth), torch.arange(n) + depth
        if depth and head.mask_hidden is not None:
            read, recycled = torch.full((n,), head.mask_token_id), head.fuse(head.mask_hidden).expand(n, -1)
        embeddings = frozen.embed(read)
        if head.zero_first_embedding and not depth:
            embeddings = torch.cat([0 * embeddings[:1], embeddings[1:]])
        residual, x = head.combine(recycled, embeddings)
        query, (key, value) = attention.queries(x, positions), attention.keys_values(x, positions)
        groups = query.shape[1] // key.shape[1]
        keys.append(key.repeat_interleave(groups, 1))
        values.append(value.repeat_interleave(groups, 1))
        masks = [past] + [torch.eye(n, dtype=torch.bool)] * depth
        by_depth = [torch.einsum("qhd,khd->hqk", query, k) for k in keys]
        scores = torch.cat([x.masked_fill(~mask, -math.inf) for x, mask in zip(by_depth, masks, strict=True)], -1)
        weights = (scores * query.shape[-1] ** -0.5).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, torch.cat(values))
        out, recycled = head.finish(residual, attention.o_proj(attended.flatten(-2)))
        yield out


def plain_mlp_states(
    head: Head, depths: int, ids: list[int], target_states: torch.Tensor, frozen: FrozenParts
) -> Iterator[torch.Tensor]:
    """Yields the states [n, H] of each depth of a head with an MLP per depth, computed from the head's weights."""
    weights = dict(head.named_parameters())
    inputs = target_states
    for depth in range(depths):
        inputs = torch.cat([inputs, frozen.embed(tokens_read(ids, depth))], -1)
        x, layers = target_states, f"blocks.{depth}.layers"
        if isinstance(head, HydraHead):
            x, y = (inputs @ weights[f"mlps.{depth}.{name}.weight"].T for name in ("residual", "first"))
            x, layers = x + y * y.sigmoid(), f"mlps.{depth}.rest.layers"
        for layer in range(sum(name.startswith(layers) and name.endswith("weight") for name in weights)):
            y = x @ weights[f"{layers}.{layer}.weight"].T + weights.get(f"{layers}.{layer}.bias", 0)
            x = x + y * y.sigmoid()
        yield x


@st.composite
def texts(draw: st.DrawFn) -> list[Document]:
    """Draws documents with random loss masks, and adds one that always has draft positions."""
    masks = draw(st.lists(st.lists(st.sampled_from([0, 1, 1, 1]), min_size=1, max_size=24), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return [([int(i) for i in rng.integers(0, V, len(mask))], mask) for mask in [*masks, [0, 1, 1, 1, 0, 1, 1]]]


@st.composite
def mixes(draw: st.DrawFn) -> dict[LossPart, float]:
    """Draws one part, or two with weights."""
    choices = [*PARTS_OF_LOGITS, LossPart.features]
    parts = draw(st.lists(st.sampled_from(choices), min_size=1, max_size=2, unique=True))
    return dict(zip(parts, draw(st.sampled_from([(1.0, 0.5), (0.1, 2.0)])), strict=False))


def fast_step(step: Step) -> tuple[torch.Tensor, list[float]]:
    """Computes `plain_step` as the trainer does."""
    weights = DECAY ** torch.arange(step.depths)
    batch = make_batch(step.documents, step.depths, anchors=step.anchors, window=step.head.shared_window)
    scale = weights / weights.sum() / batch.num_drafts.clamp(min=1)
    sums = training_losses(step.head, step.frozen, batch, scale, step.loss, PhaseClock(torch.device("cpu")))
    return sums.loss, sums.losses.tolist()


def drawn_step(
    case: str, documents: list[Document], depths: int, mix: dict[LossPart, float], own: float, rows: int, seed: int
) -> Step:
    """Returns a step of a random head over random states, with `own` as the weight of the part of its own."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    name, head_settings = CASES[case]
    head = build_head(HEADS[name].Config(ttt_steps=depths, **head_settings), tiny_config())
    draw_norms(head, generator)
    if head.d2t is not None:
        ids = torch.randperm(V, generator=generator)[: len(head.d2t)].sort().values
        head.d2t.copy_(ids - torch.arange(len(ids)))
    embed_tokens, lm_head = (torch.randn(V, H, generator=generator) for _ in range(2))
    frozen = FrozenParts(embed_tokens, torch.ones(H), lm_head * 0.2, find_form(LlamaConfig(num_hidden_layers=1)))
    stored, layers = [], len(head.capture_layers)
    for index, (tokens, mask) in enumerate(documents):
        states = torch.randn(len(tokens), 1 + layers, H, generator=generator)
        captured, loss_mask = states[:, 1:] if layers else None, torch.tensor(mask, dtype=torch.uint8)
        stored.append(StoredDocument(index, torch.tensor(tokens), loss_mask, states[:, 0], captured))
    if name == "draft_model":  # its states may have another size than the target's
        mix = {LossPart.kl if part is LossPart.features else part: weight for part, weight in mix.items()}
    if own and head.Config.own_loss_part is not None:
        mix = mix | {LossPart(head.Config.own_loss_part): own}
    return Step(head, depths, stored, frozen, LossSettings(mix, rows), None)


STEPS = {
    "documents": texts(),
    "depths": st.integers(1, 5),
    "mix": mixes(),
    "own": st.sampled_from([0.0, 0.7]),
    "rows": st.sampled_from([1, 5, 1000]),
    "seed": st.integers(0, 99),
}


@pytest.mark.parametrize("case", CASES_OF_ALL_TIERS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(drawn=st.fixed_dictionaries(STEPS), recomputes=st.booleans(), anchors=st.sampled_from([None, 1, 4, 100]))
def test_losses_and_gradients_equal_the_plain_formula(
    case: str, drawn: dict[str, Any], recomputes: bool, anchors: int | None
) -> None:
    step = drawn_step(case, **drawn)
    step.head.activation_checkpointing = recomputes
    if anchors is not None and isinstance(step.head, DflashHead):
        step = replace(step, anchors=Anchors(anchors, (drawn["seed"], 0)))
    (ours, our_sums), (plain, plain_sums) = fast_step(step), plain_step(step)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    assert our_sums == pytest.approx(plain_sums, abs=1e-4, rel=1e-5)
    parameters = list(step.head.parameters())
    our_grads, plain_grads = (torch.autograd.grad(x, parameters, allow_unused=True) for x in (ours, plain))
    for our_grad, plain_grad in zip(our_grads, plain_grads, strict=True):
        if plain_grad is not None:
            assert our_grad is not None
            torch.testing.assert_close(our_grad, plain_grad, atol=1e-5, rtol=1e-5)
