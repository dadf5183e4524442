"""Tests what programs show: errors without a stack, warnings, bars, and nothing that must be hidden."""

import io
import json
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

from mtptrain.utils import progress
from mtptrain.utils.errors import StageMissing, UserError, refusal, show_warning
from mtptrain.utils.masking import hide_home, hide_passwords, hide_secrets
from mtptrain.utils.progress import ProgressBar

FREE = "; free some space and run the same command again"
UNREADABLE = UserError("a.parquet: must be read")
UNREADABLE.__cause__ = OSError(28, "full", "/cache")  # of a library
CASES: list[tuple[Exception, str | None]] = [
    (UserError("seed: must be 1, but is 2; set it"), "seed: must be 1, but is 2; set it"),
    (UserError("a file must be read, but\n  a library says no"), "a file must be read, but a library says no"),
    (UserError("a: must be 1\nb: must be 2"), "a: must be 1\nb: must be 2"),
    (UserError("vLLM: must run; its last lines:\nx\ny"), "vLLM: must run; its last lines:\nx\ny"),
    (StageMissing("head.json: must exist"), "head.json: must exist"),
    (OSError(28, "the disk must have room", "/store"), f"/store: the disk must have room{FREE}"),
    (UNREADABLE, f"a.parquet: must be read{FREE}"),
    (OSError(1, "not allowed", "/target/a", None, "/run/a"), "/target/a -> /run/a: not allowed"),
    (ValueError("no"), None),
    (torch.OutOfMemoryError("CUDA out of memory"), None),
]


def test_only_an_error_that_the_user_can_correct_is_a_line() -> None:
    for error, message in CASES:
        assert refusal(error, "runs/a") == message


def test_an_error_of_the_operating_system_names_the_file_or_the_run() -> None:
    with pytest.raises(OSError) as full:
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    assert refusal(full.value, "runs/a") == f"No space left on device, with run_dir=runs/a{FREE}"
    assert str(refusal(full.value, None)) == f"[Errno 28] No space left on device{FREE}"
    with pytest.raises(OSError) as missing:
        Path("/none").read_text()
    assert refusal(missing.value, "runs/a") == "/none: No such file or directory"


def test_a_warning_for_users_is_one_line_and_any_other_says_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():  # restores `showwarning`
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show_warning)
        warnings.warn("K: should be 3", stacklevel=1)
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
    ours, other = capsys.readouterr().err.splitlines()[:2]
    assert ours == "WARNING K: should be 3" and __file__ in other and "DeprecationWarning: old name" in other


def test_secrets_and_homes_are_hidden_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hide_passwords(["x=http://me:a@b:c@h/v1", {"p": "hf://a/b@c"}]) == ["x=http://***@h/v1", {"p": "hf://a/b@c"}]
    assert hide_secrets("the key is abcdefgh, abcdef", ["abcdef", "abcdefgh", "a"]) == "the key is ***, ***"
    shown = "a 'http://h/v1?key=***&***' http://h?***#d ?e=f"
    assert hide_passwords("a 'http://h/v1?key=1&b' http://h?c#d ?e=f") == shown
    monkeypatch.setenv("HOME", "/root")
    assert hide_home(json.dumps(["/root/runs", "/root", "/rootfs/a", "/mnt/root/b"])) == json.dumps(
        ["~/runs", "~", "/rootfs/a", "/mnt/root/b"]
    )
    monkeypatch.setenv("HOME", "/")
    assert hide_home("/root/runs") == "/root/runs" and "~" not in hide_home("a / b")


def test_a_bar_in_a_log_file_writes_whole_lines_and_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with ProgressBar(total=1000, desc="steps", unit="step") as bar:
        for _ in range(1000):
            bar.update()
            bar.set_postfix(loss="1.0")
    assert log.getvalue().count("\n") == 1 and "\r" not in log.getvalue()
    assert log.getvalue().startswith("steps: 100%") and "1000/1000" in log.getvalue()

    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with ProgressBar(total=3, desc="rows") as bar:
        for _ in range(3):
            bar.update()
            bar.refresh()
    assert sum(line.startswith("rows") for line in log.getvalue().splitlines()) > 3
