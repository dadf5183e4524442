"""Reads and writes files atomically: after a kill a path holds the old file or the complete new one.

Errors name the file that cannot be read or written.
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open

from mtptrain.utils.errors import UserError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

MAX_TEXT_BYTES = 2**30
"""Maximum size in bytes of a file that is read as one text; a larger one is a mistake."""


def publish(temporary: Path, path: Path) -> None:
    """Flush a finished file to disk, rename it to `path`, and flush the directory entry."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def unique_temporary(path: Path) -> Path:
    """Returns the path for an incomplete file that other processes, on any machine, may write at the same time."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def sync(path: Path) -> None:
    """Flush a file or a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError that names no file: that of a failed write, unlike that of a failed opening."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def written_whole(path: Path, temporary: Path) -> Iterator[None]:
    """Remove what is at `temporary`, be it a link; let the `with` block write a new file there; publish it as `path`.

    If writing or publishing raises an OSError, remove the temporary file, and name `path` if the error names no file.
    """
    with naming(path):
        try:
            temporary.unlink(missing_ok=True)
            yield
            publish(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str, temporary: Path | None = None) -> None:
    """Write a text file atomically. Processes that write one at the same time must pass different temporary paths."""
    temporary = temporary or path.with_name(path.name + ".tmp")
    with written_whole(path, temporary):
        temporary.write_text(text, encoding="utf-8")


def append_text(path: Path, text: str) -> None:
    """Append to a text file at once. A kill or a full disk may leave the beginning of the text."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def write_json(path: Path, content: object, temporary: Path | None = None) -> None:
    """Write a JSON file atomically, as `write_text` does."""
    write_text(path, json.dumps(content, indent=2) + "\n", temporary)


SEAL, FILES = "seal", "files"
"""Entries of a sealed JSON object: the hash of all others, and the size and hash of each file that it describes."""


def write_sealed(
    path: Path,
    content: Mapping[str, Any],
    files: Collection[str] = (),
    temporary: Path | None = None,
    suffix: str = "",
) -> None:
    """Write a JSON object that `read_sealed` can check. Write it last: it is the record of finished work.

    The sizes and hashes of `files` in the same directory become the entry `files`. Their names end in `suffix` while
    they wait to be renamed.
    """
    described = {FILES: {name: describe_file(path.with_name(name + suffix)) for name in files}} if files else {}
    write_json(path, sealed({**content, **described}), temporary)


def read_sealed(
    path: Path, advice: str, required: Collection[str] = (), files: Collection[str] | None = ()
) -> dict[str, Any]:
    """Returns the object that `write_sealed` has written; refuses it if it or one of `files` has changed since.

    `files` are the names of the described files that the caller reads next, or None for all. Their bytes are read.
    """
    content = unsealed(read_json(path, advice, required), str(path), advice)
    described = content.pop(FILES, {})
    for name in described if files is None else files:
        file = path.with_name(name)
        refuse_absent(file, advice)
        if describe_file(file) != described.get(name):
            raise UserError(f"{file}: must be as mtptrain wrote it, but was changed or damaged since; {advice}")
    return content


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, SEAL: _seal_of(content)}


def unsealed(content: Any, where: str, advice: str) -> dict[str, Any]:
    """Returns the object that `sealed` was given; refuses one that has changed since, or has no seal."""
    if not isinstance(content, dict) or SEAL not in content:
        raise UserError(
            f"{where}: must have the entry {SEAL}, but lacks it: it was changed, or an older version wrote it; {advice}"
        )
    held = {name: value for name, value in content.items() if name != SEAL}
    if content[SEAL] != _seal_of(held):
        raise UserError(f"{where}: must be as mtptrain wrote it, but was changed or damaged since; {advice}")
    return held


def refuse_absent(path: Path, advice: str) -> None:
    if not path.is_file():
        raise UserError(f"{path}: must exist, but does not; {advice}")


def describe_file(path: Path) -> dict[str, object]:
    return {"num_bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _seal_of(content: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these keys and values, for json's `object_pairs_hook`; refuses a key that is repeated."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise UserError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in an object")
    return content


def parse_json(content: bytes | str, where: str, advice: str = "correct it") -> Any:
    """Returns the value of the JSON text of a file or of one line, `where`; refuses damage and repeated keys."""
    try:
        # From bytes, json would also read UTF-16. But callers split files into lines as bytes, which breaks UTF-16.
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return json.loads(text, object_pairs_hook=unique_keys)
    except (RecursionError, ValueError) as error:
        kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        reason = "is nested too deep to be read" if isinstance(error, RecursionError) else f"is not ({error})"
        raise UserError(f"{where}: must be {kind}, but {reason}; {advice}") from error


def refuse_lone_surrogates(value: Any, where: str) -> None:
    """Raises UserError if a string in a JSON value has half a surrogate pair, which JSON allows but UTF-8 does not."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: texts must be valid Unicode, but one is not ({error}); correct it") from error


def read_json(path: Path, advice: str = "correct it", required: Collection[str] = ()) -> dict[str, Any]:
    """Returns the object that a JSON file holds, with at least the required entries."""
    content = parse_json(path.read_bytes(), str(path), advice)
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object, but holds a {type(content).__name__}; {advice}")
    if missing := sorted(set(required) - content.keys()):
        raise UserError(f"{path}: must have the entries {', '.join(required)}, but lacks {missing[0]}; {advice}")
    return content


def read_manifest(
    kind: type[T], path: Path, program: str, advice: str, version: int | None = None, files: Collection[str] | None = ()
) -> T:
    """Returns the dataclass that `program` has written with `write_sealed`, nested dataclasses and tuples included.

    Entries must have the types of the dataclass, and `schema_version` must be `version` if that is given. `files` are
    as for `read_sealed`.
    """
    from pydantic import TypeAdapter, ValidationError  # takes longer to import than a refused setting may wait

    content = read_sealed(path, advice, files=files)
    if version is not None and content.get("schema_version") != version:
        raise UserError(f"{path}: schema_version must be {version}, but is {content.get('schema_version')}; {advice}")
    try:
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        reason = {"missing": f"lacks {place}", "unexpected_keyword_argument": f"has the unknown entry {place}"}.get(
            first["type"], f"{place} is {str(first['input'])[:40]} ({first['msg']})"
        )
        raise UserError(f"{path}: must be as {program} writes it, but {reason}; {advice}") from error


def tensor_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype and shape of every tensor in a safetensors file, by name. Reads only the header."""
    path.open("rb").close()  # safetensors would say of a file that cannot be opened that it does not exist
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        raise UserError(
            f"{path}: must be a complete safetensors file, but cannot be read ({error}); download or write it again"
        ) from error


def save_tensors(path: Path, tensors: dict[str, "torch.Tensor"]) -> None:
    """Write a safetensors file atomically. Its permissions are those of the umask, not the owner's alone."""
    from safetensors.torch import save_file  # torch takes seconds to import, which a refused setting need not wait for

    temporary = path.with_name(path.name + ".tmp")
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with written_whole(path, temporary):
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(ready, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            if (code := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
        temporary.chmod(mode)


def save_described(weights: Path, tensors: dict[str, "torch.Tensor"], record: Path, content: Mapping[str, Any]) -> None:
    """Write a safetensors file and, beside it, the sealed JSON object that describes it.

    Both are ready before one is renamed, so that a reader or a kill meets a mixture of old and new only within
    milliseconds. The object would then be refused, since it describes other weights.
    """
    ready = [(path.with_name(f"{path.name}.tmp"), path) for path in (weights, record)]
    save_tensors(ready[0][0], tensors)
    write_sealed(ready[1][0], content, [weights.name], suffix=".tmp")
    for temporary, path in ready:
        publish(temporary, path)


def remove_files(directory: Path, names: Collection[str]) -> None:
    """Remove these files, in this order, with what a killed write left of each, then the directory if it is empty."""
    for name in names:
        for suffix in ("", ".tmp", ".tmp.tmp"):  # a head's NAME.tmp is itself written atomically
            (directory / f"{name}{suffix}").unlink(missing_ok=True)
    with suppress(OSError):  # it does not exist, or holds other files, which somebody else has put there
        directory.rmdir()


def refuse_overwriting(path: Path, setting: str, marks: Collection[str], advice: str = "choose another name") -> None:
    """Raises UserError if a program would write its output to a file that exists, but has none of these texts."""
    is_text = path.is_file() and path.stat().st_size <= MAX_TEXT_BYTES
    content = path.read_text(encoding="utf-8", errors="replace") if is_text else ""
    if path.exists() and not any(mark in content for mark in marks):
        raise UserError(
            f"{setting}: must be a new file or an earlier output of this program, but {path} is something else; "
            f"{advice}"
        )


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
