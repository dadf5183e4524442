"""Tests the questions about long texts that benchmarks/text_questions.py makes."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.text_questions import passages, questions, sections
from tests.programs import ROOT

PARAGRAPH = "The archive keeps every release, and every release keeps its own list of changes. " * 8


def test_questions_are_made_of_pages_and_plain_texts(tmp_path: Path) -> None:
    english, german = tmp_path / "english", tmp_path / "german"
    english.mkdir()
    german.mkdir()
    paragraphs = "".join(f"<p>Number {number}. {PARAGRAPH}</p><pre>code {number}</pre>" for number in range(4))
    (english / "page.html").write_text(f"<title>no</title><h1>1.2. The <b>archive</b></h1>{paragraphs}")
    (english / "style.css").write_text("\n\n".join(f".class{number} {{ margin: 0px }}" for number in range(400)))
    sentences = [f"Das ist der Satz Nummer {number}, und er ist wahr." for number in range(9)]
    (german / "quotes").write_text("\n%\n".join(sentences))
    [(heading, found)] = sections(english / "page.html")
    assert heading == "The archive" and len(found) == 4 and "code" not in " ".join(found)
    assert sections(german / "quotes") == [("", sentences)]
    files = [english / "page.html"], [german / "quotes"]
    made = questions(*files, num_each=5)
    assert sum("Summarize" in each for each in made) and sum("The archive" in each for each in made)
    assert sum("Satz Nummer" in each for each in made) == 5 and made == questions(*files, num_each=5)

    output = tmp_path / "questions.jsonl"
    command = [sys.executable, "-m", "benchmarks.text_questions", "--english", english, "--output", output, "--german"]
    subprocess.run([*command, german], cwd=ROOT, check=True)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) > 5 and ".class" not in output.read_text()
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in rows)
    output.unlink()
    result = subprocess.run([*command, tmp_path / "germn"], cwd=ROOT, capture_output=True, text=True, check=False)
    expected = f"error: --english, --german: must be directories, but {tmp_path}/germn is none; correct the path\n"
    assert (result.returncode, result.stderr) == (1, expected) and not output.exists()


def test_paragraphs_without_an_end_tag_are_read(tmp_path: Path) -> None:
    (page := tmp_path / "page.htm").write_text("<h1>One</h1><p>first<p class=x>se&amp;ond<h2>Two</h2><p>third")
    assert sections(page) == [("One", ["first", "se&ond"]), ("Two", ["third"])]


def test_passages_join_paragraphs_and_keep_to_their_lengths() -> None:
    assert list(passages(["a" * 40, "b" * 40, "c" * 40, "d" * 200, "e" * 10], 50, 90)) == [f"{'a' * 40}\n{'b' * 40}"]
    assert list(passages(["a" * 50, "b" * 50], 10, 100)) == ["a" * 50, "b" * 50], "the line break counts too"
