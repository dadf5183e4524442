"""The draft vocabulary on disk: the target's tokens that a head with a smaller lm_head can draft.

`run_dir/draft_vocab/` holds `draft_vocab.safetensors` with `d2t` i64[D] and `t2d` bool[V]. Draft token i is the
target's token i + d2t[i], and these ids ascend; t2d is True for the target's tokens in the draft vocabulary.
`manifest.json`, written last, records which prompts were counted. `mtptrain draft-vocab` writes these files;
`mtptrain train` reads them.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from mtptrain.data.identity import refuse_different_facts
from mtptrain.heads.base import Head
from mtptrain.stage_dir import require
from mtptrain.target.frozen_parts import FrozenParts
from mtptrain.utils.errors import UserError
from mtptrain.utils.figures import Figure
from mtptrain.utils.files import read_manifest, save_tensors, write_sealed

DRAFT_VOCAB = "draft_vocab.safetensors"
MANIFEST = "manifest.json"
PROGRAM = "mtptrain draft-vocab"
SURELY_ADJACENT = 64
"""In a draft vocabulary of so many tokens, some are neighbours in the target's: the most frequent ones are chosen."""


@dataclass(frozen=True)
class DraftVocabManifest:
    """The prompts whose tokens were counted to choose a draft vocabulary, and its coverage."""

    draft_vocab_size: int
    vocab_size: int
    """Size of the target's vocabulary."""
    prompts_sha256: str
    """Hash of the train.safetensors whose tokens were counted."""
    distinct_tokens: int
    """Number of different tokens that drafts have to predict in the training split."""
    filled_up_tokens: int
    """Number of chosen tokens that no draft has to predict in the training split: special tokens, and the lowest ids
    if too few others occur."""
    coverage: dict[str, Figure]
    """By split: of the tokens that drafts have to predict, counted with repetitions, the share that is in the draft
    vocabulary."""


def offsets(token_ids: torch.Tensor) -> torch.Tensor:
    """Returns `d2t` for the target ids i64[D] of the draft tokens. Those of published heads may be in any order."""
    return token_ids - torch.arange(len(token_ids))


def membership(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns `t2d` bool[V] for offsets i64[D]."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    return torch.zeros(vocab_size, dtype=torch.bool, device=d2t.device).index_fill_(0, ids, True)


def check_draft_token_ids(
    state: Mapping[str, torch.Tensor], t2d: torch.Tensor | None, vocab_size: int, directory: Path
) -> None:
    """Check that `d2t` maps each draft token to a different target token, and that `t2d` marks these tokens."""
    ids = torch.arange(vocab_size)
    if "d2t" in state:
        ids = state["d2t"] + torch.arange(len(state["d2t"]))
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
            raise UserError(
                f"head.init_from: d2t of {directory} must be offsets to different tokens within the target's "
                f"0..{vocab_size - 1}, but lead to {len(ids.unique())} tokens within {int(ids.min())}..{int(ids.max())}"
                "; the head belongs to another target; set target.path to that target"
            )
        if t2d is None and len(ids) >= SURELY_ADJACENT and bool((state["d2t"].diff() > 0).all()):
            raise UserError(
                f"head.init_from: d2t of {directory} must be offsets, draft token i being token i + d2t[i], but looks "
                "like token ids, because it never repeats a value, so that no two draft tokens would be adjacent; "
                "subtract 0, 1, 2, ... from it"
            )
    if t2d is None:
        return
    marked = t2d.bool().nonzero().flatten()
    if tuple(t2d.shape) != (vocab_size,) or not torch.equal(marked, ids.sort().values):
        raise UserError(
            f"head.init_from: t2d of {directory} must mark among {vocab_size} tokens the {len(ids)} that the head "
            f"drafts{' according to d2t' * ('d2t' in state)}, but marks {len(marked)} among {len(t2d)}, not the same "
            "ones; download the head again"
        )


def write_draft_vocab(directory: Path, d2t: torch.Tensor, manifest: DraftVocabManifest) -> None:
    """Write the offsets i64[D], then the manifest, which has the hash of the file."""
    save_tensors(directory / DRAFT_VOCAB, {"d2t": d2t, "t2d": membership(d2t, manifest.vocab_size)})
    write_sealed(directory / MANIFEST, asdict(manifest), [DRAFT_VOCAB])


def require_draft_vocab(directory: Path) -> Path:
    require(directory / MANIFEST, PROGRAM)
    return require(directory / DRAFT_VOCAB, PROGRAM)


def read_draft_vocab(directory: Path, draft_vocab_size: int, vocab_size: int, prompts_sha256: str) -> torch.Tensor:
    """Returns a run's `d2t` i64[D], which must have been chosen for these sizes and prompts."""
    tensors, path = require_draft_vocab(directory), directory / MANIFEST
    manifest = read_manifest(DraftVocabManifest, path, PROGRAM, f"run {PROGRAM} again", files=[DRAFT_VOCAB])
    stored = {
        "head.draft_vocab_size": manifest.draft_vocab_size,
        "the target's vocab_size": manifest.vocab_size,
        "the hash of the prompts (train.safetensors)": manifest.prompts_sha256,
    }
    expected = dict(zip(stored, (draft_vocab_size, vocab_size, prompts_sha256), strict=True))
    refuse_different_facts(path, expected, stored, f"run {PROGRAM} again with the same recipe and run_dir")
    return load_file(tensors)["d2t"]


def d2t_sha256(d2t: torch.Tensor | None) -> str | None:
    """Returns the hash that identifies a draft vocabulary; None for the target's whole vocabulary."""
    return None if d2t is None else hashlib.sha256(d2t.cpu().numpy().tobytes()).hexdigest()


def initialise_own_vocabulary(head: Head, parts: FrozenParts, draft_vocab_dir: Path, prompts_sha256: str) -> None:
    """Copy the target's lm_head rows into the head's lm_head: all, or only those of its draft vocabulary."""
    if head.d2t is not None:
        vocab_size = len(parts.lm_head)
        head.d2t.copy_(read_draft_vocab(draft_vocab_dir, len(head.d2t), vocab_size, prompts_sha256))
    if head.lm_head is not None:
        ids = head.draft_token_ids
        with torch.no_grad():
            head.lm_head.weight.copy_(parts.lm_head if ids is None else parts.lm_head[ids])
