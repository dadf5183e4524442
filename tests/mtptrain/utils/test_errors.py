"""Tests which errors are reported without a stack, and what their messages say."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtptrain.utils.errors import StageMissing, UserError, refusal, show_warning


def raised(act: Callable[[], object]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError


CASES: list[tuple[Exception, str | None]] = [
    (UserError("seed: must be 1, but is 2; set it"), "seed: must be 1, but is 2; set it"),
    (UserError("a file must be read, but\n  a library says no"), "a file must be read, but a library says no"),
    (UserError("a: must be 1\nb: must be 2"), "a: must be 1\nb: must be 2"),
    (UserError("vLLM: must run; its last lines:\nx\ny"), "vLLM: must run; its last lines:\nx\ny"),
    (StageMissing("head.json: must exist"), "head.json: must exist"),
    (OSError(28, "the disk must have room", "/store"), "/store: the disk must have room"),
    (OSError(28, "the disk is full", "/target/a", None, "/run/a"), "/target/a -> /run/a: the disk is full"),
    (ValueError("no"), None),
    (torch.OutOfMemoryError("CUDA out of memory"), None),
]


def test_only_an_error_that_the_user_can_correct_is_a_line() -> None:
    for error, message in CASES:
        assert refusal(error, "runs/a") == message


def test_an_error_of_the_operating_system_names_the_file_or_the_run() -> None:
    full = raised(lambda: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    assert refusal(full, "runs/a") == "No space left on device, with run_dir=runs/a"
    assert str(refusal(full, None)) == "[Errno 28] No space left on device"
    assert refusal(raised(lambda: Path("/none").read_text()), "runs/a") == "/none: No such file or directory"


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
