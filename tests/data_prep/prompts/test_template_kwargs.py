"""Tests that every stage renders chats in the mode of the chat template that `prompts.template_kwargs` choose."""

from pathlib import Path

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.responses.regenerate import prepare_responses
from mtptrain.data.prompt_files import PromptsManifest
from mtptrain.run_dir import Run
from mtptrain.target.hub import load_tokenizer
from tests.data_prep.hidden_states.stage import ONE_RANK
from tests.data_prep.prompts.documents import ConfigFor, chat, read_texts
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


def test_an_empty_think_block_is_not_supervised_whether_or_not_the_prompt_holds_it(
    chat_config: ConfigFor, target: Path
) -> None:
    for mode in (NOT_THINKING, "prompts.schema=auto"):
        config = chat_config(CHATS, f"target.path={target}", mode)
        prepare_prompts(Run(config))
        texts = read_texts(config)
        for i, row in enumerate(CHATS):
            parts = dict(texts[row["id"]])
            assert sorted(parts.values()) == [f"answer {i}<|end|>", f"end {i}<|end|>"]
            assert all(text.removesuffix("\n").endswith(BLOCK + supervised) for text, supervised in parts.items())
        if mode == NOT_THINKING:
            stored = PromptsManifest.read(config.stage_dir("prompts")).tokenizer.template_kwargs
            assert stored == '{"enable_thinking": false}'


def test_a_server_gets_prompts_in_the_chosen_mode_and_its_answers_are_used_in_no_other(
    chat_config: ConfigFor, target: Path
) -> None:
    overrides = (f"target.path={target}", "prompts.source=responses", "responses.max_new_tokens=16", NOT_THINKING)
    tokenizer = load_tokenizer(target)
    with fake_server() as server:
        config = chat_config(CHATS, *overrides, f"responses.url={server.url}")
        prepare_responses(Run(config), ONE_RANK)
        asked = {tuple(request["prompt"]) for request in server.requests}
    assert len(asked) == 24
    assert all(tokenizer.decode(list(prompt)).endswith(BLOCK) for prompt in asked)
    assert prepare_prompts(Run(config)).counts["answers_left_out"] == 0
    config.prompts.template_kwargs = {}
    with pytest.raises(ValueError, match=r"the mode of the chat template \(prompts.template_kwargs\) must be {}, but"):
        prepare_prompts(Run(config))
