"""Tests the five programs in order on a tiny target: the files that they write, and the fields that others read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mtptrain.target.hub import load_tokenizer
from tests.conftest import TINY_SETTINGS, Run, make_config, make_target, run_program, succeed, write_text_files
from tests.families import EXACT, IMAGE_MODELS, write_image_model, write_member


def report_of(directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return report


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"acceptance.prompts_file={path}"


def test_the_report_has_the_fields_that_others_read_and_its_figures_follow_from_its_counts(finished: Run) -> None:
    for stage in ("prompts", "hidden_states", "train", "acceptance", "export/vllm"):
        stored = json.loads((finished[0] / stage / "stage.json").read_text())
        assert "recipe=quickstart" in stored["argv"] and stored["settings"]["prompts"]["max_document_tokens"] == 128
    assert ": measuring the head on 4 held-out prompts\n" in (finished[0].parent / "train.out").read_text()
    report, output = report_of(finished[0] / "acceptance"), (finished[0].parent / "acceptance.out").read_text()
    assert report["num_speculative_tokens"] == 3 and report["prompts"] == 8 and report["temperature"] == 0.0
    generations = [json.loads(line) for line in (finished[0] / "acceptance/generations.jsonl").read_text().splitlines()]
    assert report["rounds"] == sum(row["rounds"] for row in generations)
    assert report["drafted"] == 3 * report["rounds"]
    assert report["accepted"] == sum(sum(row["accepted_at"]) for row in generations)
    assert report["acceptance_length"] == pytest.approx(1 + report["accepted"] / report["rounds"])
    assert report["acceptance_rate"] == pytest.approx(report["accepted"] / report["drafted"])
    for depth, rate in enumerate(report["acceptance_rate_at"]):
        assert rate == pytest.approx(sum(row["accepted_at"][depth] for row in generations) / report["rounds"])
    low, high = report["intervals"]["acceptance_length"]
    assert low <= report["acceptance_length"] <= high
    assert sum(part["rounds"] for part in report["by_prompt_tokens"].values()) == report["rounds"]
    lookup = report["baselines"]["prompt_lookup"]
    assert "without_loops" in lookup and report["speed"].keys() == {"head", "prompt_lookup"}
    assert re.search(rf"head mtp .* {report['acceptance_length']:.3f} ", output)
    assert re.search(rf"prompt lookup .* {lookup['acceptance_length']:.3f} ", output)


def without_times(directory: Path) -> dict[str, object]:
    """Returns the part of a report that depends on prompts and settings alone.

    `quality` is left out, because its sums of probabilities round differently with other batches.
    """
    others = ("command", "device", "speed", "num_ranks", "quality", "seal")
    return {name: figures for name, figures in report_of(directory).items() if name not in others}


CODE = [{"id": f"p{i}", "text": f"def read_file_{i}():\n    open_line = ", "category": "ab"[i % 2]} for i in range(6)]


def test_everything_beside_the_head_is_measured_and_greedy_answers_are_the_same(finished: Run, tmp_path: Path) -> None:
    target = next(setting.partition("=")[2] for setting in finished[1] if setting.startswith("target.path="))
    names, out = ["none", "prompt_lookup", "model", "tree", "hybrid"], tmp_path / "measured"
    settings = (f"acceptance.baselines=[{','.join(names)}]", f"acceptance.draft_model={target}")
    settings += (
        write_rows(tmp_path / "prompts.jsonl", CODE),
        f"acceptance.output_dir={out}",
        "acceptance.tree_nodes=12",
    )
    succeed("acceptance", *finished[1], *settings)
    report = report_of(out)
    baselines = report["baselines"]
    assert list(baselines) == names
    assert baselines["model"]["acceptance_length"] == 4.0, "the target accepts its own 3 drafts"
    assert baselines["none"]["tokens_per_step"] == 1.0 and baselines["none"]["drafted"] == 0
    assert baselines["tree"]["acceptance_length"] >= report["acceptance_length"]
    assert baselines["tree"]["drafted"] == 12 * baselines["tree"]["rounds"]
    files = ("generations.jsonl", *(f"generations_{name}.jsonl" for name in names))
    answers = [[json.loads(line)["tokens"] for line in (out / file).read_text().splitlines()] for file in files]
    assert answers == [answers[0]] * 6
    assert report["by_category"]["a"]["prompts"] == report["by_category"]["b"]["prompts"] == 3
    assert all(figures["seconds"]["verify"] > 0 for figures in report["speed"].values())


def test_a_conversation_goes_on_from_the_targets_own_answer(finished: Run, tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["hello", "shorter"]},
        {"id": "one", "turns": ["def f"]},
    ]
    asked = write_rows(tmp_path / "prompts.jsonl", rows)
    succeed("acceptance", *finished[1], asked, f"acceptance.output_dir={tmp_path}/both")
    lines = map(json.loads, (tmp_path / "both/generations.jsonl").read_text().splitlines())
    tokens = {(row["id"], row["turn"]): row["tokens"] for row in lines}
    assert list(tokens) == [("81", 1), ("81", 2), ("one", 1)]
    answer = load_tokenizer(Path(make_config(*finished[1]).target.path)).decode(
        tokens["81", 1], skip_special_tokens=True
    )
    said = [("user", "hello"), ("assistant", answer), ("user", "shorter")]
    write_rows(
        tmp_path / "prompts.jsonl", [{"id": 2, "messages": [{"role": role, "content": text} for role, text in said]}]
    )
    succeed("acceptance", *finished[1], asked, f"acceptance.output_dir={tmp_path}/alone")
    assert json.loads((tmp_path / "alone/generations.jsonl").read_text())["tokens"] == tokens["81", 2]
    report = report_of(tmp_path / "both")
    assert (report["prompts"], report["conversations"], report["cut_conversations"]) == (3, 2, 0)
    assert report["by_category"]["writing"]["prompts"] == 2


def test_two_ranks_measure_the_same_acceptance_as_one(finished: Run, tmp_path: Path) -> None:
    succeed("acceptance", *finished[1], f"acceptance.output_dir={tmp_path}", num_ranks=2)
    assert without_times(tmp_path) == without_times(finished[0] / "acceptance")
    two, one = (report_of(directory)["quality"] for directory in (tmp_path, finished[0] / "acceptance"))
    assert two["rounds_at"] == one["rounds_at"] and two["rounds_at"][0] > 0
    assert two["overlap_at"] == pytest.approx(one["overlap_at"], abs=1e-5)


def test_the_head_is_measured_at_other_temperatures_and_with_other_prompts_and_drafts(
    finished: Run, tmp_path: Path
) -> None:
    settings = ("acceptance.temperatures=[0.7,1]", "acceptance.top_p=0.9", "acceptance.baselines=[]")
    settings += (write_rows(tmp_path / "prompts.jsonl", CODE), "acceptance.num_speculative_tokens=5")
    before, reports = (finished[0] / "acceptance/report.json").read_bytes(), []
    for _ in range(2):
        printed = succeed("acceptance", *finished[1], *settings, f"acceptance.output_dir={tmp_path}/out").stdout
        reports.append(without_times(tmp_path / "out"))
    assert reports[0] == reports[1], "the same seed must give the same figures"
    assert (finished[0] / "acceptance/report.json").read_bytes() == before
    report = report_of(tmp_path / "out")
    assert report["top_p"] == 0.9 and report["prompts"] == 6 and report["num_speculative_tokens"] == 5
    names = [f"temperature_{value}{drafts}" for value in ("0.7", "1") for drafts in ("", "_sampled_drafts")]
    assert list(report["baselines"]) == names and all(report["baselines"][name]["prompts"] == 6 for name in names)
    assert [report["baselines"][name]["quality"]["temperature"] for name in names] == [0.7, 0.7, 1.0, 1.0]
    assert "temperature 0.7 sampled drafts" in printed


def test_a_program_without_the_stage_before_it_says_what_to_run(tmp_path: Path, tiny_target: Path) -> None:
    before = {"hidden-states": "prompts", "train": "prompts", "acceptance": "train", "export": "train"}
    for program, stage in before.items():
        result = run_program(program, f"run_dir={tmp_path}/run", f"target.path={tiny_target}")
        assert result.returncode != 0
        assert re.search(rf"^error: .*run mtptrain {stage} ", result.stderr, re.MULTILINE)


@pytest.mark.slow
def test_an_exported_head_goes_on_learning_from_logged_conversations(finished: Run, tmp_path: Path) -> None:
    said = [[("user", f"read {i}"), ("assistant", f"def read_file_{i}(): open_line")] for i in range(30)]
    chats = [[{"role": role, "content": text} for role, text in turns] for turns in said]
    write_rows(tmp_path / "traffic.jsonl", [{"id": f"c{i}", "messages": chat} for i, chat in enumerate(chats)])
    replaced = ("prompts.", "run_dir=", "acceptance.prompt_tokens")
    overrides = [setting for setting in finished[1] if not setting.startswith(replaced)]
    overrides += [f"prompts.paths=[{tmp_path}/traffic.jsonl]", "prompts.validation_fraction=0.2", "train.max_steps=4"]
    overrides += [f"head.init_from={finished[0]}/export/vllm", f"run_dir={tmp_path}/run"]
    overrides += ["recipe=quickstart_continual", "acceptance.baselines=[initial]"]
    succeed("prompts", *overrides)
    succeed("acceptance", *overrides, f"acceptance.output_dir={tmp_path}/before")
    printed = succeed("run", *overrides).stdout
    served, learned = report_of(tmp_path / "before"), report_of(tmp_path / "run/acceptance")
    assert served["head"] == f"{finished[0]}/export/vllm" and learned["head"] == f"{tmp_path}/run/train/best"
    assert served["prompts_sha256"] == learned["prompts_sha256"] and served["head_sha256"] != learned["head_sha256"]
    initial = learned["baselines"]["initial"]
    assert initial["accepted"] == served["accepted"] and initial["rounds"] == served["rounds"]
    is_better = learned["acceptance_length"] > initial["acceptance_length"]
    assert (tmp_path / "run/export/vllm/config.json").is_file() == is_better != ("not exported: " in printed)


REFUSED = {
    "acceptance.max_new_tokens=600": "prompt_tokens: held-out documents must hold a prompt of 32 tokens (in a conv",
    "acceptance.baselines=[model] acceptance.draft_model=demo": "a draft model must have at most 260 rows of embeddin",
    "acceptance.baselines=[tree] acceptance.tree_top_k=300": "tree_top_k: must be at most 260, the number of tokens",
    "head.ttt_steps=2": "head.ttt_steps must be 2, but is 3; set head.ttt_steps=3, or train again",
    "head.attention_bias=true": "settings must be those of the config, but differ in head.attention_bias (False",
}


def test_bad_input_to_acceptance_is_refused(finished: Run, tmp_path: Path) -> None:
    for overrides, message in REFUSED.items():
        result = run_program("acceptance", *finished[1], *overrides.split())
        assert result.returncode != 0 and message in result.stderr
    other = make_target(tmp_path / "target", seed=5)
    for program in ("acceptance", "export"):
        result = run_program(program, *finished[1], f"target.path={other}")
        assert result.returncode != 0
        message = r"head\.json: target_weights_sha256 must be \w+, that of .* the head belongs to another target"
        assert re.search(message, result.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "gpt_oss", "qwen3_5_text", "gemma3"])
def test_a_target_of_any_family_goes_through_all_stages(tmp_path: Path, name: str) -> None:
    """The families have factors of scores, experts with sinks, states by the delta rule, and an image encoder."""
    is_image_model = name in IMAGE_MODELS
    write, settings = (write_image_model, IMAGE_MODELS) if is_image_model else (write_member, EXACT)
    target, files = write(tmp_path / "target", *settings[name]), write_text_files(tmp_path / "files")
    head, engine = ("mtp", "sglang") if is_image_model else ("eagle3", "vllm")
    overrides = (f"run_dir={tmp_path}/run", f"target.path={target}", f"prompts.paths=[{files}]", "train.max_steps=4")
    for program in ("prompts", "hidden-states", "train", "acceptance", "export"):
        succeed(program, *TINY_SETTINGS, *overrides, f"head={head}", f"export.engine={engine}")
    assert report_of(tmp_path / "run/acceptance")["rounds"] > 0
    notes = (tmp_path / f"run/export/{engine}/README.md").read_text()
    assert ("The target also reads images" in notes) == is_image_model
