"""Provides text files and conversations for the prompts stage, and reads the documents that it writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtptrain.config import PipelineConfig
from mtptrain.data.prompt_files import DocumentEntry, Documents, Split
from mtptrain.target.hub import load_tokenizer

ConfigFor = Callable[..., PipelineConfig]
FILES = {f"file_{i:02}.py": f"value_{i} = {i}\n" * (i + 1) for i in range(40)} | {
    "sub/long.py": "x = 1\n" * 90,
    "empty.py": "",
}


def chat(name: str, *turns: str) -> dict[str, Any]:
    return {
        "id": name,
        "messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)],
    }


CHATS = [chat(f"chat{i}", f"question {i}", f"answer {i}") for i in range(20)]


def read_output(config: PipelineConfig) -> dict[str, list[tuple[DocumentEntry, list[int], list[int]]]]:
    """Returns each document's windows in order, by document name.

    A window is a tuple of the document's entry and the window's token ids and loss mask.
    """
    stage_dir = config.stage_dir("prompts")
    entries = DocumentEntry.read_all(stage_dir)
    found: dict[str, list[tuple[DocumentEntry, list[int], list[int]]]] = {}
    for split in Split:
        documents = Documents.load(stage_dir / f"{split}.safetensors")
        for i, document_id in enumerate(documents.document_ids.tolist()):
            assert entries[document_id].split is split
            window = (entries[document_id], documents.token_ids(i).tolist(), documents.mask(i).tolist())
            found.setdefault(entries[document_id].name, []).append(window)
    return found


def read_texts(config: PipelineConfig) -> dict[str, list[tuple[str, str]]]:
    """Returns the whole text and the supervised text of each window in order, by document name."""
    tokenizer = load_tokenizer(Path(config.target.path))

    def text(ids: list[int], mask: list[int]) -> str:
        return str(tokenizer.decode([token for token, is_set in zip(ids, mask, strict=True) if is_set]))

    return {
        name: [(text(ids, [1] * len(ids)), text(ids, mask)) for _, ids, mask in windows]
        for name, windows in read_output(config).items()
    }
