"""Reads the exact token ids of what a target wrote, out of what engines and agents log.

Read are answers of OpenAI-style servers with `return_token_ids` (vLLM 0.32: `prompt_token_ids`, and `token_ids` of a
choice; SGLang 0.5.23: `response_token_ids` in chats), SGLang's log of requests (srt/utils/request_logger.py),
trajectories of Harbor's ATIF 1.4 and later, and traces of Verifiers 0.4. docs/traffic.md says how to log them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mtptrain.data.conversation import ConversationRefused
from mtptrain.utils.errors import error_summary

NO_IDS = "a trace without token ids, which docs/traffic.md says how to log; for its texts, prompts.source=conversations"
REPLACEMENT = "\ufffd"
"""Stands for bytes that are no character. Servers write one for several, as they decode token by token."""


class Call(NamedTuple):
    """One answer of the target."""

    prompt: list[int]
    """All tokens that the target read before it, at least one."""
    answer: list[int]
    text: Any
    """A part of the answer, by which another tokenizer is found if it is a text."""
    asked: Any = None
    """Likewise, a part of the prompt."""


def read_calls(row: Mapping[str, Any]) -> list[Call] | None:
    """Returns the answers in a trace, in their order; None if a row is none.

    Raises:
        ConversationRefused: if it has no token ids, or is not as its format says.
    """
    try:
        calls = _calls(row)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ConversationRefused(f"a trace in another form: {error_summary(error)}") from error
    if calls is not None and not calls:
        raise ConversationRefused(NO_IDS)
    tokens = (token for call in calls or () for token in chain(call.prompt, call.answer))
    if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise ConversationRefused("token ids that are no whole numbers")
    return calls


def _calls(row: Mapping[str, Any]) -> list[Call] | None:
    body = row.get("response", row)
    if "nodes" in row:
        if row.get("mm_token_type_id_map"):
            raise ConversationRefused("a trace with images or videos")
        return [*_of_nodes(row["nodes"])]
    if row.get("event") == "request.finished":
        return [*_of_log(row["obj"], row["out"])]
    if str(row.get("schema_version")).startswith("ATIF"):
        return [*_of_steps(row["steps"])]
    return [*_of_choices(body)] if isinstance(body, Mapping) and "choices" in body else None


def _of_choices(body: Mapping[str, Any]) -> Iterator[Call]:
    for choice in body["choices"]:
        prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if prompt and (answer := choice.get("token_ids") or choice.get("response_token_ids")):
            yield Call(prompt, answer, (choice.get("message") or {}).get("content") or choice.get("text"))


def _of_log(request: Mapping[str, Any], output: Mapping[str, Any]) -> Iterator[Call]:
    if any(request.get(f"{each}_data") for each in ("image", "audio", "video")):
        raise ConversationRefused("a trace with images or videos")
    if request.get("session_params"):
        raise ConversationRefused("a logged request that is only the end of its prompt (session_params)")
    if any(request.get("lora_path") or ()):
        raise ConversationRefused("an answer of an adapter (lora_path), which is another model than the target")
    prompt, answer = request.get("input_ids"), output.get("output_ids")
    if prompt and answer:
        if len(answer) != output["meta_info"]["completion_tokens"]:
            raise ConversationRefused("a logged answer of which tokens are missing, as of one streamed in parts")
        yield Call(prompt, answer, output.get("text"))


def _of_steps(steps: Sequence[Mapping[str, Any]]) -> Iterator[Call]:
    asked = next((each.get("message") for each in steps if each.get("source") == "user"), None)
    for step in steps:
        metrics = step.get("metrics") or {}
        prompt, answer = (metrics.get(f"{name}_token_ids") for name in ("prompt", "completion"))
        if step.get("source") != "agent" or step.get("is_copied_context") or not prompt or not answer:
            continue
        if (step.get("llm_call_count") or 1) > 1:
            raise ConversationRefused("a step of several calls, whose token ids cannot be told apart")
        yield Call(prompt, answer, None, asked)  # agents parse the answer before they log it
        asked = None


def _of_nodes(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Call]:
    """Yields the answers of a message graph. Tokens of a node follow those of its parent; masked ones are sampled."""
    paths: list[list[int]] = []
    for node in nodes:
        ids, mask, parent = node.get("token_ids") or [], node.get("mask") or [], node.get("parent")
        before = [] if parent is None else paths[parent]
        paths.append([*before, *ids])
        start = mask.index(True) if True in mask else len(ids)
        if not all(mask[start:]):
            raise ConversationRefused("a node that goes on after the sampled tokens")
        if (before or start) and start < len(ids):
            yield Call([*before, *ids[:start]], ids[start:], (node.get("message") or {}).get("content"))


def documents_of(calls: Sequence[Call]) -> list[tuple[NDArray[np.int32], NDArray[np.uint8], int]]:
    """Returns the fewest documents in which every answer is supervised once, after exactly the tokens before it: ids,
    loss mask and the number of the first call of each.

    A call that goes on from another one shares its document. Where an agent has cut or rewritten its context, or asked
    for several answers to one prompt, another document begins. Of equal calls, one counts.
    """
    once = {(*call.prompt, -1, *call.answer): call for call in calls}
    found: list[tuple[list[int], list[int], int]] = []
    for number, (prompt, answer, *_) in enumerate(
        sorted(once.values(), key=lambda call: len(call.prompt) + len(call.answer))
    ):
        same = (each for each in reversed(found) if prompt[: len(each[0])] == each[0])
        if (document := next(same, None)) is None:
            found.append(document := ([], [], number))
        ids, mask, _ = document
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(answer)
        ids += [*prompt[len(ids) :], *answer]
    return [(np.array(ids, np.int32), np.array(mask, np.uint8), number) for ids, mask, number in found]


def find_episodes(rows: Sequence[tuple[bytes, Collection[bytes]]]) -> list[list[int]]:
    """Returns the indices of the rows of each episode, by the first prompt and the documents of each row, as bytes.

    A row whose prompt begins with all that another has read and written goes on from it; rows may also be repeated.
    """
    leader = list(range(len(rows)))

    def first_of(row: int) -> int:
        while leader[row] != row:
            row = leader[row]
        return row

    marks = [(prompt, True, row) for row, (prompt, _) in enumerate(rows) if prompt]
    marks += [(document, False, row) for row, (_, documents) in enumerate(rows) for document in documents]
    before: list[tuple[bytes, int]] = []  # the documents with which the tokens begin, from short to long
    for tokens, is_prompt, row in sorted(marks):
        while before and not tokens.startswith(before[-1][0]):
            before.pop()
        if before and (is_prompt or tokens == before[-1][0]):
            first, second = sorted((first_of(before[-1][1]), first_of(row)))
            leader[second] = first
        before += [] if is_prompt else [(tokens, row)]
    episodes: dict[int, list[int]] = {}
    for row in range(len(rows)):
        episodes.setdefault(first_of(row), []).append(row)
    return list(episodes.values())


def is_written(call: Call, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokens hold the logged texts, up to whitespace. One with broken characters is not read."""
    for ids, given in ((call.answer, call.text), (call.prompt, call.asked)):
        text = "".join(given.split()) if isinstance(given, str) and REPLACEMENT not in given else ""
        decoded = (str(tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (False, True))
        if text and not any(text in "".join(each.split()) for each in decoded):
            return False
    return True
