"""Tests that every answer is supervised once, after the prompt that a server sends, in the fewest texts."""

from collections.abc import Callable, Sequence
from itertools import combinations, groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data_prep.renderings import check_chat_template, encode_conversations, render_conversation
from mtptrain.data.conversation import Message
from tests.conftest import GENERATION_TEMPLATE, make_tokenizer
from tests.data_prep.templates import (
    BLOCK,
    CHATML,
    CLOSED,
    LLAMA3,
    NO_PROMPT,
    QWEN3,
    chat,
    generated_parts,
    refusal,
    tokenizer_of,
)


def content_alone(message: Message) -> str:
    return message["content"] + "<|im_end|>"


def reasoning_and_content(message: Message) -> str:
    return f"<think>\n{message.get('reasoning_content', '')}\n</think>\n\n{message['content']}<|im_end|>"


FAMILIES: dict[str, tuple[str, Callable[[Message], str]]] = {
    "chatml": (CHATML, content_alone),
    "llama3": (LLAMA3, content_alone),
    "closed": (CLOSED, content_alone),
    "qwen3": (QWEN3, reasoning_and_content),
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
_asked = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": _words})
_said = st.fixed_dictionaries({"role": st.just("assistant"), "content": _words}, optional={"reasoning_content": _words})
_conversations = st.builds(
    lambda question, rest, answer: [
        {**question, "role": "user"},
        # Qwen3's template renders the first of two answers in a row otherwise before the second one.
        *(message for message, after in pairwise([*rest, answer]) if "assistant" != message["role"] != after["role"]),
        answer,
    ],
    _asked,
    st.lists(_asked | _said, max_size=7),
    _said,
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
        begun = [i for i, each in enumerate(encodings) if each.input_ids[:end].tolist() == whole_ids]
        [holder] = [i for i in begun if encodings[i].loss_mask[start:end].all()]
        supervised[holder][start:end] += 1
    for encoding, expected in zip(encodings, supervised, strict=True):
        assert encoding.loss_mask.tolist() == expected.tolist()
    answers = [prompt + answer for prompt, answer in generated_answers(family, messages)]
    assert (sum(encoding.answers for encoding in encodings), item.counts["answers_left_out"]) == (len(answers), 0)
    # No smaller set of texts holds every answer.
    texts = [str(tokenizer.apply_chat_template(messages, tokenize=False)), *answers]
    holds = [{i for i, answer in enumerate(answers) if text.startswith(answer)} for text in texts]
    fewer = combinations(holds, len(encodings) - 1)
    assert not any(len(set[int]().union(*some)) == len(answers) for some in fewer)


def test_reasoning_may_stand_in_the_content_and_a_last_question_is_left_off_where_it_rewrites_the_answers() -> None:
    messages = chat("1?", "odd|one", "2?", "even|two", "bye")
    renderings = render_conversation(TOKENIZERS["qwen3"], messages)
    assert renderings == render_conversation(TOKENIZERS["qwen3"], messages[:-1])
    inside = chat("1?", "<think>\nodd\n</think>\n\none", "2?", "<think>\neven\n</think>\n\ntwo")
    assert renderings == render_conversation(TOKENIZERS["qwen3"], inside)
    [plain] = render_conversation(TOKENIZERS["chatml"], without_reasoning(messages)).renderings
    assert plain.text.endswith("bye<|im_end|>\n")


def test_an_answer_that_the_template_does_not_render_after_its_prompt_is_left_out() -> None:
    needs_message, greeting = "{% if messages[0].role == 'system' %}{% endif %}", chat("", "Hello")[1]
    for template, parts in ((CHATML, ["one", "two"]), (QWEN3, ["two", "one"])):
        messages = [greeting, *chat("1?", "one", "2?", "two")]
        rendered = generated_parts(needs_message + template, messages)
        assert [part.strip() for text in rendered for part in text] == [part + "<|im_end|>" for part in parts]
        assert refusal(needs_message + template, [greeting]) == NO_PROMPT
    assert render_conversation(tokenizer_of(needs_message + CHATML), messages).trained == 3
    # The first of two answers in a row stands otherwise in the prompt of the second than before it.
    messages = [*chat("1?", "one"), chat("", "two")[1], *chat("2?", "three")]
    assert generated_parts(QWEN3, messages) == [["three<|im_end|>\n"], ["one<|im_end|>\n"]]
    # With nothing between them, each of the two stands in a document of its own.
    bare = "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content + '<|im_end|>' }}"
    parts = generated_parts(bare + "{% endfor %}", messages)
    assert parts == [["two<|im_end|>", "three<|im_end|>"], ["one<|im_end|>"]]


# Like DeepSeek-R1's template, this removes reasoning from every answer, but its prompt begins one.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[User]' + m.content }}{% else %}"
    "{{ '[Assistant]' }}{{ m.content.split('</think>')[-1] + eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[Assistant]<think>\n' }}{% endif %}"
)
FILLED = CHATML.replace(
    "'\n' + m.content",
    "'\n' + ('<think>' + (m.reasoning_content or '') + '</think>' if m.role[0] == 'a' else '') + m.content",
)
"""It always renders reasoning, which may be empty."""
CLOSING = FILLED.replace("assistant\n'", "assistant\n<think>'")
"""Its prompt begins the reasoning, which may be empty."""
OPEN = CHATML.replace("assistant\n'", "assistant\n<think>'").replace(
    "'\n' + m.content", "'\n' + ('<think>' if m.role[0] == 'a' else '') + m.content"
)
EMPTY = FILLED.replace("assistant\n'", "assistant\n<think></think>'")
"""Its prompt holds an empty thought."""
CHANGED = "an answer or reasoning that the chat template does not render as it is written"


def test_an_answer_that_cannot_be_supervised_as_it_is_written_is_refused_unless_the_target_generated_it() -> None:
    thoughts = "an answer with {} thoughts, of which the chat template renders {}"
    for template, answer, reason in (
        (R1, "<think>\nodd\n</think>\n\none", NO_PROMPT),
        (CHATML, "odd|one", CHANGED),
        (CHATML, " \n", "an answer without text"),
        (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), "<think>odd</think>one", CHANGED),
        (CHATML.replace("m.content", "m.content.split() | join(' ')"), "def f():\n    return 9", CHANGED),
        (FILLED, "odd<|im_end|>|one", "an answer with the special token <|im_end|> in its text"),
        (FILLED, "<think>odd</think>one", thoughts.format(1, 2)),
        (CHATML, "<think>\nodd", "an answer that ends inside a thought"),
        (OPEN, "one", thoughts.format(0, 0)),
        (EMPTY, "odd</think>one", "an answer with </think> for a thought that neither it nor its prompt begins"),
        (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), "<think></think>1", thoughts.format(1, 0)),
    ):
        assert refusal(template, chat("1?", answer)) == reason
    generated = chat("1?", "one<|im_end|>")
    assert len(render_conversation(tokenizer_of(CHATML), generated, is_generated=True).renderings) == 1


def test_an_answer_is_supervised_as_the_target_generates_it_without_an_empty_think_block() -> None:
    for template, answer, expected in (
        (CHATML, "<think>odd</think>one", "<think>odd</think>one"),
        (CHATML.replace("m.content", "m.content | trim"), "  one\n", "one"),
        (OPEN, "odd</think>one", "odd</think>one"),
        (FILLED, "odd|one", "<think>odd</think>one"),
        (FILLED, "one", "one"),
        (CLOSING, "odd|one", "odd</think>one"),
        (CLOSING, "one", "one"),
    ):
        assert [part.strip() for [part] in generated_parts(template, chat("1?", answer))] == [f"{expected}<|im_end|>"]


def test_an_end_of_text_token_is_supervised_where_it_is_what_ends_a_turn() -> None:
    messages, goes_on = chat("1?", "one", "2?", "two"), "not loop.last or add_generation_prompt"
    for template, end, num_texts, num_endless in (
        (CLOSED, "<|im_end|>\n", 1, 0),
        (CLOSED.replace("<|im_end|>", "[eot]"), "[eot]\n", 1, 0),
        (CHATML.replace("<|im_end|>\n'", "<|im_end|>' + eos_token"), "<|im_end|><|endoftext|>", 1, 0),
        (CLOSED.replace("<|im_end|>\n", ""), "<|endoftext|>", 2, 0),
        (CHATML.replace("'<|im_end|>", f"('<|im_end|>' if {goes_on} else '') + '"), "\n", 2, 2),
        (CHATML.replace("<|im_end|>", ""), "\n", 1, 2),
    ):
        assert render_conversation(tokenizer_of(template), messages).counts["answers_endless"] == num_endless
        texts = generated_parts(template, messages)
        assert len(texts) == num_texts
        assert sorted(part for text in texts for part in text) == [f"one{end}", f"two{end}"]


def test_an_answer_that_is_not_to_be_trained_is_history_alone() -> None:
    messages = chat("1?", "bad", "2?", "two", "3?", "")
    for turn in (1, 5):
        messages[turn]["weight"] = "0"
    for template in (CHATML, QWEN3):
        rendered = render_conversation(tokenizer_of(template), messages)
        assert "bad" in rendered.renderings[0].text
        [[part]] = generated_parts(template, messages)
        assert part.strip().endswith("two<|im_end|>")
        assert (rendered.counts["answers_untrained"], rendered.trained) == (2, 1)
        assert refusal(template, messages[:2]) == "no assistant turn that is to be trained"


def test_a_prompt_that_the_template_drops_refuses_the_conversation() -> None:
    for role in ("system", "developer", "tool"):
        template = CHATML.replace("for m in messages", f"for m in messages if m.role != '{role}'")
        messages: list[Message] = [{"role": role, "content": "Be  brief."}, *chat("1?", "one")]
        assert refusal(template, messages) == f"a {role} message that the chat template does not render"
        assert len(render_conversation(tokenizer_of(CHATML), messages).renderings) == 1


CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    *chat("2 + 2?", "It is\n4 😀", "It is\n4 😀", " So it is. ", "bye"),
]


def supervised_parts(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> tuple[list[str], int]:
    """Returns the text of each run of supervised tokens, and the number of answers that are left out."""
    [item] = encode_conversations(tokenizer, [render_conversation(tokenizer, messages)])
    [encoding] = item.encodings
    runs = groupby(zip(encoding.loss_mask.tolist(), encoding.input_ids.tolist(), strict=True), lambda each: each[0])
    parts = [str(tokenizer.decode([token for _, token in run])) for is_set, run in runs if is_set]
    return parts, item.counts["answers_left_out"]


def test_tokens_and_mask_are_those_of_transformers() -> None:
    tokenizer = make_tokenizer()
    reference: Any = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    [item] = encode_conversations(tokenizer, [render_conversation(tokenizer, CHAT)])
    assert item.encodings[0].input_ids.tolist() == reference["input_ids"]
    assert item.encodings[0].loss_mask.tolist() == reference["assistant_masks"]


def test_whole_characters_and_the_end_of_turn_are_generated_and_the_line_feed_after_it_is_not() -> None:
    plain = GENERATION_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for template in (plain, GENERATION_TEMPLATE):
        tokenizer = make_tokenizer(template.replace("<|end|>", "<|end|>{{ '\n' }}"))
        assert supervised_parts(tokenizer, CHAT) == (["It is\n4 😀<|end|>", " So it is. <|end|>"], 0)
    tokenizer = make_tokenizer(plain.replace("<|end|>{% else", "<|stop|>{{ '\n' }}{% else"))
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|stop|>", rstrip=True, special=True)]})
    parts, left_out = supervised_parts(tokenizer, CHAT)  # the token includes the white space after it
    assert [part.strip() for part in parts] == ["It is\n4 😀<|stop|>", "So it is. <|stop|>"] and left_out == 0


def make_merging_tokenizer(merge: str) -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer that also has a token of two bytes, and a template without special tokens."""
    vocabulary = {char: i for i, char in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), merge])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(merge[0], merge[1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ';' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False
    )


def test_a_token_across_the_border_of_an_answer_is_split_as_a_server_splits_it_or_the_answer_left_out() -> None:
    for merge, answers in (
        ("Ġy", ("yes", "yes")),
        ("ĠĠ", (" yes", "no")),
        (";u", ("yes", "no")),
        ("es", ("yes", "no")),
    ):
        tokenizer, messages = make_merging_tokenizer(merge), chat("q", answers[0], "q", answers[1])
        assert supervised_parts(tokenizer, messages) == ([f"{answer};" for answer in answers], 0)
        [item] = encode_conversations(tokenizer, [render_conversation(tokenizer, messages)])
        ids, mask = item.encodings[0].input_ids, item.encodings[0].loss_mask
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
        assert ids[: mask.argmax()].tolist() == tokenizer(str(prompt), add_special_tokens=False)["input_ids"]
    # This tokenizer puts a space before every text, and so before every piece of one.
    tokenizer = make_merging_tokenizer("Ġy")
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("\u2581")
    assert supervised_parts(tokenizer, chat("q", "yes", "q", "no")) == (["no;"], 1)


def test_a_tokenizer_without_a_template_or_without_offsets_is_refused() -> None:
    slow = ByT5Tokenizer()
    slow.chat_template = GENERATION_TEMPLATE
    for refused, message in (
        (slow, r"loss masks must be made with a fast tokenizer .*, but .* has a slow one"),
        (make_tokenizer(None), "the tokenizer must have a chat template to render messages"),
    ):
        with pytest.raises(ValueError, match=message):
            check_chat_template(refused)
