"""Defines `manifest.json` of `run_dir/responses/`: counts, and the identity that mtptrain prompts checks."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from mtptrain.config import ConversationSchema, PromptsConfig
from mtptrain.data.identity import TargetIdentity, refuse_different_facts
from mtptrain.data.rows import RowFormat
from mtptrain.run_dir import require
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import SEAL, read_manifest

from ..conversations import Conversations, SourceMissing, read_conversations, refuse_duplicate_paths
from .dialogue import Ending, RegeneratedConversation
from .survey import survey_conversations

CONVERSATIONS, MANIFEST = "conversations.jsonl", "manifest.json"
SCHEMA_VERSION = 2


@dataclass(frozen=True)
class ResponsesIdentity:
    """Everything that must be equal for responses to share a directory."""

    program: ClassVar[str] = "mtptrain responses"
    target: TargetIdentity
    sources: dict[str, str]
    """Hash of the conversations in each file or hub data set, by its path or name."""
    backend: str
    model: str | None
    """Name of the model on the server; None with transformers."""
    settings: dict[str, int | float | str]
    """Sampling settings by their names in the config, and everything else that affects responses."""

    def facts(self) -> dict[str, object]:
        """Returns the values to compare, by their names in error messages."""
        return {
            **self.target.facts(),
            "the conversations (prompts.paths and their hashes)": self.sources,
            "the order of prompts.paths": list(self.sources),
            "the backend (responses.url)": self.backend,
            "the served model (responses.model)": self.model,
            **self.settings,
        }


@dataclass
class Counts:
    """Counts over all conversations of conversations.jsonl."""

    conversations: int = 0
    answers: int = 0
    answer_tokens: int = 0
    """Number of generated tokens, including end-of-sequence tokens."""
    ended_by: dict[str, int] = field(default_factory=lambda: {ending.value: 0 for ending in Ending})
    """Number of conversations by the reason they ended."""
    unanswered: int = 0
    """Number of conversations without any response."""
    texts_changed: int = 0
    """Number of responses that the chat template does not render as generated."""
    tokens_changed: int = 0
    """Number of responses that are rendered as generated but tokenized differently."""

    def add(self, regenerated: RegeneratedConversation) -> None:
        self.conversations += 1
        self.answers += len(regenerated.answer_tokens)
        self.answer_tokens += sum(regenerated.answer_tokens)
        self.ended_by[regenerated.ended_by] += 1
        self.unanswered += not regenerated.answer_tokens
        self.texts_changed += regenerated.texts_kept.count(False)
        self.tokens_changed += regenerated.tokens_changed


@dataclass(frozen=True)
class ResponsesManifest:
    """The contents of `manifest.json`, which is written last and so marks the stage as finished.

    Until then, `plan.json` has the same entries with nothing counted yet.
    """

    identity: ResponsesIdentity
    server_versions: list[str]
    """Versions of all servers used, in the order of their first use; empty with transformers."""
    counts: Counts = field(default_factory=Counts)
    failed: int = 0
    """Number of conversations that failed. The next run retries them."""
    refused: int = 0
    """Number of rows that cannot be used."""
    schema_version: int = SCHEMA_VERSION

    @staticmethod
    def read(path: Path) -> "ResponsesManifest":
        """Read a manifest or plan, after checking that neither it nor the conversations it describes have changed."""
        advice = f"delete {path.parent} and run mtptrain responses again"
        version = SCHEMA_VERSION if path.name == MANIFEST else None  # plans of earlier versions have none
        return read_manifest(ResponsesManifest, path, ResponsesIdentity.program, advice, version, files=None)


def read_responses(directory: Path, prompts: PromptsConfig, target: TargetIdentity) -> Conversations:
    """Reads the responses of a finished run, and prints how many conversations failed, if any did.

    Raises:
        UserError: mtptrain responses has not finished or has no response, or the responses are those of another target
            or of other `prompts.paths`, or a file has changed since.
    """
    refuse_duplicate_paths(prompts.paths)
    path = directory / MANIFEST
    manifest = ResponsesManifest.read(require(path, "mtptrain responses"))
    sources, hashes = manifest.identity.sources, _hash_readable(prompts)

    def facts(target: TargetIdentity, sources: dict[str, str]) -> dict[str, object]:
        compared = {f"the hash of the conversations of {name}": sources.get(name) for name in hashes}
        return target.facts() | {"prompts.paths": sorted(sources)} | compared

    expected = facts(target, dict.fromkeys(prompts.paths, "") | hashes)
    remedy = f"run mtptrain responses again, in another run_dir or after deleting {directory}"
    refuse_different_facts(path, expected, facts(manifest.identity.target, sources), remedy)
    if manifest.failed:
        print(
            f"{directory}: {manifest.failed:,} conversations failed and are missing; run mtptrain responses again to "
            "retry them",
            flush=True,
        )
    if not manifest.counts.conversations:
        raise UserError(f"{path}: must count at least one conversation, but counts none; run mtptrain responses again")
    written = [each.name for each in fields(RegeneratedConversation) if each.name not in ("id", "messages")]
    form = RowFormat(ConversationSchema.messages, [*written, SEAL])
    return read_conversations([str(directory / CONVERSATIONS)], form)


def _hash_readable(prompts: PromptsConfig) -> dict[str, str]:
    """Returns the hash of each path that can be read now.

    Responses stay usable without the original conversations.
    """
    hashes: dict[str, str] = {}
    for path in prompts.paths:
        try:
            conversations = read_conversations([path], RowFormat.of(prompts), prompts.split)
            hashes |= survey_conversations(conversations, [path]).sources
        except SourceMissing as missing:
            print(f"{path} cannot be read now, so the responses are not checked against it: {missing}", flush=True)
    return hashes
