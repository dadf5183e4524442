"""Tests that attention refuses what it would silently ignore, such as sinks and soft caps."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mtptrain.heads.attention.documents import documents_or_cache_attention
from mtptrain.heads.packing import Packing
from mtptrain.hidden_states.extraction.transformers_streams import PackedDocuments, packed_attention
from mtptrain.target.causal_attention import CAUSAL_OR_MASKED, causal_or_masked_attention

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "settings", "passed"),
    [
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "GptOssAttention passes s_aux"),
        ("gemma2", {}, "Gemma2Attention passes softcap"),
    ],
)
def test_a_family_with_sinks_or_a_soft_cap_is_refused(model_type: str, settings: dict[str, int], passed: str) -> None:
    config = AutoConfig.for_model(model_type, **SIZES, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=CAUSAL_OR_MASKED)
    with pytest.raises(ValueError, match=rf"target\.path: attention must need no more .*, but {passed}; choose"):
        model(torch.ones(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("attention", "documents"),
    [
        (causal_or_masked_attention, {}),
        (packed_attention, {"packed_documents": PackedDocuments.of([3], torch.device("cpu"))}),
        (documents_or_cache_attention, {}),
        (documents_or_cache_attention, {"documents": Packing.of_spans([3], [(0, 0, 3)])}),
    ],
)
def test_every_attention_function_refuses_a_keyword_that_it_does_not_know(
    attention: Callable[..., object], documents: dict[str, object]
) -> None:
    x = torch.randn(1, 2, 3, 16)
    known = {"dropout": 0.0, "position_ids": torch.arange(3)[None], "use_cache": False, "s_aux": None}
    given = {"attention_mask": None, "scaling": 0.25, **documents, **known}
    assert attention(torch.nn.Identity(), x, x, x, **given) is not None
    with pytest.raises(ValueError, match="Identity passes position_bias"):
        attention(torch.nn.Identity(), x, x, x, **given, position_bias=torch.zeros(3, 3))
