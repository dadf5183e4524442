"""Counts the training documents of a run, and estimates the steps needed to train on them."""

import math
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
    """Number of documents; 0 if unknown."""
    tokens: int
    """Number of tokens of all documents."""
    supervised_tokens: int
    """Number of tokens that the loss masks count."""
    longest_tokens: int
    """Number of tokens of the longest document."""
    mean_tokens: float
    """Document length averaged over tokens, not documents. Attention costs are proportional to it."""


def read_train_documents(config: PipelineConfig) -> Documents | None:
    """Returns the training documents of stage 1, or None if it has not been run."""
    path = config.stage_dir("prompts") / f"{Split.train}.safetensors"
    return Documents.load(require_prompts(path.parent, path.name)) if path.exists() else None


def count_workload(config: PipelineConfig, documents: Documents | None) -> Workload:
    """Counts the training documents if there are any; otherwise returns the recipe's bounds."""
    if documents is None:
        tokens, longest = config.prompts.max_train_tokens or UNKNOWN_TOKENS, config.prompts.max_document_tokens
        return Workload(False, 0, tokens, tokens, longest, float(longest))
    lengths = documents.lengths.astype(np.float64)
    return Workload(
        is_counted=True,
        documents=len(documents),
        tokens=len(documents.input_ids),
        supervised_tokens=int(documents.loss_mask.sum()),
        longest_tokens=int(lengths.max(initial=1)),
        mean_tokens=float((lengths**2).sum() / max(1.0, lengths.sum())),
    )


def estimate_steps(config: PipelineConfig, documents: Documents | None, tokens: int) -> int:
    """Returns the number of training steps, for a training set of `tokens` tokens.

    The documents are packed as in training from a whole store, except that a document's length is taken as its cost. If
    there are none yet, or one is longer than `batch_tokens`, all steps of an epoch but the last are assumed to be full.
    The number is 0 if there are fewer documents than a step has micro-batches, which training refuses.
    """
    train = config.train
    if train.max_steps:
        return train.max_steps
    lengths = np.zeros(0, np.int64) if documents is None else documents.lengths
    if not 0 < lengths.max(initial=0) <= train.batch_tokens:
        return train.epochs * math.ceil(tokens / (train.batch_tokens * train.micro_batches_per_step))
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
