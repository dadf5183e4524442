"""Tests that every answer is supervised once, after the prompt that a server sends, in the fewest texts."""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.renderings import encode_conversations, render_conversation
from mtptrain.data.conversation import Message
from tests.data_prep.templates import (
    BLOCK,
    CHATML,
    CLOSED,
    LAST_ANSWER,
    LLAMA3,
    NO_PROMPT,
    QWEN3,
    QWEN3_BLOCKS,
    chat,
    generated_parts,
    refusal,
    tokenizer_of,
)


def content_alone(message: Message) -> str:
    return message["content"] + "<|im_end|>"


def reasoning_and_content(message: Message) -> str:
    return f"<think>\n{message.get('reasoning_content', '')}\n</think>\n\n{message['content']}<|im_end|>"


def reasoning_if_any(message: Message) -> str:
    reasoning = message.get("reasoning_content")
    return (f"<think>{reasoning}</think>" if reasoning else "") + content_alone(message)


FAMILIES: dict[str, tuple[str, Callable[[Message], str]]] = {
    "chatml": (CHATML, content_alone),
    "llama3": (LLAMA3, content_alone),
    "closed": (CLOSED, content_alone),
    "qwen3": (QWEN3, reasoning_and_content),
    "qwen3 with blocks": (QWEN3_BLOCKS, reasoning_and_content),
    "last answer": (LAST_ANSWER, reasoning_if_any),
}
"""Templates by name, each with a function that returns what the assistant generates for a message."""


TOKENIZERS = {name: tokenizer_of(template) for name, (template, _) in FAMILIES.items()}


def without_reasoning(messages: Sequence[Message]) -> list[Message]:
    return [{key: text for key, text in message.items() if key != "reasoning_content"} for message in messages]


def generated_answers(family: str, messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Returns the prompt and the text that an engine generates for each assistant turn.

    If the turn begins with an empty think block, the prompt includes it, because the target does not generate it.
    """
    found = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = TOKENIZERS[family].apply_chat_template(
                list(messages[:i]), add_generation_prompt=True, tokenize=False
            )
            whole = str(prompt) + FAMILIES[family][1](message)
            start = len(str(prompt)) + (len(BLOCK) if whole.startswith(BLOCK, len(str(prompt))) else 0)
            found.append((whole[:start], whole[start:]))
    return found


_words = st.text(st.sampled_from("ab de\n0.😀é"), min_size=1, max_size=12).map(str.strip).filter(bool)
_message = st.builds(
    lambda role, content, reasoning: {
        "role": role,
        "content": content,
        **({"reasoning_content": reasoning} if role == "assistant" and reasoning else {}),
    },
    st.sampled_from(["assistant", "assistant", "user", "tool"]),
    _words,
    st.one_of(st.just(""), _words),
)
_conversations = st.builds(
    lambda first, rest, answer: [{"role": "user", "content": first}, *rest, {**answer, "role": "assistant"}],
    _words,
    st.lists(_message, max_size=7),
    _message,
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(_conversations, st.sampled_from([[], [{"role": "user", "content": "bye"}]]))
def test_exactly_one_document_supervises_each_answer_token_for_token_after_the_prompt_of_serving(
    family: str, conversation: list[Message], rest: list[Message]
) -> None:
    tokenizer, messages = TOKENIZERS[family], [*conversation, *rest]
    if FAMILIES[family][1] is content_alone:
        messages = without_reasoning(messages)
    [item] = encode_conversations(tokenizer, [render_conversation(tokenizer, messages)])
    encodings = item.encodings
    if FAMILIES[family][1] is content_alone:  # nothing rewrites it
        assert [encoding.turn for encoding in encodings] == [0]
        assert tokenizer.decode(encodings[0].input_ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    supervised = [np.zeros_like(encoding.loss_mask) for encoding in encodings]
    for prompt, answer in generated_answers(family, messages):
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        whole = tokenizer(prompt + answer, add_special_tokens=False)
        whole_ids = whole["input_ids"]
        start, end = whole.char_to_token(len(prompt)), len(whole_ids)
        # The demo target's tokenizer divides the line breaks at the end of a block otherwise once text follows.
        assert whole_ids[:start] == prompt_ids or prompt.endswith(BLOCK)
        holders = [
            i
            for i, encoding in enumerate(encodings)
            if encoding.input_ids[:end].tolist() == whole_ids and encoding.loss_mask[start:end].all()
        ]
        assert len(holders) == 1
        supervised[holders[0]][start:end] += 1
    for encoding, expected in zip(encodings, supervised, strict=True):
        assert encoding.loss_mask.tolist() == expected.tolist()
    answers = [prompt + answer for prompt, answer in generated_answers(family, messages)]
    assert (sum(encoding.answers for encoding in encodings), item.answers_left_out) == (len(answers), 0)
    # No smaller set of texts holds every answer.
    texts = [str(tokenizer.apply_chat_template(messages, tokenize=False)), *answers]
    holds = [{i for i, answer in enumerate(answers) if text.startswith(answer)} for text in texts]
    fewer = combinations(holds, len(encodings) - 1)
    assert not any(len(set[int]().union(*some)) == len(answers) for some in fewer)
    turns = [encoding.turn for encoding in encodings]
    assert turns[0] == 0 and turns[1:] == sorted({*turns[1:]}, reverse=True)


def test_the_template_for_tools_says_what_the_assistant_generates_where_there_are_tools() -> None:
    tokenizer = tokenizer_of(QWEN3)
    tokenizer.chat_template = {"default": QWEN3, "tool_use": "{{ tools[0].function.name }}" + QWEN3_BLOCKS}
    [question, answer] = chat("1?", "odd|one")
    with_tools: Message = {**question, "tools": [{"function": {"name": "weather"}}]}
    for first, end in ((question, "\n"), (with_tools, "")):
        [rendering] = render_conversation(tokenizer, [first, answer]).renderings
        [(start, stop)] = rendering.spans
        assert rendering.text[start:stop] == f"<think>\nodd\n</think>\n\none<|im_end|>{end}"


def test_reasoning_may_stand_in_the_content_and_a_last_question_is_left_off_where_it_rewrites_the_answers() -> None:
    messages = chat("1?", "odd|one", "2?", "even|two", "bye")
    renderings = render_conversation(TOKENIZERS["qwen3"], messages)
    assert renderings == render_conversation(TOKENIZERS["qwen3"], messages[:-1])
    inside = chat("1?", "<think>\nodd\n</think>\n\none", "2?", "<think>\neven\n</think>\n\ntwo")
    assert renderings == render_conversation(TOKENIZERS["qwen3"], inside)
    [plain] = render_conversation(TOKENIZERS["chatml"], without_reasoning(messages)).renderings
    assert plain.text.endswith("bye<|im_end|>\n")


def test_an_answer_before_the_first_question_is_left_out_if_the_template_cannot_render_an_empty_history() -> None:
    needs_message, greeting = "{% if messages[0].role == 'system' %}{% endif %}", chat("", "Hello")[1]
    for template, parts in ((CHATML, ["one", "two"]), (QWEN3, ["two", "one"]), (QWEN3_BLOCKS, ["two", "one"])):
        messages = [greeting, *chat("1?", "one", "2?", "two")]
        rendered = generated_parts(needs_message + template, messages)
        assert [part.strip() for text in rendered for part in text] == [part + "<|im_end|>" for part in parts]
        assert refusal(needs_message + template, [greeting]) == NO_PROMPT
    assert render_conversation(tokenizer_of(needs_message + CHATML), messages).trained == 3


def test_an_answer_that_quotes_the_prompt_is_left_out_where_its_beginning_cannot_be_told() -> None:
    messages = chat("1?", "odd|one", "2?", "two")
    messages[3]["content"] = "<|im_start|>assistant\ntwo"
    rendered = render_conversation(TOKENIZERS["last answer"], messages, is_generated=True)
    [rendering] = rendered.renderings
    [(start, end)] = rendering.spans
    assert rendering.text[start:end] == "<think>odd</think>one<|im_end|>\n"
    assert (rendering.answers, rendered.trained) == (1, 2)


def test_two_answers_with_nothing_between_them_stand_in_documents_of_their_own() -> None:
    messages = [*chat("1?", "one"), chat("", "two")[1], *chat("2?", "three")]
    for begin, end in (("{% generation %}", "{% endgeneration %}"), ("", "")):
        answer = begin + "{{ m.content + '<|im_end|>' }}" + end
        template = "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}" + answer
        parts = generated_parts(template + "{% endif %}{% endfor %}", messages)
        assert parts == [["two<|im_end|>", "three<|im_end|>"], ["one<|im_end|>"]]
