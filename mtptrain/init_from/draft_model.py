"""Reads a published language model as a draft model."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mtptrain.engines.exports import refuse_changed_export
from mtptrain.heads.base import Tensors
from mtptrain.heads.draft_model import NO_TARGET, model_config
from mtptrain.heads.files import build_head, checked_weights
from mtptrain.init_from.from_target import refuse_other_sizes
from mtptrain.init_from.published import Published, read_tensors
from mtptrain.settings.heads import DraftModelConfig, HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import check_weights
from mtptrain.target.hub import resolve_target
from mtptrain.target.loading import check_target
from mtptrain.target.model import Target
from mtptrain.utils.errors import UserError

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors with one row for each token of the vocabulary."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_draft_model(path: str, config: DraftModelConfig, target: TargetFiles) -> Published:
    """Returns the language model at `path`, or a draft model of another run, padded to the target's vocabulary."""
    with torch.device("meta"):
        expected = build_head(config, target.config).state_dict()
    if (Path(path) / "head.json").is_file():
        directory = Path(path)
        tensors = read_tensors([checked_weights(directory)])
    else:
        directory = _checked_directory(path, target)
        tensors = _load(directory)
    tensors = {name: tensor for name, tensor in tensors.items() if name in expected}
    tensors |= {name: _padded(tensors[name], len(expected[name])) for name in VOCABULARY if name in tensors}
    return Published(directory, config.name, {}, tensors)


def check_start(config: HeadConfig, target: TargetFiles) -> None:
    """Check before any long work how a draft model starts: its sizes, or a published model's tokenizer and weights."""
    path = config.init_from if isinstance(config, DraftModelConfig) else None
    if isinstance(config, DraftModelConfig) and config.start_from_target:
        refuse_other_sizes(model_config(config, target.config), target.config)
    if path is not None and not (Path(path) / "head.json").is_file():
        _checked_directory(path, target)


def _checked_directory(path: str, target: TargetFiles) -> Path:
    """Returns the directory of a published model, which has the target's tokenizer and all its files of weights."""
    directory = resolve_target(path, setting="head.init_from")
    refuse_changed_export(directory)
    _check_tokenizer(directory, target)
    check_weights(directory)
    return directory


def _load(directory: Path) -> Tensors:
    """Returns a published model's weights, renamed by transformers, which also fuses the experts of some families."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", trust_remote_code=False, output_loading_info=True
    )
    model, loading = loaded
    try:
        check_target(Target(model))
    except UserError as error:
        raise UserError(NO_TARGET.format(directory=directory, error=error)) from error
    missing = loading["missing_keys"]  # which transformers initialises at random
    return {name: tensor for name, tensor in model.state_dict().items() if name not in missing}


def _padded(table: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns a table with a row for each token of the target. Tokens that the model lacks get the mean row.

    The logit of the mean row is the mean of the model's logits, so such a token is never more likely than all others.
    """
    missing = max(0, vocab_size - len(table))
    mean = table.float().mean(0, keepdim=True).to(table.dtype)
    return torch.cat([table, mean.expand(missing, -1)])


def _check_tokenizer(directory: Path, target: TargetFiles) -> None:
    """Check that a language model has the target's tokenizer, and an embedding for each of its tokens.

    If the model or the target has no tokenizer files, it suffices that their vocabularies have the same size.
    """
    model = TargetFiles(directory)
    size, target_size = model.config.vocab_size, target.config.vocab_size
    for each in (directory, target.directory):
        if not any((each / name).is_file() for name in TOKENIZER_FILES):
            if size == target_size:
                return
            raise UserError(
                f"{directory}: a draft model and the target must both have tokenizer files, because their vocab_size "
                f"differs ({size} and {target_size}), but {each} has none; copy them there"
            )
    vocab = model.tokenizer.get_vocab()
    if vocab != target.tokenizer.get_vocab():
        raise UserError(
            f"{directory}: a draft model must have the target's tokenizer, but its vocabulary differs from that of "
            f"{target.directory}; choose a smaller model of the same family"
        )
    if size <= max(vocab.values()):
        raise UserError(
            f"{directory}: a draft model must have an embedding for each token of its tokenizer, ids up to "
            f"{max(vocab.values())}, but has vocab_size {size}; choose another model"
        )
