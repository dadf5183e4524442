"""Tests the fake CUDA devices, and the times that the host waits for them."""

from collections.abc import Callable

import torch

from tests.cuda.fake_cuda import Meter, fake_cuda


def test_a_backward_pass_runs_over_two_devices() -> None:
    with fake_cuda():
        near = torch.empty(4, 8, device="cuda:0", requires_grad=True)
        far = torch.empty(8, 2, device="cuda:1", requires_grad=True)
        (near.to("cuda:1") @ far).sum().backward()
    assert near.grad is not None and str(near.grad.device) == "cuda:0"
    assert far.grad is not None and str(far.grad.device) == "cuda:1"


WAITS: list[tuple[Callable[[torch.Tensor], object], str]] = [
    (lambda x: x[0].item(), "_local_scalar_dense"),
    (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
    (lambda x: x.cpu(), "_to_copy"),
    (lambda x: x.to("cpu", torch.float64), "_to_copy"),
    (lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="cpu").to("cuda"), "_to_copy"),
    (lambda x: torch.zeros(3, device="cpu").copy_(x), "copy_"),
    (lambda x: x.nonzero(), "nonzero"),
    (lambda x: x[x > 0], "index"),
]


def test_every_wait_of_the_host_is_counted_and_nothing_else() -> None:
    for call, operator in WAITS:
        with fake_cuda() as mode, Meter() as meter:
            x = torch.empty(3, device="cuda")
            assert not meter.syncs
            mode.allow_scalar_outputs = True
            try:
                call(x)
            except Exception as error:  # some operators raise, because a fake tensor has no value to read
                assert "Data" in type(error).__name__ or "DynamicOutputShape" in type(error).__name__, error
        assert any(name.startswith(f"{operator} at ") for name in meter.syncs), meter.syncs
    with fake_cuda(), Meter() as meter:
        x = torch.empty(3, 3, device="cuda")
        x.to("cpu", non_blocking=True)
        torch.zeros(3).to("cuda", non_blocking=True)
        torch.where(x > 0, x, 0.0).argmax(-1)
        x[torch.empty(2, dtype=torch.long, device="cuda")] += 1
    assert not meter.syncs
