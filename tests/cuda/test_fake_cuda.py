"""Tests the fake CUDA devices, and what the meter counts on them."""

import pytest
import torch

from tests.cuda.fake_cuda import Meter, fake_cuda


def test_a_backward_pass_runs_over_two_devices() -> None:
    with fake_cuda():
        near = torch.empty(4, 8, device="cuda:0", requires_grad=True)
        far = torch.empty(8, 2, device="cuda:1", requires_grad=True)
        (near.to("cuda:1") @ far).sum().backward()
    assert near.grad is not None and str(near.grad.device) == "cuda:0"
    assert far.grad is not None and str(far.grad.device) == "cuda:1"


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        (lambda x: x[0].item(), "_local_scalar_dense"),
        (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
        (lambda x: x.cpu(), "_to_copy"),
        (lambda x: x.to("cpu", torch.float64), "_to_copy"),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="cpu").to("cuda"), "_to_copy"),
        (lambda x: torch.zeros(3, device="cpu").copy_(x), "copy_"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
    ],
)
def test_every_wait_of_the_host_is_counted(call: object, operator: str) -> None:
    with fake_cuda() as mode, Meter() as meter:
        x = torch.empty(3, device="cuda")
        assert not meter.syncs
        mode.allow_scalar_outputs = True
        try:
            call(x)  # type: ignore[operator]
        except Exception as error:  # some operators raise, because a fake tensor has no value to read
            assert "Data" in type(error).__name__ or "DynamicOutputShape" in type(error).__name__, error
    assert any(name.startswith(f"{operator} at ") for name in meter.syncs), meter.syncs


def test_what_does_not_wait_is_not_counted() -> None:
    with fake_cuda(), Meter() as meter:
        x = torch.empty(3, 3, device="cuda")
        x.to("cpu", non_blocking=True)
        torch.zeros(3).to("cuda", non_blocking=True)
        torch.where(x > 0, x, 0.0).argmax(-1)
        x[torch.empty(2, dtype=torch.long, device="cuda")] += 1
    assert not meter.syncs


def test_flops_are_those_of_the_formula() -> None:
    with fake_cuda(), Meter() as meter:
        x = torch.empty(16, 32, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(64, 32, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            torch.nn.functional.linear(x, weight)
    assert meter.matmul_flops == 2 * 16 * 32 * 64


def test_memory_is_counted_by_device_while_it_is_alive() -> None:
    megabyte = 2**20
    with fake_cuda(), Meter() as meter:
        kept = torch.empty(3, megabyte, dtype=torch.uint8, device="cuda:0")
        for _ in range(4):
            torch.empty(5, megabyte, dtype=torch.uint8, device="cuda:0")
        torch.empty(7, megabyte, dtype=torch.uint8, device="cuda:1")
    assert kept.is_cuda
    assert meter.peak_bytes["cuda:0"] == 8 * megabyte
    assert meter.peak_bytes["cuda:1"] == 7 * megabyte
