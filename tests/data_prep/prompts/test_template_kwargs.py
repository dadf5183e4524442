"""Tests that every stage renders chats in the mode of the chat template that `prompts.template_kwargs` choose."""

import json
from pathlib import Path

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.responses.regenerate import prepare_responses
from mtptrain.data.prompt_files import PromptsManifest
from mtptrain.run import Run
from mtptrain.target.hub import load_tokenizer
from tests.data_prep.hidden_states.stage import ONE_RANK
from tests.data_prep.prompts.documents import ConfigFor, chat, read_output
from tests.data_prep.speaking import fake_server, make_speaking_target
from tests.data_prep.templates import BLOCK, QWEN3

# Like Qwen3's template, this closes the think block in the prompt if the target is not to think.
MODES = QWEN3.replace("<|im_end|>", "<|end|>") + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
NOT_THINKING = "+prompts.template_kwargs={enable_thinking: false}"
CHATS = [chat(f"chat{i}", f"question {i}", f"answer {i}", f"next {i}", f"end {i}") for i in range(12)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_speaking_target(tmp_path / "target", chat_template=MODES)


def test_a_closed_think_block_is_part_of_each_prompt_and_not_supervised(chat_config: ConfigFor, target: Path) -> None:
    config = chat_config(CHATS, f"target.path={target}", NOT_THINKING)
    report = prepare_prompts(Run(config))
    tokenizer, supervised = load_tokenizer(target), []
    for documents in read_output(config).values():
        for entry, tokens, mask in documents:
            start, number = mask.index(1), int(entry.name.removeprefix("chat"))
            messages = CHATS[number]["messages"][: 1 if entry.turn else 3]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert tokenizer.decode(tokens[:start]) == prompt + BLOCK
            supervised.append(tokenizer.decode([token for token, is_set in zip(tokens, mask, strict=True) if is_set]))
    assert sorted(supervised) == sorted(f"{word} {i}<|end|>" for i in range(12) for word in ("answer", "end"))
    assert report.answers_inserted == 0
    assert PromptsManifest.read(config.stage_dir("prompts")).tokenizer.template_kwargs == '{"enable_thinking": false}'


def test_without_the_setting_an_inserted_think_block_is_counted_and_not_supervised(
    chat_config: ConfigFor, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = chat_config(CHATS, f"target.path={target}")
    report = prepare_prompts(Run(config))
    tokenizer = load_tokenizer(target)
    for documents in read_output(config).values():
        for _, tokens, mask in documents:
            supervised = tokenizer.decode([token for token, is_set in zip(tokens, mask, strict=True) if is_set])
            assert supervised.startswith(("answer", "end")) and BLOCK in tokenizer.decode(tokens)
    assert report.answers_inserted == 24


def test_hidden_states_of_prompts_in_another_mode_are_refused_with_both_modes(
    chat_config: ConfigFor, target: Path
) -> None:
    config = chat_config(CHATS, f"target.path={target}", NOT_THINKING)
    prepare_prompts(Run(config))
    assert Run(config).identity(()).target.template_kwargs == '{"enable_thinking": false}'
    config.prompts.template_kwargs = {}
    with pytest.raises(
        ValueError,
        match=r'json: chat_template_sha256 must be .*; template_kwargs must be {}, but is {"enable_thinking": false}; '
        r"run mtptrain prompts again with target .* and no prompts.template_kwargs$",
    ):
        Run(config).identity(())


def test_a_server_gets_prompts_in_the_chosen_mode_and_its_answers_are_used_in_no_other(
    chat_config: ConfigFor, target: Path
) -> None:
    overrides = (f"target.path={target}", "prompts.source=responses", "responses.max_new_tokens=16", NOT_THINKING)
    tokenizer = load_tokenizer(target)
    with fake_server() as server:
        config = chat_config(CHATS, *overrides, f"responses.url={server.url}")
        prepare_responses(Run(config), ONE_RANK)
        asked = {tuple(request["prompt"]) for request in server.requests}
    firsts = [
        tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        for row in CHATS
    ]
    assert {tuple(first) for first in firsts} <= asked and len(asked) == 24
    assert all(tokenizer.decode(list(prompt)).endswith(BLOCK) for prompt in asked)
    assert prepare_prompts(Run(config)).answers_left_out == 0
    config.prompts.template_kwargs = {}
    with pytest.raises(ValueError, match=r"the mode of the chat template \(prompts.template_kwargs\) must be {}, but"):
        prepare_prompts(Run(config))


def test_acceptance_asks_the_prompts_of_a_file_in_the_chosen_mode(
    config_for: ConfigFor, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "asked.jsonl").write_text(json.dumps({"id": 1, "turns": ["hi"]}))
    overrides = (f"acceptance.prompts_file={tmp_path}/asked.jsonl", "acceptance.max_new_tokens=8", NOT_THINKING)
    prompts = Run(config_for(f"target.path={target}", *overrides)).measured_prompts()
    assert load_tokenizer(target).decode(prompts.input_ids["1"]).endswith("assistant\n" + BLOCK)
