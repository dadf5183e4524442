"""Tests the comparison of reports, and the pages that show them."""

import json
import os
import re
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eval import compare, report_page
from eval.acceptance import remove_generations
from eval.plots import plots_of
from eval.report_page import write_run_page
from mtptrain.decoding.acceptance import intervals, summarise
from mtptrain.decoding.speculate import Generation
from mtptrain.utils.errors import StageMissing, UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import make_config
from tests.sealed import seal_again


def figures(lengths: list[int]) -> dict[str, Any]:
    generations = [Generation(list(range(20)), 10, 0, 30, [length, length // 2, 0]) for length in lengths]
    found = intervals([[generation] for generation in generations])
    pooled = summarise(generations).__dict__
    return {
        **pooled,
        "intervals": None if found is None else asdict(found),
        "without_loops": pooled,
        "by_prompt_tokens": {"0": pooled, "256": pooled},
        "by_category": {"code <b>": pooled, "text": pooled},
        "quality": None,
        "acceptance_length_of_prompts": [1 + sum(each.accepted_at) / each.rounds for each in generations],
    }


def write_report(path: Path, lengths: list[int], **settings: object) -> Path:
    speed = {"tokens_per_s": 50.0, "seconds": {"all": 4.0, "draft": 1.0, "verify": 2.0}}
    report = {
        **figures(lengths),
        "head_name": "mtp",
        "head": str(path.parent),
        "target": "demo",
        "target_weights_sha256": "aa",
        "batch_size": 8,
        "num_ranks": 1,
        "device": "CPU",
        "tree": "32 nodes, top 6",
        "num_speculative_tokens": 3,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "sample_drafts": False,
        "max_new_tokens": 20,
        "dtype": "float32",
        "prompts_sha256": "00",
        "baselines": {"prompt_lookup": figures([2, 2])},
        "speed": {"head": speed, "prompt_lookup": speed},
        **settings,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, report)
    return path


def test_reports_are_compared_in_a_table_and_on_a_page_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        write_report(tmp_path / name / "acceptance/report.json", lengths)
        for name, lengths in (("a", [8, 6]), ("b", [4, 4]))
    ]
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, paths), "--out", str(tmp_path / "page.html")])
    compare.main()
    page, table = (tmp_path / "page.html").read_text(), capsys.readouterr().out
    assert re.search(r"a: head mtp .* 2\.050 .* 1\.90-2\.20 ", table) and re.search(r"b: head mtp .* 1\.600 ", table)
    for name in ("a: head mtp", "a: prompt lookup", "b: head mtp", "b: prompt lookup"):
        assert f"</span>{name}</td>" in page
    assert page.count("<svg") == 5, "the charts must show positions, prompt tokens, categories, prompts and costs"
    assert not re.findall(r"(?:src|href)=[\"']https?://", page.replace('xmlns:xlink="', "")) and "<script" not in page
    assert "<b>" not in page, "names must be shown as text, not markup"


def test_runs_are_named_by_their_directories_and_say_how_they_were_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(tmp_path / "seed_0/acceptance/report.json", [8, 6], train_tokens=12_345, train_seed=0)
    write_report(tmp_path / "seed_1/acceptance/report.json", [4, 4], train_tokens=None)
    reports = compare.read_reports([tmp_path / "seed_0", tmp_path / "seed_1"])
    assert list(reports) == ["seed_0", "seed_1"]
    compare.print_table(reports)
    first, _, second, _ = (line.split("│")[8:13] for line in capsys.readouterr().out.splitlines() if ": " in line)
    assert [cell.strip() for cell in first] == ["0.000", "2", "50", "12,345", "0"]
    assert [cell.strip() for cell in second] == ["0.000", "2", "50", "", ""]
    with pytest.raises(StageMissing, match=r"none/acceptance/report\.json: must exist, .*; run mtptrain acceptance"):
        (tmp_path / "none").mkdir()
        compare.read_reports([tmp_path / "none"])


MEASURED = {
    "device": "CPU",
    "head_sha256": "cc",
    "prompts_sha256": "00",
    "num_speculative_tokens": 3,
    "max_new_tokens": 20,
    "dtype": "float32",
}


def write_other_report(run_dir: Path, name: str, content: dict[str, object]) -> None:
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, content)


def page_of(run_dir: Path) -> str:
    write_run_page(make_config(f"run_dir={run_dir}"))
    return (run_dir / "acceptance/report.html").read_text()


def test_a_page_of_somebody_else_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").write_text("<title>My thesis</title>")
    report = write_report(tmp_path / "acceptance/report.json", [8, 6])
    monkeypatch.setattr(sys, "argv", ["compare", str(report), "--out", str(tmp_path / "index.html")])
    with pytest.raises(SystemExit):
        compare.main()
    assert (tmp_path / "index.html").read_text() == "<title>My thesis</title>"
    monkeypatch.setattr(sys, "argv", ["compare", str(report), "--out", str(tmp_path / "page.html")])
    compare.main()
    compare.main()


@pytest.mark.parametrize(("drafted", "cell"), [(3060, "3,060"), (None, "")])  # OpenVINO does not count drafts
def test_an_engines_counters_are_shown_on_the_page_of_the_same_measurement_only(
    tmp_path: Path, drafted: int | None, cell: str
) -> None:
    counts = {
        "rounds": 1020,
        "drafted": 3060,
        "accepted_at": [903, 702, 501],
        "acceptance_length": 3.065,
        "plain_greedy_answers": 2,
    }
    served = {
        **MEASURED,
        "ours": counts,
        "theirs": {**counts, "rounds": 1021, "drafted": drafted},
        "engine": "vllm",
        "version": "0.32.0",
        "prompts": 2,
    }
    served["command"] = "mtptrain serving-check 'serving.python=<b>'"
    write_report(tmp_path / "acceptance/report.json", [8, 6], head_sha256="cc")
    write_other_report(tmp_path, "serving_check/report.json", served)
    page = page_of(tmp_path)
    assert (
        f"<td>vllm 0.32.0</td><td>1,021</td><td>{cell}</td><td>903</td><td>702</td><td>501</td><td>3.065</td><td>2</td>"
        in page
    )
    assert "<pre>mtptrain serving-check &#39;serving.python=&lt;b&gt;&#39;</pre>" in page
    for name, other in (("head_sha256", "dd"), ("prompts_sha256", "11"), ("max_new_tokens", 21), ("dtype", "bfloat16")):
        write_other_report(tmp_path, "serving_check/report.json", {**served, name: other})
        assert "vllm" not in page_of(tmp_path)


def test_decoding_speed_of_the_run_is_shown_on_its_page_with_its_command(tmp_path: Path) -> None:
    speeds = ("tokens_per_s", "speed_up", "speed_up_with_prompt", "refilled_speed_up", "tokens_per_own_round")
    row = dict.fromkeys(speeds, 1.25)
    row |= {"batch_size": 8, "num_speculative_tokens": 3, "draft_ms": 2.0, "verify_ms": 3.0}
    others = ((8, 0, 1.0), (1, 0, 1.0), (1, 3, 0.8))
    rows = [
        row | {"batch_size": size, "num_speculative_tokens": depths, "speed_up": speed_up}
        for size, depths, speed_up in others
    ]
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "sample_drafts": False}
    decoding = {**MEASURED, **sampling, "rows": [row, *rows], "command": "bench it"}
    write_report(tmp_path / "acceptance/report.json", [8, 6], head_sha256="cc", command="measure it")
    write_other_report(tmp_path, "bench_decode/report.json", decoding)
    page = page_of(tmp_path)
    assert (
        "<td>8</td><td>3</td><td>1</td><td>1.25</td><td>1.25</td><td>1.25</td><td>1.25</td><td>2.00</td><td>3.00</td>"
        in page
    )
    fastest = "K = 3 (1.25 times plain decoding) at batch size 8, K = 0 (1.00 times plain decoding) at batch size 1"
    assert f"Fastest here: {fastest}." in page
    assert all(f"<pre>{command}</pre>" in page for command in ("measure it", "bench it"))
    write_other_report(tmp_path, "bench_decode/report.json", {**decoding, "head_sha256": "dd"})
    assert "bench it" not in page_of(tmp_path)
    write_other_report(tmp_path, "bench_decode/report.json", {**decoding, "rows": [{}]})
    (tmp_path / "serving_check").mkdir()
    (tmp_path / "serving_check/report.json").write_text('{"torn')
    page = page_of(tmp_path)
    assert "head mtp" in page and "bench_decode/report.json cannot be shown (KeyError(" in page
    assert "serving_check/report.json cannot be shown (UserError(" in page


def test_names_with_dollars_are_shown_as_they_are(tmp_path: Path) -> None:
    category = {"$x_{$ cost": figures([2, 2])}
    write_report(tmp_path / "acceptance/report.json", [8, 6], by_category=category)
    assert "<!-- $x_{$ cost -->" in page_of(tmp_path)


def test_plots_of_many_long_names_keep_their_size(user_warnings: list[warnings.WarningMessage]) -> None:
    drafters = {f"runs/losses/seed_{i}: temperature 1 sampled drafts": figures([8, 6]) for i in range(20)}
    plots = plots_of(drafters, has_speed=False)
    heights = [float(height) for svg in plots.values() for height in re.findall(r'<rect .* height="([\d.]+)"', svg)]
    assert len(heights) == len(plots) and min(heights) > 150 and not user_warnings, "the area within the axes"


def test_a_page_that_cannot_be_drawn_is_a_warning(tmp_path: Path) -> None:
    path = write_report(tmp_path / "acceptance/report.json", [8, 6], by_category={"\ud83d": figures([2, 2])})
    before = path.read_bytes()
    with pytest.warns(
        UserWarning, match=rf"report\.html: must show the figures of {path}, but cannot be drawn \(.*\); read them in"
    ):
        write_run_page(make_config(f"run_dir={tmp_path}"))
    assert path.read_bytes() == before and not (tmp_path / "acceptance/report.html").exists()


def test_a_report_that_was_edited_is_a_warning_for_programs_that_have_measured(tmp_path: Path) -> None:
    path = write_report(tmp_path / "acceptance/report.json", [8, 6])
    path.write_text(path.read_text().replace("[", "[ ", 1).replace("8", "9", 1))
    with pytest.warns(UserWarning, match=r"report\.html is not written: .*run mtptrain acceptance again"):
        write_run_page(make_config(f"run_dir={tmp_path}"))
    assert not (tmp_path / "acceptance/report.html").exists()


def test_a_page_of_somebody_else_in_the_run_is_kept(tmp_path: Path) -> None:
    write_report(tmp_path / "acceptance/report.json", [8, 6])
    (tmp_path / "acceptance/report.html").write_text("mine")
    with pytest.warns(
        UserWarning,
        match=r"report\.html: must be a new file or an earlier output of this program, but \S+ is something else; move "
        r"it away, or set acceptance\.output_dir",
    ):
        write_run_page(make_config(f"run_dir={tmp_path}"))
    assert (tmp_path / "acceptance/report.html").read_text() == "mine"


def test_a_kill_while_a_page_is_written_leaves_the_earlier_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    write_report(tmp_path / "acceptance/report.json", [8, 6])
    before = page_of(tmp_path)
    write_report(tmp_path / "acceptance/report.json", [4, 4])
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        page_of(tmp_path)
    assert (tmp_path / "acceptance/report.html").read_text() == before


def test_answers_of_earlier_baselines_are_removed(tmp_path: Path) -> None:
    names = ["generations.jsonl", "generations_mine.jsonl", "generations_temperature_notes.jsonl", "report.json"]
    for name in (*names, "generations_tree.jsonl", "generations_temperature_0.7_sampled_drafts.jsonl"):
        (tmp_path / name).touch()
    remove_generations(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_run_that_has_not_been_measured_gets_no_page(tmp_path: Path) -> None:
    write_run_page(make_config(f"run_dir={tmp_path}"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", compare.MUST_BE_EQUAL)
def test_a_report_of_another_measurement_is_refused(tmp_path: Path, setting: str) -> None:
    first = write_report(tmp_path / "a/report.json", [8, 6])
    other = write_report(tmp_path / "b/report.json", [8, 6], **{setting: "other"})
    with pytest.raises(
        ValueError, match=rf"b/report.json: {setting} must be .* as in .*a/report.json, but is 'other'; measure"
    ):
        compare.read_reports([first, other])


def test_tokens_per_second_of_other_batches_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        write_report(tmp_path / name / "report.json", [8, 6], batch_size=size) for name, size in (("a", 1), ("b", 8))
    ]
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, paths), "--out", str(tmp_path / "new/page.html")])
    compare.main()
    page = (tmp_path / "new/page.html").read_text()
    assert page.count("<svg") == 4 and "<td>50</td>" not in page and " 50 " not in capsys.readouterr().out


def test_no_report_is_lost_if_paths_are_alike(tmp_path: Path) -> None:
    paths = [
        write_report(tmp_path / "x" / name, [8, 6])
        for name in ("acceptance/report.json", "acceptance/acceptance/report.json")
    ]
    assert list(compare.read_reports(paths)) == [str(path) for path in paths]
    with pytest.raises(ValueError, match="each report must be given once, but this one is given twice"):
        compare.read_reports([paths[0], paths[0]])


@pytest.mark.parametrize(
    "keys",
    [
        ("batch_size",),
        ("intervals", "acceptance_rate_at"),
        ("baselines", "prompt_lookup", "by_prompt_tokens", "0", "acceptance_length"),
        ("speed", "head", "seconds", "all"),
    ],
)
def test_an_incomplete_report_is_refused(tmp_path: Path, keys: tuple[str, ...]) -> None:
    path = write_report(tmp_path / "report.json", [8, 6])
    report = json.loads(path.read_text())
    part = report
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    seal_again(path, **{keys[0]: report.get(keys[0], ...)})
    with pytest.raises(
        ValueError,
        match=r"report\.json: must have all figures that mtptrain acceptance writes, but some are missing",
    ):
        compare.read_reports([path])


@pytest.mark.parametrize(
    ("part", "reason"), [('"examples": [1]', "Undefined"), ('"more": NaN', "Out of"), ('"more": 1e400', "Out of")]
)
def test_a_report_with_an_invalid_figure_is_refused(tmp_path: Path, part: str, reason: str) -> None:
    path = write_report(tmp_path / "report.json", [8, 6])
    seal_again(path, **json.loads("{" + part + "}"))
    with pytest.raises(ValueError, match=rf"report\.json: must have all figures .* but some are .*{reason}"):
        compare.read_reports([path])


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"rounds": ')
    with pytest.raises(ValueError, match=r"torn\.json: must be JSON, but is not .*; run mtptrain acceptance again"):
        compare.read_reports([tmp_path / "torn.json"])
    write_sealed(tmp_path / "other.json", {"rounds": 3})
    with pytest.raises(
        ValueError, match=r"other\.json: must be a report\.json of mtptrain acceptance, but is not one, or has an older"
    ):
        compare.read_reports([tmp_path / "other.json"])
    with pytest.raises(UserError, match=r"must be a report\.json of mtptrain acceptance, but is not a file"):
        compare.read_reports([tmp_path / "none.json"])


def test_a_report_of_one_source_shows_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        write_report(tmp_path / name / "report.json", lengths) for name, lengths in (("one", [8]), ("two", [8, 6]))
    ]
    reports = compare.read_reports(paths)
    assert reports["one"]["intervals"] is None
    page = report_page.render_page(reports)
    assert '2.200 <span class="quiet">one source</span>' in page
    assert '2.050 <span class="quiet">1.90-2.20</span>' in page
    compare.print_table(reports)
    assert "one source" in capsys.readouterr().out


def test_a_report_from_before_top_p_counts_as_without_it(tmp_path: Path) -> None:
    seal_again(write_report(tmp_path / "a/report.json", [8, 6]), top_p=..., top_k=...)
    write_report(tmp_path / "b/report.json", [4, 4])
    assert list(compare.read_reports([tmp_path / "a/report.json", tmp_path / "b/report.json"])) == ["a", "b"]
    assert list(compare.read_reports([tmp_path / "a", tmp_path / "b"])) == ["a", "b"], (
        "as acceptance.output_dir leaves it"
    )
