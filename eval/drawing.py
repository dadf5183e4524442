"""Turns a failure to draw a page or plot into a warning, because the measurement itself is already on disk."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def drawing(path: Path, figures: Path) -> Iterator[None]:
    """Prints the path of a page or plot once the `with` block has drawn it; if the block fails, warns instead.

    Args:
        path: the page or plot.
        figures: the JSON file that already holds the measured numbers.
    """
    try:
        yield
    except Exception as error:  # matplotlib and jinja2 may raise anything, but the measurement has succeeded
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"{path}: must show the figures of {figures}, but cannot be drawn ({type(error).__name__}: {reason}); read "
            "them in that JSON file, which is complete",
            stacklevel=3,
        )
    else:
        print(f"plots: {path}")
