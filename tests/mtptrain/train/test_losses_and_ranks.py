"""Tests that losses fall, and that they agree for every number of ranks, ZeRO stage, precision and compilation."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from eval.checks.processes import kill_tree
from tests.conftest import Run, program_command, run_program
from tests.mtptrain.train.runs import FOUR_MICRO_BATCHES, FP32, figures, records, train
from tests.programs import ROOT


def reference_run(tiny_run: Run, directory: Path, *overrides: str) -> list[dict[str, object]]:
    """Trains with one rank, ZeRO 0 and fp32."""
    shutil.copytree(tiny_run[0], directory / "run")
    return train((directory / "run", (f"run_dir={directory}/run", *tiny_run[1])), "deepspeed=zero0", *overrides)


@pytest.fixture(scope="module")
def one_rank(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Trains the reference of 20 steps of two micro-batches."""
    return reference_run(tiny_run, tmp_path_factory.mktemp("one_rank"))


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
    """Trains like `one_rank`, but with four micro-batches per step."""
    return reference_run(tiny_run, tmp_path_factory.mktemp("four_batches"), FOUR_MICRO_BATCHES)


@pytest.mark.parametrize("stage", [0, 2])
def test_four_ranks_give_the_same_losses(four_batches: list[dict[str, object]], fresh_run: Run, stage: int) -> None:
    found = train(fresh_run, f"deepspeed=zero{stage}", *[FP32] * (stage > 0), FOUR_MICRO_BATCHES, num_ranks=4)
    assert len(found) == 20
    for ours, reference in zip(figures(found), figures(four_batches), strict=True):
        assert ours == pytest.approx(reference, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize(
    "ranks_and_stages",
    [((2, 1), (1, 1), (4, 2)), ((1, 0), (2, 2), (1, 0))],
    ids=["2, 1, 4 ranks, ZeRO 1, 1, 2", "1, 2, 1 ranks, ZeRO 0, 2, 0"],
)
def test_a_run_goes_on_with_another_number_of_ranks_and_another_zero_stage(
    fresh_run: Run, four_batches: list[dict[str, object]], ranks_and_stages: tuple[tuple[int, int], ...]
) -> None:
    """Documents, weights and Adam moments stay the same, so the losses equal those of a run that never stopped."""
    for last_step, (num_ranks, stage) in zip((6, 12, 20), ranks_and_stages, strict=True):
        # Kill the run, because a lower train.max_steps would change the schedule of 20 steps, and SIGTERM would stop at
        # a step that the test cannot choose.
        settings = (f"deepspeed=zero{stage}", *[FP32] * (stage > 0), FOUR_MICRO_BATCHES, "train.save_every=6")
        command = program_command("train", *fresh_run[1], *settings, num_ranks=num_ranks)
        if last_step == 20:
            found = train(fresh_run, *settings, num_ranks=num_ranks)
        else:
            process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
            while not (fresh_run[0] / f"train/checkpoints/step_{last_step:08d}/complete.json").is_file():
                assert process.poll() is None, "the run ended before it could be killed"
                time.sleep(0.01)
            kill_tree(process.pid)
            process.wait()
    assert len(found) == 20
    for ours, reference in zip(figures(found), figures(four_batches), strict=True):
        assert ours == pytest.approx(reference, abs=1e-5, rel=1e-5)


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


MIX = "{kl:0.5,e2e:1,dpace:1}"


@pytest.mark.parametrize(
    "overrides",
    [("train.loss=lk",), ("train.loss=ce",), ("train.feature_weight=0.1",), (f"train.loss={MIX}",)],
    ids=str,
)
def test_every_loss_trains(fresh_run: Run, overrides: tuple[str, ...]) -> None:
    found = train(fresh_run, "deepspeed=zero0", "train.validation_prompts=0", *overrides)
    assert found[-1]["loss"] < 0.95 * found[0]["loss"]  # type: ignore[operator]
    assert found[-1]["kl_at"][0] < 0.9 * found[0]["kl_at"][0]  # type: ignore[index]
    if MIX in overrides[0]:
        last, weights = found[-1], (1.0, 0.8, 0.64)
        parts = [last[f"{part}_at"] for part in ("kl", "e2e", "dpace")]
        losses = [kl / 2 + e2e + dpace for kl, e2e, dpace in zip(*parts, strict=True)]  # type: ignore[call-overload]
        mean = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)
        assert last["loss"] == pytest.approx(mean, rel=1e-5)


def test_records_and_the_table_say_what_the_steps_did_with_their_time(fresh_run: Run) -> None:
    result = run_program("train", *fresh_run[1], "deepspeed=zero0", "train.validation_prompts=0")
    (*_, last) = records(fresh_run[0])
    shares = [last[f"{name}_share"] for name in ("data_wait", "forward", "loss", "backward", "optimizer")]
    assert all(0 <= share < 1 for share in shares) and 0.5 < sum(shares) <= 1.001  # type: ignore[operator]
    assert 0 < last["mfu"] < 1.5 and last["peak_bytes"] > 1e8  # type: ignore[operator]
    assert last["draft_positions_per_s"] < last["tokens_per_s"]  # type: ignore[operator]
    for word in ("limited by", "MFU", "peak memory", "draft positions", "data wait"):
        assert word in result.stdout
    for word in ("tok/s", "draft positions/s", "data=", "mfu=", "GB="):
        assert word in result.stderr


def test_without_validation_prompts_there_is_no_best_head_and_acceptance_takes_the_last(
    fresh_run: Run, one_rank: list[dict[str, object]], tmp_path: Path
) -> None:
    found = train(fresh_run, "train.validation_prompts=0", "train.validate_every=5", "deepspeed=zero0")
    assert figures(found) == figures(one_rank), "validation must not change training"
    stage_dir = fresh_run[0] / "train"
    last = json.loads((stage_dir / "last/head.json").read_text())
    assert last["step"] == 20 and "acceptance_length" not in last and not (stage_dir / "best").exists()
    result = run_program("acceptance", *fresh_run[1])
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((fresh_run[0] / "acceptance/report.json").read_text())["head"] == str(stage_dir / "last")


def test_bf16_with_fp32_masters_trains_like_fp32(one_rank: list[dict[str, object]], fresh_run: Run) -> None:
    found = train(fresh_run, "deepspeed=zero1")
    assert found[-1]["loss"] == pytest.approx(one_rank[-1]["loss"], rel=0.02)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_several_batches_are_added_in_fp32_with_zero2_and_with_a_warning_in_bf16_with_zero1(
    four_batches: list[dict[str, object]], fresh_run: Run, stage: int
) -> None:
    result = run_program("train", *fresh_run[1], f"deepspeed=zero{stage}", FOUR_MICRO_BATCHES)
    assert result.returncode == 0, result.stderr[-3000:]
    warning = "must be 2 to accumulate the gradients of 4 micro-batches per rank in fp32, but is 1"
    assert (warning in result.stderr) == (stage == 1)
    assert records(fresh_run[0])[-1]["loss"] == pytest.approx(four_batches[-1]["loss"], rel=0.02)
