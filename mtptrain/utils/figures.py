"""Shares and means of what was counted, which are None where nothing was, and how tables show them."""

from collections.abc import Sequence

Figure = float | None


def share(count: float, of: float) -> Figure:
    """Returns a share or a mean, or None without anything to have it."""
    return count / of if of else None


def shares(counts: Sequence[float], of: Sequence[float]) -> list[Figure]:
    return [share(*pair) for pair in zip(counts, of, strict=True)]


def shown(figure: Figure, digits: int = 3) -> str:
    """Returns a figure with so many digits after the point, or an empty text for one without data."""
    return "" if figure is None else f"{figure:,.{digits}f}"
