"""Tests which tokens of a conversation are supervised, and which chat templates cannot say it."""

from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from data_prep.renderings import Encoding, check_chat_template, encode_conversations, render_conversation
from mtptrain.data.conversation import Message
from tests.conftest import GENERATION_TEMPLATE, make_tokenizer
from tests.data_prep.templates import CHATML, NO_PROMPT, QWEN3, tokenizer_of

PLAIN_TEMPLATE = GENERATION_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "It is\n4 😀"},
    {"role": "user", "content": "It is\n4 😀"},
    {"role": "assistant", "content": " So it is. "},
    {"role": "user", "content": "bye"},
]


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[Encoding, int]:
    """Returns the only document of a conversation, and the number of answers that are left out."""
    [item] = encode_conversations(tokenizer, [render_conversation(tokenizer, messages)])
    [encoding] = item.encodings
    return encoding, item.answers_left_out


def generated_parts(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[list[str], int]:
    """Returns the text of each run of supervised tokens, and the number of answers that are left out."""
    encoding, left_out = encode(tokenizer, messages)
    runs = groupby(zip(encoding.loss_mask.tolist(), encoding.input_ids.tolist(), strict=True), lambda each: each[0])
    return [str(tokenizer.decode([token for _, token in run])) for is_set, run in runs if is_set], left_out


def make_merging_tokenizer(template: str, merge: str, *, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer that also has a token of two bytes."""
    vocabulary = {char: i for i, char in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), merge])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(merge[0], merge[1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False
    )


def test_tokens_and_mask_are_those_of_transformers() -> None:
    tokenizer = make_tokenizer()
    reference: Any = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    encoding, _ = encode(tokenizer, CHAT)
    assert encoding.input_ids.tolist() == reference["input_ids"]
    assert encoding.loss_mask.tolist() == reference["assistant_masks"]


def test_whole_characters_and_the_end_of_turn_are_generated_and_the_line_feed_after_it_is_not() -> None:
    template = GENERATION_TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    assert generated_parts(make_tokenizer(template), CHAT[:3]) == (["It is\n4 😀"], 0)
    for template in (PLAIN_TEMPLATE, GENERATION_TEMPLATE):
        tokenizer = make_tokenizer(template.replace("<|end|>", "<|end|>{{ '\n' }}"))
        assert generated_parts(tokenizer, CHAT) == (["It is\n4 😀<|end|>", " So it is. <|end|>"], 0)
    template = GENERATION_TEMPLATE.replace("<|end|>{% endgeneration %}", "<|stop|>{% endgeneration %}{{ '\n' }}")
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|stop|>", rstrip=True, special=True)]})
    parts, left_out = generated_parts(tokenizer, CHAT)  # the token includes the white space after it
    assert [part.strip() for part in parts] == ["It is\n4 😀<|stop|>", "So it is. <|stop|>"] and left_out == 0


BORDERS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("merge", "answers"),
    [("Ġy", ["yes", "yes"]), ("ĠĠ", [" yes", "no"]), (";u", ["yes", "no"]), ("es", ["yes", "yes"])],
)
def test_a_token_across_the_border_of_an_answer_is_split_as_a_server_splits_it(
    merge: str, answers: list[str], trim_offsets: bool
) -> None:
    tokenizer = make_merging_tokenizer(BORDERS, merge, trim_offsets=trim_offsets)
    messages: list[Message] = [
        {"role": role, "content": text} for answer in answers for role, text in (("user", "q"), ("assistant", answer))
    ]
    assert generated_parts(tokenizer, messages) == ([f"{answer};" for answer in answers], 0)
    encoding, _ = encode(tokenizer, messages)
    prompt = str(tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False))
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert encoding.input_ids[: encoding.loss_mask.argmax()].tolist() == prompt_ids


def test_an_answer_whose_border_cannot_be_split_is_left_out_and_counted() -> None:
    """Tests a tokenizer that puts a space before every text, and so before every piece of one."""
    tokenizer = make_merging_tokenizer(BORDERS, "Ġy")
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("\u2581")
    turns = (("user", "q"), ("assistant", "yes"), ("user", "q"), ("assistant", "no"))
    assert generated_parts(tokenizer, [{"role": role, "content": text} for role, text in turns]) == (["no;"], 1)


def test_templates_that_mark_or_continue_answers_pass_the_check_and_others_do_not() -> None:
    for tokenizer in (
        *map(make_tokenizer, (GENERATION_TEMPLATE, PLAIN_TEMPLATE)),
        *map(tokenizer_of, (QWEN3, CHATML.replace("assistant\n'", "assistant\n<think>\n'"))),  # this needs reasoning
    ):
        check_chat_template(tokenizer)
    slow = ByT5Tokenizer()
    slow.chat_template = GENERATION_TEMPLATE
    block = "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    empty_block = "{{ message['content'] }}{% generation %}{% endgeneration %}<|end|>"
    no_system = "{% if messages[0].role == 'user' %}{{ raise_exception('no user role') }}{% endif %}" + PLAIN_TEMPLATE
    for refused, message in (
        (slow, r"loss masks must be made with a fast tokenizer .*, but .* has a slow one"),
        (make_tokenizer(None), "the tokenizer must have a chat template to render messages"),
        (
            make_tokenizer(GENERATION_TEMPLATE.replace(block, empty_block)),
            r"'What is two and two\?', the chat template's \{% generation %\} block contains no text",
        ),
        (
            make_tokenizer("{{ 1 // 0 }}"),
            "the chat template of .* must show .*, the chat template fails: ZeroDivisionE",
        ),
        (make_tokenizer(no_system), "the chat template fails: no user role"),
        (make_tokenizer(PLAIN_TEMPLATE.replace("<assistant>{% endif %}", "<assistant>>{% endif %}")), NO_PROMPT),
    ):
        with pytest.raises(ValueError, match=message):
            check_chat_template(refused)
