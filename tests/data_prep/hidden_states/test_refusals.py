"""Tests which settings, prompts and stores are refused before anything is computed."""

from pathlib import Path

import pytest

from data_prep import hidden_states
from data_prep.hidden_states import extract_hidden_states
from mtptrain.data.prompt_files import Documents
from mtptrain.heads import HEADS
from mtptrain.run import Run
from mtptrain.target.hub import load_tokenizer
from tests.conftest import GENERATION_TEMPLATE, make_target
from tests.data_prep.hidden_states.stage import (
    LENGTHS,
    ONE_RANK,
    ConfigFor,
    interrupt,
    make_documents,
    read_store,
    write_prompts,
)


def test_eight_bits_for_captured_layers_alone_need_captured_layers(prepared: ConfigFor) -> None:
    config = prepared("hidden_states.store_dtype=fp8_aux")
    with pytest.raises(
        ValueError, match="store_dtype: must be bfloat16 or fp8 for a head that captures no layers, but is fp8_aux"
    ):
        extract_hidden_states(Run(config), ONE_RANK)


def test_states_of_another_target_other_prompts_layers_or_dtype_are_refused_and_kept(
    prepared: ConfigFor, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prepared()
    extract_hidden_states(Run(config), ONE_RANK)
    before = read_store(config.stage_dir("hidden_states"))
    with pytest.raises(
        ValueError, match=r"the hash of the target's weights must be .*, but is .*delete .*hidden_states"
    ):
        extract_hidden_states(Run(prepared(f"target.path={make_target(tmp_path / 'tuned', seed=1)}")), ONE_RANK)
    with pytest.raises(ValueError, match=r"the compute dtype \(hidden_states.dtype\) must be float32, but is bfloat16"):
        extract_hidden_states(Run(prepared("hidden_states.dtype=float32")), ONE_RANK)
    for shard_tokens in (61, 20):  # as many shards, and more
        with pytest.raises(ValueError, match=rf"hidden_states.shard_tokens must be {shard_tokens}, but is 60"):
            extract_hidden_states(Run(prepared(f"hidden_states.shard_tokens={shard_tokens}")), ONE_RANK)
    with monkeypatch.context() as patch:
        patch.setattr(HEADS["mtp"], "resolve_capture_layers", lambda *_: (1,))
        with pytest.raises(ValueError, match=r"the list of captured layers must be \(1,\), but is \(\)"):
            extract_hidden_states(Run(config), ONE_RANK)
    write_prompts(Path(config.run_dir), tiny_target, make_documents(LENGTHS, seed=1))
    with pytest.raises(ValueError, match=r"the hash of the prompts \(train.safetensors\) must be"):
        extract_hidden_states(Run(config), ONE_RANK)
    assert read_store(config.stage_dir("hidden_states")) == before


@pytest.mark.parametrize(
    ("name", "chat_template"), [("chat_template_sha256", "{{ messages }}"), ("tokenizer_sha256", GENERATION_TEMPLATE)]
)
def test_prompts_of_another_tokenizer_or_template_are_refused(
    prepared: ConfigFor, tmp_path: Path, name: str, chat_template: str
) -> None:
    config = prepared()
    other = make_target(tmp_path / "other", chat_template=chat_template)
    if name == "tokenizer_sha256":
        tokenizer = load_tokenizer(other)
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(other)
    config.target.path = str(other)
    with pytest.raises(
        ValueError,
        match=rf"prompts/manifest.json: {name} must be \w+, but is \w+; run mtptrain prompts again with target {other}",
    ):
        extract_hidden_states(Run(config), ONE_RANK)


def test_documents_beyond_the_context_of_the_target_are_refused(prepared: ConfigFor) -> None:
    message = r"at most 512 tokens, .* but the longest has 513; set prompts.max_document_tokens=512 or less"
    with pytest.raises(ValueError, match=message):
        extract_hidden_states(Run(prepared(lengths=[5, 513])), ONE_RANK)


def test_tokens_outside_the_vocabulary_are_refused(prepared: ConfigFor, tiny_target: Path) -> None:
    config = prepared()
    write_prompts(Path(config.run_dir), tiny_target, Documents.from_list([(0, [1, 260], [1, 1])]))
    with pytest.raises(
        ValueError, match=r"token ids must be below 260, the target's vocab_size, but the largest is 260; .*mtptrain"
    ):
        extract_hidden_states(Run(config), ONE_RANK)


def test_a_head_that_could_not_be_exported_is_warned_of_before_extraction(
    prepared: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "announce", interrupt)  # comes before anything is computed
    with (
        pytest.warns(UserWarning, match=r"not exported: head\.zero_first_embedding: must be true for a mimo target"),
        pytest.raises(KeyboardInterrupt),
    ):
        extract_hidden_states(Run(prepared("head.zero_first_embedding=true")), ONE_RANK)
