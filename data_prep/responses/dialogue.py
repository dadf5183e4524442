"""Regenerates one conversation: makes the prompt of each turn and adds each response to the messages.

Every assistant turn is generated from a history of regenerated turns; all other messages stay as they are. Prompts are
rendered here with the target's own chat template, and responses are read as tokens, so no server-side parser can change
them. A conversation stores responses as text. `texts_kept` says whether rendering gives the same text again, since a
response that is rendered differently must not be supervised; `tokens_changed` counts responses whose text is the same
but whose tokens differ.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from os.path import commonprefix
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from mtptrain.data.chat_template import INCOMPLETE, decoded, render_text, tokenize_rendered
from mtptrain.data.conversation import ConversationRefused, Message
from mtptrain.target.probe_chats import PROBE

ASKING_ROLES = ("user", "tool")


class Ending(StrEnum):
    """Why a conversation ended."""

    complete = "complete"
    """Every question has a response. Also the value while the conversation goes on."""
    length = "length"
    """The last response was cut off at responses.max_new_tokens. It is kept."""
    empty = "empty"
    context = "context"
    template = "template"


ENDINGS = {
    Ending.empty: "the target's response is empty",
    Ending.context: "the prompt plus responses.max_new_tokens exceeds the context",
    Ending.template: "the chat template rejects the messages",
}
"""Reasons why the next response of a conversation is missing."""


@dataclass(frozen=True)
class Sampling:
    settings: Mapping[str, Any]
    """Temperature, limits and penalties, by the names of `NEUTRAL`."""
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    seed: int
    """In [0, 2^31). Depends only on the run's seed, the conversation's name and the turn. In this process, a batch has
    that of its first prompt."""


@dataclass(frozen=True)
class Response:
    token_ids: list[int]
    """Without the end-of-sequence token."""
    end_ids: list[int]
    """The end-of-sequence token; empty if the response was cut off or the server does not return the token."""
    is_cut: bool
    """Whether the response was cut off at `max_new_tokens`."""


@dataclass
class RegeneratedConversation:
    """A line of conversations.jsonl, which also has its seal."""

    row: int
    """Index among the usable conversations of `prompts.paths`."""
    id: str
    """Name of the conversation."""
    messages: list[Message] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    """`stop` or `length` for each response."""
    answer_tokens: list[int] = field(default_factory=list)
    """Number of generated tokens in each response, including the end-of-sequence token."""
    texts_kept: list[bool] = field(default_factory=list)
    """Whether the chat template renders each response as generated. It renders some differently, for example if the
    reasoning was cut off."""
    tokens_changed: int = 0
    """Number of responses that are rendered as generated but tokenized differently."""
    ended_by: Ending = Ending.complete


def questions(messages: Sequence[Message]) -> list[list[Message]]:
    """Returns one group of messages per response to generate: those since the previous assistant turn.

    Messages after the last assistant turn form a group too, so the conversation gets a response to them. Raises
    ConversationRefused if there is no user or tool message, or a response would not directly follow one.
    """
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            groups.append([])
        else:
            groups[-1].append(message)
    if not groups[-1]:
        groups.pop()
    if not any(message["role"] in ASKING_ROLES for message in messages):
        raise ConversationRefused("no user or tool message")
    if not all(group and group[-1]["role"] in ASKING_ROLES for group in groups):
        raise ConversationRefused("a response that would not follow a user or tool message")
    return groups


class Dialogue:
    """A conversation being regenerated: alternate `next_prompt` and `add_response` until there is no next prompt."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        regenerated: RegeneratedConversation,
        messages: Sequence[Message],
        sampling: Sampling,
        context_tokens: int,
    ) -> None:
        self.regenerated, self._questions = regenerated, questions(messages)
        self._tokenizer, self._sampling, self._context_tokens = tokenizer, sampling, context_tokens
        self._history: list[Message] = []
        self._prompt, self._prompt_ids = "", list[int]()

    def next_prompt(self) -> Prompt | None:
        """Returns the prompt of the next turn, or None if the conversation has ended."""
        turn = len(self.regenerated.finish_reasons)
        if self.regenerated.ended_by is not Ending.complete or turn == len(self._questions):
            return None
        self._history = [*self.regenerated.messages, *self._questions[turn]]
        try:
            self._prompt = render_text(self._tokenizer, self._history, is_prompt=True)
        except TemplateError:
            self._end_before(Ending.template)
            return None
        self._prompt_ids = tokenize_rendered(self._tokenizer, self._prompt)
        if len(self._prompt_ids) + self._sampling.max_new_tokens > self._context_tokens:
            self._end_before(Ending.context)
            return None
        digest = hashlib.sha256(f"{self._sampling.seed}/{turn}/{self.regenerated.id}".encode()).digest()
        return Prompt(self._prompt_ids, int.from_bytes(digest[:4], "big") >> 1)

    def add_response(self, response: Response) -> None:
        """Append the response. One that is empty, or that the template rejects, ends the conversation instead."""
        text = decode_response(self._tokenizer, self._prompt_ids, response.token_ids)
        if response.is_cut:
            text = text.rstrip(INCOMPLETE)
        if not text.strip():
            return self._end_before(Ending.empty)
        try:
            content, is_text_kept, are_tokens_kept = self._content_of(response, text)
        except TemplateError:
            return self._end_before(Ending.template)
        regenerated = self.regenerated
        regenerated.messages = [*self._history, {"role": "assistant", "content": content}]
        regenerated.finish_reasons.append("length" if response.is_cut else "stop")
        regenerated.answer_tokens.append(len(response.token_ids) + len(response.end_ids))
        regenerated.texts_kept.append(is_text_kept)
        regenerated.tokens_changed += is_text_kept and not are_tokens_kept
        if response.is_cut:
            regenerated.ended_by = Ending.length

    def _end_before(self, ending: Ending) -> None:
        self.regenerated.ended_by = ending
        if not self.regenerated.messages:  # keep the prompt of a conversation without responses
            self.regenerated.messages = self._history

    def _content_of(self, response: Response, text: str) -> tuple[str, bool, bool]:
        """Returns the content of the assistant message, whether its rendering has the text, and whether the tokens.

        A generation prompt may contain the beginning of the response (`<think>`). Some templates expect that beginning
        in the message too and others do not, so both contents are tried. If neither reproduces the response, the
        content is the generated text.
        """
        prompt, expected = self._prompt, [*self._prompt_ids, *response.token_ids, *response.end_ids]
        response_start = prompt[len(commonprefix([prompt, self._render(PROBE)])) :]  # noqa: RUF071 (texts, not paths)
        found = (text, False, False)
        for content in (text, response_start + text):
            rendered = self._render(content)
            if rendered.startswith(prompt + text):
                if tokenize_rendered(self._tokenizer, rendered)[: len(expected)] == expected:
                    return content, True, True
                found = found if found[1] else (content, True, False)
        return found

    def _render(self, answer: str) -> str:
        return render_text(self._tokenizer, [*self._history, {"role": "assistant", "content": answer}])


def decode_response(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], token_ids: list[int]) -> str:
    """Returns a response's text, decoded after its prompt: some tokenizers decode the start of a text differently."""
    prompt, whole = decoded(tokenizer, prompt_ids), decoded(tokenizer, [*prompt_ids, *token_ids])
    return whole[len(prompt) :] if whole.startswith(prompt) else decoded(tokenizer, token_ids)
