"""Tests which errors are reported without a stack, and what their messages say."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtptrain.utils import errors
from mtptrain.utils.errors import refusal


def raised(act: Callable[[], object]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError


def own(error: Exception) -> Exception:
    def act() -> None:
        raise error

    return raised(act)


@pytest.fixture(autouse=True)
def tests_belong_to_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "OWN_PACKAGES", ("tests",))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("seed: must be 1, but is 2; set it"), "seed: must be 1, but is 2; set it"),
        (ValueError("a file must be read, but\n  a library says no"), "a file must be read, but a library says no"),
        (ValueError("a: must be 1\nb: must be 2"), "a: must be 1\nb: must be 2"),
        (RuntimeError("vLLM: must run; its last lines:\nx\ny"), "vLLM: must run; its last lines:\nx\ny"),
        (FileNotFoundError("head.json: must exist"), "head.json: must exist"),
        (OSError(28, "the disk must have room", "/store"), "/store: the disk must have room"),
        (AssertionError("no"), None),
        (TypeError("no"), None),
        (KeyError("no"), None),
        (NotImplementedError("no"), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_that_the_project_raises_is_its_message(error: Exception, message: str | None) -> None:
    assert refusal(own(error), "runs/a") == message


def test_an_error_of_torch_keeps_its_stack() -> None:
    assert refusal(raised(lambda: torch.zeros(2) + torch.zeros(3)), "runs/a") is None
    assert refusal(raised(lambda: torch.nn.Linear(2, 2)(torch.zeros(3))), "runs/a") is None


def test_an_error_of_a_library_names_its_place() -> None:
    message = refusal(raised(lambda: int("many\nlines")), "runs/a")
    assert message is not None and message.startswith("ValueError: invalid literal for int()")
    assert "(at utils/test_errors.py:" in message and message.endswith("; MTPTRAIN_DEBUG=1 shows the stack)")
    full = refusal(raised(lambda: os.write(os.open("/dev/full", os.O_WRONLY), b"x")), "runs/a")
    assert full is not None and full.startswith("OSError: No space left on device, with run_dir=runs/a (at ")
    assert str(refusal(raised(lambda: os.write(os.open("/dev/full", os.O_WRONLY), b"x")), None)).startswith(
        "OSError: No space left on device (at "
    )
    assert refusal(raised(lambda: Path("/none").read_text()), "runs/a") == "/none: No such file or directory"
