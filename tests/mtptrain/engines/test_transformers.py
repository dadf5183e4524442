"""Tests the export for transformers, and that `generate` with `use_mtp` accepts the same drafts as mtptrain."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.engines.table import format_for
from mtptrain.heads.files import build_head
from mtptrain.target.families import read_target_config
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.families import SIZES, write_image_model
from tests.mtptrain.engines.conftest import export_head, head_config

PROMPTS = [[1, 2, 3], [50, 60, 70, 80, 90], [7, 7, 7, 9], list(range(40))]
NEW_TOKENS = 32


def greedy(model: PreTrainedModel, prompt: list[int], **how: object) -> tuple[list[int], int]:
    """Returns the answer and the number of target forwards that produced the answer."""
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    handle = model.model.register_forward_hook(count)
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **how)[0, len(prompt) :].tolist()
    handle.remove()
    return answer, forwards


def test_generate_accepts_exactly_the_drafts_that_our_own_loop_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target's next token depends mostly on the last token, whose embedding the head mostly passes on, so that some
    drafts are right."""
    directory = make_target(tmp_path / "target", tie_word_embeddings=False)
    guessing = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for name, parameter in guessing.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.02)
    guessing.save_pretrained(directory)
    target = load_target(directory, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    head = build_head(head_config("mtp"), target.config).eval().requires_grad_(False)
    head.eh_proj.weight.mul_(0.16)
    head.eh_proj.weight[:, :64] += torch.eye(64)
    head.norm.weight.copy_(target.parts.norm_weight)
    form = export_head(tmp_path / "export", "transformers", head_config("mtp"), head.state_dict(), directory)
    model_class = getattr(transformers, form.architecture)
    monkeypatch.setattr(model_class, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
    model = model_class.from_pretrained(tmp_path / "export")
    accepted = 0
    for prompt in PROMPTS:
        plain, _ = greedy(model, prompt)
        drafted, forwards = greedy(model, prompt, use_mtp=True)
        drafter = HeadDrafter(head, target.parts, 1)
        settings = {"num_speculative_tokens": 1, "max_new_tokens": NEW_TOKENS, "sampler": Sampler()}
        ours = speculate(target, drafter, [prompt], **settings)[0]
        assert drafted == plain == ours.tokens
        assert forwards == 1 + ours.rounds, "the target must run once for the prompt and once per round"
        accepted += sum(ours.accepted_at)
    assert accepted > 10
    exec(form.launch("unused", tmp_path / "export", 3), {})  # the program that is written for the user
    assert capsys.readouterr().out.startswith("def main")
    assert "one token per round" in form.notes()[0]


def test_the_language_model_of_an_image_and_text_checkpoint_is_refused(tmp_path: Path) -> None:
    """transformers would find no tensor of the target under the language model's names, and fill all at random."""
    text = {**SIZES, "model_type": "llama", "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {"text_config": text, "vision_config": vision, "image_token_index": 10}
    write_image_model(tmp_path / "target", "llava", settings)
    form = format_for("transformers", head_config("mtp"), read_target_config(tmp_path / "target"))
    with pytest.raises(UserError, match=r"target\.path: must be the checkpoint of a language model alone to export"):
        form.add_target(tmp_path, tmp_path / "target")
