"""The prompt sources behind one face: documents by name, tokenized on demand."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from data_prep.assistant_masks import Encoding, Rendering, check_chat_template, encode_renderings, render_conversation
from data_prep.conversations import ConversationRefused, Conversations, read_conversations
from data_prep.text_files import TextFiles, read_text_files
from mtptrain.config import PromptsConfig, PromptSource


class Source(Protocol):
    names: list[str]
    refused: dict[str, str]
    """Files or rows that are not among `names`, with the reason."""

    def place(self, index: int) -> str:
        """Where document `index` comes from, for messages."""

    def encode(self, indices: Sequence[int]) -> list[Encoding | str]:
        """Token ids and mask of each document, or the reason for which it is refused."""


class TextSource:
    """Whole files, the beginning-of-text token in front where the tokenizer has one; every token counts."""

    def __init__(self, files: TextFiles, tokenizer: PreTrainedTokenizerBase) -> None:
        self.names = list(files.texts)
        self.refused = files.refused
        self._texts = list(files.texts.values())
        self._tokenizer = tokenizer

    def place(self, index: int) -> str:
        return self.names[index]

    def encode(self, indices: Sequence[int]) -> list[Encoding | str]:
        texts = [self._texts[i] for i in indices]
        bos = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        batch = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        documents = [np.array([*bos, *token_ids], np.int32) for token_ids in batch]  # [S] each
        return [Encoding(ids, np.ones(len(ids), np.uint8)) if text else "empty" for text, ids in zip(texts, documents, strict=True)]


class ConversationSource:
    """Conversations in the target's chat template; the tokens that the assistant generates count."""

    def __init__(self, conversations: Conversations, tokenizer: PreTrainedTokenizerBase) -> None:
        self.names = conversations.names
        self.refused = conversations.refused
        self._conversations = conversations
        self._tokenizer = tokenizer

    def place(self, index: int) -> str:
        return self._conversations.place(index)

    def encode(self, indices: Sequence[int]) -> list[Encoding | str]:
        rendered = [self._render(i) for i in indices]
        encodings = iter(encode_renderings(self._tokenizer, [item for item in rendered if isinstance(item, Rendering)]))
        return [item if isinstance(item, str) else next(encodings) for item in rendered]

    def _render(self, index: int) -> Rendering | str:
        try:
            return render_conversation(self._tokenizer, self._conversations.messages(index))
        except ConversationRefused as refusal:
            return str(refusal)


def read_source(prompts: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Find what `prompts.paths` names, and what of it can be used.

    Raises:
        FileNotFoundError: a directory, a file or a hub data set does not exist.
        ValueError: no path is given, a file has an unknown format, or the target cannot render conversations.
    """
    if not prompts.paths:
        raise ValueError(
            f"prompts.paths: must name at least one place of {prompts.source}, but is empty; give prompts.paths=[...] in the "
            "recipe or on the command line"
        )
    if prompts.source is PromptSource.conversations:
        check_chat_template(tokenizer)
        return ConversationSource(read_conversations(prompts.paths, prompts.schema, prompts.split), tokenizer)
    return TextSource(read_text_files(prompts.paths, prompts.pattern, prompts.exclude), tokenizer)
