"""Tests the requests that `mtptrain responses` sends to a server, and the responses that it stores."""

import json
import random
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from mtptrain.data.chat_template import render_prompt
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.cpu import PRETENDED_BF16
from tests.data_prep.responses.stage import (
    CHATS,
    PROMPT,
    ConfigFor,
    answer_by_question,
    answered,
    chat,
    failures,
    output,
    respond,
)
from tests.data_prep.speaking import EOS, FakeServer, answer_by_prompt, completion, make_speaking_target


def test_every_answer_is_new_and_new_answers_are_the_history_of_later_turns(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path
) -> None:
    config, tokenizer = by_server(), load_tokenizer(speaking_target)
    manifest = respond(config)
    asked = {tuple(request["prompt"]) for request in server.requests}
    assert len(asked) == len(server.requests) == manifest.counts.answers == sum(1 + i % 3 for i in range(20))
    for row, old in zip(answered(config), CHATS, strict=True):
        assert row["id"] == old["id"] and row["ended_by"] == "complete"
        kept = [message for message in row["messages"] if message["role"] != "assistant"]
        assert kept == [message for message in old["messages"] if message["role"] != "assistant"]
        for index, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                prompt = render_prompt(tokenizer, row["messages"][:index])
                asked.remove(tuple(prompt))
                (new_tokens,) = [answer_by_prompt({"prompt": prompt})[1]["choices"][0]["token_ids"]]
                assert message["content"] == tokenizer.decode(new_tokens[:-1])
    assert not asked
    assert "old answer" not in json.dumps(answered(config))


def test_requests_carry_the_sampling_settings_and_a_seed_of_their_own_row_and_turn(
    by_server: ConfigFor, server: FakeServer
) -> None:
    settings = ("responses.temperature=0.7", "responses.top_p=0.9", "responses.top_k=40", "seed=5")
    manifest = respond(by_server(*settings))
    seeds = {tuple(request["prompt"]): request["seed"] for request in server.requests}
    assert len(set(seeds.values())) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds.values())
    for request in server.requests:
        assert (request["temperature"], request["top_p"], request["top_k"], request["max_tokens"]) == (0.7, 0.9, 40, 24)
        assert (request["repetition_penalty"], request["min_p"], request["stop_token_ids"]) == (1.0, 0.0, [EOS])
    assert manifest.identity.settings["responses.temperature"] == 0.7 and manifest.identity.settings["seed"] == 5
    assert manifest.identity.model == "tiny" and manifest.server_versions == ["vLLM 0.0.1"]

    server.requests.clear()
    respond(by_server(*settings, "responses.concurrency=1", run="again"))
    assert {tuple(request["prompt"]): request["seed"] for request in server.requests} == seeds
    respond(by_server(run="greedy"))
    assert server.requests[-1]["top_k"] == -1, "top_k=-1 allows all tokens in both engines"


def test_the_order_in_which_conversations_end_changes_nothing(by_server: ConfigFor, server: FakeServer) -> None:
    respond(by_server("responses.concurrency=1", run="one"))

    def late(request: dict[str, Any]) -> Any:
        time.sleep(random.random() / 50)
        return answer_by_prompt(request)

    server.behave = late
    respond(by_server("responses.concurrency=8", run="many"))
    assert output(by_server(run="one")) == output(by_server(run="many"))


def test_no_more_conversations_are_in_flight_than_allowed(by_server: ConfigFor, server: FakeServer) -> None:
    server.delay_s = 0.03
    respond(by_server("responses.concurrency=3"))
    assert server.at_once == 3


def test_vllm_on_a_cpu_that_makes_it_slow_is_warned_of(
    by_server: ConfigFor, monkeypatch: pytest.MonkeyPatch, user_warnings: list[warnings.WarningMessage]
) -> None:
    monkeypatch.setenv(PRETENDED_BF16, "1")
    respond(by_server())
    assert not [each for each in user_warnings if "responses.url" in str(each.message)]
    monkeypatch.setenv(PRETENDED_BF16, "0")
    with pytest.warns(UserWarning, match=r"responses.url: should not be vLLM on a CPU without bf16 .* is vLLM 0.0.1;"):
        respond(by_server(run="slow"))


def test_a_server_that_returns_only_text_is_enough(by_server: ConfigFor, server: FakeServer) -> None:
    respond(by_server(run="ids"))

    def in_text(request: dict[str, Any]) -> Any:
        status, content = answer_by_prompt(request)
        token_ids = content["choices"][0].pop("token_ids")[:-1]
        content["choices"][0]["text"] = "".join(chr(ord("!") + token) for token in token_ids)
        return status, content

    server.behave = in_text
    respond(by_server(run="text"))
    assert output(by_server(run="ids")) == output(by_server(run="text"))


def test_cut_empty_and_too_long_conversations_end_there_and_are_counted(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {
        "1 of cut": lambda prompt: completion(prompt, [5] * 24, "length"),
        "1 of empty": lambda prompt: completion(prompt, [EOS]),
        "0 of mute": lambda prompt: completion(prompt, [EOS]),
    }
    server.behave = answer_by_question(table, speaking_target)
    long = chat("long", 3)
    long["messages"][2]["content"] = "x" * 475  # the prompt leaves no room for 24 new tokens in the context of 512
    config = by_server(rows=[chat("cut", 3), chat("empty", 3), chat("mute", 2), long, chat("whole", 3)])
    manifest = respond(config)
    rows = {row["id"]: row for row in answered(config)}
    assert [message["role"] for message in rows["cut"]["messages"]] == ["user", "assistant"] * 2
    assert rows["cut"]["finish_reasons"] == ["stop", "length"] and rows["cut"]["ended_by"] == "length"
    assert [len(rows[name]["messages"]) for name in ("empty", "mute", "long", "whole")] == [2, 1, 2, 6]
    assert manifest.counts.ended_by == {"complete": 1, "length": 1, "empty": 2, "context": 1, "template": 0}
    assert manifest.counts.unanswered == 1 and manifest.failed == 0
    assert {(Path(item["place"]).name, item["reason"], item["answers"]) for item in failures(config)} == {
        ("chats.jsonl:2", "the target's response is empty", 1),
        ("chats.jsonl:3", "the target's response is empty", 0),
        ("chats.jsonl:4", "the prompt plus responses.max_new_tokens exceeds the context", 1),
    }
    printed = capsys.readouterr().out
    assert "1 responses, each the last of its" in printed
    assert re.search(
        r"empty response +│ 2 conv[^│]*│\n│ prompt too long +│ 1 conv[^│]*│\n│ refused by template +│ 0 conv",
        printed,
    )

    num_requests = len(server.requests)
    respond(config)
    assert len(server.requests) == num_requests, "conversations that ended early are not retried"
    assert "responses is finished already" in capsys.readouterr().out


def test_rows_that_cannot_be_answered_are_refused_with_the_reason(
    by_server: ConfigFor, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        chat("good", 1),
        {"id": "a", "messages": [{"role": "system", "content": "be brief"}]},
        {"id": "b", "messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}]},
        {"id": "c", "messages": [{"role": "nobody", "content": "hello"}]},
    ]
    config = by_server(rows=rows)
    assert respond(config).refused == 3
    reasons = {Path(item["place"]).name: item["reason"] for item in failures(config)}
    assert reasons == {
        "chats.jsonl:2": "no user or tool message",
        "chats.jsonl:3": "a response that would not follow a user or tool message",
        "chats.jsonl:4": "unknown role 'nobody'",
    }
    assert "1 left out: no user or tool message; first: " in capsys.readouterr().out
    assert [row["id"] for row in answered(config)] == ["good"]
    with pytest.raises(
        ValueError,
        match=r"prompts\.paths: must hold at least one conversation that .* \(1 refused: no user or tool message\); ",
    ):
        respond(by_server(rows=rows[1:2], run="none"))


def test_answers_that_are_not_rendered_as_they_were_generated_are_counted(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    strip = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>{% endfor %}" + PROMPT
    target = make_speaking_target(tmp_path / "strips", chat_template=strip)
    tokenizer = load_tokenizer(target)
    space, half = tokenizer(" x")["input_ids"], tokenizer("é")["input_ids"][:1]
    table = {
        "of space": lambda prompt: completion(prompt, [*space, EOS]),
        "of half": lambda prompt: completion(prompt, [5, *half, EOS]),
    }
    server.behave = answer_by_question(table, target)
    config = by_server(f"target.path={target}", rows=[chat("space", 1), chat("half", 1), chat("plain", 1)])
    counts = respond(config).counts
    assert (counts.answers, counts.texts_changed, counts.tokens_changed) == (3, 1, 1)
    assert [(row["texts_kept"], row["tokens_changed"]) for row in answered(config)] == [
        ([False], 0),
        ([True], 1),
        ([True], 0),
    ]


HEAD = "{% for m in messages %}{% if m.role == 'assistant' %}"
FOOT = "{% else %}<{{ m.role }}>{{ m.content }}<|end|>{% endif %}{% endfor %}"
THINKING = {
    "in the message": HEAD + "<assistant>{{ m.content }}<|end|>" + FOOT,
    "by the template": HEAD
    + "<assistant>{% if '</think>' in m.content %}<think>{% endif %}{{ m.content }}<|end|>"
    + FOOT,
}


@pytest.mark.parametrize("rendered", THINKING)
def test_a_template_that_begins_the_thought_in_its_prompt_gets_the_answer_back_token_by_token(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path, rendered: str
) -> None:
    template = THINKING[rendered] + "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    target = make_speaking_target(tmp_path / "thinks", chat_template=template)
    tokenizer = load_tokenizer(target)
    answer = [*tokenizer("hmm</think>yes")["input_ids"], EOS]
    server.behave = lambda request: completion(request["prompt"], answer)
    config = by_server(f"target.path={target}", rows=[chat("one", 1)])
    counts = respond(config).counts
    assert (counts.texts_changed, counts.tokens_changed) == (0, 0)
    messages = answered(config)[0]["messages"]
    assert messages[1]["content"] == ("<think>" if rendered == "in the message" else "") + "hmm</think>yes"
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert whole == [*render_prompt(tokenizer, messages[:1]), *answer]
