import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.prompts import prepare_prompts
from data_prep.prompts_report import DuplicatesReport, RewrittenReport
from mtptrain.config import PipelineConfig
from mtptrain.data import chat_template
from mtptrain.data.identity import TokenizerIdentity
from mtptrain.data.prompt_files import DocumentEntry, Documents, PromptsManifest, Split, is_held_out, name_hash
from mtptrain.data.questions import question_group
from mtptrain.target.hub import load_tokenizer
from tests.conftest import GENERATION_TEMPLATE, make_target, make_tokenizer, run_program

ConfigFor = Callable[..., PipelineConfig]
FILES = {f"file_{i:02}.py": f"value_{i} = {i}\n" * (i + 1) for i in range(40)} | {
    "sub/long.py": "x = 1\n" * 90,
    "empty.py": "",
}
DATA_FILES = [
    "train.safetensors",
    "validation.safetensors",
    "documents.jsonl",
    "report.json",
    "manifest.json",
    "config.yaml",
]


@pytest.fixture
def text_config(tmp_path: Path, config_for: ConfigFor) -> ConfigFor:
    """The config over a directory of small files, a fifth of them held out."""
    for name, text in FILES.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    (tmp_path / "texts" / "latin.py").write_bytes(b"# gr\xf6\xdfe\n")
    settings = (
        f"prompts.paths=[{tmp_path}/texts]",
        "prompts.validation_fraction=0.2",
        "prompts.max_document_tokens=128",
    )
    return lambda *overrides: config_for(*settings, *overrides)


@pytest.fixture
def chat_config(tmp_path: Path, config_for: ConfigFor) -> Callable[..., PipelineConfig]:
    """The config over a jsonl file of the rows given."""

    def build(rows: list[Any], *overrides: str) -> PipelineConfig:
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = (
            "prompts=conversations",
            f"prompts.paths=[{tmp_path}/chats.jsonl]",
            "prompts.validation_fraction=0.3",
        )
        return config_for(*settings, *overrides)

    return build


def chat(name: str, *turns: str) -> dict[str, Any]:
    return {
        "id": name,
        "messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)],
    }


CHATS = [chat(f"chat{i}", f"question {i}", f"answer {i}") for i in range(20)]


def read_output(config: PipelineConfig) -> dict[str, list[tuple[DocumentEntry, list[int], list[int]]]]:
    """By name, the windows in order: entry, token ids, loss mask."""
    stage_dir = config.stage_dir("prompts")
    entries = DocumentEntry.read_all(stage_dir)
    found: dict[str, list[tuple[DocumentEntry, list[int], list[int]]]] = {}
    for split in Split:
        documents = Documents.load(stage_dir / f"{split}.safetensors")
        for i, document_id in enumerate(documents.document_ids.tolist()):
            assert entries[document_id].split is split
            window = (entries[document_id], documents.tokens(i).tolist(), documents.mask(i).tolist())
            found.setdefault(entries[document_id].name, []).append(window)
    return found


def test_every_token_of_every_file_is_written_on_the_side_of_its_name(text_config: ConfigFor) -> None:
    config = text_config()
    prepare_prompts(config)
    tokenizer, output = make_tokenizer(), read_output(config)
    assert output.keys() == FILES.keys() - {"empty.py"}
    for name, windows in output.items():
        assert tokenizer.decode([token_id for _, ids, _ in windows for token_id in ids]) == FILES[name]
        assert all(all(mask) for _, _, mask in windows)
        assert {entry.split for entry, _, _ in windows} == {Split.validation if is_held_out(name, 0.2) else Split.train}


def test_long_files_become_windows_that_are_counted(text_config: ConfigFor) -> None:
    config = text_config()
    report = prepare_prompts(config)
    lengths = {name: len(text) for name, text in FILES.items() if len(text) > 128}
    assert report.documents_cut == len(lengths) > 10
    assert report.windows_cut == sum(-(-length // 128) for length in lengths.values())
    windows = read_output(config)["sub/long.py"]
    assert [entry.window for entry, _, _ in windows] == [0, 1, 2, 3, 4]
    assert [entry.tokens for entry, _, _ in windows] == [128, 128, 128, 128, 28] == [len(ids) for _, ids, _ in windows]


def test_the_beginning_of_text_token_stands_before_a_file_once(tmp_path: Path, text_config: ConfigFor) -> None:
    target_dir = make_target(tmp_path / "target", bos_token_id=256)
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<|end|>"
    tokenizer.save_pretrained(target_dir)
    config = text_config(f"target.path={target_dir}")
    prepare_prompts(config)
    for name, windows in read_output(config).items():
        ids = [token_id for _, token_ids, _ in windows for token_id in token_ids]
        assert ids == [256, *tokenizer(FILES[name], add_special_tokens=False)["input_ids"]]
        assert all(all(mask) for _, _, mask in windows)


def test_refused_files_are_reported_with_the_reason(text_config: ConfigFor) -> None:
    report = prepare_prompts(text_config())
    assert {(group.reason, group.count, *group.first) for group in report.refused} == {
        ("not UTF-8", 1, "latin.py"),
        ("empty", 1, "empty.py"),
    }


def test_documents_stand_in_the_order_of_their_ids_and_the_report_agrees_with_the_files(text_config: ConfigFor) -> None:
    config = text_config()
    prepare_prompts(config)
    stage_dir = config.stage_dir("prompts")
    report = json.loads((stage_dir / "report.json").read_text())
    manifest = PromptsManifest.read(stage_dir)
    entries = DocumentEntry.read_all(stage_dir)
    assert [entry.id for entry in entries] == list(range(len(entries)))
    for split, documents, tokens in (
        (Split.train, manifest.train_documents, manifest.train_tokens),
        (Split.validation, manifest.validation_documents, manifest.validation_tokens),
    ):
        written = Documents.load(stage_dir / f"{split}.safetensors")
        assert np.all(np.diff(written.document_ids) > 0)
        assert report["splits"][split]["documents"] == documents == len(written)
        assert (
            report["splits"][split]["tokens"]
            == tokens
            == report["splits"][split]["supervised_tokens"]
            == len(written.input_ids)
        )
        assert sum(report["splits"][split]["lengths"].values()) == documents
        assert tokens == sum(entry.tokens for entry in entries if entry.split is split)


def test_the_manifest_names_the_tokenizer_and_the_limits(text_config: ConfigFor, tiny_target: Path) -> None:
    config = text_config()
    prepare_prompts(config)
    manifest = PromptsManifest.read(config.stage_dir("prompts"))
    assert manifest.tokenizer == TokenizerIdentity.of(load_tokenizer(tiny_target))
    assert (manifest.vocab_size, manifest.max_document_tokens) == (260, 128)


def test_a_second_run_replaces_the_first_with_the_same_bytes(text_config: ConfigFor) -> None:
    config = text_config()
    stage_dir = config.stage_dir("prompts")
    prepare_prompts(text_config("prompts.pattern=file_*.py"))
    other = (stage_dir / "train.safetensors").read_bytes()
    prepare_prompts(config)
    first = {name: (stage_dir / name).read_bytes() for name in DATA_FILES}
    prepare_prompts(config)
    assert {name: (stage_dir / name).read_bytes() for name in DATA_FILES} == first
    assert first["train.safetensors"] != other
    assert sorted(path.name for path in stage_dir.iterdir()) == sorted([*DATA_FILES, "provenance.json"])


def test_a_run_killed_while_it_writes_leaves_no_manifest(
    text_config: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = text_config()
    prepare_prompts(config)

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DocumentEntry, "write_all", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_prompts(config)
    assert not (config.stage_dir("prompts") / "manifest.json").exists()


def test_the_training_limit_keeps_the_first_documents_by_hash_and_the_whole_validation_split(
    text_config: ConfigFor,
) -> None:
    whole = text_config()
    prepare_prompts(whole)
    all_documents, everything = read_output(whole), DocumentEntry.read_all(whole.stage_dir("prompts"))
    config = text_config("prompts.max_train_tokens=700")
    report = prepare_prompts(config)
    kept = DocumentEntry.read_all(config.stage_dir("prompts"))
    assert kept == everything[: len(kept)]
    train = [entry for entry in kept if entry.split is Split.train]
    next_tokens = everything[len(kept)].tokens
    assert 700 - next_tokens < sum(entry.tokens for entry in train) <= 700
    assert [name_hash(entry.name) for entry in train] == sorted(name_hash(entry.name) for entry in train)
    assert report.splits[Split.validation].documents == sum(entry.split is Split.validation for entry in everything)
    complete = {name for name in all_documents if all_documents[name] == read_output(config).get(name)}
    assert report.beyond_max_train_tokens == len(all_documents) - len(complete) > 0


def test_the_training_limit_stops_the_tokenizing_of_a_large_source(
    chat_config: Callable[..., PipelineConfig],
) -> None:
    rows = [chat(f"chat{i}", f"question {i}", "answer") for i in range(400)]
    report = prepare_prompts(chat_config(rows, "prompts.max_train_tokens=200"))
    train, validation = report.splits[Split.train], report.splits[Split.validation]
    assert 0 < train.tokens <= 200
    assert train.documents + validation.documents + report.beyond_max_train_tokens == 400


def test_conversations_are_written_with_the_answers_supervised(chat_config: Callable[..., PipelineConfig]) -> None:
    config = chat_config(CHATS)
    prepare_prompts(config)
    tokenizer, output = make_tokenizer(), read_output(config)
    assert len(output) == 20
    for i in range(20):
        [(_, ids, mask)] = output[f"chat{i}"]
        assert tokenizer.decode(ids) == f"<user>question {i}<|end|><assistant>answer {i}<|end|>"
        assert tokenizer.decode(np.array(ids)[np.array(mask) == 1]) == f"answer {i}<|end|>"


def splits_of_questions(config: PipelineConfig) -> dict[str, set[Split]]:
    """By first question as the target reads it, the sides that its documents fall on."""
    tokenizer, sides = make_tokenizer(), defaultdict[str, set[Split]](set)
    for windows in read_output(config).values():
        for entry, ids, _ in windows:
            sides[tokenizer.decode(ids).split("<assistant>")[0]].add(entry.split)
    return sides


def test_one_question_falls_on_one_side_whatever_its_ids_and_answers_are(
    chat_config: Callable[..., PipelineConfig],
) -> None:
    """400 rows with the ids abc_0, abc_1, ... were split by these ids: 20 questions stood on both sides."""
    rows = [chat(f"abc_{i}", f"question {i % 20}", f"answer {i}") for i in range(400)]
    config = chat_config(rows)
    prepare_prompts(config)
    sides = splits_of_questions(config)
    assert len(sides) == 20 and all(len(split) == 1 for split in sides.values())
    assert {split for side in sides.values() for split in side} == set(Split)


def test_a_question_falls_on_one_side_in_any_spelling(chat_config: Callable[..., PipelineConfig]) -> None:
    spellings = ("What is {} plus 1?", "what is {}  plus 1?\n", " WHAT IS {} PLUS 1?", "\uff37hat is {} plus 1?")
    rows = [chat(f"{i}.{j}", form.format(i), "a sum") for i in range(20) for j, form in enumerate(spellings)]
    config = chat_config(rows)
    prepare_prompts(config)
    output = read_output(config)
    for i in range(20):
        assert len({entry.split for j in range(4) for entry, _, _ in output[f"{i}.{j}"]}) == 1


def test_documents_that_render_alike_are_kept_once_and_counted(chat_config: Callable[..., PipelineConfig]) -> None:
    rows = [*CHATS, *({"messages": row["messages"]} for row in CHATS * 2), chat("other answer", "question 0", "no")]
    config = chat_config(rows)
    report = prepare_prompts(config)
    texts = [tuple(ids) for windows in read_output(config).values() for _, ids, _ in windows]
    assert len(texts) == len(set(texts)) == 21
    assert report.duplicates == DuplicatesReport(questions=20, largest=4, same_question=41, dropped=40)


def test_equal_files_are_kept_once_and_never_trained_on_if_one_is_held_out(
    text_config: ConfigFor, tmp_path: Path
) -> None:
    names = [f"license_{i}.py" for i in range(40)]
    assert {is_held_out(name, 0.2) for name in names} == {True, False}
    config = text_config()
    for name in names:
        (Path(config.prompts.paths[0]) / name).write_text("every copy has this text\n")
    report = prepare_prompts(config)
    [(name, [(entry, _, _)])] = [item for item in read_output(config).items() if item[0].startswith("license_")]
    assert entry.split is Split.validation and is_held_out(name, 0.2)
    assert report.duplicates.dropped == 39


def test_windows_without_an_answer_are_left_out_and_counted(chat_config: Callable[..., PipelineConfig]) -> None:
    rows = [*CHATS, chat("long", "q" * 300, "a" * 100)]
    config = chat_config(rows, "prompts.max_document_tokens=64")
    report = prepare_prompts(config)
    windows = read_output(config)["long"]
    assert report.windows_unsupervised == 302 // 64 == windows[0][0].window
    assert sum(sum(mask) for _, _, mask in windows) == 101
    assert (report.documents_cut, report.windows_cut) == (1, -(-404 // 64))


@pytest.fixture
def rewriting_target(tmp_path: Path) -> Path:
    """A target whose chat template shows the reasoning of the last answer alone."""
    answer = "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}"
    text = "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}" + answer
    text += (
        "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return make_target(tmp_path / "rewriting", chat_template=text)


def reasoned_chats(num_turns: int) -> list[dict[str, Any]]:
    """The assistant says some seven times as much in its reasoning as in its answer."""
    turns = [(f"question {i}", f"{'so ' * 23}|answer {i}") for i in range(num_turns)]
    return [
        chat(f"chat{c}", f"question {chr(97 + c)}", turns[0][1], *(text for turn in turns[1:] for text in turn))
        for c in range(20)
    ]


def test_rewritten_answers_are_written_beside_their_conversation_on_its_side(
    chat_config: Callable[..., PipelineConfig], rewriting_target: Path
) -> None:
    rows = reasoned_chats(3)
    config = chat_config(rows, f"target.path={rewriting_target}")
    prepare_prompts(config)
    tokenizer, output = make_tokenizer(), read_output(config)
    for i, row in enumerate(rows):
        documents = output[f"chat{i}"]
        assert [(entry.window, entry.turn) for entry, _, _ in documents] == [(0, 0), (0, 4), (0, 2)]
        side = Split.validation if is_held_out(question_group(row["messages"]), 0.3) else Split.train
        assert {entry.split for entry, _, _ in documents} == {side}
        assert [tokenizer.decode(np.array(ids)[np.array(mask) == 1]) for _, ids, mask in documents] == [
            f"{'so ' * 23}|answer {turn}<|end|>" for turn in (2, 1, 0)
        ]
        beginning = f"<user>{row['messages'][0]['content']}<|end|><assistant>answer 0<|end|><user>question 1"
        assert tokenizer.decode(documents[1][1]).startswith(beginning)


def test_the_report_says_what_rewritten_answers_cost(
    chat_config: Callable[..., PipelineConfig], rewriting_target: Path
) -> None:
    report = prepare_prompts(chat_config(reasoned_chats(3), f"target.path={rewriting_target}"))
    question, answer, generated = 10 + 2, 8 + 2, 23 * 3 + 1 + 8 + 1
    history = [(question + answer) * i + question + 1 for i in range(3)]  # with the prompt for the answer
    assert report.rewritten == RewrittenReport(
        answers=40, documents=40, tokens=20 * (sum(history[:2]) + 2 * generated), history_tokens=20 * sum(history[:2])
    )
    assert report.answers_left_out == 0
    total = sum(split.tokens for split in report.splits.values())
    assert total == report.rewritten.tokens + 20 * (history[2] + generated)
    assert sum(split.supervised_tokens for split in report.splits.values()) == 20 * 3 * generated


def test_a_conversation_that_nothing_rewrites_stores_no_history_again(
    chat_config: Callable[..., PipelineConfig],
) -> None:
    config = chat_config(reasoned_chats(3))
    report = prepare_prompts(config)
    assert report.rewritten == RewrittenReport(answers=0, documents=0, tokens=0, history_tokens=0)
    assert all(len(documents) == 1 for documents in read_output(config).values())


def test_rewritten_answers_are_cut_and_limited_as_their_conversation_is(
    chat_config: Callable[..., PipelineConfig], rewriting_target: Path
) -> None:
    settings = (f"target.path={rewriting_target}", "prompts.max_document_tokens=100")
    config = chat_config(reasoned_chats(3), *settings)
    report = prepare_prompts(config)
    assert report.documents_cut == 20
    lengths = [(12 + 10) * i + 13 + 79 for i in range(3)]
    assert report.windows_cut == 20 * sum(-(-length // 100) for length in lengths if length > 100)
    windows = read_output(config)["chat0"]
    assert [(entry.turn, entry.window) for entry, _, _ in windows] == [(0, 0), (0, 1), (4, 0), (4, 1), (2, 0)]
    assert report.rewritten.documents == 20 * 3
    limited = prepare_prompts(chat_config(reasoned_chats(3), *settings, "prompts.max_train_tokens=1000"))
    assert 900 < limited.splits[Split.train].tokens <= 1000
    kept = {name for name, documents in read_output(config).items() if len(documents) == 5}
    assert limited.beyond_max_train_tokens == 20 - len(kept) > 0
    assert limited.splits[Split.validation] == report.splits[Split.validation]


def test_refused_conversations_are_counted_by_reason(chat_config: Callable[..., PipelineConfig]) -> None:
    odd = [{"messages": [{"role": "narrator", "content": "once"}]}, chat("unanswered", "hello?")]
    report = prepare_prompts(chat_config([*CHATS, *odd]))
    assert {group.reason: group.count for group in report.refused} == {
        "unknown role 'narrator'": 1,
        "no assistant turn": 1,
    }
    assert report.refused[0].first[0].endswith("chats.jsonl:21")


def test_the_program_prints_the_report_and_where_it_wrote(
    tmp_path: Path, text_config: ConfigFor, tiny_target: Path
) -> None:
    text_config()
    overrides = [f"run_dir={tmp_path}/cli", f"target.path={tiny_target}", f"prompts.paths=[{tmp_path}/texts]"]
    result = run_program("data_prep.prompts", "prompts.validation_fraction=0.2", *overrides)
    assert result.returncode == 0, result.stderr
    assert "supervised tokens" in result.stdout
    assert f"written to {tmp_path}/cli/prompts" in result.stdout
    provenance = json.loads((tmp_path / "cli" / "prompts" / "provenance.json").read_text())
    assert provenance["argv"][1:] == result.args[3:]


def test_no_paths_are_refused(config_for: ConfigFor) -> None:
    with pytest.raises(
        ValueError, match=r"prompts\.paths: must name at least one path with prompts\.source=text_files, but is empty; "
    ):
        prepare_prompts(config_for("prompts.paths=[]"))


def test_a_missing_directory_is_refused(config_for: ConfigFor) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"prompts\.paths: must name directories, but '/no/such/place' is not one"
    ):
        prepare_prompts(config_for("prompts.paths=[/no/such/place]"))


def test_a_pattern_that_no_file_fits_is_refused(text_config: ConfigFor) -> None:
    with pytest.raises(
        ValueError,
        match=r"must hold at least one file with text that matches '\*\.rs', but .*/texts holds none; correct the",
    ):
        prepare_prompts(text_config("prompts.pattern='*.rs'"))


@pytest.mark.parametrize("num_files", [2, 40])
def test_files_that_are_all_empty_are_refused_by_their_number(
    tmp_path: Path, config_for: ConfigFor, num_files: int
) -> None:
    for i in range(num_files):
        (tmp_path / f"{i}.py").touch()
    (tmp_path / "latin.py").write_bytes(b"# gr\xf6\xdfe\n")
    with pytest.raises(ValueError) as refused:
        prepare_prompts(config_for(f"prompts.paths=[{tmp_path}]"))
    assert str(refused.value) == (
        f"prompts.paths: must hold at least one file with text that matches '*.py', but {tmp_path} holds none, "
        f"{num_files} refused (empty), 1 refused (not UTF-8); correct the paths, prompts.pattern or the data"
    )


def test_a_file_without_a_usable_conversation_is_refused_with_the_reasons(
    chat_config: Callable[..., PipelineConfig],
) -> None:
    rows = [{"messages": [{"role": "narrator", "content": "once"}]}] * 2
    with pytest.raises(
        ValueError, match=r"at least one usable conversation, but .* holds none, 2 refused \(unknown role 'narrator'\)"
    ):
        prepare_prompts(chat_config(rows))


def test_an_empty_file_of_conversations_is_refused(chat_config: Callable[..., PipelineConfig]) -> None:
    with pytest.raises(
        ValueError, match=r"at least one usable conversation, but .*chats\.jsonl holds none; correct the paths"
    ):
        prepare_prompts(chat_config([]))


def test_an_empty_validation_split_is_refused_before_anything_is_tokenized(text_config: ConfigFor) -> None:
    match = (
        r"the validation split must hold at least one document, .*=1e-06 .*: none of \d+ documents belongs to it; add "
        r"data"
    )
    with pytest.raises(ValueError, match=match):
        prepare_prompts(text_config("prompts.validation_fraction=1e-6"))


def test_a_data_set_that_asks_one_question_cannot_be_split(chat_config: Callable[..., PipelineConfig]) -> None:
    rows = [chat(f"chat{i}", "hello?", f"answer {i}") for i in range(20)]
    with pytest.raises(
        ValueError, match=r"split must hold .*: none of 20 documents \(different questions: 1\) belongs to it; add"
    ):
        prepare_prompts(chat_config(rows))


def test_an_empty_train_split_is_refused(text_config: ConfigFor) -> None:
    with pytest.raises(
        ValueError, match=r"the train split must hold at least one document, but holds none with .*=0\.9999"
    ):
        prepare_prompts(text_config("prompts.validation_fraction=0.9999"))


def test_a_training_limit_below_the_first_document_is_refused(text_config: ConfigFor) -> None:
    with pytest.raises(
        ValueError,
        match=r"the train split must hold .* prompts\.max_train_tokens=3.*; add data or change these settings",
    ):
        prepare_prompts(text_config("prompts.max_train_tokens=3"))


def test_conversations_need_a_chat_template(tmp_path: Path, chat_config: Callable[..., PipelineConfig]) -> None:
    target_dir = make_target(tmp_path / "target", chat_template=None)
    with pytest.raises(
        ValueError, match=rf"must have a chat template to render messages, but that of {target_dir} has none"
    ):
        prepare_prompts(chat_config(CHATS, f"target.path={target_dir}"))


def test_a_template_that_marks_nothing_is_refused_by_the_name_of_its_target(
    tmp_path: Path, chat_config: Callable[..., PipelineConfig]
) -> None:
    template = GENERATION_TEMPLATE.replace("== 'assistant'", "== 'model'")
    target_dir = make_target(tmp_path / "target", chat_template=template)
    with pytest.raises(
        ValueError, match=rf"the chat template of {target_dir} must show which tokens .* the loss mask is empty"
    ):
        prepare_prompts(chat_config(CHATS, f"target.path={target_dir}"))


def test_conversations_without_an_answer_are_not_blamed_on_the_template(
    chat_config: Callable[..., PipelineConfig],
) -> None:
    rows = [chat(f"chat{i}", f"hello {i}?") for i in range(20)]
    match = (
        r"^prompts\.paths: conversations must have an assistant turn to learn from, but none of 20 has one \(the "
        r"first is .*\.jsonl:\d+\); choose data with answers, or let the target answer: run data_prep\.responses"
    )
    with pytest.raises(ValueError, match=match):
        prepare_prompts(chat_config(rows))


def test_a_data_set_whose_every_mask_is_empty_is_refused_by_the_name_of_the_target(
    tmp_path: Path, chat_config: Callable[..., PipelineConfig]
) -> None:
    template = "{% if messages[0]['content'].startswith('hello') %}{{ 1 // 0 }}{% endif %}" + GENERATION_TEMPLATE
    target_dir = make_target(tmp_path / "target", chat_template=template)
    rows = [chat(f"chat{i}", f"hello {i}?", "yes") for i in range(20)]
    match = rf"chat template of {target_dir} must .* mask is empty: .*20 refused \(the chat template fails: ZeroDiv"
    with pytest.raises(ValueError, match=match):
        prepare_prompts(chat_config(rows, f"target.path={target_dir}"))


def test_a_conversation_that_renders_for_ever_is_named(
    tmp_path: Path, chat_config: Callable[..., PipelineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.2)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0]['content'] == 'hello 7?' %}" + loop + "{% endif %}" + GENERATION_TEMPLATE
    target_dir = make_target(tmp_path / "target", chat_template=template)
    rows = [chat(f"chat{i}", f"hello {i}?", "yes") for i in range(20)]
    match = rf"\.jsonl:8: the chat template of {target_dir} must render a conversation within 0\.2 s"
    with pytest.raises(chat_template.EndlessTemplate, match=match):
        prepare_prompts(chat_config(rows, f"target.path={target_dir}"))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, text_config: ConfigFor) -> None:
    target_dir = make_target(tmp_path / "target", vocab_size=100, eos_token_id=1)
    match = (
        r"token ids must be below the model's vocab_size 100, but the tokenizer gives \d+ in .*\.py; tokenizer and "
        r"config\.json"
    )
    with pytest.raises(ValueError, match=match):
        prepare_prompts(text_config(f"target.path={target_dir}"))
