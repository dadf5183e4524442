"""Multiplies a few rows, as a round of drafts has, by the target's frozen weights on a CPU.

A decoding step is as fast as the weights can be read. torch's fp32 product for more than one row first copies the
weights into another layout, so that reading two tokens takes twice as long as reading one, and no draft can pay.
oneDNN multiplies by weights that were put into its layout once. The copy takes as much memory as the weights.
"""

import torch
import torch.nn.functional as F
from torch import nn

MOST_ROWS = 32
"""With more rows, torch's product costs about the same, because the copy is small beside the product."""


class FrozenLinear:
    """A linear layer whose weights never change, with a copy of them in oneDNN's layout for a few rows.

    One row and many rows take torch's own product, as do other dtypes and devices: they have no such cost.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        # Fake tensors, and others that only stand for values, are subclasses.
        is_plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.device.type == "cpu"
        self._can_pack = is_plain and weight.dtype is torch.float32 and torch.backends.mkldnn.is_available()
        self._packed: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the outputs [..., D] of rows [..., H]."""
        num_rows = rows.numel() // rows.shape[-1]
        is_fake = type(rows) is not torch.Tensor
        if not 1 < num_rows <= MOST_ROWS or not self._can_pack or is_fake or torch.is_grad_enabled():
            return F.linear(rows, self.weight, self.bias)
        # These functions are private. The public `torch.utils.mkldnn` reorders the weights anew in each product.
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), MOST_ROWS)
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")


def use_few_rows(model: nn.Module) -> None:
    """Make all linear layers of a frozen model use `FrozenLinear`, except those whose forward is not torch's own.

    transformers replaces the forward of a quantised layer, for example to quantise its inputs.
    """
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = FrozenLinear(module.weight, module.bias)  # type: ignore[method-assign, assignment]
