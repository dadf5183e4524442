"""Tests that the report counts what the files hold, and that its lines name everything that was left out."""

import pytest

from data_prep.prompts_report import (
    DuplicatesReport,
    PromptsReport,
    Refusals,
    RewrittenReport,
    SplitReport,
    group_refusals,
    length_histogram,
    print_report,
    report_lines,
)
from mtptrain.data.prompt_files import Documents, Split


def test_documents_and_refusals_are_counted_by_length_and_by_reason() -> None:
    documents = Documents.from_list([(0, [1, 2, 3], [0, 1, 1]), (1, [5, 6], [1, 0])])
    assert SplitReport.of(documents) == SplitReport(
        documents=2, tokens=5, supervised_tokens=3, without_drafts=1, lengths={2: 1, 4: 1}
    )
    assert length_histogram([1, 2, 3, 4, 5, 33]) == {1: 1, 2: 1, 4: 2, 8: 1, 16: 0, 32: 0, 64: 1}
    refused = {"a": "odd", **{f"b{i}": "empty" for i in range(5)}}
    assert group_refusals(refused) == [Refusals("empty", 5, ["b0", "b1", "b2"]), Refusals("odd", 1, ["a"])]


def test_the_printed_report_names_everything_that_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    splits = {Split.train: SplitReport(1200, 34_567, 8_901, 6, {32: 1000, 64: 200})}
    report = PromptsReport("conversations", 1_250, DuplicatesReport(900, 12, 300, 13, 40, 16), ["{a}", "b"], splits)
    assert report_lines(PromptsReport("tokens", 3, DuplicatesReport(3, 1, 0))) == []
    report.items_cut, report.windows_cut, report.windows_unsupervised = 3, 7, 2
    report.rewritten = RewrittenReport(answers=9, documents=8, tokens=6913, history_tokens=3457)
    report.answers_left_out, report.answers_untrained, report.answers_inserted = 5, 14, 15
    report.beyond_max_train_tokens, report.is_dated = 11, True
    report.refused = [Refusals("unknown role '[x]'", 4, ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"])]
    print_report(report)
    printed = capsys.readouterr().out
    for part in (
        *("1,200", "34,567", "8,901", "17 - 32", "33 - 64"),
        "9 assistant turns change once later turns follow, and are also stored as generated, in 8 additional documents "
        "with 6,913 tokens (20.0% of all), of which 3,457 (10.0%) repeat the history",
        "same question: 300 conversations repeat an earlier question; each of the 900 different questions occurs in at "
        "most 12 conversations, all of them in one split",
        "near duplicates: 40 different questions nearly repeat another one; 16 conversations changed",
        "left out: 13 conversations with the same tokens as another one",
        "cut: 3 conversations into 7 windows",
        "left out: 2 windows without a supervised token",
        "left out of the loss: 5 assistant turns that the chat template does not render",
        "left out of the loss: 14 assistant turns that are not to be trained",
        "chat template: 15 answers begin or end with text that the template inserts, which the",
        "chat template: it can write the date of this run into the prompts (strftime_now)",
        "not drafted: 6 documents whose answers are too short to draft a token",
        "left out: 11 conversations beyond prompts.max_train_tokens",
        "passed over, because they are not read: {a}, b",
        "refused: 4 (unknown role '[x]'): a.jsonl:1, a.jsonl:2, a.jsonl:3, ...",
    ):
        assert part in printed
    assert printed.splitlines()[-1] == "refused: 4 of the 1,250 conversations of the source"
    assert [line.count("█") for line in printed.splitlines() if "█" in line] == [30, 6]
