"""Tests stage 2 on a tiny target: states equal those of transformers, and interruptions leave no trace."""

import errno
import os
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep import hidden_states
from data_prep.extraction import Extraction, prepare_extraction
from data_prep.hidden_states import extract_hidden_states, scratch_bytes
from mtptrain.config import PipelineConfig
from mtptrain.data.identity import TokenizerIdentity
from mtptrain.data.prompt_files import SCHEMA_VERSION, Documents, PromptsManifest
from mtptrain.heads import HEADS
from mtptrain.hidden_states.extraction import fill
from mtptrain.hidden_states.extraction.fill import Streams
from mtptrain.hidden_states.extraction.transformers_streams import TransformersStreams, residual_streams
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES
from mtptrain.hidden_states.store import HiddenStore, verify
from mtptrain.hidden_states.stream import missing_open_shards
from mtptrain.hidden_states.writer import has_shard
from mtptrain.target.hub import load_tokenizer
from mtptrain.target.model import load_target
from mtptrain.utils.distributed import Ranks, free_port, init_ranks
from tests.conftest import GENERATION_TEMPLATE, make_target, program_command, run_program
from tests.programs import FORKED, ranks_environment

ROOT = Path(__file__).parents[2]
ONE_RANK = Ranks(rank=0, world_size=1, local_rank=0)
CPU = torch.device("cpu")
LENGTHS = [5, 40, 17, 40, 1, 40, 17, 64, 3, 40]

ConfigFor = Callable[..., PipelineConfig]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores the number of threads, which extraction changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_documents(lengths: list[int], seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    return Documents.from_list(
        [(100 + i, rng.integers(0, 256, n).tolist(), rng.integers(0, 2, n).tolist()) for i, n in enumerate(lengths)]
    )


def write_prompts(run_dir: Path, target_dir: Path, documents: Documents) -> None:
    """Writes prompts as data_prep.prompts does."""
    directory = run_dir / "prompts"
    directory.mkdir(parents=True, exist_ok=True)
    documents.save(directory / "train.safetensors")
    PromptsManifest(
        schema_version=SCHEMA_VERSION,
        tokenizer=TokenizerIdentity.of(load_tokenizer(target_dir)),
        vocab_size=260,
        max_document_tokens=512,
        train_documents=len(documents),
        train_tokens=len(documents.input_ids),
        validation_documents=0,
        validation_tokens=0,
    ).write(directory)


@pytest.fixture
def prepared(config_for: ConfigFor, tiny_target: Path) -> ConfigFor:
    """Compose a config of a run with finished prompts."""

    def build(*overrides: str, lengths: list[int] = LENGTHS) -> PipelineConfig:
        config = config_for("hidden_states.shard_tokens=60", *overrides)
        write_prompts(Path(config.run_dir), tiny_target, make_documents(lengths))
        return config

    return build


def read_store(directory: Path) -> dict[str, bytes]:
    """Returns every file except the two that record how the program was called."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.name not in ("config.yaml", "provenance.json")
    }


@pytest.mark.parametrize("capture_layers", [(), (2, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_states_of_each_document_are_those_of_its_own_forward(
    prepared: ConfigFor, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, capture_layers: tuple[int, ...]
) -> None:
    monkeypatch.setattr(HEADS["mtp"], "layers_to_capture", lambda *_: capture_layers)
    config = prepared(f"hidden_states.dtype={dtype}")
    extract_hidden_states(config, ONE_RANK)

    store = HiddenStore.open(config.stage_dir("hidden_states"))
    verify(store)
    documents = make_documents(LENGTHS)
    assert store.document_lengths.tolist() == LENGTHS
    assert len(store.manifest.shards) > 2
    target = TransformersStreams(load_target(tiny_target, getattr(torch, dtype), CPU), (), 1).target
    for index in range(len(documents)):
        stored = store.document(index)
        assert stored.document_id == 100 + index
        assert stored.input_ids.tolist() == documents.tokens(index).tolist()
        assert stored.loss_mask.tolist() == documents.mask(index).tolist()
        streams = residual_streams(target, [stored.input_ids], (*capture_layers, 2)).float()
        # A batch of several documents differs from a batch of one only by rounding, by at most one unit of bf16.
        torch.testing.assert_close(stored.hidden_states.float(), streams[:, -1], rtol=2**-7, atol=2**-7)
        if capture_layers:
            assert stored.aux_hidden_states is not None
            torch.testing.assert_close(stored.aux_hidden_states.float(), streams[:, :-1], rtol=2**-7, atol=2**-7)


def test_the_size_of_a_batch_changes_states_only_by_rounding(prepared: ConfigFor) -> None:
    stores = []
    for batch_tokens in (1, 100_000):
        config = prepared(f"hidden_states.batch_tokens={batch_tokens}")
        extract_hidden_states(config, ONE_RANK)
        directory = config.stage_dir("hidden_states").rename(Path(config.run_dir) / f"batch_{batch_tokens}")
        stores.append(HiddenStore.open(directory))
    for index in range(len(LENGTHS)):
        single, batched = (store.document(index).hidden_states.float() for store in stores)
        torch.testing.assert_close(single, batched, rtol=2**-7, atol=2**-7)


def test_the_number_of_threads_that_a_process_starts_with_changes_no_bit(prepared: ConfigFor, tmp_path: Path) -> None:
    # Sizes at which bf16 products with one and with four threads differ.
    target_dir = make_target(
        tmp_path / "wide", hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4
    )
    found = []
    for threads in (1, 4):
        config = prepared(f"target.path={target_dir}", lengths=[64, 100, 100, 200, 333])
        torch.set_num_threads(threads)
        extract_hidden_states(config, ONE_RANK)
        found.append(read_store(config.stage_dir("hidden_states")))
        shutil.rmtree(config.stage_dir("hidden_states"))
    assert found[0] == found[1]


def overrides_of(config: PipelineConfig) -> list[str]:
    shard_tokens = config.hidden_states.shard_tokens
    return [
        f"run_dir={config.run_dir}",
        f"target.path={config.target.path}",
        f"hidden_states.shard_tokens={shard_tokens}",
    ]


def extract(config: PipelineConfig, num_ranks: int) -> str:
    result = run_program("data_prep.hidden_states", *overrides_of(config), num_ranks=num_ranks)
    assert result.returncode == 0, result.stderr
    return result.stdout


def children(pid: int) -> list[int]:
    """Returns the descendants of `pid`, since torchrun starts its workers in new sessions."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_program(config: PipelineConfig, num_ranks: int, after_shards: int) -> None:
    """Start the program and SIGKILL all of its processes once some shards exist."""
    command = program_command("data_prep.hidden_states", *overrides_of(config), num_ranks=num_ranks)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store_dir = config.stage_dir("hidden_states")
    deadline = time.monotonic() + 300
    while len(list(store_dir.glob("shard_*.safetensors"))) < after_shards:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.0005)
    for pid in (process.pid, *children(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert (store_dir / "plan.json").exists() and not (store_dir / "manifest.json").exists()


def test_a_killed_run_resumes_with_other_ranks_to_the_bytes_of_an_undisturbed_run(prepared: ConfigFor) -> None:
    rng = np.random.default_rng(3)
    config = prepared(lengths=rng.integers(1, 90, 400).tolist())
    store_dir = config.stage_dir("hidden_states")
    extract(config, num_ranks=1)
    undisturbed = read_store(store_dir)
    assert len(undisturbed) > 200
    shutil.rmtree(store_dir)

    kill_program(config, num_ranks=1, after_shards=int(rng.integers(1, 60)))
    kill_program(config, num_ranks=2, after_shards=int(rng.integers(80, 150)))
    trusted = {path.stem for path in store_dir.glob("shard_*.json")}
    kept = {
        path.stem: path.stat().st_mtime_ns for path in store_dir.glob("shard_*.safetensors") if path.stem in trusted
    }
    output = extract(config, num_ranks=2)
    assert read_store(store_dir) == undisturbed
    assert len(kept) > 79
    assert {name: (store_dir / f"{name}.safetensors").stat().st_mtime_ns for name in kept} == kept
    assert "computed now" in output

    assert "is finished already: 400 documents" in extract(config, num_ranks=2)
    assert read_store(store_dir) == undisturbed


def work(config: PipelineConfig, rank: int, num_ranks: int, port: int) -> None:
    """Run the stage as one rank of torchrun does."""
    os.environ.update(ranks_environment(rank, num_ranks, port))
    extract_hidden_states(config, init_ranks())


def start_ranks(config: PipelineConfig, num_ranks: int) -> list[BaseProcess]:
    """Start the stage in separate processes, which can be watched and killed."""
    port = free_port()
    processes = [FORKED.Process(target=work, args=(config, rank, num_ranks, port)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    return processes


def end_ranks(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(timeout=120)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("store_dtype", ["bfloat16", "fp8"])
def test_runs_killed_at_ten_random_moments_with_changing_ranks_leave_an_undisturbed_store(
    prepared: ConfigFor, store_dtype: str
) -> None:
    rng = np.random.default_rng(7)
    config = prepared(f"hidden_states.store_dtype={store_dtype}", lengths=rng.integers(1, 200, 300).tolist())
    store_dir = config.stage_dir("hidden_states")
    assert end_ranks(start_ranks(config, 1)) == [0]
    undisturbed = read_store(store_dir)
    shutil.rmtree(store_dir)

    def count_shards() -> int:
        return len(list(store_dir.glob("shard_*.safetensors")))

    most_at_once = len(undisturbed) // 15
    for _ in range(10):
        wanted = count_shards() + int(rng.integers(0, most_at_once))
        processes = start_ranks(config, int(rng.integers(1, 4)))
        deadline = time.monotonic() + 120
        while count_shards() < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(float(rng.uniform(0, 0.03)))
        for process in processes:
            process.kill()
        end_ranks(processes)
        assert not (store_dir / "manifest.json").exists(), "it was finished before it was killed"
    assert 10 < count_shards() < len(undisturbed) - 1
    assert end_ranks(start_ranks(config, 2)) == [0, 0]
    assert read_store(store_dir) == undisturbed


def test_parts_run_concurrently_and_the_last_one_finishes_the_store(prepared: ConfigFor) -> None:
    rng = np.random.default_rng(5)
    config = prepared(lengths=rng.integers(1, 90, 60).tolist())
    store_dir = config.stage_dir("hidden_states")
    extract_hidden_states(config, ONE_RANK)
    undisturbed = read_store(store_dir)
    shutil.rmtree(store_dir)
    parts = []
    for part in range(3):
        settings = replace(config.hidden_states, part=part, num_parts=3)
        parts += start_ranks(replace(config, hidden_states=settings), 1)
    assert end_ranks(parts) == [0, 0, 0]
    assert read_store(store_dir) == undisturbed


def test_a_part_that_ends_names_the_parts_that_are_unfinished(
    prepared: ConfigFor, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared(lengths=[50] * 60)
    settings = replace(config.hidden_states, part=0, num_parts=3)
    extract_hidden_states(replace(config, hidden_states=settings), ONE_RANK)
    printed = capsys.readouterr().out
    assert "unfinished parts   1, 2; to rerun a failed one, set hidden_states.part=N and the same num_parts" in printed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a separate file system of one megabyte."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", directory], check=True)


def test_a_disk_that_fills_up_stops_the_run_and_after_space_is_made_it_resumes(
    prepared: ConfigFor, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepared(lengths=[50] * 60)
    extract_hidden_states(config, ONE_RANK)
    undisturbed = read_store(config.stage_dir("hidden_states"))
    config.stage_dir("hidden_states").rename(Path(config.run_dir) / "undisturbed")
    (Path(config.run_dir) / "hidden_states").symlink_to(small_disk, target_is_directory=True)

    store_dir, tokens_of_shard = config.stage_dir("hidden_states"), fill.tokens_of_shard

    def fill_the_disk_first(*args: Any) -> Any:
        """Fills the disk after some shards."""
        theirs = small_disk / "of_somebody_else"
        if (
            len(list(store_dir.glob("shard_*.safetensors"))) >= 5 and not theirs.exists()
        ):  # others are written meanwhile
            with theirs.open("wb") as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        return tokens_of_shard(*args)

    monkeypatch.setattr(fill, "tokens_of_shard", fill_the_disk_first)
    message = (
        r"must have room for 0\.000 GB of hidden states from this process, but is full; finished shards are kept: free "
        r"some space and run"
    )
    with pytest.raises(OSError, match=message) as raised:
        extract_hidden_states(config, ONE_RANK)
    assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(store_dir)
    assert not list(store_dir.glob("*.tmp"))
    shards = sorted(
        store_dir.glob("shard_*.safetensors")
    )  # the last may lack its record, for which there was no room either
    kept = {path.name: path.stat().st_mtime_ns for index, path in enumerate(shards) if has_shard(store_dir, index)}
    assert len(kept) >= 5

    monkeypatch.undo()
    (small_disk / "of_somebody_else").unlink()
    extract_hidden_states(config, ONE_RANK)
    assert read_store(store_dir) == undisturbed
    assert {name: (store_dir / name).stat().st_mtime_ns for name in kept} == kept


def test_a_finished_store_is_not_computed_again(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared()
    extract_hidden_states(config, ONE_RANK)
    assert "supervised tokens" in capsys.readouterr().out
    monkeypatch.delattr(hidden_states, "load_target")
    extract_hidden_states(config, ONE_RANK)
    assert "is finished already: 10 documents, 267 tokens" in capsys.readouterr().out


def test_a_damaged_shard_is_computed_again_after_it_was_deleted(prepared: ConfigFor) -> None:
    config = prepared()
    extract_hidden_states(config, ONE_RANK)
    store_dir = config.stage_dir("hidden_states")
    expected = read_store(store_dir)
    (store_dir / "shard_00001.safetensors").unlink()
    extract_hidden_states(config, ONE_RANK)
    assert read_store(store_dir) == expected


def verify_by_program(config: PipelineConfig, num_ranks: int) -> subprocess.CompletedProcess[str]:
    return run_program("data_prep.hidden_states", *overrides_of(config), "verify=true", num_ranks=num_ranks)


def test_the_full_check_names_every_damaged_shard_and_computes_nothing(prepared: ConfigFor) -> None:
    config = prepared()
    assert "must exist, but it does not" in verify_by_program(config, 1).stderr
    extract_hidden_states(config, ONE_RANK)
    store_dir = config.stage_dir("hidden_states")
    whole = verify_by_program(config, 2)
    assert whole.returncode == 0 and "damaged" in whole.stdout and "documents" in whole.stdout
    for name in ("shard_00000", "shard_00003"):
        path = store_dir / f"{name}.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    before = read_store(store_dir)
    damaged = verify_by_program(config, 2)
    assert damaged.returncode != 0 and read_store(store_dir) == before
    for index in (0, 3):
        assert f"shard_0000{index}.safetensors: the sha256 of shard {index} must be" in damaged.stderr
    assert "the sha256 of shard 1 must" not in damaged.stderr


def test_eight_bits_for_captured_layers_alone_need_captured_layers(prepared: ConfigFor) -> None:
    config = prepared("hidden_states.store_dtype=fp8_aux")
    with pytest.raises(
        ValueError, match="store_dtype: must be bfloat16 or fp8 for a head that captures no layers, but is fp8_aux"
    ):
        extract_hidden_states(config, ONE_RANK)


def test_the_stage_records_its_config_and_where_it_came_from(prepared: ConfigFor) -> None:
    config = prepared()
    extract_hidden_states(config, ONE_RANK)
    assert (config.stage_dir("hidden_states") / "config.yaml").exists()
    assert (config.stage_dir("hidden_states") / "provenance.json").exists()


@pytest.mark.parametrize("finished", [False, True])
def test_states_of_another_target_are_refused(
    prepared: ConfigFor, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    config = prepared()
    with monkeypatch.context() as patch:
        if not finished:
            patch.setattr(hidden_states, "finish_store", interrupt)
        try:
            extract_hidden_states(config, ONE_RANK)
        except KeyboardInterrupt:
            assert not finished
    config.target.path = str(make_target(tmp_path / "tuned", seed=1))
    before = read_store(config.stage_dir("hidden_states"))
    with pytest.raises(
        ValueError, match=r"the hash of the target's weights must be .*, but is .*delete .*hidden_states"
    ):
        extract_hidden_states(config, ONE_RANK)
    assert read_store(config.stage_dir("hidden_states")) == before


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_states_of_other_prompts_layers_or_dtype_are_refused(
    prepared: ConfigFor, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepared()
    extract_hidden_states(config, ONE_RANK)
    with pytest.raises(ValueError, match=r"the compute dtype \(hidden_states.dtype\) must be float32, but is bfloat16"):
        extract_hidden_states(prepared("hidden_states.dtype=float32"), ONE_RANK)
    with pytest.raises(ValueError, match=r"hidden_states.shard_tokens must be 61, but is 60"):
        extract_hidden_states(prepared("hidden_states.shard_tokens=61"), ONE_RANK)
    with monkeypatch.context() as patch:
        patch.setattr(HEADS["mtp"], "layers_to_capture", lambda *_: (1,))
        with pytest.raises(ValueError, match=r"the list of captured layers must be \(1,\), but is \(\)"):
            extract_hidden_states(config, ONE_RANK)
    write_prompts(Path(config.run_dir), tiny_target, make_documents(LENGTHS, seed=1))
    with pytest.raises(ValueError, match=r"the hash of the prompts \(train.safetensors\) must be"):
        extract_hidden_states(config, ONE_RANK)


@pytest.mark.parametrize(
    ("name", "chat_template"), [("chat_template_sha256", "{{ messages }}"), ("tokenizer_sha256", GENERATION_TEMPLATE)]
)
def test_prompts_of_another_tokenizer_or_template_are_refused(
    prepared: ConfigFor, tmp_path: Path, name: str, chat_template: str
) -> None:
    config = prepared()
    other = make_target(tmp_path / "other", chat_template=chat_template)
    if name == "tokenizer_sha256":
        tokenizer = load_tokenizer(other)
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(other)
    config.target.path = str(other)
    with pytest.raises(
        ValueError, match=rf"prompts/manifest.json: {name} must be .*, as for target {other}, but is .*; run data_prep"
    ):
        extract_hidden_states(config, ONE_RANK)


def test_a_disk_that_is_too_small_stops_before_anything_is_computed(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared()
    usage = namedtuple("usage", "total used free")
    needed = 267 * (2 * 64 + 5) + 10 * DOCUMENT_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - needed + 1, needed - 1))
    with pytest.raises(
        ValueError,
        match=r"hidden_states: 0.000 GB must be free for the hidden states, but 0.000 GB are; free space, "
        r".*store_dtype=fp8",
    ):
        extract_hidden_states(config, ONE_RANK)
    assert "267 tokens x 133 bytes" in capsys.readouterr().out
    assert [path.name for path in config.stage_dir("hidden_states").iterdir()] == ["plan.json"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - needed, needed))
    extract_hidden_states(config, ONE_RANK)


def test_the_temporary_files_of_vllm_must_fit_too(prepared: ConfigFor) -> None:
    config = prepared("hidden_states.backend=vllm", "hidden_states.dtype=float32")
    by_transformers = replace(prepare_extraction(prepared()), shards=[range(0, 3), range(3, 10)], capture_layers=(1, 2))
    extraction = replace(by_transformers, config=config)
    two_ranks = Ranks(rank=0, world_size=2, local_rank=0)
    assert extraction.target_config.hidden_size == 64
    assert scratch_bytes(extraction, two_ranks) == 2 * 2 * (267 - 62) * 64 * 3 * 4
    config.hidden_states.scratch_dir = "/dev/shm"
    assert scratch_bytes(extraction, two_ranks) == 0
    assert scratch_bytes(by_transformers, two_ranks) == 0


def test_finished_shards_need_no_free_disk(prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch) -> None:
    config = prepared()
    extract_hidden_states(config, ONE_RANK)
    (config.stage_dir("hidden_states") / "shard_00000.safetensors").unlink()
    usage = namedtuple("usage", "total used free")
    one_shard = (5 + 40 + 17) * 133 + 3 * DOCUMENT_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - one_shard, one_shard))
    extract_hidden_states(config, ONE_RANK)


def test_streamed_shards_on_the_disk_make_room_for_later_ones(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarting extraction needs no more space when the disk is full and holds all open windows."""
    config = prepared("train.stream=true", "train.stream_shards=1", "train.epochs=1", lengths=[40] * 20)
    store_dir = config.stage_dir("hidden_states")

    def write_open_windows(extraction: Extraction, streams: Streams, ranks: Ranks) -> None:
        missing = missing_open_shards(store_dir, extraction.windows)
        assert missing is not None
        hidden_states.fill(extraction, streams, missing, ranks)

    monkeypatch.setattr("data_prep.hidden_states.follow_training", write_open_windows)
    extract_hidden_states(config, ONE_RANK)
    assert len(list(store_dir.glob("shard_*.safetensors"))) == 3
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 0))
    extract_hidden_states(config, ONE_RANK)
    next(store_dir.glob("shard_*.safetensors")).unlink()
    with pytest.raises(ValueError, match="must be free for the hidden states"):
        extract_hidden_states(config, ONE_RANK)


def test_without_stage_1_the_program_to_run_is_named(config_for: ConfigFor) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"prompts/manifest.json: must exist, but does not; run data_prep.prompts"
    ):
        extract_hidden_states(config_for(), ONE_RANK)


def test_documents_beyond_the_context_of_the_target_are_refused(prepared: ConfigFor) -> None:
    message = r"at most 512 tokens, .* but the longest has 513; set prompts.max_document_tokens=512 or less"
    with pytest.raises(ValueError, match=message):
        extract_hidden_states(prepared(lengths=[5, 513]), ONE_RANK)


def test_tokens_outside_the_vocabulary_are_refused(prepared: ConfigFor, tiny_target: Path) -> None:
    config = prepared()
    write_prompts(Path(config.run_dir), tiny_target, Documents.from_list([(0, [1, 260], [1, 1])]))
    with pytest.raises(
        ValueError, match=r"token ids must be below 260, the target's vocab_size, but the largest is 260; .*data_prep"
    ):
        extract_hidden_states(config, ONE_RANK)


def test_no_documents_are_refused(prepared: ConfigFor) -> None:
    with pytest.raises(ValueError, match=r"must hold at least one document, but holds none; correct prompts.paths"):
        extract_hidden_states(prepared(lengths=[]), ONE_RANK)


def test_the_manifest_tells_target_and_counts_and_nothing_of_the_run(prepared: ConfigFor) -> None:
    config = prepared()
    extract_hidden_states(config, ONE_RANK)
    manifest = HiddenStore.open(config.stage_dir("hidden_states")).manifest
    documents = make_documents(LENGTHS)
    assert manifest.num_tokens == sum(LENGTHS)
    assert manifest.num_supervised_tokens == documents.loss_mask.sum()
    assert manifest.identity.target.path == config.target.path
    assert set(asdict(manifest)) == {
        "schema_version",
        "identity",
        "shard_tokens",
        "hidden_size",
        "num_documents",
        "num_tokens",
        "num_supervised_tokens",
        "shards",
    }
