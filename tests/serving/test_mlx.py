"""Tests that MLX's counters equal ours, and that each of its traps is found."""

from tests.serving.cases import Case, cases_of, each
from tests.serving.mlx import NORMS
from tests.serving.ours import Serve, check_equal

MOVED = {
    Case(head, "llama" if head == "draft_model" else "qwen3_5", broken=broken): head == "eagle3"
    for head in NORMS
    for broken in ("layer_ids", "norm", "first_token")
    if (head, broken) != ("draft_model", "layer_ids")
}
"""Heads of which something is moved by one, and whether each is quick."""


@each(cases_of("mlx"))
def test_mlx_counts_as_we_do(serve_by_mlx: Serve, case: Case) -> None:
    check_equal(serve_by_mlx, case)


@each(MOVED)
def test_what_is_moved_by_one_changes_the_counters(serve_by_mlx: Serve, case: Case) -> None:
    ours, theirs, counted = serve_by_mlx(case)
    assert theirs.counts != counted
    assert case.broken == "first_token" or theirs.tokens == [generation.tokens for generation in ours]
