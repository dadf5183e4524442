"""Training for real: DeepSpeed engines, gloo ranks, processes that are killed."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eval.checks.processes import kill_tree
from mtptrain.data.draft_vocab import DraftVocabManifest, offsets, write_draft_vocab, write_manifest
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.training.checkpoint import MARKER
from tests.conftest import program_command, run_program

Run = tuple[Path, tuple[str, ...]]
FP32 = "deepspeed.bf16.enabled=false"
FOUR_MICRO_BATCHES = "train.micro_batches_per_step=4"


def train(run: Run, *overrides: str, num_ranks: int = 1) -> list[dict[str, object]]:
    """Train and return the records of metrics.jsonl that hold a loss."""
    run_dir, settings = run
    result = run_program("mtptrain.train", *settings, *overrides, num_ranks=num_ranks)
    assert result.returncode == 0, result.stderr[-3000:]
    return records(run_dir)


def records(run_dir: Path) -> list[dict[str, object]]:
    """Those written whole: a running program's last line may be seen before its end is in the file."""
    path = run_dir / "train" / "metrics.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []
    return [record for record in map(json.loads, lines) if "loss" in record]


def figures(found: list[dict[str, object]]) -> list[list[float]]:
    """Every loss, loss by depth and gradient norm, step by step."""
    return [[record["loss"], *record["kl_at"], record["grad_norm"]] for record in found]  # type: ignore[misc]


@pytest.fixture(scope="module")
def one_rank(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The reference: one rank, ZeRO 0, fp32, 20 steps of two micro-batches."""
    directory = tmp_path_factory.mktemp("one_rank")
    shutil.copytree(tiny_run[0], directory / "run")
    return train((directory / "run", (f"run_dir={directory}/run", *tiny_run[1])), "deepspeed=zero0")


def test_the_loss_falls_and_every_step_is_recorded(one_rank: list[dict[str, object]]) -> None:
    losses = [record["loss"] for record in one_rank]
    assert [record["step"] for record in one_rank] == list(range(1, 21))
    assert losses[-1] < 0.8 * losses[0]  # type: ignore[operator]


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 0), (2, 1), (2, 2), (1, 1), (1, 2)])
def test_ranks_and_zero_stages_give_the_same_losses(
    one_rank: list[dict[str, object]], fresh_run: Run, num_ranks: int, stage: int
) -> None:
    found = train(fresh_run, f"deepspeed=zero{stage}", *[FP32] * (stage > 0), num_ranks=num_ranks)
    assert len(found) == 20
    for ours, reference in zip(figures(found), figures(one_rank), strict=True):
        assert ours == pytest.approx(reference, abs=1e-5, rel=1e-5)


@pytest.fixture(scope="module")
def four_batches(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """As `one_rank`, with four micro-batches in a step."""
    directory = tmp_path_factory.mktemp("four_batches")
    shutil.copytree(tiny_run[0], directory / "run")
    return train((directory / "run", (f"run_dir={directory}/run", *tiny_run[1])), "deepspeed=zero0", FOUR_MICRO_BATCHES)


@pytest.mark.parametrize("stage", [0, 2])
def test_four_ranks_give_the_same_losses(four_batches: list[dict[str, object]], fresh_run: Run, stage: int) -> None:
    found = train(fresh_run, f"deepspeed=zero{stage}", *[FP32] * (stage > 0), FOUR_MICRO_BATCHES, num_ranks=4)
    assert len(found) == 20
    for ours, reference in zip(figures(found), figures(four_batches), strict=True):
        assert ours == pytest.approx(reference, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 1)])
def test_a_killed_run_resumes_with_bit_identical_losses(
    fresh_run: Run, tmp_path: Path, num_ranks: int, stage: int
) -> None:
    settings = (f"deepspeed=zero{stage}", "train.save_every=4", "train.validate_every=10", *[FP32] * (stage > 0))
    undisturbed = train(fresh_run, *settings, num_ranks=num_ranks)
    run_dir, overrides = fresh_run
    (run_dir / "train").rename(tmp_path / "undisturbed")

    command = program_command("mtptrain.train", *overrides, *settings, num_ranks=num_ranks)
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
    while len(records(run_dir)) < 10:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    kill_tree(process.pid)
    process.wait()
    assert 10 <= len(records(run_dir)) < 20

    resumed = train(fresh_run, *settings, num_ranks=num_ranks)
    assert figures(resumed) == figures(undisturbed)
    assert (run_dir / "train/last/head.safetensors").read_bytes() == (
        tmp_path / "undisturbed/last/head.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "ranks_and_stages",
    [((2, 1), (1, 1), (4, 2)), ((1, 0), (2, 2), (1, 0))],
    ids=["2, 1, 4 ranks, ZeRO 1, 1, 2", "1, 2, 1 ranks, ZeRO 0, 2, 0"],
)
def test_a_run_goes_on_with_another_number_of_ranks_and_another_zero_stage(
    fresh_run: Run, four_batches: list[dict[str, object]], ranks_and_stages: tuple[tuple[int, int], ...]
) -> None:
    """The same documents, weights and moments: the losses are those of a run that never stopped."""
    for last_step, (num_ranks, stage) in zip((6, 12, 20), ranks_and_stages, strict=True):
        # The schedule of all 20 steps; a signal would stop as well, but not at a step of our choosing.
        settings = (f"deepspeed=zero{stage}", *[FP32] * (stage > 0), FOUR_MICRO_BATCHES, "train.save_every=6")
        command = program_command("mtptrain.train", *fresh_run[1], *settings, num_ranks=num_ranks)
        if last_step == 20:
            found = train(fresh_run, *settings, num_ranks=num_ranks)
        else:
            process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
            while not (fresh_run[0] / f"train/checkpoints/step_{last_step:08d}/complete.json").is_file():
                assert process.poll() is None, "it ended before it could be killed"
                time.sleep(0.01)
            kill_tree(process.pid)
            process.wait()
    assert len(found) == 20
    for ours, reference in zip(figures(found), figures(four_batches), strict=True):
        assert ours == pytest.approx(reference, abs=1e-5, rel=1e-5)


def test_ctrl_c_ends_with_a_line_and_the_same_command_goes_on_from_the_newest_checkpoint(
    fresh_run: Run, tmp_path: Path
) -> None:
    run_dir, overrides = fresh_run
    settings = ("deepspeed=zero0", "train.save_every=2", "train.validation_prompts=0", "train.max_steps=40")
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            program_command("mtptrain.train", *overrides, *settings), cwd=Path(__file__).parents[2], stderr=stderr
        )
    while len(records(run_dir)) < 5:
        assert process.poll() is None, "it ended before Ctrl-C"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(timeout=60) == 130
    finally:
        kill_tree(process.pid)
    errors = (tmp_path / "stderr").read_text()
    assert errors.endswith(
        f"\nstopped by Ctrl-C; its checkpoints are kept in {run_dir}/train; the same command continues from the "
        "newest\n"
    )
    assert "Traceback" not in errors
    assert 5 <= len(records(run_dir)) < 40
    assert list((run_dir / "train/checkpoints").glob("step_*/complete.json"))
    assert len(train(fresh_run, *settings)) == 40


def test_checkpoints_hold_plain_tensors_in_fp32_whatever_trains(fresh_run: Run) -> None:
    """Traps 24 and 26: no pickles, no moments in bf16; the weights are the masters."""
    train(fresh_run, "deepspeed=zero1", "train.max_steps=3")
    (folder,) = (fresh_run[0] / "train/checkpoints").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["complete.json", "state.safetensors"]
    state, head = load_file(folder / "state.safetensors"), load_file(fresh_run[0] / "train/last/head.safetensors")
    weights = {name for name in state if not name.startswith("run.") and not name.endswith((".exp_avg", ".exp_avg_sq"))}
    assert weights == set(head) and int(state["run.step"]) == 3
    for name in weights:
        assert torch.equal(state[name].bfloat16(), head[name].bfloat16()) and not torch.equal(
            state[name].bfloat16().float(), state[name]
        )
        assert {state[name + suffix].dtype for suffix in ("", ".exp_avg", ".exp_avg_sq")} == {torch.float32}
        assert state[name + ".exp_avg_sq"].min() >= 0 and state[name + ".exp_avg"].any()


def test_a_compiled_step_and_one_that_computes_again_train_as_the_plain_one(
    one_rank: list[dict[str, object]], fresh_run: Run
) -> None:
    found = train(
        fresh_run, "deepspeed=zero0", "train.compile=true", "train.activation_checkpointing=true", "train.profile=true"
    )
    for ours, reference in zip(figures(found), figures(one_rank), strict=True):
        assert ours == pytest.approx(reference, abs=1e-4, rel=1e-4)
    trace = json.loads((fresh_run[0] / "train/trace_0.json").read_text())
    assert any("_ChunkedLoss" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.parametrize("overrides", [("train.loss=lk",), ("train.loss=ce",), ("train.feature_weight=0.1",)], ids=str)
def test_every_loss_trains(fresh_run: Run, overrides: tuple[str, ...]) -> None:
    found = train(fresh_run, "deepspeed=zero0", "train.validation_prompts=0", *overrides)
    assert found[-1]["loss"] < 0.95 * found[0]["loss"]  # type: ignore[operator]
    assert found[-1]["kl_at"][0] < 0.9 * found[0]["kl_at"][0]  # type: ignore[index]


def test_records_and_the_table_say_what_the_steps_did_with_their_time(fresh_run: Run) -> None:
    result = run_program("mtptrain.train", *fresh_run[1], "deepspeed=zero0", "train.validation_prompts=0")
    (*_, last) = records(fresh_run[0])
    shares = [last[f"{name}_share"] for name in ("data_wait", "forward", "loss", "backward", "optimizer")]
    assert all(0 <= share < 1 for share in shares) and 0.5 < sum(shares) <= 1.001  # type: ignore[operator]
    assert 0 < last["mfu"] < 1.5 and last["peak_bytes"] > 1e8  # type: ignore[operator]
    assert last["supervised_tokens_per_s"] < last["tokens_per_s"]  # type: ignore[operator]
    for word in ("limited by", "MFU", "peak memory", "supervised", "data wait"):
        assert word in result.stdout
    for word in ("tok/s", "supervised/s", "data=", "mfu=", "GB="):
        assert word in result.stderr


@pytest.mark.parametrize(
    ("number", "num_ranks"),
    [(signal.SIGTERM, 1), (signal.SIGUSR1, 2)],
    ids=["SIGTERM to one rank", "SIGUSR1 to one of two ranks"],
)
def test_a_signal_ends_the_step_saves_it_and_the_next_run_goes_on_with_bit_identical_losses(
    fresh_run: Run, tmp_path: Path, number: signal.Signals, num_ranks: int
) -> None:
    settings = ("deepspeed=zero1", FP32, "train.max_steps=40", "train.validate_every=10")
    undisturbed = train(fresh_run, *settings, num_ranks=num_ranks)
    run_dir, overrides = fresh_run
    (run_dir / "train").rename(tmp_path / "undisturbed")

    command = program_command("mtptrain.train", *overrides, *settings, num_ranks=num_ranks)
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    while len(records(run_dir)) < 5:
        assert process.poll() is None, "it ended before the signal"
        time.sleep(0.01)
    os.kill(children(process.pid)[-1] if num_ranks > 1 else process.pid, number)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.terminate()  # one that hangs; torchrun kills its ranks

    errors = (tmp_path / "stderr").read_text()
    assert process.returncode == 75 if num_ranks == 1 else re.search(r"exitcode *: 75 ", errors), errors[-3000:]
    saved = len(records(run_dir))
    assert 5 <= saved < 40
    assert f"step {saved}: {number.name}, checkpoint saved" in output
    assert (run_dir / f"train/checkpoints/step_{saved:08d}/complete.json").is_file()
    resumed = train(fresh_run, *settings, num_ranks=num_ranks)
    assert figures(resumed) == figures(undisturbed)
    assert (run_dir / "train/last/head.safetensors").read_bytes() == (
        tmp_path / "undisturbed/last/head.safetensors"
    ).read_bytes()


def children(parent: int) -> list[int]:
    """Processes that `parent` has started, the youngest last."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if path.read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(int(path.parent.name))
    return sorted(found)


def test_without_validation_prompts_the_last_head_is_kept_as_the_best_and_the_target_is_never_loaded(
    fresh_run: Run, one_rank: list[dict[str, object]], tmp_path: Path
) -> None:
    found = train(fresh_run, "train.validation_prompts=0", "train.validate_every=5", "deepspeed=zero0")
    assert figures(found) == figures(one_rank), "validation does not touch training"
    stage_dir = fresh_run[0] / "train"
    last, best = (json.loads((stage_dir / name / "head.json").read_text()) for name in ("last", "best"))
    assert last == best and last["step"] == 20 and "acceptance_length" not in last
    assert (stage_dir / "best" / "head.safetensors").read_bytes() == (
        stage_dir / "last" / "head.safetensors"
    ).read_bytes()
    result = run_program("eval.acceptance", *fresh_run[1])
    assert result.returncode == 0, result.stderr[-3000:]


def test_a_measured_best_head_is_not_replaced_by_one_that_was_not(fresh_run: Run) -> None:
    train(fresh_run, "train.max_steps=10")
    best = (fresh_run[0] / "train" / "best" / "head.json").read_text()
    train(fresh_run, "train.max_steps=12", "train.validation_prompts=0")
    assert json.loads((fresh_run[0] / "train" / "last" / "head.json").read_text())["step"] == 12
    assert (fresh_run[0] / "train" / "best" / "head.json").read_text() == best


def test_bf16_with_fp32_masters_trains_like_fp32(one_rank: list[dict[str, object]], fresh_run: Run) -> None:
    found = train(fresh_run, "deepspeed=zero1")
    assert found[-1]["loss"] == pytest.approx(one_rank[-1]["loss"], rel=0.02)


def test_a_run_that_diverges_stops_before_it_saves_and_names_its_documents(fresh_run: Run) -> None:
    """Trap 27. The first step's loss is finite, and so are the weights that it leaves: nothing of them is kept."""
    settings = (
        "train.lr=1e30",
        "train.warmup_steps=0",
        "train.save_every=1",
        "train.validate_every=1",
        "train.log_every=10",
    )
    result = run_program("mtptrain.train", *fresh_run[1], *settings)
    assert result.returncode != 0
    assert "train: the loss of the new weights must be finite, but a value at step 1 is not, with doc" in result.stderr
    assert not list((fresh_run[0] / "train").glob("checkpoints/step_*")) and not (fresh_run[0] / "train/last").exists()


def test_a_loss_that_is_not_finite_between_two_records_is_named_with_its_step(fresh_run: Run) -> None:
    settings = ("train.lr=1e30", "train.warmup_steps=0", "train.log_every=10", "train.max_steps=11")
    result = run_program("mtptrain.train", *fresh_run[1], *settings)
    assert "train: the loss and its gradient must be finite, but a value at step 2 is not, with doc" in result.stderr


def test_metrics_that_a_kill_has_torn_do_not_keep_a_run_from_going_on(fresh_run: Run) -> None:
    train(fresh_run, "train.max_steps=3", "train.validation_prompts=0")
    with (fresh_run[0] / "train/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    (fresh_run[0] / "train/checkpoints/step_00000002").mkdir()  # without its marker
    assert [record["step"] for record in train(fresh_run, "train.max_steps=5", "train.validation_prompts=0")] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert not (fresh_run[0] / "train/checkpoints/step_00000002").exists()


def test_the_best_head_by_acceptance_outlives_rotation_and_is_what_validation_measured(fresh_run: Run) -> None:
    train(fresh_run, "train.validate_every=5", "train.save_every=5", "train.keep_checkpoints=2")
    stage_dir = fresh_run[0] / "train"
    lines = [json.loads(line) for line in (stage_dir / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["acceptance_length"] for line in lines if "acceptance_length" in line}
    assert sorted(measured) == [5, 10, 15, 20]
    best = json.loads((stage_dir / "best/head.json").read_text())
    assert best["acceptance_length"] == max(measured.values()) == measured[best["step"]]
    assert sorted(path.name for path in (stage_dir / "checkpoints").glob("step_*")) == [
        "step_00000015",
        "step_00000020",
    ]


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "message"),
    [
        (
            ("train.micro_batches_per_step=3",),
            2,
            "train.micro_batches_per_step: must be a multiple of the number of ranks, 2, but is 3",
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
    result = run_program("mtptrain.train", *fresh_run[1], *overrides, num_ranks=num_ranks)
    assert result.returncode != 0
    assert message in result.stderr
    assert not (fresh_run[0] / "train").exists()


def flip_byte(shard: Path, place: int) -> None:
    content = bytearray(shard.read_bytes())
    content[place] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("place", [1, 20, 1000, -1], ids=["length", "header", "offsets", "loss mask"])
def test_a_flipped_byte_that_decides_the_steps_is_named_before_training_begins(fresh_run: Run, place: int) -> None:
    flip_byte(fresh_run[0] / "hidden_states/shard_00001.safetensors", place)
    result = run_program("mtptrain.train", *fresh_run[1])
    assert result.returncode != 0
    assert "shard_00001.safetensors: the checksum of header, tables and loss mask of shard 1 must be" in result.stderr
    assert not (fresh_run[0] / "train").exists()


def flip_states(shard: Path) -> None:
    """Flip a bit of every state of the last layer, of which the steps read some documents."""
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
    result = run_program("mtptrain.train", *overrides, *settings, num_ranks=2)
    assert result.returncode != 0
    assert re.search(
        r"shard_\d+.safetensors: the checksum of document \d+ of .*delete the shard's file and run data_prep",
        result.stderr,
    )
    assert records(run_dir) == [] and not list((run_dir / "train/checkpoints").glob("step_*"))
    for shard in shards:
        shard.unlink()
    assert run_program("data_prep.hidden_states", *overrides).returncode == 0
    assert (run_dir / "hidden_states/manifest.json").read_bytes() == manifest
    assert len(train(fresh_run, *settings)) == 2


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_several_batches_are_added_in_fp32_with_zero2_and_with_a_warning_in_bf16_with_zero1(
    four_batches: list[dict[str, object]], fresh_run: Run, stage: int
) -> None:
    result = run_program("mtptrain.train", *fresh_run[1], f"deepspeed=zero{stage}", FOUR_MICRO_BATCHES)
    assert result.returncode == 0, result.stderr[-3000:]
    warning = "must be 2 to accumulate the gradients of 4 micro-batches per rank in fp32, but is 1"
    assert (warning in result.stderr) == (stage == 1)
    assert records(fresh_run[0])[-1]["loss"] == pytest.approx(four_batches[-1]["loss"], rel=0.02)


def test_a_checkpoint_of_another_schedule_or_another_order_of_data_is_refused_and_kept(fresh_run: Run) -> None:
    train(fresh_run, "train.max_steps=2")
    marker = next((fresh_run[0] / "train/checkpoints").glob(f"step_*/{MARKER}"))
    facts = json.loads(marker.read_text())
    del facts["head"]["norms"]  # as before that setting existed: no difference
    unpacked = {
        name: value for name, value in facts.items() if "packing" not in name
    }  # steps once closed at the first misfit
    marker.write_text(json.dumps(unpacked))
    result = run_program("mtptrain.train", *fresh_run[1], "train.max_steps=4", "train.lr=1e-6")
    assert (
        "to resume from this checkpoint, train.lr must be 0.003, but is 1e-06; the version of the packing of docu"
        in result.stderr
    )
    assert "packing of documents must be None, but is 2; restore" in result.stderr
    marker.write_text(json.dumps(facts))
    result = run_program("mtptrain.train", *fresh_run[1], "train.max_steps=4", "seed=1", num_ranks=2)
    assert result.returncode != 0
    assert "to resume from this checkpoint, seed must be 0, but is 1; restore these settings" in result.stderr
    result = run_program("mtptrain.train", *fresh_run[1], "train.resume=never")
    assert "train.resume: must be auto if a checkpoint exists, but is never" in result.stderr
    assert (fresh_run[0] / "train/checkpoints/step_00000002/complete.json").is_file()


EAGLE3 = ("head=eagle3", "head.capture_layers=[1,2]", "head.draft_vocab_size=48")


@pytest.fixture(scope="module")
def captured_run(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Stages 1 and 2 done for an eagle3 head with a draft vocabulary, which is not chosen yet."""
    directory = tmp_path_factory.mktemp("eagle3") / "run"
    shutil.copytree(tiny_run[0] / "prompts", directory / "prompts")
    overrides = (f"run_dir={directory}", *tiny_run[1], *EAGLE3)
    result = run_program("data_prep.hidden_states", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    return directory, overrides


@pytest.fixture(scope="module")
def chosen_run(captured_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`captured_run` with its draft vocabulary."""
    directory = tmp_path_factory.mktemp("chosen") / "run"
    shutil.copytree(captured_run[0], directory)
    overrides = (f"run_dir={directory}", *captured_run[1][1:])
    result = run_program("data_prep.draft_vocab", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    return directory, overrides


def copy_of(run: Run, directory: Path) -> Run:
    shutil.copytree(run[0], directory / "run")
    return directory / "run", (f"run_dir={directory}/run", *run[1][1:])


@pytest.fixture
def eagle3_run(chosen_run: Run, tmp_path: Path) -> Run:
    """A copy of `chosen_run` of one's own."""
    return copy_of(chosen_run, tmp_path)


@pytest.fixture(scope="module")
def eagle3_one_rank(chosen_run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    """The reference for a head with a vocabulary of its own: one rank, ZeRO 0, fp32."""
    run = copy_of(chosen_run, tmp_path_factory.mktemp("eagle3_one_rank"))
    return run[0], train(run, "deepspeed=zero0")


def head_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "train/last/head.safetensors")


def test_a_head_with_a_draft_vocabulary_trains_its_lm_head_and_keeps_its_offsets(
    eagle3_one_rank: tuple[Path, list[dict[str, object]]], tiny_target: Path
) -> None:
    run_dir, found = eagle3_one_rank
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]  # type: ignore[operator]
    trained, d2t = head_tensors(run_dir), load_file(run_dir / "draft_vocab/draft_vocab.safetensors")["d2t"]
    assert torch.equal(trained["d2t"], d2t) and d2t.any()
    rows = load_frozen_parts(tiny_target).lm_head[d2t + torch.arange(48)]
    moved = (trained["lm_head.weight"] - rows).norm() / rows.norm()
    assert 1e-3 < moved < 0.2, "it starts from the target's rows, and is trained"


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 2), (2, 1)])
def test_ranks_and_zero_stages_agree_on_a_head_with_a_draft_vocabulary(
    eagle3_one_rank: tuple[Path, list[dict[str, object]]], eagle3_run: Run, num_ranks: int, stage: int
) -> None:
    run_dir, reference = eagle3_one_rank
    found = train(eagle3_run, f"deepspeed=zero{stage}", FP32, num_ranks=num_ranks)
    assert len(found) == 20
    for ours, theirs in zip(figures(found), figures(reference), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    ours, theirs = head_tensors(eagle3_run[0])["lm_head.weight"], head_tensors(run_dir)["lm_head.weight"]
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_bf16_engine_keeps_the_offsets_whole_and_resumes_with_them(eagle3_run: Run) -> None:
    train(eagle3_run, "deepspeed=zero2", "train.max_steps=2")
    run_dir, overrides = eagle3_run
    d2t = load_file(run_dir / "draft_vocab/draft_vocab.safetensors")["d2t"]
    first = head_tensors(run_dir)
    assert first["lm_head.weight"].dtype is torch.bfloat16
    assert first["d2t"].dtype is torch.int64 and torch.equal(first["d2t"], d2t)
    train(eagle3_run, "deepspeed=zero2", "train.max_steps=4")
    resumed = head_tensors(run_dir)
    assert torch.equal(resumed["d2t"], d2t) and not torch.equal(resumed["lm_head.weight"], first["lm_head.weight"])
    result = run_program("eval.acceptance", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]


def test_a_whole_vocabulary_of_its_own_starts_from_the_targets_lm_head_without_a_draft_vocabulary(
    captured_run: Run, tmp_path: Path, tiny_target: Path
) -> None:
    run = copy_of(captured_run, tmp_path)
    train(run, "head.draft_vocab_size=260", "train.max_steps=1", "train.lr=1e-9")
    found = head_tensors(run[0])
    assert "d2t" not in found
    assert torch.allclose(found["lm_head.weight"].float(), load_frozen_parts(tiny_target).lm_head, rtol=1e-2, atol=1e-3)


def test_a_draft_vocabulary_that_is_missing_stale_or_of_another_size_is_refused(
    captured_run: Run, tmp_path: Path, tiny_target: Path
) -> None:
    run_dir, overrides = copy_of(captured_run, tmp_path)
    # It is told before the weights, which take long to read, are looked at.
    shutil.copytree(tiny_target, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    result = run_program("mtptrain.train", *overrides, f"target.path={tmp_path / 'bare'}")
    assert (
        "draft_vocab/manifest.json: must exist, but does not; run data_prep.draft_vocab with the same recipe"
        in result.stderr
    )
    assert run_program("data_prep.draft_vocab", *overrides, "head.draft_vocab_size=40").returncode == 0
    result = run_program("mtptrain.train", *overrides)
    assert (
        "manifest.json: head.draft_vocab_size must be 48, but is 40; run data_prep.draft_vocab again" in result.stderr
    )
    manifest = json.loads((run_dir / "draft_vocab/manifest.json").read_text())
    (run_dir / "draft_vocab/manifest.json").write_text(json.dumps({**manifest, "prompts_sha256": "other"}))
    result = run_program("mtptrain.train", *overrides, "head.draft_vocab_size=40")
    assert (
        "the hash of the prompts (train.safetensors) must be" in result.stderr
        and "but is other; run data_prep" in result.stderr
    )
    assert not (run_dir / "train").exists()


def test_a_checkpoint_of_another_draft_vocabulary_is_refused(eagle3_run: Run) -> None:
    run_dir, overrides = eagle3_run
    train(eagle3_run, "train.max_steps=1")
    directory = run_dir / "draft_vocab"
    manifest = DraftVocabManifest(**json.loads((directory / "manifest.json").read_text()))
    sha256 = write_draft_vocab(directory, offsets(torch.arange(100, 148)), 260)
    write_manifest(directory, replace(manifest, draft_vocab_sha256=sha256))
    result = run_program("mtptrain.train", *overrides, "train.max_steps=2")
    assert result.returncode != 0
    assert re.search(
        r"to resume from this checkpoint, the sha256 of the draft vocabulary must be \w+, but is \w+; restore",
        result.stderr,
    )
