"""A conversation while the target answers it anew: the prompt of each turn, and each answer's place among the messages.

Every assistant turn is generated with the new turns before it as its history; what others say stays. A prompt is rendered here, with
the target's own chat template, and an answer is the tokens that the target made of it, so no parser of a server stands in between. An
answer is kept as text, because a conversation is text; whether rendering it gives that text again is checked and kept beside it, for
an answer that is rendered otherwise must not be supervised, and whether it gives the same tokens is counted.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from os.path import commonprefix

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from mtptrain.data.prompt_files import render_prompt

from ..conversations import ConversationRefused, Message

ASKING_ROLES = ("user", "tool")
_PROBE = "\ue000"  # of Unicode's private use: no template writes it itself
_INCOMPLETE = "\ufffd"  # what decoding makes of the first bytes of a character whose others were not generated


class Ending(StrEnum):
    """Why a conversation has no more answers."""

    complete = "complete"
    length = "length"
    """The last answer was cut at responses.max_new_tokens."""
    empty = "empty"
    """The next answer holds no text."""
    context = "context"
    """The next prompt with an answer of responses.max_new_tokens is longer than the context."""
    template = "template"
    """The chat template does not accept the messages."""


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    seed: int
    """Depends on the run's seed, the conversation's name and the turn alone."""


@dataclass(frozen=True)
class Answer:
    """What a target made of a prompt, without the token that ended it."""

    num_tokens: int
    """Generated ones, that which ended it included."""
    is_cut: bool
    """At the limit of new tokens."""
    token_ids: list[int] | None = None
    """None where a server gives text alone."""
    stop_token_id: int | None = None
    """The token that ended it; None where it was cut or is not known."""
    text: str = ""
    """Read only where there are no token ids."""


@dataclass(frozen=True)
class Sampling:
    """How every answer is generated."""

    temperature: float
    """0 is greedy."""
    top_p: float
    top_k: int
    """0 keeps all tokens."""
    max_new_tokens: int
    stop_token_ids: Sequence[int]


@dataclass(frozen=True)
class Limits:
    """What holds for every conversation of a run."""

    max_new_tokens: int
    context_tokens: int
    """Of prompt and answer together."""
    seed: int


@dataclass
class AnsweredConversation:
    """A line of conversations.jsonl."""

    row: int
    """Among the usable conversations of `prompts.paths`."""
    id: str
    """The name of the conversation."""
    messages: list[Message] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    """Of each answer: `stop` or `length`."""
    answer_tokens: list[int] = field(default_factory=list)
    """Generated tokens of each answer, its end included."""
    texts_kept: list[bool] = field(default_factory=list)
    """Whether the chat template renders each answer as it was generated: an answer cut in its reasoning it does not, say."""
    tokens_changed: int = 0
    """Answers whose text is rendered as generated, but becomes other tokens."""
    ended_by: Ending = Ending.complete


def questions(messages: Sequence[Message]) -> list[list[Message]]:
    """What stands before each answer, the last question's included where nobody has answered it yet.

    Raises:
        ConversationRefused: the conversation has no question, or an answer follows none.
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
        raise ConversationRefused("no user's turn")
    if not all(group and group[-1]["role"] in ASKING_ROLES for group in groups):
        raise ConversationRefused("a turn of the assistant that answers no user's")
    return groups


class Dialogue:
    """Asks for one answer after the other: `next_prompt`, then `take`, until there is no prompt."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, row: int, name: str, messages: Sequence[Message], limits: Limits
    ) -> None:
        self.answered = AnsweredConversation(row, name)
        self._tokenizer = tokenizer
        self._questions = questions(messages)
        self._limits = limits
        self._asked: list[Message] = []
        self._prompt_ids: list[int] = []

    def next_prompt(self) -> Prompt | None:
        """The prompt of the next turn; None where the conversation has ended."""
        turn = len(self.answered.finish_reasons)
        if self.answered.ended_by is not Ending.complete or turn == len(self._questions):
            return None
        self._asked = [*self.answered.messages, *self._questions[turn]]
        try:
            self._prompt_ids = render_prompt(self._tokenizer, self._asked)
        except ValueError:
            self._end_before(Ending.template)
            return None
        if len(self._prompt_ids) + self._limits.max_new_tokens > self._limits.context_tokens:
            self._end_before(Ending.context)
            return None
        return Prompt(self._prompt_ids, turn_seed(self._limits.seed, self.answered.id, turn))

    def take(self, answer: Answer) -> None:
        """Put the answer to the last prompt in its place."""
        text = answer_text(self._tokenizer, self._prompt_ids, answer)
        if answer.is_cut:
            text = text.rstrip(_INCOMPLETE)
        if not text.strip():
            return self._end_before(Ending.empty)
        try:
            content, is_text_kept, are_tokens_kept = place_answer(self._tokenizer, self._asked, self._prompt_ids, answer, text)
        except TemplateError:
            return self._end_before(Ending.template)
        answered = self.answered
        answered.messages = [*self._asked, {"role": "assistant", "content": content}]
        answered.finish_reasons.append("length" if answer.is_cut else "stop")
        answered.answer_tokens.append(answer.num_tokens)
        answered.texts_kept.append(is_text_kept)
        answered.tokens_changed += is_text_kept and not are_tokens_kept
        if answer.is_cut:
            answered.ended_by = Ending.length

    def _end_before(self, ending: Ending) -> None:
        self.answered.ended_by = ending
        if not self.answered.messages:  # a row without an answer still shows what was asked
            self.answered.messages = self._asked


def turn_seed(seed: int, name: str, turn: int) -> int:
    """A number in [0, 2^31) for the random numbers of one answer."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}/{name}".encode()).digest()[:4], "big") >> 1


def answer_text(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer: Answer) -> str:
    """The text that the answer adds to its prompt: some tokenizers write a first token otherwise where nothing stands before it."""
    if answer.token_ids is None:
        return answer.text
    prompt = _decode(tokenizer, prompt_ids)
    whole = _decode(tokenizer, [*prompt_ids, *answer.token_ids])
    return whole[len(prompt) :] if whole.startswith(prompt) else _decode(tokenizer, answer.token_ids)


def place_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt_ids: Sequence[int], answer: Answer, text: str
) -> tuple[str, bool, bool]:
    """The content of the assistant's message, and whether rendering it gives back the answer's text and its tokens.

    A template may begin the answer itself in the prompt for it (`<think>`), and expect that beginning in the message or not: both are
    tried. Where neither gives the answer back, it is kept as it was generated.

    Raises:
        TemplateError: the template does not accept the answer.
    """
    prompt = render_text(tokenizer, messages, is_prompt=True)
    probed = render_text(tokenizer, [*messages, {"role": "assistant", "content": _PROBE}])
    opened = prompt[len(commonprefix([prompt, probed])) :]  # noqa: RUF071 (of characters, as is meant)
    contents = dict.fromkeys((text, opened + text))
    rendered = {content: render_text(tokenizer, [*messages, {"role": "assistant", "content": content}]) for content in contents}
    kept = [content for content in contents if rendered[content].startswith(prompt + text)]
    if not kept:
        return text, False, False
    if answer.token_ids is None:
        return kept[0], True, True
    end = [] if answer.stop_token_id is None else [answer.stop_token_id]
    expected = [*prompt_ids, *answer.token_ids, *end]
    for content in kept:
        token_ids = list(tokenizer(rendered[content], add_special_tokens=False, verbose=False)["input_ids"])
        if token_ids[: len(expected)] == expected:
            return content, True, True
    return kept[0], True, False


def render_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], is_prompt: bool = False) -> str:
    """The messages in the chat template; with `is_prompt`, up to where the assistant begins to answer.

    Raises:
        TemplateError: the template does not accept them.
    """
    rendered = tokenizer.apply_chat_template(
        [dict(message) for message in messages], add_generation_prompt=is_prompt, tokenize=False
    )
    assert isinstance(rendered, str)
    return rendered


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    decoded = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(decoded, str)
    return decoded
