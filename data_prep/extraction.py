"""Reads and checks the inputs of mtptrain hidden-states before extraction starts."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from mtptrain.config import Backend, PipelineConfig, StoreDtype
from mtptrain.convert.draft_model import check_start
from mtptrain.data.identity import StoreIdentity
from mtptrain.data.prompt_files import Documents, Split, require_prompts
from mtptrain.decoding.prompts import check_document_lengths
from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.hidden_states.extraction.vllm_streams import check_vllm_can_extract
from mtptrain.hidden_states.shard_format import check_store_dtype
from mtptrain.hidden_states.store import expected_identity
from mtptrain.hidden_states.stream import shard_windows
from mtptrain.hidden_states.writer import shard_ranges
from mtptrain.serving.vllm_client import find_python
from mtptrain.target.checkpoint_check import check_weights
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import refuse_quantised_parts
from mtptrain.target.hub import resolve_target
from mtptrain.utils.errors import UserError


@dataclass(frozen=True)
class Extraction:
    """The settings and inputs of an extraction."""

    config: PipelineConfig
    target_dir: Path
    target_config: PreTrainedConfig
    capture_layers: tuple[int, ...]
    documents: Documents
    identity: StoreIdentity
    shards: list[range]
    """The range of documents in each shard of the store."""
    own: range
    """Indices of the shards that this part of the extraction writes (`hidden_states.part`)."""
    windows: list[list[int]]
    """Shards of each window, in the order in which training reads them; empty without `train.stream`."""

    @property
    def store_dir(self) -> Path:
        return self.config.stage_dir("hidden_states")

    @property
    def layout(self) -> tuple[int, int, StoreDtype]:
        """Hidden size, number of captured layers and stored dtype."""
        return self.target_config.hidden_size, len(self.capture_layers), self.config.hidden_states.store_dtype

    def select(self, indices: Iterable[int]) -> list[range]:
        """Returns the range of documents in each of the given shards."""
        return [self.shards[index] for index in indices]


def prepare_extraction(config: PipelineConfig) -> Extraction:
    """Read the prompts and the target's config, and check that they match each other and the settings.

    Raises:
        UserError: stage 1 has not been run, the target does not exist, or vLLM's Python interpreter is missing, or
            prompts, target and settings do not fit each other.
    """
    settings = config.hidden_states
    prompts_file = require_prompts(config.stage_dir("prompts"), f"{Split.train}.safetensors")
    documents = Documents.load(prompts_file)
    target_dir = resolve_target(config.target.path, config.target.revision)
    target_config = read_target_config(target_dir)
    refuse_quantised_parts(target_dir)  # training would refuse them only after hours of extraction
    check_weights(target_dir)
    head_type = HEADS[config.head.name]
    head_type.check_trainable(config.head, target_config)
    capture_layers = head_type.resolve_capture_layers(config.head, target_config)
    check_store_dtype(settings.store_dtype, capture_layers)
    check_prompts(documents, prompts_file, target_config.vocab_size, target_config.max_position_embeddings)
    with torch.device("meta"):
        check_document_lengths(int(documents.lengths.max()), build_head(config.head, target_config))
    check_start(config.head, target_dir)
    if settings.backend is Backend.vllm:
        check_vllm_can_extract(target_config)
        find_python(config.serving.python)
    identity = expected_identity(config, target_dir, capture_layers, prompts_file)
    shards = shard_ranges(documents.lengths, settings.shard_tokens)
    own = range(settings.part, len(shards), settings.num_parts)
    windows = shard_windows(len(shards), config.train.stream_shards, config.seed) if config.train.stream else []
    return Extraction(config, target_dir, target_config, capture_layers, documents, identity, shards, own, windows)


def check_prompts(documents: Documents, path: Path, vocab_size: int, max_position_embeddings: int) -> None:
    """Refuse prompts that the target cannot read.

    Raises:
        UserError: there are no documents, a document is too long, or a token is outside the vocabulary.
    """
    if len(documents) == 0:
        raise UserError(
            f"{path}: must hold at least one document, but holds none; correct prompts.paths and run mtptrain prompts"
        )
    longest, largest_id = int(documents.lengths.max()), int(documents.input_ids.max())
    if longest > max_position_embeddings:
        raise UserError(
            f"{path}: documents must have at most {max_position_embeddings} tokens, the target's "
            f"max_position_embeddings, but the longest has {longest}; set "
            f"prompts.max_document_tokens={max_position_embeddings} or less and run mtptrain prompts again"
        )
    if largest_id >= vocab_size:
        raise UserError(
            f"{path}: token ids must be below {vocab_size}, the target's vocab_size, but the largest is {largest_id}; "
            "the prompts were made with another tokenizer: run mtptrain prompts again with this target"
        )
