"""Goes through the conversations before generation starts, to count the turns to generate and to hash the sources."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from mtptrain.data.conversation import ConversationRefused
from mtptrain.utils.progress import ProgressBar

from ..conversations import Conversations
from .dialogue import questions


@dataclass
class Survey:
    """Facts about the conversations to answer. A row is the index of a conversation in `Conversations.names`."""

    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of responses to generate in each conversation, and of characters before the first one, by row."""
    sources: dict[str, str] = field(default_factory=dict)
    """Hash of the conversations in each path of `prompts.paths`."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a conversation cannot be used, by its location, as in `Conversations.location`."""

    @property
    def num_turns(self) -> int:
        return sum(turns for turns, _ in self.sizes.values())

    def batches(self, batch_size: int) -> list[list[int]]:
        """Returns batches of rows, sorted by number of turns and then prompt length, so that a batch has similar rows.

        Batches depend only on the data, not on which rows are done, because a response may depend on its batch.
        """
        order = sorted(self.sizes, key=lambda row: (self.sizes[row], row))
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def survey_conversations(conversations: Conversations, paths: Sequence[str]) -> Survey:
    """Counts turns and hashes sources in one pass over all conversations."""
    survey, digests = Survey(refused=dict(conversations.refused)), {path: hashlib.sha256() for path in paths}
    for row, name in enumerate(ProgressBar(conversations.names, desc="conversations", unit="row", delay=2.0)):
        messages = conversations.messages(row)
        digests[conversations.origins[row][0].path].update(json.dumps([name, messages]).encode() + b"\n")
        try:
            groups = questions(messages)
            survey.sizes[row] = len(groups), sum(len(message["content"]) for message in groups[0])
        except ConversationRefused as refusal:
            survey.refused[conversations.location(row)] = str(refusal)
    survey.sources = {path: digest.hexdigest() for path, digest in digests.items()}
    return survey
