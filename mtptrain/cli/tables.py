"""Prints tables that keep their columns in a narrow terminal or a log file."""

from rich.console import Console


def wide_console(least: int, **options: bool) -> Console:
    """Returns rich's console with these options, at least `least` characters wide."""
    console = Console(**options)  # type: ignore[arg-type]
    console.width = max(console.width, least)
    return console
