"""Finds where servers read a chat otherwise than it is read here.

A target may have several chat templates. transformers, and with it vLLM and SGLang, prefers `chat_template.jinja` to
`tokenizer_config.json`; llama.cpp's converter prefers the latter (gguf/vocab.py). For a target with images, vLLM takes
the template of transformers' processor, which prefers `chat_template.json` to both (processing_utils.py).
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import dropwhile, product, takewhile
from typing import Any

from jinja2 import nodes
from transformers import PreTrainedTokenizerBase

from mtptrain.target.files import DEVELOPER, RENDERED, TargetFiles, names_in, parsed_template
from mtptrain.target.generation import FILE
from mtptrain.target.gguf import CHAT_TEMPLATE
from mtptrain.target.llama_chats import llama_rendered
from mtptrain.target.llama_tokens import llama_tokens
from mtptrain.target.probe_chats import (
    CALLED,
    CALLED_ALONE,
    PROBE,
    SPACED,
    THOUGHT,
    TOOLS,
    accepted,
    question_chats,
    rendered,
)
from mtptrain.target.served_tokens import CONFIG, OVERRIDE, tokens_elsewhere
from mtptrain.utils.files import read_json

JINJA, LEGACY = "chat_template.jinja", "chat_template.json"
PROCESSOR = "processor_config.json"
READERS = {CONFIG: "llama.cpp's converter", **dict.fromkeys((PROCESSOR, LEGACY), "processors of targets with images")}
"""Who takes the template of a file that is not the one that transformers takes. That of a GGUF file is llama.cpp's."""
PASSED_OVER = re.compile(r"(?<=-[%#}]\})\s+\Z|(?<=[%#]\})\n{1,2}\Z|\n\Z")
"""A line break at the end of a template, two after a block or comment (`trim_blocks`), all space after a minus sign."""
DATES = ("date_string", "datetime")
"""Variables of chat templates that llama.cpp b11434 sets in each request (common/chat.cpp)."""
KEPT = {
    **dict.fromkeys(("preserve_thinking", "preserve_reasoning"), True),
    **dict.fromkeys(("clear_thinking", "truncate_history_thinking", "drop_thinking"), False),
}
"""Variables that it sets if the server is not told otherwise, which keep the thoughts of earlier answers
(common/jinja/caps.cpp)."""


def chats_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Yields how some servers render chats otherwise than they are rendered here, and what to do about it."""
    yield from tokens_elsewhere(target)
    yield from _templates_elsewhere(target)
    yield from _llama_tokens_elsewhere(target)
    for each in (_developers_elsewhere, _modes_elsewhere, _thoughts_elsewhere, _lists_elsewhere, _ends_elsewhere):
        yield from each(target)


def _templates_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Compares the chat templates of all files. transformers takes the first."""
    in_gguf = target.gguf_metadata
    files = [target.directory / JINJA, *target.directory.glob("additional_chat_templates/*.jinja")]
    first = next((str(path.relative_to(target.directory)) for path in files if path.is_file()), JINJA)
    settings = {
        name: read_json(path) for name in (CONFIG, PROCESSOR, LEGACY) if (path := target.directory / name).is_file()
    }
    stored = {
        first: {"default" if path.name == JINJA else path.stem: path.read_text() for path in files if path.is_file()},
        **{name: content.get("chat_template") for name, content in settings.items()},
        str(target.gguf): {"default": in_gguf.get(CHAT_TEMPLATE), "tool_use": in_gguf.get(f"{CHAT_TEMPLATE}.tool_use")},
    }
    found = {name: templates for name, each in stored.items() if any(templates := _templates(each))}
    ours = next(iter(found), "")
    for name in found:
        if found[name] != found[ours]:
            yield (
                f"{target.directory}: all chat templates should be equal, but that of {ours}, taken here and by "
                f"transformers, vLLM and SGLang, differs from that of {name}, taken by "
                f"{READERS.get(name, 'llama.cpp')}; remove the wrong one, or start llama-server with "
                "--chat-template-file and the right one"
            )
    # The converter looks into the other files only if tokenizer_config.json has no such key.
    in_others = (target.directory / JINJA).is_file() or LEGACY in settings
    is_converted = CONFIG in settings and settings[CONFIG].get("chat_template", in_others)
    if found and not (in_gguf.get(CHAT_TEMPLATE) if in_gguf else is_converted):
        why = f"{READERS[CONFIG]} takes none, as for `chat_template: null` in {CONFIG}; remove such a key"
        why = f"{target.gguf} has none; start llama-server with --chat-template-file" if in_gguf else why
        yield (
            f"{target.directory}: all servers should find the chat template of {ours}, but {why}, and keep the "
            f"template in {JINJA}"
        )


def _llama_tokens_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Compares what llama-server makes of a chat, which gives its own tokens to the template, and adds them itself."""
    tokenizer, llama = target.tokenizer, llama_tokens(target)
    if llama.unknown:
        yield llama.unknown
        return
    bos, eos = (str(tokenizer.decode([llama.ids[name]])) for name in ("bos", "eos"))
    for tools, chat in product(TOOLS, (*question_chats(tokenizer), accepted(tokenizer, *SPACED), CALLED, THOUGHT)):
        ours, theirs = rendered(tokenizer, *chat, tools=tools), llama_rendered(tokenizer, chat, tools, bos, eos)
        if llama.adds["bos"] and theirs:
            theirs = bos + theirs.removeprefix(bos)
        if ours and ours != theirs:
            mend = "correct the template, or give it prompts as token ids"
            if (bos, eos) != (tokenizer.bos_token, tokenizer.eos_token):
                mend = f"name the same bos_token and eos_token in {CONFIG}, in config.json and in the GGUF file"
            if llama.adds["bos"] and theirs == bos + ours:
                mend = f"correct the template, or start llama-server with {OVERRIDE.format('bos', 'false')}"
            yield _other_text(target, "llama-server", "", theirs, ours, mend)
            break
    if llama.adds["eos"]:
        yield (
            f"{target.directory}: an answer should follow the prompt of a chat at once, as here, in vLLM and in SGLang,"
            f" but llama-server adds {eos} to the prompt; start it with {OVERRIDE.format('eos', 'false')}"
        )


def _developers_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Compares what llama-server makes of the role `developer`, which it renames even where the template knows it."""
    tokenizer = target.tokenizer
    chats = [({"role": role, "content": "s"}, CALLED[0]) for role in ("developer", "system")]
    for tools in TOOLS:
        ours, theirs = (rendered(tokenizer, *chat, tools=tools) for chat in chats)
        template = tokenizer.get_chat_template(tools=tools) if ours and ours != theirs else ""
        if DEVELOPER.search(template) and "<|channel|>" not in template:
            mend = "set +prompts.roles.developer=system, and send such messages as system"
            yield _other_text(target, "llama-server", "makes `developer` `system`, and ", theirs, ours, mend)
            break


def _modes_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Compares the modes that llama-server sets in a template, and the prompts of different days."""
    tokenizer = target.tokenizer
    question, answered, _ = question_chats(tokenizer)
    for tools in TOOLS if "enable_thinking" not in target.template_kwargs else ():
        ours, thinks, skips = (
            rendered(tokenizer, *question, tools=tools, add_generation_prompt=True, **set_to)
            for set_to in ({}, {"enable_thinking": True}, {"enable_thinking": False})
        )
        thought = {"role": "assistant", "content": "b", "reasoning_content": PROBE}
        is_found = PROBE in rendered(tokenizer, *question, thought, enable_thinking=True)  # by llama.cpp, else unknown
        if ours and (ours != thinks or (ours != skips and not is_found)):
            value, theirs, flag = ("true", thinks, "off") if ours != thinks else ("false", skips, "on")
            mend = f"start it with --reasoning {flag}, or " * (ours in (thinks, skips))
            how = "sets enable_thinking, true where it finds thoughts in the template and else false, and for "
            mend += f"set +prompts.template_kwargs.enable_thinking={value}"
            yield _other_text(target, "llama-server", f"{how}enable_thinking={value} ", theirs, ours, mend)
            break
    undated = partial(rendered, tokenizer, *answered, strftime_now="")  # "" if it is called
    dated = [each for each in TOOLS if rendered(tokenizer, *answered, tools=each) and not undated(tools=each)]
    for tools in dated[:1]:
        read = sorted(names_in(tokenizer.get_chat_template(tools=tools)) - {*RENDERED, "strftime_now"})
        pin = next((each for each in read if undated(tools=tools, **{each: "a day"})), None)
        mend = f"set +prompts.template_kwargs.{pin} to a day, and send it in each request" * (pin is not None)
        yield (
            f"{target.directory}: prompts should be those of the training data on any day, but the chat template "
            f"writes today's date; {mend or 'write a day in place of strftime_now in the template'}"
        )
    for name in () if dated else DATES:
        chats = [partial(rendered, tokenizer, *answered, tools=each) for each in TOOLS]
        if name not in target.template_kwargs and any(chat() != chat(**{name: "a day"}) for chat in chats):
            yield (
                f"{target.directory}: prompts should be those of the training data, as here and in vLLM, but "
                f"llama-server sets {name}, which the chat template reads, to today's; set "
                f"+prompts.template_kwargs.{name} to a day, and send it in each request"
            )


def _thoughts_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Compares chats of two turns, with and without thoughts, with variables by which llama-server keeps these."""
    tokenizer = target.tokenizer
    *_, asked_on = question_chats(tokenizer)
    thought_of = [each | ({"reasoning_content": "c"} if each["role"] == "assistant" else {}) for each in asked_on]
    for tools, chat in product(TOOLS, (asked_on, thought_of)):
        ours, theirs, dropped = (
            rendered(tokenizer, *chat, tools=tools, **set_to)
            for set_to in ({}, KEPT, {name: not value for name, value in KEPT.items()})
        )
        if ours != theirs:
            read = sorted(names_in(tokenizer.get_chat_template(tools=tools)) & KEPT.keys())
            mend = "start it with --no-reasoning-preserve, or set " if ours == dropped else "set "
            mend += " and ".join(f"+prompts.template_kwargs.{name}={str(KEPT[name]).lower()}" for name in read)
            yield _other_text(target, "llama-server", f"sets {', '.join(read)} and ", theirs, ours, mend)
            break


def _lists_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Compares what vLLM makes of a chat, which passes texts as parts to a template that loops over such."""
    tokenizer = target.tokenizer
    for tools, spaced in product(TOOLS, (SPACED, SPACED[1:], CALLED, CALLED_ALONE)):
        in_parts = [
            {**each, "content": [{"type": "text", "text": each["content"]}] if each["content"] else []}
            for each in spaced
        ]
        ours, theirs = (rendered(tokenizer, *messages, tools=tools) for messages in (spaced, in_parts))
        if "Hi" in ours and ours != theirs and _loops_over_content(tokenizer.get_chat_template(tools=tools)):
            how = "gives the chat template, which loops over `content`, each text as a list, null as an empty one, and "
            yield _other_text(target, "vLLM", how, theirs, ours, "start it with --chat-template-content-format string")
            break


def _ends_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Finds out whether servers end an answer, and one that calls a tool, where the template does."""
    tokenizer, llama = target.tokenizer, llama_tokens(target)
    ends, size = target.generation.eos_token_ids, target.config.vocab_size
    for token, text in dict([_end_of_call(tokenizer, ends), end_of_turn(tokenizer, ends)]).items():
        if not text or token in ends:
            continue
        who = "vLLM and SGLang" if token in llama.ends or llama.unknown else "servers"
        advice = f"add {token} to eos_token_id in {FILE}" if token is not None else "send it as `stop` in each request"
        if token is not None and token >= size:
            advice = f"correct the template, as {token} is no token of the target, which has {size}"
        yield (
            f"{target.directory}: {who} should end an answer at {text!r}, with which the chat template ends it, but "
            f"write past it: they end at {', '.join(map(str, ends)) or 'no token'}; {advice}"
        )


def end_of_turn(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()) -> tuple[int | None, str]:
    """Returns the special token with which the template ends an answer, if there is one, and all that it writes there.

    Of several in a row, it is one of the known ends, if one of these is among them: there an answer ends.
    """
    chat = {"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}
    after = rendered(tokenizer, *accepted(tokenizer, *chat)).partition(PROBE)[2]
    ids, special = _ids_and_special(tokenizer, after, ends)
    found = list(takewhile(special.__contains__, dropwhile(lambda token: token not in special, ids)))
    return next((token for token in found if token in ends), found[0] if found else None), after.strip()


def _end_of_call(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> tuple[int | None, str]:
    """Returns the special token with which the template ends an answer that calls a tool, if there is one, as text too.

    It is a known end, or else the last one, as others may end the call alone.
    """
    after = rendered(tokenizer, *accepted(tokenizer, *CALLED), tools=TOOLS[1]).partition(PROBE)[2]
    ids, special = _ids_and_special(tokenizer, after, ends)
    found = [token for token in ids if token in special]
    token = next((token for token in found if token in ends), found[-1] if found else None)
    return token, "" if token is None else str(tokenizer.decode([token]))


def _ids_and_special(tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int]) -> tuple[list[int], set[int]]:
    """Returns the tokens of a text, and the tokens that are special, all known ends among them."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special} | {*ends}
    return tokenizer(text, add_special_tokens=False)["input_ids"], special


def _templates(stored: Any) -> tuple[str, str]:
    """Returns the templates for chats without and with tools, without what Jinja passes over at their ends."""
    if isinstance(stored, list):
        stored = {each.get("name"): each.get("template") for each in stored if isinstance(each, dict)}
    named = stored if isinstance(stored, dict) else {"default": stored if isinstance(stored, str) else ""}
    default = named.get("default") or ""
    default, with_tools = (re.sub(r"\r\n?", "\n", each) for each in (default, named.get("tool_use") or default))
    return PASSED_OVER.sub("", default), PASSED_OVER.sub("", with_tools)


def _loops_over_content(template: str) -> bool:
    """Returns whether vLLM 0.32 finds a loop over a message's content, maybe in a macro (vllm/renderers/hf.py)."""
    tree, names = parsed_template(template), {"content"}
    macros = {each.name: [argument.name for argument in each.args] for each in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        given = [*zip(macros.get(getattr(call.node, "name", ""), ()), call.args, strict=False)]
        given += [(each.key, each.value) for each in call.kwargs]
        names |= {name for name, value in given if _is_content(value)}
    loops = [each.iter for each in tree.find_all(nodes.For)]
    return any(_is_content(each) or (isinstance(each, nodes.Name) and each.name in names) for each in loops)


def _is_content(node: Any) -> bool:
    """Returns whether an expression is a variable's `content`, or made of it by filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or isinstance(getattr(node, "arg", None), nodes.Slice):
        node = node.node
    key = getattr(node, "attr", None) or getattr(getattr(node, "arg", None), "value", None)
    return key == "content" and isinstance(node.node, nodes.Name)


def _other_text(target: TargetFiles, server: str, how: str, theirs: str, ours: str, mend: str) -> str:
    return (
        f"{target.directory}: {server} should make the same text of a chat as the tokenizer, but {how}makes "
        f"{theirs or 'an error'!r} of one that is {ours!r} here; {mend}"
    )
