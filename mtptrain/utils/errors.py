"""Reports the error that ends a program: one line on stderr if the input was refused, the stack otherwise."""

import errno
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import NoReturn, TextIO

from mtptrain.utils.progress import ProgressBar

DEBUG = "MTPTRAIN_DEBUG"
"""Environment variable that shows the stack of every error if it is 1."""
FORKED = "MTPTRAIN_FORKED_RANKS"
"""Environment variable of ranks that a program became by itself. To its user they are one program: the first reports an
error without its rank, and the others wait `WAIT_FOR_FIRST_S` for it."""
WAIT_FOR_FIRST_S = 5.0
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
EXIT_REFUSED, EXIT_MISTAKE, EXIT_INTERRUPTED = 1, 2, 130
"""Exit codes: the input was refused or the program failed; the command line is wrong; Ctrl-C (130 by convention)."""


class UserError(ValueError):
    """An error that the user can correct: programs print its message as one line. Any other is shown with its stack."""


class StageMissing(UserError):
    """A file of an earlier stage does not exist. The message names the command to run."""


@contextmanager
def errors_as_lines(
    kept: Callable[[], str] = lambda: "the same command starts again", run_dir: str | None = None
) -> Iterator[None]:
    """End the program with its error on stderr if the block, or the function that this decorates, cannot finish.

    `refusal` decides between one line and the stack. After Ctrl-C, the line says what was `kept` of the work so far, or
    what the argument of the KeyboardInterrupt says.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        exit_with_line(f"stopped by Ctrl-C; {interrupt.args[0] if interrupt.args else kept()}", EXIT_INTERRUPTED)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            exit_with_line(f"error: {ended.code}", EXIT_REFUSED)
        raise
    except Exception as error:
        exit_with_error(error, refusal(error, run_dir))


def warn(message: str) -> None:
    """Warn users, once of the same from one place: `show_warning` writes it as a line."""
    warnings.warn(message, stacklevel=2)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning of users as one line on stderr, without Python's line of code. For `warnings.showwarning`."""
    is_for_users = category is UserWarning
    text = f"WARNING {message}" if is_for_users else warnings.formatwarning(message, category, filename, lineno, line)
    ProgressBar.write(text.rstrip(), file=sys.stderr)


def exit_with_line(line: str, code: int) -> NoReturn:
    """Write a line to stderr, below all progress bars, and exit. With several ranks, the line begins with the rank."""
    for bar in list(getattr(ProgressBar, "_instances", ())):
        bar.close()  # otherwise it would be drawn again after the line
    rank, is_forked = int(os.environ.get("RANK", "0")), FORKED in os.environ
    names_rank = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not (is_forked and rank == 0)
    sys.stdout.flush()
    if is_forked and rank > 0:  # this process is ended once the first rank has reported
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(WAIT_FOR_FIRST_S)
    print(f"rank {rank}: {line}" if names_rank else line, file=sys.stderr, flush=True)
    sys.exit(code)


def exit_with_error(error: Exception, message: str | None, code: int = EXIT_REFUSED) -> NoReturn:
    """Exit with the message, or with the stack if there is no message or MTPTRAIN_DEBUG is 1."""
    if message is None or os.environ.get(DEBUG) == "1":
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(code)
    exit_with_line(f"error: {message}", code)


def refusal(error: Exception, run_dir: str | None) -> str | None:
    """Returns the message of a `UserError` or of an error of the operating system, or None for any other error.

    If the error of a library's failed write names no file, the run's directory is named instead, if there is one. That
    of a full disk may be the cause of a `UserError`.
    """
    message, advice = str(error), ""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL_DISK:
            advice = "; free some space and run the same command again"
        cause = cause.__cause__
    if isinstance(error, UserError):
        # A list after a colon keeps its line breaks, and so do lines that are an error each.
        is_list = ":\n" in message or all(" must " in line for line in message.splitlines())
        return (message if is_list else one_line(message)) + advice
    if not isinstance(error, OSError):
        return None
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None]
    if error.strerror and names:
        return f"{' -> '.join(names)}: {error.strerror}{advice}"
    said = f"{error.strerror}, with run_dir={run_dir}" if error.strerror and run_dir else one_line(message)
    return said + advice


def error_summary(error: Exception) -> str:
    """Returns the class and the beginning of the message of a library's error, on one line, to quote in our own."""
    return shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...")


@contextmanager
def refusing(must: str, advice: str, library: str = "transformers") -> Iterator[None]:
    """Makes an error of a library, whose code may raise anything for bad input, a refusal that says what must hold.

    A `UserError` passes, and so does that of a GPU without memory, which is no fault of the input.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or type(error).__name__ == "OutOfMemoryError":
            raise
        raise UserError(f"{must}, but {library} reports {error_summary(error)}; {advice}") from error


def one_line(message: str) -> str:
    return " ".join(message.split())
