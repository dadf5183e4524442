"""The store's promises, on real files of random states."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mtptrain.config import StoreDtype
from mtptrain.data.identity import StoreIdentity, TargetIdentity
from mtptrain.hidden_states.fp8 import encode
from mtptrain.hidden_states.shard_format import bytes_per_token
from mtptrain.hidden_states.store import HiddenStore, find_damage, open_store, verify
from mtptrain.hidden_states.writer import ShardFile, begin_store, finish_store, has_shard, read_record, shard_ranges

HIDDEN_SIZE, SHARD_TOKENS = 8, 20
LENGTHS = np.array([7, 5, 9, 1, 30, 2, 2, 16, 4])
TARGET = TargetIdentity("models/llama", None, "c" * 64, "w" * 64, "t" * 64, "h" * 64)
IDENTITY = StoreIdentity(TARGET, (), "bfloat16", "p" * 64)


def make_shard(index: int, documents: range, num_captured: int = 0) -> dict[str, torch.Tensor]:
    """Random contents; document i has id 100 + i."""
    generator = torch.Generator().manual_seed(index)
    lengths = torch.tensor(LENGTHS[documents.start : documents.stop])
    size = int(lengths.sum())
    tensors = {
        "input_ids": torch.randint(0, 260, (size,), generator=generator, dtype=torch.int32),
        "loss_mask": torch.randint(0, 2, (size,), generator=generator, dtype=torch.uint8),
        "document_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "document_ids": torch.arange(documents.start, documents.stop) + 100,
        "hidden_states": torch.randn(size, HIDDEN_SIZE, generator=generator).bfloat16(),
    }
    if num_captured:
        tensors["aux_hidden_states"] = torch.randn(size, num_captured, HIDDEN_SIZE, generator=generator).bfloat16()
    return tensors


def write_shard(directory: Path, index: int, tensors: dict[str, torch.Tensor], dtype: str = "bfloat16") -> None:
    """Write a whole shard, the last document first."""
    states, aux = tensors["hidden_states"][:, None], tensors.get("aux_hidden_states")
    streams = states if aux is None else torch.cat([aux, states], dim=1)
    tokens = {name: tensor for name, tensor in tensors.items() if not name.endswith("hidden_states")}
    file = ShardFile(directory, index, tokens, HIDDEN_SIZE, streams.shape[1] - 1, StoreDtype(dtype))
    offsets = tensors["document_offsets"].tolist()
    for document in reversed(range(len(offsets) - 1)):
        file.write(document, streams[offsets[document] : offsets[document + 1]])
    file.finish()


EVERY_SHARD = range(4)


def make_store(directory: Path, identity: StoreIdentity = IDENTITY) -> list[dict[str, torch.Tensor]]:
    """Write a whole store and return what each shard was given."""
    assert begin_store(directory, identity, SHARD_TOKENS, EVERY_SHARD) is None
    ranges = shard_ranges(LENGTHS, SHARD_TOKENS)
    shards = [make_shard(index, documents, len(identity.capture_layers)) for index, documents in enumerate(ranges)]
    for index, tensors in enumerate(shards):
        write_shard(directory, index, tensors, identity.dtype)
    finish_store(directory, identity, SHARD_TOKENS, HIDDEN_SIZE, len(shards))
    return shards


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def read_all(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_a_shard_ends_with_the_document_that_reaches_its_tokens() -> None:
    assert shard_ranges(LENGTHS, 20) == [range(0, 3), range(3, 5), range(5, 8), range(8, 9)]
    assert shard_ranges(LENGTHS, 1) == [range(i, i + 1) for i in range(9)]
    assert shard_ranges(LENGTHS, 10_000) == [range(0, 9)]
    assert shard_ranges(np.array([10, 10]), 10) == [range(0, 1), range(1, 2)]


@pytest.mark.parametrize("capture_layers", [(), (0, 2)])
def test_a_store_gives_back_what_was_written(tmp_path: Path, capture_layers: tuple[int, ...]) -> None:
    shards = make_store(tmp_path, dataclasses.replace(IDENTITY, capture_layers=capture_layers))
    store = HiddenStore.open(tmp_path)
    assert store.num_documents == len(LENGTHS)
    assert store.document_lengths.tolist() == LENGTHS.tolist()
    assert store.document_ids.tolist() == list(range(100, 109))
    masks = list(store.loss_masks())
    assert [mask.tolist() for mask, _ in masks] == [shard["loss_mask"].tolist() for shard in shards]
    assert [offsets.tolist() for _, offsets in masks] == [shard["document_offsets"].tolist() for shard in shards]
    assert store.manifest.identity.capture_layers == capture_layers
    assert store.manifest.num_tokens == LENGTHS.sum()
    assert store.manifest.num_supervised_tokens == sum(int(shard["loss_mask"].sum()) for shard in shards)

    ends = np.cumsum(LENGTHS)
    for index, (start, end) in enumerate(zip(ends - LENGTHS, ends, strict=True)):
        document = store.document(index)
        assert document.document_id == 100 + index
        for name, dtype in {
            "input_ids": torch.int32,
            "loss_mask": torch.uint8,
            "hidden_states": torch.bfloat16,
        }.items():
            expected = torch.cat([shard[name] for shard in shards])[start:end]
            assert getattr(document, name).dtype == dtype
            assert torch.equal(getattr(document, name), expected)
        if capture_layers:
            assert document.aux_hidden_states is not None
            assert torch.equal(
                document.aux_hidden_states, torch.cat([shard["aux_hidden_states"] for shard in shards])[start:end]
            )
        else:
            assert document.aux_hidden_states is None


def test_a_finished_store_holds_shards_and_manifest_alone(tmp_path: Path) -> None:
    make_store(tmp_path)
    assert sorted(read_all(tmp_path)) == ["manifest.json", *(f"shard_{i:05d}.safetensors" for i in range(4))]


def test_documents_are_views_of_the_mapped_file_and_shards_are_opened_when_needed(tmp_path: Path) -> None:
    make_store(tmp_path)
    open_files = len(os.listdir("/proc/self/fd"))
    store = HiddenStore.open(tmp_path)
    for name in ("shard_00000", "shard_00001", "shard_00003"):
        (tmp_path / f"{name}.safetensors").unlink()
    document = store.document(6)  # in shard 2, behind document 5 of two tokens
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert document.hidden_states.data_ptr() == store.document(6).hidden_states.data_ptr()
    assert document.hidden_states.storage_offset() == 2 * HIDDEN_SIZE
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "shard_00002.safetensors") in mapped
    assert "shard_00001" not in mapped


@pytest.mark.parametrize("position", [3, 200, -1])  # length of the header, header, states
def test_a_flipped_bit_is_found_and_its_shard_named(tmp_path: Path, position: int) -> None:
    make_store(tmp_path)
    store = HiddenStore.open(tmp_path)
    verify(store)
    path = tmp_path / "shard_00002.safetensors"
    flip_bit(path, position)
    with pytest.raises(
        ValueError, match=rf"{path}: the sha256 of shard 2 must be [0-9a-f]+, but is .*delete the shard's file"
    ) as error:
        verify(store)
    assert store.manifest.shards[2].sha256 in str(error.value)
    verify(store, shards=[0, 1, 3])


def test_a_truncated_shard_is_named_by_verify_and_by_reading(tmp_path: Path) -> None:
    make_store(tmp_path)
    store = HiddenStore.open(tmp_path)
    path = tmp_path / "shard_00001.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    message = rf"{path}: shard 1 must have {size} bytes, but has {size - 1}; run data_prep.hidden_states"
    with pytest.raises(ValueError, match=message):
        verify(store, show_progress=False)
    with pytest.raises(ValueError, match=message):
        store.document(4)
    with pytest.raises(ValueError, match=message):
        open_store(tmp_path, IDENTITY)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_store(tmp_path)
    path = tmp_path / "shard_00003.safetensors"
    path.unlink()
    message = rf"{path}: shard 3 must exist, but does not; run data_prep.hidden_states"
    with pytest.raises(FileNotFoundError, match=message):
        open_store(tmp_path, IDENTITY)
    with pytest.raises(ValueError, match=message):
        verify(HiddenStore.open(tmp_path), show_progress=False)


def test_every_damaged_shard_is_found_at_once(tmp_path: Path) -> None:
    make_store(tmp_path)
    flip_bit(tmp_path / "shard_00000.safetensors", -1)
    (tmp_path / "shard_00002.safetensors").unlink()
    found = find_damage(HiddenStore.open(tmp_path), show_progress=False)
    assert sorted(found) == [0, 2]
    assert "the sha256 of shard 0" in found[0] and "shard 2 must exist" in found[2]


def positions_of(path: Path) -> dict[str, int]:
    """Where each tensor of a shard ends, less one byte."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(header))
    return {
        name: 8 + header + entry["data_offsets"][1] - 1 for name, entry in entries.items() if name != "__metadata__"
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8_aux"])
def test_a_flipped_bit_anywhere_is_named_before_it_is_given_to_anybody(tmp_path: Path, dtype: str) -> None:
    make_store(tmp_path, dataclasses.replace(IDENTITY, capture_layers=(0, 2), dtype=dtype))
    path = tmp_path / "shard_00002.safetensors"
    positions = positions_of(path)
    on_opening = {"length": 3, "header": 200}
    on_opening |= {
        name: positions.pop(name) for name in sorted(positions) if name.startswith("document_") or name == "loss_mask"
    }
    assert len(on_opening) == 6 and {"hidden_states", "aux_hidden_states", "input_ids"} <= set(positions)
    assert ("aux_hidden_states_scales" in positions) == (dtype != "bfloat16")
    assert ("hidden_states_scales" in positions) == (dtype == "fp8")
    for position in on_opening.values():
        flip_bit(path, position)
        with pytest.raises(
            ValueError,
            match=rf"{path}: the checksum of header, tables and loss mask of shard 2 must be [0-9a-f]{{32}}, but",
        ):
            _ = HiddenStore.open(tmp_path).document_lengths
        flip_bit(path, position)
    for position in positions.values():  # the last byte of each: of the last document of the shard, number 7
        flip_bit(path, position)
        store = HiddenStore.open(tmp_path)
        assert store.document_lengths.tolist() == LENGTHS.tolist() and store.document(6) and store.document(8)
        message = (
            rf"{path}: the checksum of document 107 of documents.jsonl must be [0-9a-f]{{32}}, but is .*delete the "
            r"shard's file and run .*"
        )
        with pytest.raises(ValueError, match=message + "verify=true"):
            store.document(7)
        flip_bit(path, position)
    assert HiddenStore.open(tmp_path).document(7)


def test_opening_reads_no_states(tmp_path: Path) -> None:
    """Training of terabytes starts within a minute: bytes that opening does not read may be anything."""
    make_store(tmp_path)
    path = tmp_path / "shard_00001.safetensors"
    positions = positions_of(path)
    for position in range(positions["input_ids"] + 1, positions["hidden_states"] + 1):
        flip_bit(path, position)
    store = open_store(tmp_path, IDENTITY)
    assert (
        store.document_lengths.tolist() == LENGTHS.tolist()
        and len(list(store.loss_masks())) == 4
        and len(store.document_ids) == 9
    )
    assert store.mapped_document(4).document_id == 104
    with pytest.raises(ValueError, match="the checksum of document 104"):
        store.document(4)


def target_with(**change: str) -> StoreIdentity:
    return dataclasses.replace(IDENTITY, target=dataclasses.replace(TARGET, **change))


OTHERS = {
    "the hash of the target's config": target_with(config_sha256="x"),
    "the hash of the target's weights": target_with(weights_sha256="x"),
    "the hash of the tokenizer": target_with(tokenizer_sha256="x"),
    "the hash of the chat template": target_with(chat_template_sha256="x"),
    "the list of captured layers": dataclasses.replace(IDENTITY, capture_layers=(1,)),
    r"the compute dtype \(hidden_states.dtype\)": dataclasses.replace(IDENTITY, compute_dtype="x"),
    r"the hash of the prompts \(train.safetensors\)": dataclasses.replace(IDENTITY, prompts_sha256="x"),
    "the kind of hidden states": dataclasses.replace(IDENTITY, hidden_states="x"),
    r"the stored dtype \(hidden_states.store_dtype\)": dataclasses.replace(IDENTITY, dtype="x"),
    r"the backend \(hidden_states.backend\)": dataclasses.replace(IDENTITY, backend="x"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_states_of_something_else_are_refused_with_the_reason(tmp_path: Path, what: str) -> None:
    value = "\\(1,\\)" if "layers" in what else "x"
    message = (
        rf"json: {what} must be {value}, but is [^;]+ \(target expected: .*delete .* run data_prep.hidden_states again"
    )
    begin_store(tmp_path / "unfinished", IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    with pytest.raises(ValueError, match="plan." + message):
        begin_store(tmp_path / "unfinished", OTHERS[what], SHARD_TOKENS, EVERY_SHARD)
    make_store(tmp_path / "finished")
    with pytest.raises(ValueError, match="manifest." + message):
        begin_store(tmp_path / "finished", OTHERS[what], SHARD_TOKENS, EVERY_SHARD)
    with pytest.raises(ValueError, match="manifest." + message):
        open_store(tmp_path / "finished", OTHERS[what])


def test_every_difference_is_named_at_once(tmp_path: Path) -> None:
    make_store(tmp_path)
    other = dataclasses.replace(target_with(weights_sha256="x", path="models/tuned"), prompts_sha256="y")
    with pytest.raises(
        ValueError, match=r"weights must be x, .* must be y, .*expected: models/tuned, found: models/llama"
    ):
        open_store(tmp_path, other)


def test_every_field_of_an_identity_is_compared() -> None:
    fields = {field.name for field in dataclasses.fields(StoreIdentity)} - {"target"}
    hashes = {field.name for field in dataclasses.fields(TargetIdentity)} - {"path", "revision"}
    assert len(IDENTITY.facts()) == len(OTHERS) == len(fields | hashes)


def test_the_same_target_under_another_path_is_accepted(tmp_path: Path) -> None:
    make_store(tmp_path)
    assert open_store(tmp_path, target_with(path="/elsewhere", revision="main")).num_documents == len(LENGTHS)


def test_another_shard_size_is_refused_for_writing(tmp_path: Path) -> None:
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    with pytest.raises(ValueError, match=r"hidden_states.shard_tokens must be 21, but is 20"):
        begin_store(tmp_path, IDENTITY, 21, EVERY_SHARD)


def test_an_unfinished_store_is_refused_for_reading(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"manifest.json: must exist, but it does not; run data_prep.hidden_states"
    ):
        HiddenStore.open(tmp_path)
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    write_shard(tmp_path, 0, make_shard(0, range(0, 3)))
    with pytest.raises(
        FileNotFoundError, match=r"manifest.json: must exist, but the extraction is unfinished; run data_prep"
    ):
        open_store(tmp_path, IDENTITY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": 2, "shards": [', "must be JSON, but is not"),
        ('{"schema_version": 1}', "the schema version must be 2, but is 1"),
        ('{"schema_version": 2, "shards": []}', "must have exactly the fields of a manifest, but does not .'identity'"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(
        ValueError, match=rf"manifest.json: {message}.*; delete {tmp_path} and run data_prep.hidden_states again"
    ):
        HiddenStore.open(tmp_path)


def test_only_shards_with_a_record_and_their_full_length_are_trusted(tmp_path: Path) -> None:
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    for index, documents in enumerate(shard_ranges(LENGTHS, SHARD_TOKENS)[:3]):
        write_shard(tmp_path, index, make_shard(index, documents))
    os.truncate(tmp_path / "shard_00000.safetensors", 100)
    (tmp_path / "shard_00001.json").unlink()  # killed between shard and record
    (tmp_path / "shard_00003.safetensors.77.tmp").write_bytes(b"half")
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    assert [has_shard(tmp_path, index) for index in range(4)] == [False, False, True, False]
    assert sorted(read_all(tmp_path)) == ["plan.json", "shard_00002.json", "shard_00002.safetensors"]


def test_resuming_reads_no_byte_of_a_finished_shard(tmp_path: Path) -> None:
    """It trusts the record, which was written after the bytes were on the disk: hashing terabytes took half an hour."""
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    for index, documents in enumerate(shard_ranges(LENGTHS, SHARD_TOKENS)[:3]):
        write_shard(tmp_path, index, make_shard(index, documents))
        path = tmp_path / f"shard_{index:05d}.safetensors"
        path.write_bytes(bytes(path.stat().st_size))
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    assert [has_shard(tmp_path, index) for index in range(4)] == [True, True, True, False]


def test_a_kill_before_the_rename_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path, 0, make_shard(0, range(0, 3)))
    assert not (tmp_path / "shard_00000.safetensors").exists()
    assert not has_shard(tmp_path, 0)


def test_a_kill_right_after_the_manifest_leaves_a_finished_store(tmp_path: Path) -> None:
    make_store(tmp_path)
    expected = read_all(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "shard_00000.json").write_text("{}")
    assert begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD) == HiddenStore.open(tmp_path).manifest
    assert read_all(tmp_path) == expected


def test_a_finished_store_that_lost_a_shard_is_completed_to_the_same_bytes(tmp_path: Path) -> None:
    shards = make_store(tmp_path)
    expected = read_all(tmp_path)
    (tmp_path / "shard_00001.safetensors").unlink()
    assert begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD) is None
    assert not (tmp_path / "manifest.json").exists()
    assert [has_shard(tmp_path, index) for index in range(4)] == [True, False, True, True]
    write_shard(tmp_path, 1, shards[1])
    finish_store(tmp_path, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4)
    assert read_all(tmp_path) == expected


@pytest.mark.parametrize("capture_layers", [(), (0, 2)])
def test_eight_bits_come_back_as_values_and_scales_of_each_token_and_layer(
    tmp_path: Path, capture_layers: tuple[int, ...]
) -> None:
    shards = make_store(tmp_path, dataclasses.replace(IDENTITY, capture_layers=capture_layers, dtype="fp8"))
    store = HiddenStore.open(tmp_path)
    ends = np.cumsum(LENGTHS)
    for index, (start, end) in enumerate(zip(ends - LENGTHS, ends, strict=True)):
        document = store.document(index)
        for name in ("hidden_states", "aux_hidden_states")[: 1 + bool(capture_layers)]:
            written = torch.cat([shard[name] for shard in shards])[start:end]
            values, scales = getattr(document, name), getattr(document, f"{name}_scales")
            assert values.dtype is torch.float8_e4m3fn and scales.shape == written.shape[:-1]
            assert all(
                torch.equal(found.float(), expected.float())
                for found, expected in zip((values, scales), encode(written), strict=True)
            )


def test_the_last_layer_alone_stays_exact_where_captured_ones_are_in_eight_bits(tmp_path: Path) -> None:
    shards = make_store(tmp_path, dataclasses.replace(IDENTITY, capture_layers=(0, 2), dtype="fp8_aux"))
    store = HiddenStore.open(tmp_path)
    for shard, first in zip(shards, (0, 3, 5, 8), strict=True):
        document, rows = store.document(first), slice(0, LENGTHS[first])
        assert (
            torch.equal(document.hidden_states, shard["hidden_states"][rows]) and document.hidden_states_scales is None
        )
        values, scales = encode(shard["aux_hidden_states"][rows])
        assert document.aux_hidden_states is not None and document.aux_hidden_states_scales is not None
        assert torch.equal(document.aux_hidden_states.float(), values.float())
        assert torch.equal(document.aux_hidden_states_scales, scales)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", 3 * 2 * HIDDEN_SIZE),
        ("fp8", 3 * (HIDDEN_SIZE + 4)),
        ("fp8_aux", 2 * HIDDEN_SIZE + 2 * (HIDDEN_SIZE + 4)),
    ],
)
def test_a_token_costs_what_bytes_per_token_says_and_little_more(tmp_path: Path, dtype: str, expected: int) -> None:
    expected += 4 + 1
    assert bytes_per_token(HIDDEN_SIZE, 2, StoreDtype(dtype)) == expected
    make_store(tmp_path, dataclasses.replace(IDENTITY, capture_layers=(0, 2), dtype=dtype))
    for record in HiddenStore.open(tmp_path).manifest.shards:
        rest = record.num_bytes - record.num_tokens * expected - 8 * (4 * record.num_documents + 1)
        assert 0 < rest < 900, "the header"


def test_parts_share_the_shards_and_the_last_one_finishes_the_store(tmp_path: Path) -> None:
    shards = make_store(tmp_path / "whole")
    directory = tmp_path / "parts"
    for part in range(2):
        assert begin_store(directory, IDENTITY, SHARD_TOKENS, range(part, 4, 2)) is None
    write_shard(directory, 1, shards[1])
    (directory / "shard_00003.safetensors.77.tmp").write_bytes(b"being written")
    begin_store(directory, IDENTITY, SHARD_TOKENS, range(0, 4, 2))
    assert (directory / "shard_00003.safetensors.77.tmp").exists(), "another part is at work on it"
    (directory / "shard_00003.safetensors.77.tmp").unlink()
    for index in (0, 2):
        write_shard(directory, index, shards[index])
    assert finish_store(directory, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is None
    assert [has_shard(directory, index) for index in range(4)] == [True, True, True, False]
    write_shard(directory, 3, shards[3])
    manifest = finish_store(directory, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4)
    assert manifest == finish_store(directory, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4), "parts may end together"
    assert read_all(directory) == read_all(tmp_path / "whole")


def test_a_part_that_begins_while_another_finishes_keeps_what_is_there(tmp_path: Path) -> None:
    """The records that it would read are gone then."""
    make_store(tmp_path / "whole")
    shards = make_store(tmp_path / "parts")
    (tmp_path / "parts" / "shard_00000.safetensors").unlink()
    assert begin_store(tmp_path / "parts", IDENTITY, SHARD_TOKENS, range(0, 4, 2)) is None
    write_shard(tmp_path / "parts", 0, shards[0])
    assert begin_store(tmp_path / "parts", IDENTITY, SHARD_TOKENS, range(1, 4, 2)) is None
    assert finish_store(tmp_path / "parts", IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is not None
    assert has_shard(tmp_path / "parts", 1) and has_shard(tmp_path / "parts", 3), "by the manifest"
    write_shard(tmp_path / "parts", 3, shards[3])
    assert finish_store(tmp_path / "parts", IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is not None
    assert read_all(tmp_path / "parts") == read_all(tmp_path / "whole")


def test_no_part_finishes_over_a_shard_that_another_must_write_again(tmp_path: Path) -> None:
    shards = make_store(tmp_path)
    (tmp_path / "shard_00001.safetensors").unlink()
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, range(0, 4, 2))
    assert finish_store(tmp_path, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is None
    write_shard(tmp_path, 1, shards[1])
    (tmp_path / "shard_00003.safetensors").unlink()  # lost after its record was written
    assert finish_store(tmp_path, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4) is None
    write_shard(tmp_path, 3, shards[3])
    manifest = finish_store(tmp_path, IDENTITY, SHARD_TOKENS, HIDDEN_SIZE, 4)
    assert manifest is not None
    verify(HiddenStore(tmp_path, manifest), show_progress=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("name", ["hidden_states", "aux_hidden_states"])
def test_states_that_are_not_finite_stop_the_run_with_their_document(
    tmp_path: Path, name: str, dtype: str, value: float
) -> None:
    tensors = make_shard(0, range(0, 3), num_captured=2)
    tensors[name][LENGTHS[0] + 1, ..., 3] = value
    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    with pytest.raises(
        ValueError, match=r"shard_00000.safetensors: hidden states must be finite, but those of document 101 of"
    ):
        write_shard(tmp_path, 0, tensors, dtype)


def test_a_shard_without_room_is_discarded_before_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    begin_store(tmp_path, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path, 0, make_shard(0, range(0, 3)))
    assert sorted(read_all(tmp_path)) == ["plan.json"]


def test_the_manifest_says_what_the_states_are(tmp_path: Path) -> None:
    make_store(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["schema_version"] == 2
    assert manifest["identity"]["hidden_states"] == "before_final_norm"
    assert manifest["identity"]["dtype"] == "bfloat16"
    assert manifest["identity"]["backend"] == "transformers"
    assert manifest["identity"]["target"] == dataclasses.asdict(TARGET)
    assert manifest["hidden_size"] == HIDDEN_SIZE
    assert manifest["shards"][1]["num_documents"] == 2
    assert manifest["shards"][1]["num_tokens"] == 31
    assert manifest["shards"][1]["num_bytes"] == (tmp_path / "shard_00001.safetensors").stat().st_size


def test_the_hash_of_the_prompts_is_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    path.write_bytes(b"abc")
    identity = StoreIdentity.of(TARGET, (1, 2), "float32", path)
    # sha256 of "abc", FIPS 180-4
    assert identity.prompts_sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert identity.capture_layers == (1, 2)


def test_a_million_tokens_cost_little_memory_beside_the_page_cache_and_little_disk_beside_the_states(
    tmp_path: Path,
) -> None:
    """A process of its own opens the store and asks for all that training wants at once."""
    length, hidden_size, num_shards, num_documents = 500, 64, 4, 2000
    begin_store(tmp_path, IDENTITY, 1, range(num_shards))
    for index in range(num_shards):
        documents = num_documents // num_shards
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
    program = f"""
from pathlib import Path
from mtptrain.hidden_states.store import HiddenStore
def anonymous():
    return int(next(x for x in Path("/proc/self/status").read_text().splitlines() if
    x.startswith("RssAnon")).split()[1]) / 1000
before = anonymous()
store = HiddenStore.open(Path({str(tmp_path)!r}))
documents = [store.document(i) for i in range(store.num_documents)]
assert store.document_lengths.sum() == sum(mask.sum() for mask, _ in store.loss_masks()) == 1_000_000
assert sum(float(document.hidden_states.sum()) for document in documents) == 0.0
print(anonymous() - before)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert float(output) < 100, "megabytes"
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("shard_*"))
    assert on_disk / 1_000_000 < 2 * hidden_size * 1.01 + 8


def test_a_shard_that_training_deletes_while_it_is_looked_at_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {
        "file": "shard_00000.safetensors",
        "num_documents": 1,
        "num_tokens": 1,
        "num_supervised_tokens": 1,
        "num_bytes": 9,
    }
    content = json.dumps({**record, "sha256": "", "index_bytes": 1, "index_checksum": ""})
    (tmp_path / "shard_00000.json").write_text(content)
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as it did a moment ago
    assert read_record(tmp_path, 0) is None
