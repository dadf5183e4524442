"""Choose a draft vocabulary of `head.draft_vocab_size` tokens.

It holds the special tokens, and the tokens that drafts most often have to predict in the training prompts.

Reads `run_dir/prompts/`; writes `run_dir/draft_vocab/` (see mtptrain/data/draft_vocab.py). Run it between
`mtptrain prompts` and `mtptrain train` for heads whose vocabulary is smaller than the target's.

    mtptrain draft-vocab recipe=quickstart_eagle3
"""

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mtptrain.config import PipelineConfig
from mtptrain.data.draft_vocab import MANIFEST, DraftVocabManifest, offsets, write_draft_vocab
from mtptrain.data.prompt_files import Documents, Split
from mtptrain.heads import HEADS
from mtptrain.run_dir import Run
from mtptrain.settings.heads import HeadConfig
from mtptrain.stage_dir import StageDir
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import as_ids
from mtptrain.training.batches import draft_spans
from mtptrain.utils.errors import UserError
from mtptrain.utils.figures import share


def main(config: PipelineConfig) -> None:
    with StageDir(config.stage_dir("draft_vocab")).writing():
        manifest = prepare_draft_vocab(Run(config))
    print_summary(manifest)
    print(f"written to {config.stage_dir('draft_vocab')}")


def prepare_draft_vocab(run: Run) -> DraftVocabManifest:
    head, target = run.config.head, run.target
    vocab_size = target.config.vocab_size
    size = draft_vocab_size(head, vocab_size)
    identity = run.identity(HEADS[head.name].resolve_capture_layers(head, target.config))

    counts = {split.value: count_predictable(run.documents(split), vocab_size) for split in Split}
    token_ids = choose_tokens(counts[Split.train], size, special_token_ids(target))

    stage_dir = run.stage_dir("draft_vocab")
    StageDir(stage_dir).record(run.config, MANIFEST)
    d2t = offsets(torch.from_numpy(token_ids))
    manifest = DraftVocabManifest(
        draft_vocab_size=size,
        vocab_size=vocab_size,
        prompts_sha256=identity.prompts_sha256,
        distinct_tokens=int(np.count_nonzero(counts[Split.train])),
        filled_up_tokens=int(np.count_nonzero(counts[Split.train][token_ids] == 0)),
        coverage={split: share(each[token_ids].sum().item(), each.sum().item()) for split, each in counts.items()},
    )
    write_draft_vocab(stage_dir, d2t, manifest)
    return manifest


def draft_vocab_size(head: HeadConfig, vocab_size: int) -> int:
    size = getattr(head, "draft_vocab_size", None)
    if size is None or size >= vocab_size:
        raise UserError(
            f"head.draft_vocab_size: must be below the target's {vocab_size} tokens to choose a draft vocabulary, but "
            f"is {size}; correct it, or skip this program if head {head.name} drafts the target's whole vocabulary"
        )
    if head.init_from is not None:
        raise UserError(
            f"head.init_from: must be unset to choose a draft vocabulary, but is {head.init_from}, whose lm_head keeps "
            "its own vocabulary; skip this program"
        )
    return int(size)


def special_token_ids(target: TargetFiles) -> set[int]:
    """Returns the tokens to keep even if they are rare: special tokens and all end-of-sequence tokens."""
    ends = (*as_ids(target.config.eos_token_id), *target.generation.eos_token_ids)
    return {token for token in (*ends, *target.tokenizer.all_special_ids) if token < target.config.vocab_size}


def count_predictable(documents: Documents, vocab_size: int) -> NDArray[np.int64]:
    """Returns how often the first draft of a round has to predict each token, i64[V]; later drafts predict a subset."""
    predicted = [
        documents.token_ids(index)[first + 2 : first + 2 + length]
        for index in range(len(documents))
        for first, length in zip(*draft_spans(documents.mask(index)), strict=True)
    ]
    return np.bincount(np.concatenate([np.empty(0, np.int32), *predicted]), minlength=vocab_size)


def choose_tokens(counts: NDArray[np.int64], size: int, always: set[int]) -> NDArray[np.int64]:
    """Returns the ids of `always` and of the most frequent tokens, i64[size], ascending. Ties go to the lower id."""
    if len(always) > size:
        raise UserError(
            f"head.draft_vocab_size: must hold the {len(always)} special tokens of the target, but is {size}; set it "
            "higher"
        )
    ranked = counts.copy()
    ranked[sorted(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size])


def print_summary(manifest: DraftVocabManifest) -> None:
    table = Table(title="mtptrain draft-vocab", show_header=False)
    table.add_row("draft vocabulary", f"{manifest.draft_vocab_size:,} of {manifest.vocab_size:,} tokens")
    table.add_row("distinct tokens that a draft can predict", f"{manifest.distinct_tokens:,}")
    table.add_row("chosen although no draft can predict them", f"{manifest.filled_up_tokens:,}: special, or lowest ids")
    for split, covered in manifest.coverage.items():
        table.add_row(f"coverage, {split}", "no token to predict" if covered is None else f"{covered:.2%}")
    Console().print(table)
