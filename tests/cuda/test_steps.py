"""Tests the trainer's step on fake CUDA tensors, at the sizes of an 8B target, with DeepSpeed as rank 0 of 8."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from mtptrain.config import TrainConfig
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import map_tensors
from mtptrain.hidden_states.store import StoredDocument
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch, make_batch
from mtptrain.training.step_packing import Anchors
from mtptrain.utils.distributed import Ranks
from tests.cuda import guard
from tests.cuda.fake_cuda import fake_cuda, place
from tests.programs import FORKED
from tests.published_targets import PUBLISHED_TARGETS

DEVICE = "cuda:0"
NUM_RANKS = 8
Answers = Sequence[tuple[int, int]]
"""The first token and the end of each answer of a document."""
Document = tuple[int, Answers]
"""A document's number of tokens, and its answers."""


@dataclass
class Rehearsed:
    """What a step left behind."""

    gradients: dict[str, tuple[torch.dtype, str]] = field(default_factory=dict)
    """Dtype and device of the gradient of each weight of the head."""
    weights: set[str] = field(default_factory=set)
    num_values: int = 0
    masters: set[torch.dtype] = field(default_factory=set)
    """Dtypes of the weights that the optimizer updates."""
    num_masters: int = 0
    """Number of their values on this rank."""


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


def rehearse(
    head_config: HeadConfig, target_config: PreTrainedConfig, documents: Sequence[Document], train: TrainConfig
) -> Rehearsed:
    """Runs one step, in which the host must not wait for a value. Call this in a child, after `become_rank_0_of_8`."""
    from mtptrain.training.trainer import Trainer

    find_form(target_config)  # the result is kept: with fake tensors, it could not be found
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    train, result = replace(train, micro_batches_per_step=NUM_RANKS), Rehearsed()
    in_place = patch.object(nn.Module, "_apply", lambda module, *_, **__: module)  # all is on its device already
    with fake_cuda():
        head = place(build_head(head_config, target_config), DEVICE)
        assert isinstance(head, Head)
        for name, weight in head.named_parameters():
            weight.register_post_accumulate_grad_hook(lambda x, name=name: note(result, name, x))
        with in_place:
            trainer = Trainer(head, frozen_parts(target_config), train, bf16, 10, GpuRanks(0, NUM_RANKS, 0))
            with NoCopiesToHost():
                trainer.step([fake_batch(head, target_config.hidden_size, documents, head_config.ttt_steps)])
    masters = [x for group in trainer.engine.optimizer.optimizer.param_groups for x in group["params"]]
    result.weights = {name for name, _ in head.named_parameters()}
    result.num_values = sum(x.numel() for x in head.parameters())
    result.masters, result.num_masters = {x.dtype for x in masters}, sum(x.numel() for x in masters)
    return result


def note(result: Rehearsed, name: str, weight: torch.Tensor) -> None:
    assert weight.grad is not None and weight.grad.shape == weight.shape
    result.gradients[name] = weight.grad.dtype, str(weight.grad.device)


def frozen_parts(config: PreTrainedConfig) -> FrozenParts:
    with torch.device(DEVICE):
        embed_tokens, lm_head = (
            torch.empty(config.vocab_size, config.hidden_size, dtype=torch.bfloat16) for _ in range(2)
        )
        norm_weight = torch.empty(config.hidden_size, dtype=torch.bfloat16)
    return FrozenParts(embed_tokens, norm_weight, lm_head, find_form(config))


def fake_batch(head: Head, hidden_size: int, documents: Sequence[Document], depths: int) -> Batch:
    """Returns the batch that `make_batch` packs from these documents. Its tensors are fake, without data."""
    with unset_fake_temporarily():
        stored = []
        for i, (length, answers) in enumerate(documents):
            mask = np.zeros(length, dtype=np.uint8)
            for first, end in answers:
                mask[first:end] = 1
            ids, empty = torch.zeros(length, dtype=torch.int32), torch.empty(length, 0)
            stored.append(StoredDocument(i, ids, torch.from_numpy(mask), empty, None))
        anchors = None if head.drafts_per_document is None else Anchors(head.drafts_per_document, (0,))
        packed = make_batch(stored, depths, anchors=anchors, window=head.shared_window)
    num_tokens, num_captured = packed.num_tokens, len(head.capture_layers)
    captured = torch.empty(num_tokens, num_captured, hidden_size, dtype=torch.bfloat16) if num_captured else None
    return replace(
        map_tensors(packed, lambda x: torch.empty(x.shape, dtype=x.dtype)),
        hidden_states=torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16),
        aux_hidden_states=captured,
    )


CHATS = [(1500, [(200, 500), (700, 800), (1100, 1500)]), (900, [(300, 900)]), (500, [(1, 100), (101, 490)])]
"""Documents of one to three answers, whose prompts provide only keys and values."""
DFLASH = {"anchors_per_document": 64, "num_layers": 3, "sliding_window": 256}
CASES: list[tuple[str, dict[str, Any]]] = [("mtp", {}), ("eagle3", {"draft_vocab_size": 32_000}), ("dflash", DFLASH)]


def rehearse_all() -> list[Rehearsed]:
    """Runs in a child a step of each case: a head, and its settings."""
    become_rank_0_of_8()
    target, train = PUBLISHED_TARGETS["llama3_1_8b"].config(), TrainConfig(compile=False)
    return [
        rehearse(HEADS[name].Config(**{"ttt_steps": 5, **settings}), target, CHATS, train) for name, settings in CASES
    ]


def test_a_step_over_chats_gives_every_gradient_on_its_device_and_never_waits() -> None:
    if guard.LIBRARY is None:
        pytest.skip(f"*** TESTS ON FAKE CUDA DEVICES ARE SKIPPED: {guard.WHY_NOT} ***")
    with ProcessPoolExecutor(1, mp_context=FORKED) as pool:  # in a child, which changes torch and DeepSpeed for good
        steps = pool.submit(rehearse_all).result()
    for step in steps:
        assert step.gradients.keys() == step.weights
        assert set(step.gradients.values()) == {(torch.bfloat16, DEVICE)}
        assert step.masters == {torch.float32}, "the optimizer works in fp32"
        assert step.num_masters == pytest.approx(step.num_values / NUM_RANKS, rel=0.01)
