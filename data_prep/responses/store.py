"""Stores regenerated conversations in `run_dir/responses/`: appends each as it ends, then sorts all into input order.

During a run, `plan.json` holds the identity of the responses, and each rank appends finished conversations to
`answers_<rank>.jsonl`. At the end, `conversations.jsonl` holds all regenerated conversations in input order. Each line
of both has a hash of itself, since nothing else tells whether the responses of an unfinished run were changed.
`failures.jsonl` lists, with the reason, those that could not be used, failed, or ended for a reason in `ENDINGS`.
`manifest.json` is written last.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from mtptrain.data.identity import refuse_other
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json, publish, sealed, unsealed, write_sealed, write_text

from .dialogue import ENDINGS, Ending, RegeneratedConversation
from .manifest import CONVERSATIONS, MANIFEST, Counts, ResponsesIdentity, ResponsesManifest

FAILURES, PLAN = "failures.jsonl", "plan.json"


class ResponsesStore:
    """The regenerated conversations of a directory, by row."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines: dict[int, tuple[Path, int, int]] = {}
        """File, line number and byte offset of each row."""

    @property
    def rows(self) -> set[int]:
        return set(self._lines)

    @property
    def is_finished(self) -> bool:
        """Whether the last run ended. A kill may leave `plan.json` beside a new manifest."""
        return (self.directory / MANIFEST).exists() and not (self.directory / PLAN).exists()

    def begin(self, identity: ResponsesIdentity, server_version: str | None) -> None:
        """Find the finished rows, and truncate partial lines left by a killed run. Only one process may call this.

        Raises:
            UserError: the existing responses are damaged, or are from a different target, data or settings.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        stored = [path for path in (self.directory / CONVERSATIONS, *self._journals()) if path.exists()]
        plans = [path for path in (self.directory / PLAN, self.directory / MANIFEST) if path.exists()]
        if stored and not plans:
            raise UserError(
                f"{self.directory}: must hold {PLAN} or {MANIFEST} beside its responses, but holds neither; delete it "
                "and run mtptrain responses again"
            )
        versions = [server_version] if server_version else []
        for path in plans[:1]:
            plan = ResponsesManifest.read(path)
            refuse_other(path, identity, plan.identity)
            versions = [*plan.server_versions, *versions]
        self._plan = ResponsesManifest(identity, list(dict.fromkeys(versions)))
        for path in stored:
            self._index(path)

    def mark_unfinished(self) -> None:
        """Write the plan and remove the manifest, which marks a finished stage, before the responses change."""
        write_sealed(self.directory / PLAN, asdict(self._plan))
        (self.directory / MANIFEST).unlink(missing_ok=True)

    def journal(self, rank: int) -> TextIO:
        """Returns the file to which a rank appends finished conversations. Each line is written at once."""
        return (self.directory / f"answers_{rank:05d}.jsonl").open("a", buffering=1, encoding="utf-8")

    def finish(
        self, failed: Mapping[int, str], refused: Mapping[str, str], location_of: Callable[[int], str]
    ) -> ResponsesManifest:
        """Write all conversations to one file in input order, then the manifest.

        Only one process may call this, after all journals are closed.

        Args:
            failed: why a conversation failed, by row.
            refused: why a row cannot be used, by location.
            location_of: returns the location of a row, for messages.

        Raises:
            UserError: a stored conversation was changed or damaged.
        """
        for path in self._journals():
            self._index(path)
        failures = [(location_of(row), reason, 0) for row, reason in sorted(failed.items())]
        counts = Counts()
        temporary = self.directory / f"{CONVERSATIONS}.tmp"
        with ExitStack() as stack:
            files = {path: stack.enter_context(path.open("rb")) for path in {path for path, *_ in self._lines.values()}}
            output = stack.enter_context(temporary.open("wb"))
            for row in sorted(self._lines):
                path, number, start = self._lines[row]
                files[path].seek(start)
                line = files[path].readline()
                output.write(line)
                conversation = _parse(line, path, number)
                counts.add(conversation)
                if conversation.ended_by in ENDINGS:
                    failures.append((location_of(row), ENDINGS[conversation.ended_by], len(conversation.answer_tokens)))
        publish(temporary, self.directory / CONVERSATIONS)
        failures += [(location, reason, 0) for location, reason in refused.items()]
        names = ("place", "reason", "answers")  # the last is the number of stored responses of the conversation
        lines = [json.dumps(dict(zip(names, failure, strict=True))) + "\n" for failure in failures]
        write_text(self.directory / FAILURES, "".join(lines))
        manifest = ResponsesManifest(self._plan.identity, self._plan.server_versions, counts, len(failed), len(refused))
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
                self._lines.setdefault(_parse(line, path, number).row, (path, number, end))
                end += len(line)


def line_of(conversation: RegeneratedConversation) -> str:
    """Returns the line that stores a conversation."""
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
