"""How pages and plots are drawn: after the figures are on disk, so one that cannot be drawn loses no measurement."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def drawing(path: Path, figures: Path) -> Iterator[None]:
    """Draws a page or plot and says where it is. If that fails, it only warns.

    Args:
        path: the page or plot.
        figures: the JSON file that holds the figures already.
    """
    try:
        yield
    except Exception as error:  # matplotlib and jinja2 may raise anything, but the measurement has succeeded
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"{path}: must show the figures of {figures}, but cannot be drawn ({type(error).__name__}: {reason}); read "
            "them in the file, which is complete",
            stacklevel=3,
        )
    else:
        print(f"plots: {path}")
