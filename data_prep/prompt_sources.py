"""The prompt sources behind one face: documents by name, tokenized on demand."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from data_prep.answers.dialogue import Ending
from data_prep.answers.manifest import read_responses
from data_prep.assistant_masks import Encoding, check_chat_template, encode_renderings
from data_prep.conversations import ConversationRefused, Conversations, read_conversations
from data_prep.renderings import Rendering, render_conversation
from data_prep.text_files import TextFiles, read_text_files
from mtptrain.config import PromptsConfig, PromptSource


class Source(Protocol):
    names: list[str]
    refused: dict[str, str]
    """Files or rows that are not among `names`, with the reason."""

    def place(self, index: int) -> str:
        """Where document `index` comes from, for messages."""

    def encode(self, indices: Sequence[int]) -> list[list[Encoding] | str]:
        """Token ids and masks of what each file or row becomes, mostly one document, or the reason for which it is refused."""


class TextSource:
    """Whole files, the beginning-of-text token in front where the tokenizer has one; every token counts."""

    def __init__(self, files: TextFiles, tokenizer: PreTrainedTokenizerBase) -> None:
        self.names = list(files.texts)
        self.refused = files.refused
        self._texts = list(files.texts.values())
        self._tokenizer = tokenizer

    def place(self, index: int) -> str:
        return self.names[index]

    def encode(self, indices: Sequence[int]) -> list[list[Encoding] | str]:
        texts = [self._texts[i] for i in indices]
        bos = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        batch = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        documents = [np.array([*bos, *token_ids], np.int32) for token_ids in batch]  # [S] each
        return [
            [Encoding(ids, np.ones(len(ids), np.uint8))] if text else "empty" for text, ids in zip(texts, documents, strict=True)
        ]


class ConversationSource:
    """Conversations in the target's chat template; the tokens that the assistant generates count."""

    def __init__(self, conversations: Conversations, tokenizer: PreTrainedTokenizerBase) -> None:
        self.names = conversations.names
        self.refused = conversations.refused
        self._conversations = conversations
        self._tokenizer = tokenizer

    def place(self, index: int) -> str:
        return self._conversations.place(index)

    def encode(self, indices: Sequence[int]) -> list[list[Encoding] | str]:
        rendered = [self._render(i) for i in indices]
        texts = [rendering for item in rendered if not isinstance(item, str) for rendering in item]
        encodings = iter(encode_renderings(self._tokenizer, texts))
        return [item if isinstance(item, str) else list(islice(encodings, len(item))) for item in rendered]

    def _render(self, index: int) -> list[Rendering] | str:
        try:
            return render_conversation(self._tokenizer, self._conversations.messages(index))
        except ConversationRefused as refusal:
            return str(refusal)


class ResponsesSource(ConversationSource):
    """Conversations as data_prep.responses has answered them: the end of turn behind an answer that was cut is the template's."""

    def encode(self, indices: Sequence[int]) -> list[list[Encoding] | str]:
        special_ids = [token_id for token_id, token in self._tokenizer.added_tokens_decoder.items() if token.special]
        documents = super().encode(indices)
        for index, encodings in zip(indices, documents, strict=True):
            rows, row = self._conversations.origins[index]
            if rows.rows[row]["ended_by"] == Ending.length and not isinstance(encodings, str):
                whole = encodings[0]  # the longest, which holds the last answer
                last = np.flatnonzero(whole.loss_mask)[-1:]
                whole.loss_mask[last] = ~np.isin(whole.input_ids[last], special_ids)
        return documents


def read_source(prompts: PromptsConfig, tokenizer: PreTrainedTokenizerBase, responses_dir: Path) -> Source:
    """Find what `prompts.paths` names, and what of it can be used.

    Args:
        prompts: the settings.
        tokenizer: the target's.
        responses_dir: of data_prep.responses in this run, read in place of the paths where the source is `responses`.

    Raises:
        FileNotFoundError: a directory, a file or a hub data set does not exist, or data_prep.responses has not been run to its end.
        ValueError: no path is given, a file has an unknown format, the target cannot render conversations, or the answers are others'.
    """
    if not prompts.paths:
        raise ValueError(
            f"prompts.paths: must name at least one place of {prompts.source}, but is empty; give prompts.paths=[...] in the "
            "recipe or on the command line"
        )
    if prompts.source is PromptSource.responses:
        check_chat_template(tokenizer)
        return ResponsesSource(read_responses(responses_dir, prompts.paths, tokenizer), tokenizer)
    if prompts.source is PromptSource.conversations:
        check_chat_template(tokenizer)
        return ConversationSource(read_conversations(prompts.paths, prompts.schema, prompts.split), tokenizer)
    return TextSource(read_text_files(prompts.paths, prompts.pattern, prompts.exclude), tokenizer)
