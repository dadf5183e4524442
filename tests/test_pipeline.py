"""Tests the five programs in order on a tiny target: the files that they write, and the fields that others read."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mtptrain.target.hub import load_tokenizer
from tests.conftest import Run, make_config, make_target, run_program


@pytest.fixture(scope="module")
def finished(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a run with all five stages finished. The output of stages 3 to 5 is in its parent folder."""
    directory = tmp_path_factory.mktemp("pipeline")
    shutil.copytree(tiny_run[0], directory / "run")
    overrides = (f"run_dir={directory}/run", *tiny_run[1])
    for module in ("train", "acceptance", "export"):
        result = run_program(module, *overrides)
        assert result.returncode == 0, result.stderr[-3000:]
        (directory / f"{module}.out").write_text(result.stdout)
    return directory / "run", overrides


def test_every_stage_leaves_its_config_and_provenance(finished: Run) -> None:
    for stage in ("prompts", "hidden_states", "train", "acceptance", "export/vllm"):
        stored = json.loads((finished[0] / stage / "stage.json").read_text())
        assert "recipe=quickstart" in stored["argv"] and stored["settings"]["prompts"]["max_document_tokens"] == 128


def test_the_report_has_the_fields_that_others_read_and_its_figures_follow_from_its_counts(finished: Run) -> None:
    report = json.loads((finished[0] / "acceptance/report.json").read_text())
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
    assert "without_loops" in report["baselines"]["prompt_lookup"] and report["speed"].keys() == {
        "head",
        "prompt_lookup",
    }


def test_the_table_names_the_head_and_prompt_lookup(finished: Run) -> None:
    output = (finished[0].parent / "acceptance.out").read_text()
    report = json.loads((finished[0] / "acceptance/report.json").read_text())
    assert re.search(rf"head mtp .* {report['acceptance_length']:.3f} ", output)
    assert re.search(rf"prompt lookup .* {report['baselines']['prompt_lookup']['acceptance_length']:.3f} ", output)


def without_times(path: Path) -> dict[str, object]:
    """Returns the part of a report that depends on prompts and settings alone.

    `quality` is left out, because its sums of probabilities round differently with other batches.
    """
    report = json.loads(path.read_text())
    return {
        name: figures
        for name, figures in report.items()
        if name not in ("command", "device", "speed", "num_ranks", "quality", "seal")
    }


def test_acceptance_takes_its_own_prompts_temperature_and_output_dir(finished: Run, tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "text": f"def read_file_{i}():\n    open_line = "} for i in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        f"acceptance.prompts_file={tmp_path}/prompts.jsonl",
        f"acceptance.output_dir={tmp_path}/out",
        "acceptance.temperature=0.7",
        "acceptance.num_speculative_tokens=5",
        "acceptance.dtype=bfloat16",
    )
    before = (finished[0] / "acceptance/report.json").read_bytes()
    reports = []
    for _ in range(2):
        result = run_program("acceptance", *finished[1], *settings)
        assert result.returncode == 0, result.stderr[-3000:]
        reports.append(without_times(tmp_path / "out/report.json"))
    assert reports[0] == reports[1], "the same seed must give the same figures"
    assert reports[0]["prompts"] == 5 and len(reports[0]["acceptance_rate_at"]) == 5
    assert reports[0]["temperature"] == 0.7 and reports[0]["dtype"] == "bfloat16"
    assert (finished[0] / "acceptance/report.json").read_bytes() == before


def test_everything_beside_the_head_is_measured_and_greedy_answers_are_the_same(finished: Run, tmp_path: Path) -> None:
    target_dir = next(each.removeprefix("target.path=") for each in finished[1] if each.startswith("target.path="))
    baselines = "acceptance.baselines=[none,prompt_lookup,model,tree,hybrid]"
    rows = [
        {"id": f"p{i}", "text": f"def read_file_{i}():\n    open_line = ", "category": "ab"[i % 2]} for i in range(6)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        f"acceptance.prompts_file={tmp_path}/prompts.jsonl",
        f"acceptance.output_dir={tmp_path}/measured",
        "acceptance.tree_nodes=12",
    )
    result = run_program("acceptance", *finished[1], baselines, f"acceptance.draft_model={target_dir}", *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "measured/report.json").read_text())
    assert list(report["baselines"]) == ["none", "prompt_lookup", "model", "tree", "hybrid"]
    assert report["baselines"]["model"]["acceptance_length"] == 4.0, "the target accepts its own 3 drafts"
    assert report["baselines"]["none"]["tokens_per_step"] == 1.0 and report["baselines"]["none"]["drafted"] == 0
    assert report["baselines"]["tree"]["acceptance_length"] >= report["acceptance_length"]
    assert report["baselines"]["tree"]["drafted"] == 12 * report["baselines"]["tree"]["rounds"]
    answers = [
        [json.loads(line)["tokens"] for line in (tmp_path / "measured" / name).read_text().splitlines()]
        for name in ("generations.jsonl", *(f"generations_{name}.jsonl" for name in report["baselines"]))
    ]
    assert all(each == answers[0] for each in answers) and len(answers) == 6
    assert report["by_category"]["a"]["prompts"] == report["by_category"]["b"]["prompts"] == 3
    assert all(figures["seconds"]["verify"] > 0 for figures in report["speed"].values())
    page = (tmp_path / "measured/report.html").read_text()
    assert page.count("<svg") == 6 and "</span>prompt lookup</td>" in page


def test_a_conversation_goes_on_from_the_targets_own_answer(finished: Run, tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["hello", "shorter"]},
        {"id": "single", "turns": ["def f"]},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (f"acceptance.prompts_file={tmp_path}/prompts.jsonl", f"acceptance.output_dir={tmp_path}/both")
    result = run_program("acceptance", *finished[1], *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    found = {
        (row["id"], row["turn"]): row
        for row in map(json.loads, (tmp_path / "both/generations.jsonl").read_text().splitlines())
    }
    assert list(found) == [("81", 1), ("81", 2), ("single", 1)]
    tokenizer = load_tokenizer(Path(make_config(*finished[1]).target.path))
    answer = tokenizer.decode(found["81", 1]["tokens"], skip_special_tokens=True)
    said = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "shorter"},
    ]
    second = {"id": "second", "messages": said}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(second) + "\n")
    assert (
        run_program("acceptance", *finished[1], *settings[:1], f"acceptance.output_dir={tmp_path}/alone").returncode
        == 0
    )
    alone = json.loads((tmp_path / "alone/generations.jsonl").read_text())
    assert alone["tokens"] == found["81", 2]["tokens"]
    report = json.loads((tmp_path / "both/report.json").read_text())
    assert (report["prompts"], report["conversations"], report["cut_conversations"]) == (3, 2, 0)
    assert report["by_category"]["writing"]["prompts"] == 2


def test_two_ranks_measure_the_same_acceptance_as_one(finished: Run, tmp_path: Path) -> None:
    result = run_program("acceptance", *finished[1], f"acceptance.output_dir={tmp_path}", num_ranks=2)
    assert result.returncode == 0, result.stderr[-3000:]
    assert without_times(tmp_path / "report.json") == without_times(finished[0] / "acceptance/report.json")
    two, one = (
        json.loads((path / "report.json").read_text())["quality"] for path in (tmp_path, finished[0] / "acceptance")
    )
    assert two["rounds_at"] == one["rounds_at"] and two["rounds_at"][0] > 0
    assert two["overlap_at"] == pytest.approx(one["overlap_at"], abs=1e-5)


def test_the_head_is_measured_at_other_temperatures_too(finished: Run, tmp_path: Path) -> None:
    settings = (
        "acceptance.temperatures=[0.7,1]",
        "acceptance.top_p=0.9",
        "acceptance.baselines=[]",
        f"acceptance.output_dir={tmp_path}",
    )
    result = run_program("acceptance", *finished[1], *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    report, plain = (json.loads((path / "report.json").read_text()) for path in (tmp_path, finished[0] / "acceptance"))
    assert report["top_p"] == 0.9 and report["acceptance_length"] == plain["acceptance_length"], (
        "top-p must not change greedy answers"
    )
    names = [f"temperature_{each}{drafts}" for each in ("0.7", "1") for drafts in ("", "_sampled_drafts")]
    assert list(report["baselines"]) == names and all(report["baselines"][name]["prompts"] == 8 for name in names)
    assert [report["baselines"][name]["quality"]["temperature"] for name in names] == [0.7, 0.7, 1.0, 1.0]
    assert "temperature 0.7 sampled drafts" in result.stdout
    assert "</span>temperature 1</td>" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_an_exported_head_goes_on_learning_from_logged_conversations(finished: Run, tmp_path: Path) -> None:
    """Follows the header of recipe `quickstart_continual`: measures the served head, trains it on the traffic, and
    measures it again."""
    lines = []
    for i in range(30):
        said = [
            {"role": "user", "content": f"read {i}"},
            {"role": "assistant", "content": f"def read_file_{i}(): open_line"},
        ]
        lines.append(json.dumps({"id": f"c{i}", "messages": said}))
    (tmp_path / "traffic.jsonl").write_text("\n".join(lines) + "\n")
    of_files = ("prompts.", "run_dir=", "acceptance.prompt_tokens")
    overrides = [
        *(each for each in finished[1] if not each.startswith(of_files)),
        f"prompts.paths=[{tmp_path}/traffic.jsonl]",
        "prompts.validation_fraction=0.2",
        f"head.init_from={finished[0]}/export/vllm",
        f"run_dir={tmp_path}/run",
        "train.max_steps=4",
    ]
    before = f"acceptance.output_dir={tmp_path}/before"
    programs = [
        ["prompts"],
        ["acceptance", before],
        ["hidden-states"],
        ["train"],
        ["acceptance"],
    ]
    for program, *more in programs:
        result = run_program(program, *overrides, *more, recipe="quickstart_continual")
        assert result.returncode == 0, result.stderr[-3000:]
    served, learned = (
        json.loads((path / "report.json").read_text()) for path in (tmp_path / "before", tmp_path / "run/acceptance")
    )
    assert served["head"] == f"{finished[0]}/export/vllm" and learned["head"] == f"{tmp_path}/run/train/best"
    assert served["prompts_sha256"] == learned["prompts_sha256"] and served["head_sha256"] != learned["head_sha256"]


@pytest.mark.parametrize(
    ("module", "stage"),
    [
        ("hidden-states", "prompts"),
        ("train", "prompts"),
        ("acceptance", "train"),
        ("export", "train"),
    ],
)
def test_a_program_without_the_stage_before_it_says_what_to_run(
    tmp_path: Path, tiny_target: Path, module: str, stage: str
) -> None:
    result = run_program(module, f"run_dir={tmp_path}/run", f"target.path={tiny_target}")
    assert result.returncode != 0
    assert re.search(rf"^error: .*run mtptrain {stage} ", result.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("acceptance.prompts_file=/none.jsonl",),
            "acceptance.prompts_file: must be a jsonl file, but /none.jsonl does not exist",
        ),
        (
            ("acceptance.max_new_tokens=600",),
            "acceptance.prompt_tokens: held-out documents must hold a prompt of 32 tokens (in a conversation",
        ),
        (
            ("acceptance.baselines=[model]", "acceptance.draft_model=demo"),
            "acceptance.draft_model: the vocabulary must have at most 260 rows, as many as the target's, but",
        ),
        (
            ("acceptance.baselines=[model]", "acceptance.draft_model=/none"),
            "acceptance.draft_model: must be a local directory, a GGUF file, a hub name or `demo`, but '/none'",
        ),
        (
            ("acceptance.baselines=[tree]", "acceptance.tree_top_k=300"),
            "acceptance.tree_top_k: must be at most 260, the number of tokens that the head can draft, but is 300",
        ),
        (
            ("head.ttt_steps=2",),
            "the head's settings must match the config, but differ in head.ttt_steps (3 stored, 2 in the config)",
        ),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, tuple) else None,
)
def test_bad_input_to_acceptance_is_refused(finished: Run, overrides: tuple[str, ...], message: str) -> None:
    result = run_program("acceptance", *finished[1], *overrides)
    assert result.returncode != 0
    assert message in result.stderr


def test_a_head_for_other_weights_is_refused(finished: Run, tmp_path: Path) -> None:
    other = make_target(tmp_path / "target", seed=5)
    for module in ("acceptance", "export"):
        result = run_program(module, *finished[1], f"target.path={other}")
        assert result.returncode != 0
        assert re.search(
            r"head\.json: target_weights_sha256 must be \w+, that of .* the head belongs to another target",
            result.stderr,
        )
