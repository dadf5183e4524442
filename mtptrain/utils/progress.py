"""The progress bar of all programs: a bar in a terminal, a line every ten seconds in a log file."""

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """tqdm's bar. Where stderr is no terminal, it writes a line every `SECONDS_BETWEEN_LINES` and one at the end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._writes_lines = not sys.stderr.isatty()
        self._is_closing, self._written_at = False, time.monotonic()
        self.num_tokens = 0
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if not self._writes_lines:
            super().display(msg, pos)
        elif self._is_closing or time.monotonic() - self._written_at >= SECONDS_BETWEEN_LINES:
            self._written_at = time.monotonic()
            self.fp.write(f"{self if msg is None else msg}" + ("" if self._is_closing else "\n"))  # tqdm ends the last
            self.fp.flush()

    def add_tokens(self, num_tokens: int, more: str = "") -> None:
        """Show tokens, which grow before the first item is finished. The bar needs `miniters=0` to draw without one."""
        self.num_tokens += num_tokens
        speed = self.num_tokens / max(self.format_dict["elapsed"], 1e-9)
        self.set_postfix_str(f"{self.num_tokens:,} tokens, {speed:,.0f} tok/s{more}", refresh=False)
        self.update(0)

    def close(self) -> None:
        self._is_closing = True
        super().close()
