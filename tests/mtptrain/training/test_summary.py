"""Tests what is said at the end of a run, and when it resumes on another schedule."""

from pathlib import Path

import pytest

from mtptrain.config import TrainConfig
from mtptrain.train import warn_of_other_schedule
from mtptrain.training.summary import best_rows, shortcomings
from mtptrain.utils.files import write_sealed


def test_the_best_step_is_named_and_a_held_out_kl_that_rose_after_it() -> None:
    def record(step: int, length: float | None, *kl: float | None) -> dict[str, object]:
        return {"step": step, "acceptance_length": length, **({"held_out_kl_at": [*kl]} if kl else {})}

    assert best_rows([{"step": 1, "loss": 2.0}, record(2, None, None)]) == []
    falling = [record(10, 1.5, 0.9), record(20, 1.75, 0.5), record(30, 1.75, 0.4)]
    best = ("best acceptance length", "1.750 at step 20")
    for after, more in (
        ([], []),
        ([record(40, 1.5, None), record(50, 1.5)], []),
        (
            [record(40, 1.5, 0.6), record(50, 1.5, 0.75)],
            ["rose after that: 0.500 there, 0.600 at step 40, 0.750 at step 50"],
        ),
    ):
        assert best_rows([*falling, *after]) == [best, *(("held-out KL of depth 0", text) for text in more)]


def test_a_run_of_warm_up_alone_and_a_head_that_gains_nothing_say_what_to_do() -> None:
    short = TrainConfig(warmup_steps=100, warmup_share=1.0)
    for settings, num_steps, lengths, said in (
        (TrainConfig(), 600, [1.0, 1.7], []),
        (TrainConfig(), 600, [], []),
        (TrainConfig(), 1, [1.0], ["but is 1.000 after 1 steps; train on more text"]),
        (short, 17, [1.5, None], ["all of them were warm-up; lower train.warmup_share, or train on more text"]),
        (short, 17, [None], ["train.warmup_steps: must be fewer than the run's 17 steps", "but is 1.000 after 17"]),
    ):
        found = shortcomings(settings, num_steps, lengths)
        assert len(found) == len(said) and all(part in text for part, text in zip(said, found, strict=True))


def test_a_run_that_resumes_with_another_number_of_steps_says_what_the_learning_rate_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "step_00000100"
    checkpoint.mkdir()
    write_sealed(checkpoint / "complete.json", {"step": 100, "num_steps": 100})
    settings = TrainConfig(lr=1.0, warmup_steps=0, min_lr_ratio=0.0)
    warn_of_other_schedule(checkpoint, settings, 100)
    assert capsys.readouterr().out == ""
    warn_of_other_schedule(checkpoint, settings, 200)
    message = "100 steps, but this run has 200, to whose end the learning rate now falls: step 101 has 0.5 instead of 0"
    assert message in capsys.readouterr().out
