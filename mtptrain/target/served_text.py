"""Finds where servers read a chat or a text otherwise than it is read here: another chat template, another beginning.

A target may have several chat templates. transformers, and with it vLLM and SGLang, prefers `chat_template.jinja` to
`tokenizer_config.json`; llama.cpp's converter prefers the latter (gguf/vocab.py). For a target with images, vLLM takes
the template of transformers' processor, which prefers `chat_template.json` to both (processing_utils.py).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import dropwhile, product, takewhile
from typing import Any

import transformers
from jinja2 import nodes
from jinja2.visitor import NodeTransformer
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_jinja_template

from mtptrain.target.files import DEVELOPER, RENDERED, TargetFiles, names_in, parsed_template
from mtptrain.target.generation import FILE, as_words
from mtptrain.target.gguf import CHAT_TEMPLATE, TOKENIZER, has_known_tokenizer, tokenizer_of
from mtptrain.target.llama_tokens import llama_tokens
from mtptrain.utils.errors import error_summary
from mtptrain.utils.files import read_json

JINJA, CONFIG, LEGACY = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
PROCESSOR = "processor_config.json"
PROBE = "\ue000"  # from Unicode's private use area, so no template writes it
READERS = {CONFIG: "llama.cpp's converter", **dict.fromkeys((PROCESSOR, LEGACY), "processors of targets with images")}
"""Who takes the template of a file that is not the one that transformers takes. That of a GGUF file is llama.cpp's."""
PASSED_OVER = re.compile(r"(?<=-[%#}]\})\s+\Z|(?<=[%#]\})\n{1,2}\Z|\n\Z")
"""A line break at the end of a template, two after a block or comment (`trim_blocks`), all space after a minus sign."""
OVERRIDE = "--override-kv tokenizer.ggml.add_{}_token=bool:{}"
PARAMETERS = {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None}}, "required": ["a"]}
TOOLS = (None, [{"type": "function", "function": {"name": "f", "description": "<", "parameters": PARAMETERS}}])
DATES = ("date_string", "datetime")
"""Variables of chat templates that llama.cpp b11434 sets in each request (common/chat.cpp)."""
KEPT = {
    **dict.fromkeys(("preserve_thinking", "preserve_reasoning"), True),
    **dict.fromkeys(("clear_thinking", "truncate_history_thinking", "drop_thinking"), False),
}
"""Variables that it sets if the server is not told otherwise, which keep the thoughts of earlier answers
(common/jinja/caps.cpp)."""
SPACED = tuple({"role": role, "content": " Hi "} for role in ("system", "user", "assistant"))
SAFE = re.compile(r"\|\s*safe\b")
"""Marks a text in Jinja, so that what is added to it is escaped as HTML."""
MINISTRAL = ("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]")
THINKING = ("<|channel|>", "<|tool_list_start|>", "List of tools: [")
"""Of gpt-oss and LFM2, for which llama.cpp copies `reasoning_content` to `thinking`, as transformers always does."""
STEPFUN = "You have access to the following functions in JSONSchema format"
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
TEXT = "It's  12345 words\n\n a"
"""Is cut in other places by other rules for words, numbers and spaces."""
UNNAMED = {"llama": "CodeLlamaTokenizer"}
"""The class that transformers 5.5 takes for a family, and later ones do not, if no file names one."""
RESTORED = r"((Code)?Llama|Gemma)Tokenizer(Fast)?|CohereTokenizerFast"
"""Classes whose add_bos_token SGLang reads, true by default, where transformers takes the post-processor alone."""
MISTRAL = ("consolidated*.safetensors", "params.json", "tekken.json", "tokenizer.model.v*")
"""What vLLM 0.32 reads of a folder, if the first is there: weights, config and tokenizer of Mistral's own format."""
FLAGS, NOT_OF_PHI = ("lstrip", "rstrip", "single_word"), ("<unk>", "<s>", "<|endoftext|>")
"""What llama.cpp b11434 does not read of added tokens; in a file that `general.name` calls a phi-3, all but three strip
the space after them (src/llama-vocab.cpp)."""
LLAMA = f"llama.cpp, which passes over {', '.join(FLAGS)} of added tokens, normalizers and add_prefix_space,"
IN_GGUF = "llama.cpp, by the tokens of target.gguf,"
AS_IT_IS = (
    f"set tokenizer_class in {CONFIG} to PreTrainedTokenizerFast, with which all read tokenizer.json as it is (except "
    "for a qwen2, which keeps its class)"
)
AS_STORED = {
    *(family for family, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items() if name == "TokenizersBackend"),
    *(tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS | {"deepseek_v2", "deepseek_v3", "deepseek_v32"}),
} - {"internlm3", "iquestcoder"}
"""Families for which transformers 5.19, too, does not choose the class that tokenizer_config.json names."""


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
    for tools, chat in product(TOOLS, (*_chats(tokenizer), _accepted(tokenizer, *SPACED), CALLED, THOUGHT)):
        ours, theirs = _rendered(tokenizer, *chat, tools=tools), _llama_rendered(tokenizer, chat, tools, bos, eos)
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
        ours, theirs = (_rendered(tokenizer, *chat, tools=tools) for chat in chats)
        template = tokenizer.get_chat_template(tools=tools) if ours and ours != theirs else ""
        if DEVELOPER.search(template) and "<|channel|>" not in template:
            mend = "set +prompts.roles.developer=system, and send such messages as system"
            yield _other_text(target, "llama-server", "makes `developer` `system`, and ", theirs, ours, mend)
            break


def _modes_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Compares the modes that llama-server sets in a template, and the prompts of different days."""
    tokenizer = target.tokenizer
    question, answered, _ = _chats(tokenizer)
    for tools in TOOLS if "enable_thinking" not in target.template_kwargs else ():
        ours, thinks, skips = (
            _rendered(tokenizer, *question, tools=tools, add_generation_prompt=True, **set_to)
            for set_to in ({}, {"enable_thinking": True}, {"enable_thinking": False})
        )
        thought = {"role": "assistant", "content": "b", "reasoning_content": PROBE}
        is_found = PROBE in _rendered(tokenizer, *question, thought, enable_thinking=True)  # by llama.cpp, else unknown
        if ours and (ours != thinks or (ours != skips and not is_found)):
            value, theirs, flag = ("true", thinks, "off") if ours != thinks else ("false", skips, "on")
            mend = f"start it with --reasoning {flag}, or " * (ours in (thinks, skips))
            how = "sets enable_thinking, true where it finds thoughts in the template and else false, and for "
            mend += f"set +prompts.template_kwargs.enable_thinking={value}"
            yield _other_text(target, "llama-server", f"{how}enable_thinking={value} ", theirs, ours, mend)
            break
    undated = partial(_rendered, tokenizer, *answered, strftime_now="")  # "" if it is called
    dated = [each for each in TOOLS if _rendered(tokenizer, *answered, tools=each) and not undated(tools=each)]
    for tools in dated[:1]:
        read = sorted(names_in(tokenizer.get_chat_template(tools=tools)) - {*RENDERED, "strftime_now"})
        pin = next((each for each in read if undated(tools=tools, **{each: "a day"})), None)
        mend = f"set +prompts.template_kwargs.{pin} to a day, and send it in each request" * (pin is not None)
        yield (
            f"{target.directory}: prompts should be those of the training data on any day, but the chat template "
            f"writes today's date; {mend or 'write a day in place of strftime_now in the template'}"
        )
    for name in () if dated else DATES:
        chats = [partial(_rendered, tokenizer, *answered, tools=each) for each in TOOLS]
        if name not in target.template_kwargs and any(chat() != chat(**{name: "a day"}) for chat in chats):
            yield (
                f"{target.directory}: prompts should be those of the training data, as here and in vLLM, but "
                f"llama-server sets {name}, which the chat template reads, to today's; set "
                f"+prompts.template_kwargs.{name} to a day, and send it in each request"
            )


def _thoughts_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Compares chats of two turns, with and without thoughts, with variables by which llama-server keeps these."""
    tokenizer = target.tokenizer
    *_, asked_on = _chats(tokenizer)
    thought_of = [each | ({"reasoning_content": "c"} if each["role"] == "assistant" else {}) for each in asked_on]
    for tools, chat in product(TOOLS, (asked_on, thought_of)):
        ours, theirs, dropped = (
            _rendered(tokenizer, *chat, tools=tools, **set_to)
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
        ours, theirs = (_rendered(tokenizer, *messages, tools=tools) for messages in (spaced, in_parts))
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
    after = _rendered(tokenizer, *_accepted(tokenizer, *chat)).partition(PROBE)[2]
    ids, special = _ids_and_special(tokenizer, after, ends)
    found = list(takewhile(special.__contains__, dropwhile(lambda token: token not in special, ids)))
    return next((token for token in found if token in ends), found[0] if found else None), after.strip()


def _end_of_call(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> tuple[int | None, str]:
    """Returns the special token with which the template ends an answer that calls a tool, if there is one, as text too.

    It is a known end, or else the last one, as others may end the call alone.
    """
    after = _rendered(tokenizer, *_accepted(tokenizer, *CALLED), tools=TOOLS[1]).partition(PROBE)[2]
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


def _chats(tokenizer: PreTrainedTokenizerBase) -> list[list[dict[str, Any]]]:
    """Returns a question, one with its answer, and both with the question after them."""
    chat = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}
    return [_accepted(tokenizer, *chat[:length]) for length in (1, 2, 3)]


def _accepted(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a chat, after a system message if the template, an unknown program, demands one."""
    return [*messages] if _rendered(tokenizer, *messages) else [{"role": "system", "content": "s"}, *messages]


def _rendered(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, Any], **variables: Any) -> str:
    """Returns a chat as text; "" if the template, an unknown program, makes an error of it."""
    with suppress(Exception):
        return str(tokenizer.apply_chat_template([*messages], tokenize=False, **variables))
    return ""


def _llama_rendered(
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


def tokens_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Yields what cuts texts and chats into other tokens than here: another class, tokenizer.json, or llama.cpp."""
    tokenizer, stored, family = target.tokenizer, target.directory / "tokenizer.json", target.config.model_type
    files = [path for path in (target.directory / CONFIG, target.directory / "config.json") if path.is_file()]
    declared = next(filter(None, (read_json(path).get("tokenizer_class") for path in files)), None)
    name, others = declared or UNNAMED.get(family, ""), dict[str, Callable[[], Any]]()
    named = getattr(transformers, name, type(tokenizer))
    if family not in AS_STORED and not isinstance(tokenizer, named):
        versions = ["5.19 (of vLLM 0.32)"] * bool(declared) + ["5.5 (of OpenVINO 2026.4.1)"] * (family in UNNAMED)
        cutter = f"{name}, which transformers {' and '.join(versions)} chooses,"
        others[cutter] = partial(named.from_pretrained, target.directory)
    if stored.is_file():
        others["tokenizer.json itself"] = partial(PreTrainedTokenizerFast, tokenizer_file=str(stored))
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if (plain := _as_llama_reads(content, str(target.gguf_metadata.get("general.name")))) != content:
        others[LLAMA] = partial(PreTrainedTokenizerFast, tokenizer_object=Tokenizer.from_str(json.dumps(plain)))
    if target.given_gguf and target.gguf and has_known_tokenizer(target.gguf_metadata):
        others[IN_GGUF] = partial(tokenizer_of, target.gguf)
    elif target.given_gguf and target.gguf_metadata:
        kind = as_words({name: target.gguf_metadata.get(TOKENIZER + name, "missing") for name in ("model", "pre")})
        yield (
            f"{target.gguf}: the tokens of a text in llama.cpp should be known here, but are not for a tokenizer of "
            f"{kind}; see what `mtptrain serving-check` says of chats, or give llama-server prompts as token ids"
        )
    chat = _accepted(tokenizer, *SPACED[1:], SPACED[1])
    chats = [_rendered(tokenizer, *each, add_generation_prompt=True) for each in (chat, _chats(tokenizer)[0])]
    texts = (TEXT, *chats)  # with a space after each special token, and without
    ours = _cut(lambda: tokenizer, texts)
    splits = getattr(tokenizer, "split_special_tokens", False)
    mend = f"set split_special_tokens in {CONFIG} to false" if splits else AS_IT_IS
    mends, known = {LLAMA: "give it prompts as token ids", IN_GGUF: "convert the target again"}, [ours]
    for cutter, load in others.items():
        if (cut := _cut(load, texts)) in known:
            continue
        known.append(cut)
        text, own, theirs = next(each for each in zip(texts, ours, cut, strict=True) if each[1] != each[2])
        yield (
            f"{target.directory}: servers should cut {text!r} into {own}, as {type(tokenizer).__name__} here, but "
            f"{cutter} gives {theirs}; {mends.get(cutter, mend)}"
        )
    mistral = [path.name for name in MISTRAL for path in sorted(target.directory.glob(name))]
    if any(name.startswith("consolidated") for name in mistral):
        has_own = any(name.startswith("tek") or ".v" in name for name in mistral)
        as_text = ", the tokenizer by mistral_common, which takes names of special tokens in a chat for plain text"
        yield (
            f"{target.directory}: servers should read the weights, settings and tokenizer that are read here, but vLLM "
            f"0.32 reads {', '.join(mistral)} instead{as_text * has_own}; start it with --load-format hf "
            "--config-format hf --tokenizer-mode hf, or remove these files"
        )


def _as_llama_reads(tokenizer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a tokenizer.json as llama.cpp b11434 reads it from a GGUF file whose `general.name` this is.

    It knows no flags of added tokens, except `rstrip` for Phi-3, and of byte-level BPE no normalizer or first space.
    With SentencePiece, the space that begins a text is after each special token too.
    """
    is_phi = re.search("phi-?3", name.lower()) is not None
    added = [
        token | dict.fromkeys(FLAGS, False) | {"rstrip": is_phi and token["content"] not in NOT_OF_PHI}
        for token in tokenizer["added_tokens"]
    ]
    changed = deepcopy({**tokenizer, "added_tokens": added})
    steps = changed["pre_tokenizer"] or {}
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "ByteLevel":
            step["add_prefix_space"], changed["normalizer"] = False, None
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "always"
    return changed


def _cut(load: Callable[[], Any], texts: Sequence[str]) -> list[Any]:
    """Returns the tokens of texts by a tokenizer, or the error of one that is for other files."""
    try:
        tokenizer = load()
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    except Exception as error:
        return [error_summary(error)] * len(texts)


def _added(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the tokens that a tokenizer puts before and after a text."""
    ids, plain = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (True, False))
    start = next((place for place in range(len(ids)) if ids[place : place + len(plain)] == plain), 0)
    return ids[:start], ids[start + len(plain) :]


def _restored(target: TargetFiles) -> PreTrainedTokenizerBase:
    """Returns the tokenizer with the post-processor that SGLang 0.5.23 gives it (srt/utils/hf_transformers)."""
    tokenizer, path = deepcopy(target.tokenizer), target.directory / CONFIG
    settings = read_json(path) if path.is_file() else {}
    adds_bos = settings.get("add_bos_token")
    wanted = {"add_bos_token": adds_bos is None or adds_bos, "add_eos_token": False}
    if re.fullmatch(RESTORED, settings.get("tokenizer_class") or "") and any(
        getattr(tokenizer, name, None) != value for name, value in wanted.items()
    ):
        for name, value in wanted.items():
            setattr(tokenizer, name, value)
    return tokenizer


def texts_elsewhere(documents: Sequence[NDArray[Any]], target: TargetFiles) -> Iterator[str]:
    """Yields how a server begins or ends texts otherwise than documents [S each] and each other, and what to do."""
    yield from tokens_elsewhere(target)
    tokenizer, llama = target.tokenizer, llama_tokens(target)
    (first, last), (restored_first, restored_last) = map(_added, (tokenizer, _restored(target)))
    firsts = {"SGLang": (restored_first, f"set add_bos_token in {CONFIG} to {str(bool(first)).lower()}")}
    if llama.unknown:
        yield llama.unknown
    else:
        override = OVERRIDE.format("bos", str(bool(first)).lower())
        if first and first != [llama.ids["bos"]]:
            override += f" and --override-kv {TOKENIZER}bos_token_id=int:{first[0]}"
        firsts["llama-server"] = llama.first, f"start it with {override}"
    for server, (tokens, mend) in firsts.items():
        if tokens != first:
            ours, theirs = (repr(tokenizer.decode(each)) if each else "no token" for each in (first, tokens))
            yield (
                f"{target.directory}: {server} should begin texts with {ours}, as the tokenizer, and so vLLM, but "
                f"begins them with {theirs}; {mend}"
            )
    sides = {"vLLM, as the tokenizer does": bool(last), "SGLang": bool(restored_last)}
    sides["llama-server"] = llama.adds["eos"] and not llama.unknown
    if enders := ", and ".join(name for name, side in sides.items() if side):
        end = tokenizer.decode(last or [llama.ids["eos"]])
        yield (
            f"{target.directory}: the text of a prompt should end without {end}, as documents go on "
            f"after it, but it is added by {enders}; correct the post-processor in tokenizer.json, start "
            f"llama-server with {OVERRIDE.format('eos', 'false')}, or give prompts as token ids"
        )
    bos_id = tokenizer.bos_token_id
    expected = first.count(bos_id)
    num_bos = [sum(1 for _ in takewhile(lambda token: token == bos_id, ids[:2])) for ids in documents]
    for number in {*num_bos} - {expected}:
        advice = "correct the data"
        if number == 1:  # as `text_files` does
            advice = f"begin the text of each prompt with {tokenizer.bos_token}"
        yield (
            f"prompts: documents should begin with {expected} {tokenizer.bos_token}, as the tokenizer begins texts, "
            f"here and in servers, but {num_bos.count(number):,} of {len(documents):,} begin with {number}; "
            f"{advice}, or give prompts as token ids"
        )
