"""Tests that conversations with tools are rendered by the target's chat template, and their calls supervised."""

import json
from pathlib import Path
from typing import Any

from data_prep.prompts import prepare_prompts
from data_prep.responses.regenerate import prepare_responses
from mtptrain.run_dir import Run
from mtptrain.target.hub import load_tokenizer
from tests.conftest import make_target
from tests.data_prep.hidden_states.stage import ONE_RANK
from tests.data_prep.prompts.documents import ConfigFor, read_texts
from tests.data_prep.speaking import fake_server, make_speaking_target
from tests.data_prep.templates import refusal
from tests.mtptrain.data.test_tool_calls import PARSED, TEXT_CALL, TOOL, hermes_row, openai_row, sharegpt_row

PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
# Like Qwen's template, this writes calls between tags and results into a user turn.
QWEN = (
    "{% if tools %}<system># Tools{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<user><tool_response>\n{{ m.content }}\n</tool_response><|end|>"
    "{% else %}{{ '<' + m.role + '>' + m.content }}{% for call in m.tool_calls or [] %}{{ '<tool_call>\n' }}"
    "{{ '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}' }}"
    "{{ '\n</tool_call>' }}{% endfor %}<|end|>{% endif %}{% endfor %}" + PROMPT
)
GENERATED = f"<tool_call>\n{TEXT_CALL}\n</tool_call><|end|>"


def rows() -> list[dict[str, Any]]:
    """Returns a file in which OpenAI's, ShareGPT's and Hermes' rows follow one another, with different questions."""
    kinds = [openai_row(), sharegpt_row(TEXT_CALL, json.dumps([TOOL])), hermes_row()]
    texts = (json.dumps({"id": f"chat{i}", **kinds[i % 3]}).replace("Rome?", f"Rome on day {i}?") for i in range(18))
    return [json.loads(text) for text in texts]


def test_calls_are_supervised_as_the_template_renders_them_after_the_prompt_of_a_server(
    chat_config: ConfigFor, tmp_path: Path
) -> None:
    target = make_target(tmp_path / "target", chat_template=QWEN, max_position_embeddings=2048)
    config = chat_config(rows(), f"target.path={target}")
    assert prepare_prompts(Run(config)).refused == []
    tokenizer, texts = load_tokenizer(target), read_texts(config)
    assert len(texts) == 18
    for name, [(text, supervised)] in texts.items():
        asked = {"role": "user", "content": f"How is Rome on day {name.removeprefix('chat')}?"}
        prompt = tokenizer.apply_chat_template([asked], tools=[TOOL], tokenize=False, add_generation_prompt=True)
        assert text == tokenizer.apply_chat_template([asked, *PARSED[1:]], tools=[TOOL], tokenize=False)
        assert text.startswith(str(prompt) + GENERATED)
        assert supervised == GENERATED + "Sunny.<|end|>"


def test_what_the_template_leaves_out_of_tools_refuses_the_conversation() -> None:
    call = {"type": "function", "function": {"name": "end", "arguments": {}}}
    named_like_a_token: list[Any] = [PARSED[0], PARSED[1] | {"tool_calls": [call]}, *PARSED[2:]]  # <|end|>
    for template, messages, dropped in (
        (QWEN[QWEN.index("{% for m in messages %}") :], PARSED, "tools"),
        (QWEN.replace("m.tool_calls or []", "[]"), PARSED, "a tool call"),
        (QWEN.replace("m.tool_calls or []", "[]"), named_like_a_token, "a tool call"),
        (QWEN.replace("m.content }}\n</tool", "'' }}\n</tool"), PARSED, "a tool message"),
    ):
        assert refusal(template, messages) == f"{dropped} that the chat template does not render"


def test_the_target_answers_with_the_tools_in_its_prompt_and_its_calls_are_supervised(
    chat_config: ConfigFor, tmp_path: Path
) -> None:
    target = make_speaking_target(tmp_path / "target", chat_template=QWEN, max_position_embeddings=2048)
    tokenizer = load_tokenizer(target)
    with fake_server() as server:
        server.models = {"data": [{"id": "tiny", "max_model_len": 2048}]}
        config = chat_config(
            rows(), f"target.path={target}", "prompts.source=responses", "responses.max_new_tokens=16",
            f"responses.url={server.url}",
        )  # fmt: skip
        prepare_responses(Run(config), ONE_RANK)
        asked = [tokenizer.decode(request["prompt"]) for request in server.requests]
    assert len(asked) == 36 and all(prompt.startswith("<system># Tools\n" + json.dumps(TOOL)) for prompt in asked)
    report = prepare_prompts(Run(config))
    assert (report.refused, report.counts["answers_left_out"]) == ([], 0)
