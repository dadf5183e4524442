"""Tests which answers are supervised, refused or left out because of how the chat template renders them."""

from data_prep.renderings import render_conversation
from mtptrain.data.conversation import Message
from tests.conftest import GENERATION_TEMPLATE
from tests.data_prep.templates import (
    CHATML,
    CLOSED,
    NO_PROMPT,
    QWEN3,
    QWEN3_BLOCKS,
    chat,
    generated_parts,
    refusal,
    tokenizer_of,
)

# Like DeepSeek-R1's template, this removes reasoning from every answer, but its prompt begins one.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[User]' + m.content }}{% else %}"
    "{{ '[Assistant]' }}{% generation %}{{ m.content.split('</think>')[-1] + eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[Assistant]<think>\n' }}{% endif %}"
)


def test_an_answer_after_a_prompt_that_no_server_sends_is_refused_with_and_without_blocks() -> None:
    for template in (R1, R1.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
        for answer in ("<think>\nodd\n</think>\n\none", "one"):
            assert refusal(template, chat("1?", answer)) == NO_PROMPT


def test_answers_in_blocks_are_left_out_where_the_prompt_does_not_precede_them() -> None:
    template = GENERATION_TEMPLATE.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
    messages = chat("1?", "one", "2?", "<think>even</think>two", "3?", "three")
    assert generated_parts(template, messages) == [["even</think>two<|end|>"]]
    assert render_conversation(tokenizer_of(template), messages).trained == 3


def test_a_block_that_holds_the_end_of_the_prompt_supervises_the_answer_alone() -> None:
    template = CHATML.replace("{{ '<|im_start|>' +", "{% generation %}{{ '<|im_start|>' +").replace(
        "'<|im_end|>\n' }}", "'<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    )
    assert generated_parts(template, chat("1?", "one")) == [["one<|im_end|>"]]


CHANGED = "an answer or reasoning that the chat template does not render as it is written"
FORCED = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
"""Its prompt begins the reasoning, which is in the content of an answer."""
FILLED = CHATML.replace(
    "'\n' + m.content",
    "'\n' + ('<think>' + (m.reasoning_content or '') + '</think>' if m.role[0] == 'a' else '') + m.content",
)
"""It always renders reasoning, which may be empty."""
CLOSING = FILLED.replace("assistant\n'", "assistant\n<think>'")
"""Its prompt begins the reasoning, which may be empty."""
CLOSED_BLOCK = CHATML.replace("assistant\n'", "assistant\n<think></think>'").replace(
    "'\n' + m.content", "'\n' + ('<think></think>' if m.role[0] == 'a' else '') + m.content"
)
ALWAYS_OPEN = CHATML.replace("assistant\n'", "assistant\n<think>'").replace(
    "'\n' + m.content", "'\n' + ('<think>' if m.role[0] == 'a' else '') + m.content"
)


def tags(rendered: str, written: str) -> str:
    found = (text.replace("(", "<think>").replace(")", "</think>") for text in (rendered, written))
    return f"an answer that the chat template renders with other think tags: {' instead of '.join(found)}"


REFUSED = [
    (CHATML, "odd|one", CHANGED),
    (CHATML, "", "an answer without text"),
    (CHATML, " \n", "an answer without text"),
    (CHATML, "odd</think>one", tags(")", "( )")),
    (CHATML, "<think>odd", tags("(", "(")),
    (FILLED, "<think>odd</think>one", tags("( ) ( )", "( )")),
    (ALWAYS_OPEN, "<think>odd</think>one", tags("( ( )", "( )")),
    (ALWAYS_OPEN, "one", tags("(", "none")),
    (ALWAYS_OPEN.replace("m.content", "m.content.replace('<think>', '')"), "one <think>", tags("(", "(")),
    (CLOSED_BLOCK, "<think>odd</think>one", tags("( )", "( )")),
    (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), "<think>odd</think>one", CHANGED),
    (
        CHATML.replace("m.content", "m.content.replace('<think></think>', '')"),
        "<think></think>one",
        tags("none", "( )"),
    ),
    (CHATML.replace("m.content", "m.content[:2]"), "one", CHANGED),
    (CHATML.replace("m.content", "m.content.split() | join(' ')"), "def f():\n    return 9", CHANGED),
    (FILLED, "odd<|im_end|>|one", "an answer with the special token <|im_end|> in its text"),
    (FILLED, "odd</think>|one", "reasoning with <think> or </think> in its text"),
]


def test_an_answer_that_cannot_be_supervised_as_it_is_written_is_refused_unless_the_target_generated_it() -> None:
    for template, answer, reason in REFUSED:
        assert refusal(template, chat("1?", answer)) == reason
    generated = chat("1?", "one<|im_end|>")
    assert len(render_conversation(tokenizer_of(CHATML), generated, is_generated=True).renderings) == 1


SUPERVISED = [
    (CHATML, "<think>odd</think>one", "<think>odd</think>one", 0),
    (CHATML, "begin it with <think>, please", "begin it with <think>, please", 0),
    (CHATML.replace("m.content", "m.content | trim"), "  one\n", "one", 0),
    (FORCED, "<think>\nodd</think>one", "odd</think>one", 0),
    (ALWAYS_OPEN, "odd</think>one", "odd</think>one", 0),
    (FILLED, "odd|one", "<think>odd</think>one", 0),
    (FILLED, "one", "one", 1),
    (CLOSING, "odd|one", "odd</think>one", 0),
    (CLOSING, "one", "one", 1),
    (CHATML.replace("m.content", "m.content + (' (end)' if m.role[0] == 'a' else '')"), "one", "one (end)", 1),
    (CHATML.replace("m.content", "m.content + (m.content if m.role[0] == 'a' else '')"), "one", "oneone", 1),
    (CLOSED_BLOCK, "one", "one", 0),
    (CLOSED_BLOCK, "write <think> and </think>", "write <think> and </think>", 0),
    (FILLED, "write <think> and </think>", "<think></think>write <think> and </think>", 0),
]


def test_an_answer_is_supervised_as_the_target_generates_it() -> None:
    for template, answer, expected, inserted in SUPERVISED:
        messages = chat("1?", answer)
        assert [part.strip() for [part] in generated_parts(template, messages)] == [f"{expected}<|im_end|>"]
        assert render_conversation(tokenizer_of(template), messages).inserted == inserted


def test_an_end_of_text_token_is_supervised_where_it_is_what_ends_a_turn() -> None:
    for template, end, num_texts in (
        (CLOSED, "<|im_end|>\n", 1),
        (CLOSED.replace("<|im_end|>", "[eot]"), "[eot]\n", 1),
        (CHATML.replace("<|im_end|>\n'", "<|im_end|>' + eos_token"), "<|im_end|><|endoftext|>", 1),
        (CLOSED.replace("<|im_end|>\n", ""), "<|endoftext|>", 2),
    ):
        texts = generated_parts(template, chat("1?", "one", "2?", "two"))
        assert len(texts) == num_texts
        assert sorted(part for text in texts for part in text) == [f"one{end}", f"two{end}"]


def test_an_answer_that_is_not_to_be_trained_is_history_alone() -> None:
    messages = chat("1?", "bad", "2?", "two", "3?", "")
    for turn in (1, 5):
        messages[turn]["weight"] = "0"
    for template in (CHATML, QWEN3, QWEN3_BLOCKS):
        rendered = render_conversation(tokenizer_of(template), messages)
        assert "bad" in rendered.renderings[0].text
        [[part]] = generated_parts(template, messages)
        assert part.strip().endswith("two<|im_end|>")
        assert (rendered.renderings[0].answers, rendered.untrained, rendered.trained) == (1, 2, 1)
        assert refusal(template, messages[:2]) == "no assistant turn that is to be trained"


def said(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in turns]


def test_a_prompt_that_the_template_drops_refuses_the_conversation_although_its_text_may_occur_elsewhere() -> None:
    for role, messages in (
        ("system", said(("system", "Be  brief."), ("user", "1?"), ("assistant", "one"))),
        ("developer", said(("developer", "Be  brief."), ("user", "1?"), ("assistant", "one"))),
        ("system", said(("system", "Be nice."), ("user", "Be nice. hi"), ("assistant", "hello"))),
        ("tool", [*chat("1?", "one"), *said(("tool", "4"), ("user", "is 4 even? 4"), ("assistant", "yes"))]),
    ):
        template = CHATML.replace("for m in messages", f"for m in messages if m.role != '{role}'")
        assert refusal(template, messages) == f"a {role} message that the chat template does not render"
        assert len(render_conversation(tokenizer_of(CHATML), messages).renderings) == 1
    # An answer with more white space does not take the place of a longer prompt.
    assert generated_parts(CHATML, chat("0000", "00  0")) == [["00  0<|im_end|>\n"]]
