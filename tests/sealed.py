"""Writes the sealed files that tests need: the manifest of prompts, and files as others would write or damage them."""

import json
from pathlib import Path
from typing import Any

from mtptrain.data.identity import TokenizerIdentity
from mtptrain.data.prompt_files import DOCUMENTS_FILE, DocumentEntry, Documents, PromptsManifest, Split
from mtptrain.utils.files import FILES, SEAL, write_sealed

MANIFEST = PromptsManifest(2, TokenizerIdentity("a", "b"), 260, 512, 3, 40, 1, 9)


def seal_prompts(directory: Path, manifest: PromptsManifest = MANIFEST) -> Path:
    """Write the manifest of prompts, and those of its files that do not exist. Returns the path of the manifest."""
    for path in (directory / f"{split}.safetensors" for split in Split):
        if not path.exists():
            Documents.from_list([(0, [1], [1])]).save(path)
    if not (directory / DOCUMENTS_FILE).exists():
        DocumentEntry.write_all(directory, [])
    manifest.write(directory)
    return directory / "manifest.json"


def seal_again(path: Path, **changes: Any) -> None:
    """Change entries of a sealed JSON file as a version of mtptrain that writes them would; `...` removes one."""
    content = json.loads(path.read_text()) | changes
    write_sealed(path, {name: value for name, value in content.items() if name != SEAL and value is not ...})


def describe_again(path: Path) -> None:
    """Write the hashes of the files that a sealed JSON file describes anew, as whoever changed them would."""
    content = json.loads(path.read_text())
    write_sealed(path, {name: value for name, value in content.items() if name not in (SEAL, FILES)}, content[FILES])


def flip_bit(path: Path, position: int = -1) -> None:
    """Flip the lowest bit of one byte of a file: of its last byte, or of the one at `position`."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
