"""Tests that attention refuses what it would silently ignore."""

from collections.abc import Callable

import pytest
import torch

from mtptrain.heads.attention.depths import DepthKeys, trained_or_cached_attention
from mtptrain.heads.packing import Packing
from mtptrain.hidden_states.extraction.transformers_streams import PackedDocuments, packed_attention
from mtptrain.target.causal_attention import FULL, SeenSlots, causal_or_masked_attention

PACKING = Packing.of_spans([3], [(0, 0, 3)])
SEEN = SeenSlots((None,), None, torch.arange(3)[None])


def test_every_attention_function_refuses_a_keyword_that_it_does_not_know() -> None:
    packed = PackedDocuments.of([3], torch.device("cpu"))
    refuses(causal_or_masked_attention, seen_slots=SEEN)
    refuses(packed_attention, packed_documents=packed)
    refuses(trained_or_cached_attention, seen_slots=SEEN)
    refuses(trained_or_cached_attention, attend=DepthKeys(PACKING, torch.arange(3), FULL, []).attend)


def refuses(attention: Callable[..., object], **documents: object) -> None:
    x = torch.randn(1, 2, 3, 16)
    known = {"dropout": 0.0, "position_ids": torch.arange(3)[None], "use_cache": False, "s_aux": None}
    given = {"attention_mask": None, "scaling": 0.25, **documents, **known}
    module = torch.nn.Identity()
    module.layer_idx = 0
    assert attention(module, x, x, x, **given) is not None
    with pytest.raises(ValueError, match="Identity passes position_bias"):
        attention(module, x, x, x, **given, position_bias=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="Identity passes attention_mask"):
        attention(module, x, x, x, **{**given, "attention_mask": torch.zeros(3, 3)})
