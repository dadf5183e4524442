"""Tests that bad settings and damaged files are named before training uses them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Run, run_program
from tests.mtptrain.train.runs import records, refused, train
from tests.sealed import flip_bit

REFUSED = {
    "train.batch_tokens=64": "train.batch_tokens: must be at least the 128 tokens of the longest document, but is 64",
    "train.micro_batches_per_step=5000": "must be at most the number of documents with draft positions, but is 5000",
    "hidden_states.dtype=bfloat16": "the compute dtype",
    "acceptance.prompt_tokens=400": "acceptance.prompt_tokens: held-out documents must hold a prompt of 400 tokens",
    "head.num_attention_heads=4": "head.num_attention_heads: the head dim (hidden size 64 / heads) must be one of (64,",
}


def test_bad_settings_are_refused_before_training(tiny_run: Run) -> None:
    for override, message in REFUSED.items():
        assert message in refused(tiny_run, f"run_dir={tiny_run[0]}", override)
    ranks = refused(tiny_run, f"run_dir={tiny_run[0]}", "train.micro_batches_per_step=3", num_ranks=2)
    assert ranks == (
        "train.micro_batches_per_step: must be a multiple of the number of ranks, 2, but is 3; set it to 4, or change "
        "the number of ranks (torchrun's --nproc-per-node; NPROC_train and NODES under Slurm; CUDA_VISIBLE_DEVICES for "
        "mtptrain run)"
    )


def test_a_flipped_bit_that_decides_the_steps_is_named_before_training_begins(fresh_run: Run) -> None:
    flip_bit(fresh_run[0] / "hidden_states/shard_00001.safetensors", -1)  # in the loss mask
    result = run_program("train", *fresh_run[1], "head.zero_first_embedding=true")
    assert result.returncode != 0
    assert "shard_00001.safetensors: the checksum of header, tables and loss mask of shard 1 must be" in result.stderr
    assert not (fresh_run[0] / "train").exists()
    warning = "can be trained and measured, but not exported: head.zero_first_embedding: must be"
    assert warning in result.stderr, "a head that could not be exported must be warned of before training"


def flip_states(shard: Path) -> None:
    """Flip a bit in every byte of the last layer's states, so that any document a step reads is damaged."""
    content = bytearray(shard.read_bytes())
    header = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + header])["hidden_states"]["data_offsets"]
    states = np.frombuffer(content, np.uint8)[8 + header + begin : 8 + header + end]
    states ^= 1
    shard.write_bytes(content)


@pytest.mark.slow
def test_flipped_states_are_named_before_a_step_uses_them_and_training_goes_on_with_the_shard_computed_again(
    fresh_run: Run,
) -> None:
    run_dir, overrides = fresh_run
    shards = sorted((run_dir / "hidden_states").glob("shard_*.safetensors"))
    manifest = (run_dir / "hidden_states/manifest.json").read_bytes()
    for shard in shards:
        flip_states(shard)
    result = run_program("train", *overrides, "train.max_steps=2", num_ranks=2)
    assert result.returncode != 0
    message = (
        r"shard_\d+.safetensors: the checksum of the document with id \d+ must be .*delete the shard's file and run "
        "mtptrain"
    )
    assert re.search(message, result.stderr)
    assert records(run_dir) == [] and not list((run_dir / "train/checkpoints").glob("step_*"))
    for shard in shards:
        shard.unlink()
    assert run_program("hidden-states", *overrides).returncode == 0
    assert (run_dir / "hidden_states/manifest.json").read_bytes() == manifest
    assert len(train(fresh_run, "train.max_steps=2")) == 2
