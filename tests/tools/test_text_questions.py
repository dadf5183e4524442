"""Tests the questions about long texts that tools/text_questions.py makes."""

import json
import subprocess
import sys
from pathlib import Path

from tools.text_questions import passages, questions, sections

ROOT = Path(__file__).parents[2]
PARAGRAPH = "The archive keeps every release, and every release keeps its own list of changes. " * 8


def write_texts(directory: Path) -> tuple[Path, Path]:
    english, german = directory / "english", directory / "german"
    english.mkdir()
    german.mkdir()
    paragraphs = "".join(f"<p>Number {number}. {PARAGRAPH}</p><pre>code {number}</pre>" for number in range(4))
    (english / "page.html").write_text(f"<title>no</title><h1>1.2. The <b>archive</b></h1>{paragraphs}")
    (german / "quotes").write_text(
        "\n%\n".join(f"Das ist der Satz Nummer {number}, und er ist wahr." for number in range(9))
    )
    return english, german


def test_a_page_is_read_as_headings_with_the_paragraphs_below_them_without_code(tmp_path: Path) -> None:
    english, german = write_texts(tmp_path)
    [(heading, paragraphs)] = sections(english / "page.html")
    assert heading == "The archive" and len(paragraphs) == 4 and "code" not in " ".join(paragraphs)
    [(heading, sentences)] = sections(german / "quotes")
    assert heading == "" and sentences[8] == "Das ist der Satz Nummer 8, und er ist wahr."


def test_paragraphs_without_an_end_tag_are_read(tmp_path: Path) -> None:
    (page := tmp_path / "page.htm").write_text("<h1>One</h1><p>first<p>second<h2>Two</h2><p>third")
    assert sections(page) == [("One", ["first", "second"]), ("Two", ["third"])]


def test_passages_join_paragraphs_and_keep_to_their_lengths() -> None:
    assert list(passages(["a" * 40, "b" * 40, "c" * 40, "d" * 200, "e" * 10], 50, 90)) == [f"{'a' * 40}\n{'b' * 40}"]
    assert list(passages(["a" * 50, "b" * 50], 10, 100)) == ["a" * 50, "b" * 50], "the line break counts too"


def test_every_kind_of_question_is_made_and_the_same_ones_again_from_the_same_seed(tmp_path: Path) -> None:
    english, german = write_texts(tmp_path)
    files = [english / "page.html"], [german / "quotes"]
    made = questions(*files, num_each=5, seed=1)
    assert sum("Summarize" in each for each in made) and sum("The archive" in each for each in made)
    assert sum("Satz Nummer" in each for each in made) == 5
    assert made == questions(*files, num_each=5, seed=1) != questions(*files, num_each=5, seed=2)


def test_the_program_writes_conversations(tmp_path: Path) -> None:
    english, german = write_texts(tmp_path)
    (english / "style.css").write_text("\n\n".join(f".class{number} {{ margin: 0px }}" for number in range(400)))
    output = tmp_path / "questions.jsonl"
    command = [sys.executable, "-m", "tools.text_questions", "--english", english, "--german", german]
    result = subprocess.run([*command, "--output", output], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert f"{len(rows)} questions" in result.stdout and len(rows) > 5
    assert ".class" not in output.read_text(encoding="utf-8")
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in rows)


def test_a_directory_that_does_not_exist_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    english, _ = write_texts(tmp_path)
    command = [sys.executable, "-m", "tools.text_questions", "--english", english, "--german", tmp_path / "germn"]
    output = tmp_path / "questions.jsonl"
    result = subprocess.run([*command, "--output", output], cwd=ROOT, capture_output=True, text=True, check=False)
    expected = f"error: --english, --german: must be directories, but {tmp_path}/germn is none; correct the path\n"
    assert (result.returncode, result.stderr) == (1, expected) and not output.exists()
