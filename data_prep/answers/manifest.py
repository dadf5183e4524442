"""What answers belong to and how many they are: `manifest.json` of `run_dir/responses/`, and reading it for data_prep.prompts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_prep.answers.dialogue import AnsweredConversation, Ending
from data_prep.conversations import Conversations, read_conversations
from mtptrain.config import ConversationSchema
from mtptrain.identity import TargetIdentity, TokenizerIdentity
from mtptrain.run_dir import require

CONVERSATIONS, MANIFEST = "conversations.jsonl", "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ResponsesIdentity:
    """What must be equal for answers to belong together."""

    target: TargetIdentity
    sources: dict[str, str]
    """By path or name, a hash over the conversations in it."""
    backend: str
    model: str | None
    """As the server calls it; None with transformers."""
    settings: dict[str, int | float | str]
    """Of sampling, by their names in the config, and what else decides on an answer."""

    def facts(self) -> dict[str, object]:
        """What is compared, by the name that a message gives it; a target may move, so its path and revision are not."""
        target = self.target
        return {
            "the hash of the target's config": target.config_sha256,
            "the hash of the target's weights": target.weights_sha256,
            "the hash of the tokenizer": target.tokenizer_sha256,
            "the hash of the chat template": target.chat_template_sha256,
            "the conversations (prompts.paths and their hashes)": self.sources,
            "the backend (responses.url)": self.backend,
            "the served model (responses.model)": self.model,
            **self.settings,
        }


@dataclass
class Counts:
    """Over all conversations of the file."""

    conversations: int = 0
    answers: int = 0
    answer_tokens: int = 0
    """Generated, the ends of answers included."""
    ended_by: dict[str, int] = field(default_factory=lambda: {ending.value: 0 for ending in Ending})
    """Conversations by what ended them."""
    unanswered: int = 0
    """Conversations without any answer."""
    texts_changed: int = 0
    """Answers that the chat template renders otherwise than they were generated."""
    tokens_changed: int = 0
    """Answers whose text is rendered as generated, but becomes other tokens."""

    def add(self, answered: AnsweredConversation) -> None:
        self.conversations += 1
        self.answers += len(answered.answer_tokens)
        self.answer_tokens += sum(answered.answer_tokens)
        self.ended_by[answered.ended_by] += 1
        self.unanswered += not answered.answer_tokens
        self.texts_changed += answered.texts_changed
        self.tokens_changed += answered.tokens_changed


@dataclass(frozen=True)
class Manifest:
    """Says that the stage is finished, and what its answers are."""

    identity: ResponsesIdentity
    server_versions: list[str]
    """In the order in which they took part."""
    counts: Counts
    failed: int
    """Conversations that a further run tries again."""
    refused: int
    """Rows that cannot be answered."""
    schema_version: int = SCHEMA_VERSION

    @staticmethod
    def read(path: Path) -> "Manifest":
        content = json.loads(path.read_text())
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: schema_version must be {SCHEMA_VERSION}, but is {content['schema_version']}; delete {path.parent} and run "
                "data_prep.responses again"
            )
        return Manifest(**{**content, "identity": identity_from_json(content["identity"]), "counts": Counts(**content["counts"])})


def identity_from_json(content: dict[str, Any]) -> ResponsesIdentity:
    return ResponsesIdentity(**{**content, "target": TargetIdentity(**content["target"])})


def refuse_other(path: Path, expected: ResponsesIdentity, found: ResponsesIdentity) -> None:
    wanted, present = expected.facts(), found.facts()
    names = dict.fromkeys([*wanted, *present])
    differences = [
        f"{name} must be {present.get(name)}, but is {wanted.get(name)}" for name in names if wanted.get(name) != present.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path}: to go on, {'; '.join(differences)} (target of the answers: {found.target.path}, of this run: "
            f"{expected.target.path}); undo the change, choose another run_dir, or delete {path.parent} and answer all again"
        )


def read_responses(directory: Path, paths: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Conversations:
    """The finished answers of a run, for data_prep.prompts.

    Raises:
        FileNotFoundError: data_prep.responses has not been run, or not to its end.
        ValueError: the answers are those of another tokenizer, chat template or of other `prompts.paths`.
    """
    manifest = Manifest.read(require(directory / MANIFEST, "data_prep.responses"))
    expected = asdict(TokenizerIdentity.of(tokenizer)) | {"prompts.paths": sorted(paths)}
    found = asdict(manifest.identity.target) | {"prompts.paths": sorted(manifest.identity.sources)}
    for name, value in expected.items():
        if found[name] != value:
            raise ValueError(
                f"{directory / MANIFEST}: {name} must be {value}, as in this run, but is {found[name]}; run data_prep.responses again, "
                "in another run_dir or after deleting this folder"
            )
    return read_conversations([str(directory / CONVERSATIONS)], ConversationSchema.messages)
