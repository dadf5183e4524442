"""Counts the training documents of a run, and the steps needed to train on them."""

from dataclasses import dataclass

import numpy as np

from mtptrain.config import PipelineConfig
from mtptrain.data.prompt_files import Documents, Split, require_prompts
from mtptrain.training.step_packing import pack_documents, shuffled

UNKNOWN_TOKENS = 1_000_000
"""Number of tokens assumed if the recipe sets no limit and mtptrain prompts has not been run."""


@dataclass(frozen=True)
class Workload:
    """Counts of stage 1's training documents, or else the recipe's bounds (`UNKNOWN_TOKENS` if it sets no limit)."""

    is_counted: bool
    """Whether mtptrain prompts has been run. If not, the numbers are bounds or assumptions."""
    documents: int
    """0 if unknown."""
    tokens: int
    supervised_tokens: int
    longest_tokens: int
    mean_tokens: float
    """Document length averaged over tokens, not documents. Attention costs are proportional to it."""


def read_workload(config: PipelineConfig) -> Workload:
    """Counts the training documents of stage 1 if it has been run; otherwise returns the recipe's bounds."""
    path = config.stage_dir("prompts") / f"{Split.train}.safetensors"
    if not path.exists():
        tokens, longest = config.prompts.max_train_tokens or UNKNOWN_TOKENS, config.prompts.max_document_tokens
        return Workload(False, 0, tokens, tokens, longest, float(longest))
    documents = Documents.load(require_prompts(path.parent, path.name))
    lengths = documents.lengths.astype(np.float64)
    return Workload(
        is_counted=True,
        documents=len(documents),
        tokens=len(documents.input_ids),
        supervised_tokens=int(documents.loss_mask.sum()),
        longest_tokens=int(lengths.max(initial=1)),
        mean_tokens=float((lengths**2).sum() / max(1.0, lengths.sum())),
    )


def count_trained_tokens(config: PipelineConfig, tokens: int) -> int:
    """Returns the number of tokens in all training steps, for a training set of `tokens` tokens.

    With `train.max_steps`, all steps are assumed to be full.
    """
    step_tokens = config.train.batch_tokens * config.train.micro_batches_per_step
    return config.train.max_steps * step_tokens or config.train.epochs * tokens


def count_steps(config: PipelineConfig, trained_tokens: int) -> int:
    """Returns the number of training steps.

    The documents of stage 1 are packed as in training, except that a document's length is taken as its cost. If stage 1
    has not been run, or a document is longer than `batch_tokens`, all steps are assumed to be full.
    """
    train, path = config.train, config.stage_dir("prompts") / f"{Split.train}.safetensors"
    if train.max_steps:
        return train.max_steps
    lengths = Documents.load(path).lengths if path.exists() else np.zeros(0, np.int64)
    if not 0 < lengths.max(initial=0) <= train.batch_tokens:
        return trained_tokens // (train.batch_tokens * train.micro_batches_per_step)
    costs = lengths.astype(np.float64)
    return train.epochs * len(
        pack_documents(
            lengths,
            costs,
            train.batch_tokens,
            train.micro_batches_per_step,
            shuffled(len(lengths), config.seed, epoch=0),
        )
    )
