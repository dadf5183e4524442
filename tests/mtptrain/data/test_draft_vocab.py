"""Tests the draft vocabulary on disk: its offsets, and which files are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtptrain.data.draft_vocab import (
    DRAFT_VOCAB,
    DraftVocabManifest,
    check_draft_token_ids,
    d2t_sha256,
    membership,
    offsets,
    read_draft_vocab,
    write_draft_vocab,
)
from mtptrain.utils.errors import UserError
from tests.sealed import flip_bit

TOKEN_IDS = torch.tensor([0, 3, 4, 9])
MANIFEST = DraftVocabManifest(
    draft_vocab_size=4,
    vocab_size=10,
    prompts_sha256="abc",
    distinct_tokens=7,
    filled_up_tokens=0,
    coverage={"train": 0.9, "validation": 0.8},
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Writes a draft vocabulary of tokens 0, 3, 4 and 9 for a target with ten tokens, and returns its directory."""
    write_draft_vocab(tmp_path, offsets(TOKEN_IDS), MANIFEST)
    return tmp_path


def test_offsets_lead_from_draft_tokens_to_the_targets(directory: Path) -> None:
    d2t = read_draft_vocab(directory, 4, 10, "abc")
    assert d2t.dtype is torch.int64 and d2t.tolist() == [0, 2, 2, 6]
    assert (torch.arange(4) + d2t).tolist() == TOKEN_IDS.tolist()


def test_t2d_marks_the_tokens_of_the_target_that_can_be_drafted(directory: Path) -> None:
    t2d = load_file(directory / DRAFT_VOCAB)["t2d"]
    assert t2d.dtype is torch.bool and t2d.nonzero()[:, 0].tolist() == TOKEN_IDS.tolist() and len(t2d) == 10
    assert torch.equal(membership(torch.zeros(10, dtype=torch.long), 10), torch.ones(10, dtype=torch.bool))


def test_two_vocabularies_have_different_hashes_and_the_targets_own_has_none() -> None:
    assert d2t_sha256(None) is None
    assert d2t_sha256(torch.tensor([0, 2])) == d2t_sha256(torch.tensor([0, 2])) != d2t_sha256(torch.tensor([0, 3]))


def test_a_vocabulary_for_something_else_is_refused(directory: Path) -> None:
    for size, vocab_size, prompts, reason in (
        (3, 10, "abc", r"head\.draft_vocab_size must be 3, but is 4"),
        (4, 11, "abc", "the target's vocab_size must be 11, but is 10"),
        (4, 10, "xyz", r"the hash of the prompts \(train\.safetensors\) must be xyz, but is abc"),
    ):
        with pytest.raises(ValueError, match=f"{reason}; run mtptrain draft-vocab again with the same recipe"):
            read_draft_vocab(directory, size, vocab_size, prompts)


def test_a_changed_file_or_manifest_is_refused(directory: Path) -> None:
    flip_bit(directory / DRAFT_VOCAB)
    with pytest.raises(
        ValueError, match=r"the sha256 of draft_vocab\.safetensors must be \w+, but is \w+; run mtptrain"
    ):
        read_draft_vocab(directory, 4, 10, "abc")
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"draft_vocab_size": 4', '"draft_vocab_size": 3'))
    with pytest.raises(UserError, match=r"manifest\.json: must be as mtptrain wrote it, .*; run mtptrain draft-vocab"):
        read_draft_vocab(directory, 4, 10, "abc")


@pytest.mark.parametrize("missing", ["manifest.json", DRAFT_VOCAB])
def test_a_vocabulary_that_was_not_chosen_names_the_program_that_does(directory: Path, missing: str) -> None:
    (directory / missing).unlink()
    with pytest.raises(UserError, match=rf"{missing}: must exist, but does not; run mtptrain draft-vocab with the"):
        read_draft_vocab(directory, 4, 10, "abc")


def test_token_ids_in_place_of_offsets_are_refused() -> None:
    ids = torch.cat([torch.arange(40), torch.arange(60, 120)])
    check_draft_token_ids({"d2t": offsets(ids)}, None, 260, Path("head"))
    with pytest.raises(ValueError, match=r"d2t of head must be offsets, .*, but looks like token ids"):
        check_draft_token_ids({"d2t": ids}, None, 260, Path("head"))
