"""Reads `prompts.paths` once before generation starts, to count the turns to generate and to hash the sources."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from mtptrain.data.rows import ConversationRefused, Message
from mtptrain.utils.errors import UserError

from ..conversations import Conversations
from ..prompts_report import group_refusals
from .dialogue import questions


@dataclass
class Survey:
    turns: dict[int, int] = field(default_factory=dict)
    """Number of responses to generate in each conversation, by its row: its index among the usable conversations."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Number of characters before the first response of each conversation, by row."""
    sources: dict[str, str] = field(default_factory=dict)
    """Hash of the conversations in each path of `prompts.paths`."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a conversation cannot be used, by its location: its path, and its line or row number."""

    def batches(self, batch_size: int) -> list[list[int]]:
        """Returns batches of rows, sorted by number of turns and then prompt length, so that a batch has similar rows.

        Batches depend only on the data, not on which rows are done, because a response may depend on its batch.
        """
        order = sorted(self.turns, key=lambda row: (self.turns[row], self.lengths[row], row))
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def hash_sources(conversations: Conversations, paths: Sequence[str]) -> dict[str, str]:
    """Returns the hash of the conversations in each path, as in `Survey.sources`."""
    digests = {path: hashlib.sha256() for path in paths}
    for row, name in enumerate(conversations.names):
        digests[conversations.origins[row][0].path].update(_line(name, conversations.messages(row)))
    return {path: digest.hexdigest() for path, digest in digests.items()}


def _line(name: str, messages: Sequence[Message]) -> bytes:
    """Returns the bytes that a conversation adds to the hash of its source."""
    return json.dumps([name, messages]).encode() + b"\n"


def survey_conversations(conversations: Conversations, paths: Sequence[str]) -> Survey:
    """Counts turns and hashes sources in one pass over all conversations.

    Raises:
        UserError: no conversation can be used.
    """
    survey = Survey(refused=dict(conversations.refused))
    digests = {path: hashlib.sha256() for path in paths}
    for row, name in enumerate(tqdm(conversations.names, desc="conversations", unit="row", delay=2.0)):
        messages = conversations.messages(row)
        digests[conversations.origins[row][0].path].update(_line(name, messages))
        try:
            groups = questions(messages)
        except ConversationRefused as refusal:
            survey.refused[conversations.location(row)] = str(refusal)
            continue
        survey.turns[row], survey.lengths[row] = len(groups), sum(len(message["content"]) for message in groups[0])
    survey.sources = {path: digest.hexdigest() for path, digest in digests.items()}
    if not survey.turns:
        reasons = ", ".join(f"{group.count} refused: {group.reason}" for group in group_refusals(survey.refused))
        raise UserError(
            "prompts.paths: must hold at least one conversation that the target can answer, but there is none in "
            f"{', '.join(paths)}{f' ({reasons})' if reasons else ''}; correct the paths or the data"
        )
    return survey
