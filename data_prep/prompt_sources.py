"""Gives every prompt source the same interface: named files, conversations or rows of tokens, encoded on demand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from mtptrain.config import PromptsConfig, PromptSource
from mtptrain.data.chat_template import special_tokens
from mtptrain.data.identity import TargetIdentity
from mtptrain.data.refusal import ConversationRefused
from mtptrain.data.rows import NOT_TRAINED, RowFormat
from mtptrain.data.tool_calls import Message
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError

from .assistant_masks import Encoding, check_chat_template, encode_renderings
from .conversations import Conversations, read_conversations
from .near_duplicates import join_near_duplicates
from .renderings import Rendering, render_conversation
from .responses.dialogue import Ending
from .responses.manifest import read_responses
from .text_files import read_text_files
from .token_rows import read_token_rows


class Source(Protocol):
    names: list[str]
    groups: list[str]
    """Name of each item's group. The items of a group have the same question."""
    clusters: list[str]
    """Name of each item's cluster of near-duplicate groups. All items of a cluster go to one split."""
    refused: dict[str, str]
    """Why an item is not in `names`, by location."""

    def location(self, index: int) -> str:
        """Returns where item `index` comes from, for messages."""

    def encode(self, indices: Sequence[int]) -> list[list[Encoding] | str]:
        """Returns the documents, usually one, of each item, or the reason for refusing it."""


class TextSource:
    """Whole files with text, after a beginning-of-text token if the tokenizer has one; every token is supervised."""

    def __init__(self, texts: dict[str, str], refused: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.names = self.groups = self.clusters = [name for name, text in texts.items() if text]
        self.refused = refused | {name: "empty" for name, text in texts.items() if not text}
        self._texts = [texts[name] for name in self.names]
        self._tokenizer = tokenizer

    def location(self, index: int) -> str:
        return self.names[index]

    def encode(self, indices: Sequence[int]) -> list[list[Encoding] | str]:
        texts = [self._texts[i] for i in indices]
        bos = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        batch = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        documents = [np.array([*bos, *token_ids], np.int32) for token_ids in batch]  # [S] each
        return [[Encoding(ids, np.ones(len(ids), np.uint8))] for ids in documents]


class ConversationSource:
    """Conversations in the target's chat template; the tokens that the assistant generates are supervised."""

    is_generated = False
    """Whether the target generated the answers."""

    def __init__(
        self, conversations: Conversations, tokenizer: PreTrainedTokenizerBase, near_duplicate_similarity: float
    ) -> None:
        self.names = conversations.names
        self.groups = self.clusters = conversations.groups
        if near_duplicate_similarity < 1.0:
            self.clusters = join_near_duplicates(self.groups, conversations.question, near_duplicate_similarity)
        self.refused = conversations.refused
        self._conversations = conversations
        self._tokenizer = tokenizer

    def location(self, index: int) -> str:
        return self._conversations.location(index)

    def encode(self, indices: Sequence[int]) -> list[list[Encoding] | str]:
        rendered = [self._render(i) for i in indices]
        renderings = [rendering for item in rendered if not isinstance(item, str) for rendering in item]
        encodings = iter(encode_renderings(self._tokenizer, renderings))
        return [item if isinstance(item, str) else list(islice(encodings, len(item))) for item in rendered]

    def _messages(self, index: int) -> list[Message]:
        return self._conversations.messages(index)

    def _render(self, index: int) -> list[Rendering] | str:
        try:
            return render_conversation(self._tokenizer, self._messages(index), self.is_generated)
        except ConversationRefused as refusal:
            return str(refusal)


class ResponsesSource(ConversationSource):
    """Conversations that mtptrain responses has regenerated.

    The loss mask leaves out responses that the template does not render as generated, and the end-of-turn token that
    the template adds after a response that was cut off.
    """

    is_generated = True

    def encode(self, indices: Sequence[int]) -> list[list[Encoding] | str]:
        special_ids = list(special_tokens(self._tokenizer))
        documents = super().encode(indices)
        for index, encodings in zip(indices, documents, strict=True):
            row = self._conversations.row(index)
            if row["ended_by"] == Ending.length and row["texts_kept"][-1] and not isinstance(encodings, str):
                whole = encodings[0]  # contains the last response
                last = np.flatnonzero(whole.loss_mask)[-1:]
                whole.loss_mask[last] = ~np.isin(whole.input_ids[last], special_ids)
        return documents

    def _messages(self, index: int) -> list[Message]:
        """Returns the messages; answers that are rendered otherwise than generated are not to be trained."""
        # one entry per assistant message: `next` is not reached for others
        is_kept = iter(self._conversations.row(index)["texts_kept"])
        return [
            message if message["role"] != "assistant" or next(is_kept) else message | NOT_TRAINED
            for message in super()._messages(index)
        ]

    def _render(self, index: int) -> list[Rendering] | str:
        is_kept = self._conversations.row(index)["texts_kept"]
        if is_kept and not any(is_kept):
            return "the chat template renders no answer as it was generated"
        renderings = super()._render(index)
        if isinstance(renderings, str):
            return renderings
        left_out = renderings[0].answers_left_out + renderings[0].answers_untrained
        return [replace(renderings[0], answers_left_out=left_out, answers_untrained=0), *renderings[1:]]


def read_source(prompts: PromptsConfig, target: TargetFiles, responses_dir: Path) -> Source:
    """Find the usable documents of `prompts.paths`.

    Args:
        prompts: the settings.
        target: the target, which must have generated the responses.
        responses_dir: output of mtptrain responses, which replaces the conversations of the paths if the source is
            `responses`.

    Raises:
        UserError: no path is given; with source `responses`: mtptrain responses has not finished, or the responses are
            those of another target or of other `prompts.paths`; with any other source: a path does not exist or a file
            has an unknown format; with conversations or responses: the chat template cannot be used.
    """
    if not prompts.paths:
        raise UserError(
            f"prompts.paths: must name at least one path with prompts.source={prompts.source}, but is empty; set "
            "prompts.paths=[...] in the recipe or on the command line"
        )
    if prompts.source is PromptSource.tokens:
        return read_token_rows(prompts.paths, prompts.metadata, prompts.split)
    tokenizer, similarity = target.tokenizer, prompts.near_duplicate_similarity
    if not prompts.source.is_chat:
        return TextSource(*read_text_files(prompts.paths, prompts.pattern, prompts.exclude), tokenizer)
    check_chat_template(tokenizer)
    if prompts.source is PromptSource.responses:
        return ResponsesSource(read_responses(responses_dir, prompts, TargetIdentity.of(target)), tokenizer, similarity)
    conversations = read_conversations(prompts.paths, RowFormat.of(prompts), prompts.split)
    return ConversationSource(conversations, tokenizer, similarity)
