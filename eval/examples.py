"""Chooses example answers, and marks which of their tokens were accepted drafts."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtptrain.decoding.acceptance import has_loop
from mtptrain.decoding.speculate import Generation

from .measurement import Measured

NUM_EXAMPLES, PROMPT_TOKENS = 3, 48
"""Number of examples in a report, and number of tokens that they show from the end of each prompt."""
INCOMPLETE = "\ufffd"
"""The replacement character, as which tokenizers decode a character whose last bytes are missing."""


def is_accepted(generation: Generation) -> list[bool]:
    """Returns, for each token of an answer, whether it was an accepted draft.

    The target chooses the first token, and one bonus token after the accepted drafts of each round.
    """
    flags = [False]
    for count in generation.accepted_by_round:
        flags += [True] * count + [False]
    return flags[: len(generation.tokens)]


def examples(
    measured: Measured, prompts: dict[str, list[int]], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Chooses first-turn answers with low, median and high acceptance length.

    Answers without drafts are left out, and so are answers that loop, unless all of them loop.

    Returns:
        For each example, the prompt's id, the end of its text, the answer's acceptance length, and the answer's
        text as `pieces` returns it.
    """
    firsts = {prompt_id: answer.generation for (prompt_id, turn), answer in measured.answers.items() if turn == 1}
    drafted = {prompt_id: each for prompt_id, each in firsts.items() if each.rounds}
    ranked = sorted(
        {prompt_id: each for prompt_id, each in drafted.items() if not has_loop(each.tokens)} or drafted,
        key=lambda prompt_id: acceptance_length(drafted[prompt_id]),
    )
    count = min(NUM_EXAMPLES, len(ranked))
    chosen = [ranked[(2 * i + 1) * len(ranked) // (2 * count)] for i in range(count)]
    return [
        {
            "id": prompt_id,
            "prompt": decoded(tokenizer, prompts[prompt_id][-PROMPT_TOKENS:]),
            "acceptance_length": acceptance_length(drafted[prompt_id]),
            "pieces": pieces(drafted[prompt_id], tokenizer),
        }
        for prompt_id in chosen
    ]


def acceptance_length(generation: Generation) -> float:
    return 1 + sum(generation.accepted_at) / generation.rounds


def pieces(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Returns the answer's text in pieces, each with a flag that is True if the piece consists of accepted drafts.

    A piece is what its tokens add to the text before them. A character whose bytes are tokens of several pieces is part
    of the last of these.
    """
    found, text, end = [], "", 0
    for accepted, run in groupby(is_accepted(generation)):
        end += len(list(run))
        longer = decoded(tokenizer, generation.tokens[:end])
        if end < len(generation.tokens):
            longer = longer.rstrip(INCOMPLETE)
        found.append((longer[len(text) :], accepted))
        text = longer
    return found


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens)))
