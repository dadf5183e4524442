"""Tests that targets of all families are run as transformers runs them, or refused with the reason."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mtptrain.decoding.draft import Draft
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.hidden_states.extraction import transformers_streams
from mtptrain.hidden_states.extraction.transformers_streams import TransformersStreams, check_streams
from mtptrain.target import causal_attention, loading
from mtptrain.target.causal_attention import FULL, PLAIN
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target, Verified
from mtptrain.utils.errors import UserError
from tests.conftest import tiers
from tests.families import EXACT, IMAGE_MODELS, KEEPS_STATES, LAYERS, REFUSED, write_image_model, write_member

CPU = torch.device("cpu")
IDS = torch.randint(250, (2, 40), generator=torch.Generator().manual_seed(0))  # longer than any window
PROMPTS = [IDS[0, :25].tolist(), IDS[1, :7].tolist(), IDS[1, :18].tolist()]


def member(directory: Path, name: str) -> Path:
    torch.manual_seed(0)
    return write_member(directory, *EXACT[name])


def load(directory: Path) -> Target:
    return load_target(directory, torch.float32, CPU)


class Continuation:
    """Drafts a known continuation, wrong from a random place on, so that every number of drafts is accepted."""

    read_layers, draft_slots = (1, 2), 3

    def __init__(self, answers: list[list[int]]) -> None:
        self.texts = [[*prompt, *answer, 0, 0, 0, 0] for prompt, answer in zip(PROMPTS, answers, strict=True)]
        self.generator = torch.Generator().manual_seed(0)

    def start(self, num_sequences: int, num_slots: int) -> None:
        pass

    def draft(self, verified: Verified, sampler: Sampler) -> Draft:
        lengths = verified.num_tokens.tolist()
        rest = torch.tensor([text[length:][:3] for text, length in zip(self.texts, lengths, strict=True)])
        num_right = torch.randint(4, (len(rest), 1), generator=self.generator)
        is_right = torch.arange(3) < num_right
        return Draft(torch.where(is_right, rest, (rest + 7) % 250), torch.ones_like(is_right))


CORE = (
    *("olmo3", "qwen3_moe", "gpt_oss", "granite"),  # windows; experts; sinks; factors
    *("deepseek_v3", "qwen3_5_text", "lfm2"),  # latent attention; states by the delta rule, and of convolutions
)


@torch.no_grad()
@pytest.mark.parametrize("name", tiers(EXACT, CORE))
def test_a_member_of_a_family_computes_what_transformers_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The states of a text are not computed as those of single tokens are: transformers' own results differ as much.
    tolerance = 3e-4 if name in KEEPS_STATES else 1e-5
    monkeypatch.setattr(loading, "EXACT", tolerance)
    directory = member(tmp_path, name)
    target = load(directory)
    assert target.form.keeps_states == (name in KEEPS_STATES)
    own = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    logits = own(IDS, use_cache=False).logits
    # 1. The frozen parts alone give the logits, from the last stream.
    with target.capturing([len(target.layers)]) as streams:
        target.decoder(IDS, use_cache=False)
    parts = load_frozen_parts(directory)
    assert_close(parts.logits(parts.final_norm(streams[len(target.layers)])), logits)
    # 2. Greedy decoding with drafts chooses the tokens of the model alone, for prompts of different lengths.
    answers = [
        own.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None)
        for prompt in PROMPTS
    ]
    answers = [answer[0, len(prompt) :].tolist() for answer, prompt in zip(answers, PROMPTS, strict=True)]
    found = speculate(
        target, Continuation(answers), PROMPTS, num_speculative_tokens=3, max_new_tokens=16, sampler=Sampler()
    )
    assert [each.tokens for each in found] == answers
    assert {count for each in found for count in each.accepted_by_round} == {0, 1, 2, 3}
    # 3. Extraction stores the streams of each document alone.
    check_streams(target)
    streams_of = TransformersStreams(target, (0, 2, len(target.layers)), batch_tokens=100)
    documents = [IDS[0].int(), IDS[1, :13].int(), IDS[1].int()]
    [states] = streams_of.extract([[document.numpy() for document in documents]])
    for index, stored in states:
        ids = documents[index].long()[None]
        post_norm = parts.final_norm(stored[:, -1])
        assert_close(parts.logits(post_norm), own(ids, use_cache=False).logits[0], tolerance)


def assert_close(ours: torch.Tensor, own: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (ours - own).abs().max() < tolerance * own.abs().max()


@pytest.mark.parametrize("name", tiers(REFUSED, ["deepseek_v32", "nemotron"]))
def test_a_model_that_mtptrain_cannot_run_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    family, settings, reason = REFUSED[name]
    write_member(tmp_path, family, settings)
    with pytest.raises(UserError, match=rf"^target\.path: {reason}.*; choose another target$"):
        load(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("name", tiers([*IMAGE_MODELS, "qwen2_5_vl tied"], ["gemma3", "qwen2_5_vl tied"]))
def test_the_language_model_of_an_image_model_reads_text_as_the_whole_does(tmp_path: Path, name: str) -> None:
    name, _, tied = name.partition(" ")
    write_image_model(tmp_path, *IMAGE_MODELS[name], is_tied=bool(tied))
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    if name == "kimi_k25":  # as published; transformers writes names of its own
        path = tmp_path / "model.safetensors"
        save_file({key.replace("model.blocks.", "model.layers."): x for key, x in load_file(path).items()}, path)
    if name == "mistral3":  # published ones say it for the language model alone
        config = json.loads((tmp_path / "config.json").read_text())
        del config["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    target = load(tmp_path)
    ids, positions = IDS.clamp(min=20), torch.arange(IDS.shape[1]).repeat(2, 1)  # smaller ones may stand for images
    states = target.forward(ids, positions, target.cache(ids.shape[1])).postnorm_states
    assert_close(target.logits(states), whole(input_ids=ids).logits)
    assert_close(load_frozen_parts(tmp_path).logits(states), whole(input_ids=ids).logits)


@pytest.mark.parametrize(("name", "limit"), [("mistral", "sliding_window"), ("llama4_text", "attention_chunk_size")])
def test_a_window_or_chunk_below_those_of_the_check_is_kept(tmp_path: Path, name: str, limit: str) -> None:
    family, settings = EXACT[name]
    check_streams(load(write_member(tmp_path, family, {**settings, limit: loading.SHORT - 2})))


FAULTS: dict[str, dict[str, object]] = {
    "granite": {"logit_scale": 1.0},
    "phimoe": {"norm_module": torch.nn.RMSNorm(64)},
    **{name: {"masks": (FULL,) * LAYERS} for name in ("llama4_text", "olmo3")},
}
"""Families, and what mtptrain would do if it did not know theirs."""


@pytest.mark.parametrize("name", tiers(FAULTS, ["granite", "olmo3"]))
def test_the_check_finds_a_form_that_is_not_the_models(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = member(tmp_path, name)
    found = load(directory).form
    for module in ("model", "frozen_parts"):
        monkeypatch.setattr(f"mtptrain.target.{module}.find_form", lambda _: replace(found, **FAULTS[name]))
    with pytest.raises(UserError, match=r"logits .* must be those of transformers' own forward"):
        load(directory)


@pytest.mark.parametrize("name", tiers(["gpt_oss", "mimo_v2_flash", "gemma2"], ["gpt_oss"]))
def test_the_check_finds_lost_sinks_and_soft_caps(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = member(tmp_path, name)
    target = load(directory)
    monkeypatch.setattr(causal_attention, "Extras", lambda *args: PLAIN)
    with pytest.raises(UserError, match="logits of a text must be those of transformers' own forward"):
        loading.check_target(target)
    monkeypatch.setattr(transformers_streams, "Extras", lambda *args: PLAIN)
    with pytest.raises(UserError, match=r"states of documents after \d layers must be"):
        check_streams(target)


def test_in_bf16_too_the_check_finds_wrong_attention_over_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(member(tmp_path, "llama"), torch.bfloat16, CPU)
    monkeypatch.setattr(causal_attention, "masked_attention", lambda query, *args: torch.zeros_like(query))
    with pytest.raises(UserError, match="logits after rejected drafts must be those of transformers' own forward"):
        loading.check_target(target)


def test_a_model_that_rounds_but_returns_logits_in_fp32_is_judged_by_the_dtype_that_it_computes_in(
    tmp_path: Path,
) -> None:
    target = load_target(member(tmp_path, "nemotron_h"), torch.bfloat16, CPU)
    ids = IDS.clamp(max=target.config.vocab_size - 1)
    assert target.model(input_ids=ids).logits.dtype is torch.float32
    loading.check_target(target)


@pytest.mark.parametrize("name", tiers(["qwen3_next", "qwen3_5_text", "lfm2", "jamba"], ["qwen3_5_text"]))
def test_the_check_finds_states_that_leak_between_packed_documents(tmp_path: Path, name: str) -> None:
    target = load(member(tmp_path, name))
    target.form = replace(target.form, keeps_states=False)
    with pytest.raises(UserError, match=r"states of documents after \d layers must be"):
        check_streams(target)
