"""`run_dir/responses/`: conversations that the target has answered, written row by row as they end, and in input order at the end.

While a run goes on, `plan.json` says what the answers belong to and `answers_<rank>.jsonl` takes each conversation as it ends.
`conversations.jsonl` then holds all of them in the order of the input; `failures.jsonl` names what has fewer answers than it could
have, and why; `manifest.json` comes last.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mtptrain.utils.files import publish, write_json

from .dialogue import AnsweredConversation, Ending
from .manifest import CONVERSATIONS, MANIFEST, Counts, Manifest, ResponsesIdentity, identity_from_json, refuse_other

FAILURES, PLAN, JOURNALS = "failures.jsonl", "plan.json", "answers_*.jsonl"
ENDINGS = {
    Ending.empty: "the target's answer is empty",
    Ending.context: "prompt and responses.max_new_tokens do not fit the context",
    Ending.template: "the chat template does not accept the messages",
}
"""Why a conversation ended before its last question was answered."""


@dataclass(frozen=True)
class Failure:
    """A line of failures.jsonl."""

    place: str
    reason: str
    answers: int
    """That it has none the less."""


class ResponsesStore:
    """Answered conversations of a folder, by row."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines: dict[int, tuple[Path, int]] = {}
        """Where the line of each row stands."""

    @property
    def rows(self) -> set[int]:
        return set(self._lines)

    @property
    def is_finished(self) -> bool:
        return (self.directory / MANIFEST).exists()

    def begin(self, identity: ResponsesIdentity, server_version: str | None) -> None:
        """Find what is answered already, and mend what a killed run left. One process calls it.

        Raises:
            ValueError: the answers belong to another target, other data or other settings.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        versions: list[str] = []
        for name in (PLAN, MANIFEST):
            path = self.directory / name
            if path.exists():
                content = json.loads(path.read_text())
                refuse_other(path, identity, identity_from_json(content["identity"]))
                versions = content["server_versions"]
                break
        self._server_versions = list(dict.fromkeys([*versions, *([server_version] if server_version else [])]))
        self._identity = identity
        for path in [self.directory / CONVERSATIONS, *sorted(self.directory.glob(JOURNALS))]:
            if path.exists():
                self._read(path)

    def resume(self) -> None:
        """Take the mark of a finished stage away before its answers change."""
        write_json(self.directory / PLAN, {"identity": asdict(self._identity), "server_versions": self._server_versions})
        (self.directory / MANIFEST).unlink(missing_ok=True)

    def journal(self, rank: int) -> "Journal":
        return Journal(self.directory / JOURNALS.replace("*", f"{rank:05d}"))

    def finish(self, failed: Mapping[int, str], refused: Mapping[str, str], place: Callable[[int], str]) -> Manifest:
        """Put all answers into one file in the order of the input, and say so. One process calls it, after the journals are closed.

        Args:
            failed: why, by row, of the conversations that are to be tried again.
            refused: why, by place, of the rows that cannot be answered.
            place: of a row, for messages.
        """
        for path in sorted(self.directory.glob(JOURNALS)):
            self._read(path)
        counts, cut_short = self._write_in_order()
        failures = [Failure(place(row), reason, 0) for row, reason in sorted(failed.items())]
        failures += [Failure(place(line.row), ENDINGS[line.ended_by], len(line.answer_tokens)) for line in cut_short]
        failures += [Failure(where, reason, 0) for where, reason in refused.items()]
        (self.directory / FAILURES).write_text("".join(json.dumps(asdict(failure)) + "\n" for failure in failures))
        manifest = Manifest(self._identity, self._server_versions, counts, len(failed), len(refused))
        write_json(self.directory / MANIFEST, asdict(manifest))
        self.clean()
        return manifest

    def clean(self) -> None:
        """Remove what only an unfinished stage needs."""
        for path in [self.directory / PLAN, *self.directory.glob(JOURNALS), *self.directory.glob("*.tmp")]:
            path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        """Note where each row stands; a last line that a kill has torn is cut off."""
        end = 0
        with path.open("rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(end)
                    break
                self._lines.setdefault(_parse(line, path).row, (path, end))
                end += len(line)

    def _write_in_order(self) -> tuple[Counts, list[AnsweredConversation]]:
        """Returns the counts, and the conversations that ended before the last of their questions had an answer."""
        counts, cut_short = Counts(), list[AnsweredConversation]()
        temporary = self.directory / f"{CONVERSATIONS}.tmp"
        with ExitStack() as stack:
            files = {path: stack.enter_context(path.open("rb")) for path in {path for path, _ in self._lines.values()}}
            output = stack.enter_context(temporary.open("wb"))
            for row in sorted(self._lines):
                path, start = self._lines[row]
                files[path].seek(start)
                line = files[path].readline()
                output.write(line)
                answered = _parse(line, path)
                counts.add(answered)
                if answered.ended_by in ENDINGS:
                    cut_short.append(replace(answered, messages=[]))
        publish(temporary, self.directory / CONVERSATIONS)
        return counts, cut_short


class Journal:
    """Takes conversations as they end, each a line that is whole once it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    def write(self, answered: AnsweredConversation) -> None:
        self._file.write(json.dumps(asdict(answered)).encode() + b"\n")
        self._file.flush()


def _parse(line: bytes, path: Path) -> AnsweredConversation:
    try:
        content = json.loads(line)
        return AnsweredConversation(**{**content, "ended_by": Ending(content["ended_by"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: every line must be an answered conversation, but one is not ({error}); delete {path} and run data_prep.responses "
            "again"
        ) from error
