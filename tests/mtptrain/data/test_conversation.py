"""Tests that conversations with the same question share a group."""

import pytest

from mtptrain.data.conversation import question_group, text_hash

QUESTION = [{"role": "user", "content": "What is the Straße?"}]
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "  what IS\n\tthe strasse?"}],  # other white space and case
        [{"role": "user", "content": "\uff37hat is the Stra\u00dfe\uff1f"}],  # wide letters, which NFKC folds
        [*QUESTION, {"role": "assistant", "content": "A road."}],
        [*QUESTION, {"role": "assistant", "content": "A way."}, {"role": "user", "content": "And a path?"}],
        [{"role": "system", "content": " "}, *QUESTION],
        [*QUESTION, {"role": "assistant", "content": "A road."}, BRIEF],  # a later system message does not count
    ],
)
def test_spelling_answers_and_later_turns_do_not_change_the_group(messages: list[dict[str, str]]) -> None:
    assert question_group(messages) == question_group(QUESTION)


def test_another_first_turn_or_system_prompt_is_another_group() -> None:
    groups = [
        question_group(QUESTION),
        question_group([{"role": "user", "content": "What is a path?"}]),
        question_group([BRIEF, *QUESTION]),
        question_group([{"role": "system", "content": "Be kind."}, *QUESTION]),
        question_group([{"role": "assistant", "content": "Hello."}]),
        question_group([{"role": "assistant", "content": "Good day."}]),
    ]
    assert len(set(groups)) == len(groups)
    assert {group.split(".")[0] for group in groups[:1] + groups[2:4]} == {text_hash(QUESTION[0]["content"])}
    assert question_group([{**BRIEF, "role": "developer"}, *QUESTION]) == groups[2]
