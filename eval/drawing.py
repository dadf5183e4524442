"""Draws pages and plots after the figures are on disk, so that a failure to draw loses no measurement."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def drawing(path: Path, figures: Path) -> Iterator[None]:
    """Prints the path of a page or plot after the context has drawn it. If drawing fails, warns instead of raising.

    Args:
        path: the page or plot.
        figures: the JSON file that already holds the figures.
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
