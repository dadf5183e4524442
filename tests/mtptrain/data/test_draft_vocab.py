"""Tests the draft vocabulary on disk: its offsets, and which files are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtptrain.data.draft_vocab import (
    DRAFT_VOCAB,
    DraftVocabManifest,
    check_draft_token_ids,
    offsets,
    read_draft_vocab,
    write_draft_vocab,
)
from tests.sealed import flip_bit

TOKEN_IDS = torch.tensor([0, 3, 4, 9])
COVERAGE = {"train": 0.9, "validation": 0.8}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Writes a draft vocabulary of tokens 0, 3, 4 and 9 for a target with ten tokens, and returns its directory."""
    write_draft_vocab(tmp_path, offsets(TOKEN_IDS), DraftVocabManifest(4, 10, "abc", 7, 0, COVERAGE))
    return tmp_path


def test_offsets_lead_from_draft_tokens_to_the_targets_and_t2d_marks_these(directory: Path) -> None:
    d2t = read_draft_vocab(directory, 4, 10, "abc")
    assert d2t.dtype is torch.int64 and d2t.tolist() == [0, 2, 2, 6]
    assert (torch.arange(4) + d2t).tolist() == TOKEN_IDS.tolist()
    t2d = load_file(directory / DRAFT_VOCAB)["t2d"]
    assert t2d.dtype is torch.bool and t2d.nonzero()[:, 0].tolist() == TOKEN_IDS.tolist() and len(t2d) == 10


def test_a_vocabulary_for_something_else_or_a_damaged_one_is_refused(directory: Path) -> None:
    def is_refused(message: str, size: int = 4, vocab_size: int = 10, prompts: str = "abc") -> None:
        with pytest.raises(ValueError, match=f"{message}.*; run mtptrain draft-vocab"):
            read_draft_vocab(directory, size, vocab_size, prompts)

    is_refused(r"head\.draft_vocab_size must be 3, but is 4", size=3)
    is_refused("the target's vocab_size must be 11, but is 10", vocab_size=11)
    is_refused(r"the hash of the prompts \(train\.safetensors\) must be xyz, but is abc", prompts="xyz")
    flip_bit(directory / DRAFT_VOCAB)
    is_refused(r"draft_vocab\.safetensors: must be as mtptrain wrote it, but was changed")
    for name in (DRAFT_VOCAB, "manifest.json"):
        (directory / name).unlink()
        is_refused(f"{name}: must exist, but does not")


def test_token_ids_in_place_of_offsets_are_refused() -> None:
    ids = torch.cat([torch.arange(40), torch.arange(60, 120)])
    check_draft_token_ids({"d2t": offsets(ids)}, None, 260, Path("head"))
    with pytest.raises(ValueError, match=r"d2t of head must be offsets, .*, but looks like token ids"):
        check_draft_token_ids({"d2t": ids}, None, 260, Path("head"))
