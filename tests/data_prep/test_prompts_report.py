"""Tests that the report counts what the files hold, and prints everything that was left out."""

import pytest

from data_prep.prompts_report import (
    COUNTS,
    PromptsReport,
    Refusals,
    SplitReport,
    group_refusals,
    print_report,
    report_lines,
)
from mtptrain.data.prompt_files import Documents, Split


def test_documents_and_refusals_are_counted_and_every_count_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    documents = Documents.from_list([(0, [1, 2, 3], [0, 1, 1]), (1, [5, 6], [1, 0])])
    assert SplitReport.of(documents) == SplitReport(documents=2, tokens=5, supervised_tokens=3, longest=3)
    refused = group_refusals({"a": "odd", **{f"b{i}": "[x]" for i in range(5)}})
    assert refused == [Refusals("[x]", 5, ["b0", "b1", "b2"]), Refusals("odd", 1, ["a"])]
    report = PromptsReport("conversations", 1_250, passed_over=["{a}", "b"], refused=refused)
    assert report_lines(PromptsReport("tokens", 3)) == []
    report.splits = {Split.train: SplitReport(1200, 34_567, 8_901, 64)}
    numbers = {name: 1_000 + number for number, name in enumerate(COUNTS)}
    report.counts.update(numbers)
    print_report(report)
    printed = capsys.readouterr().out
    for part in (
        *("1,200", "34,567", "8,901", "passed over, because they are not read: {a}, b"),
        *("refused: 5 ([x]): b0, b1, b2, ...", "refused: 6 of the 1,250 conversations"),
        *(line.format(numbers[name], items="conversations") for name, line in COUNTS.items()),
    ):
        assert part in printed, part
