"""Tests that a chat template is used in the mode that `prompts.template_kwargs` choose."""

import pytest

from mtptrain.target.files import set_template_kwargs
from mtptrain.utils.errors import UserError
from tests.conftest import make_tokenizer

QUESTION = [{"role": "user", "content": "hi"}]
VALUES = [True, None, 0.5, 'it\'s "odd" \\ \n {{ x }} é 😀', ["a", {"b": None}], {"c": [1, False]}]


def test_a_template_reads_the_values_as_a_server_passes_them() -> None:
    template = "\n{% macro shown() %}{{ mode | tojson }}{% endmacro %}{% for m in messages %}{{ shown() }}{% endfor %}"
    for value in VALUES:
        passed = make_tokenizer(template).apply_chat_template(QUESTION, tokenize=False, mode=value)
        tokenizer = make_tokenizer(template)
        set_template_kwargs(tokenizer, {})
        assert tokenizer.chat_template == template
        set_template_kwargs(tokenizer, {"mode": value})
        assert tokenizer.apply_chat_template(QUESTION, tokenize=False) == passed
    tokenizer.chat_template = {"default": "{{ mode }}", "tool_use": "{{ mode }}{{ tools }}"}
    set_template_kwargs(tokenizer, {"mode": "x"})  # each of several templates gets them
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False) == "x"
    assert str(tokenizer.apply_chat_template(QUESTION, tools=[{"n": 1}], tokenize=False)).startswith("x[")


def test_names_that_are_no_variables_of_the_template_are_refused() -> None:
    template = (
        "{{ messages }}{% for m in messages if m.role is defined %}{% set x = m.role | upper %}{% break %}"
        "{% generation %}{{ x if mode else x }}{% endgeneration %}{% endfor %}"
    )
    set_template_kwargs(make_tokenizer(template), {"mode": 1})
    for given in (template, None):
        for name in ("model", "messages", "role", "upper", "if", "defined", "else", "set"):
            with pytest.raises(UserError, match=rf"template_kwargs: must name variables that .* but names {name};"):
                set_template_kwargs(make_tokenizer(given), {name: 1})
    with pytest.raises(UserError, match=r"the chat template of .* must be valid, but Jinja reports TemplateSyntaxEr"):
        set_template_kwargs(make_tokenizer("{{ 'a }}"), {"enable_thinking": False})
