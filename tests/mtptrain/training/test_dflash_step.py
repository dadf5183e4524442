"""The step of head `dflash` against its plain formula, with all draft positions and with some of them drawn."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from mtptrain.config import LossPart
from mtptrain.heads import HEADS
from mtptrain.heads.dflash import DflashHead, DflashLayer
from mtptrain.heads.dflash2 import Convolutions, Dflash2Head, Dflash2Layer
from mtptrain.heads.dspark import DsparkHead
from mtptrain.heads.files import build_head
from mtptrain.hidden_states.store import StoredDocument
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import make_batch
from mtptrain.training.forward import training_losses
from mtptrain.training.losses import LossSettings
from mtptrain.training.step_packing import Anchors
from mtptrain.utils.clock import PhaseClock
from tests.mtptrain.heads.test_contract import CASES, draw_norms, tiny_config
from tests.mtptrain.training.plain_losses import Draft, plain_losses
from tests.mtptrain.training.test_exact_step import DECAY, Document, H, V, mixes, texts


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float = 10_000.0) -> torch.Tensor:
    """RoPE of x [S, heads, d] by its definition: the pairs (i, i + d / 2) turn by position * theta^(-2i/d)."""
    half = x.shape[-1] // 2
    turns = torch.polar(torch.ones(()), positions[:, None] * theta ** (-torch.arange(half) / half))[:, None]
    pairs = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([pairs.real, pairs.imag], -1)


def plain_convolution(conv: Convolutions, x: torch.Tensor, normed: torch.Tensor, side: int) -> torch.Tensor:
    """The convolution of a block [R, H] by its definition, one token after another."""
    base = conv.base_kernel[side]  # [taps, H]
    changes = (normed @ conv.kernel_projection.weight.T).view(len(x), 2, len(base), -1)[:, side]  # [R, taps, groups]
    group_of = torch.arange(x.shape[1]) // (x.shape[1] // changes.shape[2])
    rows = []
    for row in range(len(x)):
        taps = range(min(len(base), row + 1))
        rows.append(sum(((base[tap] + changes[row, tap, group_of]) * x[row - tap] for tap in taps), torch.zeros(())))
    return torch.stack(rows)


def plain_layer(layer: DflashLayer, x: torch.Tensor, context: torch.Tensor, first_position: int) -> torch.Tensor:
    """One layer over a block [R, H], whose first token is at `first_position`, and all tokens before it [S, H]."""
    attention, heads = layer.self_attn, (-1, layer.self_attn.head_dim)
    positions = torch.arange(first_position, first_position + len(x))
    before = normed = layer.input_layernorm(x)
    if isinstance(layer, Dflash2Layer):
        normed = plain_convolution(layer.attention_conv, before, before, 0)
    read, everywhere = torch.cat([context, normed]), torch.arange(first_position + len(x))
    query = rotated(attention.q_norm(attention.q_proj(normed).unflatten(-1, heads)), positions)
    key = rotated(attention.k_norm(attention.k_proj(read).unflatten(-1, heads)), everywhere)
    value = attention.v_proj(read).unflatten(-1, heads)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    window, is_causal = layer.kind
    for row, position in enumerate(positions.tolist()):
        for other in range(key.shape[0]):
            is_later = is_causal and other > position
            if is_later or (window is not None and position - other >= window):
                scores[:, row, other] = -torch.inf
    weights = scores.softmax(-1)
    attended = attention.o_proj(torch.einsum("hqk,khd->qhd", weights, value).flatten(-2))
    if not isinstance(layer, Dflash2Layer):
        x = x + attended
        return x + layer.mlp(layer.post_attention_layernorm(x))
    x = x + plain_convolution(layer.attention_conv, attended, before, 1)
    normed = layer.post_attention_layernorm(x)
    out = layer.mlp(plain_convolution(layer.mlp_conv, normed, normed, 0))
    return x + plain_convolution(layer.mlp_conv, out, normed, 1)


def plain_states(
    head: DflashHead, depths: int, ids: list[int], captured: torch.Tensor, start: int, frozen: FrozenParts
) -> torch.Tensor:
    """The states of all depths [T, H] at one draft position."""
    context = head.hidden_norm(head.fc(captured[: start + 1].flatten(1)))
    num_masks = depths - (head.num_masks < head.ttt_steps)  # the newest token drafts too
    x = frozen.embed(torch.tensor([ids[start + 1], *[head.mask_token_id] * num_masks]))
    for layer in head.layers:
        x = plain_layer(layer, x, context, start + 1)
    return head.norm(x)[-depths:]


def plain_logits(head: DflashHead, state: torch.Tensor, previous: int, frozen: FrozenParts) -> torch.Tensor:
    logits = state @ head.output_weight(frozen).T
    if isinstance(head, DsparkHead):
        markov = head.markov_head
        logits = logits + markov.markov_w2.weight @ markov.markov_w1.weight[previous]
    return logits


def plain_selected(
    head: DflashHead, state: torch.Tensor, previous: int, frozen: FrozenParts
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The candidates and their scores."""
    if not isinstance(head, Dflash2Head):
        return None
    logits, selector = state @ frozen.lm_head.T, head.candidate_selector
    candidates = logits.argsort(descending=True)[: head.num_candidates]
    projected = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ state)
    return candidates, logits[candidates] + selector.successor_codebook[candidates] @ projected


def plain_confidence(head: DflashHead, state: torch.Tensor, previous: int) -> torch.Tensor | None:
    if not isinstance(head, DsparkHead):
        return None
    proj, embedded = head.confidence_head.proj, head.markov_head.markov_w1.weight[previous]
    return proj.weight[0] @ torch.cat([state, embedded]) + proj.bias[0]


def plain_step(
    head: DflashHead,
    depths: int,
    documents: list[StoredDocument],
    frozen: FrozenParts,
    loss: LossSettings,
    anchors: Anchors | None,
) -> tuple[torch.Tensor, list[float]]:
    """The weighted mean loss, and the sum of losses at each depth."""
    sums, counts = [torch.zeros(()) for _ in range(depths)], [0] * depths
    for document in documents:
        ids, mask, n = document.input_ids.tolist(), document.loss_mask.tolist(), len(document.input_ids)
        hidden = frozen.final_norm(document.hidden_states)
        teacher = (hidden @ frozen.lm_head.T).softmax(-1)
        drafting = [t for t in range(n - 2) if mask[t + 1] and mask[t + 2]]
        if anchors is not None and drafting:
            drafting = [drafting[i] for i in anchors.draw(document.document_id, len(drafting))]
        for t in drafting:
            out = plain_states(head, depths, ids, document.aux_hidden_states, t, frozen)
            counted = [depth for depth in range(depths) if t + 2 + depth < n and all(mask[t + 1 : t + 3 + depth])]
            drafts = [
                Draft(
                    teacher[t + 1 + depth],
                    plain_logits(head, out[depth], ids[t + 1 + depth], frozen),
                    head.draft_token_ids,
                    ids[t + 2 + depth],
                    plain_confidence(head, out[depth], ids[t + 1 + depth]),
                    plain_selected(head, out[depth], ids[t + 1 + depth], frozen),
                )
                for depth in counted
            ]
            features = [F.smooth_l1_loss(out[depth], hidden[t + 1 + depth]) for depth in counted]
            for depth, draft in enumerate(plain_losses(drafts, features, loss)):
                sums[depth] = sums[depth] + draft
                counts[depth] += 1
    weights_of = [DECAY**depth for depth in range(depths)]
    total = sum(w * s / max(1, c) for w, s, c in zip(weights_of, sums, counts, strict=True)) / sum(weights_of)
    return total, [float(s) for s in sums]


def fast_step(
    head: DflashHead,
    depths: int,
    documents: list[StoredDocument],
    frozen: FrozenParts,
    loss: LossSettings,
    anchors: Anchors | None,
) -> tuple[torch.Tensor, list[float]]:
    """Computes `plain_step` as the trainer does."""
    batch, weights = make_batch(documents, depths, anchors=anchors), DECAY ** torch.arange(depths)
    scale = weights / weights.sum() / batch.num_drafts.clamp(min=1)
    sums = training_losses(head, frozen, batch, scale, loss, PhaseClock(torch.device("cpu")))
    return sums.loss, sums.losses.tolist()


@pytest.mark.parametrize("case", [case for case, (name, _) in CASES.items() if issubclass(HEADS[name], DflashHead)])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    documents=texts(),
    depths=st.integers(1, 5),
    mix=mixes(),
    own_weight=st.sampled_from([0.0, 0.7]),
    chunk_rows=st.sampled_from([1, 5, 1000]),
    activation_checkpointing=st.booleans(),
    anchors=st.sampled_from([None, 1, 4, 100]),
    seed=st.integers(0, 99),
)
def test_losses_and_gradients_equal_the_plain_formula(
    case: str,
    documents: list[Document],
    depths: int,
    mix: dict[LossPart, float],
    own_weight: float,
    chunk_rows: int,
    activation_checkpointing: bool,
    anchors: int | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    name, head_settings = CASES[case]
    head = build_head(HEADS[name].Config(ttt_steps=depths, **head_settings), tiny_config())
    assert isinstance(head, DflashHead)
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
    stored = [
        StoredDocument(
            index,
            torch.tensor(ids),
            torch.tensor(mask, dtype=torch.uint8),
            torch.randn(len(ids), H, generator=generator),
            torch.randn(len(ids), len(head.capture_layers), H, generator=generator),
        )
        for index, (ids, mask) in enumerate(documents)
    ]
    if own_weight and head.own_loss_part is not None:
        mix = mix | {LossPart(head.own_loss_part): own_weight}
    loss, drawn = LossSettings(mix, 3.0, chunk_rows), None
    if anchors is not None:
        drawn = Anchors(anchors, (seed, 0))
    (ours, our_sums), (plain, plain_sums) = (
        step(head, depths, stored, frozen, loss, drawn) for step in (fast_step, plain_step)
    )
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    assert our_sums == pytest.approx(plain_sums, abs=1e-4, rel=1e-5)
    parameters = list(head.parameters())
    our_grads, plain_grads = (torch.autograd.grad(x, parameters, allow_unused=True) for x in (ours, plain))
    for our_grad, plain_grad in zip(our_grads, plain_grads, strict=True):
        if plain_grad is not None:
            assert our_grad is not None
            torch.testing.assert_close(our_grad, plain_grad, atol=1e-5, rtol=1e-5)


def test_every_draft_position_is_drawn_equally_often_and_each_epoch_draws_others() -> None:
    draws = [Anchors(3, (0, epoch)).draw(7, 10).tolist() for epoch in range(2000)]
    assert all(drawn == sorted(set(drawn)) and len(drawn) == 3 for drawn in draws)
    assert len({tuple(drawn) for drawn in draws}) > 100
    times = torch.tensor(draws).flatten().bincount(minlength=10)
    assert (times - 600).abs().max() < 100, "600 each on average, with a standard deviation of 20"
    assert Anchors(3, (0, 5)).draw(7, 10).tolist() == draws[5]
    others = {
        "documents": [Anchors(3, (0, 5)).draw(document, 10).tolist() for document in range(20)],
        "seeds": [Anchors(3, (seed, 5)).draw(7, 10).tolist() for seed in range(20)],
    }
    assert all(len({tuple(drawn) for drawn in drawn_by}) > 10 for drawn_by in others.values())
