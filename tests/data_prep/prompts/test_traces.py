"""Tests that the token ids of traces become documents in which each answer follows exactly what the target had read."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.prompts import prepare_prompts
from mtptrain.data.conversation import ConversationRefused
from mtptrain.data.traces import documents_of, read_calls
from mtptrain.planning.expected import expected_documents
from mtptrain.run_dir import Run
from mtptrain.utils.errors import UserError
from tests.data_prep.prompts.documents import ConfigFor, read_output

TOKENS = "prompts.source=tokens"
ANSWER: dict[str, Any] = {  # as vLLM 0.32 answers a chat request with return_token_ids
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "prompt_token_ids": [1, 2, 3],
    "choices": [{"index": 0, "message": {"role": "assistant", "content": None}, "token_ids": [4, 5]}],
}
COMPLETION = {
    "object": "text_completion",
    "choices": [{"text": "", "prompt_token_ids": [1, 2, 3], "token_ids": [4, 5]}],
}

CHAT_OF_SGLANG = {
    "choices": [{"message": {"content": ""}, "prompt_token_ids": [1, 2, 3], "response_token_ids": [4, 5]}]
}


def logged(request: dict[str, Any], output: dict[str, Any]) -> dict[str, Any]:
    """A line of SGLang's log of requests."""
    out = {"text": "", "output_ids": [4, 5], "meta_info": {"id": "r", "completion_tokens": 2}}
    given = {"rid": "r", "text": "", "input_ids": [1, 2, 3], "image_data": None}
    return {"timestamp": "", "event": "request.finished", "rid": "r", "obj": given | request, "out": out | output}


def step(prompt: list[int], answer: list[int], **more: Any) -> dict[str, Any]:
    metrics = {"prompt_token_ids": prompt, "completion_token_ids": answer}
    return {"source": "agent", "message": "parsed", "metrics": metrics, **more}


def atif(*steps: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": "ATIF-v1.8",
        "agent": {"name": "a"},
        "steps": [{"source": "user", "message": "q"}, *steps],
    }


def node(parent: int | None, ids: list[int], num_sampled: int = 0, text: str | None = None) -> dict[str, Any]:
    mask = [False] * (len(ids) - num_sampled) + [True] * num_sampled
    return {"parent": parent, "token_ids": ids, "mask": mask, "message": {"role": "user", "content": text}}


EPISODE = [
    node(None, [1, 2]),
    node(0, [3, 4, 5], 2),
    node(1, [6]),
    node(2, [7, 8], 1),
    node(1, [9]),
    node(4, [7, 6], 2),
]
"""A tree of Verifiers: after the first answer, the agent goes on in two ways."""
CASES: dict[str, tuple[dict[str, Any], list[tuple[list[int], list[int]]]]] = {
    "a chat answer": (ANSWER, [([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])]),
    "in a log": ({"request": {}, "response": ANSWER}, [([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])]),
    "a completion": (COMPLETION, [([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])]),
    "a chat of SGLang": (CHAT_OF_SGLANG, [([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])]),
    "a log of SGLang": (logged({}, {}), [([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])]),
    "two choices": (
        ANSWER | {"choices": [{"token_ids": [4]}, {"token_ids": [5, 6]}]},
        [([1, 2, 3, 4], [0, 0, 0, 1]), ([1, 2, 3, 5, 6], [0, 0, 0, 1, 1])],
    ),
    "steps that go on": (
        atif(step([1, 2], [3]), step([1, 2, 3, 4], [5, 6]), step([1, 2, 3, 4, 5, 6, 7, 7], [8])),
        [([1, 2, 3, 4, 5, 6, 7, 7, 8], [0, 0, 1, 0, 1, 1, 0, 0, 1])],
    ),
    "a step in a rewritten context": (
        atif(step([1, 2], [3]), step([1, 9], [5]), step([1, 2, 3, 4], [6]), step([1, 2], [3], is_copied_context=True)),
        [([1, 2, 3, 4, 6], [0, 0, 1, 0, 1]), ([1, 9, 5], [0, 0, 1])],
    ),
    "a tree": (
        {"nodes": EPISODE},
        [
            ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 1, 0, 0, 1]),
            ([1, 2, 3, 4, 5, 9, 7, 6], [0, 0, 0, 0, 0, 0, 1, 1]),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_answer_of_a_trace_is_supervised_once_after_exactly_its_prompt(name: str) -> None:
    row, documents = CASES[name]
    calls = read_calls(row)
    assert calls is not None
    found = documents_of(calls)
    assert [(ids.tolist(), mask.tolist()) for ids, mask, _ in found] == documents
    assert sum(len(call.answer) for call in calls) == sum(sum(mask) for _, mask in documents)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ANSWER | {"prompt_token_ids": None}, "a trace without token ids, which docs/traffic.md says how to log"),
        (atif(), "a trace without token ids"),
        (atif(step([1], [2], llm_call_count=2)), "a step of several calls, whose token ids cannot be told apart"),
        (ANSWER | {"prompt_token_ids": [1, 2.5]}, "token ids that are no whole numbers"),
        (logged({"input_ids": None, "text": "q"}, {}), "a trace without token ids"),  # as of a completion
        (logged({"input_ids": [1, "...", 3]}, {}), "token ids that are no whole numbers"),  # of a lower level
        (logged({"image_data": ["a"]}, {}), "a trace with images or videos"),
        (logged({"session_params": {"id": "s"}}, {}), "a logged request that is only the end of its prompt"),
        (logged({"lora_path": ["a"]}, {}), "an answer of an adapter"),
        (ANSWER | {"prompt_token_ids": [1, 2**31]}, "token ids that are no whole numbers"),
        (logged({}, {"output_ids": [5]}), "a logged answer of which tokens are missing, as of one streamed in parts"),
        ({"nodes": [node(7, [1, 2], 1)]}, "a trace in another form: .*IndexError"),
        ({"nodes": [node(None, [1, 2], 1)], "mm_token_type_id_map": {"5": 1}}, "a trace with images or videos"),
        ({"nodes": [{"token_ids": [1, 2, 3], "mask": [False, True, False]}]}, "goes on after the sampled tokens"),
    ],
)
def test_a_trace_that_cannot_be_exact_is_refused_with_the_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConversationRefused, match=reason):
        read_calls(row)


def test_rows_that_go_on_from_others_are_one_document_and_one_split_in_any_order(chat_config: ConfigFor) -> None:
    tokenizer = Run(chat_config([ANSWER], TOKENS)).target.tokenizer
    rows: list[dict[str, Any]] = []
    expected: dict[tuple[int, ...], list[int]] = {}
    for number in range(20):
        ids, mask = [number, 100 + number], [0, 0]
        for step in range(3):
            answer = tokenizer(f"answer {step}", add_special_tokens=False)["input_ids"]
            rows.append(
                ANSWER | {"prompt_token_ids": [*ids], "choices": [{"text": f"answer {step}", "token_ids": answer}]}
            )
            ids, mask = [*ids, *answer, 7, step], [*mask, *[1] * len(answer), 0, 0]
        expected[tuple(ids[:-2])] = mask[:-2]
    # A second continuation of one step, an answer that is logged twice, and a row of tokens that looks like a step.
    branch = [0, 100, *tokenizer("answer 0", add_special_tokens=False)["input_ids"], *[9] * 20]
    rows += [
        logged({"input_ids": branch}, {}),
        rows[3],
        {"input_ids": [*branch, 1], "loss_mask": [0] * len(branch) + [1]},
    ]
    expected |= {(*branch, 4, 5): [0] * len(branch) + [1, 1], (*branch, 1): [0] * len(branch) + [1]}
    config = chat_config(rows[::-1], TOKENS, "prompts.validation_fraction=0.5")
    report = prepare_prompts(Run(config))
    found = {tuple(ids): mask for parts in read_output(config).values() for _, ids, mask in parts}
    assert found == expected and len(report.refused) == 0
    assert (report.counts["items"], report.counts["joined"], report.counts["copies"]) == (21, 42, 0)
    expected_by_plan = expected_documents(config.prompts, 0, tokenizer)
    assert expected_by_plan is not None and expected_by_plan.documents > 20


def test_traces_of_another_tokenizer_stop_the_command_though_some_have_no_text(chat_config: ConfigFor) -> None:
    asked = {"source": "user", "message": "another question"}
    others = atif(step([1, 2], [3])) | {"steps": [asked, step([1, 2], [3])]}
    rows = [ANSWER | {"prompt_token_ids": [i], "choices": [{"text": "no", "token_ids": [3]}]} for i in range(9)]
    for refused, num_refused in ((rows, 9), ([others, others], 2)):
        with pytest.raises(UserError, match=f"of the target's tokenizer, but {num_refused} rows, more than can"):
            prepare_prompts(Run(chat_config([ANSWER, *refused], TOKENS)))


def test_traces_are_prompts_and_those_of_another_tokenizer_or_of_failed_runs_are_refused(
    chat_config: ConfigFor, tmp_path: Path
) -> None:
    run = Run(chat_config([ANSWER], TOKENS))
    texts = [f"the answer {i}" for i in range(30)]
    ids = [run.target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows: list[dict[str, Any]] = [
        {"id": f"row{i}", "nodes": [node(None, [i, 2]), node(0, [3, *each], len(each), text)], "ok": i != 7}
        for i, (each, text) in enumerate(zip(ids, texts, strict=True))
    ]
    rows[5]["nodes"][1]["message"]["content"] = "another answer"
    for drop, num_used in (("false", 29), ("true", 28)):
        config = chat_config(rows, TOKENS, f"prompts.drop_failed={drop}")
        report = prepare_prompts(Run(config))
        written = read_output(config)
        assert written.keys() == {f"row{i}" for i in range(30)} - {"row5"} - ({"row7"} if drop == "true" else set())
        [(_, tokens, mask)] = written["row3"]
        assert (tokens, mask) == ([3, 2, 3, *ids[3]], [0] * 3 + [1] * len(ids[3]))
        assert report.counts["train_supervised_tokens"] > 0 and len(written) == num_used
    (tmp_path / "none.jsonl").write_text(json.dumps(ANSWER | {"prompt_token_ids": None}))
    with pytest.raises(UserError, match=r"without token ids.*every file must hold at least one usable row"):
        prepare_prompts(Run(chat_config(rows, TOKENS, f"prompts.paths=[{tmp_path}/none.jsonl]")))
