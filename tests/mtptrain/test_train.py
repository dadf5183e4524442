"""Training for real: DeepSpeed engines, gloo ranks, processes that are killed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import program_command, run_program

Run = tuple[Path, tuple[str, ...]]
FP32 = "deepspeed.bf16.enabled=false"


def train(run: Run, *overrides: str, num_ranks: int = 1) -> list[dict[str, object]]:
    """Train and return the records of metrics.jsonl that hold a loss."""
    run_dir, settings = run
    result = run_program("mtptrain.train", *settings, *overrides, num_ranks=num_ranks)
    assert result.returncode == 0, result.stderr[-3000:]
    return records(run_dir)


def records(run_dir: Path) -> list[dict[str, object]]:
    path = run_dir / "train" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [record for record in map(json.loads, lines) if "loss" in record]


def figures(found: list[dict[str, object]]) -> list[list[float]]:
    """Every loss, loss by depth and gradient norm, step by step."""
    return [[record["loss"], *record["kl_at"], record["grad_norm"]] for record in found]  # type: ignore[misc]


@pytest.fixture(scope="module")
def one_rank(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The reference: one rank, ZeRO 0, fp32, 20 steps of two micro-batches."""
    import shutil

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


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 1)])
def test_a_killed_run_resumes_with_bit_identical_losses(fresh_run: Run, tmp_path: Path, num_ranks: int, stage: int) -> None:
    settings = (f"deepspeed=zero{stage}", "train.save_every=4", "train.validate_every=10", *[FP32] * (stage > 0))
    undisturbed = train(fresh_run, *settings, num_ranks=num_ranks)
    run_dir, overrides = fresh_run
    (run_dir / "train").rename(tmp_path / "undisturbed")

    command = program_command("mtptrain.train", *overrides, *settings, num_ranks=num_ranks)
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL, start_new_session=True)
    while len(records(run_dir)) < 10:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert 10 <= len(records(run_dir)) < 20

    resumed = train(fresh_run, *settings, num_ranks=num_ranks)
    assert figures(resumed) == figures(undisturbed)
    assert (run_dir / "train/last/head.safetensors").read_bytes() == (tmp_path / "undisturbed/last/head.safetensors").read_bytes()


def test_bf16_with_fp32_masters_trains_like_fp32(one_rank: list[dict[str, object]], fresh_run: Run) -> None:
    found = train(fresh_run, "deepspeed=zero1")
    assert found[-1]["loss"] == pytest.approx(one_rank[-1]["loss"], rel=0.02)


def test_a_run_that_diverges_stops_before_it_saves_and_names_its_documents(fresh_run: Run) -> None:
    settings = ("train.lr=1e30", "train.warmup_steps=0", "train.save_every=2", "train.log_every=10")
    result = run_program("mtptrain.train", *fresh_run[1], *settings)
    assert result.returncode != 0
    assert "train: the loss must be finite, but is nan at step 2, with documents [" in result.stderr
    assert not list((fresh_run[0] / "train/checkpoints").glob("step_*"))


def test_the_best_head_by_acceptance_outlives_rotation_and_is_what_validation_measured(fresh_run: Run) -> None:
    train(fresh_run, "train.validate_every=5", "train.save_every=5", "train.keep_checkpoints=2")
    stage_dir = fresh_run[0] / "train"
    lines = [json.loads(line) for line in (stage_dir / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["acceptance_length"] for line in lines if "acceptance_length" in line}
    assert sorted(measured) == [5, 10, 15, 20]
    best = json.loads((stage_dir / "best/head.json").read_text())
    assert best["acceptance_length"] == max(measured.values()) == measured[best["step"]]
    assert sorted(path.name for path in (stage_dir / "checkpoints").glob("step_*")) == ["step_00000015", "step_00000020"]


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "message"),
    [
        (
            ("train.micro_batches_per_step=3",),
            2,
            "train.micro_batches_per_step: must be a multiple of the number of ranks, 2, but is 3",
        ),
        (("train.batch_tokens=64",), 1, "train.batch_tokens: must be at least the longest document, 128 tokens, but is 64"),
        (("train.micro_batches_per_step=5000",), 1, "must be at most the number of batches, but is 5000"),
        (("hidden_states.dtype=bfloat16",), 1, "the computing dtype"),
        (("acceptance.prompt_tokens=400",), 1, "acceptance.prompt_tokens: held-out documents must hold a prompt of 400 tokens"),
        (
            ("head.num_attention_heads=4",),
            1,
            "head.num_attention_heads: the head dim (hidden size 64 / heads) must be one of (64, 128)",
        ),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, tuple) else None,
)
def test_bad_input_is_refused_before_training(fresh_run: Run, overrides: tuple[str, ...], num_ranks: int, message: str) -> None:
    result = run_program("mtptrain.train", *fresh_run[1], *overrides, num_ranks=num_ranks)
    assert result.returncode != 0
    assert message in result.stderr
    assert not (fresh_run[0] / "train").exists()


@pytest.mark.parametrize("place", [1, 20, 208, -100], ids=["length", "header", "offsets", "states"])
def test_a_flipped_byte_in_a_shard_is_named_before_training_touches_it(fresh_run: Run, place: int) -> None:
    shard = fresh_run[0] / "hidden_states/shard_00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[place] ^= 1
    shard.write_bytes(content)
    result = run_program("mtptrain.train", *fresh_run[1])
    assert result.returncode != 0
    assert "shard_00001.safetensors: the sha256 of shard 1 must be" in result.stderr
    assert not (fresh_run[0] / "train").exists()


def test_a_checkpoint_of_another_number_of_ranks_or_another_order_of_data_is_refused_and_kept(fresh_run: Run) -> None:
    train(fresh_run, "train.max_steps=2")
    result = run_program("mtptrain.train", *fresh_run[1], "train.max_steps=4", "train.lr=1e-6")
    assert "to go on from this checkpoint, train.lr must be 0.003, but is 1e-06; set it as it was" in result.stderr
    result = run_program("mtptrain.train", *fresh_run[1], "train.max_steps=4", "seed=1", num_ranks=2)
    assert result.returncode != 0
    assert (
        "to go on from this checkpoint, the number of ranks must be 1, but is 2; seed must be 0, but is 1; set it as"
        in result.stderr
    )
    result = run_program("mtptrain.train", *fresh_run[1], "train.resume=never")
    assert "train.resume: must be auto where checkpoints exist, but is never" in result.stderr
    assert (fresh_run[0] / "train/checkpoints/step_00000002/complete.json").is_file()
