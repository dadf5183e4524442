"""Joins questions that nearly repeat each other, so that a split keeps them on one side.

A question is the first user turn of a conversation; system prompts and later turns are not compared. Two questions are
near duplicates if their sets of runs of three words have a large Jaccard similarity, as MinHash estimates it. Texts of
fewer than `MIN_WORDS` words are not compared: a single other word makes another question of them.
"""

from collections.abc import Callable, Sequence

from rensa import RMinHash, RMinHashLSH

from mtptrain.data.conversation import normalise
from mtptrain.utils.progress import ProgressBar

RUN_WORDS, MIN_WORDS = 3, 8
NUM_HASHES, NUM_BANDS = 128, 32
"""With 32 bands of 4 hashes, two questions of similarity s are compared with probability 1 - (1 - s**4)**32: nearly 1
from 0.7 on, but 0.87 at 0.5."""


def join_near_duplicates(groups: Sequence[str], question: Callable[[int], str], similarity: float) -> list[str]:
    """Returns the name of each conversation's cluster: the first name of all groups that are joined to its own.

    The names do not depend on the order of the conversations. `question` returns the text of a conversation's question
    by its index, and `similarity` is the least of near duplicates, in [0.5, 1).
    """
    index_of = {group: index for index, group in reversed(list(enumerate(groups)))}
    names = sorted(index_of)
    joined = list(range(len(names)))  # a tree of each cluster, whose root is its smallest number
    signatures: dict[int, RMinHash] = {}
    table = RMinHashLSH(threshold=similarity, num_perm=NUM_HASHES, num_bands=NUM_BANDS)

    def root(number: int) -> int:
        while joined[number] != number:
            joined[number] = number = joined[joined[number]]
        return number

    for number, name in enumerate(ProgressBar(names, desc="near duplicates", unit="question", delay=2.0)):
        words = normalise(question(index_of[name])).split()
        if len(words) < MIN_WORDS:
            continue
        signature = RMinHash(num_perm=NUM_HASHES, seed=0)
        signature.update([" ".join(words[i : i + RUN_WORDS]) for i in range(len(words) - RUN_WORDS + 1)])
        for other in table.query(signature):
            first, second = sorted((root(number), root(other)))
            if first != second and signature.jaccard(signatures[other]) >= similarity:
                joined[second] = first
        table.insert(number, signature)
        signatures[number] = signature
    cluster_of = {name: names[root(number)] for number, name in enumerate(names)}
    return [cluster_of[group] for group in groups]
