"""Tests that the fast step equals a plain formula with every token at every depth, dense masks and all logits."""

import math
from collections.abc import Iterator
from copy import deepcopy

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
from mtptrain.heads.packing import PackedTokens
from mtptrain.hidden_states.store import StoredDocument
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import make_batch
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings, draft_losses
from mtptrain.utils.clock import PhaseClock
from tests.mtptrain.heads.test_contract import CASES, draw_norms, tiny_config
from tests.mtptrain.training.plain_losses import PARTS_OF_LOGITS, Draft, plain_losses

H, V = 128, 50
DECAY = 0.8

Document = tuple[list[int], list[int]]
"""Token ids and loss mask of a document."""


def read_of_target(head: Head, hidden: torch.Tensor, captured: torch.Tensor | None) -> torch.Tensor:
    """Returns what a head reads, [N, H] or [N, L, H]. `hidden` serves as the state before and after the final norm."""
    if captured is not None:
        return captured
    return hidden[:, None] if head.read_layers else hidden


def plain_step(
    head: Head, depths: int, documents: list[Document], states: list[torch.Tensor], aux: list[torch.Tensor],
    frozen: FrozenParts,
    loss: LossSettings,
) -> tuple[torch.Tensor, list[float]]:  # fmt: skip
    """Returns the weighted mean loss, and the sum of losses at each depth."""
    sums, counts = [torch.zeros(()) for _ in range(depths)], [0] * depths
    for (ids, mask), hidden, captured in zip(documents, states, aux, strict=True):
        n, teacher = len(ids), (hidden @ frozen.lm_head.T).softmax(-1)
        read = read_of_target(head, hidden, captured if head.capture_layers else None)
        plain_states = plain_layer_states if isinstance(head, LayerHead) else plain_mlp_states
        if isinstance(head, DraftModelHead):
            plain_states = plain_model_states
        if isinstance(head, NativeMtpHead):
            plain_states = plain_module_states
        outs = list(plain_states(head, depths, ids, read, frozen))
        for t in range(n):
            counted = [
                depth
                for depth in range(depths)
                if t + 2 + depth < n and all(mask[j] for j in range(t + 1, t + 3 + depth))
            ]
            drafts = [
                Draft(
                    teacher[t + 1 + depth],
                    outs[depth][t] @ head.output_weight(frozen).T,
                    head.draft_token_ids,
                    ids[t + 2 + depth],
                )
                for depth in counted
            ]
            features = [
                F.smooth_l1_loss(outs[depth][t], hidden[t + 1 + depth])
                for depth in counted
                if LossPart.features in loss.mix
            ]
            for depth, draft in enumerate(plain_losses(drafts, features, loss)):
                sums[depth] = sums[depth] + draft
                counts[depth] += 1
    weights_of = [DECAY**depth for depth in range(depths)]
    total = sum(w * s / max(1, c) for w, s, c in zip(weights_of, sums, counts, strict=True)) / sum(weights_of)
    assert isinstance(total, torch.Tensor)
    return total, [float(s) for s in sums]


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
        query, key, value = attention.queries_keys_values(x, positions)
        groups = query.shape[1] // key.shape[1]
        keys.append(key.repeat_interleave(groups, 1))
        values.append(value.repeat_interleave(groups, 1))
        masks = [past] + [torch.eye(n, dtype=torch.bool)] * depth
        scores = torch.cat(
            [
                torch.einsum("qhd,khd->hqk", query, k).masked_fill(~m, -math.inf)
                for k, m in zip(keys, masks, strict=True)
            ],
            -1,
        )
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


def fast_step(
    head: Head, depths: int, documents: list[Document], states: list[torch.Tensor], aux: list[torch.Tensor],
    frozen: FrozenParts,
    loss: LossSettings,
) -> tuple[torch.Tensor, list[float]]:  # fmt: skip
    """Returns what `plain_step` returns, computed as in the trainer."""
    stored = [
        StoredDocument(
            i,
            torch.tensor(ids),
            torch.tensor(mask, dtype=torch.uint8),
            states[i],
            aux[i] if head.capture_layers else None,
        )
        for i, (ids, mask) in enumerate(documents)
    ]
    batch = make_batch(stored, depths)
    read = read_of_target(head, batch.hidden_states, batch.aux_hidden_states)
    weights = DECAY ** torch.arange(depths)
    sums = draft_losses(
        head(PackedTokens(read, batch.input_ids, batch.next_ids, batch.packing), frozen, depths),
        head.output_weight(frozen),
        batch.hidden_states[batch.packing.draft_positions + 1],
        lambda x: x @ frozen.lm_head.T,
        batch.is_draft,
        weights / weights.sum() / batch.num_drafts.clamp(min=1),
        loss,
        head.draft_token_ids,
        batch.next_ids[batch.packing.draft_positions + 1] if LossPart.data_ce in loss.mix else None,
    )
    return sums.loss, sums.losses.tolist()


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


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if not issubclass(HEADS[name], DflashHead)])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    documents=texts(),
    depths=st.integers(1, 5),
    mix=mixes(),
    chunk_rows=st.sampled_from([1, 5, 1000]),
    activation_checkpointing=st.booleans(),
    seed=st.integers(0, 99),
)
def test_losses_and_gradients_equal_the_plain_formula(
    case: str,
    documents: list[Document],
    depths: int,
    mix: dict[LossPart, float],
    chunk_rows: int,
    activation_checkpointing: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    name, head_settings = CASES[case]
    head = build_head(HEADS[name].Config(ttt_steps=depths, **head_settings), tiny_config())
    head.activation_checkpointing = activation_checkpointing
    draw_norms(head, generator)
    if head.d2t is not None:
        ids = torch.randperm(V, generator=generator)[: len(head.d2t)].sort().values
        head.d2t.copy_(ids - torch.arange(len(ids)))
    frozen = FrozenParts(
        embed_tokens=torch.randn(V, H, generator=generator),
        norm_weight=torch.ones(H),
        lm_head=torch.randn(V, H, generator=generator) * 0.2,
        form=find_form(LlamaConfig(num_hidden_layers=1)),
    )
    states = [torch.randn(len(ids), H, generator=generator) for ids, _ in documents]
    aux = [torch.randn(len(ids), max(1, len(head.capture_layers)), H, generator=generator) for ids, _ in documents]
    if name == "draft_model":  # its states may have another size than the target's
        mix = {LossPart.kl if part is LossPart.features else part: weight for part, weight in mix.items()}
    loss = LossSettings(mix, 3.0, chunk_rows)
    parameters = list(head.parameters())
    (ours, our_sums), (plain, plain_sums) = (
        step(head, depths, documents, states, aux, frozen, loss) for step in (fast_step, plain_step)
    )
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    assert our_sums == pytest.approx(plain_sums, abs=1e-4, rel=1e-5)
    our_grads, plain_grads = (torch.autograd.grad(x, parameters, allow_unused=True) for x in (ours, plain))
    for our_grad, plain_grad in zip(our_grads, plain_grads, strict=True):
        if plain_grad is not None:
            assert our_grad is not None
            torch.testing.assert_close(our_grad, plain_grad, atol=1e-5, rtol=1e-5)


def test_training_on_data_takes_the_next_tokens_of_the_documents() -> None:
    """Tests `training_losses`, the trainer's own pass, which takes the next tokens from the batch."""
    torch.manual_seed(0)
    name, head_settings = CASES["draft_model"]
    head = build_head(HEADS[name].Config(**head_settings), tiny_config())
    documents: list[Document] = [(list(range(3, 20)), [0] * 5 + [1] * 12), (list(range(30, 40)), [0, 0, *[1] * 8])]
    states = [torch.randn(len(ids), H) for ids, _ in documents]
    frozen = FrozenParts(
        torch.randn(V, H), torch.ones(H), torch.randn(V, H), find_form(LlamaConfig(num_hidden_layers=1))
    )
    loss = LossSettings({LossPart.data_ce: 1.0})
    stored = [
        StoredDocument(i, torch.tensor(ids), torch.tensor(mask, dtype=torch.uint8), states[i], None)
        for i, (ids, mask) in enumerate(documents)
    ]
    batch = make_batch(stored, 1)
    found = training_losses(head, frozen, batch, torch.ones(1), loss, PhaseClock(torch.device("cpu")))
    _, sums = plain_step(head, 1, documents, states, states, frozen, loss)
    assert found.losses.tolist() == pytest.approx(sums, rel=1e-5)
    assert found.kl.tolist() != pytest.approx(sums, rel=1e-2)
