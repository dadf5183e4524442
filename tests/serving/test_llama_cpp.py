"""Tests that llama.cpp's counters equal ours, and that each of its traps is found. Its server is built once by make."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.engines.llama_cpp.engine import ENGINE
from mtptrain.engines.llama_cpp.server import LlamaServer, server_arguments
from mtptrain.engines.load import send
from mtptrain.engines.process import started_server
from mtptrain.engines.requests import EngineCounts, Load, Requests
from mtptrain.heads.base import Head
from tests.conftest import Run, run_program
from tests.serving.cases import EOS, MAX_NEW_TOKENS, PROMPTS, Case, cases_of, each
from tests.serving.ours import QUESTIONS, OnDisk, Serve, check_equal, decoded_here


@each(cases_of("llama_cpp"))
def test_llama_cpp_counts_as_we_do(serve_by_llama: Serve, case: Case) -> None:
    check_equal(serve_by_llama, case)


def test_sampled_drafts_are_accepted_as_often_as_here(
    serve_by_llama: Serve, target_of: Callable[[str], OnDisk], head_of: Callable[[str, str], Head]
) -> None:
    """Acceptance rates are within 4 standard deviations, but not without each rule, at a temperature where it matters.

    No answer has an end, because b11434 counts sampled drafts that are accepted after it.
    """
    filters_by_rule: dict[str, dict[str, Any]] = {"draft_top_k": {}, "order": {"top_k": 40, "top_p": 0.95}}
    request = {"n_predict": MAX_NEW_TOKENS, "ignore_eos": True, "temperature": 12.0, "cache_prompt": False}
    request |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def ask(server: LlamaServer) -> list[EngineCounts | None]:
        counts = []
        for filters in filters_by_rule.values():
            before = server.counters()
            for seed, prompt in enumerate(PROMPTS):
                server.read("/completion", json.loads, {"prompt": prompt, "seed": seed, **request, **filters})
            counts.append(server.counts_since(before, len(PROMPTS)))
        return counts

    target, head = target_of("llama").target, head_of("draft_model", "llama")
    _, counts, _ = serve_by_llama(Case("draft_model", "llama"), "--spec-draft-sampling", "probabilistic", ask=ask)
    for (rule, filters), theirs in zip(filters_by_rule.items(), counts, strict=True):
        rates = torch.tensor(theirs.accepted_at) / theirs.rounds
        for missing in ("", rule):
            rules = {name: value for name, value in ENGINE.sampling.items() if name != missing}
            drafter = HeadDrafter(head, target.parts, 3, sample_drafts=True)
            sampler = Sampler(12.0, logit_bias={EOS: -math.inf}, **filters, **rules)
            generations = decoded_here(target, drafter, 3, sampler)
            ours, _ = ENGINE.counted(generations, 3, QUESTIONS._replace(stop_token_ids=[]))
            deviation = (rates * (1 - rates) * (1 / ours.rounds + 1 / theirs.rounds)).sqrt()
            distance = ((torch.tensor(ours.accepted_at) / ours.rounds - rates) / deviation).abs().max()
            assert distance > 5 if missing else distance < 4, (missing, distance, ours, theirs)


@pytest.mark.parametrize("drafts", [True, False])
def test_serving_check_asks_a_running_server(
    run_of: Callable[[str], Run], gguf_of: Callable[[str], Path], llama_server: Path, tmp_path: Path, drafts: bool
) -> None:
    run_dir, overrides = run_of("llama_cpp")
    head = (run_dir / "export/llama_cpp/model.gguf", "draft-eagle3", 3)
    arguments = server_arguments(gguf_of("llama"), 512, 1, True, head)
    if not drafts:
        index = arguments.index("--spec-type")
        del arguments[index : index + 2]
    command = [llama_server, *arguments]
    with started_server(LlamaServer, command, tmp_path / "log") as server:
        settings = f"serving.output_dir={tmp_path / 'check'}", f"serving.url={server.url}"
        result = run_program("serving-check", *overrides, *settings)
    if drafts:
        assert result.returncode == 0, result.stderr[-3000:]
        assert json.loads((tmp_path / "check/serving_check/report.json").read_text())["is_equal"]
    else:
        assert result.returncode != 0
        assert "drafts 0; " in result.stderr and "makes none without --spec-type" in result.stderr


def test_many_requests_of_a_bench_are_all_answered_and_their_steps_counted(
    run_of: Callable[[str], Run], llama_server: Path, gguf_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A connection that was kept after a stream made every tenth request fail.

    A step takes less than a millisecond. It gives one token and those that it accepts. A token of ASCII has a message.
    """
    head = run_of("llama_cpp")[0] / "export/llama_cpp/model.gguf", "draft-eagle3", 3
    command = [llama_server, *server_arguments(gguf_of("llama"), 256, 2, False, head)]
    requests = Requests([[1, 2, 3], [4, 5]], 24, 0.0, 1.0, 0, True, 0)
    with started_server(AsciiServer, command, tmp_path / "log") as server:
        result = send(server, requests, Load("load", 60, 2))
    assert [answer.num_tokens for answer in result.answers] == [24] * 60
    assert result.counts is not None and result.counts.rounds > 0
    assert sum(len(answer.steps_s) for answer in result.answers) == 1440 - sum(result.counts.accepted_at)


class AsciiServer(LlamaServer):
    """A server that is asked for answers of ASCII."""

    def streamed_request(self, *request: Any) -> tuple[str, dict[str, Any]]:
        path, content = super().streamed_request(*request)
        return path, content | {"logit_bias": [[token, False] for token in range(128, 260)]}
