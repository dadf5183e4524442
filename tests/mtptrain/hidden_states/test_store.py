"""Tests that a store gives back what was written, and that it takes little disk space and memory."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mtptrain.config import StoreDtype
from mtptrain.data.identity import StoreIdentity, TargetIdentity
from mtptrain.hidden_states.fp8 import encode
from mtptrain.hidden_states.shard_format import bytes_per_token
from mtptrain.hidden_states.store import HiddenStore, find_damage
from mtptrain.hidden_states.writer import ShardFile, begin_store, finish_store, read_record, shard_ranges
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.mtptrain.hidden_states.small_store import (
    EVERY_SHARD,
    HIDDEN_SIZE,
    IDENTITY,
    LENGTHS,
    SHARD_TOKENS,
    TARGET,
    make_store,
    read_all,
)
from tests.sealed import flip_bit, seal_again

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


@pytest.mark.parametrize("position", [3, 200, -1])  # in the length of the header, the header, the loss mask
def test_a_flipped_bit_is_found_and_its_shard_named(tmp_path: Path, position: int) -> None:
    make_store(tmp_path)
    store = HiddenStore.open(tmp_path)
    assert not find_damage(store)
    path, sha256 = tmp_path / "shard_00002.safetensors", store.manifest.shards[2].sha256
    flip_bit(path, position)
    found = find_damage(store)
    assert list(found) == [2]
    assert re.search(rf"{path}: the sha256 of shard 2 must be {sha256}, but is .*delete the shard's file", found[2])
    assert not find_damage(store, shards=[0, 1, 3])


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_truncated_or_missing_shard_is_named_by_verify_and_by_reading(tmp_path: Path, is_missing: bool) -> None:
    make_store(tmp_path)
    store, path = HiddenStore.open(tmp_path), tmp_path / "shard_00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    if is_missing:
        path.unlink()
    problem = "must exist, but does not" if is_missing else r"must have \d+ bytes, but has \d+"
    flip_bit(tmp_path / "shard_00003.safetensors", -1)
    found, message = find_damage(store, show_progress=False), rf"{path}: shard 1 {problem}; run mtptrain hidden-states"
    assert sorted(found) == [1, 3] and re.search(message, found[1])
    for read in (lambda: store.document(4), lambda: HiddenStore.open(tmp_path, IDENTITY)):
        with pytest.raises(UserError, match=message):
            read()


def positions_of(path: Path) -> dict[str, int]:
    """Returns the position of each tensor's last byte in a shard."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(header))
    ends = {name: entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"}
    return {name: 8 + header + end - 1 for name, end in ends.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8_aux"])
def test_a_flipped_bit_anywhere_is_named_before_it_is_given_to_anybody(tmp_path: Path, dtype: str) -> None:
    make_store(tmp_path, dataclasses.replace(IDENTITY, capture_layers=(0, 2), dtype=dtype))
    path = tmp_path / "shard_00002.safetensors"
    positions = positions_of(path)
    on_opening = {"length": 3, "header": 200}
    for name in sorted(positions):
        if name.startswith("document_") or name == "loss_mask":
            on_opening[name] = positions.pop(name)
    assert len(on_opening) == 6 and {"hidden_states", "aux_hidden_states", "input_ids"} <= set(positions)
    assert ("aux_hidden_states_scales" in positions) == (dtype != "bfloat16")
    assert ("hidden_states_scales" in positions) == (dtype == "fp8")
    of_index = rf"{path}: the checksum of header, tables and loss mask of shard 2 must be [0-9a-f]{{32}}, but"
    for position in on_opening.values():
        flip_bit(path, position)
        with pytest.raises(UserError, match=of_index):
            _ = HiddenStore.open(tmp_path).document_lengths
        flip_bit(path, position)
    of_document = (
        rf"{path}: the checksum of the document with id 107 must be [0-9a-f]{{32}}, but is .*delete the shard's file "
        r"and run .*verify=true"
    )
    for position in positions.values():  # positions in document 7, the last of the shard
        flip_bit(path, position)
        store = HiddenStore.open(tmp_path)
        assert store.document_lengths.tolist() == LENGTHS.tolist() and store.document(6) and store.document(8)
        with pytest.raises(UserError, match=of_document):
            store.document(7)
        flip_bit(path, position)
    assert HiddenStore.open(tmp_path).document(7)


def test_opening_reads_no_states(tmp_path: Path) -> None:
    """Opening a store of terabytes must be fast, so it reads no states and succeeds even if they are damaged."""
    make_store(tmp_path)
    path = tmp_path / "shard_00001.safetensors"
    positions = positions_of(path)
    for position in range(positions["input_ids"] + 1, positions["hidden_states"] + 1):
        flip_bit(path, position)
    store = HiddenStore.open(tmp_path, IDENTITY)
    assert store.document_lengths.tolist() == LENGTHS.tolist()
    assert len(list(store.loss_masks())) == 4 and len(store.document_ids) == 9
    assert store.mapped_document(4).document_id == 104
    with pytest.raises(UserError, match="the checksum of the document with id 104"):
        store.document(4)


DAMAGED_MANIFESTS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_text('{"schema_version": 2, "shards": ['), "must be JSON, but is not"),
    (lambda path: path.write_text("{}"), "must have the entry seal, but lacks it: .*an older version wrote it"),
    (lambda path: seal_again(path, schema_version=1), "schema_version must be 2, but is 1"),
    (lambda path: seal_again(path, schema_version=2, shards=...), "must be as .* writes it, but lacks shards"),
]


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path)
    whole = (tmp_path / "manifest.json").read_bytes()
    for damage, message in DAMAGED_MANIFESTS:
        (tmp_path / "manifest.json").write_bytes(whole)
        damage(tmp_path / "manifest.json")
        with pytest.raises(UserError, match=rf"manifest.json: {message}.*; delete {tmp_path} and run mtptrain hidden"):
            HiddenStore.open(tmp_path)


def test_a_shard_that_training_deletes_while_it_is_looked_at_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict.fromkeys(("num_documents", "num_tokens", "num_supervised_tokens", "num_bytes", "index_bytes"), 1)
    hashes = {"file": "shard_00000.safetensors", "sha256": "", "index_checksum": ""}
    write_sealed(tmp_path / "shard_00000.json", {**counts, **hashes})
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as if the shard were deleted right after this check
    assert read_record(tmp_path, 0) is None


def target_with(**change: str) -> StoreIdentity:
    return dataclasses.replace(IDENTITY, target=dataclasses.replace(TARGET, **change))


OTHERS = {
    "the hash of the target's config": target_with(config_sha256="x"),
    "the hash of the target's weights": target_with(weights_sha256="x"),
    "the hash of the tokenizer": target_with(tokenizer_sha256="x"),
    "the hash of the chat template": target_with(chat_template_sha256="x"),
    r"the mode of the chat template \(prompts.template_kwargs\)": target_with(template_kwargs="x"),
    "the list of captured layers": dataclasses.replace(IDENTITY, capture_layers=(1,)),
    r"the compute dtype \(hidden_states.dtype\)": dataclasses.replace(IDENTITY, compute_dtype="x"),
    r"the hash of the prompts \(train.safetensors\)": dataclasses.replace(IDENTITY, prompts_sha256="x"),
    "the kind of hidden states": dataclasses.replace(IDENTITY, hidden_states="x"),
    r"the stored dtype \(hidden_states.store_dtype\)": dataclasses.replace(IDENTITY, dtype="x"),
    r"the backend \(hidden_states.backend\)": dataclasses.replace(IDENTITY, backend="x"),
}


def test_states_of_something_else_are_refused_with_the_reason(tmp_path: Path) -> None:
    fields = {field.name for field in dataclasses.fields(StoreIdentity)} - {"target"}
    hashes = {field.name for field in dataclasses.fields(TargetIdentity)} - {"path", "revision"}
    assert len(IDENTITY.facts()) == len(OTHERS) == len(fields | hashes), "every field must be compared"
    begin_store(tmp_path / "unfinished", IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    make_store(tmp_path / "finished")
    for what, identity in OTHERS.items():
        value = "\\(1,\\)" if "layers" in what else "x"
        found = rf"{what} must be {value}, but is [^;]+ \(target expected: .*delete .* run mtptrain hidden-states again"
        with pytest.raises(UserError, match=f"plan.json: {found}"):
            begin_store(tmp_path / "unfinished", identity, SHARD_TOKENS, EVERY_SHARD)
        with pytest.raises(UserError, match=f"manifest.json: {found}"):
            begin_store(tmp_path / "finished", identity, SHARD_TOKENS, EVERY_SHARD)
        with pytest.raises(UserError, match=f"manifest.json: {found}"):
            HiddenStore.open(tmp_path / "finished", identity)


def test_every_difference_is_named_at_once_and_the_path_of_a_target_is_none(tmp_path: Path) -> None:
    make_store(tmp_path)
    other = dataclasses.replace(target_with(weights_sha256="x", path="models/tuned"), prompts_sha256="y")
    message = r"weights must be x, .* must be y, .*expected: models/tuned, found: models/llama"
    with pytest.raises(UserError, match=message):
        HiddenStore.open(tmp_path, other)
    assert HiddenStore.open(tmp_path, target_with(path="/elsewhere", revision="main")).num_documents == len(LENGTHS)


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
