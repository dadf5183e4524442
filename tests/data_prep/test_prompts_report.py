"""Tests that the report counts what the files hold, and that its lines name everything that was left out."""

import pytest

from data_prep.prompts_report import (
    DuplicatesReport,
    PromptsReport,
    Refusals,
    RewrittenReport,
    SplitReport,
    group_refusals,
    print_report,
    report_lines,
)
from mtptrain.data.prompt_files import Documents, Split


def test_documents_and_refusals_are_counted_by_reason() -> None:
    documents = Documents.from_list([(0, [1, 2, 3], [0, 1, 1]), (1, [5, 6], [1, 0])])
    assert SplitReport.of(documents) == SplitReport(
        documents=2, tokens=5, supervised_tokens=3, without_drafts=1, longest=3
    )
    refused = {"a": "odd", **{f"b{i}": "empty" for i in range(5)}}
    assert group_refusals(refused) == [Refusals("empty", 5, ["b0", "b1", "b2"]), Refusals("odd", 1, ["a"])]


def test_the_printed_report_names_everything_that_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    splits = {Split.train: SplitReport(1200, 34_567, 8_901, 6, 64)}
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
        *("1,200", "34,567", "8,901"),
        *("9 assistant turns change", "8 additional documents", "6,913 tokens (20.0% of all)", "3,457 (10.0%) repeat"),
        *("300 conversations repeat", "900 different questions occurs in at most 12 conversations"),
        *("40 different questions nearly repeat another one; 16 conversations", "13 conversations with the same"),
        *(
            "3 conversations into 7 windows",
            "2 windows without",
            "5 assistant turns that the",
            "14 assistant turns that",
        ),
        *("15 answers begin or end", "strftime_now", "6 documents whose answers", "11 conversations beyond"),
        *("passed over, because they are not read: {a}, b", "4 (unknown role '[x]'): a.jsonl:1, a.jsonl:2, a.jsonl:3,"),
        "refused: 4 of the 1,250 conversations",
    ):
        assert part in printed, part
