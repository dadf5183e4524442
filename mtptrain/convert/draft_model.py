"""Loads the weights of draft models, from a published language model, another run or the target's first layers."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mtptrain.convert.base import Tensors
from mtptrain.heads.draft_model import SIZES, DraftModelHead, published_config
from mtptrain.heads.files import build_head, check_values, checked_weights, fill_head, first_misfit
from mtptrain.serving.exports import refuse_changed_export
from mtptrain.settings.heads import DraftModelConfig, HeadConfig
from mtptrain.target.checkpoint_check import check_weights, stored_tensors
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts, refuse_missing, refuse_quantised
from mtptrain.target.hub import resolve_target
from mtptrain.target.model import Target
from mtptrain.target.self_check import check_target
from mtptrain.utils.errors import UserError

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors with one row for each token of the vocabulary."""
EQUAL_SETTINGS = (
    "model_type",
    *(size for size in SIZES if size != "num_hidden_layers"),
    "head_dim",
    "tie_word_embeddings",
)
"""Settings of a draft model that must equal the target's if layers of the target are copied into it."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_draft_model(
    path: str, target: TargetFiles, dtype: torch.dtype, device: torch.device, setting: str
) -> DraftModelHead:
    """Returns a published language model that drafts for the target, ready for inference.

    Args:
        path: a directory or a hub name.
        target: the target that the model drafts for.
        dtype: dtype of the model's weights.
        device: device of the model's weights.
        setting: name of the setting, for error messages.

    Raises:
        UserError: `path` is neither a model directory nor a hub name, or the model has no weights, or `path` does not
            hold a language model with the target's tokenizer, or its weights do not match its config.
    """
    published_config(path, target.config, setting)  # called for its errors, which name `setting`
    config = DraftModelConfig(init_from=path)
    head = build_head(config, target.config)
    filled = fill_head(head, initial_weights(config, target, setting)[1], dtype, device)
    assert isinstance(filled, DraftModelHead)
    return filled


def initial_weights(
    config: DraftModelConfig, target: TargetFiles, setting: str = "head.init_from"
) -> tuple[Path, Tensors]:
    """Returns the directory of `init_from` and its weights, padded to the target's vocabulary.

    Raises:
        UserError: `init_from` is neither a model directory nor a hub name, or the model has no weights, or the
            tokenizer is not the target's, or the tensors are not those that the model's config describes.
    """
    assert config.init_from is not None
    with torch.device("meta"):
        state = build_head(config, target.config).state_dict()
    if (own := Path(config.init_from) / "head.json").is_file():
        directory = own.parent
        tensors = {name: x for name, x in load_file(checked_weights(directory)).items() if name in state}
    else:
        directory = _checked_directory(config.init_from, target, setting)
        tensors = _load(directory, state, setting)
    tensors = {name: _padded(x, len(state[name])) if name in VOCABULARY else x for name, x in tensors.items()}
    if misfit := first_misfit(state, tensors):
        name, wanted, found = misfit
        raise UserError(
            f"{setting}: {name} of {directory} must be {wanted}, as its config describes, but is {found}; choose "
            "another language model, or copy or download it again"
        )
    check_values(directory, state, tensors, "copy or download it again")
    return directory, tensors


def check_start(config: HeadConfig, target: TargetFiles) -> None:
    """Check the tokenizer and weights of the language model in `head.init_from` before any long work.

    Other heads, and draft models of other runs, are not checked here.

    Raises:
        UserError: the model does not exist, or has no weights, or its tokenizer is not the target's, or its weights do
            not match its config.
    """
    if not isinstance(config, DraftModelConfig) or config.init_from is None:
        return
    if not (Path(config.init_from) / "head.json").is_file():
        _checked_directory(config.init_from, target, "head.init_from")


def _checked_directory(path: str, target: TargetFiles, setting: str) -> Path:
    """Returns the directory of a published model, which has the target's tokenizer and all its files of weights."""
    directory = resolve_target(path, setting=setting)
    refuse_changed_export(directory)
    check_tokenizer(directory, target, setting)
    check_weights(directory)
    return directory


def _load(directory: Path, names: Collection[str], setting: str) -> Tensors:
    """Returns a published model's weights, renamed by transformers, which also fuses the experts of some families.

    Raises:
        UserError: mtptrain does not compute what the model's own forward does.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", trust_remote_code=False, output_loading_info=True
    )
    model, loading = loaded
    there = set(names) - set(loading["missing_keys"])  # transformers initialises missing tensors at random
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name in there}
    try:
        check_target(Target(model))
    except UserError as error:
        reason = str(error).removeprefix("target.path: ").removesuffix("; choose another target")
        raise UserError(
            f"{setting}: must be a language model that mtptrain can run, but {directory} is not: {reason}; choose "
            "another draft model"
        ) from error
    return tensors


def _padded(table: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns a table with a row for each token of the target. Tokens that the model lacks get the mean row.

    The logit of the mean row is the mean of the model's logits, so such a token is never more likely than all others.
    """
    missing = vocab_size - len(table)
    if missing <= 0:
        return table
    mean = table.float().mean(0, keepdim=True).to(table.dtype)
    return torch.cat([table, mean.expand(missing, -1)])


def check_tokenizer(directory: Path, target: TargetFiles, setting: str) -> None:
    """Check that a language model has the target's tokenizer, and an embedding for each of its tokens.

    If the model or the target has no tokenizer files, it suffices that their vocabularies have the same size.

    Raises:
        UserError: the tokenizers differ or cannot be compared, or tokens have no embedding.
    """
    model = TargetFiles(directory)
    vocab_size, target_size = model.config.vocab_size, target.config.vocab_size
    directories = (directory, target.directory)
    without = [each for each in directories if not any((each / name).is_file() for name in TOKENIZER_FILES)]
    if without:
        if vocab_size == target_size:
            return
        raise UserError(
            f"{setting}: the model and the target must both have tokenizer files, because their vocab_size differs "
            f"({vocab_size} and {target_size}), but {without[0]} has none; copy them there"
        )
    vocab = model.tokenizer.get_vocab()
    if vocab != target.tokenizer.get_vocab():
        raise UserError(
            f"{setting}: must have the target's tokenizer, but the vocabulary of {directory} differs from that of "
            f"{target.directory}; choose a smaller model of the same family"
        )
    if vocab_size <= max(vocab.values()):
        raise UserError(
            f"{setting}: must have an embedding for each token of its tokenizer, ids up to {max(vocab.values())}, but "
            f"{directory} has vocab_size {vocab_size}; choose another model"
        )


def start_from_target_model(head: DraftModelHead, target: TargetFiles) -> None:
    """Copy the target's first layers into a draft model, or projections of its embeddings if the model is narrower."""
    if head.config.hidden_size < target.config.hidden_size:
        project_embeddings(head, target.directory)
    else:
        copy_first_layers(head, target)


@torch.no_grad()
def project_embeddings(head: DraftModelHead, target_dir: Path) -> None:
    """Set the embeddings and the output layer of a narrower draft model to projections of the target's.

    Each table is projected onto its first principal components, as many as the model's hidden size, and scaled to the
    standard deviation of random weights. If the two are tied, the output layer's projection is used. The decoder layers
    stay random.
    """
    parts, size = load_frozen_parts(target_dir), head.config.hidden_size
    # The target multiplies its states by the weight of its final norm before lm_head. The draft model's own norm starts
    # at 1, so that weight goes into the columns of the output table.
    output = parts.lm_head.float() * (parts.norm_weight.float() + parts.form.norm_offset)
    scale = head.config.initializer_range
    if head.lm_head is not None:
        head.lm_head.weight.copy_(principal_components(output, size, scale))
    table = output if head.lm_head is None else parts.embed_tokens.float()
    head.model.embed_tokens.weight.copy_(principal_components(table, size, scale))


def principal_components(table: torch.Tensor, size: int, scale: float) -> torch.Tensor:
    """Returns the rows of a table [V, H], minus their mean, in the basis of its first principal components [V, size].

    The standard deviation of all returned entries is `scale`. Without its mean row, an output layer gives the same
    softmax.
    """
    centred = table - table.mean(0)
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -size:]  # ascending eigenvalues
    components = centred @ directions
    return components * (scale / components.std())


@torch.no_grad()
def copy_first_layers(head: DraftModelHead, target: TargetFiles) -> None:
    """Copy the target's embeddings, first decoder layers, final norm and lm_head into a draft model.

    Raises:
        UserError: the draft model differs from the target in family or sizes, or has more layers, or a tensor of the
            target is missing or quantised.
    """
    configs = (head.config, target.config)
    ours, theirs = ({name: getattr(each, name, None) for name in EQUAL_SETTINGS} for each in configs)
    wrong = [(name, str(theirs[name]), ours[name]) for name in ours if ours[name] != theirs[name]]
    if head.config.num_hidden_layers > target.config.num_hidden_layers:
        wrong.append(("num_hidden_layers", f"at most {target.config.num_hidden_layers}", head.config.num_hidden_layers))
    if wrong:
        name, wanted, found = wrong[0]
        if name not in DraftModelConfig.__dataclass_fields__:
            raise UserError(
                f"head.start_from_target: the draft model's {name} must be {wanted}, as in the target, but is {found}; "
                "set head.start_from_target=false"
            )
        raise UserError(
            f"head.{name}: must be {wanted}, as in the target, with head.start_from_target=true, but is {found}; leave "
            "it out, or set head.start_from_target=false"
        )
    state, stored = head.state_dict(), stored_tensors(target.directory)
    refuse_quantised(stored, tuple(name.removesuffix("weight") for name in state))
    refuse_missing(target.directory, state.keys() - stored.keys())
    head.load_state_dict({name: stored[name].read() for name in state})
