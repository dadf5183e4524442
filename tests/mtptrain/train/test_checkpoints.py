"""Tests what checkpoints and the best head hold, and which checkpoints a run resumes from."""

import json
import re
import shutil

import torch
from safetensors.torch import load_file

from mtptrain.training.checkpoint import MARKER
from tests.conftest import Run, run_program
from tests.mtptrain.train.runs import train
from tests.sealed import seal_again


def test_checkpoints_hold_plain_tensors_in_fp32_whatever_trains(fresh_run: Run) -> None:
    """Checkpoints hold no pickles and no moments in bf16. Their weights are the fp32 masters."""
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


def test_a_measured_best_head_is_not_replaced_by_one_that_was_not(fresh_run: Run) -> None:
    train(fresh_run, "train.max_steps=10")
    best = (fresh_run[0] / "train" / "best" / "head.json").read_text()
    train(fresh_run, "train.max_steps=12", "train.validation_prompts=0")
    assert json.loads((fresh_run[0] / "train" / "last" / "head.json").read_text())["step"] == 12
    assert (fresh_run[0] / "train" / "best" / "head.json").read_text() == best


def test_fewer_steps_than_were_made_are_refused(fresh_run: Run) -> None:
    train(fresh_run, "train.max_steps=3", "train.validation_prompts=0")
    settings = (fresh_run[0] / "train/config.yaml").read_text()
    result = run_program("train", *fresh_run[1], "train.max_steps=2", "train.validation_prompts=0")
    assert result.returncode == 1
    assert re.search(
        r"train\.max_steps: must be at least 3, the step of \S+, but .* set train\.max_steps=3", result.stderr
    )
    assert (fresh_run[0] / "train/config.yaml").read_text() == settings


def test_a_run_that_starts_again_because_its_checkpoints_are_gone_says_so(fresh_run: Run) -> None:
    settings = ("train.validation_prompts=0", "train.max_steps=2")
    train(fresh_run, *settings)
    shutil.rmtree(fresh_run[0] / "train/checkpoints")
    again = run_program("train", *fresh_run[1], *settings)
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"WARNING {fresh_run[0]}/train/last: must have a checkpoint beside it" in again.stdout


def test_the_best_head_by_acceptance_outlives_rotation_and_is_what_validation_measured(fresh_run: Run) -> None:
    train(fresh_run, "train.validate_every=5", "train.save_every=5", "train.keep_checkpoints=2")
    stage_dir = fresh_run[0] / "train"
    lines = [json.loads(line) for line in (stage_dir / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["acceptance_length"] for line in lines if "acceptance_length" in line}
    assert sorted(measured) == [5, 10, 15, 20]
    best = json.loads((stage_dir / "best/head.json").read_text())
    assert best["acceptance_length"] == max(measured.values()) == measured[best["step"]]
    assert best["template_kwargs"] == "{}", "the mode of the chat template, which acceptance and export compare"
    assert sorted(path.name for path in (stage_dir / "checkpoints").glob("step_*")) == [
        "step_00000015",
        "step_00000020",
    ]


def test_a_checkpoint_of_another_schedule_or_another_order_of_data_is_refused_and_kept(fresh_run: Run) -> None:
    train(fresh_run, "train.max_steps=2")
    marker = next((fresh_run[0] / "train/checkpoints").glob(f"step_*/{MARKER}"))
    facts = json.loads(marker.read_text())
    del facts["head"]["intermediate_size"]  # imitate an older checkpoint, which lacks a setting added since
    # Imitate a checkpoint from before packing had a version, which is refused.
    packing = {name: value for name, value in facts.items() if "packing" in name}
    seal_again(marker, head=facts["head"], **dict.fromkeys(packing, ...))
    result = run_program("train", *fresh_run[1], "train.max_steps=4", "train.lr=1e-6")
    assert "step_00000002: train.lr must be 0.003, but is 1e-06; the version of the packing of docu" in result.stderr
    assert "packing of documents must be None, but is 2; restore these settings to resume" in result.stderr
    seal_again(marker, **packing)
    result = run_program("train", *fresh_run[1], "train.max_steps=4", "seed=1", num_ranks=2)
    assert result.returncode != 0
    assert (
        "step_00000002: seed must be 0, but is 1; restore these settings to resume from this checkpoint"
        in result.stderr
    )
    result = run_program("train", *fresh_run[1], "train.resume=never")
    assert "train.resume: must be auto if a checkpoint exists, but is never" in result.stderr
    assert (fresh_run[0] / "train/checkpoints/step_00000002/complete.json").is_file()
