"""Tests that losses fall, and agree for every number of ranks, ZeRO stage, precision, optimizer and compilation."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtptrain.heads.files import best_or_last
from tests.conftest import Run, run_program, succeed, tiers
from tests.mtptrain.train.conftest import Reference
from tests.mtptrain.train.runs import FP32, PLAIN_STEPS, assert_close, copy_of, records, train


def test_the_loss_falls_and_records_say_what_the_steps_did_with_their_time(reference: Reference) -> None:
    losses = [record["loss"] for record in reference.records]
    assert [record["step"] for record in reference.records] == list(range(1, 13))
    assert losses[-1] < 0.8 * losses[0]
    last = reference.records[-1]
    shares = [last[f"{name}_share"] for name in ("data_wait", "forward", "loss", "backward", "optimizer")]
    assert all(0 <= share < 1 for share in shares) and 0.5 < sum(shares) <= 1.001
    assert 0 < last["mfu"] < 1.5 and last["peak_bytes"] > 1e8
    assert last["draft_positions_per_s"] < last["tokens_per_s"]


def test_the_best_head_by_acceptance_outlives_rotation_and_is_what_validation_measured(reference: Reference) -> None:
    stage_dir = reference.run[0] / "train"
    lines = [json.loads(line) for line in (stage_dir / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["acceptance_length"] for line in lines if "acceptance_length" in line}
    assert sorted(measured) == [4, 8, 12]
    best = json.loads((stage_dir / "best/head.json").read_text())
    assert best["acceptance_length"] == max(measured.values()) == measured[best["step"]]
    assert best["data"]["longest_document_tokens"] == 128 and best["data"]["answers_end_with"]
    assert best["template_kwargs"] == "{}", "the mode of the chat template, which acceptance and export compare"
    kept = sorted(path.name for path in (stage_dir / "checkpoints").glob("step_*"))
    assert kept == ["step_00000008", "step_00000012"]


EVERY_SIZE = [(2, 0), (2, 1), (2, 2), (1, 1), (1, 2), (4, 0), (4, 2)]


@pytest.mark.parametrize(("num_ranks", "stage"), tiers(EVERY_SIZE, [(2, 1)]))
def test_ranks_and_zero_stages_give_the_same_losses(
    reference: Reference, fresh_run: Run, num_ranks: int, stage: int
) -> None:
    """Without validation there is no best head, and what reads a head takes the last one."""
    found = train(fresh_run, *PLAIN_STEPS, f"deepspeed=zero{stage}", *[FP32] * (stage > 0), num_ranks=num_ranks)
    assert_close(found, reference.records)
    stage_dir = fresh_run[0] / "train"
    last = json.loads((stage_dir / "last/head.json").read_text())
    assert last["step"] == 12 and "acceptance_length" not in last
    assert not (stage_dir / "best").exists() and best_or_last(stage_dir) == stage_dir / "last"


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bf16_trains_like_fp32_and_checkpoints_hold_plain_tensors_in_fp32(
    reference: Reference, fresh_run: Run, stage: int
) -> None:
    """Checkpoints hold no pickles and no moments in bf16. Nothing that nobody chose is warned of."""
    result = succeed("train", *fresh_run[1], *PLAIN_STEPS, f"deepspeed=zero{stage}")
    assert records(fresh_run[0])[-1]["loss"] == pytest.approx(reference.records[-1]["loss"], rel=0.02)
    assert "deepspeed" not in result.stderr
    (folder,) = (fresh_run[0] / "train/checkpoints").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["complete.json", "state.safetensors"]
    state, head = load_file(folder / "state.safetensors"), load_file(fresh_run[0] / "train/last/head.safetensors")
    weights = {name for name in state if not name.startswith("run.") and not name.endswith((".exp_avg", ".exp_avg_sq"))}
    assert weights == set(head) and int(state["run.step"]) == 12
    for name in weights:
        in_bf16 = state[name].bfloat16()
        assert torch.equal(in_bf16, head[name].bfloat16()) and not torch.equal(in_bf16.float(), state[name])
        assert {state[name + suffix].dtype for suffix in ("", ".exp_avg", ".exp_avg_sq")} == {torch.float32}
        assert state[name + ".exp_avg_sq"].min() >= 0 and state[name + ".exp_avg"].any()


@pytest.mark.slow
def test_a_compiled_step_and_one_that_computes_again_train_as_the_plain_one(
    reference: Reference, fresh_run: Run
) -> None:
    settings = ("train.compile=true", "train.activation_checkpointing=true", "train.profile=true")
    said = succeed("train", *fresh_run[1], *PLAIN_STEPS, "deepspeed=zero0", *settings).stdout
    assert "train: compiling the first step, one or two minutes on a CPU; train.compile=false switches it off" in said
    assert_close(records(fresh_run[0]), reference.records, 1e-4)
    trace = json.loads((fresh_run[0] / "train/trace_0.json").read_text())
    assert any("_ChunkedLoss" in event.get("name", "") for event in trace["traceEvents"])


def test_a_run_that_diverges_stops_before_it_saves_and_names_its_documents(fresh_run: Run) -> None:
    """The first step's loss and the weights after it are finite, but the loss of these weights is not."""
    diverging = ("train.lr=1e30", "train.warmup_steps=0", "train.log_every=10")
    result = run_program("train", *fresh_run[1], *diverging, "train.save_every=1", "train.validate_every=1")
    assert result.returncode != 0
    assert "train: the loss of the new weights must be finite, but a value at step 1 is not, with doc" in result.stderr
    assert not list((fresh_run[0] / "train").glob("checkpoints/step_*")) and not (fresh_run[0] / "train/last").exists()
    result = run_program("train", *fresh_run[1], *diverging, "train.max_steps=11")  # between two records
    assert "train: the loss and its gradient must be finite, but a value at step 2 is not, with doc" in result.stderr


MUON = ("train.optimizer=muon", "train.validation_prompts=0", "train.validate_every=0", "train.max_steps=8")


def losses(run: Run, directory: Path, *overrides: str, num_ranks: int = 1) -> list[float]:
    """Trains in a folder that has the run's hidden states, and returns the losses of all steps."""
    if not directory.exists():
        copy_of((run[0], ()), directory)
    found = train((directory / "run", run[1]), f"run_dir={directory}/run", *MUON, *overrides, num_ranks=num_ranks)
    return [record["loss"] for record in found]


@pytest.fixture(scope="module")
def in_fp32(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Returns the losses of one rank without ZeRO, where the optimizer sees the matrices themselves."""
    return losses(tiny_run, tmp_path_factory.mktemp("muon") / "plain", "deepspeed=zero0")


STAGES = [("zero0", 2), ("zero1", 1), ("zero1", 2), ("zero2", 1), ("zero2", 2)]


@pytest.mark.parametrize(("zero", "num_ranks"), tiers(STAGES, [("zero2", 2)]))
def test_muon_trains_with_any_stage_of_zero_and_number_of_ranks_as_on_one_rank_without(
    tiny_run: Run, in_fp32: list[float], tmp_path: Path, zero: str, num_ranks: int
) -> None:
    assert in_fp32[-1] < in_fp32[0]
    in_zero = () if zero == "zero0" else (FP32,)
    partitioned = losses(tiny_run, tmp_path / "a", f"deepspeed={zero}", *in_zero, num_ranks=num_ranks)
    assert partitioned == pytest.approx(in_fp32, rel=2e-4)


def test_a_run_with_muon_in_bf16_on_two_ranks_resumes_to_the_last_digit(tiny_run: Run, tmp_path: Path) -> None:
    settings, newest = ("deepspeed=zero1", "train.save_every=4", "train.keep_checkpoints=9"), "step_00000008"
    whole = losses(tiny_run, tmp_path / "a", *settings, num_ranks=2)
    for num_ranks, tolerance in ((2, 0.0), (1, 1e-2)):
        shutil.rmtree(tmp_path / "a/run/train/checkpoints" / newest)
        resumed = losses(tiny_run, tmp_path / "a", *settings, num_ranks=num_ranks)
        assert resumed[-4:] == pytest.approx(whole[-4:], rel=tolerance, abs=0)
