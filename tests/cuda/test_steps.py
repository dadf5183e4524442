"""Tests the trainer's step on fake CUDA tensors, at the sizes of an 8B target, with DeepSpeed as rank 0 of 8."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.training_step import Case, random_batch, random_parts
from mtptrain.config import TrainConfig
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import map_tensors
from mtptrain.settings.heads import DflashConfig, Eagle3Config, MtpConfig
from mtptrain.target.form import find_form
from mtptrain.utils.distributed import Ranks
from tests.cuda import guard
from tests.cuda.fake_cuda import fake_cuda, place
from tests.programs import FORKED
from tests.published_targets import PUBLISHED_TARGETS

DEVICE = "cuda:0"
NUM_RANKS = 8
HEADS = (
    MtpConfig(ttt_steps=5),
    Eagle3Config(ttt_steps=5, draft_vocab_size=32_000),
    DflashConfig(ttt_steps=5, anchors_per_document=64, num_layers=3, sliding_window=256),
)
DOCUMENTS = [(1500, 200), (900, 300), (500, 0)]
"""The number of tokens of each document and of its prompt, which provides only keys and values."""


class GpuRanks(Ranks):
    device = torch.device(DEVICE)  # type: ignore[assignment]


class FakeStream(nullcontext[None]):
    def wait_stream(self, other: object) -> None:
        pass

    wait_event = record_event = wait_stream


class NoCopiesToHost(TorchDispatchMode):
    """Refuses copies for which the host waits; operators that read a value raise on fake tensors by themselves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket.__name__ in ("_to_copy", "copy_") and out.device.type == "cpu":
            source = args[1] if func._overloadpacket.__name__ == "copy_" else args[0]
            assert source.device.type == "cpu", "the host must not wait for a copy from a GPU"
        return out


def become_rank_0_of_8() -> None:
    """Replace what DeepSpeed uses of CUDA and `fake_cuda` does not, for good."""
    import deepspeed.accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def nothing(*_: object, **__: object) -> int:
        return 0

    unused = ("memory_allocated", "max_memory_allocated", "empty_cache", "reset_peak_memory_stats")
    streams = dict.fromkeys(("Stream", "stream", "current_stream", "default_stream"), FakeStream)
    for name, answer in {**dict.fromkeys(unused, nothing), **streams, "is_bf16_supported": lambda *_: True}.items():
        setattr(torch.cuda, name, answer)
    torch.set_num_threads(1)  # renews the pool of threads of the forked parent, before autograd's threads race to do so
    accelerator: Any = CUDA_Accelerator()
    accelerator.is_available, accelerator.range_push, accelerator.range_pop = lambda: True, nothing, nothing
    deepspeed.accelerator.set_accelerator(accelerator)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)


def rehearse(case: Case) -> None:
    """Runs a step, in which the host must not wait for a value, and checks what it leaves behind."""
    from mtptrain.training.trainer import Trainer

    find_form(case.target)  # the result is kept: with fake tensors, it could not be found
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    train = TrainConfig(compile=False, micro_batches_per_step=NUM_RANKS)
    in_place = patch.object(nn.Module, "_apply", lambda module, *_, **__: module)  # all is on its device already
    gradients: dict[str, tuple[torch.dtype, str]] = {}

    def note(name: str, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        gradients[name] = weight.grad.dtype, str(weight.grad.device)

    with fake_cuda():
        head = place(build_head(case.head, case.target), DEVICE)
        assert isinstance(head, Head)
        weights = dict(head.named_parameters())
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(partial(note, name))
        parts = random_parts(case.target, torch.device(DEVICE), torch.bfloat16)
        with unset_fake_temporarily():
            batch = random_batch(case, head)
        with in_place:
            trainer = Trainer(head, parts, train, bf16, 10, GpuRanks(0, NUM_RANKS, 0))
            with NoCopiesToHost():
                trainer.step([map_tensors(batch, lambda x: torch.empty(x.shape, dtype=x.dtype))])
    assert gradients == dict.fromkeys(weights, (torch.bfloat16, DEVICE))
    masters = [x for group in trainer.engine.optimizer.optimizer.param_groups for x in group["params"]]
    assert {x.dtype for x in masters} == {torch.float32}, "the optimizer works in fp32"
    num_masters, num_values = (sum(x.numel() for x in some) for some in (masters, weights.values()))
    assert num_masters == pytest.approx(num_values / NUM_RANKS, rel=0.01), "each rank has its share"


def rehearse_all() -> None:
    become_rank_0_of_8()
    for head in HEADS:
        rehearse(Case(head, PUBLISHED_TARGETS["llama3_1_8b"].config(), DOCUMENTS))  # type: ignore[arg-type]


def test_a_step_over_chats_gives_every_gradient_on_its_device_and_never_waits() -> None:
    if guard.LIBRARY is None:
        pytest.skip(f"*** TESTS ON FAKE CUDA DEVICES ARE SKIPPED: {guard.WHY_NOT} ***")
    with ProcessPoolExecutor(1, mp_context=FORKED) as pool:  # in a child, which changes torch and DeepSpeed for good
        pool.submit(rehearse_all).result()
