"""Tests that drafting by prompt lookup has the counters of vLLM's `ngram`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mtptrain.decoding.acceptance import summarise
from mtptrain.decoding.drafters import PromptLookupDrafter
from mtptrain.engines.requests import EngineCounts
from tests.serving.conftest import plain_job
from tests.serving.ours import OnDisk, decoded_here
from tests.serving.vllm_jobs import generate


@pytest.mark.slow
def test_prompt_lookup_has_the_counters_and_answers_of_vllms_ngram(
    vllm_python: str, target_of: Callable[[str], OnDisk]
) -> None:
    settings = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    job = replace(plain_job("ngram", target_of("llama")), speculative_config=settings)
    (theirs,) = generate([job], Path(vllm_python))
    generations = decoded_here(target_of("llama").target, PromptLookupDrafter(3, max_ngram=4, min_ngram=2), 3)
    ours = summarise(generations)
    assert theirs.counts == EngineCounts(ours.rounds, ours.drafted, ours.accepted_at), theirs.error
    assert theirs.tokens == [generation.tokens for generation in generations]
    assert 0.04 * ours.rounds < ours.accepted_at[0] < 0.96 * ours.rounds, "some drafts must be accepted, but not all"
