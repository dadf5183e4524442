"""Makes questions that contain a text, of the kinds that data sets of short chats lack: summaries of and answers from
long texts, and translations of single German paragraphs.

Reads HTML pages (.html, .htm) and plain text (.txt, or no suffix), and no other files; writes one conversation with a
single user turn per line, for `prompts.paths` of `mtptrain responses`. The same files give the same questions.
docs/results/smollm2.md says which texts were used there.

    python -m benchmarks.text_questions --english DIR --german DIR --output questions.jsonl
"""

import argparse
import html
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from mtptrain.utils.errors import UserError, errors_as_lines

HTML = (".html", ".htm")
SUMMARY = ("Summarize: {text}", "Summarize the following text:\n\n{text}", "{text}\n\nSummarize the text above.")
ANSWER = ("{text}\nWhat does the text say about {topic}?", "{text}\nExplain {topic} in your own words.")
TRANSLATION = ("Translate German to English: {text}", "Translate from German to English:\n{text}")
WITHOUT_PROSE = re.compile(r"<(script|style|pre|table|title|nav)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE)
BLOCK = re.compile(r"<(h[1-4]|p)\b[^>]*>(.*?)(?=</?(?:h[1-4]|p)\b|\Z)", re.DOTALL | re.IGNORECASE)
"""A heading or a paragraph, whose end tag may be missing."""


def sections(path: Path) -> list[tuple[str, list[str]]]:
    """Returns the headings of a page with their paragraphs, or the paragraphs of a plain text, which has no heading."""
    content = path.read_text(encoding="utf-8", errors="ignore")
    if path.suffix not in HTML:  # paragraphs end with an empty line, or with a % in a collection of quotations
        return [("", [" ".join(each.split()) for each in content.replace("\n%\n", "\n\n").split("\n\n")])]
    found: list[tuple[str, list[str]]] = []
    for tag, marked in BLOCK.findall(WITHOUT_PROSE.sub("", content)):
        text = " ".join(html.unescape(re.sub(r"<[^>]*>", "", marked)).split())
        if tag.lower() != "p":
            found.append((text.lstrip("0123456789. "), []))
        elif found and text:
            found[-1][1].append(text)
    return found


def passages(paragraphs: list[str], min_characters: int, max_characters: int) -> Iterator[str]:
    """Yields consecutive paragraphs joined to texts within the two lengths."""
    texts = [""]
    for paragraph in paragraphs:
        if len(f"{texts[-1]}\n{paragraph}".strip()) > max_characters:
            texts.append("")
        texts[-1] = f"{texts[-1]}\n{paragraph}".strip()
    yield from (text for text in texts if min_characters <= len(text) <= max_characters)


def questions(english: list[Path], german: list[Path], num_each: int = 400) -> list[str]:
    """Returns at most `num_each` summaries and as many answers from texts and translations, in random order."""
    chance = random.Random(0)
    parts = [part for path in english for part in sections(path)]
    texts = [text for _, below in parts for text in passages(below, 900, chance.randint(1500, 6000))]
    topics = [
        (text, topic)
        for topic, below in parts
        if 3 < len(topic) < 60
        for text in passages(below, 600, chance.randint(1200, 3500))
    ]
    sentences = [
        text
        for path in german
        for _, below in sections(path)
        for text in below
        if 40 <= len(text) <= 400 and text.isprintable()
    ]
    sentences = list(dict.fromkeys(sentences))  # a collection may have the same file under two names
    for found in (texts, topics, sentences):
        chance.shuffle(found)
    made = [chance.choice(SUMMARY).format(text=text) for text in texts[:num_each]]
    made += [chance.choice(ANSWER).format(text=text, topic=topic) for text, topic in topics[:num_each]]
    made += [chance.choice(TRANSLATION).format(text=text) for text in sentences[:num_each]]
    chance.shuffle(made)
    return made


def files(directories: list[Path]) -> list[Path]:
    """Returns the pages and texts below the directories. Raises UserError for a path that is not a directory."""
    for directory in directories:
        if not directory.is_dir():
            raise UserError(f"--english, --german: must be directories, but {directory} is none; correct the path")
    found = (path for directory in directories for path in directory.rglob("*"))
    return sorted(path for path in found if path.is_file() and path.suffix in (*HTML, "", ".txt"))


@errors_as_lines()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--english", type=Path, nargs="+", required=True, help="directories of English texts")
    parser.add_argument("--german", type=Path, nargs="+", required=True, help="directories of German texts")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    made = questions(files(args.english), files(args.german))
    with args.output.open("w", encoding="utf-8") as output:
        for question in made:
            output.write(json.dumps({"messages": [{"role": "user", "content": question}]}, ensure_ascii=False) + "\n")
    print(f"{args.output}: {len(made):,} questions")


if __name__ == "__main__":
    main()
