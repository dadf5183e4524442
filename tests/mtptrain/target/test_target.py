"""Tests the frozen target of every family: frozen parts, captured streams, position cache and sliding windows."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.drafters import HeadDrafter, HybridDrafter, PromptLookupDrafter, TreeDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.heads import HEADS
from mtptrain.target.causal_attention import MaskOf, SeenSlots
from mtptrain.target.families import head_rope_parameters
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.target.position_cache import PositionCache, TreeSlots
from tests.conftest import FAMILIES, WINDOW, as_draft_model, make_target
from tests.mtptrain.target.inputs import CPU, NUM_TOKENS, POSITIONS, TOKENS


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread, because a second one does not speed up matrices as small as these."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """Returns a tiny random target of every family, in fp32."""
    return {
        name: load_target(make_target(tmp_path_factory.mktemp("family"), *family), torch.float32, CPU)
        for name, family in FAMILIES.items()
    }


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied in one file", "untied in shards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_parts_alone_give_the_whole_models_logits(tmp_path: Path, family: str, is_tied: bool) -> None:
    make_target(tmp_path, *FAMILIES[family], tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if not is_tied:
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    parts = load_frozen_parts(tmp_path)
    assert (parts.lm_head is parts.embed_tokens) == is_tied
    for dtype in (torch.float32, torch.bfloat16):
        model, parts = model.to(dtype), parts.to(CPU, dtype)
        before_norm: list[torch.Tensor] = []
        handle = model.model.norm.register_forward_pre_hook(lambda module, args, kept=before_norm: kept.append(args[0]))
        with torch.no_grad():
            output = model(TOKENS, output_hidden_states=True)
        handle.remove()
        post_norm = parts.final_norm(before_norm[0])
        assert post_norm.dtype == dtype and torch.equal(post_norm, output.hidden_states[-1])
        assert torch.equal(parts.logits(post_norm), output.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_the_rows_of_the_table_without_the_scale_of_gemma(
    targets: dict[str, Target], family: str
) -> None:
    target = targets[family]
    scale = math.sqrt(target.config.hidden_size) if family == "gemma3_text" else 1.0
    embeddings = target.parts.embed(TOKENS)
    assert torch.equal(embeddings, target.model.model.embed_tokens.weight[TOKENS])
    assert torch.equal(embeddings * scale, target.model.model.embed_tokens(TOKENS))


def test_the_norm_of_another_family_and_a_missing_soft_cap_show(targets: dict[str, Target]) -> None:
    gemma, states = targets["gemma3_text"].parts, torch.randn(10, 64)
    other_norm = replace(gemma, form=replace(gemma.form, norm_offset=0.0))
    assert (gemma.final_norm(states) - other_norm.final_norm(states)).abs().mean() > 0.5
    states = 30 * states
    assert (
        gemma.logits(states).abs().max()
        <= 30
        < replace(gemma, form=replace(gemma.form, soft_cap=None)).logits(states).abs().max()
    )


PROMPTS = [TOKENS[0, :num_tokens].tolist() for num_tokens in (3, 40, 9)]


def plain_greedy(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Returns the tokens that transformers generates after each prompt alone."""
    return [
        target.model.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)[
            0
        ][len(prompt) :].tolist()
        for prompt in prompts
    ]


@pytest.mark.parametrize("drafter_name", ["mtp", "prompt lookup", "tree", "hybrid", "model"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_speculation_of_ragged_prompts_equals_plain_decoding(
    targets: dict[str, Target], family: str, drafter_name: str
) -> None:
    target = targets[family]
    torch.manual_seed(0)
    head = HEADS["mtp"](HEADS["mtp"].Config(), target.config)
    drafters: dict[str, Drafter] = {
        "mtp": HeadDrafter(head, target.parts, 3),
        "prompt lookup": PromptLookupDrafter(3, min_ngram=1),
        "tree": TreeDrafter(head, target.parts, 3, num_nodes=20, top_k=4),
        "hybrid": HybridDrafter(HeadDrafter(head, target.parts, 3), min_match=1),
        "model": HeadDrafter(as_draft_model(target), target.parts, 3),
    }
    drafter = drafters[drafter_name]
    generations = speculate(
        target, drafter, PROMPTS, num_speculative_tokens=3, max_new_tokens=32, sampler=Sampler(), eos_token_ids=[256]
    )
    plain = plain_greedy(target, PROMPTS, 32)
    assert [generation.tokens for generation in generations] == plain
    assert len(set(plain[1])) > 10, "equality proves little if the answer has few distinct tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_streams_are_the_hidden_states_of_transformers(targets: dict[str, Target], family: str) -> None:
    target = targets[family]
    num_layers = target.config.num_hidden_layers
    with torch.no_grad():
        *expected, post_norm = target.model(TOKENS, output_hidden_states=True).hidden_states
    with torch.no_grad(), target.capturing(range(num_layers + 1)) as captured:
        target.model.model(TOKENS, use_cache=False)
    assert torch.equal(torch.stack([captured[k] for k in range(num_layers)]), torch.stack(expected))
    assert torch.equal(target.parts.final_norm(captured[num_layers]), post_norm)

    cache = PositionCache(NUM_TOKENS)
    chunks = [
        target.forward(TOKENS[:, part], POSITIONS[:, part], cache, tuple(range(num_layers)))
        for part in (slice(0, 30), slice(30, 31), slice(31, NUM_TOKENS))
    ]
    streams = torch.cat(
        [chunk.aux_hidden_states for chunk in chunks if chunk.aux_hidden_states is not None], 1
    )  # [1, S, L, H]
    torch.testing.assert_close(streams, torch.stack(expected, 2), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.cat([chunk.postnorm_states for chunk in chunks], 1), post_norm, atol=2e-5, rtol=1e-5
    )


def read_in_parts(target: Target, prompt_tokens: int) -> torch.Tensor:
    """Returns post-norm states [1, S, H]. Reads the prompt without a mask, and later tokens with a mask."""
    cache = PositionCache(NUM_TOKENS)
    parts = [slice(0, prompt_tokens), slice(prompt_tokens, NUM_TOKENS)][: 1 + (prompt_tokens < NUM_TOKENS)]
    return torch.cat([target.forward(TOKENS[:, part], POSITIONS[:, part], cache).postnorm_states for part in parts], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_read_without_a_mask_gives_the_states_of_the_mask(targets: dict[str, Target], family: str) -> None:
    target = targets[family]
    by_mask, without = read_in_parts(target, 1), read_in_parts(target, NUM_TOKENS)
    torch.testing.assert_close(without, by_mask, atol=2e-5, rtol=1e-5)
    assert PositionCache(NUM_TOKENS).begin(POSITIONS) is None
    assert target.model.config._attn_implementation == "eager", (
        "the model's attention must be unchanged for other callers"
    )


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.endswith("with window") or name == "gemma3_text"])
@pytest.mark.parametrize("window", [None, WINDOW - 1, WINDOW + 1])
def test_a_window_left_out_or_off_by_one_shows_behind_it(
    targets: dict[str, Target], family: str, window: int | None
) -> None:
    right = targets[family]
    windows = {mask.window for mask in right.form.masks if mask}
    assert windows - {None} == {WINDOW}
    wrong = Target(right.model)
    wrong.form = replace(right.form, masks=tuple(MaskOf(mask and mask.window and window) for mask in right.form.masks))
    expected, states = (read_in_parts(target, 1)[0] for target in (right, wrong))
    first_wrong = min(WINDOW, window or WINDOW)
    assert torch.equal(states[:first_wrong], expected[:first_wrong])
    assert ((states - expected).abs().amax(-1)[first_wrong:] > 1e-5).all()


@pytest.mark.parametrize("kind", [MaskOf(window=1), MaskOf(window=2), MaskOf(window=4), MaskOf(chunk=8)])
def test_windows_and_chunks_count_positions_at_the_second_depth_of_a_tree_too(kind: MaskOf) -> None:
    cache, branches = PositionCache(10), torch.eye(2, dtype=torch.bool)[None]
    cache.begin(torch.arange(6)[None])
    cache.begin(torch.tensor([[6, 6]]), TreeSlots(torch.tensor([6]), 0, branches))
    tree, own = TreeSlots(torch.tensor([6]), 2, torch.cat([branches, branches], 2)), torch.tensor([[7, 7]])
    mask = cache.begin(own, tree)
    assert mask is not None
    seen, _ = SeenSlots((kind,), mask, own, tree).of_layer(0, CPU)
    distances = 7 - torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 7, 7])  # positions of the slots
    assert seen is not None and torch.equal(seen, mask & (distances < (kind.window or 8)))


def test_rope_parameters_of_a_head_are_a_copy(targets: dict[str, Target]) -> None:
    for target in targets.values():
        before = json.dumps(target.config.rope_parameters)
        head_rope_parameters(target.config)["rope_theta"] = 0.0
        assert json.dumps(target.config.rope_parameters) == before
