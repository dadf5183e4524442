"""Tests that the Python interface gives the tokens, counts and refusals of the command line."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import mtptrain
from mtptrain import LoadedTarget
from mtptrain.cli.arguments import compose_config
from mtptrain.target.hub import DEMO_DIR
from tests.conftest import Run, make_target
from tests.docs.test_pages import FENCE, ROOT

MEASURED = {"num_prompts": 8, "prompt_tokens": 32, "max_new_tokens": 16}
"""The settings of `acceptance` in `TINY_SETTINGS`."""


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> LoadedTarget:
    return mtptrain.load_target(tiny_target)


def test_a_run_and_its_export_draft_alike_and_their_counts_are_those_of_the_report(
    finished: Run, target: LoadedTarget
) -> None:
    run_dir, report = finished[0], json.loads((finished[0] / "acceptance/report.json").read_text())
    prompts = ["def read(", [5, 6, 7], [{"role": "user", "content": "hi"}]]
    alone = [answer.token_ids for answer in mtptrain.generate(target, None, prompts)]
    for path in (run_dir, run_dir / "train/best", run_dir / "export/vllm"):
        head = mtptrain.load_head(path, target)
        found = mtptrain.acceptance(target, head, run_dir=run_dir, **MEASURED)
        counts = ("rounds", "accepted", "drafted", "prompts", "accepted_at", "acceptance_length", "tokens_per_step")
        assert {name: getattr(found, name) for name in counts} == {name: report[name] for name in counts}
        answers = mtptrain.generate(target, head, prompts, batch_size=1)
        assert [answer.token_ids for answer in answers] == alone
        for answer in answers:
            assert sum(answer.accepted_by_round) == answer.acceptance.accepted
            assert answer.text == target.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert [answer.token_ids for answer in mtptrain.generate(target, head, prompts[0])] == alone[:1]


def test_a_bar_shows_tokens_in_a_terminal_alone_and_can_be_switched_off(
    target: LoadedTarget, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal, progress, is_shown in ((True, True, True), (False, True, False), (True, False, False)):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        (answer,) = mtptrain.generate(target, None, "def read(", max_new_tokens=16, progress=progress)
        said = capsys.readouterr().err
        assert ("1/1" in said and f" {len(answer.token_ids)} tokens, " in said) == is_shown == bool(said)


def test_answers_end_at_the_tokenizers_end_too_as_those_of_vllm_do(tmp_path: Path) -> None:
    """vLLM 0.32 served this target in fp32, at temperature 0: 95 tokens, of which generation_config.json ends none."""
    directory = shutil.copytree(DEMO_DIR, tmp_path / "target")
    for name, change in (
        ("tokenizer_config.json", {"eos_token": "."}),
        ("generation_config.json", {"eos_token_id": 0}),
    ):
        (directory / name).write_text(json.dumps(json.loads((directory / name).read_text()) | change))
    lines = Path(__file__).with_name("turn_end_prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["input_ids"] for line in lines]
    answers = mtptrain.generate(mtptrain.load_target(directory), None, prompts, max_new_tokens=32)
    assert [len(answer.token_ids) for answer in answers] == [17, 32, 11, 5, 8, 8, 8, 6]


def test_input_that_cannot_be_used_is_refused_in_one_line(finished: Run, target: LoadedTarget, tmp_path: Path) -> None:
    run_dir = finished[0]
    head = mtptrain.load_head(run_dir, target)
    other = mtptrain.load_target(make_target(tmp_path / "other", seed=1))
    (tmp_path / "turns.jsonl").write_text('{"id": 1, "turns": ["a", "b"]}\n')
    shutil.copytree(run_dir / "export/vllm", tmp_path / "changed")
    (tmp_path / "changed/config.json").write_text("{}")

    def generate(prompts: Any = "a", **settings: Any) -> Callable[[], object]:
        return lambda: mtptrain.generate(target, head, prompts, **settings)

    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: mtptrain.load_target("no/where"), "'no/where'"),
        (lambda: mtptrain.load_target("demo", dtype="int4"), "dtype: must be one of auto, float32, bfloat16"),
        (lambda: mtptrain.load_head("no/where", target), "head: must be .* unlike 'no/where'"),
        (lambda: mtptrain.load_head(tmp_path, target), "weights must be safetensors files"),
        (lambda: mtptrain.load_head(tmp_path / "changed", target), "must be as mtptrain wrote it"),
        (lambda: mtptrain.load_head(run_dir / "export/vllm", target, kind="foo"), "kind: must be one of mtp,"),
        (lambda: mtptrain.load_head(run_dir, other), r"head\.json: target_weights_sha256 must be"),
        (lambda: mtptrain.load_head(run_dir / "export/vllm", other), r"serving\.json: target_weights_sha256 must be"),
        (generate(5), "prompts: must be a text, token ids, .* but is a int"),
        (generate(b"a"), "but is a bytes"),
        (generate([None]), r"prompts\[0\]: must be a text, .* but is a NoneType"),
        (generate(["a", [10**6]]), r"prompts\[1\]: tokens must be in the target's vocabulary of 260"),
        (generate([["a"]]), r"prompts\[0\]: input_ids must be a list of integers"),
        (generate([[{"role": "user"}]]), r"prompts\[0\]: must be read as a whole"),
        (generate(""), r"prompts\[0\]: must hold at least one token"),
        (generate(max_new_tokens=10**6), r"prompts\[0\]: prompt and answer, or drafts, must fit"),
        (generate(max_new_tokens="many"), "max_new_tokens: must be a whole number, but is many; correct it"),
        (generate(max_tokens=1), "max_tokens: must be a setting of acceptance, but is none; correct it"),
        (generate(num_speculative_tokens=0), "num_speculative_tokens: must be a number of at least 1"),
        (lambda: mtptrain.acceptance(target, head), "prompts: must be given, or prompts_file, or run_dir"),
        (lambda: mtptrain.acceptance(target, head, prompts_file="none.jsonl"), r"but none\.jsonl does not exist"),
        (lambda: mtptrain.acceptance(target, head, prompts_file=tmp_path / "turns.jsonl"), "must have no `turns`"),
        (lambda: mtptrain.acceptance(target, head, run_dir="none"), "none/prompts/manifest.json: must exist"),
    ]
    for call, message in refused:
        with pytest.raises(mtptrain.UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_the_examples_of_the_page_run(
    finished: Run, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, directory in {"runs/mine": finished[0], "models/mine": tiny_target}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(directory)
    commands: list[list[str]] = []
    names_and_values = (each.split("=", 1) for each in finished[1])
    settings = "".join(f"{name}: {value}\n" for name, value in names_and_values)
    (tmp_path / "mine.yaml").write_text(f"recipe: quickstart\n{settings}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command) or Mock(returncode=0))
    blocks = [text for language, text in FENCE.findall((ROOT / "docs/python.md").read_text()) if language == "python"]
    assert len(blocks) > 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert commands == [[sys.executable, "-m", "mtptrain", "run", "mine.yaml"]]
    assert names["run_dir"] == finished[0]


def test_a_dict_runs_as_overrides_and_refused_settings_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command[4:]) or Mock(returncode=1))
    config = {"recipe": "quickstart", "run_dir": "runs/x y", "train.lr": 1e-3, "prompts": {"paths": "it's.txt"}}
    config |= {
        "head": "eagle3",
        "acceptance": {"top_k": 0, "draft_model": None},
        "deepspeed": {"bf16": {"enabled": False}},
    }
    with pytest.raises(mtptrain.UserError, match="runs/x y: mtptrain run must end with status 0, but ended with 1"):
        mtptrain.run(config)
    assert compose_config(*commands[0]).prompts.paths == ["it's.txt"]
    assert compose_config(*commands[0]).deepspeed["bf16"] == {"enabled": False}
    for wrong, message in (
        ({"recipe": "quickstrat"}, "did you mean quickstart"),
        (["recipe=quickstart", "train.lrr=1"], r"did you mean train\.lr\?"),
        ({"recipe": "quickstart", "train": {"lr": "high"}}, r"train\.lr: must be a number, but is high"),
        ("none.yaml", r"none\.yaml: must be a YAML file"),
    ):
        with pytest.raises(mtptrain.UserError, match=message):
            mtptrain.run(wrong)
    assert len(commands) == 1
