"""Finds where servers read a chat or a text otherwise than it is read here: another chat template, another beginning.

A target may have several chat templates. transformers, and with it vLLM and SGLang, prefers `chat_template.jinja` to
`tokenizer_config.json`; llama.cpp's converter prefers the latter (gguf/vocab.py). For a target with images, vLLM takes
the template of transformers' processor, which prefers `chat_template.json` to both (processing_utils.py).
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import dropwhile, takewhile
from typing import Any

from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import FILE
from mtptrain.target.gguf import CHAT_TEMPLATE, TOKENIZER, read_header
from mtptrain.target.llama_tokens import llama_tokens
from mtptrain.utils.files import read_json

JINJA, CONFIG, LEGACY = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
PROBE = "\ue000"  # from Unicode's private use area, so no template writes it
READERS = {CONFIG: "llama.cpp's converter", LEGACY: "processors of targets with images"}
"""Who takes the template of a file that is not the one that transformers takes. That of a GGUF file is llama.cpp's."""
PASSED_OVER = re.compile(r"(?<=-[%#}]\})\s+\Z|(?<=[%#]\})\n{1,2}\Z|\n\Z")
"""A line break at the end of a template, two after a block or comment (`trim_blocks`), all space after a minus sign."""
OVERRIDE = "--override-kv tokenizer.ggml.add_{}_token=bool:{}"


def chats_elsewhere(target: TargetFiles) -> Iterator[str]:
    """Yields how some servers render chats otherwise than they are rendered here, and what to do about it."""
    # 1. Compare the chat templates of all files. transformers takes the first.
    in_gguf = {} if target.gguf is None or not target.gguf.is_file() else read_header(target.gguf).metadata
    files = [target.directory / JINJA, *target.directory.glob("additional_chat_templates/*.jinja")]
    first = next((str(path.relative_to(target.directory)) for path in files if path.is_file()), JINJA)
    settings = {name: read_json(path) for name in (CONFIG, LEGACY) if (path := target.directory / name).is_file()}
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
    if found and not is_converted and not in_gguf:
        yield (
            f"{target.directory}: all servers should find the chat template of {ours}, but {READERS[CONFIG]} takes "
            f"none, as for `chat_template: null` in {CONFIG}; remove such a key, and keep the template in {JINJA}"
        )
    # 2. Compare what llama-server makes of a chat, which gives its own tokens to the template, and adds them itself.
    tokenizer, llama = target.tokenizer, llama_tokens(target)
    bos, eos = (str(tokenizer.decode([llama.ids[name]])) for name in ("bos", "eos"))
    messages = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for chat in (messages[:1], messages):
        ours, theirs = _rendered(tokenizer, *chat), _rendered(tokenizer, *chat, bos_token=bos, eos_token=eos)
        if llama.adds["bos"]:
            theirs = bos + theirs.removeprefix(bos)
        if ours and ours != theirs:
            mend = f"name the same bos_token and eos_token in {CONFIG}, in config.json and in the GGUF file"
            if llama.adds["bos"] and theirs == bos + ours:
                mend = f"correct the template, or start llama-server with {OVERRIDE.format('bos', 'false')}"
            yield (
                f"{target.directory}: llama-server should make the same text of a chat as the tokenizer, and so vLLM "
                f"and SGLang, but makes {theirs!r} of one that is {ours!r} here; {mend}"
            )
            break
    if llama.adds["eos"]:
        yield (
            f"{target.directory}: an answer should follow the prompt of a chat at once, as here, in vLLM and in SGLang,"
            f" but llama-server adds {eos} to the prompt; start it with {OVERRIDE.format('eos', 'false')}"
        )

    # 3. Find out whether servers end an answer where the template does.
    ends = target.generation.eos_token_ids
    token, text = end_of_turn(tokenizer, ends)
    if text and token not in ends:
        advice = (
            f"add {token} to eos_token_id in {FILE}" if token is not None else "send it as `stop` with each request"
        )
        yield (
            f"{target.directory}: servers should end an answer at {text!r}, with which the chat template ends it, but "
            f"write past it: they end at {', '.join(map(str, ends)) or 'no token'}; {advice}"
        )


def end_of_turn(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()) -> tuple[int | None, str]:
    """Returns the special token with which the template ends an answer, if there is one, and all that it writes there.

    Of several in a row, it is one of the known ends, if one of these is among them: there an answer ends.
    """
    answer = {"role": "assistant", "content": PROBE}
    after = _rendered(tokenizer, {"role": "user", "content": "?"}, answer).partition(PROBE)[2]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special} | {*ends}
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    found = list(takewhile(special.__contains__, dropwhile(lambda token: token not in special, ids)))
    return next((token for token in found if token in ends), found[0] if found else None), after.strip()


def _templates(stored: Any) -> tuple[str, str]:
    """Returns the templates for chats without and with tools, without what Jinja passes over at their ends."""
    if isinstance(stored, list):
        stored = {each.get("name"): each.get("template") for each in stored if isinstance(each, dict)}
    named = stored if isinstance(stored, dict) else {"default": stored if isinstance(stored, str) else ""}
    default = named.get("default") or ""
    return PASSED_OVER.sub("", default), PASSED_OVER.sub("", named.get("tool_use") or default)


def _rendered(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, str], **variables: Any) -> str:
    """Returns a chat as text, after a system message if the template, an unknown program, demands one; "" on errors."""
    for first in ([], [{"role": "system", "content": "s"}]):
        with suppress(Exception):
            return str(tokenizer.apply_chat_template([*first, *messages], tokenize=False, **variables))
    return ""


def texts_elsewhere(documents: Sequence[NDArray[Any]], target: TargetFiles) -> Iterator[str]:
    """Yields how a server begins or ends texts otherwise than documents [S each] and each other, and what to do."""
    tokenizer, llama = target.tokenizer, llama_tokens(target)
    ids, plain = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (True, False))
    start = next((place for place in range(len(ids)) if ids[place : place + len(plain)] == plain), 0)
    first, last = ids[:start], ids[start + len(plain) :]
    if llama.first != first:
        ours, theirs = (repr(tokenizer.decode(each)) if each else "no token" for each in (first, llama.first))
        override = OVERRIDE.format("bos", str(bool(first)).lower())
        if first and first != [llama.ids["bos"]]:
            override += f" and --override-kv {TOKENIZER}bos_token_id=int:{first[0]}"
        yield (
            f"{target.directory}: llama-server should begin texts with {ours}, as the tokenizer, and so vLLM and "
            f"SGLang, but begins them with {theirs}; start it with {override}"
        )
    sides = {"vLLM and SGLang, as the tokenizer does": last, "llama-server": llama.adds["eos"]}
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
        yield (
            f"prompts: documents should begin with {expected} {tokenizer.bos_token}, as the tokenizer begins texts, "
            f"here and in servers, but {num_bos.count(number):,} of {len(documents):,} begin with {number}; "
            "correct the data, or give prompts as token ids"
        )
