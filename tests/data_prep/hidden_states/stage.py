"""Writes the prompts that the hidden-states stage reads, and reads the store that it writes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mtptrain.config import PipelineConfig
from mtptrain.data.identity import TokenizerIdentity
from mtptrain.data.prompt_files import SCHEMA_VERSION, Documents, PromptsManifest
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.distributed import Ranks
from tests.sealed import seal_prompts

ONE_RANK = Ranks(rank=0, world_size=1, local_rank=0)
CPU = torch.device("cpu")
LENGTHS = [5, 40, 17, 40, 1, 40, 17, 64, 3, 40]

ConfigFor = Callable[..., PipelineConfig]


def make_documents(lengths: list[int], seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    return Documents.from_list(
        [(100 + i, rng.integers(0, 256, n).tolist(), rng.integers(0, 2, n).tolist()) for i, n in enumerate(lengths)]
    )


def write_prompts(run_dir: Path, target_dir: Path, documents: Documents) -> None:
    """Writes prompts as mtptrain prompts does."""
    directory = run_dir / "prompts"
    directory.mkdir(parents=True, exist_ok=True)
    documents.save(directory / "train.safetensors")
    tokenizer, sizes = TokenizerIdentity.of(load_tokenizer(target_dir)), (len(documents), len(documents.input_ids))
    seal_prompts(directory, PromptsManifest(SCHEMA_VERSION, tokenizer, 260, 512, *sizes, 0, 0))


def read_store(directory: Path) -> dict[str, bytes]:
    """Returns the content of each file by name, except for the two files that record how the program was called."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != "stage.json"}


def overrides_of(config: PipelineConfig) -> list[str]:
    settings = config.hidden_states
    return [
        f"run_dir={config.run_dir}",
        f"target.path={config.target.path}",
        *(f"hidden_states.{name}={getattr(settings, name)}" for name in ("shard_tokens", "store_dtype")),
    ]
