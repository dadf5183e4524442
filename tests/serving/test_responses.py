"""Tests that `mtptrain responses` gets the same answers from engines as from our own loop, and samples by seed."""

import json
from pathlib import Path

import pytest

from data_prep.prompts import prepare_prompts
from data_prep.responses.store import ResponsesManifest
from mtptrain.run_dir import Run
from tests.conftest import make_config
from tests.data_prep.responses.conftest import chat, respond, write_rows
from tests.data_prep.speaking import make_speaking_target
from tests.serving.conftest import vllm_server
from tests.serving.llama_cpp import convert

NUM_CHATS = 24
SAMPLED = ("responses.temperature=1.0", "responses.top_k=30", "responses.top_p=0.95")


def answered(run_dir: Path, *overrides: str) -> tuple[str, ResponsesManifest]:
    """Generate the answers, and return them and their manifest."""
    manifest = respond(make_config(f"run_dir={run_dir}", *overrides))
    return (run_dir / "responses/conversations.jsonl").read_text(), manifest


def overrides_for(target: Path, chats: str) -> tuple[str, ...]:
    return (
        *(f"target.path={target}", f"prompts.paths=[{chats}]", "prompts.source=responses"),
        *("prompts.validation_fraction=0.3", "responses.max_new_tokens=32", "responses.dtype=float32"),
    )


def test_llama_server_that_is_started_answers_a_gguf_file_as_our_own_loop_does(
    llama_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    gguf = convert(make_speaking_target(tmp_path / "speaking"), tmp_path / "speaking.gguf")
    chats = write_rows(tmp_path / "chats.jsonl", [chat(f"chat{i}", 1 + i % 3) for i in range(NUM_CHATS)])
    here, ours = answered(tmp_path / "here", *overrides_for(gguf, chats), "responses.engine=transformers")
    overrides = *overrides_for(gguf, chats), "responses.engine=llama_cpp", f"serving.program={llama_server}"
    overrides = (*overrides, "serving.engine=llama_cpp")
    served, theirs = answered(tmp_path / "served", *overrides)
    assert here == served and theirs.counts == ours.counts and theirs.counts["cut"] > 0 == theirs.failed
    assert theirs.server_versions[0].startswith("llama.cpp b11434")
    sampled = [answered(tmp_path / f"s{i}", *overrides, *SAMPLED, f"seed={i // 2}")[0] for i in range(3)]
    assert sampled[0] == sampled[1] != sampled[2] and sampled[0] != served


@pytest.mark.slow
def test_vllm_and_transformers_give_the_same_conversations_and_samples_depend_on_the_seed_alone(
    vllm_python: str, tmp_path: Path
) -> None:
    target = make_speaking_target(tmp_path / "speaking")
    chats = write_rows(tmp_path / "chats.jsonl", [chat(f"chat{i}", 1 + i % 3) for i in range(NUM_CHATS)])
    overrides = overrides_for(target, chats)
    here, ours = answered(tmp_path / "here", *overrides, "responses.engine=transformers")
    started = ("responses.engine=vllm", f"serving.program={vllm_python}", "responses.concurrency=8")
    by_engine, _ = answered(tmp_path / "started", *overrides, *started)
    with vllm_server(vllm_python, target, tmp_path / "log", "--served-model-name", "speaking") as url:
        by_vllm = (*overrides, f"responses.url={url}/v1")
        served, theirs = answered(tmp_path / "served", *by_vllm, "responses.concurrency=8")
        many, one, seed = (
            answered(tmp_path / f"sampled_{setting[-1]}", *by_vllm, *SAMPLED, setting)[0]
            for setting in ("responses.concurrency=16", "responses.concurrency=4", "seed=1")
        )
    assert here == served == by_engine and many == one != seed
    counts = theirs.counts
    assert counts == ours.counts and counts["texts_changed"] == counts["tokens_changed"] == 0 == theirs.failed
    assert counts["answers"] > NUM_CHATS and counts["cut"] > 0 and theirs.server_versions == ["vLLM 0.32.0"]
    prepare_prompts(Run(make_config(f"run_dir={tmp_path}/served", *overrides)))
    report = json.loads((tmp_path / "served/prompts/report.json").read_text())
    supervised = sum(report["counts"][f"{split}_supervised_tokens"] for split in ("train", "validation"))
    assert supervised == counts["answer_tokens"], "exactly the generated tokens must be supervised"
