"""What there is to answer in `prompts.paths`, read once before the long work, and what the answers will belong to."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from ..conversations import ConversationRefused, Conversations, Message
from ..prompts_report import group_refusals
from .dialogue import questions

QUIET_ROWS = 10_000
"""Read without a progress bar."""


@dataclass
class Survey:
    turns: dict[int, int] = field(default_factory=dict)
    """Answers to generate, by row."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Characters before the first answer, by row."""
    sources: dict[str, str] = field(default_factory=dict)
    """By path or name, a hash over the conversations in it."""
    refused: dict[str, str] = field(default_factory=dict)
    """By place, why a row cannot be answered."""

    def batches(self, batch_size: int) -> list[list[int]]:
        """Rows with as many turns and about as long questions together.

        Which rows meet in a batch depends on the data alone, whatever is answered already: answers may depend on it.
        """
        order = sorted(self.turns, key=lambda row: (self.turns[row], self.lengths[row], row))
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def hash_sources(conversations: Conversations, paths: Sequence[str]) -> dict[str, str]:
    """By path or name, the hash over the conversations in it by which a survey knows them."""
    digests = {path: hashlib.sha256() for path in paths}
    for row, name in enumerate(conversations.names):
        digests[conversations.origins[row][0].path].update(_line(name, conversations.messages(row)))
    return {path: digest.hexdigest() for path, digest in digests.items()}


def _line(name: str, messages: Sequence[Message]) -> bytes:
    """What a conversation adds to the hash of its source."""
    return json.dumps([name, messages]).encode() + b"\n"


def survey_conversations(conversations: Conversations, paths: Sequence[str]) -> Survey:
    """Read all conversations once.

    Raises:
        ValueError: none of them can be answered.
    """
    survey = Survey(refused=dict(conversations.refused))
    digests = {path: hashlib.sha256() for path in paths}
    num_rows = len(conversations.names)
    for row, name in enumerate(tqdm(conversations.names, desc="conversations", unit="row", disable=num_rows < QUIET_ROWS)):
        messages = conversations.messages(row)
        digests[conversations.origins[row][0].path].update(_line(name, messages))
        try:
            groups = questions(messages)
        except ConversationRefused as refusal:
            survey.refused[conversations.place(row)] = str(refusal)
            continue
        survey.turns[row], survey.lengths[row] = len(groups), sum(len(message["content"]) for message in groups[0])
    survey.sources = {path: digest.hexdigest() for path, digest in digests.items()}
    if not survey.turns:
        reasons = "".join(f", {group.count} refused ({group.reason})" for group in group_refusals(survey.refused))
        raise ValueError(
            f"prompts.paths: must hold at least one conversation to answer, but {', '.join(paths)} holds none{reasons}; correct the "
            "paths or the data"
        )
    return survey
