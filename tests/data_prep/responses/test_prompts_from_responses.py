"""Tests which prompts are made from responses, and which of their tokens are supervised."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import prepare_prompts
from mtptrain.config import PipelineConfig
from mtptrain.data.prompt_files import Documents, Split, is_held_out
from mtptrain.run import Run
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.errors import UserError
from tests.conftest import GENERATION_TEMPLATE
from tests.data_prep.prompts.documents import read_output
from tests.data_prep.responses.stage import (
    CHATS,
    PROMPT,
    ConfigFor,
    answer_by_question,
    answered,
    answers_of,
    chat,
    respond,
)
from tests.data_prep.speaking import EOS, FakeServer, completion, make_speaking_target
from tests.data_prep.test_renderings import QWEN3, QWEN3_BLOCKS


def supervised_tokens(config: PipelineConfig) -> dict[str, list[int]]:
    """Returns the supervised tokens of each conversation."""
    return {
        name: [token for _, ids, mask in windows for token, is_set in zip(ids, mask, strict=True) if is_set]
        for name, windows in read_output(config).items()
    }


def supervised_texts(config: PipelineConfig, target: Path) -> dict[str, str]:
    tokenizer = load_tokenizer(target)
    return {name: tokenizer.decode(tokens) for name, tokens in supervised_tokens(config).items()}


def test_the_prompts_supervise_exactly_what_the_target_generated(configure: ConfigFor, speaking_target: Path) -> None:
    config = configure("responses.max_new_tokens=16")
    manifest = respond(config)
    assert manifest.counts.texts_changed == manifest.counts.tokens_changed == 0
    prepare_prompts(Run(config))
    supervised = supervised_tokens(config)
    for windows in read_output(config).values():
        assert all(is_held_out(entry.group, 0.3) == (entry.split is Split.validation) for entry, _, _ in windows)
    tokenizer, ends = load_tokenizer(speaking_target), Counter[str]()
    rows = [row for row in answered(config) if answers_of(row)]
    assert supervised.keys() == {row["id"] for row in rows}
    for row in rows:
        generated: list[int] = []
        for answer, reason in zip(answers_of(row), row["finish_reasons"], strict=True):
            generated += [*tokenizer(answer)["input_ids"], *([EOS] if reason == "stop" else [])]
            ends[reason] += 1
        assert supervised[row["id"]] == generated
        assert sum(row["answer_tokens"]) == len(generated)
    assert ends["stop"] > 5 and ends["length"] > 3


def test_answers_to_one_question_are_on_one_side_whatever_was_answered_before(by_server: ConfigFor) -> None:
    """Tests that the old answers do not affect the split, although the name of a row without an id depends on them."""
    rows = []
    for i in range(200):
        question, old = (
            {"role": "user", "content": f"question {i % 20}"},
            {"role": "assistant", "content": f"old answer {i}"},
        )
        rows.append({"messages": [question, old]})
    config = by_server(rows=rows)
    respond(config)
    prepare_prompts(Run(config))
    sides = {split: Documents.load(config.stage_dir("prompts") / f"{split}.safetensors") for split in Split}
    train, held_out = (
        {documents.token_ids(i).tobytes() for i in range(len(documents))} for documents in sides.values()
    )
    assert train and held_out and not train & held_out
    assert len(train | held_out) == 20 == sum(map(len, sides.values()))


def test_prompts_refuse_answers_that_are_missing_or_others(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    config = by_server()
    with pytest.raises(
        UserError, match=r"responses/manifest\.json: must exist, but does not; run mtptrain responses with"
    ):
        prepare_prompts(Run(config))
    respond(config)
    prepare_prompts(Run(config))
    other = make_speaking_target(tmp_path / "other", seed=1, chat_template=GENERATION_TEMPLATE + "{# other #}")
    with pytest.raises(
        ValueError,
        match=r"weights must be \w+, but is \w+; the hash of the chat template must be .*; run mtptrain responses ag",
    ):
        prepare_prompts(Run(by_server(f"target.path={other}")))
    with pytest.raises(ValueError, match=r"the hash of the conversations of \S+chats\.jsonl must be \w+, but is \w+;"):
        prepare_prompts(Run(by_server(rows=[*CHATS, chat("new", 1)])))
    with pytest.raises(ValueError, match=r"prompts\.paths must be \['/elsewhere'\], but is \["):
        prepare_prompts(Run(by_server("prompts.paths=[/elsewhere]")))


def test_prompts_go_on_with_answers_whose_conversations_are_gone(
    by_server: ConfigFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = by_server()
    respond(config)
    (tmp_path / "chats.jsonl").unlink()
    prepare_prompts(Run(config))
    printed = capsys.readouterr().out
    assert "chats.jsonl cannot be read now, so the responses are not checked against it: prompts.paths: " in printed
    assert "chats.jsonl' does not exist; correct the path" in printed


def test_deleted_answers_are_named(by_server: ConfigFor) -> None:
    config = by_server()
    respond(config)
    (config.stage_dir("responses") / "conversations.jsonl").unlink()
    with pytest.raises(
        UserError, match=r"responses/conversations\.jsonl: must exist, but does not; delete \S+ and run"
    ):
        prepare_prompts(Run(config))


@pytest.mark.parametrize("template", [QWEN3, QWEN3_BLOCKS])
def test_an_answer_that_was_cut_in_its_reasoning_is_not_supervised(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path, template: str
) -> None:
    target = make_speaking_target(tmp_path / "thinks", chat_template=template)
    tokenizer = load_tokenizer(target)
    cut, whole = (tokenizer(text)["input_ids"] for text in ("<think>\nI wonder", "<think>\nhmm\n</think>\n\nyes"))
    lost = {"1 of cut": cut, "0 of never": cut}

    def answer(ids: list[int]) -> Callable[[list[int]], Any]:
        return lambda prompt: completion(prompt, ids, "length")

    by_word = answer_by_question({word: answer(ids) for word, ids in lost.items()}, target)
    is_lost = answer_by_question({word: lambda prompt: None for word in lost}, target)
    server.behave = lambda request: (
        by_word(request) if is_lost(request) is None else completion(request["prompt"], [*whole, EOS])
    )
    names = [f"{kind}{i}" for kind in ("cut", "never", "good") for i in range(6)]
    config = by_server(f"target.path={target}", "responses.max_new_tokens=64", rows=[chat(name, 2) for name in names])
    assert respond(config).counts.texts_changed == 12
    kept = {row["id"]: row["texts_kept"] for row in answered(config)}
    assert (kept["cut0"], kept["never0"], kept["good0"]) == ([True, False], [False], [True, True])
    report = prepare_prompts(Run(config))
    found, one = supervised_texts(config, target), "<think>\nhmm\n</think>\n\nyes<|im_end|>"
    assert {name: text.replace("<|im_end|>\n", "<|im_end|>") for name, text in found.items()} == {
        f"{kind}{i}": one * times for kind, times in (("cut", 1), ("good", 2)) for i in range(6)
    }
    assert report.answers_left_out == 6
    [refused] = report.refused
    assert (refused.count, refused.reason) == (6, "the chat template renders no answer as it was generated")


def test_of_several_answers_those_that_the_template_changes_are_not_supervised(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    strip = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}" + PROMPT
    target = make_speaking_target(tmp_path / "strips", chat_template=strip)
    tokenizer = load_tokenizer(target)
    texts = {"0 of": "one", "1 of": " two", "2 of": "three", "3 of": " four"}
    answers = {word: [*tokenizer(text)["input_ids"], EOS] for word, text in texts.items()}
    server.behave = answer_by_question(
        {word: lambda p, ids=ids: completion(p, ids) for word, ids in answers.items()}, target
    )
    config = by_server(f"target.path={target}", rows=[chat(f"chat{i}", 4) for i in range(8)])
    respond(config)
    report = prepare_prompts(Run(config))
    end = tokenizer.decode([EOS])
    assert set(supervised_texts(config, target).values()) == {f"one{end}three{end}"}
    assert report.answers_left_out == 16


def test_a_character_that_was_cut_is_no_part_of_its_answer(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path
) -> None:
    tokenizer = load_tokenizer(speaking_target)
    whole, end = tokenizer("ok \U0001f600")["input_ids"], len(tokenizer("ok ")["input_ids"])
    assert len(whole) == end + 4, "the tokenizer must have one token for each byte"
    server.behave = lambda request: completion(request["prompt"], whole[:-2], "length")
    config = by_server(rows=[chat(f"chat{i}", 1) for i in range(8)])
    respond(config)
    assert {answers_of(row)[0] for row in answered(config)} == {"ok "}
    prepare_prompts(Run(config))
    assert set(supervised_texts(config, speaking_target).values()) == {"ok "}
