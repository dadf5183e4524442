"""Tests what a progress bar shows."""

import io

from data_prep.responses.regenerate import ResponsesBar
from mtptrain.utils.distributed import Ranks, init_ranks
from mtptrain.utils.progress import ProgressBar


def test_tokens_are_shown_before_the_first_item_is_finished() -> None:
    with ProgressBar(total=3, unit="prompt", file=io.StringIO(), miniters=0, mininterval=0.0) as bar:
        bar.add_tokens(1000)
        bar.add_tokens(200, ", acceptance length 1.80")
        assert " 0/3 " in str(bar) and "1,200 tokens, " in str(bar) and "acceptance length 1.80" in str(bar)


def test_answers_of_all_ranks_count_from_their_first_token() -> None:
    init_ranks(1)
    first, second = (ResponsesBar(4, Ranks(rank, 2, rank), most_tokens=10) for rank in range(2))
    second.add_tokens(20)
    first.add_tokens(6)
    assert " 2/4 " in str(first) and "26 tokens, " in str(first)
    second.finish(15)  # all that it has, and one of ten tokens is left
    first.add_tokens(1)
    assert " 2/4 " in str(first) and "27 tokens, " in str(first)
