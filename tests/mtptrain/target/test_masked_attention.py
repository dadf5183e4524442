import pytest
import torch

from mtptrain.target.causal_attention import masked_attention


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 6), (6, 2), (4, 1)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_query_heads_share_the_keys_of_their_group(num_heads: int, num_kv_heads: int, scaling: float | None) -> None:
    query = torch.randn(2, num_heads, 3, 8)
    key, value = torch.randn(2, num_kv_heads, 9, 8), torch.randn(2, num_kv_heads, 9, 5)
    mask = torch.rand(2, 1, 3, 9) < 0.5
    mask[..., 0] = True  # each row sees a slot
    groups = num_heads // num_kv_heads
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * (scaling or 8**-0.5)
    probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = probs @ value.repeat_interleave(groups, 1)
    torch.testing.assert_close(masked_attention(query, key, value, mask, scaling), expected)
