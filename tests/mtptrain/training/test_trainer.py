"""Tests that the loss of a training step equals that of serving, and tests the trainer's settings."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import pytest
import torch

from mtptrain.heads.files import build_head
from mtptrain.hidden_states.store import HiddenStore, StoredDocument
from mtptrain.target.loading import load_target
from mtptrain.target.position_cache import PositionCache
from mtptrain.training.batches import BatchSchedule
from mtptrain.training.trainer import Trainer, is_compiled, warmup_cosine
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError
from tests.conftest import Run, make_config, run_program

DEPTHS = 3
T = TypeVar("T")


@torch.no_grad()
def served_kl(run: Run, documents: list[StoredDocument]) -> list[float]:
    """Returns the untrained head's mean KL at each depth.

    Like an engine, the head drafts token by token from the target's states.
    """
    config = make_config(*run[1])
    target = load_target(Path(config.target.path), torch.float32, torch.device("cpu"))
    torch.manual_seed(config.seed)
    head = build_head(config.head, target.config).eval()
    sums, counts = [0.0] * DEPTHS, [0] * DEPTHS
    for document in documents:
        ids = document.input_ids.long()
        states = target.model.model(ids[None]).last_hidden_state[0]  # post-norm
        teacher = target.model.lm_head(states).log_softmax(-1)
        for start in range(len(ids) - 2):
            cache = PositionCache(256)
            drafted, recycled = head.decode(
                states[None, : start + 1],
                target.parts.embed(ids[None, 1 : start + 2]),
                torch.arange(start + 1)[None],
                cache,
            )
            for depth in range(min(DEPTHS, len(ids) - 2 - start)):
                if depth:
                    next_embedding = target.parts.embed(ids[None, None, start + 1 + depth])
                    drafted, recycled = head.decode(
                        recycled[:, -1:], next_embedding, torch.tensor([[start + depth]]), cache
                    )
                logprobs = head.logits(drafted[0, -1], target.parts).log_softmax(-1)
                wanted = teacher[start + 1 + depth]
                sums[depth] += float((wanted.exp() * (wanted - logprobs)).sum())
                counts[depth] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)]


def test_the_first_steps_loss_is_that_of_serving(fresh_run: Run) -> None:
    """This test fails if the training step uses a wrong norm, embedding, depth or teacher."""
    run_dir, settings = fresh_run
    store = HiddenStore.open(run_dir / "hidden_states")
    few = ("train.max_steps=1", "deepspeed=zero0")
    result = run_program("train", *settings, *few)
    assert result.returncode == 0, result.stderr[-3000:]
    record = json.loads((run_dir / "train/metrics.jsonl").read_text().splitlines()[0])
    config = make_config(*settings, *few)
    schedule = BatchSchedule(store, DEPTHS, config.train.batch_tokens, config.train.micro_batches_per_step, config.seed)
    ids = {document_id for batch in schedule.micro_batches(0, 0, 1) for document_id in batch.document_ids}
    documents = [store.document(i) for i in range(store.num_documents)]
    chosen = [document for document in documents if document.document_id in ids]
    # The store holds bf16 states, whose rounding changes the mean by a few parts in a thousand.
    assert record["kl_at"] == pytest.approx(served_kl(fresh_run, chosen), rel=5e-3)


@dataclass(frozen=True)
class SecondOfTwo(Ranks):
    """A rank beside another whose bad steps are `others`."""

    others: tuple[tuple[int, bool, int, tuple[int, ...]], ...] = ()

    def gather(self, value: T) -> list[T]:
        return [cast(T, list(self.others)), value]


@pytest.mark.parametrize("own_loss", [1.0, math.nan])
def test_a_loss_that_is_not_finite_is_that_of_the_rank_that_read_it(own_loss: float) -> None:
    """The gradient norm is that of all ranks, and so is not finite on any of them."""
    trainer = object.__new__(Trainer)
    is_others = math.isfinite(own_loss)
    trainer.ranks = SecondOfTwo(1, 2, 1, ((1, not is_others, 0, (7, 8)),))
    trainer._unchecked = [((4, 5), torch.tensor([own_loss, math.nan]))]
    named = "[7, 8] on rank 0" if is_others else "[4, 5] on rank 1"
    with pytest.raises(UserError, match=rf"^train: the loss .* at step 1 is not, with documents {re.escape(named)};"):
        trainer.check_finite(1)


def test_the_learning_rate_warms_up_and_follows_half_a_cosine() -> None:
    assert [warmup_cosine(step, 4, 12, 0.1) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert warmup_cosine(8, 4, 12, 0.1) == pytest.approx(0.55)
    assert warmup_cosine(12, 4, 12, 0.1) == pytest.approx(0.1)
    assert warmup_cosine(99, 4, 12, 0.1) == pytest.approx(0.1) and not math.isnan(warmup_cosine(0, 0, 0, 0.1))


@pytest.mark.parametrize(
    ("setting", "on_cpu", "on_gpu"), [("null", False, True), ("true", True, True), ("false", False, False)]
)
def test_a_step_is_compiled_on_gpus_unless_the_config_says_otherwise(setting: str, on_cpu: bool, on_gpu: bool) -> None:
    setting_of_config = make_config(f"train.compile={setting}").train.compile
    assert is_compiled(setting_of_config, torch.device("cpu")) is on_cpu
    assert is_compiled(setting_of_config, torch.device("cuda")) is on_gpu
