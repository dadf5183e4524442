"""Tests what a progress bar shows."""

import io

from mtptrain.utils.progress import ProgressBar


def test_tokens_are_shown_before_the_first_item_is_finished() -> None:
    with ProgressBar(total=3, unit="prompt", file=io.StringIO(), miniters=0, mininterval=0.0) as bar:
        bar.add_tokens(1000)
        bar.add_tokens(200, ", acceptance length 1.80")
        assert " 0/3 " in str(bar) and "1,200 tokens, " in str(bar) and "acceptance length 1.80" in str(bar)
