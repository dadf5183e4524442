"""Tests which files below the directories become documents, and why others do not."""

import os
import sysconfig
from pathlib import Path

import pytest

from mtptrain.data.text_files import STANDARD_LIBRARY, read_text_files
from mtptrain.utils.errors import UserError


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_files_that_fit_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "b.py", "größe = 1\n".encode())
    write(tmp_path / "a" / "z.py", b"pass\n")
    write(tmp_path / "readme.txt", b"not code")
    write(tmp_path / "site-packages" / "deep" / "left_out.py", b"pass\n")
    texts, refused = read_text_files([str(tmp_path)], "*.py", ["site-packages/*"])
    assert list(texts.items()) == [("a/z.py", "pass\n"), ("b.py", "größe = 1\n")] and refused == {}
    assert list(read_text_files([str(tmp_path)], "deep/*.py")[0]) == ["site-packages/deep/left_out.py"]
    for pattern in ("", ".", "/abs"):
        with pytest.raises(UserError, match="must match a file below"):
            read_text_files([str(tmp_path)], pattern)


def test_the_second_file_of_a_name_is_refused_and_not_overwritten(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        write(tmp_path / directory / "same.py", directory.encode())
        write(tmp_path / directory / "latin.py", b"\xff")
    texts, refused = read_text_files([f"{tmp_path}/one", f"{tmp_path}/two"], "*.py")
    assert texts == {"same.py": "one"}
    assert refused == {
        "latin.py": "not UTF-8",
        f"{tmp_path}/two/latin.py": "another directory has a file with this name",
        f"{tmp_path}/two/same.py": "another directory has a file with this name",
    }


def test_paths_are_directories_or_stand_for_the_standard_library_of_the_running_python() -> None:
    texts, _ = read_text_files([STANDARD_LIBRARY], "abc.py", ["*/*"])
    assert texts == {"abc.py": Path(sysconfig.get_path("stdlib"), "abc.py").read_text(encoding="utf-8")}
    with pytest.raises(UserError, match=r"prompts\.paths: must name directories, but '/no/such/place' is not one"):
        read_text_files(["/no/such/place"], "*")


def test_a_file_that_cannot_be_used_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write(Path(os.fsdecode(bytes(tmp_path) + b"/gr\xf6sse.py")), b"pass\n")
    write(tmp_path / "kept.py", b"pass\n")
    write(tmp_path / "sparse.py", b"")
    os.truncate(tmp_path / "sparse.py", 2**30 + 1)
    texts, refused = read_text_files([str(tmp_path)], "*.py")
    assert refused == {"gr\\xf6sse.py": "a name that is not UTF-8", "sparse.py": "larger than 1,073,741,824 bytes"}
    assert list(texts) == ["kept.py"]
