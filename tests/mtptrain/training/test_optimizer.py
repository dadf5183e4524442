"""Tests the learning rate, Muon by its definition, and which of a head's weights it trains."""

import math
from itertools import product

import pytest
import torch

from mtptrain.config import TrainConfig
from mtptrain.heads.files import build_head
from mtptrain.settings.heads import HEAD_CONFIGS
from mtptrain.settings.training import OptimizerKind
from mtptrain.training.optimizer import (
    MOMENTUM,
    UPDATE_RMS,
    MuonAndAdamW,
    build_optimizer,
    matrix_names,
    orthogonalised,
    warn_of_rate,
)
from mtptrain.training.trainer import is_compiled, rate_share, warmup_of
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from tests.conftest import make_config
from tests.mtptrain.heads.test_contract import tiny_config

ALONE = Ranks(0, 1, 0)


def test_an_update_has_the_directions_of_the_momentum_and_singular_values_of_about_one() -> None:
    for shape in ((48, 48), (96, 32), (32, 96)):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        rotated = left.mT @ orthogonalised(matrix) @ right.mT
        values = rotated.diagonal()
        assert (rotated - torch.diag(values)).abs().max() < 1e-4
        assert values.min() > 0.6 and values.max() < 1.25
        rms = (orthogonalised(matrix) * max(shape) ** 0.5).square().mean().sqrt()
        assert 0.7 < rms < 1.2


def test_a_step_moves_matrices_by_their_momentum_and_the_rest_as_adamw_does() -> None:
    torch.manual_seed(0)
    settings = TrainConfig(optimizer=OptimizerKind.muon, lr=0.01, weight_decay=0.1)
    head, other = (build_head(HEAD_CONFIGS["mtp"](), tiny_config()) for _ in range(2))
    other.load_state_dict(head.state_dict())
    names = matrix_names(head)
    before = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    optimizer = build_optimizer(head, settings, ALONE, torch.float32)
    rest = [weight for name, weight in other.named_parameters() if name not in names]
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=settings.betas, weight_decay=0.1, fused=True)
    momenta = dict.fromkeys(names, torch.zeros(()))
    for _ in range(3):
        for (name, weight), copy in zip(head.named_parameters(), other.parameters(), strict=True):
            weight.grad = torch.randn_like(weight)
            copy.grad = weight.grad.clone()
            if name in names:
                momenta[name] = MOMENTUM * momenta[name] + weight.grad
                update = orthogonalised(weight.grad + MOMENTUM * momenta[name]) * max(weight.shape) ** 0.5
                before[name] = before[name] * (1 - 0.01 * 0.1) - 0.01 * UPDATE_RMS * update
        optimizer.step()
        adamw.step()
    for (name, weight), copy in zip(head.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(weight, before[name] if name in names else copy[1], rtol=1e-6, atol=1e-6)


def test_the_flat_part_of_a_head_of_one_matrix_is_updated_as_the_matrix() -> None:
    updated = []
    for shape in ((6, 4), (24,)):
        weight = torch.nn.Parameter(torch.ones(shape))
        weight.grad = torch.arange(24.0).view(shape)
        MuonAndAdamW([weight], [torch.Size((6, 4))], TrainConfig(lr=0.1), ALONE, torch.float32).step()
        updated.append(weight.detach().flatten())
    torch.testing.assert_close(*updated)


def test_matrices_are_those_of_layers_and_no_head_lacks_them() -> None:
    others = ("lm_head", "embed", "mask_hidden", "markov", "confidence", "codebook")
    for (name, kind), size in product(HEAD_CONFIGS.items(), (40, tiny_config().intermediate_size)):
        settings = {"capture_layers": [1]} if hasattr(kind, "capture_layers") else {}
        settings |= {"draft_vocab_size": size} if hasattr(kind, "draft_vocab_size") and name != "dflash2" else {}
        head = build_head(kind(**settings), tiny_config())
        names, matrices = matrix_names(head), [each for each, x in head.named_parameters() if x.ndim == 2]
        assert names and set(names) <= set(matrices)
        assert all((each not in names) == any(part in each for part in others) for each in matrices), name


def test_muon_is_refused_for_a_head_without_matrices() -> None:
    head = build_head(HEAD_CONFIGS["mtp"](), tiny_config())
    for name in matrix_names(head):
        layer, _, linear = name.removesuffix(".weight").rpartition(".")
        delattr(head.get_submodule(layer), linear)
    with pytest.raises(UserError, match=r"train\.optimizer: must be adamw for a head without matrices, but is muon"):
        build_optimizer(head, TrainConfig(optimizer=OptimizerKind.muon), ALONE, torch.float32)


def test_the_learning_rate_warms_up_and_follows_half_a_cosine_and_steps_are_compiled_on_gpus() -> None:
    settings = TrainConfig(warmup_steps=4, warmup_share=1.0, min_lr_ratio=0.1)
    assert [rate_share(settings, step, 12) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [rate_share(settings, step, 12) for step in (8, 12, 99)] == pytest.approx([0.55, 0.1, 0.1])
    assert not math.isnan(rate_share(settings, 0, 0))
    # The recipes' own runs take all of their warm-up; shorter ones a tenth of the steps, or ten, but at most half.
    runs = {(50, 687): 50, (100, 1146): 100, (100, 200): 20, (100, 50): 10, (5, 20): 5, (50, 1): 0}
    for (most, num_steps), steps in runs.items():
        assert warmup_of(TrainConfig(warmup_steps=most), num_steps) == steps
    assert warmup_of(TrainConfig(warmup_share=1.0), 17) == 17
    for setting, compiled in (("null", [False, True]), ("true", [True, True]), ("false", [False, False])):
        of_config = make_config(f"train.compile={setting}").train.compile
        for device, is_expected in zip(("cpu", "cuda"), compiled, strict=True):
            assert is_compiled(of_config, torch.device(device), num_steps=99) == is_expected
    assert is_compiled(None, torch.device("cpu"), num_steps=100)


def test_a_rate_too_small_or_of_another_projects_muon_is_named(recwarn: pytest.WarningsRecorder) -> None:
    for usual in (2e-5, 3e-3):
        warn_of_rate(TrainConfig(optimizer=OptimizerKind.muon, lr=usual))
    assert not recwarn.list
    for lr in (0.0, 1e-6, 0.02):
        with pytest.warns(UserWarning, match="train.lr: heads learn at"):
            warn_of_rate(TrainConfig(lr=lr))
