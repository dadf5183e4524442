"""Tests that rendering any chat template ends with a prompt, or with an error that names the template."""

import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from mtptrain.data import chat_template
from mtptrain.data.chat_template import EndlessTemplate, render_prompt, render_text
from tests.conftest import make_tokenizer

QUESTION = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_prompt_ends_where_the_assistant_begins_to_answer() -> None:
    tokenizer = make_tokenizer()
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "go"},
    ]
    assert (
        tokenizer.decode(render_prompt(tokenizer, messages))
        == "<user>hi<|end|><assistant>yes<|end|><user>go<|end|><assistant>"
    )


@pytest.mark.parametrize(
    ("template", "has"), [(None, "none"), ({"tool_use": "", "rag": ""}, "only rag, tool_use, no default")]
)
def test_a_prompt_without_a_chat_template_is_refused(template: Any, has: str) -> None:
    with pytest.raises(
        ValueError, match=rf"the tokenizer must have a chat template .* has {has}; choose an instruction-tuned"
    ):
        render_prompt(make_tokenizer(template), [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "reported"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{{ 'a' * 4611686018427387904 }}", "it must render within 1 GiB of memory; correct"),
        ("{{ 9 ** 9 ** 9 }}", "it must not compute powers"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError: "),
        ("{{ range(1000000000) }}", "OverflowError: Range too big"),
        ("{{ messages[5].role }}", "list object has no element 5"),
        ("{% if %}", "Expected an expression"),
        (r"{{ '\ud800' }}", "UnicodeEncodeError: "),
        (DOUBLED, "it must render"),
        ("{{ ('ab' * 100000) | replace('a', 'b' * 100000) }}", "it must render within 1 GiB of memory"),
        ("{{ '{:>9000000000}'.format('a') }}", "it must render within 1 GiB of memory"),
        ("{{ 'ab' * 10000000 }}", "it must render at most 16,777,216 characters, but renders 20,000,000"),
    ],
)
def test_a_template_that_fails_is_refused_by_name(template: str, reported: str) -> None:
    tokenizer = make_tokenizer(template)
    tokenizer.name_or_path = "some/target"
    with pytest.raises(TemplateError):
        render_text(tokenizer, QUESTION)
    with pytest.raises(
        ValueError, match=r"^a\.jsonl:3: the messages must be accepted by the chat template of some/target,"
    ) as error:
        render_prompt(tokenizer, QUESTION, "a.jsonl:3")
    assert f"the template reports: {reported}" in str(error.value)


def test_the_memory_is_limited_in_a_thread_too_and_only_while_a_template_renders(thread: ThreadPoolExecutor) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    rendered = [thread.submit(render_text, make_tokenizer(DOUBLED), QUESTION) for _ in range(2)]
    for each in rendered:
        with pytest.raises(TemplateError, match="it must render within 1 GiB of memory"):
            each.result()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(chat_template.LIMIT_BYTES * 3 // 2)) > chat_template.LIMIT_BYTES


def test_stars_outside_of_computations_are_rendered() -> None:
    template = "{% macro word(a) %}{{ a }}{% endmacro %}**{{ word(**{'a': 'b ** c'}) }}**"
    assert render_text(make_tokenizer(template), QUESTION) == "**b ** c**"


def test_a_template_that_never_ends_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.1)
    tokenizer = make_tokenizer(ENDLESS)
    tokenizer.name_or_path = "some/target"
    with pytest.raises(
        EndlessTemplate,
        match=r"^a\.jsonl:3: the chat template of some/target must render .* within 0\.1 s of CPU time, .* begins with "
        r"user: 'hi' \(messages: 1\);",
    ):
        render_prompt(tokenizer, QUESTION, "a.jsonl:3")
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL


def test_a_template_that_never_ends_is_refused_in_any_thread(
    monkeypatch: pytest.MonkeyPatch, thread: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.1)
    tokenizer = make_tokenizer("{% if messages[0].content == 'hi' %}" + ENDLESS + "{% endif %}done")
    tokenizer.name_or_path = "some/target"
    with pytest.raises(EndlessTemplate, match=r"^a\.jsonl:3: the chat template of some/target must render .* 0\.1 s"):
        thread.submit(render_prompt, tokenizer, QUESTION, "a.jsonl:3").result()
    rendered = thread.submit(render_text, tokenizer, [{"role": "user", "content": "go"}])
    assert rendered.result() == "done", "the same thread goes on"


def work(cpu_s: float) -> None:
    """Uses CPU time of this thread. An exception that another thread raises in this one ends it."""
    begun = time.thread_time()
    while time.thread_time() < begun + cpu_s:
        pass


def test_the_limit_of_a_thread_ends_with_its_rendering(
    monkeypatch: pytest.MonkeyPatch, thread: ThreadPoolExecutor
) -> None:
    monkeypatch.setattr(chat_template, "LIMIT_S", 0.1)

    def render_and_work() -> str:
        text = render_text(make_tokenizer("done"), QUESTION)
        work(0.3)
        return text

    assert thread.submit(render_and_work).result() == "done"


def test_a_limit_that_is_reached_while_a_rendering_ends_is_raised_in_it_and_not_later(
    monkeypatch: pytest.MonkeyPatch, thread: ThreadPoolExecutor
) -> None:
    raise_in = chat_template._raise_in

    def raise_late(thread_id: int, error: type[Exception] | None) -> None:
        """Raises the error when the rendering, of about 0.1 s, is over."""
        time.sleep(0.5 if error else 0)
        raise_in(thread_id, error)

    monkeypatch.setattr(chat_template, "LIMIT_S", 0.005)
    monkeypatch.setattr(chat_template, "_raise_in", raise_late)
    tokenizer = make_tokenizer("{% for a in range(20) %}{% for b in range(99999) %}{% endfor %}{% endfor %}done")

    def render_and_work() -> None:
        with pytest.raises(EndlessTemplate):
            render_text(tokenizer, QUESTION)
        work(0.3)

    thread.submit(render_and_work).result()


def test_a_template_for_tools_is_limited_like_the_other_one() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ 9 ** 9 ** 9 }}"}
    with pytest.raises(TemplateError, match="must not compute powers"):
        render_text(tokenizer, [{**QUESTION[0], "tools": [{"type": "function", "function": {"name": "f"}}]}])
