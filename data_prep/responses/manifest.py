"""What answers belong to and how many they are: `manifest.json` of `run_dir/responses/`, and reading it for data_prep.prompts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtptrain.config import ConversationSchema, PromptsConfig
from mtptrain.data.identity import TargetIdentity
from mtptrain.run_dir import require

from ..conversations import Conversations, read_conversations, refuse_doubles
from .dialogue import AnsweredConversation, Ending
from .survey import hash_sources

CONVERSATIONS, MANIFEST = "conversations.jsonl", "manifest.json"
SCHEMA_VERSION = 2


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
        return {
            **target_facts(self.target),
            "the conversations (prompts.paths and their hashes)": self.sources,
            "the backend (responses.url)": self.backend,
            "the served model (responses.model)": self.model,
            **self.settings,
        }


def target_facts(target: TargetIdentity) -> dict[str, object]:
    return {
        "the hash of the target's config": target.config_sha256,
        "the hash of the target's weights": target.weights_sha256,
        "the hash of the tokenizer": target.tokenizer_sha256,
        "the hash of the chat template": target.chat_template_sha256,
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
        self.texts_changed += answered.texts_kept.count(False)
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


def read_responses(directory: Path, prompts: PromptsConfig, target: TargetIdentity) -> Conversations:
    """The finished answers of a run, for data_prep.prompts; what is missing of them is printed.

    Raises:
        FileNotFoundError: data_prep.responses has not been run, or not to its end.
        ValueError: the answers are those of another target, of other `prompts.paths`, or of what these held before.
    """
    refuse_doubles(prompts.paths)
    path = directory / MANIFEST
    manifest = Manifest.read(require(path, "data_prep.responses"))
    sources = manifest.identity.sources
    _refuse_stale(path, target_facts(target) | {"prompts.paths": sorted(prompts.paths)}, _answered_facts(manifest))
    hashes = _hash_readable(prompts)
    _refuse_stale(path, _source_facts(hashes), _source_facts({name: sources[name] for name in hashes}))
    if manifest.failed:
        print(
            f"{directory}: {manifest.failed:,} conversations failed and are missing; data_prep.responses tries them again",
            flush=True,
        )
    return read_conversations([str(directory / CONVERSATIONS)], ConversationSchema.messages)


def _answered_facts(manifest: Manifest) -> dict[str, object]:
    return target_facts(manifest.identity.target) | {"prompts.paths": sorted(manifest.identity.sources)}


def _source_facts(hashes: Mapping[str, str]) -> dict[str, object]:
    return {f"the hash of the conversations of {name}": value for name, value in hashes.items()}


def _hash_readable(prompts: PromptsConfig) -> dict[str, str]:
    """Hashes of the conversations as they are now; answers may be used without those that they were made for."""
    hashes: dict[str, str] = {}
    for path in prompts.paths:
        try:
            hashes |= hash_sources(read_conversations([path], prompts.schema, prompts.split), [path])
        except FileNotFoundError:
            print(f"{path} is not there any more, so that its answers cannot be compared with it", flush=True)
    return hashes


def _refuse_stale(path: Path, wanted: Mapping[str, object], found: Mapping[str, object]) -> None:
    differences = [
        f"{name} must be {value}, as in this run, but is {found[name]}" for name, value in wanted.items() if found[name] != value
    ]
    if differences:
        raise ValueError(
            f"{path}: {'; '.join(differences)}; run data_prep.responses again, in another run_dir or after deleting {path.parent}"
        )
