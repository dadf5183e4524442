"""Tests that rendering any chat template ends with a prompt, or with an error that names the template."""

from typing import Any

import pytest

from mtptrain.data.chat_template import render_prompt
from tests.conftest import make_tokenizer

QUESTION = [{"role": "user", "content": "hi"}]


def test_a_prompt_ends_where_the_assistant_begins_to_answer() -> None:
    tokenizer = make_tokenizer()
    messages = [*QUESTION, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}]
    prompt = "<user>hi<|end|><assistant>yes<|end|><user>go<|end|><assistant>"
    assert tokenizer.decode(render_prompt(tokenizer, messages)) == prompt


@pytest.mark.parametrize(
    ("template", "has"), [(None, "none"), ({"tool_use": "", "rag": ""}, "only rag, tool_use, no default")]
)
def test_a_prompt_without_a_chat_template_is_refused(template: Any, has: str) -> None:
    with pytest.raises(
        ValueError, match=rf"the tokenizer must have a chat template .* has {has}; choose an instruction-tuned"
    ):
        render_prompt(make_tokenizer(template), QUESTION)


@pytest.mark.parametrize(
    ("template", "reported"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError: "),
        ("{{ messages[5].role }}", "list object has no element 5"),
        ("{% if %}", "Expected an expression"),
        (r"{{ '\ud800' }}", "UnicodeEncodeError: "),
    ],
)
def test_a_template_that_fails_is_refused_by_name(template: str, reported: str) -> None:
    tokenizer = make_tokenizer(template)
    tokenizer.name_or_path = "some/target"
    with pytest.raises(
        ValueError, match=r"^a\.jsonl:3: the messages must be accepted by the chat template of some/target,"
    ) as error:
        render_prompt(tokenizer, QUESTION, "a.jsonl:3")
    assert f"the template reports: {reported}" in str(error.value)


def test_tools_are_rendered_by_the_template_for_tools() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "without", "tool_use": "{{ tools[0].function.name }}{{ messages | tojson }}"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompts = [
        render_prompt(tokenizer, messages) for messages in (QUESTION, [{**QUESTION[0], "weight": "0", "tools": tools}])
    ]
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["without", 'f[{"role": "user", "content": "hi"}]']
