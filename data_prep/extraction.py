"""Reads and checks the inputs of mtptrain hidden-states before extraction starts."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from mtptrain.config import Backend, PipelineConfig, StoreDtype
from mtptrain.data.identity import StoreIdentity
from mtptrain.data.prompt_files import Documents, Split
from mtptrain.decoding.prompts import check_document_lengths
from mtptrain.engines.vllm.client import find_python
from mtptrain.heads import HEADS
from mtptrain.heads.files import build_head
from mtptrain.hidden_states.shard_format import check_store_dtype
from mtptrain.hidden_states.stream import shard_windows
from mtptrain.hidden_states.writer import shard_ranges
from mtptrain.init_from.draft_model import check_start
from mtptrain.run import Run
from mtptrain.target.checkpoint_check import check_weights
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import refuse_quantised_parts
from mtptrain.utils.errors import UserError


@dataclass(frozen=True)
class Extraction:
    """The settings and inputs of an extraction."""

    config: PipelineConfig
    target: TargetFiles
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
    def backend(self) -> Backend:
        """The engine that runs the target: vllm or transformers."""
        return Backend(self.identity.backend)

    @property
    def layout(self) -> tuple[int, int, StoreDtype]:
        """Hidden size, number of captured layers and stored dtype."""
        return self.target.config.hidden_size, len(self.capture_layers), self.config.hidden_states.store_dtype

    def select(self, indices: Iterable[int]) -> list[range]:
        """Returns the range of documents in each of the given shards."""
        return [self.shards[index] for index in indices]


def prepare_extraction(run: Run) -> Extraction:
    """Read the prompts and the target's config, and check that they match each other and the settings.

    Raises:
        UserError: stage 1 has not been run, the target does not exist or its weights cannot be used, vLLM or its Python
            is missing, or prompts, target and settings do not fit each other.
    """
    config, settings, documents = run.config, run.config.hidden_states, run.documents(Split.train)
    target_config = run.target.config
    refuse_quantised_parts(run.target.directory)  # training would refuse them only after hours of extraction
    check_weights(run.target.directory)
    head_type = HEADS[config.head.name]
    head_type.check_trainable(config.head, target_config)
    capture_layers = head_type.resolve_capture_layers(config.head, target_config)
    check_store_dtype(settings.store_dtype, capture_layers)
    check_training_prompts(documents, run.stage_dir("prompts") / f"{Split.train}.safetensors", target_config)
    with torch.device("meta"):
        check_document_lengths(int(documents.lengths.max()), build_head(config.head, target_config))
    check_start(config.head, run.target)
    if run.backend is Backend.vllm:
        find_python(config.serving.python)
    identity = run.identity(capture_layers)
    shards = shard_ranges(documents.lengths, settings.shard_tokens)
    own = range(settings.part, len(shards), settings.num_parts)
    windows = shard_windows(len(shards), config.train.stream_shards, config.seed) if config.train.stream else []
    return Extraction(config, run.target, capture_layers, documents, identity, shards, own, windows)


def check_training_prompts(documents: Documents, path: Path, target_config: PreTrainedConfig) -> None:
    """Refuse prompts that the target cannot read."""
    context_tokens, vocab_size = target_config.max_position_embeddings, target_config.vocab_size
    longest, largest_id = int(documents.lengths.max()), int(documents.input_ids.max())
    if longest > context_tokens:
        raise UserError(
            f"{path}: documents must have at most {context_tokens} tokens, the target's "
            f"max_position_embeddings, but the longest has {longest}; set "
            f"prompts.max_document_tokens={context_tokens} or less and run mtptrain prompts again"
        )
    if largest_id >= vocab_size:
        raise UserError(
            f"{path}: token ids must be below {vocab_size}, the target's vocab_size, but the largest is {largest_id}; "
            "the prompts were made with another tokenizer: run mtptrain prompts again with this target"
        )
