"""Tests that the mask token of block drafters is one that the prompts do not have, or that its uses are counted."""

import json
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.prompts import prepare_prompts
from mtptrain.heads.files import save_head
from mtptrain.run_dir import Run
from mtptrain.settings.heads import DflashConfig, PeagleConfig
from mtptrain.target.hub import DEMO_DIR
from tests.data_prep.prompts.documents import ConfigFor, chat

QUESTION, ANSWER = "Is {} below infinity?", "Yes, {} is below float('infinity'), infinity by name."
CHATS = [chat(f"{i}", QUESTION.format(i), ANSWER.format(i)) for i in range(10)]
CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<|im_end|>' if m.role == 'assistant' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"
IN_ALL = "documents of the prompts"
ENDS = f"4095 ('<|im_end|>'), which occurs 10 times in the 10 {IN_ALL}, 10 of them supervised"
WORDS = f"4095 ('inity'), which occurs 30 times in the 10 {IN_ALL}, 20 of them supervised"
GIVEN = f"is 0 ('<|endoftext|>'), which occurs 20 times in the 10 {IN_ALL}, 10 of them supervised"
START = {"mask_token_id": 4095, "init_from": "published"}
CASES: dict[str, tuple[bool, int, dict[str, Any], int, str]] = {  # is it a fine-tune, vocabulary, settings, mask, said
    "the last id ends turns": (True, 4096, {}, 4094, f"4094 is taken, which does not occur, instead of {ENDS}"),
    "the last id is a word": (False, 4096, {}, 4094, f"4094 is taken, which does not occur, instead of {WORDS}"),
    "the last ids are padding": (True, 4104, {}, 4103, ""),
    "by hand": (False, 4096, {"mask_token_id": 0}, 0, f"{GIVEN}; set head.mask_token_id=4094, which does not occur"),
    "of a published head": (True, 4096, START, 4095, f"is {ENDS}; the head to start from keeps it"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_mask_is_a_token_that_no_prompt_has_or_its_uses_are_counted(
    tmp_path: Path, chat_config: ConfigFor, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    is_fine_tune, vocab_size, settings, mask, said = CASES[case]
    target = Path(shutil.copytree(DEMO_DIR, tmp_path / "target"))
    model, tokenizer = (json.loads((target / name).read_text()) for name in ("config.json", "tokenizer.json"))
    (target / "config.json").write_text(json.dumps(model | {"vocab_size": vocab_size}))
    if is_fine_tune:  # one that appended the end of a turn to the vocabulary
        words, added = tokenizer["model"], tokenizer["added_tokens"]
        words["vocab"] = {("<|im_end|>" if token == "inity" else token): i for token, i in words["vocab"].items()}
        words["merges"] = [pair for pair in words["merges"] if "".join(pair) != "inity"]
        added.append(added[0] | {"id": 4095, "content": "<|im_end|>"})
        (target / "tokenizer.json").write_text(json.dumps(tokenizer))
        (target / "chat_template.jinja").write_text(CHATML + PROMPT)
    config = chat_config(CHATS, f"target.path={target}", "head=dflash")
    config.head = DflashConfig(**settings)
    with pytest.warns(UserWarning, match="llama-server should make the same text") if is_fine_tune else nullcontext():
        prepare_prompts(Run(config))
    run = Run(config)
    capsys.readouterr()
    with warnings.catch_warnings(record=True, action="always") as warned:
        run.announce_mask_token()
    assert isinstance(run.head, DflashConfig) and run.head.mask_token_id == mask
    found = capsys.readouterr().out + "".join(str(each.message) for each in warned)
    assert bool(warned) == bool(settings) and bool(found) == bool(said) and said in found


def test_a_head_that_starts_from_one_of_another_run_keeps_its_mask(tmp_path: Path, config_for: ConfigFor) -> None:
    save_head(tmp_path, {"weight": torch.ones(1)}, DflashConfig(mask_token_id=17), {})
    run = Run(config_for())
    run.config.head = PeagleConfig(init_from=str(tmp_path))
    assert run.head == PeagleConfig(init_from=str(tmp_path), mask_token_id=17)
