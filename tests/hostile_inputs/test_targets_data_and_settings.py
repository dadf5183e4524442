"""Tests that programs refuse hostile targets, data and settings in one line and write nothing."""

import json

import pytest

from tests.conftest import GENERATION_TEMPLATE, TINY_SETTINGS, run_program
from tests.hostile_inputs.damages import (
    ACCEPTANCE,
    DIGITS,
    GARBAGE,
    NESTED,
    PROMPTS,
    QUESTION,
    TRAIN,
    Damage,
    Place,
    conversations,
    in_config,
    in_target,
    parquet,
    prompts_file,
    refused,
    settings,
    template,
)


def unanswered(place: Place) -> list[str]:
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(20)]
    return conversations(*(json.dumps(row).encode() for row in rows))(place)


def output_file(place: Place) -> list[str]:
    (place.data / "file").write_text("a file")
    return [*prompts_file(QUESTION)(place), f"acceptance.output_dir={place.data}/file"]


CASES: dict[str, tuple[str, Damage, str]] = {
    # Targets
    "config garbage": (PROMPTS, in_target("config.json", GARBAGE), r"\S+/config\.json: must be UTF-8, but is not"),
    "config nested": (PROMPTS, in_target("config.json", NESTED), r"\S+/config\.json: must be JSON, but is nested too"),
    "config digits": (
        PROMPTS,
        in_target("config.json", DIGITS),
        r"\S+/config\.json: must be JSON, but is not \(Exceeds",
    ),
    "no model_type": (PROMPTS, in_config(model_type=...), r"\S+/config\.json: model_type must be one of llama, .*None"),
    "negative size": (
        PROMPTS,
        in_config(hidden_size=-64),
        r"\S+/config\.json: hidden_size must be at least 1, but",
    ),
    "uneven heads": (
        PROMPTS,
        in_config(num_key_value_heads=3),
        r"\S+/config\.json: num_attention_heads must be a multiple of num_key_value_heads",
    ),
    "tokenizer garbage": (PROMPTS, in_target("tokenizer.json", GARBAGE), r"\S+/tokenizer\.json: must be UTF-8, but is"),
    "tokenizer unreadable": (
        PROMPTS,
        in_target("tokenizer.json", b"{}"),
        r"\S+/target: the tokenizer must be readable",
    ),
}
TEMPLATES = {
    "TypeError": "{{ 'a' + 1 }}",
    "ZeroDivisionError": "{{ 1 // 0 }}",
    "OverflowError": "{{ 'a' * 9999999999999999999999 }}",
    "it must render within 1 GiB": "{{ 'a' * 4611686018427387904 }}",
}
for kind, text in TEMPLATES.items():
    CASES[kind] = (PROMPTS, template(text), rf"target\.path: the chat template of \S+/target must .* reports: {kind}")
CASES |= {
    # Data
    "data nested": (PROMPTS, conversations(NESTED), r"\S+/chats\.jsonl:1: must be JSON, but is nested too deep"),
    "data digits": (PROMPTS, conversations(DIGITS), r"\S+/chats\.jsonl:1: must be JSON, .*Exceeds the limit"),
    "parquet flipped": (PROMPTS, parquet(9, True), r"\S+/chats\.parquet: must be"),
    "parquet without rows": (PROMPTS, parquet(0, False), r"\S+/chats\.parquet: must be a parquet file with rows"),
    "no answers": (
        PROMPTS,
        unanswered,
        r"prompts\.paths: conversations must have an assistant turn to learn from",
    ),
    # Settings, and prompts of mtptrain acceptance
    "seed too large": (PROMPTS, settings("seed=99999999999999999999"), "seed: must "),
    "unknown head.name": (PROMPTS, settings("head.name=foo"), r"head\.name: must be one of mtp, .*, but is 'foo'"),
    "batch too large": (
        PROMPTS,
        settings("train.batch_tokens=99999999999999999999"),
        r"train\.batch_tokens: must be below 2\*\*63, but is 9",
    ),
    "seed negative": (PROMPTS, settings("seed=-1"), "seed: must "),
    "layer too wide": (
        TRAIN,
        settings("head.intermediate_size=99999999999"),
        r"head\.intermediate_size: must be null or a number from 1 to 1,048,576, but is 99999999999; correct it",
    ),
    "empty path": (
        PROMPTS,
        settings("prompts.paths=['']"),
        r"prompts\.paths: must be .*, but is \[''\];",
    ),
    "nested paths": (
        PROMPTS,
        settings("prompts.paths=[[a]]"),
        r"prompts\.paths: must be .*\[\['a'\]\];",
    ),
    "empty run_dir": (PROMPTS, settings("run_dir="), "run_dir: must "),
    "drafts beyond the context": (
        ACCEPTANCE,
        lambda place: [*prompts_file(QUESTION)(place), "acceptance.num_speculative_tokens=5000"],
        r"acceptance\.num_speculative_tokens: must be at most \d+, .* context of 512 tokens, but is 5000",
    ),
    "output_dir is a file": (ACCEPTANCE, output_file, r"acceptance\.output_dir: must name a directory, but is"),
    "prompts not UTF-8": (ACCEPTANCE, prompts_file(GARBAGE), r"\S+prompts\.jsonl.*UTF-8"),
    "prompt without tokens": (
        ACCEPTANCE,
        prompts_file(b'{"id": "a", "input_ids": []}'),
        r"\S+prompts\.jsonl: id a: must hold at least one token, but is empty",
    ),
    "prompt too long": (
        ACCEPTANCE,
        prompts_file(b'{"id": "b", "input_ids": [%s1]}' % (b"1, " * 600)),
        r"\S+prompts\.jsonl: id b: prompt and answer must fit",
    ),
    "prompts nested": (ACCEPTANCE, prompts_file(NESTED), r"\S+prompts\.jsonl.*nested too deep"),
    "prompts surrogate": (ACCEPTANCE, prompts_file(rb'{"id": "a", "text": "\ud800"}'), r"\S+prompts\.jsonl.*surrogate"),
    "category surrogate": (
        ACCEPTANCE,
        prompts_file(rb'{"id": "a", "text": "hi", "category": "\ud800"}'),
        r"\S+prompts\.jsonl.*surrogate",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_input_is_refused_in_one_line_and_nothing_is_written(place: Place, case: str) -> None:
    program, damage, message = CASES[case]
    refused(place, program, damage(place), message)


@pytest.mark.parametrize("row", [{"category": "$x_$ \\frac"}, {"category": "<script>"}])
def test_a_category_of_any_text_is_measured_and_a_damaged_report_replaced(place: Place, row: dict[str, str]) -> None:
    (place.directory / "run/acceptance").mkdir(parents=True)
    (place.directory / "run/acceptance/report.json").write_bytes(NESTED)
    provenance = {"argv": [], "git_revision": None, "python": "3.11", "packages": {}}
    (place.directory / "run/acceptance/provenance.json").write_text(json.dumps(provenance))
    content = json.dumps({"id": "a", "text": "hi", **row}).encode()
    overrides = [*prompts_file(content)(place), "acceptance.top_p=1e-9", "acceptance.temperature=1.0"]
    ran = run_program(
        ACCEPTANCE, *TINY_SETTINGS, f"target.path={place.target}", f"run_dir={place.directory}/run", *overrides
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    report = json.loads((place.directory / "run/acceptance/report.json").read_text())
    assert report["prompts"] == 1 and (place.directory / "run/acceptance/report.html").is_file()


def test_a_chat_template_that_never_ends_is_stopped(place: Place) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + GENERATION_TEMPLATE
    refused(place, PROMPTS, template(loop)(place), r"the chat template of \S+/target must render a conversation within")
