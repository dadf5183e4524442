"""Chat templates like those of well-known families, and conversations for them."""

import pytest
from transformers import PreTrainedTokenizerBase

from data_prep.renderings import render_conversation
from mtptrain.data.conversation import ConversationRefused, Message
from mtptrain.target.hub import DEMO, load_tokenizer, resolve_target

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
# Like Qwen3's template, this renders reasoning, from its own key or from the content, only after the last user turn. An
# assistant turn that ends the conversation always has a reasoning block, which may be empty.
QWEN3 = (
    "{% set last = namespace(query=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set reasoning = m.reasoning_content or '' %}{% set answer = m.content %}"
    "{% if not reasoning and '</think>' in answer %}"
    "{% set reasoning = answer.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set answer = answer.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > last.query and (loop.last or reasoning) %}"
    "{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}{{ answer + '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + "
    "'\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + PROMPT
)
LLAMA3 = (
    "{{ bos_token }}{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|im_start|>system\nToday: ' + date_string + '<|im_end|>' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' }}{% endfor %}" + PROMPT
)
# Like Phi-3's template, this adds an end-of-text token to a conversation rendered without a generation prompt.
CLOSED = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
BLOCK = "<think>\n\n</think>\n\n"
"""The block of an answer without reasoning in Qwen3's template."""


NO_PROMPT = "the chat template renders no answer as the continuation of its prompt"


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    """Returns the demo target's BPE tokenizer with `template` and the special tokens of the templates above."""
    tokenizer = load_tokenizer(resolve_target(DEMO))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: str) -> list[Message]:
    """Returns user and assistant turns; text before a `|` is reasoning."""
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        reasoning, _, content = turn.rpartition("|")
        messages.append({"role": ("user", "assistant")[i % 2], "content": content})
        if reasoning:
            messages[-1]["reasoning_content"] = reasoning
    return messages


def generated_parts(template: str, messages: list[Message]) -> list[list[str]]:
    """Returns the supervised parts of each text of a conversation."""
    renderings = render_conversation(tokenizer_of(template), messages).renderings
    return [[rendering.text[start:end] for start, end in rendering.answers] for rendering in renderings]


def refusal(template: str, messages: list[Message]) -> str:
    """Returns why a conversation is refused."""
    with pytest.raises(ConversationRefused) as refused:
        render_conversation(tokenizer_of(template), messages)
    return str(refused.value)
