"""Tests that attention refuses what it would silently ignore."""

from collections.abc import Callable

import pytest
import torch

from mtptrain.heads.attention.depths import DepthKeys
from mtptrain.heads.packing import Packing
from mtptrain.hidden_states.extraction.transformers_streams import PackedDocuments, packed_attention
from mtptrain.target.causal_attention import FULL, SeenSlots, causal_or_masked_attention

SEEN = SeenSlots((None,), None, torch.arange(3)[None])
DEPTHS = DepthKeys(Packing.of_spans([3], [(0, 0, 3)]), torch.arange(3), FULL, [])
CASES: list[tuple[Callable[..., object], dict[str, object]]] = [
    (causal_or_masked_attention, {"seen_slots": SEEN}),
    (packed_attention, {"packed_documents": PackedDocuments.of([3], torch.device("cpu"))}),
    (causal_or_masked_attention, {"attend": DEPTHS.attend}),
]


def test_every_attention_function_refuses_a_keyword_that_it_does_not_know() -> None:
    x, module = torch.randn(1, 2, 3, 16), torch.nn.Identity()
    module.layer_idx = 0
    known = {"dropout": 0.0, "position_ids": torch.arange(3)[None], "use_cache": False, "s_aux": None}
    for attention, documents in CASES:
        given = {"attention_mask": None, "scaling": 0.25, **documents, **known}
        assert attention(module, x, x, x, **given) is not None
        for name in ("position_bias", "attention_mask"):
            with pytest.raises(ValueError, match=f"Identity passes {name}"):
                attention(module, x, x, x, **{**given, name: torch.zeros(3, 3)})
