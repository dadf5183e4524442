"""Prints tables that keep their columns in a narrow terminal or a log file."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None, **options: bool
) -> None:
    """Print figures, aligned to the right in all columns but the first, on rich's console with these options."""
    table = Table(title=title, caption=caption)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(**options)  # type: ignore[arg-type]
    without_limit = console.options.update(max_width=10_000)
    console.width = max(console.width, Measurement.get(console, without_limit, table).maximum)
    console.print(table)
