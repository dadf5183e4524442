"""Stores regenerated conversations in `run_dir/responses/`: appends each as it ends, then sorts all into input order.

During a run, `plan.json` holds the identity of the responses, and each rank appends finished conversations to
`answers_<rank>.jsonl`. At the end, `conversations.jsonl` holds all regenerated conversations in input order. Each line
of both has a hash of itself, since nothing else tells whether the responses of an unfinished run were changed.
`failures.jsonl` lists, with the reason, those that could not be used, failed, or ended for a reason in `ENDINGS`.
`manifest.json` is written last.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from mtptrain.config import ConversationSchema, PromptsConfig
from mtptrain.data.chat_template import special_tokens
from mtptrain.data.conversation import ConversationRefused
from mtptrain.data.identity import Identity, TargetIdentity, refuse_different_facts, refuse_other
from mtptrain.data.rows import RowFormat
from mtptrain.stage_dir import require
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import (
    SEAL,
    append_text,
    parse_json,
    read_manifest,
    sealed,
    unsealed,
    write_sealed,
    write_text,
    written_whole,
)

from ..conversations import Conversations, read_conversations
from ..renderings import EncodedItem, RenderedConversation, render_conversation
from .dialogue import ENDINGS, Ending, RegeneratedConversation

CONVERSATIONS, FAILURES = "conversations.jsonl", "failures.jsonl"
MANIFEST, PLAN = "manifest.json", "plan.json"
SCHEMA_VERSION = 2


@dataclass(frozen=True)
class ResponsesIdentity(Identity):
    """Everything that must be equal for responses to share a directory."""

    program = "mtptrain responses"
    sources: dict[str, str]
    """Hash of the conversations in each file or hub data set, by its path or name."""
    backend: str
    """`responses.engine`, or `server` for one at `responses.url`."""
    model: str | None
    """Name of the model at `responses.url`; None without one."""
    settings: dict[str, int | float | str]
    """Sampling settings by their names in the config, and everything else that affects responses."""

    def facts(self) -> dict[str, object]:
        return {
            **super().facts(),
            "the conversations (prompts.paths and their hashes)": self.sources,
            "the order of prompts.paths": list(self.sources),
            "the engine (responses.engine, responses.url)": self.backend,
            "the served model (responses.model)": self.model,
            **self.settings,
        }


COUNTS: dict[str, tuple[str, Callable[[RegeneratedConversation], int]]] = {
    "conversations": ("conversations that were answered or ended before", lambda each: 1),
    "unanswered": ("conversations without a response", lambda each: not each.answer_tokens),
    "answers": ("responses", lambda each: len(each.answer_tokens)),
    "answer_tokens": ("tokens, with those that end a response", lambda each: sum(each.answer_tokens)),
    "cut": (
        "responses cut at responses.max_new_tokens, which may be raised",
        lambda each: each.ended_by is Ending.length,
    ),
    "texts_changed": ("responses that the template renders with other text", lambda each: each.texts_kept.count(False)),
    "tokens_changed": ("responses rendered with other tokens of the same text", lambda each: each.tokens_changed),
}
"""What is counted over conversations.jsonl: by its name, what the report calls it, and its number in a conversation."""


@dataclass(frozen=True)
class ResponsesManifest:
    """The contents of `manifest.json`, and of `plan.json` until that is written, with nothing counted yet."""

    identity: ResponsesIdentity
    server_versions: list[str]
    """Versions of all servers used, in the order of their first use; empty with our own loop."""
    counts: dict[str, int] = field(default_factory=dict)
    """Numbers by their names in `COUNTS`."""
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


class ResponsesStore:
    """The regenerated conversations of a directory, by row."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: dict[int, tuple[Path, int, int]] = {}
        """File, line number and byte offset of each row."""

    @property
    def is_finished(self) -> bool:
        """Whether the last run ended. A kill may leave `plan.json` beside a new manifest."""
        return (self.directory / MANIFEST).exists() and not (self.directory / PLAN).exists()

    def begin(self, identity: ResponsesIdentity) -> None:
        """Find the finished rows, and truncate partial lines left by a killed run. Only one process may call this."""
        self.directory.mkdir(parents=True, exist_ok=True)
        stored = [path for path in (self.directory / CONVERSATIONS, *self._journals()) if path.exists()]
        plans = [path for path in (self.directory / PLAN, self.directory / MANIFEST) if path.exists()]
        if stored and not plans:
            raise UserError(
                f"{self.directory}: must hold {PLAN} or {MANIFEST} beside its responses, but holds neither; delete it "
                "and run mtptrain responses again"
            )
        versions = list[str]()
        for path in plans[:1]:
            plan = ResponsesManifest.read(path)
            refuse_other(path, identity, plan.identity)
            versions = plan.server_versions
        self._plan = ResponsesManifest(identity, versions)
        for path in stored:
            self._index(path)

    def mark_unfinished(self, server_versions: Sequence[str]) -> None:
        """Write the plan and remove the manifest, which marks a finished stage, before the responses change."""
        versions = dict.fromkeys([*self._plan.server_versions, *server_versions])
        self._plan = replace(self._plan, server_versions=list(versions))
        write_sealed(self.directory / PLAN, asdict(self._plan))
        (self.directory / MANIFEST).unlink(missing_ok=True)

    def append(self, rank: int, conversation: RegeneratedConversation) -> None:
        """Append a finished conversation to the file of a rank, at once."""
        append_text(self.directory / f"answers_{rank:05d}.jsonl", line_of(conversation))

    def finish(
        self, failed: Mapping[int, str], refused: Mapping[str, str], location_of: Callable[[int], str]
    ) -> ResponsesManifest:
        """Write all conversations in input order, then the manifest. Failures are by row, and refusals by location."""
        for path in self._journals():
            self._index(path)
        failures = [(location_of(row), reason) for row, reason in sorted(failed.items())]
        counts = Counter(dict.fromkeys(COUNTS, 0))
        whole, temporary = self.directory / CONVERSATIONS, self.directory / f"{CONVERSATIONS}.tmp"
        with written_whole(whole, temporary), ExitStack() as stack:
            output = stack.enter_context(temporary.open("wb"))
            files = {path: stack.enter_context(path.open("rb")) for path in {path for path, *_ in self.lines.values()}}
            for row in sorted(self.lines):
                path, number, start = self.lines[row]
                files[path].seek(start)
                line = files[path].readline()
                output.write(line)
                conversation = _parse(line, path, number)
                counts.update({name: count(conversation) for name, (_, count) in COUNTS.items()})
                if conversation.ended_by in ENDINGS:
                    failures.append((location_of(row), ENDINGS[conversation.ended_by]))
        failures += refused.items()
        lines = [json.dumps({"place": place, "reason": reason}) + "\n" for place, reason in failures]
        write_text(self.directory / FAILURES, "".join(lines))
        manifest = replace(self._plan, counts=dict(counts), failed=len(failed), refused=len(refused))
        write_sealed(self.directory / MANIFEST, asdict(manifest), [CONVERSATIONS])
        for path in (self.directory / PLAN, *self._journals()):
            path.unlink(missing_ok=True)
        return manifest

    def _journals(self) -> list[Path]:
        """Returns the files of all ranks, also those of an earlier run with more ranks."""
        return sorted(self.directory.glob(f"answers_{'[0-9]' * 5}.jsonl"))

    def _index(self, path: Path) -> None:
        """Index the rows of a file, and truncate a partial last line left by a killed run."""
        end = 0
        with path.open("rb+") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    file.truncate(end)
                    break
                self.lines.setdefault(_parse(line, path, number).row, (path, number, end))
                end += len(line)


def line_of(conversation: RegeneratedConversation) -> str:
    return json.dumps(sealed(asdict(conversation))) + "\n"


def _parse(line: bytes, path: Path, number: int) -> RegeneratedConversation:
    """Returns the conversation that `line_of` wrote as this line of a file, if it has not changed since."""
    location = f"{path}:{number}"
    advice = f"delete the line, or {path.parent} if an older version wrote it, and run mtptrain responses again"
    content = unsealed(parse_json(line, location, advice), location, advice)
    try:
        return RegeneratedConversation(**{**content, "ended_by": Ending(content["ended_by"])})
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{location}: must be a conversation, but is not ({error!r}); {advice}") from error


def hash_sources(conversations: Conversations, paths: Sequence[str]) -> dict[str, str]:
    """Returns the hash of the conversations in each path of `prompts.paths`."""
    digests = {path: hashlib.sha256() for path in paths}
    for row, name in enumerate(conversations.names):
        digests[conversations.origins[row][0]].update(json.dumps([name, conversations.messages(row)]).encode() + b"\n")
    return {path: digest.hexdigest() for path, digest in digests.items()}


class Responses(Conversations):
    """Conversations whose answers the target generated.

    The loss mask leaves out answers that the template does not render as generated, and the end-of-turn token that the
    template adds after an answer that was cut off.
    """

    def render(self, tokenizer: PreTrainedTokenizerBase, index: int) -> RenderedConversation:
        messages, are_kept = self.messages(index), self.row(index)["texts_kept"]
        if are_kept and not any(are_kept):
            raise ConversationRefused("the chat template renders no answer as it was generated")
        answers = [message for message in messages if message["role"] == "assistant"]
        for message, is_kept in zip(answers, are_kept, strict=True):
            if not is_kept:
                message["weight"] = "0"
        rendered = render_conversation(tokenizer, messages, is_generated=True)
        return replace(rendered, trained=len(answers), counts={**rendered.counts, "answers_untrained": 0})

    def encode(self, tokenizer: PreTrainedTokenizerBase, indices: Sequence[int]) -> list[EncodedItem | str]:
        items, special_ids = super().encode(tokenizer, indices), list(special_tokens(tokenizer))
        for index, item in zip(indices, items, strict=True):
            row = self.row(index)
            if isinstance(item, EncodedItem) and row["ended_by"] == Ending.length and row["texts_kept"][-1]:
                whole = item.encodings[0]  # contains the last answer
                last = np.flatnonzero(whole.loss_mask)[-1:]
                whole.loss_mask[last] = ~np.isin(whole.input_ids[last], special_ids)
        return items


def read_responses(directory: Path, prompts: PromptsConfig, target: TargetIdentity) -> Responses:
    """Reads the responses of a finished run, and prints how many conversations failed, if any did."""
    path = require(directory / MANIFEST, "mtptrain responses")
    manifest = ResponsesManifest.read(path)
    remedy = f"run mtptrain responses again, in another run_dir or after deleting {directory}"
    present = sorted(name for name in {*prompts.paths} if Path(name).is_file())  # usable without those that are gone
    hashes = hash_sources(read_conversations(present, RowFormat.of(prompts), prompts.split), present) if present else {}

    def facts(target: TargetIdentity, sources: dict[str, str]) -> dict[str, object]:
        compared = {f"the hash of the conversations of {name}": sources.get(name) for name in hashes}
        return target.facts() | {"prompts.paths": sorted(sources)} | compared

    expected = facts(target, dict.fromkeys(prompts.paths, "") | hashes)
    refuse_different_facts(path, expected, facts(manifest.identity.target, manifest.identity.sources), remedy)
    if manifest.failed:
        print(
            f"{directory}: {manifest.failed:,} conversations failed and are missing; run mtptrain responses again to "
            "retry them",
            flush=True,
        )
    written = [each.name for each in fields(RegeneratedConversation) if each.name not in ("id", "messages")]
    form = RowFormat(ConversationSchema.messages, [*written, SEAL])
    return Responses(form).add_all([str(directory / CONVERSATIONS)], prompts.split)
