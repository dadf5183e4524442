"""Tests that text files become complete, distinct and ordered documents within the configured limits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.prompts import main, prepare_prompts
from mtptrain.data.identity import TokenizerIdentity
from mtptrain.data.prompt_files import DocumentEntry, Documents, PromptsManifest, Split, is_held_out, name_hash
from mtptrain.run_dir import Run
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.files import write_json
from tests.conftest import make_target, make_tokenizer
from tests.data_prep.prompts.documents import FILES, ConfigFor, read_output, read_texts

DATA_FILES = ("documents.jsonl", "manifest.json", "report.json", "train.safetensors", "validation.safetensors")


def test_every_token_of_every_file_is_written_in_windows_on_the_side_of_its_name(
    text_config: ConfigFor, tiny_target: Path
) -> None:
    config = text_config()
    report = prepare_prompts(Run(config))
    texts, windows = read_texts(config), read_output(config)
    assert texts.keys() == FILES.keys() - {"empty.py"}
    for name, parts in texts.items():
        assert "".join(text for text, _ in parts) == "".join(text for _, text in parts) == FILES[name]
        side = Split.validation if is_held_out(name, 0.2) else Split.train
        assert {entry.split for entry, _, _ in windows[name]} == {side}
    assert report.counts["items_cut"] == sum(len(text) > 128 for text in FILES.values())
    entries = [(entry.window, entry.tokens) for entry, _, _ in windows["sub/long.py"]]
    assert entries == [*((i, 128) for i in range(4)), (4, 28)]
    refused = {(group.reason, group.count, *group.first) for group in report.refused}
    assert refused == {("not UTF-8", 1, "latin.py"), ("empty", 1, "empty.py")}

    manifest = PromptsManifest.read(config.stage_dir("prompts"))
    all_entries = DocumentEntry.read_all(config.stage_dir("prompts"))
    assert [entry.id for entry in all_entries] == list(range(len(all_entries)))
    for split in Split:
        written = Documents.load(config.stage_dir("prompts") / split.filename)
        sizes = (len(written), len(written.input_ids))
        assert np.all(np.diff(written.document_ids) > 0)
        assert (getattr(manifest, f"{split}_documents"), getattr(manifest, f"{split}_tokens")) == sizes
        names = ("documents", "tokens", "supervised_tokens", "longest")
        assert [report.counts[f"{split}_{name}"] for name in names] == [*sizes, sizes[1], max(written.lengths)]
        assert sizes[1] == sum(entry.tokens for entry in all_entries if entry.split is split)
    assert manifest.tokenizer == TokenizerIdentity.of(load_tokenizer(tiny_target))
    assert (manifest.vocab_size, manifest.max_document_tokens) == (260, 128)


def test_the_beginning_of_text_token_stands_before_a_file_once(tmp_path: Path, text_config: ConfigFor) -> None:
    target_dir, tokenizer = make_target(tmp_path / "target", bos_token_id=256), make_tokenizer()
    tokenizer.bos_token = "<|end|>"
    tokenizer.save_pretrained(target_dir)
    config = text_config(f"target.path={target_dir}")
    with pytest.warns(UserWarning, match=r"begin with 0 <\|end\|>, as the tokenizer .*, but 41 of 41 begin with 1; "):
        prepare_prompts(Run(config))
    for name, windows in read_output(config).items():
        ids = [token_id for _, token_ids, _ in windows for token_id in token_ids]
        assert ids == [256, *tokenizer(FILES[name], add_special_tokens=False)["input_ids"]]
        assert all(all(mask) for _, _, mask in windows)


def test_a_second_run_replaces_the_first_with_the_same_bytes_and_one_killed_meanwhile_leaves_no_manifest(
    text_config: ConfigFor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = text_config()
    stage_dir = config.stage_dir("prompts")
    prepare_prompts(Run(text_config("prompts.pattern=file_*.py")))
    main(config)
    printed = capsys.readouterr().out
    assert "supervised tokens" in printed and f"written to {stage_dir}" in printed
    first = {name: (stage_dir / name).read_bytes() for name in DATA_FILES}
    prepare_prompts(Run(config))
    assert {name: (stage_dir / name).read_bytes() for name in DATA_FILES} == first

    def interrupted(*arguments: Any) -> None:
        write_json(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr("mtptrain.stage_dir.write_json", interrupted)  # right after it has written `stage.json`
    with pytest.raises(KeyboardInterrupt):
        prepare_prompts(Run(text_config("seed=5")))
    assert '"seed": 5' in (stage_dir / "stage.json").read_text()
    assert not (stage_dir / "manifest.json").exists(), "it is of the old settings"


def test_the_training_limit_keeps_the_first_documents_by_hash_and_the_whole_validation_split(
    text_config: ConfigFor,
) -> None:
    whole, config = text_config(), text_config("prompts.max_train_tokens=700")
    prepare_prompts(Run(whole))
    all_documents, everything = read_output(whole), DocumentEntry.read_all(whole.stage_dir("prompts"))
    report = prepare_prompts(Run(config))
    kept = DocumentEntry.read_all(config.stage_dir("prompts"))
    assert kept == everything[: len(kept)]
    train = [entry for entry in kept if entry.split is Split.train]
    assert 700 - everything[len(kept)].tokens < sum(entry.tokens for entry in train) <= 700
    assert [name_hash(entry.name) for entry in train] == sorted(name_hash(entry.name) for entry in train)
    assert report.counts["validation_documents"] == sum(entry.split is Split.validation for entry in everything)
    output = read_output(config)
    complete = [name for name, windows in all_documents.items() if output.get(name) == windows]
    assert report.counts["beyond_max_train_tokens"] == len(all_documents) - len(complete) > 0
