"""Tests how many kernels a packing needs.

That kernels pair each draft position with the right tokens is shown by the tests of attention, `test_layers.py` and
`test_dflash.py`.
"""

import math

import numpy as np

from mtptrain.heads.packing import Packing
from tests.mtptrain.heads.dense import seen_tokens


def test_few_kernels_are_needed_for_many_answers_and_for_single_draft_positions() -> None:
    # Twenty answers in one document and two in another: a kernel for the answers, 20 for the tokens before them.
    answers = Packing.of_spans([200, 30], [(0, 10 * i + 5, 5) for i in range(20)] + [(1, 10, 5), (1, 20, 5)])
    assert answers.segments[0].keys == slice(0, 110) and len(answers.segments) == 1 + 20
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 60, 4).tolist()
    points = [np.sort(generator.choice(length, generator.integers(1, length + 1), replace=False)) for length in lengths]
    packing = Packing.of_points(lengths, points)
    assert len(packing.segments) == 1 + math.ceil(math.log2(max(map(len, points))))
    assert packing.num_pairs() == seen_tokens(packing).sum()
