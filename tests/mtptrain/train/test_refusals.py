"""Tests that bad settings and damaged files are named before training uses them, and that a diverging run stops."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Run, run_program
from tests.mtptrain.train.runs import records, train
from tests.sealed import flip_bit


def test_a_run_that_diverges_stops_before_it_saves_and_names_its_documents(fresh_run: Run) -> None:
    """The first step's loss and the weights after it are finite, but the loss of these weights is not."""
    settings = (
        "train.lr=1e30",
        "train.warmup_steps=0",
        "train.save_every=1",
        "train.validate_every=1",
        "train.log_every=10",
    )
    result = run_program("train", *fresh_run[1], *settings)
    assert result.returncode != 0
    assert "train: the loss of the new weights must be finite, but a value at step 1 is not, with doc" in result.stderr
    assert not list((fresh_run[0] / "train").glob("checkpoints/step_*")) and not (fresh_run[0] / "train/last").exists()


def test_a_loss_that_is_not_finite_between_two_records_is_named_with_its_step(fresh_run: Run) -> None:
    settings = ("train.lr=1e30", "train.warmup_steps=0", "train.log_every=10", "train.max_steps=11")
    result = run_program("train", *fresh_run[1], *settings)
    assert "train: the loss and its gradient must be finite, but a value at step 2 is not, with doc" in result.stderr


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "message"),
    [
        (
            ("train.micro_batches_per_step=3",),
            2,
            "train.micro_batches_per_step: must be a multiple of the number of ranks, 2, but is 3; set it "
            "to 4, or change the number of ranks (torchrun's --nproc-per-node; NPROC_train and NODES under Slurm; "
            "CUDA_VISIBLE_DEVICES for mtptrain run)",
        ),
        (
            ("train.batch_tokens=64",),
            1,
            "train.batch_tokens: must be at least the 128 tokens of the longest document, but is 64",
        ),
        (
            ("train.micro_batches_per_step=5000",),
            1,
            "must be at most the number of documents with draft positions, but is 5000",
        ),
        (("hidden_states.dtype=bfloat16",), 1, "the compute dtype"),
        (
            ("acceptance.prompt_tokens=400",),
            1,
            "acceptance.prompt_tokens: held-out documents must hold a prompt of 400 tokens",
        ),
        (
            ("head.num_attention_heads=4",),
            1,
            "head.num_attention_heads: the head dim (hidden size 64 / heads) must be one of (64, 128)",
        ),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, tuple) else None,
)
def test_bad_input_is_refused_before_training(
    fresh_run: Run, overrides: tuple[str, ...], num_ranks: int, message: str
) -> None:
    result = run_program("train", *fresh_run[1], *overrides, num_ranks=num_ranks)
    assert result.returncode != 0
    assert message in result.stderr
    assert not (fresh_run[0] / "train").exists()


@pytest.mark.parametrize("place", [1, 20, 1000, -1], ids=["length", "header", "offsets", "loss mask"])
def test_a_flipped_byte_that_decides_the_steps_is_named_before_training_begins(fresh_run: Run, place: int) -> None:
    flip_bit(fresh_run[0] / "hidden_states/shard_00001.safetensors", place)
    result = run_program("train", *fresh_run[1])
    assert result.returncode != 0
    assert "shard_00001.safetensors: the checksum of header, tables and loss mask of shard 1 must be" in result.stderr
    assert not (fresh_run[0] / "train").exists()


def flip_states(shard: Path) -> None:
    """Flip a bit in every byte of the last layer's states, so that any document a step reads is damaged."""
    content = bytearray(shard.read_bytes())
    header = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + header])["hidden_states"]["data_offsets"]
    states = np.frombuffer(content, np.uint8)[8 + header + begin : 8 + header + end]
    states ^= 1
    shard.write_bytes(content)


def test_flipped_states_are_named_before_a_step_uses_them_and_training_goes_on_with_the_shard_computed_again(
    fresh_run: Run,
) -> None:
    run_dir, overrides = fresh_run
    shards = sorted((run_dir / "hidden_states").glob("shard_*.safetensors"))
    manifest = (run_dir / "hidden_states/manifest.json").read_bytes()
    for shard in shards:
        flip_states(shard)
    settings = ("train.max_steps=2", "train.log_every=1")
    result = run_program("train", *overrides, *settings, num_ranks=2)
    assert result.returncode != 0
    assert re.search(
        r"shard_\d+.safetensors: the checksum of the document with id \d+ must be .*delete the shard's file and run "
        "mtptrain",
        result.stderr,
    )
    assert records(run_dir) == [] and not list((run_dir / "train/checkpoints").glob("step_*"))
    for shard in shards:
        shard.unlink()
    assert run_program("hidden-states", *overrides).returncode == 0
    assert (run_dir / "hidden_states/manifest.json").read_bytes() == manifest
    assert len(train(fresh_run, *settings)) == 2


def test_a_head_that_could_not_be_exported_is_warned_of_before_training(fresh_run: Run) -> None:
    refused_later = ("acceptance.prompt_tokens=400",)
    result = run_program("train", *fresh_run[1], "head.zero_first_embedding=true", *refused_later)
    assert "can be trained and measured, but not exported: head.zero_first_embedding: must be" in result.stderr
