"""Runs the trainer's step on fake CUDA tensors, with the real sizes of the target and the head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig

from mtptrain.config import TrainConfig
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import map_tensors
from mtptrain.hidden_states.store import StoredDocument
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.form import find_form
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.training.batches import Batch, make_batch
from mtptrain.training.step_packing import Anchors
from mtptrain.training.trainer import Trainer
from mtptrain.utils.distributed import Ranks
from tests.cuda.fake_cuda import Meter, fake_cuda, place

DEVICE = "cuda:0"


class GpuRanks(Ranks):
    """Simulates ranks on a machine with GPUs."""

    device = torch.device(DEVICE)  # type: ignore[assignment]


class PlainEngine:
    """Replaces DeepSpeed's engine and has no optimizer, so gradients stay where autograd leaves them."""

    def __init__(self, module: Head) -> None:
        self.module = module

    def __call__(self, *args: Any) -> torch.Tensor:
        states: torch.Tensor = self.module(*args)
        return states

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        pass


@dataclass
class Rehearsal:
    """Holds the head, the measurements and the batch of a finished step."""

    head: Head
    meter: Meter
    batch: Batch


def frozen_parts(config: PreTrainedConfig, device: str = DEVICE) -> FrozenParts:
    table = (config.vocab_size, config.hidden_size)
    with torch.device(device):
        embed_tokens, lm_head = (torch.empty(table, dtype=torch.bfloat16) for _ in range(2))
        norm = torch.empty(config.hidden_size, dtype=torch.bfloat16)
    return FrozenParts(embed_tokens, norm, lm_head, find_form(config))


def answers(length: int, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns a loss mask u8[length] that is 1 from `first` to `last - 1` of each span, and 0 elsewhere."""
    mask = np.zeros(length, dtype=np.uint8)
    for first, last in spans:
        mask[first:last] = 1
    return mask


def make_fake_batch(head: Head, hidden_size: int, loss_masks: Sequence[np.ndarray], depths: int) -> Batch:
    """Returns the batch that `make_batch` packs from documents with these masks. Its tensors are fake, without data."""
    with unset_fake_temporarily():
        documents = [
            StoredDocument(
                i, torch.zeros(len(mask), dtype=torch.int32), torch.from_numpy(mask), torch.empty(len(mask), 0), None
            )
            for i, mask in enumerate(loss_masks)
        ]
        anchors = None if head.drafts_per_document is None else Anchors(head.drafts_per_document, (0,))
        packed = make_batch(documents, depths, anchors=anchors, window=head.shared_window)
    num_tokens, num_captured = packed.num_tokens, len(head.capture_layers)
    return replace(
        map_tensors(packed, lambda x: torch.empty(x.shape, dtype=x.dtype)),
        hidden_states=torch.empty(num_tokens, hidden_size, dtype=torch.bfloat16),
        aux_hidden_states=(
            torch.empty(num_tokens, num_captured, hidden_size, dtype=torch.bfloat16) if num_captured else None
        ),
    )


def rehearse_step(
    head_config: HeadConfig, target_config: PreTrainedConfig, loss_masks: Sequence[np.ndarray], train: TrainConfig
) -> Rehearsal:
    """Run and measure one step of the trainer. The measured memory includes the weights and the frozen parts."""
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    initialize = patch("deepspeed.initialize", lambda model, **_: (PlainEngine(model), None, None, None))
    with fake_cuda(), initialize:
        head = place(build_head(head_config, target_config), DEVICE)
        assert isinstance(head, Head)
        parts = frozen_parts(target_config)
        trainer = Trainer(head, parts, train, bf16, 10, GpuRanks(0, 1, 0))
        batch = make_fake_batch(head, target_config.hidden_size, loss_masks, head_config.ttt_steps)
        meter = Meter()
        meter.hold(*head.parameters(), *(x for x in vars(parts).values() if isinstance(x, torch.Tensor)))
        with meter:
            trainer.step([batch])
    return Rehearsal(head, meter, batch)
