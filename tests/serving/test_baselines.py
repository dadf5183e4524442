"""Tests that drafting by prompt lookup or a small model has the counters of vLLM's `ngram` or `draft_model`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mtptrain.decoding.acceptance import summarise
from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.drafters import HeadDrafter, PromptLookupDrafter
from mtptrain.engines.requests import EngineCounts
from mtptrain.init_from.start import load_draft_model
from mtptrain.target.files import TargetFiles
from tests.serving.conftest import plain_job
from tests.serving.ours import OnDisk, decoded_here
from tests.serving.vllm_jobs import JobRun, generate

pytestmark = pytest.mark.slow
K = 3


@pytest.fixture(scope="module")
def small_model(target_of: Callable[[str], OnDisk], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of the target without its last two layers and with noise in its lm_head."""
    directory = tmp_path_factory.mktemp("small")
    model = AutoModelForCausalLM.from_pretrained(target_of("llama").directory, dtype=torch.float32)
    model.model.layers = model.model.layers[:-2]
    model.config.num_hidden_layers -= 2
    torch.manual_seed(0)
    weight = model.lm_head.weight
    with torch.no_grad():
        weight += torch.randn_like(weight) * weight.std()
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served(vllm_python: str, target_of: Callable[[str], OnDisk], small_model: Path) -> dict[str, JobRun]:
    """Returns the runs by vLLM's name of the method.

    Each run has its own process, because an engine with `draft_model` does not start after one with `ngram`.
    """
    settings = {
        "ngram": {"num_speculative_tokens": K, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "draft_model": {"num_speculative_tokens": K, "model": str(small_model)},
    }
    runs: dict[str, JobRun] = {}
    for method, draft in settings.items():
        job = replace(plain_job(method, target_of("llama")), speculative_config={"method": method, **draft})
        (runs[method],) = generate([job], Path(vllm_python))
    return runs


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafting_without_a_head_has_the_counters_and_answers_of_vllm(
    served: dict[str, JobRun], target_of: Callable[[str], OnDisk], small_model: Path, method: str
) -> None:
    target = target_of("llama").target
    drafter: Drafter = PromptLookupDrafter(K, max_ngram=4, min_ngram=2)
    if method == "draft_model":
        cpu, files = torch.device("cpu"), TargetFiles(target_of("llama").directory)
        small = load_draft_model(str(small_model), files, torch.float32, cpu, "acceptance.draft_model")
        drafter = HeadDrafter(small, target.parts, K)
    generations = decoded_here(target, drafter, K)
    ours, theirs = summarise(generations), served[method]
    assert theirs.counts == EngineCounts(ours.rounds, ours.drafted, ours.accepted_at), theirs.error
    assert theirs.tokens == [generation.tokens for generation in generations]
    assert 0.04 * ours.rounds < ours.accepted_at[0] < 0.96 * ours.rounds, "some drafts must be accepted, but not all"
