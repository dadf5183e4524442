"""Tests that `mtptrain serving-check` refuses what it cannot compare, and names the first difference."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval import engines
from eval.engines import check_head
from eval.serving_check import Comparison, OurRun, main, more_prompts, what_differs
from mtptrain.config import AcceptanceConfig
from mtptrain.decoding.divergence import Divergence
from mtptrain.decoding.speculate import Generation
from mtptrain.engines.exports import read_serving_facts
from mtptrain.engines.requests import EngineCounts, EngineRun
from mtptrain.engines.table import running_engine
from mtptrain.run_dir import Run
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import make_config


def test_a_check_of_sampled_decoding_is_refused() -> None:
    with pytest.raises(UserError, match=r"acceptance\.temperature: must be 0 for this check, .*, but is 0\.7; leave"):
        main(make_config("acceptance.temperature=0.7"))


def test_a_head_with_too_short_a_context_is_refused_before_anything_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(make_config(f"run_dir={tmp_path}", "acceptance.max_new_tokens=8"))
    short = SimpleNamespace(head=SimpleNamespace(context_tokens=16), sha256="")
    monkeypatch.setattr(engines, "trained_or_initial_head", lambda *_: short)
    message = r"head: must read the longest prompt with its response and drafts, \d+ tokens, but has a context .* of 16"
    with pytest.raises(UserError, match=message):
        check_head(run, [list(range(10))], 3)


FACTS = {"engine": "vllm", "method": "mtp", "hf_overrides": None, "head_sha256": "before"}
"""The facts of an earlier export, with an entry that exports no longer have."""


def test_a_folder_without_the_export_of_this_head_for_this_engine_is_refused(tmp_path: Path) -> None:
    for facts, message in (
        (None, r"must exist, but does not; run mtptrain export export\.engine=vllm with"),
        (
            FACTS | {"engine": "sglang"},
            r"engine must be vllm, but is sglang; run mtptrain export export.engine=vllm, or",
        ),
        (FACTS, r"head_sha256 must be of this run, .* but is before, the hash of another head; run mtptrain"),
    ):
        if facts is not None:
            write_sealed(tmp_path / "serving.json", facts)
        with pytest.raises(UserError, match=rf"serving\.json: {message}"):
            read_serving_facts(tmp_path, "vllm", "of this run")


ENGINE = running_engine("vllm")


def compared(plain: list[int], by_round: list[list[int]] | None) -> Comparison:
    """Compares an answer of ours, of which one draft was accepted, with an engine that accepted none in two rounds."""
    ours = OurRun([Generation([3, 4], 1, 0, 1, [1])], [plain], (), "00")
    counts = EngineCounts(rounds=2, drafted=1, accepted_at=[0])
    theirs = EngineRun("0.32.0", [plain], counts, by_round)
    return Comparison(ours, EngineCounts.of(ours.drafted), theirs, counts)


def test_a_difference_names_its_prompt_by_its_id_or_says_why_no_first_token_is_known() -> None:
    divergence = Divergence("draft", 0, 1, 4, 9, 2.0, 0.25)
    found = what_differs(["chat 7"], compared([3, 4], [[0, 0]]), divergence, ENGINE)
    assert "rounds (1 here, 2 there), accepted at 0 (1 here, 0 there)" in found
    first = "The first difference, for prompt id chat 7: draft token 1 is 4 for us and probably 9 for the engine; our"
    assert first in found
    alone = EngineCounts(rounds=2, drafted=1, accepted_at=[1])
    found = what_differs(["chat 7"], replace(compared([3, 4], None), alone=alone), None, ENGINE, 8)
    assert "With one request in flight, vLLM accepts 0.500 of its drafts by position, and with 8 0.000, so it" in found
    cases: tuple[tuple[list[int], list[list[int]] | None, str], ...] = (
        ([3, 4], None, "The first token that differs cannot be found, because the engine does not say what each round"),
        ([3, 4], [[0, 0]], "No round before the end of an answer differs"),
        ([3, 5], [[0, 0]], "Our own answers with drafts differ from plain decoding, so no first difference is named"),
    )
    for plain, by_round, reason in cases:
        assert f". {reason}" in what_differs(["chat 7"], compared(plain, by_round), None, ENGINE)


def test_more_prompts_are_advised_where_there_can_be_more() -> None:
    for settings, advice in (
        (AcceptanceConfig(), "raise acceptance.num_prompts"),
        (AcceptanceConfig(prompts_file="a.jsonl", num_prompts=6), "raise acceptance.num_prompts"),
        (AcceptanceConfig(prompts_file="a.jsonl", num_prompts=7), "add prompts to a.jsonl"),
        (AcceptanceConfig(prompts_file="a.jsonl"), "add prompts to a.jsonl"),
    ):
        assert more_prompts(settings, 6) == advice
