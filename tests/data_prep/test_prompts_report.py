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
)
from mtptrain.data.prompt_files import Documents, Split


def test_lengths_are_counted_by_the_power_of_two_that_they_do_not_exceed() -> None:
    assert length_histogram([1, 2, 3, 4, 5, 2048, 2049]) == {
        1: 1, 2: 1, 4: 2, 8: 1, 16: 0, 32: 0, 64: 0, 128: 0, 256: 0, 512: 0, 1024: 0, 2048: 1, 4096: 1,
    }  # fmt: skip
    assert length_histogram([]) == {}


def test_refusals_are_grouped_by_reason_with_the_first_names() -> None:
    refused = {"a": "odd", **{f"b{i}": "empty" for i in range(5)}}
    assert group_refusals(refused) == [Refusals("empty", 5, ["b0", "b1", "b2"]), Refusals("odd", 1, ["a"])]


def test_the_split_report_counts_what_the_file_holds() -> None:
    documents = Documents.from_list([(0, [1, 2, 3], [0, 1, 1]), (1, [5, 6], [1, 0])])
    assert SplitReport.of(documents) == SplitReport(
        documents=2, tokens=5, supervised_tokens=3, without_drafts=1, lengths={2: 1, 4: 1}
    )


def test_the_printed_report_names_everything_that_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(
        PromptsReport(
            source="conversations",
            splits={Split.train: SplitReport(1200, 34_567, 8_901, 6, {32: 1000, 64: 200})},
            items_cut=3,
            windows_cut=7,
            windows_unsupervised=2,
            rewritten=RewrittenReport(answers=9, documents=8, tokens=6913, history_tokens=3457),
            duplicates=DuplicatesReport(
                questions=900, largest=12, same_question=300, dropped=13, near=40, near_moved=16
            ),
            answers_left_out=5,
            answers_untrained=14,
            answers_inserted=15,
            beyond_max_train_tokens=11,
            refused=[Refusals("unknown role '[x]'", 4, ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"])],
            items=1_250,
            is_dated=True,
        )
    )
    printed = capsys.readouterr().out
    for part in ("1,200", "34,567", "8,901", "17 - 32", "33 - 64"):
        assert part in printed
    assert "cut: 3 conversations into 7 windows" in printed
    assert "left out: 2 windows without a supervised token" in printed
    assert "left out of the loss: 5 assistant turns" in printed
    assert (
        "same question: 300 conversations repeat an earlier question; each of the 900 different questions occurs in at "
        "most 12 conversations, all of them in one split" in printed
    )
    assert "near duplicates: 40 different questions nearly repeat another one; 16 conversations changed" in printed
    assert "left out: 13 conversations with the same tokens as another one" in printed
    assert (
        "chat template: 9 assistant turns change once later turns follow, and are also stored as generated, in 8 "
        "additional documents with 6,913 tokens (20.0% of all), of which 3,457 (10.0%) repeat the history" in printed
    )
    assert "left out: 11 conversations beyond prompts.max_train_tokens" in printed
    assert "refused: 4 (unknown role '[x]'): a.jsonl:1, a.jsonl:2, a.jsonl:3, ..." in printed
    assert "left out of the loss: 14 assistant turns that are not to be trained" in printed
    assert "chat template: 15 answers begin or end with text that the template inserts, which the" in printed
    assert "chat template: it can write the date of this run into the prompts (strftime_now)" in printed
    assert "not drafted: 6 documents whose answers are too short to draft a token" in printed
    assert printed.splitlines()[-1] == "refused: 4 of the 1,250 conversations of the source"
    bars = [line.count("█") for line in printed.splitlines() if "█" in line]
    assert bars == [30, 6]
