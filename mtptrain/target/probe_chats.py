"""Chats with which renderings are compared, as the tokenizer's template makes them."""

from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

PROBE = "\ue000"  # from Unicode's private use area, so no template writes it
PARAMETERS = {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None}}, "required": ["a"]}
TOOLS = (None, [{"type": "function", "function": {"name": "f", "description": "<", "parameters": PARAMETERS}}])
SPACED = tuple({"role": role, "content": " Hi "} for role in ("system", "user", "assistant"))
CALLED = (
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": " Hi ",
        "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": PROBE}}}],
    },
)
THOUGHT = ({"role": "user", "content": "Hi"}, CALLED[1] | {"reasoning_content": "c"})
CALLED_ALONE = (CALLED[0], CALLED[1] | {"content": ""})
"""`content: null`, which llama.cpp and SGLang, as we do, make an empty text, and vLLM an empty list."""


def question_chats(tokenizer: PreTrainedTokenizerBase) -> list[list[dict[str, Any]]]:
    """Returns a question, one with its answer, and both with the question after them."""
    chat = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}
    return [accepted(tokenizer, *chat[:length]) for length in (1, 2, 3)]


def accepted(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a chat, after a system message if the template, an unknown program, demands one."""
    return [*messages] if rendered(tokenizer, *messages) else [{"role": "system", "content": "s"}, *messages]


def rendered(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, Any], **variables: Any) -> str:
    """Returns a chat as text; "" if the template, an unknown program, makes an error of it."""
    with suppress(Exception):
        return str(tokenizer.apply_chat_template([*messages], tokenize=False, **variables))
    return ""
