"""Choose the draft vocabulary of a head with `head.draft_vocab_size`: the tokens that its drafts predict most often.

Reads `run_dir/prompts/`; writes `run_dir/draft_vocab/` (see mtptrain/data/draft_vocab.py). Needed between `data_prep.prompts` and
`mtptrain.train`, by heads with a vocabulary smaller than the target's.

    python -m data_prep.draft_vocab recipe=quickstart_eagle3
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedConfig

from mtptrain.command_line import program
from mtptrain.config import PipelineConfig, load_config
from mtptrain.data.draft_vocab import MANIFEST, DraftVocabManifest, offsets, write_draft_vocab, write_manifest
from mtptrain.data.prompt_files import Documents, Split
from mtptrain.heads import HEADS
from mtptrain.heads.config import HeadConfig
from mtptrain.hidden_states.store import expected_identity
from mtptrain.run_dir import require, write_provenance
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import load_tokenizer, resolve_target


@program
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    manifest = prepare_draft_vocab(config)
    print_summary(manifest)
    print(f"written to {config.stage_dir('draft_vocab')}")


def prepare_draft_vocab(config: PipelineConfig) -> DraftVocabManifest:
    """Run the stage.

    Raises:
        FileNotFoundError: the target does not exist, or stage 1 has not been run.
        ValueError: the head needs no draft vocabulary of the run, its size is out of range, or the prompts are another tokenizer's.
    """
    target_dir = resolve_target(config.target.path, config.target.revision)
    target_config = read_target_config(target_dir)
    size, vocab_size = draft_vocab_size(config.head, target_config.vocab_size), target_config.vocab_size
    prompts_dir = require(config.stage_dir("prompts") / "manifest.json", "data_prep.prompts").parent
    paths = {split: require(prompts_dir / f"{split}.safetensors", "data_prep.prompts") for split in Split}
    capture_layers = HEADS[config.head.name].layers_to_capture(config.head, target_config)
    identity = expected_identity(config, target_dir, capture_layers, paths[Split.train])

    counts = {split: count_drafted(Documents.load(path), vocab_size) for split, path in paths.items()}
    token_ids = choose_tokens(counts[Split.train], size, special_token_ids(target_dir, target_config))

    stage_dir = config.stage_dir("draft_vocab")
    write_provenance(stage_dir, config)
    (stage_dir / MANIFEST).unlink(missing_ok=True)  # the mark of a finished stage, before its file changes
    manifest = DraftVocabManifest(
        draft_vocab_size=size,
        vocab_size=vocab_size,
        prompts_sha256=identity.prompts_sha256,
        draft_vocab_sha256=write_draft_vocab(stage_dir, offsets(torch.from_numpy(token_ids)), vocab_size),
        distinct_tokens=int(np.count_nonzero(counts[Split.train])),
        filled_up_tokens=int(np.count_nonzero(counts[Split.train][token_ids] == 0)),
        coverage={split.value: coverage(counts[split], token_ids) for split in Split},
    )
    write_manifest(stage_dir, manifest)
    return manifest


def draft_vocab_size(head: HeadConfig, vocab_size: int) -> int:
    """How many tokens to choose.

    Raises:
        ValueError: none, as the head drafts the target's whole vocabulary or brings its own, or more than there are.
    """
    size = getattr(head, "draft_vocab_size", None)
    if size is None or size == vocab_size:
        raise ValueError(
            f"head.draft_vocab_size: must be set, below the target's {vocab_size} tokens, where a draft vocabulary is to be chosen, but "
            f"is {size}: head {head.name} drafts the target's whole vocabulary and needs none; go on without this program"
        )
    if not 1 <= size < vocab_size:
        raise ValueError(
            f"head.draft_vocab_size: must be within 1..{vocab_size}, the tokens of the target, but is {size}; correct it in the "
            "recipe or on the command line"
        )
    if head.init_from is not None:
        raise ValueError(
            f"head.init_from: must be unset where a draft vocabulary is to be chosen, but is {head.init_from}, whose lm_head keeps the "
            "vocabulary that it came with; go on without this program"
        )
    return int(size)


def special_token_ids(target_dir: Path, target_config: PreTrainedConfig) -> set[int]:
    """Tokens that end or shape a text, which a draft vocabulary holds however rare: the tokenizer's and all that stop the target."""
    sources = [target_config.eos_token_id]
    if (target_dir / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(target_dir).eos_token_id)
    stops = {token for ids in sources if ids is not None for token in (ids if isinstance(ids, list) else [ids])}
    found = stops | set(load_tokenizer(target_dir).all_special_ids)
    return {token for token in found if token < target_config.vocab_size}


def count_drafted(documents: Documents, vocab_size: int) -> NDArray[np.int64]:
    """How often drafts predict each token i64[V]."""
    return np.bincount(documents.input_ids[is_drafted(documents)], minlength=vocab_size)


def is_drafted(documents: Documents) -> NDArray[np.bool_]:
    """Tokens that the first draft of a round can predict bool[N]; later drafts predict some of these.

    As in `make_batch`: it and the token before it are generated, and a row of the target lies before both.
    """
    generated = documents.loss_mask.astype(bool)
    drafted = generated & np.roll(generated, 1)
    for place in (0, 1):  # of a document: no draft predicts its first two tokens
        drafted[documents.document_offsets[:-1][documents.lengths > place] + place] = False
    return drafted


def choose_tokens(counts: NDArray[np.int64], size: int, always: set[int]) -> NDArray[np.int64]:
    """The `always` kept and the most frequent tokens, ties and tokens that do not occur by id; ids rising i64[size].

    Raises:
        ValueError: there are more tokens to keep than `size`.
    """
    if len(always) > size:
        raise ValueError(
            f"head.draft_vocab_size: must hold the {len(always)} special tokens of the target, but is {size}; set it higher"
        )
    ranked = counts.copy()
    ranked[sorted(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size])


def coverage(counts: NDArray[np.int64], token_ids: NDArray[np.int64]) -> float:
    """Share of the counted tokens that are among `token_ids`."""
    return float(counts[token_ids].sum() / max(counts.sum(), 1))


def print_summary(manifest: DraftVocabManifest) -> None:
    table = Table(title="data_prep.draft_vocab", show_header=False)
    table.add_row("draft vocabulary", f"{manifest.draft_vocab_size:,} of {manifest.vocab_size:,} tokens")
    table.add_row("different tokens drafted", f"{manifest.distinct_tokens:,}")
    for split, share in manifest.coverage.items():
        table.add_row(f"drafted tokens covered, {split}", f"{share:.2%}")
    Console().print(table)
    if manifest.filled_up_tokens:
        print(
            f"{manifest.filled_up_tokens:,} of its tokens are never drafted in the training split: special ones, and the lowest ids"
        )


if __name__ == "__main__":
    main()
