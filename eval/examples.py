"""Chooses example answers, and marks which of their tokens were accepted drafts."""

from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtptrain.data.chat_template import INCOMPLETE, decoded
from mtptrain.decoding.acceptance import has_loop
from mtptrain.decoding.speculate import Generation

from .measurement import Measured

NUM_EXAMPLES, PROMPT_TOKENS = 3, 48
"""Number of examples in a report, and number of tokens that they show from the end of each prompt."""


def examples(
    measured: Measured, prompts: dict[str, list[int]], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Chooses first-turn answers with low, median and high acceptance length.

    Answers without drafts are left out, and so are answers that loop, unless all of them loop. Returns, for each, the
    prompt's id, the end of its text, the acceptance length, and the answer's text as `pieces` returns it.
    """
    firsts = {prompt_id: answer.generation for (prompt_id, turn), answer in measured.answers.items() if turn == 1}
    drafted = {prompt_id: each for prompt_id, each in firsts.items() if each.rounds}
    ranked = sorted(
        {prompt_id: each for prompt_id, each in drafted.items() if not has_loop(each.tokens)} or drafted,
        key=lambda prompt_id: drafted[prompt_id].acceptance_length,
    )
    count = min(NUM_EXAMPLES, len(ranked))
    # Take the middle of each of `count` equal parts.
    chosen = [ranked[(2 * i + 1) * len(ranked) // (2 * count)] for i in range(count)]
    return [
        {
            "id": prompt_id,
            "prompt": decoded(tokenizer, prompts[prompt_id][-PROMPT_TOKENS:]),
            "acceptance_length": drafted[prompt_id].acceptance_length,
            "pieces": pieces(drafted[prompt_id], tokenizer),
        }
        for prompt_id in chosen
    ]


def pieces(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Returns the answer's text in pieces, each with a flag that is True if the piece consists of accepted drafts.

    A piece is what its tokens add to the text of all tokens before them: decoded alone, they could lose a space at
    their beginning. A character whose bytes are in several pieces belongs to the last of them.
    """
    parts: list[tuple[str, bool]] = []
    end = num_shown = 0
    flags = [False]  # the target chooses the first token, and a bonus token after the accepted drafts of each round
    for count in generation.accepted_by_round:
        flags += [True] * count + [False]
    for accepted, run in groupby(flags[: len(generation.tokens)]):
        end += len(list(run))
        text = decoded(tokenizer, generation.tokens[:end])
        if end < len(generation.tokens):
            text = text.rstrip(INCOMPLETE)
        if len(text) > num_shown:
            parts.append((text[num_shown:], accepted))
            num_shown = len(text)
    return parts
