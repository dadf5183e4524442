"""Tests that chats and texts which a server would render otherwise than they are trained are named."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers.processors import ByteLevel, TemplateProcessing

from mtptrain.engines.table import engine_of
from mtptrain.target.files import TargetFiles
from mtptrain.target.hub import DEMO_DIR
from mtptrain.target.served_chats import chats_elsewhere, end_of_turn
from mtptrain.target.served_tokens import texts_elsewhere
from tests.conftest import make_target, make_tokenizer
from tests.gguf_files import tokenizer_settings, write_gguf

A, B = "{{ bos_token }}{{ messages[0].content }}", "<<{{ messages[0].content }}"
NAMED = [{"name": "default", "template": A}, {"name": "tool_use", "template": B}]
JINJA, CONFIG, LEGACY = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
CALL = (
    "{% if messages[-1].tool_calls %}{{ messages[-1].tool_calls[0].function.arguments.a }}{% else %}<|end|>{% endif %}"
)
GGUF, TOOLS, ADDED = "target.gguf", "additional_chat_templates/tool_use.jinja", r"but makes '<\|end.*bool:false"
END_ADDED = r"llama-server adds <\|end\|> to the prompt; .*add_eos_token=bool:false"
ENDING = {"an EOS of a GGUF file", "an EOS of the tokenizer", "another end of the tokenizer"}
CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {  # the templates, what puts BOS before texts, what is said
    "two that differ": ({JINJA: A, CONFIG: B}, "", [f"{JINJA}, taken .* that of {CONFIG}, taken by llama.cpp's conv"]),
    "a list for tools": ({JINJA: A, CONFIG: NAMED}, "", [f"differs from that of {CONFIG}"]),
    "a folder for tools": ({JINJA: A, TOOLS: B, CONFIG: A}, "", [f"differs from that of {CONFIG}"]),
    "of a processor": ({CONFIG: A, LEGACY: B}, "", [f"{CONFIG}, taken .* that of {LEGACY}, taken by processors of"]),
    "of a processor's settings": (
        {CONFIG: A, "processor_config.json": B},
        "",
        ["that of processor_config.json, taken"],
    ),
    "of a GGUF file": ({JINJA: A, CONFIG: A, GGUF: B}, GGUF, [rf"that of \S+/{GGUF}, taken by llama.cpp;"]),
    "equal ones": ({JINJA: A + "\n", CONFIG: A, LEGACY: A, GGUF: A}, "a post-processor", []),
    "equal ones for tools": ({JINJA: A, TOOLS: B, CONFIG: NAMED}, "", []),
    "a BOS before one for tools": ({JINJA: A, TOOLS: B, CONFIG: NAMED}, CONFIG, [ADDED]),
    "a BOS of the tokenizer": ({JINJA: B}, "a post-processor", [ADDED]),
    "a BOS by a setting": ({CONFIG: B}, CONFIG, [ADDED]),
    "a BOS of a GGUF file": ({JINJA: B, GGUF: B}, GGUF, [ADDED]),
    "a BOS that a setting denies": ({JINJA: B}, "a post-processor that a setting denies", [ADDED]),
    "line breaks": ({JINJA: A + "\n\n", CONFIG: A}, "", [f"that of {JINJA}, taken"]),
    "line breaks after a block": ({JINJA: A + "{% set a = 1 %}\n\n", CONFIG: A + "{% set a = 1 %}"}, "", []),
    "no template but one for tools": ({TOOLS: B, CONFIG: A}, "", [f"that of {TOOLS}, taken"]),
    "none for llama.cpp": ({JINJA: A, CONFIG: None}, "", [f"none, as for `chat_template: null` in {CONFIG}"]),
    "no BOS in a GGUF file": ({JINJA: B, GGUF: B}, "a post-processor", []),
    "an EOS of the tokenizer": ({JINJA: A}, "", [END_ADDED]),
    "another end of the tokenizer": ({JINJA: A}, "", ["llama-server adds <user> to the prompt;"]),
    "an EOS of a GGUF file": ({JINJA: A, GGUF: A}, "", ["llama-server adds <user> to the prompt;"]),
    "a BOS of config.json alone": ({JINJA: A}, "config.json", [r"makes '<\|end\|>a' of one that is 'a' here; name"]),
    "another BOS in a GGUF file": ({JINJA: A, GGUF: A}, "", [r"makes '<user>a' of one that is '<\|end\|>a' here;"]),
    "a BOS without the post-processor": ({JINJA: B}, "a setting beside a post-processor", []),
    "an end of a turn": ({JINJA: A + "{{ messages[-1].content }}<|end|>"}, "", []),
    "another token": ({JINJA: A + "{{ messages[-1].content }}<user>"}, "", ["'<user>', .*; add 258 to eos_token_id"]),
    "another token before an end": ({JINJA: A + "{{ messages[-1].content }}<user><|end|>"}, "", []),
    "a token after a system message": (
        {JINJA: "{% if messages[0].role == 'user' %}{{ 1 // 0 }}{% endif %}{{ messages[-1].content }}<user>"},
        "",
        ["'<user>', .*; add 258 to eos_token_id"],
    ),
    "a text": ({JINJA: A + "{{ messages[-1].content }}</turn>"}, "", ["'</turn>', .* end at 256; send it as `stop`"]),
    "line breaks of Windows": ({JINJA: A + "\r\nb", CONFIG: A + "\r\nb", GGUF: A + "\nb"}, "", []),
    "a date that llama-server sets": (
        {JINJA: "{{ date_string if date_string is defined else '26 Jul 2024' }}" + A},
        "",
        ["llama-server sets date_string, .*prompts.template_kwargs.date_string to a day"],
    ),
    "today's date": ({JINJA: "{{ strftime_now('%d %b') }}" + A}, "", ["today's date; write a day in place of strf"]),
    "today's date, or a variable": (
        {JINJA: "{{ day if day is defined else strftime_now('%d %b') }}{{ no_day }}" + A},
        "",
        [r"writes today's date; set \+prompts.template_kwargs.day to a day, and send it in each request"],
    ),
    "today's date without a system message": (
        {JINJA: "{% if messages[0].role != 'system' %}{{ strftime_now('%d %b') }}{% endif %}" + A},
        "",
        ["today's date; write a day"],
    ),
    "today's date beside tools": (
        {JINJA: "{% if tools %}{{ strftime_now('%d %b') }}{% endif %}" + A},
        "",
        ["today's date; write a day"],
    ),
    "a BOS of config.json alone beside tools": (
        {JINJA: "{% if tools %}{{ bos_token }}{% endif %}" + A.removeprefix("{{ bos_token }}")},
        "config.json",
        [r"makes '<\|end\|>a' of one that is 'a' here; name"],
    ),
    "none in a GGUF file": (
        {JINJA: A, GGUF: ""},
        "",
        [rf"but \S+/{GGUF} has none; start llama-server with --chat-tem"],
    ),
    "thoughts on request": (
        {JINJA: A + "{% if add_generation_prompt and not enable_thinking %}<-{% endif %}"},
        "",
        ["enable_thinking=true makes '<.end.>a' of one that is '<.end.>a<-' here; start .* --reasoning off, or set"],
    ),
    "tools that are none in transformers and undefined in llama.cpp": (
        {JINJA: A + "{% if tools is defined and not tools %}T{% endif %}{% if documents is not none %}D{% endif %}"},
        "",
        [r"llama-server should .* makes '<\|end\|>aD' of one that is '<\|end\|>aT' here"],
    ),
    "a token that llama.cpp does not define": (
        {JINJA: A + "{{ pad_token }}"},
        "",
        [r"llama-server .* makes '<\|end\|>a' of "],
    ),
    "a null that is joined to a text": (
        {JINJA: A + "{% if tools %}{{ '=' ~ tools[0].function.parameters.properties.a.default }}{% endif %}"},
        "",
        [r"llama-server .* makes '<.end.>a=' of one that is '<.end.>a=None' here; correct the template"],
    ),
    "a list that is sought in a list": (
        {JINJA: A + "{% if tools and tools[0].function.parameters.properties.a.type in ['string'] %}{% endif %}"},
        "",
        ["llama-server .* makes 'an error' of one that is '<.end.>a' here"],
    ),
    "thoughts by another name": (
        {JINJA: A + "{{ messages[-1].thinking }}"},
        "",
        ["llama-server .* makes '<.end.>Hi' of one that is '<.end.>Hic' here; correct"],
    ),
    "thoughts by the name of LFM2": ({JINJA: A + "{{ messages[-1].thinking }}{# List of tools: [ #}"}, "", []),
    "thoughts in blocks for Ministral": (
        {
            JINJA: "{# [SYSTEM_PROMPT][TOOL_CALLS][ARGS] #}{{ bos_token }}{% for m in messages %}"
            "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}{{ b[b.type] }}{% endfor %}"
            "{% endif %}{% endfor %}"
        },
        "",
        ["llama-server .* makes '<.end.>Hic Hi ' of one that is '<.end.>Hi Hi ' here"],
    ),
    "contents that llama.cpp trims for StepFun": (
        {JINJA: A + "{% if false %}You have access to the following functions in JSONSchema format{% endif %}"},
        "",
        [r"llama-server should .* makes '.*Hi' of one that is '.* Hi ' here"],
    ),
    "a text that llama.cpp does not mark as safe": (
        {JINJA: A + "{% if tools %}{{ '' |safe + tools[0].function.description }}{% endif %}"},
        "",
        ["llama-server .* makes '.*a<' of one that is '.*a&lt;' here"],
    ),
    **{
        f"{name} that llama.cpp prints otherwise": (
            {JINJA: A + "{% if tools %}<{{ tools[0].function" + value + " }}>{% endif %}"},
            "",
            [f"llama-server should .* makes '<.end.>a<{theirs}>' of one that is [^<]<.end.>a<{ours}>. here"],
        )
        for name, value, theirs, ours in (
            ("an object", "", "", ".'name': 'f'.*"),
            ("a list", ".parameters.required", "a", r"\['a'\]"),
            ("null", ".parameters.properties.a.default", "", "None"),
        )
    },
    "an object that is written as JSON": ({JINJA: A + "{% if tools %}{{ tools | tojson }}{% endif %}"}, "", []),
    "contents that llama.cpp makes lists for Ministral 3": (
        {JINJA: A + "{{ messages[-1].content is string }}{# [SYSTEM_PROMPT][TOOL_CALLS][ARGS] #}"},
        "",
        ["llama-server should .* makes '<.end.>aFalse' of one that is '<.end.>aTrue' here"],
    ),
    "contents that it keeps for Mistral Small": (
        {JINJA: A + "{{ messages[-1].content is string }}{# [SYSTEM_PROMPT][TOOL_CALLS][CALL_ID][ARGS] #}"},
        "",
        [],
    ),
    "another token after a call": (
        {JINJA: A + CALL.replace("{% else", "<user>{% else")},
        "",
        ["servers should end an answer at '<user>', .*; add 258 to eos_token_id"],
    ),
    "a token after a call before an end": ({JINJA: A + CALL.replace("{% else", "<user> <|end|>{% else")}, "", []),
    "an end of a turn after a token of a call": (
        {JINJA: A + CALL.replace("{% else", "<user> <system>{% else")},
        "",
        ["at '<system>', with"],
    ),
    "thoughts beside tools": (
        {JINJA: A + "{% if tools and add_generation_prompt and not enable_thinking %}<-{% endif %}"},
        "",
        ["enable_thinking=true makes '<.end.>a' of one that is '<.end.>a<-' here; start .* --reasoning off, or set"],
    ),
    "thoughts in three manners": (
        {JINJA: A + "{% if add_generation_prompt and enable_thinking is defined %}{{ enable_thinking }}{% endif %}"},
        "",
        ["makes '<.end.>aTrue' of one that is '<.end.>a' here; set .prompts.template_kwargs.enable_thinking=true"],
    ),
    "thoughts by default": (
        {
            JINJA: A
            + "<think>{{ messages[-1].reasoning_content }}</think>{{ '-' if enable_thinking is false else '+' }}"
        },
        "",
        [],
    ),
    "thoughts by default that llama.cpp may not find": (
        {JINJA: A + "{{ ('-' if enable_thinking is false else '+') if add_generation_prompt }}"},
        "",
        ["enable_thinking=false makes '<.end.>a-' of one that is '<.end.>a.' here; start it with --reasoning on, or"],
    ),
    "a token in a second turn that llama.cpp does not define": (
        {JINJA: A + "{% if messages | length > 2 %}{{ pad_token }}{% endif %}"},
        "",
        [r"llama-server .* makes '<\|end\|>a' of one that is '<\|end\|>a<system>' here"],
    ),
    "thoughts of earlier answers": (
        {JINJA: A + "{% if preserve_thinking %}{{ messages[1].reasoning_content }}{% endif %}"},
        "",
        ["sets preserve_thinking and makes '<.end.>ac' of one .* --no-reasoning-preserve, or set .*thinking=true$"],
    ),
    "an empty thought of earlier answers": (
        {JINJA: A + "{% if messages[2] %}{{ '' if drop_thinking | default(true) or tools else '-' }}{% endif %}"},
        "",
        ["sets drop_thinking and makes '<.end.>a-' .* --no-reasoning-preserve, or set .*drop_thinking=false$"],
    ),
    "thoughts in a third manner": (
        {JINJA: A + "{% if messages[2] and tools %}{{ clear_thinking }}{% endif %}"},
        "",
        ["sets clear_thinking and makes '<.end.>aFalse' of one that is '<.end.>a' here; set .*clear_thinking=false$"],
    ),
    "no template": ({CONFIG: 5, LEGACY: [{"template": A}]}, "", []),
}


@pytest.mark.parametrize("case", CASES)
def test_chats_that_a_server_renders_otherwise_are_named_with_who_does(
    tmp_path: Path, tiny_target: Path, case: str
) -> None:
    templates, adds_bos, said = CASES[case]
    tokenizer, gguf = make_tokenizer(None), tmp_path / GGUF
    tokenizer.bos_token, tokenizer.pad_token = "<|end|>", "<system>"
    single = "<|end|> $A" if adds_bos.startswith("a post-processor") else "$A <|end|>"
    if adds_bos.startswith("a post-processor") or (case in ENDING and GGUF not in templates):
        single = "$A <user>" if case.startswith("another end") else single
        processor = TemplateProcessing(single=single, special_tokens=[("<|end|>", 256), ("<user>", 258)])
        tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(tiny_target / "config.json", tmp_path)
    settings = json.loads((tmp_path / CONFIG).read_text()) | ({"add_bos_token": True} if adds_bos == CONFIG else {})
    del settings["chat_template"]  # null
    if adds_bos == "a post-processor that a setting denies":
        settings["add_bos_token"] = False
    if adds_bos == "a setting beside a post-processor":  # for which the converter passes over the setting
        tokenizer.backend_tokenizer.post_processor = ByteLevel()
        tokenizer.save_pretrained(tmp_path)
        settings["add_bos_token"] = True
    if adds_bos == "config.json":
        del settings["bos_token"]
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": 256}))
    (tmp_path / TOOLS).parent.mkdir()
    for name, template in ({CONFIG: ()} | templates).items():
        own = {} if template == () else {"chat_template": template}
        text = template if name.endswith("jinja") else json.dumps(settings | own)
        (tmp_path / name).write_text(text)
    if GGUF in templates:
        added = {
            f"tokenizer.ggml.add_{name}_token": value
            for name, value in (("bos", adds_bos == GGUF), ("eos", case in ENDING))
        }
        added |= {
            "tokenizer.chat_template": templates[GGUF],
            "tokenizer.ggml.bos_token_id": 258 if "another BOS" in case else 256,
        }
        write_gguf(gguf, tiny_target, settings=added | ({"tokenizer.ggml.eos_token_id": 258} if "EOS" in case else {}))
    found = list(chats_elsewhere(TargetFiles(tmp_path, given_gguf=str(gguf) if GGUF in templates else None)))
    assert len(found) == len(said) and all(map(re.search, said, found)), found


LOOP = "{% for part in X %}{{ part.text }}{% endfor %}"
EACH = (
    "{% for message in messages %}"
    "{% if message.content is string %}{{ message.content }}{% else %}LOOP{% endif %}{% endfor %}"
)
CONTENT = "message['content']"
FIRST = "{% set first = messages[0].content | trim %}{% set messages = messages[1:] %}{{ first }}"


NO_LEADER = "{% if messages[0].role == 'user' %}{{ '' if messages[0].content is string else 1 // 0 }}{% endif %}"
MACRO = "{% macro m(of) %}" + LOOP.replace("X", "of") + "{% endmacro %}"


@pytest.mark.parametrize(
    ("before", "parts", "loops_over", "said"),
    [
        (FIRST, LOOP, CONTENT, r"makes \"\[\{'type': 'text'.* is 'Hi Hi  Hi ' here; start"),  # as Llama 3.2 Vision
        ("", LOOP, "message.content | list", ""),  # the same text
        ("", LOOP.replace("part.text", "part.text | trim"), "message.content[:9]", "makes 'HiHiHi' of"),
        ("", LOOP.replace("part.text", "1 // 0"), CONTENT, "makes 'an error' of"),
        (NO_LEADER, LOOP, CONTENT, "makes 'an error' of one that is ' Hi  Hi ' here"),
        ("{{ messages[0].content + '!' }}", LOOP, CONTENT, "makes 'an error' of one that is ' Hi ! Hi  Hi  Hi ' here"),
        (MACRO, "-{{ m(message.content) }}", "", "makes '- Hi - Hi - Hi ' of"),
        (MACRO, "-{{ m(of=message.content) }}", "", "makes '- Hi - Hi - Hi ' of"),
        (MACRO + "{{ m([]) }}" + FIRST, "-", "", ""),
        (
            "{% if tools %}" + FIRST + "{% endif %}",
            LOOP,
            CONTENT,
            r"makes \"\[\{'type': 'text'.* is 'Hi Hi  Hi ' here; start",
        ),
        (FIRST, "{% set content = message.content %}" + LOOP, "content", "makes"),
        (FIRST, "{% set text = message.content %}" + LOOP, "text", ""),  # in which vLLM sees no loop
        (FIRST, "{{ message.content | join }}", "", ""),
        (
            "<{% for message in messages %}" + LOOP.replace("X", CONTENT) + "{% endfor %}{% set messages = [] %}",
            "",
            "",
            "",
        ),
    ],
)
def test_a_template_that_loops_over_content_gets_texts_as_lists_from_vllm(
    tmp_path: Path, before: str, parts: str, loops_over: str, said: str
) -> None:
    template = before + EACH.replace("LOOP", parts.replace("X", loops_over))
    directory = make_target(tmp_path, chat_template=template)
    found = [
        each for each in chats_elsewhere(TargetFiles(directory)) if "--chat-template-content-format string" in each
    ]
    assert len(found) == bool(said) and all(re.search(said, each) for each in found), found


VLLM, OPENVINO = r"5\.19 \(of vLLM 0\.32\)", r"5\.5 \(of OpenVINO 2026\.4\.1\)"
OTHERS = r"\[40, 83, 6, 82, 16, 17, 18, 19, 20, 86, 78, 81, 67, 82, 64\]"  # without spaces, as both versions answer
STORED = "Qwen2Tokenizer here, but tokenizer.json itself gives"
FAST = "LlamaTokenizerFast"


@pytest.mark.parametrize(
    ("name", "family", "said"),
    [
        *((name, "llama", "") for name in ("PreTrainedTokenizerFast", "TokenizersBackend", "OfTheirOwn")),
        (FAST, "llama", rf"but {FAST}, which transformers {VLLM} and {OPENVINO} chooses, gives {OTHERS}; set"),
        ("LlamaTokenizer", "qwen3", rf"but LlamaTokenizer, which transformers {VLLM} chooses, gives {OTHERS}; set"),
        *((FAST, family, "") for family in ("deepseek_v3", "mistral", "qwen2")),
        *((None, "phi3", ""), (None, "qwen3", STORED)),
        (None, "llama", rf"but CodeLlamaTokenizer, which transformers {OPENVINO} chooses, gives Exception: Unk token"),
    ],
)
def test_a_class_of_the_tokenizer_that_some_versions_read_otherwise_is_named(
    tmp_path: Path, name: str | None, family: str, said: str
) -> None:
    directory = make_target(tmp_path)
    split = {"type": "Split", "pattern": {"Regex": "[0-9]+"}, "behavior": "Removed", "invert": False}
    for file, key, value in (
        (CONFIG, "tokenizer_class", name),
        ("config.json", "model_type", family),
        *((("tokenizer.json", "pre_tokenizer", split),) if said == STORED else ()),
    ):
        content = json.loads((directory / file).read_text())
        if key == "pre_tokenizer":
            value = {"type": "Sequence", "pretokenizers": [split, content[key]]}
        (directory / file).write_text(json.dumps(content | {key: value}))
    for elsewhere in (chats_elsewhere(TargetFiles(directory)), texts_elsewhere([], TargetFiles(directory))):
        found = [each for each in elsewhere if "servers should cut" in each]
        assert len(found) == bool(said) and all(re.search(said, each) for each in found), found


def test_a_template_that_loops_over_content_with_calls_alone_is_named(tmp_path: Path) -> None:
    with_calls = "{% if message.tool_calls %}{{ message.content }}{% else %}" + LOOP.replace("X", "message.content")
    directory = make_target(tmp_path, chat_template=EACH.replace("LOOP", with_calls + "{% endif %}"))
    assert [each for each in chats_elsewhere(TargetFiles(directory)) if "--chat-template-content-format" in each]


def test_a_template_that_has_no_text_beside_calls_is_named_if_vllm_makes_a_list_of_null(tmp_path: Path) -> None:
    first = EACH.replace("LOOP", "{{ message.content[0].text }}")  # as Devstral's, of an answer
    looping = EACH.replace("LOOP", LOOP.replace("X", "message.content"))
    for template, said in (
        (looping, []),
        (first + "{% if false %}" + looping + "{% endif %}", ["makes 'an error' of"]),
    ):
        directory = make_target(tmp_path, chat_template=template)
        found = [each for each in chats_elsewhere(TargetFiles(directory)) if "null as an empty one" in each]
        assert len(found) == len(said) and all(map(re.search, said, found)), found


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", []),
        (
            "{# 'developer' #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
            ["'<system>s<user>Hi' o"],
        ),
        ("{# 'developer' <|channel|> #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", []),
        ("{# 'developer' #}{% for m in messages %}{{ m.content }}{% endfor %}", []),
    ],
)
def test_a_template_that_knows_developers_is_named_if_llama_cpp_makes_other_text(
    tmp_path: Path, template: str, said: list[str]
) -> None:
    directory = make_target(tmp_path, chat_template=template)
    found = [each for each in chats_elsewhere(TargetFiles(directory)) if "prompts.roles.developer=system" in each]
    assert len(found) == len(said) and all(map(re.search, said, found)), found


def test_a_tokenizer_that_splits_special_tokens_is_to_be_mended_there(tmp_path: Path) -> None:
    stored = make_target(tmp_path) / CONFIG
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"split_special_tokens": True}))
    found = [each for each in chats_elsewhere(TargetFiles(tmp_path)) if "servers should cut" in each]
    assert found and all("set split_special_tokens in tokenizer_config.json to false" in each for each in found)


def test_files_that_vllm_reads_by_mistral_common_are_named(tmp_path: Path) -> None:
    directory = make_target(tmp_path)
    (directory / "tekken.json").write_text("{}")
    assert not [*texts_elsewhere([], TargetFiles(directory))]  # vLLM then reads tokenizer.json
    (directory / "consolidated.safetensors").touch()
    [found] = texts_elsewhere([], TargetFiles(directory))
    assert "vLLM 0.32 reads consolidated.safetensors, tekken.json instead, the tokenizer by mistral_common" in found
    (directory / "tekken.json").unlink()
    (directory / "params.json").write_text("{}")
    [found] = chats_elsewhere(TargetFiles(directory))
    assert "vLLM 0.32 reads consolidated.safetensors, params.json instead; start it with --load-format hf --c" in found


def test_other_tokens_of_a_gguf_file_are_named(tmp_path: Path) -> None:
    directory = make_target(tmp_path)
    settings = tokenizer_settings(256)
    tokens, kinds = (settings[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    swapped = [*tokens[:256], tokens[258], tokens[257], tokens[256], *tokens[259:]]
    for name, changed, said in (
        ("tokens", tokens, []),
        ("tokens", swapped, [r"\[258, .* here, but llama.cpp, by the tokens of target.gguf, gives \[256, "]),
        ("token_type", [*kinds[:258], 1, *kinds[259:]], [r"by the tokens of target.gguf, gives \[27, 84, 82"]),
        ("pre", "another", []),  # whose rule for words is not known
    ):
        path = tmp_path / f"{name}{len(said)}.gguf"  # beside the tokenizer.json of the target
        gguf = write_gguf(path, directory, settings={f"tokenizer.ggml.{name}": changed})
        for elsewhere in (chats_elsewhere, partial(texts_elsewhere, [])):
            found = [each for each in elsewhere(TargetFiles(directory, given_gguf=str(gguf))) if "should cut" in each]
            assert len(found) == len(said) and all(map(re.search, said, found)), found


TAGGED = "{% for message in messages %}<tag>{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("flags", "name", "template", "said"),
    [
        ({}, "", TAGGED, False),
        ({"rstrip": True}, "", TAGGED, True),
        ({"lstrip": True}, "", TAGGED, True),
        ({"single_word": True}, "", "a" + TAGGED, True),
        ({"rstrip": True}, "", TAGGED.replace("content", "content | trim"), False),  # no chat has such spaces
        ({"rstrip": True}, "Phi 3 mini", TAGGED, True),  # by which name llama.cpp does not know the family
        ({"rstrip": True}, "A phi-3", TAGGED, False),
        ({"lstrip": True}, "A phi-3", TAGGED, True),
    ],
)
def test_flags_of_added_tokens_that_llama_cpp_does_not_read_are_named(
    tmp_path: Path, flags: dict[str, bool], name: str, template: str, said: bool
) -> None:
    directory = make_target(tmp_path, chat_template=template)
    tokenizer = TargetFiles(directory).tokenizer
    tokenizer.add_tokens(AddedToken("<tag>", **flags))
    tokenizer.save_pretrained(directory)
    gguf = write_gguf(tmp_path / GGUF, directory, settings={"general.name": name}) if name else None
    target = TargetFiles(directory, given_gguf=str(gguf) if gguf else None)
    found = [each for each in chats_elsewhere(target) if "llama.cpp, which passes over" in each]
    assert len(found) == said, found


@pytest.mark.parametrize(
    ("step", "value", "said"),
    [
        ("normalizer", {"type": "Lowercase"}, True),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"}, True),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}, False),
        ("normalizer", {"type": "NFC"}, False),  # as Qwen's, which changes no letters of these texts
        (
            "pre_tokenizer",
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            True,
        ),
    ],
)
def test_steps_before_byte_level_bpe_that_llama_cpp_leaves_out_are_named(
    tmp_path: Path, step: str, value: dict[str, Any], said: bool
) -> None:
    stored = make_target(tmp_path) / "tokenizer.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {step: value}))
    found = [each for each in chats_elsewhere(TargetFiles(tmp_path)) if "llama.cpp, which passes over" in each]
    assert len(found) == said, found


def test_families_whose_ends_llama_cpp_s_converter_sets_otherwise_are_named(tmp_path: Path) -> None:
    directory = make_target(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["HunYuanDenseV1ForCausalLM"]}))
    [found] = chats_elsewhere(TargetFiles(directory))
    assert found == engine_of("llama_cpp").ends_note(TargetFiles(directory))
    assert "not known here" in found and "rules of its own for a HunYuanDenseV1ForCausalLM" in found


def test_an_end_of_a_turn_is_a_special_token_or_an_end_of_the_target(tiny_target: Path) -> None:
    tokenizer = TargetFiles(tiny_target).tokenizer
    tokenizer.chat_template = A + "{{ messages[-1].content }}x"
    [plain] = tokenizer("x", add_special_tokens=False)["input_ids"]
    assert (end_of_turn(tokenizer)[0], end_of_turn(tokenizer, (plain,))[0]) == (None, plain)


def test_texts_that_begin_or_end_otherwise_than_in_a_server_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [np.array(ids) for ids in ([0, 1], [0, 0, 1], [1], [0])]
    found = " ".join(texts_elsewhere(texts, TargetFiles(DEMO_DIR)))
    assert not caplog.records  # of gguf, whose reader finds no template for pairs of texts
    said = re.findall(r"with (\d) <.*? but (\d) of 4 begin with (\d); (\w+)", found)
    assert said == [("1", "1", "0", "correct"), ("1", "1", "2", "correct")]
    target = TargetFiles(make_target(tmp_path / "with_bos"))
    target.tokenizer.bos_token = "<user>"  # which it does not add, and `text_files` do
    [found] = texts_elsewhere([np.array([258, 1])], target)
    assert "with 0 <user>, as the tok" in found and "; begin the text of each prompt with <user>, or give" in found
    path, tokenizer = target.directory / CONFIG, make_tokenizer(None)
    tokenizer.bos_token, tokenizer.backend_tokenizer.post_processor = "<user>", ByteLevel()
    tokenizer.save_pretrained(target.directory)
    settings = json.loads(path.read_text())
    for added, class_name, said in (
        (True, "LlamaTokenizerFast", "SGLang should begin texts with no token, .* with '<user>'; set add_bos_.* false"),
        (None, "LlamaTokenizerFast", "SGLang should begin texts with no token"),
        (False, "LlamaTokenizerFast", ""),
        (True, "PreTrainedTokenizerFast", ""),
    ):
        path.write_text(json.dumps(settings | {"tokenizer_class": class_name, "add_bos_token": added}))
        found = " ".join(texts_elsewhere([], TargetFiles(target.directory)))
        assert re.search(said, found) and bool(said) is ("SGLang" in found), found
    directory = make_target(tmp_path / "target")
    for pre, added, said in (
        ("gpt-2", {}, []),
        ("gpt-2", {"bos": True}, ["with no token, .* begins them with ','; .*add_bos_token=bool:false"]),
        ("llama-bpe", {}, ["but begins them with"]),  # by default
        ("llama-bpe", {"bos": False, "eos": True}, [r"without <\|end\|>, .* is added by llama-server;"]),
    ):
        settings = {f"tokenizer.ggml.add_{name}_token": value for name, value in added.items()}
        gguf = write_gguf(tmp_path / GGUF, directory, settings=settings | {"tokenizer.ggml.pre": pre})
        found_here = list(texts_elsewhere([], TargetFiles(directory, given_gguf=str(gguf))))
        assert len(found_here) == len(said) and all(map(re.search, said, found_here)), (pre, added, found_here)


def test_a_tokenizer_of_a_gguf_file_that_is_not_known_is_named(tmp_path: Path) -> None:
    make_target(tmp_path)
    write_gguf(tmp_path / GGUF, tmp_path, settings={"tokenizer.ggml.pre": "gpt-4o"})
    said = [*texts_elsewhere([], TargetFiles(tmp_path, given_gguf=str(tmp_path / GGUF)))]
    assert any(re.search(rf"{GGUF}: .* not for a tokenizer of model gpt2, pre gpt-4o; see", each) for each in said)
