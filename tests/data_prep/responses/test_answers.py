"""Tests the responses that a server and transformers give, and the tokens of them that prompts supervise."""

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.prompts import prepare_prompts
from data_prep.responses.dialogue import Prompt, Sampling
from data_prep.responses.target import generate
from mtptrain.config import PipelineConfig, ResponsesConfig
from mtptrain.data.chat_template import render_prompt
from mtptrain.run_dir import Run
from mtptrain.target.generation import NEUTRAL
from mtptrain.target.hub import load_tokenizer
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from tests.conftest import GENERATION_TEMPLATE
from tests.data_prep.prompts.documents import read_output
from tests.data_prep.responses.conftest import (
    ConfigFor,
    answer_by_question,
    answered,
    answers_of,
    chat,
    failures,
    output,
    respond,
)
from tests.data_prep.speaking import EOS, FakeServer, answer_by_prompt, completion, make_speaking_target
from tests.data_prep.templates import QWEN3


def supervised_tokens(config: PipelineConfig) -> dict[str, list[int]]:
    """Makes prompts of the responses, and returns the supervised tokens of each conversation."""
    prepare_prompts(Run(config))
    return {
        name: [token for _, ids, mask in windows for token, is_set in zip(ids, mask, strict=True) if is_set]
        for name, windows in read_output(config).items()
    }


def supervised_texts(config: PipelineConfig) -> dict[str, str]:
    tokenizer = load_tokenizer(Path(config.target.path))
    return {name: tokenizer.decode(tokens) for name, tokens in supervised_tokens(config).items()}


def test_requests_depend_on_settings_rows_and_turns_and_not_on_the_order_in_which_conversations_end(
    by_server: ConfigFor, server: FakeServer
) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 5}
    manifest = respond(by_server(**settings, concurrency=1, run="one"))
    seeds = {tuple(request["prompt"]): request["seed"] for request in server.requests}
    assert len(set(seeds.values())) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds.values())
    sent = {"max_tokens": 24, "repetition_penalty": 1.0, "min_p": 0.0, "stop_token_ids": [EOS], "model": "tiny"}
    sent |= {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "return_token_ids": True}
    assert all(request.items() >= sent.items() for request in server.requests)
    assert manifest.identity.model == "tiny" and manifest.server_versions == ["vLLM 0.0.1"]

    all_at_once = threading.Barrier(8)

    def late(request: dict[str, Any]) -> Any:
        if len(server.requests) <= 8:
            all_at_once.wait(60)
        time.sleep(random.random() / 50)
        return answer_by_prompt(request)

    server.behave, server.requests = late, []
    respond(by_server(**settings, concurrency=8, run="many"))
    assert {tuple(request["prompt"]): request["seed"] for request in server.requests} == seeds
    assert server.at_once == 8, "as many conversations as allowed must be in flight, and no more"
    assert output(by_server(run="one")) == output(by_server(run="many"))


def test_a_cut_character_is_no_part_of_an_answer(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path
) -> None:
    tokenizer = load_tokenizer(speaking_target)
    whole, end = tokenizer("ok \U0001f600")["input_ids"], len(tokenizer("ok ")["input_ids"])
    assert len(whole) == end + 4, "the tokenizer must have one token for each byte"
    server.behave = lambda request: completion(request["prompt"], whole[:-2], "length", "ok \ufffd")
    config = by_server(rows=[chat(f"chat{i}", 1) for i in range(8)])
    respond(config)
    assert {answers_of(row)[0] for row in answered(config)} == {"ok "} == set(supervised_texts(config).values())


def test_cut_empty_and_too_long_conversations_end_there_and_rows_without_a_question_are_refused(
    by_server: ConfigFor, server: FakeServer, speaking_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {
        "1 of cut": lambda prompt: completion(prompt, [5] * 24, "length"),
        "1 of empty": lambda prompt: completion(prompt, [EOS]),
        "0 of mute": lambda prompt: completion(prompt, [EOS]),
    }
    server.behave = answer_by_question(table, speaking_target)
    long, asking = chat("long", 3), chat("asking", 3)
    long["messages"][2]["content"] = "x" * 475  # the prompt leaves no room for 24 new tokens in the context of 512
    asking["messages"].pop()  # a question at the end gets an answer
    system, hello = {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "hello"}
    unusable = [[system], [hello, {"role": "user", "content": "hi"}], [{"role": "nobody", "content": "hello"}]]
    rows = [chat("cut", 3), chat("empty", 3), chat("mute", 2), long, asking]
    config = by_server(rows=[*rows, *({"id": "unusable", "messages": messages} for messages in unusable)])
    manifest = respond(config)
    found = {row["id"]: (len(row["messages"]), row["ended_by"]) for row in answered(config)}
    ended = {"cut": (4, "length"), "empty": (2, "empty"), "mute": (1, "empty"), "long": (2, "context")}
    assert found == ended | {"asking": (6, "complete")}
    assert (manifest.counts["cut"], manifest.counts["unanswered"], manifest.failed, manifest.refused) == (1, 1, 0, 3)
    assert failures(config) == {
        1: "the target's response is empty",
        2: "the target's response is empty",
        3: "the prompt plus responses.max_new_tokens exceeds the context",
        5: "no user or tool message",
        6: "a response that would not follow a user or tool message",
        7: "unknown role 'nobody'",
    }
    num_requests = len(server.requests)
    respond(config)
    assert len(server.requests) == num_requests, "conversations that ended early are not retried"
    assert "responses is finished already" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"^prompts\.paths: 1 of 1 items were refused: 1 \(no user .* must hold at"):
        respond(by_server(rows=[{"id": "unusable", "messages": [system]}], run="none"))


def test_a_template_that_begins_the_thought_in_its_prompt_gets_the_answer_back_token_by_token(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    foot = "{{ m.content }}<|end|>{% else %}<{{ m.role }}>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    prompt = "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    for start, tag in (("<think>", ""), ("", "{% if '</think>' in m.content %}<think>{% endif %}")):
        template = "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>" + tag + foot + prompt
        target = make_speaking_target(tmp_path / f"thinks{len(start)}", chat_template=template)
        tokenizer = load_tokenizer(target)
        answer = tokenizer("hmm</think>yes")["input_ids"]
        server.behave = lambda request, ids=answer: completion(request["prompt"], [*ids, EOS], text="hmm</think>yes")
        config = by_server(target=target, rows=[chat("one", 1)], run=f"run{len(start)}")
        counts = respond(config).counts
        assert counts["texts_changed"] == counts["tokens_changed"] == 0
        messages = answered(config)[0]["messages"]
        assert messages[1]["content"] == start + "hmm</think>yes"
        whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert whole == [*render_prompt(tokenizer, messages[:1]), *answer, EOS]


def test_an_answer_that_was_cut_in_its_reasoning_is_not_supervised(
    by_server: ConfigFor, server: FakeServer, tmp_path: Path
) -> None:
    target = make_speaking_target(tmp_path / "thinks", chat_template=QWEN3)
    tokenizer = load_tokenizer(target)
    lost, kept = "<think>\nI wonder", "<think>\nhmm\n</think>\n\nyes"
    cut, whole = (tokenizer(text)["input_ids"] for text in (lost, kept))
    answers = dict.fromkeys(("1 of cut", "0 of never"), lambda prompt: completion(prompt, cut, "length", lost))
    by_word = answers | {"of": lambda prompt: completion(prompt, [*whole, EOS], text=kept)}
    server.behave = answer_by_question(by_word, target)
    names = [f"{kind}{i}" for kind in ("cut", "never", "good") for i in range(6)]
    config = by_server(target=target, max_new_tokens=64, rows=[chat(name, 2) for name in names])
    assert respond(config).counts["texts_changed"] == 12
    texts = {name: text.replace("<|im_end|>\n", "<|im_end|>") for name, text in supervised_texts(config).items()}
    assert texts == {f"{kind}{i}": f"{kept}<|im_end|>" * n for kind, n in (("cut", 1), ("good", 2)) for i in range(6)}
    report = prepare_prompts(Run(config))
    assert report.counts["answers_left_out"] == 6
    [refused] = report.refused
    assert (refused.count, refused.reason) == (6, "the chat template renders no answer as it was generated")


def test_prompts_refuse_answers_that_are_missing_or_of_another_target(by_server: ConfigFor, tmp_path: Path) -> None:
    other = make_speaking_target(tmp_path / "other", seed=1, chat_template=GENERATION_TEMPLATE + "{# other #}")
    config = by_server()
    with pytest.raises(UserError, match=r"responses/manifest\.json: must exist, but does not; run mtptrain responses"):
        prepare_prompts(Run(config))
    respond(config)
    elsewhere = by_server()
    elsewhere.prompts.paths = ["/elsewhere"]
    with pytest.raises(UserError, match=r"prompts\.paths must be \['/elsewhere'\], but is \["):
        prepare_prompts(Run(elsewhere))
    message = r"weights must be \w+, but is \w+; the hash of the chat template must be .*; run mtptrain responses ag"
    with pytest.raises(UserError, match=message):
        prepare_prompts(Run(by_server(target=other)))


def test_transformers_answers_greedily_as_one_prompt_at_a_time_would_and_exactly_that_is_supervised(
    configure: ConfigFor, speaking_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure()
    manifest = respond(config)
    assert f", {manifest.counts['answer_tokens']:,} tokens, " in capsys.readouterr().err.split("\r")[-1], "on the bar"
    assert manifest.counts["texts_changed"] == manifest.counts["tokens_changed"] == 0
    model = AutoModelForCausalLM.from_pretrained(speaking_target, dtype=torch.float32).eval()
    tokenizer, supervised, endings = load_tokenizer(speaking_target), supervised_tokens(config), Counter[str]()
    rows = [row for row in answered(config) if answers_of(row)]
    assert supervised.keys() == {row["id"] for row in rows}
    for row in rows:
        ends, generated = zip(row["finish_reasons"], row["answer_tokens"], strict=True), list[int]()
        for index, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            tokens = render_prompt(tokenizer, row["messages"][:index])
            start = len(tokens)
            with torch.no_grad():
                while len(tokens) < start + 24 and (len(tokens) == start or tokens[-1] != EOS):
                    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            reason = "stop" if tokens[-1] == EOS else "length"
            assert next(ends) == (reason, len(tokens) - start)
            assert message["content"] == tokenizer.decode(tokens[start : -1 if reason == "stop" else None])
            generated += tokens[start:]
            endings[reason] += 1
        assert supervised[row["id"]] == generated
    assert endings["stop"] > 5 and endings["length"] > 3


def test_sampling_follows_its_settings_and_its_seed_and_nothing_of_the_checkpoint(
    speaking_target: Path, tmp_path: Path
) -> None:
    penalised = make_speaking_target(tmp_path / "penalised")
    generation = {"eos_token_id": [EOS], "repetition_penalty": 1.8, "do_sample": True, "temperature": 3.0}
    (penalised / "generation_config.json").write_text(json.dumps(generation))
    cpu = torch.device("cpu")
    targets = {path: load_target(path, torch.float32, cpu) for path in (speaking_target, penalised)}
    questions = [load_tokenizer(speaking_target)(f"<user>question {i}<|end|>")["input_ids"] for i in range(4)]

    def answers(
        seed: int = 0, path: Path = speaking_target, ends: tuple[int, ...] = (EOS,), **settings: float
    ) -> list[list[int]]:
        sampling = Sampling(NEUTRAL | settings, 24, ends, seed)
        prompts = [Prompt(ids, seed) for ids in questions]
        return [each.token_ids for each in generate(targets[path], prompts, sampling, lambda num_tokens: None)]

    hot, greedy = answers(), answers(temperature=0.0)
    assert hot == answers() != answers(seed=1)
    assert hot != greedy == answers(top_k=1) == answers(top_p=1e-6) == answers(temperature=0.0, path=penalised)
    # A penalty is that of transformers, whatever is in the batch.
    model, penalty = targets[penalised].model, {"temperature": 0.0, "repetition_penalty": 1.8}
    own = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for ids, answer in zip(questions, answers(ends=(), **penalty), strict=True):
        assert model.generate(torch.tensor([ids]), **own)[0, len(ids) :].tolist() == answer
    assert answers(ends=(), **penalty) != answers(ends=(), temperature=0.0)


def test_batches_are_larger_where_answers_are_shorter() -> None:
    assert [ResponsesConfig(max_new_tokens=most).batch_rows for most in (128, 1024, 4096)] == [32, 16, 8]
    assert ResponsesConfig(batch_size=3).batch_rows == 3
