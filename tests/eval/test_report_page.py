"""Tests the page of a measurement, its verdict, plots and example answers, and the comparison of several reports."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from eval import compare
from eval.acceptance import remove_generations
from eval.examples import examples
from eval.measurement import DecodedPrompt, Measured
from eval.plots import plot_serving
from eval.report_page import render_page, verdict, write_page
from mtptrain.decoding.acceptance import has_loop, intervals, summarise
from mtptrain.decoding.speculate import Generation
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_sealed
from tests.conftest import make_tokenizer
from tests.sealed import seal_again


def figures(lengths: list[int]) -> dict[str, Any]:
    generations = [Generation(list(range(20)), 10, 0, 30, [length, length // 2, 0]) for length in lengths]
    resampled, pooled = intervals([[generation] for generation in generations]), vars(summarise(generations))
    parts = {"without_loops": pooled, "by_prompt_tokens": {"0": pooled, "256": pooled}, "quality": None}
    parts |= {"by_category": {"code <b> $x_{$": pooled, "text": pooled}}
    return {**pooled, **parts, "intervals": None if resampled is None else asdict(resampled)}


DECODED = {"device": "CPU", "num_speculative_tokens": 3, "max_new_tokens": 20, "dtype": "float32"}
DECODED |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "sample_drafts": False}


def write_report(path: Path, lengths: list[int], **settings: object) -> Path:
    speed = {"tokens_per_s": 50.0, "seconds": {"all": 4.0, "draft": 1.0, "verify": 2.0}}
    settings = {"tree": "32 nodes, top 6", "batch_size": 8, "num_ranks": 1, **settings}
    report = {
        **figures(lengths),
        **{"head_name": "mtp", "head": str(path.parent), "target": "demo", "target_weights_sha256": "aa"},
        **{"baselines": {"prompt_lookup": figures([2, 2])}, "speed": {"head": speed, "prompt_lookup": speed}},
        **DECODED,
        **{"prompts_sha256": "00", "head_sha256": "cc"},
        **settings,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, report)
    return path


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns a function that compares reports of run folders, and returns the page."""

    def run(*paths: Path, out: str = "page.html") -> str:
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, paths), "--out", str(tmp_path / out)])
        compare.main()
        return (tmp_path / out).read_text()

    return run


def test_reports_are_compared_in_a_table_and_on_a_page_without_a_network(
    tmp_path: Path, comparison: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [
        write_report(tmp_path / name / "acceptance/report.json", lengths)
        for name, lengths in (("a", [8, 6]), ("b", [4, 4]))
    ]
    page, table = comparison(Path("a"), Path("b")), capsys.readouterr().out
    assert re.search(r"a: head mtp .* 2\.050 .* 1\.90-2\.20 ", table) and re.search(r"b: head mtp .* 1\.600 ", table)
    for name in ("a: head mtp", "a: prompt lookup", "b: head mtp", "b: prompt lookup"):
        assert f"</span>{name}</td>" in page
    assert page.count("<svg") == 3, "the charts must show positions, prompt tokens and categories"
    assert not re.findall(r"(?:src|href)=[\"']https?://", page.replace('xmlns:xlink="', "")) and "<script" not in page
    assert "<b>" not in page, "names must be shown as text, not markup"
    for path, size in zip(paths, (1, 8), strict=True):
        seal_again(path, batch_size=size)
    page = comparison(*paths, out="new/page.html")
    assert "<td>50</td>" not in page and " 50 " not in capsys.readouterr().out


def test_a_page_of_somebody_else_is_not_overwritten(tmp_path: Path, comparison: Callable[..., str]) -> None:
    report = write_report(tmp_path / "report.json", [8, 6])
    pages = tmp_path / "page.html", tmp_path / "report.html"
    for page in pages:
        page.write_text("<title>My thesis</title>")
    with pytest.raises(SystemExit):
        comparison(report)
    message = (
        r"report\.html: must be a new file or an earlier output of this program, but \S+ is something else; move it "
        r"away, or set acceptance\.output_dir"
    )
    with pytest.warns(UserWarning, match=message):
        write_page(json.loads(report.read_text()), tmp_path)
    assert [page.read_text() for page in pages] == ["<title>My thesis</title>"] * 2
    for _ in range(2):  # an earlier page of ours is overwritten
        comparison(report, out="other.html")


def test_a_page_that_cannot_be_drawn_is_a_warning(tmp_path: Path) -> None:
    """The measurement is already on disk and must not fail because of the page."""
    path = write_report(tmp_path / "report.json", [8, 6], by_category={"\ud83d": figures([2, 2])})
    message = rf"report\.html: must show the figures of {path}, but cannot be drawn \(.*\); read them in"
    with pytest.warns(UserWarning, match=message):
        write_page(json.loads(path.read_text()), tmp_path)


def test_answers_of_earlier_baselines_are_removed(tmp_path: Path) -> None:
    names = ["generations.jsonl", "generations_mine.jsonl", "generations_temperature_notes.jsonl", "report.json"]
    for name in (*names, "generations_tree.jsonl", "generations_temperature_0.7_sampled_drafts.jsonl"):
        (tmp_path / name).touch()
    remove_generations(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_report_of_another_measurement_is_refused(tmp_path: Path) -> None:
    first = write_report(tmp_path / "a/report.json", [8, 6])
    for setting in compare.MUST_BE_EQUAL:
        other = write_report(tmp_path / "b/report.json", [8, 6], **{setting: "other"})
        message = rf"b/report.json: {setting} must be .* as in .*a/report.json, but is 'other'; measure"
        with pytest.raises(ValueError, match=message):
            compare.read_reports([first, other])


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"rounds": ')
    write_sealed(tmp_path / "other.json", {"rounds": 3})
    (tmp_path / "empty").mkdir()
    whole = write_report(tmp_path / "report.json", [8, 6])
    for paths, message in (
        ([tmp_path / "torn.json"], "torn.json: must be JSON, but is not"),
        ([tmp_path / "other.json"], "other.json: must have the entries baselines,"),
        ([tmp_path / "empty"], "empty/acceptance/report.json: must exist, but does not; run mtptrain acceptance"),
        ([whole, tmp_path], "each report must be given once, but this one is given twice"),
    ):
        with pytest.raises(UserError) as refused:
            compare.read_reports(paths)
        assert message in str(refused.value)


def measured(answers: dict[str, Generation]) -> Measured:
    decoded = {(name, 1): DecodedPrompt(each, 4, None, name) for name, each in answers.items()}
    return Measured(decoded, {"all": 1.0}, 1.0, 0, None)


def answer(text: str, *accepted: int) -> Generation:
    tokens = make_tokenizer()(text)["input_ids"]
    assert len(tokens) == 1 + sum(accepted) + len(accepted) and not has_loop(tokens)
    at = [sum(count > depth for count in accepted) for depth in range(3)]
    return Generation(tokens, len(accepted), 0, 3 * len(accepted), at, list(accepted))


HOSTILE = "<script>$x_\u2603"
"""Its last character has three tokens, of which the first is an accepted draft."""


def test_examples_are_whole_answers_whose_accepted_drafts_are_marked() -> None:
    """The answer `mid` ends within the accepted drafts of its last round."""
    mid = answer("abcdefgh", 1, 1, 2)
    answers = {"low": answer("abcd", 0, 0, 0), "mid": replace(mid, tokens=mid.tokens[:6])}
    answers["high"] = answer(HOSTILE, 3, 3, 3, 0)
    prompts = {name: make_tokenizer()(f"to {name}: ")["input_ids"] for name in answers}
    shown = examples(measured(answers), prompts, make_tokenizer())
    assert [each["id"] for each in shown] == ["low", "mid", "high"]
    assert shown[1]["prompt"] == "to mid: "
    assert shown[1]["pieces"] == [("a", False), ("b", True), ("c", False), ("d", True), ("e", False), ("f", True)]
    assert "".join(text for text, _ in shown[2]["pieces"]) == HOSTILE


def test_the_result_comes_first_and_the_settings_last_and_text_is_escaped(tmp_path: Path) -> None:
    answers = {"high": answer(HOSTILE, 3, 3, 3, 0)}
    report = json.loads(write_report(tmp_path / "report.json", [8, 6]).read_text())
    report["by_prompt_tokens"].pop("256")
    report["baselines"]["prompt_lookup"]["by_prompt_tokens"].pop("256")
    report["examples"] = examples(measured(answers), {"high": [60, 98, 62]}, make_tokenizer())
    report["held_out"] = {name: [0.25, 0.5] for name in ("kl_at", "top1_accuracy_at", "overlap_at")}
    report["held_out"] |= {"num_drafts_at": [1234, 0], "kl_at": [0.25, None]}
    report["intervals"]["acceptance_length"] = report["intervals"]["acceptance_rate_at"][0] = None
    report["by_category"] = {
        name: {"acceptance_length": length, "prompts": 1} for name, length in (("a", None), ("b", 2))
    }
    page = render_page({"run": report})
    assert re.search(r"<td>0</td>(<td>0\.250</td>){3}\s*<td>1,234</td>", page)
    assert "<td>1</td><td></td><td>0.500</td>" in page and ">no spread<" in page, "figures without data are empty"
    places = [page.index(text) for text in ('class="length"', "Each step of the target", "<table>", "<svg", "<mark>")]
    assert places == sorted(places) and places[-1] < page.index("Settings and command")
    assert "<script>" not in page and "&lt;" in page and "<b>" not in page
    assert "Acceptance length by prompt length" not in page, "a plot with one point must be left out"
    assert 'name="viewport"' in page


def speed_of(per_step: float, interval: list[float] | None, per_s: float = 1.0, run: str = "run") -> dict[str, object]:
    is_plain = per_step == 1.0
    return {
        **{"run": run, "drafter": "none" if is_plain else "head", "drafted": 0 if is_plain else 9},
        **{"tokens_per_step": per_step, "tokens_per_s": per_s},
        "intervals": None if interval is None else {"tokens_per_step": interval},
    }


def test_the_verdict_names_the_best_drafter_and_whether_it_is_certain() -> None:
    high, plain = [2.4, 2.6], speed_of(1.0, [1.0, 1.0], 4.0)
    for low, certainty in (([1.9, 2.1], "; their 95 % intervals do not overlap."), ([1.9, 2.5], " overlap.")):
        drafters = {"a": speed_of(2.0, low), "b": speed_of(2.5, high, 6.0), "no drafts": plain}
        first, speed = verdict(drafters, has_speed=True)
        assert first.startswith("Each step of the target gives 2.50 tokens with b and 2.00 with a, the next best")
        assert first.endswith(certainty)
        assert speed == "With b, decoding was 1.50 times as fast as without drafts in this measurement."
    others = {"other: no drafts": speed_of(1.0, [1.0, 1.0], 3.0, run="other")}
    assert verdict({**others, **drafters}, has_speed=True)[1] == speed, "plain decoding must be that of the same run"
    assert verdict({"a": speed_of(2.0, None)}, has_speed=True) == ["Each step of the target gives 2.00 tokens with a."]


def test_a_page_has_plain_decoding_and_the_speed_up_in_the_engine(tmp_path: Path) -> None:
    report = json.loads(write_report(tmp_path / "report.json", [8, 6]).read_text())
    rows = [
        {"num_speculative_tokens": depth, "concurrency": number, "output_tokens_per_s": speed, "speed_up": speed / 1000}
        | {"tpot_ms": {"p50": 1.0}}
        for depth, number, speed in ((0, 1, 1000.0), (1, 1, 1250.0), (3, 1, 1500.0))
    ]
    bench = {"engine": "vllm", "version": "0.32.0", "rows": rows}
    write_page(report, tmp_path, bench)
    page = (tmp_path / "report.html").read_text()
    assert "vllm 0.32.0 gains 50% with 1 in flight." in page
    assert "<td>1</td><td>1,000</td><td>1,500</td><td>3</td><td>1.50</td>" in page
    assert "tokens/s of one user" in plot_serving(rows)
