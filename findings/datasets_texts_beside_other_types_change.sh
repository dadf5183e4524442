#!/usr/bin/env bash
# datasets changes texts of chats when one value of the column is no text: quotes are added in one case and values decoded in another.
#
# Versions: datasets 5.2.0, pyarrow as it asks for, Python 3.11; JSON Lines of messages whose content is mostly text, and once a list
#   of parts, as chat data sets mix them.
# Expected: a text is read as it is written; a file whose types do not fit the first one's is refused, or its values are cast.
# Behaviour: (a) one content of another type in the first file makes the field `Json`, and a text that is itself JSON source comes
#   back decoded: "42" as a number, "null" as None, a quoted text without its quotes. (b) If the first file holds texts alone, the field
#   stays `string`, and in a later file with one other value every text comes back as JSON source: in quotes, line breaks escaped.
#   Nothing is printed in either case. A model that is trained on such a set learns answers in quotes.
# Seen: (a) [42, None, 'said', 'Me.'] for "42", "null", "\"said\"" and "Me."; (b) ['"You."'] for "You.".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0
cat > "$folder/read.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from datasets import load_dataset

folder = Path(sys.argv[1])


def write(name: str, *contents: object) -> str:
    rows = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def read(*files: str) -> list[object]:
    data = load_dataset("json", data_files=list(files), split="train", cache_dir=str(folder / "cache"))
    return [row["messages"][0]["content"] for row in data]


part = [{"type": "text", "text": "Hi."}]
mixed = write("mixed.jsonl", "42", "null", '"said"', "Me.", part)
print("SEEN a", read(mixed)[:4])
plain, later = write("plain.jsonl", "Me.", "You."), write("later.jsonl", "You.", part)
print("SEEN b", read(plain, later)[2:3])
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder" 2>"$folder/errors" | grep SEEN | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'SEEN' && echo "as described"
SEEN a [42, None, 'said', 'Me.']
SEEN b ['"You."']
SEEN
