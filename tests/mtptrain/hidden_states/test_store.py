"""Tests that a store gives back what was written, and that it takes little disk space and memory."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mtptrain.config import StoreDtype
from mtptrain.hidden_states.fp8 import encode
from mtptrain.hidden_states.shard_format import bytes_per_token
from mtptrain.hidden_states.store import HiddenStore
from mtptrain.hidden_states.writer import ShardFile, begin_store, finish_store, shard_ranges
from tests.mtptrain.hidden_states.small_store import HIDDEN_SIZE, IDENTITY, LENGTHS, TARGET, make_store, read_all

LAST, CAPTURED = "hidden_states", "aux_hidden_states"


def test_a_shard_ends_with_the_document_that_reaches_its_tokens() -> None:
    assert shard_ranges(LENGTHS, 20) == [range(0, 3), range(3, 5), range(5, 8), range(8, 9)]
    assert shard_ranges(LENGTHS, 1) == [range(i, i + 1) for i in range(9)]
    assert shard_ranges(LENGTHS, 10_000) == [range(0, 9)]
    assert shard_ranges(np.array([10, 10]), 10) == [range(0, 1), range(1, 2)]


@pytest.mark.parametrize(
    ("captured", "dtype", "eight_bits", "state_bytes"),
    [
        ((), "bfloat16", (), 2 * HIDDEN_SIZE),
        ((0, 2), "bfloat16", (), 3 * 2 * HIDDEN_SIZE),
        ((), "fp8", (LAST,), HIDDEN_SIZE + 4),
        ((0, 2), "fp8", (LAST, CAPTURED), 3 * (HIDDEN_SIZE + 4)),
        ((0, 2), "fp8_aux", (CAPTURED,), 2 * HIDDEN_SIZE + 2 * (HIDDEN_SIZE + 4)),
    ],
)
def test_a_store_gives_back_what_was_written_and_a_token_costs_what_bytes_per_token_says(
    tmp_path: Path, captured: tuple[int, ...], dtype: str, eight_bits: tuple[str, ...], state_bytes: int
) -> None:
    shards = make_store(tmp_path, dataclasses.replace(IDENTITY, capture_layers=captured, dtype=dtype))
    assert sorted(read_all(tmp_path)) == ["manifest.json", *(f"shard_{i:05d}.safetensors" for i in range(4))]
    store = HiddenStore.open(tmp_path)
    assert store.num_documents == len(LENGTHS)
    assert store.document_lengths.tolist() == LENGTHS.tolist()
    assert store.document_ids.tolist() == list(range(100, 109))
    masks = list(store.loss_masks())
    assert [mask.tolist() for mask, _ in masks] == [shard["loss_mask"].tolist() for shard in shards]
    assert [offsets.tolist() for _, offsets in masks] == [shard["document_offsets"].tolist() for shard in shards]
    assert store.manifest.identity.capture_layers == captured
    assert store.manifest.num_tokens == LENGTHS.sum()
    assert store.manifest.num_supervised_tokens == sum(int(shard["loss_mask"].sum()) for shard in shards)

    written = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0] if "document" not in name}
    ends = np.cumsum(LENGTHS)
    for index, (start, end) in enumerate(zip(ends - LENGTHS, ends, strict=True)):
        document = store.document(index)
        assert document.document_id == 100 + index
        assert (document.aux_hidden_states is None) == (not captured)
        for name, tensor in written.items():
            found, wanted = getattr(document, name), tensor[start:end]
            if name in eight_bits:
                values, scales = encode(wanted)
                assert found.dtype is torch.float8_e4m3fn and torch.equal(found.float(), values.float())
                assert torch.equal(getattr(document, f"{name}_scales"), scales)
            else:
                assert found.dtype is wanted.dtype and torch.equal(found, wanted)
                assert getattr(document, f"{name}_scales", None) is None

    assert bytes_per_token(HIDDEN_SIZE, len(captured), StoreDtype(dtype)) == state_bytes + 4 + 1
    for record in store.manifest.shards:
        rest = record.num_bytes - record.num_tokens * (state_bytes + 4 + 1) - 8 * (4 * record.num_documents + 1)
        assert 0 < rest < 900, "only the header may remain"


def test_documents_are_views_of_the_mapped_file_and_shards_are_opened_when_needed(tmp_path: Path) -> None:
    make_store(tmp_path)
    open_files = len(os.listdir("/proc/self/fd"))
    store = HiddenStore.open(tmp_path)
    for name in ("shard_00000", "shard_00001", "shard_00003"):
        (tmp_path / f"{name}.safetensors").unlink()
    document = store.document(6)  # in shard 2, after document 5, which has two tokens
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert document.hidden_states.data_ptr() == store.document(6).hidden_states.data_ptr()
    assert document.hidden_states.storage_offset() == 2 * HIDDEN_SIZE
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "shard_00002.safetensors") in mapped and "shard_00001" not in mapped


def test_the_manifest_says_what_the_states_are(tmp_path: Path) -> None:
    make_store(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["schema_version"] == 2 and manifest["hidden_size"] == HIDDEN_SIZE
    wanted = {"hidden_states": "before_final_norm", "dtype": "bfloat16", "backend": "transformers"}
    assert manifest["identity"].items() >= {**wanted, "target": dataclasses.asdict(TARGET)}.items()
    sizes = {"num_documents": 2, "num_tokens": 31, "num_bytes": (tmp_path / "shard_00001.safetensors").stat().st_size}
    assert manifest["shards"][1].items() >= sizes.items()


READ_EVERYTHING = """
import sys
from pathlib import Path
from mtptrain.hidden_states.store import HiddenStore
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1000
before = anonymous()
store = HiddenStore.open(Path(sys.argv[1]))
documents = [store.document(i) for i in range(store.num_documents)]
assert store.document_lengths.sum() == sum(mask.sum() for mask, _ in store.loss_masks()) == 1_000_000
assert sum(float(document.hidden_states.sum()) for document in documents) == 0.0
print(anonymous() - before)
"""


@pytest.mark.slow
def test_a_million_tokens_cost_little_memory_beside_the_page_cache_and_little_disk_beside_the_states(
    tmp_path: Path,
) -> None:
    """Memory is measured in a separate process, which opens the store and reads all documents and loss masks."""
    length, hidden_size, num_shards, documents = 500, 64, 4, 500
    begin_store(tmp_path, IDENTITY, 1, range(num_shards))
    for index in range(num_shards):
        tokens = {
            "input_ids": torch.zeros(documents * length, dtype=torch.int32),
            "loss_mask": torch.ones(documents * length, dtype=torch.uint8),
            "document_offsets": torch.arange(documents + 1) * length,
            "document_ids": torch.arange(documents),
        }
        file = ShardFile(tmp_path, index, tokens, hidden_size, 0, StoreDtype.bfloat16)
        for document in range(documents):
            file.write(document, torch.zeros(length, 1, hidden_size))
        file.finish()
    finish_store(tmp_path, IDENTITY, 1, hidden_size, num_shards)
    command = [sys.executable, "-c", READ_EVERYTHING, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(output) < 100, "memory must grow by less than 100 MB"
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("shard_*"))
    assert on_disk / 1_000_000 < 2 * hidden_size * 1.01 + 8
