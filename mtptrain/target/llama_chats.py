"""Renders chats as llama.cpp b11434 does, whose program for templates differs from Jinja."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_jinja_template

SAFE = re.compile(r"\|\s*safe\b")
"""Marks a text in Jinja, so that what is added to it is escaped as HTML."""
MINISTRAL = ("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]")
THINKING = ("<|channel|>", "<|tool_list_start|>", "List of tools: [")
"""Of gpt-oss and LFM2, for which llama.cpp copies `reasoning_content` to `thinking`, as transformers always does."""
STEPFUN = "You have access to the following functions in JSONSchema format"


def llama_rendered(
    tokenizer: PreTrainedTokenizerBase, chat: Sequence[dict[str, Any]], tools: Any, bos: str, eos: str
) -> str:
    """Returns a chat as text in llama.cpp b11434, which defines neither empty tools, nor documents, nor other tokens.

    It trims contents for one family, that of StepFun (common/chat.cpp), and makes lists of some for Ministral 3
    (common/parsers/ministral3.cpp). Its filter `safe` changes nothing.
    """
    given = {"bos_token": bos, "eos_token": eos, **({"tools": tools} if tools else {})}
    with suppress(Exception):
        template = tokenizer.get_chat_template(tools=tools)
        messages = [{**each, "content": each["content"].strip()} for each in chat] if STEPFUN in template else [*chat]
        if all(each in template for each in MINISTRAL) and "[CALL_ID]" not in template:
            messages = [each if each["role"] == "user" else _in_blocks(each) for each in messages]
        if any(each in template for each in THINKING):
            messages = [{"thinking": x["reasoning_content"]} | x if "reasoning_content" in x else x for x in messages]
        environment = compile_jinja_template("").environment.overlay(finalize=_printed)
        environment.filters = {**environment.filters, _searched.__name__: _searched}
        tree = _AsLlamaReads().visit(environment.parse(SAFE.sub("", template)))
        return environment.from_string(tree).render(messages=messages, add_generation_prompt=False, **given)
    return ""


def _in_blocks(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with its thoughts and its text as a list."""
    parts = {"thinking": message.get("reasoning_content"), "text": message["content"]}
    content = [{"type": name, name: text} for name, text in parts.items() if text is not None]
    return {name: value for name, value in message.items() if name != "reasoning_content"} | {"content": content}


class _AsLlamaReads(NodeTransformer):
    """Changes expressions to what llama.cpp b11434 computes: null joined to a text adds nothing, and no list is sought
    in a list."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        empty = nodes.Const("")
        node.nodes = [nodes.CondExpr(nodes.Test(each, "none", [], [], None, None), empty, each) for each in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        for each in node.ops:
            if each.op in ("in", "notin"):
                each.expr = nodes.Filter(each.expr, _searched.__name__, [node.expr], [], None, None)
        return node


def _searched(place: Any, sought: Any) -> Any:
    if isinstance(place, list | tuple) and isinstance(sought, list | tuple):
        raise TypeError
    return place


def _printed(value: Any) -> Any:
    """Returns what llama.cpp b11434 prints of a value: a list's elements, and nothing of null and of an object."""
    if isinstance(value, list):
        return "".join(str(_printed(each)) for each in value)
    return "" if value is None or isinstance(value, Mapping) else value
