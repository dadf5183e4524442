"""Goes through the conversations before generation starts, to count the turns to generate and to hash the sources."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from mtptrain.data.conversation import ConversationRefused, Message
from mtptrain.utils.errors import UserError

from ..conversations import Conversations
from ..prompts_report import group_refusals
from .dialogue import questions


@dataclass
class Survey:
    """Facts about the conversations to answer. A row is the index of a conversation in `Conversations.names`."""

    turns: dict[int, int] = field(default_factory=dict)
    """Number of responses to generate in each conversation, by row."""
    prompt_characters: dict[int, int] = field(default_factory=dict)
    """Number of characters before the first response of each conversation, by row."""
    sources: dict[str, str] = field(default_factory=dict)
    """Hash of the conversations in each path of `prompts.paths`."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a conversation cannot be used, by its location, as in `Conversations.location`."""

    def batches(self, batch_size: int) -> list[list[int]]:
        """Returns batches of rows, sorted by number of turns and then prompt length, so that a batch has similar rows.

        Batches depend only on the data, not on which rows are done, because a response may depend on its batch.
        """
        order = sorted(self.turns, key=lambda row: (self.turns[row], self.prompt_characters[row], row))
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def hash_sources(
    conversations: Conversations, paths: Sequence[str], visit: Callable[[int, list[Message]], None] | None = None
) -> dict[str, str]:
    """Returns the hash of the conversations in each path, as in `Survey.sources`.

    Args:
        conversations: the conversations.
        paths: their paths.
        visit: called with the row and the messages of each conversation, so that one pass serves both.
    """
    digests = {path: hashlib.sha256() for path in paths}
    for row, name in enumerate(tqdm(conversations.names, desc="conversations", unit="row", delay=2.0)):
        messages = conversations.messages(row)
        digests[conversations.origins[row][0].path].update(json.dumps([name, messages]).encode() + b"\n")
        if visit:
            visit(row, messages)
    return {path: digest.hexdigest() for path, digest in digests.items()}


def survey_conversations(conversations: Conversations, paths: Sequence[str]) -> Survey:
    """Counts turns and hashes sources in one pass over all conversations.

    Raises:
        UserError: no conversation can be used.
    """
    survey = Survey(refused=dict(conversations.refused))

    def count(row: int, messages: list[Message]) -> None:
        try:
            groups = questions(messages)
        except ConversationRefused as refusal:
            survey.refused[conversations.location(row)] = str(refusal)
            return
        survey.turns[row] = len(groups)
        survey.prompt_characters[row] = sum(len(message["content"]) for message in groups[0])

    survey.sources = hash_sources(conversations, paths, count)
    if not survey.turns:
        reasons = ", ".join(f"{group.count} refused: {group.reason}" for group in group_refusals(survey.refused))
        raise UserError(
            "prompts.paths: must hold at least one conversation that the target can answer, but there is none in "
            f"{', '.join(paths)} ({reasons}); correct the paths or the data"
        )
    return survey
