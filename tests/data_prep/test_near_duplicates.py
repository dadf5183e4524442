"""Tests that questions that nearly repeat each other are found, as a comparison of all pairs finds them."""

import random
from itertools import combinations, pairwise

from data_prep.near_duplicates import join_near_duplicates
from mtptrain.data.conversation import normalise, text_hash

WORDS = [f"word{i}" for i in range(200)]


def runs(text: str) -> set[tuple[str, ...]]:
    words = normalise(text).split()
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def similarity(a: str, b: str) -> float:
    return len(runs(a) & runs(b)) / len(runs(a) | runs(b))


def families(num_changed: int) -> list[str]:
    """Returns 40 questions of 60 words, of which each has a copy with some other words in a row at its end."""
    draw = random.Random(0)
    originals = [[draw.choice(WORDS) for _ in range(60)] for _ in range(40)]
    copies = [
        [*words[: 60 - num_changed], *(f"new{number}.{i}" for i in range(num_changed))]
        for number, words in enumerate(originals)
    ]
    return [" ".join(words) for words in originals + copies]


def clusters(texts: list[str], least: float) -> list[str]:
    return join_near_duplicates([text_hash(text) for text in texts], texts.__getitem__, least)


def test_near_duplicates_are_those_that_a_comparison_of_all_pairs_finds() -> None:
    for num_changed, least in ((4, 0.8), (20, 0.8), (12, 0.5)):
        texts = families(num_changed)
        found = clusters(texts, least)
        for (i, a), (j, b) in combinations(enumerate(texts), 2):
            assert (found[i] == found[j]) == (similarity(a, b) >= least), (num_changed, similarity(a, b))


def test_a_cluster_joins_what_a_chain_of_near_duplicates_connects_in_any_order() -> None:
    words = [f"w{i}" for i in range(100)]
    chain = [" ".join([*words[:i], *(f"x{j}" for j in range(i, 100))]) for i in range(0, 101, 5)]
    assert similarity(chain[0], chain[-1]) == 0.0 and all(similarity(a, b) > 0.85 for a, b in pairwise(chain))
    found = clusters(chain, 0.8)
    assert len(set(found)) == 1 and found[0] == min(text_hash(text) for text in chain)
    order = random.Random(1).sample(range(len(chain)), len(chain))
    assert clusters([chain[i] for i in order], 0.8) == found


def test_spelling_does_not_count_and_short_questions_are_not_compared() -> None:
    texts = ["How many of these words are there in it?", "how MANY of these\nwords are there in it?!"]
    assert len(set(join_near_duplicates(["a", "b"], texts.__getitem__, 0.7))) == 1
    assert join_near_duplicates(["b", "a", "b"], lambda i: "What is two and two?", 0.5) == ["b", "a", "b"]
