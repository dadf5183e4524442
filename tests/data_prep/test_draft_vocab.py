"""Tests how a draft vocabulary is chosen: which tokens are counted and kept, and what is refused."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.draft_vocab import choose_tokens, prepare_draft_vocab, special_token_ids
from data_prep.prompts import prepare_prompts
from mtptrain.data.draft_vocab import read_draft_vocab
from mtptrain.data.prompt_files import Documents, Split
from mtptrain.hidden_states.store import StoredDocument
from mtptrain.run_dir import Run
from mtptrain.target.files import TargetFiles
from mtptrain.training.batches import draft_spans, make_batch
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256
from tests.conftest import make_target, write_text_files
from tests.data_prep.prompts.documents import ConfigFor

EAGLE3 = ("head=eagle3", "head.capture_layers=[1,2]")
SETTINGS = (*EAGLE3, "prompts.max_document_tokens=128", "prompts.validation_fraction=0.2", "head.draft_vocab_size=40")


def drafts_of_training(documents: Documents) -> Counter[int]:
    """Counts the tokens that depth 0 drafts in the batches that training makes."""
    counts: Counter[int] = Counter()
    for index in range(len(documents)):
        ids = torch.from_numpy(documents.token_ids(index).copy())
        mask = torch.from_numpy(documents.mask(index).copy())
        if len(draft_spans(mask.numpy())[1]):
            batch = make_batch([StoredDocument(index, ids, mask, torch.zeros(len(ids), 4), None)], ttt_steps=1)
            counts.update(ids[batch.packing.draft_positions[batch.is_draft[0]] + 2].tolist())
    return counts


def test_the_most_frequent_tokens_are_chosen_with_ties_by_id_and_special_ones_always() -> None:
    counts = np.array([0, 5, 3, 3, 9, 0, 1, 3])
    assert choose_tokens(counts, 4, set()).tolist() == [1, 2, 3, 4]
    assert choose_tokens(counts, 4, {5}).tolist() == [1, 2, 4, 5]
    assert counts.tolist() == [0, 5, 3, 3, 9, 0, 1, 3]
    # Too few different tokens are filled up with the lowest ids.
    assert choose_tokens(np.array([0, 0, 0, 7, 0, 2]), 4, {4}).tolist() == [0, 3, 4, 5]
    with pytest.raises(ValueError, match=r"head\.draft_vocab_size: must hold the 3 special tokens .*, but is 2"):
        choose_tokens(np.ones(9, np.int64), 2, {1, 2, 3})


def test_special_tokens_are_the_tokenizers_and_those_that_stop_the_target(tmp_path: Path) -> None:
    make_target(tmp_path, eos_token_id=[256, 257])
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [256, 258]}))
    assert special_token_ids(TargetFiles(tmp_path)) == {256, 257, 258}


def test_the_stage_writes_what_training_reads_and_its_coverage_follows_from_a_plain_count(
    tmp_path: Path, config_for: ConfigFor
) -> None:
    """The head drafts 40 of the target's 260 tokens."""
    config = config_for(f"prompts.paths=[{write_text_files(tmp_path / 'files')}]", *SETTINGS)
    prepare_prompts(Run(config))
    manifest = prepare_draft_vocab(Run(config))
    prompts_dir = config.stage_dir("prompts")
    d2t = read_draft_vocab(config.stage_dir("draft_vocab"), 40, 260, file_sha256(prompts_dir / "train.safetensors"))
    chosen = set((d2t + torch.arange(40)).tolist())
    counts = {split: drafts_of_training(Documents.load(prompts_dir / split.filename)) for split in Split}
    frequent = sorted(counts[Split.train], key=lambda token: (-counts[Split.train][token], token))
    assert chosen >= set(frequent[:39]) and 256 in chosen, "special token 256 may replace the 40th most frequent token"
    for split, found in counts.items():
        share = sum(count for token, count in found.items() if token in chosen) / found.total()
        assert manifest.coverage[split] == pytest.approx(share)
    assert manifest.distinct_tokens == len(counts[Split.train])
    assert manifest.filled_up_tokens == sum(token not in counts[Split.train] for token in chosen)


def test_a_head_without_a_draft_vocabulary_to_choose_or_without_prompts_is_refused(config_for: ConfigFor) -> None:
    for overrides, message in (
        (("head=mtp",), r"must be below the target's 260 tokens .* but is None; .* or skip .* if head mtp drafts"),
        ((*EAGLE3, "head.draft_vocab_size=260"), r"head\.draft_vocab_size: must be below .* but is 260; correct it"),
        ((*SETTINGS, "head.init_from=/some/head"), r"head\.init_from: must be unset to choose .*, but is /some/head"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_draft_vocab(Run(config_for(*overrides)))
    with pytest.raises(UserError, match=r"prompts/manifest\.json: must exist, but does not; run mtptrain prompts"):
        prepare_draft_vocab(Run(config_for(*SETTINGS)))
