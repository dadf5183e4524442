"""Tests that the main loop of stage 2 names the directory whose disk is full."""

import errno
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtptrain.config import Dtype, HiddenStatesConfig, StoreDtype
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.extraction.fill import Streams, fill_shards
from mtptrain.hidden_states.extraction.vllm_streams import VllmStreams
from tests.programs import fake_python

DOCUMENTS = Documents.from_list([(0, [1, 2, 3], [1, 1, 1])])
HIDDEN_SIZE = 8


class Zeros:
    """Replaces the backend, and yields states of zeros."""

    def extract(self, shards: Iterable[Sequence[NDArray[np.int32]]]) -> Iterator[Iterator[tuple[int, torch.Tensor]]]:
        for prompts in shards:
            yield ((index, torch.zeros(len(prompt), 2, HIDDEN_SIZE)) for index, prompt in enumerate(prompts))


def engine_without_room(directory: Path) -> str:
    """Returns the path of a fake Python whose vLLM ends because the disk is full."""
    script = '#!/bin/sh\n[ "$1" = -c ] && exit 0\nread -r settings\nread -r shard\n'
    return str(fake_python(directory, script + "echo 'OSError: [Errno 28] No space left on device' >&2\nexit 1\n"))


def fill(streams: Streams, store_dir: Path) -> None:
    store_dir.mkdir(exist_ok=True)
    fill_shards(streams, DOCUMENTS, {0: range(1)}, store_dir, HIDDEN_SIZE, 1, StoreDtype.bfloat16, "rank 0", show=False)


FULL_DISKS = {
    "scratch": "the disk of hidden_states.scratch_dir must hold the files of two shards, but is full",
    "store/mtptrain_0.tmp": "of hidden states from this process, but is full; finished shards are kept",
}


def test_a_full_scratch_directory_is_named_unless_it_is_on_the_stores_disk(tmp_path: Path, tiny_target: Path) -> None:
    (tmp_path / "store").mkdir()
    settings, python = HiddenStatesConfig(dtype=Dtype.float32), engine_without_room(tmp_path)
    for place, message in FULL_DISKS.items():
        streams = VllmStreams(tiny_target, (1, 2), settings, 3, tmp_path / place, 0, "cpu", python)
        with pytest.raises(OSError, match=message) as full, streams:
            fill(streams, tmp_path / "store")
        assert full.value.errno == errno.ENOSPC and full.value.filename == str(tmp_path / place.partition("/")[0])


def test_another_vllm_than_the_tested_one_is_warned_of_by_the_program_alone(
    tmp_path: Path, tiny_target: Path, user_warnings: list[warnings.WarningMessage]
) -> None:
    settings, python = HiddenStatesConfig(dtype=Dtype.float32), fake_python(tmp_path, "#!/bin/sh\necho 0.33.0\n")
    VllmStreams(tiny_target, (1, 2), settings, 3, tmp_path / "scratch", 0, "cpu", str(python))
    assert user_warnings == []


def test_a_full_disk_of_the_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    with pytest.raises(OSError, match=r"must have room for 0\.000 GB of hidden states from this process") as full:
        fill(Zeros(), tmp_path / "store")
    assert full.value.errno == errno.ENOSPC and full.value.filename == str(tmp_path / "store")
