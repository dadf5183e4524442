"""Tests that rendering any chat template ends with a prompt, or with an error that names the template."""

from typing import Any

import pytest

from mtptrain.data.chat_template import prompt_text, render_prompt
from mtptrain.utils.errors import UserError
from tests.conftest import make_tokenizer

QUESTION = [{"role": "user", "content": "hi"}]


def test_a_template_that_is_missing_or_fails_is_refused_by_name() -> None:
    lacks = "the tokenizer must have a chat template to render messages, but that of some/target has"
    rejected = (
        r"^a\.jsonl:3: the messages must be accepted by the chat template of some/target, but the template reports:"
    )
    cases: list[tuple[Any, str]] = [
        (None, f"{lacks} none; choose an instruction-tuned"),
        ("", f"{lacks} an empty one; choose"),
        ({"tool_use": "", "rag": ""}, f"{lacks} only rag, tool_use, no default; choose"),
        ("{{ raise_exception('roles must alternate') }}", f"{rejected} roles must alternate"),
        ("{{ 1 // 0 }}", f"{rejected} ZeroDivisionError: "),
        ("{% if %}", "^some/target: the chat template, .* must be valid, but Jinja reports in line 1: Expected"),
        (r"{{ '\ud800' }}", f"{rejected} UnicodeEncodeError: "),
    ]
    for template, message in cases:
        tokenizer = make_tokenizer(template)
        tokenizer.name_or_path = "some/target"
        with pytest.raises(ValueError, match=message):
            render_prompt(tokenizer, QUESTION, "a.jsonl:3")


def test_a_developer_is_the_system_for_a_template_that_does_not_know_that_role_as_in_servers() -> None:
    tokenizer = make_tokenizer()
    developer, system = ([{"role": role, "content": "b"}, *QUESTION] for role in ("developer", "system"))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert prompt_text(tokenizer, developer) == prompt_text(tokenizer, system)
    answered = [*QUESTION, {"role": "assistant", "content": "a"}]
    scattered = [[*answered, *developer], [system[0], *developer], [developer[0], *answered, *system]]
    for messages in scattered:
        with pytest.raises(
            UserError, match=r"it does not know the role developer, .* \+prompts\.roles\.developer=system"
        ):
            prompt_text(tokenizer, messages)
    assert prompt_text(tokenizer, [*answered, *system]).endswith("<assistant>a<system>b<user>hi")
    tokenizer.chat_template += "{# 'developer' #}"
    assert prompt_text(tokenizer, developer).startswith("<developer>b")
    assert all("<developer>b<user>hi" in prompt_text(tokenizer, messages) for messages in scattered[:2])


def test_a_line_that_vllm_leaves_out_of_system_prompts_is_refused() -> None:
    system = {"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe brief."}
    with pytest.raises(UserError, match=r"vLLM leaves out the line of x-anthropic-billing-header .*; remove it"):
        prompt_text(make_tokenizer(), [system, *QUESTION])


def test_tools_are_rendered_by_the_template_for_tools() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "without", "tool_use": "{{ tools[0].function.name }}{{ messages | tojson }}"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompts = [
        render_prompt(tokenizer, messages) for messages in (QUESTION, [{**QUESTION[0], "weight": "0", "tools": tools}])
    ]
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["without", 'f[{"role": "user", "content": "hi"}]']
