"""The optimizers of a head: AdamW, or Muon for the matrices of its layers and AdamW for the rest.

Muon moves a matrix by its momentum with all singular values set to about 1 (Keller Jordan et al., Muon: An optimizer
for hidden layers in neural networks, 2024). ZeRO gives an optimizer a flat part of all weights instead of the matrices,
so each rank gathers the momenta, and orthogonalises the matrices of which it holds a part.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mtptrain.config import TrainConfig
from mtptrain.heads.base import Head
from mtptrain.settings.training import OptimizerKind
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError, warn

MOMENTUM = 0.95
UPDATE_RMS = 0.4
"""Root mean square of an update of a matrix, in units of the rate. With it, AdamW's rates are right for Muon too: see
docs/results/learning.md."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic Newton-Schulz iteration that Muon's authors chose: after five of them singular values lie in about
[0.7, 1.2]."""
OVER_VOCABULARY = ("lm_head", "markov_w2")
"""The names of output layers over a vocabulary."""
LEAST_LR, MOST_LR = 1e-5, 1e-2
"""With smaller rates a head hardly moves. Rates from `MOST_LR` on are those of Muon elsewhere, whose update is scaled
otherwise."""
ITERATIONS = 5
EPSILON = 1e-8
"""That of `torch.optim.AdamW`."""


def build_optimizer(head: Head, settings: TrainConfig, ranks: Ranks, dtype: torch.dtype) -> torch.optim.Optimizer:
    """Returns the optimizer of the settings for a head, whose weights ZeRO may divide among the ranks.

    Raises UserError for Muon and a head without matrices.
    """
    betas = settings.betas[0], settings.betas[1]
    if settings.optimizer is OptimizerKind.adamw:
        return torch.optim.AdamW(
            head.parameters(), lr=settings.lr, betas=betas, weight_decay=settings.weight_decay, fused=True
        )
    if not (names := set(matrix_names(head))):
        raise UserError("train.optimizer: must be adamw for a head without matrices, but is muon; set it to adamw")
    parameters = sorted(head.named_parameters(), key=lambda each: each[0] not in names)  # matrices first
    shapes = [parameter.shape for name, parameter in parameters if name in names]
    return MuonAndAdamW([each for _, each in parameters], shapes, settings, ranks, dtype)


def warn_of_rate(settings: TrainConfig) -> None:
    if not LEAST_LR <= settings.lr < MOST_LR:
        warn(
            "train.lr: heads learn at 1e-4 to 5e-3, with Muon too, whose update here has as root mean square "
            f"{UPDATE_RMS} times the rate, but it is {settings.lr:g}; set train.lr=1e-3"
        )


def matrix_names(head: Head) -> list[str]:
    """Returns the names of the weights that Muon trains: those of linear layers between two hidden vectors.

    Embeddings, output layers over a vocabulary, experts that one tensor joins, vectors and norms are left to AdamW.
    """
    return [
        f"{name}.weight"
        for name, module in head.named_modules()
        if isinstance(module, nn.Linear)
        and min(module.weight.shape) > 1
        and name.rpartition(".")[2] not in OVER_VOCABULARY
    ]


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for a head's matrices, which come first among the parameters, and AdamW for the others.

    Both keep their moments under AdamW's names: the momentum of a matrix is `exp_avg`, and its `exp_avg_sq` stays 0.
    There is one group of parameters, because ZeRO makes a step for each group, and gradients are clipped together.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shapes: Sequence[torch.Size],
        settings: TrainConfig,
        ranks: Ranks,
        dtype: torch.dtype,
    ) -> None:
        """Take all parameters, matrices first, and the shapes of these. ZeRO puts one flat part in their place."""
        self._shapes, self._ranks, self._dtype, self._betas = shapes, ranks, dtype, settings.betas
        super().__init__(parameters, {"lr": settings.lr, "weight_decay": settings.weight_decay})
        self._num_parameters = len(parameters)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Update all weights, or with ZeRO this rank's part of them, from their gradients."""
        [group] = self.param_groups
        weights: list[nn.Parameter] = group["params"]
        for weight in weights:
            if not self.state[weight]:
                moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                self.state[weight] = {"step": torch.tensor(0.0, device=weight.device), **moments}
            self.state[weight]["step"] += 1
            weight.mul_(1 - group["lr"] * group["weight_decay"])
        is_whole = [each.shape for each in weights[: len(self._shapes)]] == [*self._shapes]  # not one flat part
        if is_whole and len(weights) == self._num_parameters:
            for weight in weights[: len(self._shapes)]:
                weight.sub_(group["lr"] * self._update(self._nesterov(weight, weight.numel()).view(weight.shape)))
            for weight in weights[len(self._shapes) :]:
                self._adamw(weight, 0, group["lr"])
        else:
            [part] = weights
            num_in_matrices = sum(shape.numel() for shape in self._shapes) - self._ranks.rank * len(part)
            split = min(max(num_in_matrices, 0), len(part))
            for place, update in self._updates(self._nesterov(part, split)):
                part[place].sub_(group["lr"] * update)
            self._adamw(part, split, group["lr"])

    def _nesterov(self, weight: torch.Tensor, split: int) -> torch.Tensor:
        """Returns the momentum after the next step, flat, of the first `split` values of a weight, and 0 for others."""
        assert weight.grad is not None
        momentum, gradient = (each.view(-1)[:split] for each in (self.state[weight]["exp_avg"], weight.grad))
        momentum.mul_(MOMENTUM).add_(gradient)
        nesterov = torch.zeros_like(weight).view(-1)
        nesterov[:split] = gradient + MOMENTUM * momentum
        return nesterov

    def _updates(self, nesterov: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields places in this rank's part of all momenta, flat, and the updates there, matrix by matrix."""
        size, begin = len(nesterov), 0
        whole, first = self._gathered(nesterov), self._ranks.rank * size
        for shape in self._shapes:
            end = begin + shape.numel()
            low, high = max(begin, first), min(end, first + size)
            if low < high:
                update = self._update(whole[begin:end].view(shape)).flatten()
                yield slice(low - first, high - first), update[low - begin : high - begin]
            begin = end

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the parts of all ranks, one after the other."""
        if self._ranks.world_size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self._ranks.world_size)]
        dist.all_gather(parts, part)
        return torch.cat(parts)

    def _update(self, nesterov: torch.Tensor) -> torch.Tensor:
        """Returns the update f32[rows, columns] of a matrix, whose root mean square is about `UPDATE_RMS`."""
        return orthogonalised(nesterov.to(self._dtype)).float() * UPDATE_RMS * max(nesterov.shape) ** 0.5

    def _adamw(self, weight: torch.Tensor, split: int, lr: float) -> None:
        """Update the values of a weight from `split` on as `torch.optim.AdamW` does."""
        assert weight.grad is not None
        state = self.state[weight]
        values, gradient, first, second = (
            each.view(-1)[split:] for each in (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"])
        )
        first.lerp_(gradient, 1 - self._betas[0])
        second.mul_(self._betas[1]).addcmul_(gradient, gradient, value=1 - self._betas[1])
        means = [
            moment / (1 - beta ** state["step"]) for moment, beta in zip((first, second), self._betas, strict=True)
        ]
        values.addcdiv_(means[0], means[1].sqrt_().add_(EPSILON), value=-lr)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Returns about U V^T for a matrix U S V^T, by Newton-Schulz iterations in the matrix's dtype."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
