"""Tests the responses that transformers generates without a server."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.responses.regenerate import ProgressBar, fill, make_job
from data_prep.responses.store import ResponsesStore
from mtptrain.data.chat_template import render_prompt
from mtptrain.run import Run
from mtptrain.target.hub import load_tokenizer
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.files import write_sealed
from tests.conftest import run_program
from tests.data_prep.responses.stage import CHATS, ConfigFor, answered, output, overrides_for, respond
from tests.data_prep.speaking import EOS, make_speaking_target


def test_transformers_answers_greedily_as_one_prompt_at_a_time_would(
    configure: ConfigFor, speaking_target: Path
) -> None:
    config = configure()
    respond(config)
    model = AutoModelForCausalLM.from_pretrained(speaking_target, dtype=torch.float32).eval()
    tokenizer, num_checked = load_tokenizer(speaking_target), Counter[str]()
    for row in answered(config):
        for index, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            tokens = render_prompt(tokenizer, row["messages"][:index])
            start = len(tokens)
            with torch.no_grad():
                while len(tokens) < start + 24 and (len(tokens) == start or tokens[-1] != EOS):
                    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            reason = row["finish_reasons"][num_checked[row["id"]]]
            assert row["answer_tokens"][num_checked[row["id"]]] == len(tokens) - start
            assert reason == ("stop" if tokens[-1] == EOS else "length")
            assert message["content"] == tokenizer.decode(tokens[start : None if reason == "length" else -1])
            num_checked[row["id"]] += 1
    assert num_checked.total() > 20 and {row["ended_by"] for row in answered(config)} >= {"length", "complete"}


def test_ranks_and_interruptions_change_no_byte(configure: ConfigFor, tmp_path: Path, speaking_target: Path) -> None:
    sampled = ("responses.temperature=0.8", "responses.top_k=20", "responses.batch_size=3")
    undisturbed = configure(*sampled, run="undisturbed")
    respond(undisturbed)
    overrides = [*overrides_for(tmp_path, speaking_target, CHATS), *sampled]
    result = run_program("responses", *overrides, num_ranks=2)
    assert result.returncode == 0, result.stderr[-3000:]
    assert output(configure()) == output(undisturbed)
    # Of 7 batches of 3 conversations, the last of which has 2, the first rank has 4.
    assert "rank 0 of 2: 100%" in result.stderr and " 11/11 " in result.stderr

    # Imitate a killed run: the journals of two ranks hold three complete rows and part of a fourth.
    directory = configure().stage_dir("responses")
    manifest = json.loads((directory / "manifest.json").read_text())
    lines = (directory / "conversations.jsonl").read_bytes().splitlines(keepends=True)
    for name in ("manifest.json", "conversations.jsonl", "failures.jsonl"):
        (directory / name).unlink(missing_ok=True)
    write_sealed(directory / "plan.json", {"identity": manifest["identity"], "server_versions": []})
    (directory / "answers_00000.jsonl").write_bytes(lines[7] + lines[2])
    (directory / "answers_00005.jsonl").write_bytes(lines[11] + lines[3][:20])
    respond(configure(*sampled))
    assert output(configure()) == output(undisturbed)


def test_the_bar_counts_the_tokens_of_unfinished_answers(
    configure: ConfigFor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_rows, add_tokens = [], ProgressBar.add_tokens

    def watch(bar: ProgressBar, num_tokens: int) -> None:
        finished_rows.append(bar.n)
        add_tokens(bar, num_tokens)

    monkeypatch.setattr(ProgressBar, "add_tokens", watch)
    config = configure("responses.batch_size=1000")
    respond(config)
    assert len(finished_rows) > 24 and set(finished_rows) == {0}  # a single batch, of several turns
    num_tokens = sum(sum(row["answer_tokens"]) for row in answered(config))
    assert f", {num_tokens:,} tokens, " in capsys.readouterr().err.split("\r")[-1]


def test_a_rank_without_work_does_not_load_the_target(configure: ConfigFor, tmp_path: Path) -> None:
    target = make_speaking_target(tmp_path / "target")
    run = Run(configure(f"target.path={target}"))
    job, store = make_job(run), ResponsesStore(run.stage_dir("responses"))
    store.begin(job.identity, None)
    (target / "model.safetensors").unlink()
    assert fill(job, [0], run.config.responses, store, Ranks(rank=1, world_size=2, local_rank=1)).rows == 0


def test_sampling_follows_its_settings_and_its_seed(configure: ConfigFor) -> None:
    respond(configure(run="greedy"))
    greedy = [row["messages"] for row in answered(configure(run="greedy"))]
    texts = {}
    for run, overrides in {
        "hot": ["responses.temperature=1.0"],
        "again": ["responses.temperature=1.0"],
        "seed": ["responses.temperature=1.0", "seed=1"],
        "top_k": ["responses.temperature=1.0", "responses.top_k=1"],
        "top_p": ["responses.temperature=1.0", "responses.top_p=1e-6"],
    }.items():
        respond(configure(*overrides, run=run))
        texts[run] = [row["messages"] for row in answered(configure(run=run))]
    assert texts["hot"] == texts["again"] != texts["seed"]
    assert texts["hot"] != greedy == texts["top_k"] == texts["top_p"]


def test_penalties_of_the_checkpoint_do_not_touch_the_answers(
    configure: ConfigFor, speaking_target: Path, tmp_path: Path
) -> None:
    respond(configure(run="plain"))
    target = make_speaking_target(tmp_path / "penalised")
    settings = {"eos_token_id": [EOS], "repetition_penalty": 1.8, "do_sample": True, "temperature": 3.0}
    (target / "generation_config.json").write_text(json.dumps(settings))
    respond(configure(f"target.path={target}", run="penalised"))
    assert answered(configure(run="penalised")) == answered(configure(run="plain"))


def test_a_target_without_an_end_of_answer_is_refused(configure: ConfigFor, tmp_path: Path) -> None:
    target = make_speaking_target(tmp_path / "endless", eos_token_id=None)
    with pytest.raises(
        ValueError, match=r"target\.path: eos_token_id must be set in generation_config\.json or config\.json"
    ):
        respond(configure(f"target.path={target}"))
