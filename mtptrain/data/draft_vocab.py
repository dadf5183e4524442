"""The draft vocabulary on disk: the tokens of the target that a head with a small lm_head of its own can draft.

`run_dir/draft_vocab/` holds `draft_vocab.safetensors` with `d2t` i64[D] (offsets: draft token i is the target's i + d2t[i], ids
rising) and `t2d` bool[V] (True where the target's token is among them); `manifest.json`, written last, says what they were
counted over. `data_prep.draft_vocab` writes it, `mtptrain.train` reads it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from mtptrain.run_dir import require
from mtptrain.utils.files import file_sha256, save_tensors, write_json

DRAFT_VOCAB = "draft_vocab.safetensors"
MANIFEST = "manifest.json"
PROGRAM = "data_prep.draft_vocab"


@dataclass(frozen=True)
class DraftVocabManifest:
    """What a draft vocabulary was counted over, and what it covers."""

    draft_vocab_size: int
    vocab_size: int
    """Of the target."""
    prompts_sha256: str
    """Of the train.safetensors whose tokens were counted."""
    draft_vocab_sha256: str
    """Of draft_vocab.safetensors."""
    distinct_tokens: int
    """Different tokens among those that drafts of the training split predict."""
    filled_up_tokens: int
    """Tokens of the vocabulary that no draft of the training split predicts: special ones, and the lowest ids where fewer occur than
    were asked for."""
    coverage: dict[str, float]
    """By split: share of the tokens that drafts predict which the vocabulary holds."""


def offsets(token_ids: torch.Tensor) -> torch.Tensor:
    """`d2t` of the target's ids i64[D], which must rise."""
    assert bool((token_ids.diff() > 0).all()), "ids of a draft vocabulary must rise"
    return token_ids - torch.arange(len(token_ids))


def membership(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`t2d` bool[V] of offsets i64[D]."""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, d2t + torch.arange(len(d2t)), True)


def write_draft_vocab(directory: Path, d2t: torch.Tensor, vocab_size: int) -> str:
    """Write the tensors, without the manifest that makes them count; returns the sha256 of the file."""
    save_tensors(directory / DRAFT_VOCAB, {"d2t": d2t, "t2d": membership(d2t, vocab_size)})
    return file_sha256(directory / DRAFT_VOCAB)


def write_manifest(directory: Path, manifest: DraftVocabManifest) -> None:
    write_json(directory / MANIFEST, asdict(manifest))


def read_draft_vocab(directory: Path, draft_vocab_size: int, vocab_size: int, prompts_sha256: str) -> torch.Tensor:
    """`d2t` i64[D] of a run.

    Raises:
        FileNotFoundError: it has not been chosen yet.
        ValueError: it is of another size, for another vocabulary or from other prompts, or the file was changed since.
    """
    path = require(directory / MANIFEST, PROGRAM)
    manifest = DraftVocabManifest(**json.loads(path.read_text()))
    facts = {
        "head.draft_vocab_size": (draft_vocab_size, manifest.draft_vocab_size),
        "the target's vocab_size": (vocab_size, manifest.vocab_size),
        "the hash of the prompts (train.safetensors)": (prompts_sha256, manifest.prompts_sha256),
        f"the sha256 of {DRAFT_VOCAB}": (
            file_sha256(require(directory / DRAFT_VOCAB, PROGRAM)),
            manifest.draft_vocab_sha256,
        ),
    }
    different = [f"{name} must be {wanted}, but is {found}" for name, (wanted, found) in facts.items() if wanted != found]
    if different:
        raise ValueError(f"{path}: {'; '.join(different)}; run {PROGRAM} again with the same recipe and run_dir")
    d2t: torch.Tensor = load_file(directory / DRAFT_VOCAB)["d2t"]
    return d2t


def d2t_sha256(d2t: torch.Tensor | None) -> str | None:
    """What tells two draft vocabularies apart; None for the target's own."""
    return None if d2t is None else hashlib.sha256(d2t.cpu().numpy().tobytes()).hexdigest()
