"""Tests attention of blocks and single draft positions against plain masks, and what a DFlash head refuses."""

import itertools
import math

import pytest
import torch

from mtptrain.heads.attention.draft_blocks import block_attention, block_view
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.utils.errors import UserError
from tests.mtptrain.heads.dense import PACKINGS, seen_tokens
from tests.mtptrain.heads.test_contract import tiny_config


def dense_block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    packing: Packing,
    is_causal: bool = False,
    window: float = math.inf,
) -> torch.Tensor:
    """Computes `block_attention` with one mask over all pairs of tokens of blocks and tokens."""
    groups, block_size = query.shape[2] // key.shape[1], len(block_key)
    key, value = (x[packing.key_indices].repeat_interleave(groups, 1) for x in (key, value))
    block_key, block_value = (x.repeat_interleave(groups, 2) for x in (block_key, block_value))
    in_block = torch.arange(block_size)[-len(query) :, None]
    positions = packing.positions[packing.draft_positions] + 1 + in_block  # [R, M]
    is_seen = seen_tokens(packing) & (positions[..., None] - packing.positions < window)  # [R, M, N]
    scores = torch.einsum("rmhd,nhd->hrmn", query, key).masked_fill(~is_seen, -math.inf)
    inside = torch.einsum("rmhd,bmhd->hrmb", query, block_key)
    if is_causal:
        inside = inside.masked_fill((torch.arange(block_size) > in_block)[:, None], -math.inf)
    weights = (torch.cat([scores, inside], -1) * query.shape[-1] ** -0.5).softmax(-1)
    out = torch.einsum("hrmn,nhd->rmhd", weights[..., : len(key)], value)
    return out + torch.einsum("hrmb,bmhd->rmhd", weights[..., len(key) :], block_value)


def assert_blocks_are_dense(case: str, window: int | None) -> None:
    """Compares attention of random blocks of four tokens, and all its gradients, with that over one dense mask."""
    for unread, is_causal in itertools.product((0, 1), (False, True)):
        generator, block_size = torch.Generator().manual_seed(0), 4
        packing = PACKINGS[case](None if window is None else window - block_size)
        view = block_view(packing, block_size, is_causal, window)
        num_tokens, num_drafts = len(packing.positions), len(packing.draft_positions)
        query, keys, own_keys = (block_size - unread, num_drafts, 4), (num_tokens, 2), (block_size, num_drafts, 2)
        shapes = [(*shape, 16) for shape in (query, keys, keys, own_keys, own_keys)]
        inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
        weights = torch.randn(shapes[0], generator=generator)
        ours = block_attention(*inputs, view)
        dense = dense_block_attention(*inputs, packing, is_causal, window or math.inf)
        torch.testing.assert_close(ours, dense, atol=2e-6, rtol=1e-5)
        grads = [torch.autograd.grad((out * weights).sum(), inputs) for out in (ours, dense)]
        torch.testing.assert_close(*grads, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("case", PACKINGS)
def test_attention_of_blocks_equals_one_softmax_over_a_mask(case: str) -> None:
    for window in (None, 5, 6, 9, 100):
        assert_blocks_are_dense(case, window)


def test_the_default_layers_are_those_of_published_heads() -> None:
    for layers, expected in ((36, (2, 10, 18, 26, 34)), (32, (2, 9, 16, 23, 30)), (80, (2, 21, 40, 59, 78))):
        config = tiny_config(num_hidden_layers=layers)
        assert DflashHead.resolve_capture_layers(DflashHead.Config(), config) == expected


REFUSED: list[tuple[dict[str, object], str]] = [
    ({}, r"capture_layers: must be different layers .* within 0\.\.2, .*; set them"),
    ({"capture_layers": [1, 3]}, r"capture_layers: must be .* within 0\.\.2, .* but are \[1, 3\]; set them"),
    ({"capture_layers": [1], "mask_token_id": 50}, r"mask_token_id: must be within 0\.\.49, .* but is 50; set the id"),
]


def test_settings_that_do_not_fit_the_target_are_refused() -> None:
    for settings, message in REFUSED:
        with pytest.raises(UserError, match=rf"^head\.{message}"):
            build_head(DflashHead.Config(**settings), tiny_config())
