"""Tests that conversations with the same question share a group."""

from mtptrain.data.conversation import Message, question_group, text_hash

ASKED: Message = {"role": "user", "content": "What is the Straße?"}
BRIEF: Message = {"role": "system", "content": "Be brief."}


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def test_spelling_answers_and_later_turns_do_not_change_the_group() -> None:
    same = [
        [said("user", "  what IS\n\tthe strasse?")],  # other white space and case
        [said("user", "\uff37hat is the Stra\u00dfe\uff1f")],  # wide letters, which NFKC folds
        [ASKED, said("assistant", "A road.")],
        [ASKED, said("assistant", "A way."), said("user", "And a path?")],
        [said("system", " "), ASKED],
        [ASKED, said("assistant", "A road."), BRIEF],  # a later system message does not count
    ]
    assert {question_group(messages) for messages in same} == {question_group([ASKED])}


def test_another_first_turn_or_system_prompt_is_another_group() -> None:
    others = [
        [ASKED],
        [said("user", "What is a path?")],
        [BRIEF, ASKED],
        [said("system", "Be kind."), ASKED],
        [said("assistant", "Hello.")],
        [said("assistant", "Good day.")],
    ]
    groups = [question_group(messages) for messages in others]
    assert len(set(groups)) == len(groups)
    assert {group.split(".")[0] for group in groups[:1] + groups[2:4]} == {text_hash(ASKED["content"])}
    assert question_group([said("developer", "Be brief."), ASKED]) == groups[2]
