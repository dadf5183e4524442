"""The second part of `mtptrain serving-check`: what a server gives to requests that leave settings out.

A server fills in what a request leaves out: from generation_config.json of the target, from the tokenizer, or with
defaults of its own. So it is asked twice more: with temperature 0 alone, and with nothing but the prompt and the limit,
as a plain user asks. Whatever it adds, it must draft as we do along its own answers; and the names of what it adds say
why these answers differ from neutral greedy ones.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import ne
from os.path import commonprefix
from typing import Any

from mtptrain.cli import tables
from mtptrain.config import AcceptanceConfig
from mtptrain.data.chat_template import render_prompt
from mtptrain.decoding.acceptance import generate_in_batches
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation
from mtptrain.engines.base import RunningEngine
from mtptrain.engines.requests import ROUNDED_DRAFTS, EngineCounts, EngineRun, Manner, Questions
from mtptrain.heads.base import Head
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import NEUTRAL, ONLY_SAMPLED, PENALTIES, GenerationDefaults, as_words
from mtptrain.target.model import Target
from mtptrain.utils.figures import Figure, shown

CHAT = [{"role": "user", "content": "What is two and two?"}]
FEW_PROMPTS = 32
"""Number of prompts that are asked again if the target's files set nothing that changes greedy answers."""


@dataclass(frozen=True)
class Asked:
    """The answers of a server to requests that leave settings out, beside ours."""

    manner: Manner
    theirs: EngineRun
    our_counts: EngineCounts
    """Our counters along the server's answers, by its rules."""
    num_different: int
    """Number of answers that differ from neutral greedy ones."""
    reasons: list[str]
    """Why they differ; empty if none does, or if that is not known."""
    is_same_draft: bool
    """Whether the counters agree as they must."""

    @property
    def is_explained(self) -> bool:
        return self.is_same_draft and (not self.num_different or bool(self.reasons))

    def describe(self) -> dict[str, Any]:
        assert self.theirs.counts is not None
        figures = {"ours": self.our_counts.describe(), "theirs": self.theirs.counts.describe()}
        own = {"requests_set": str(self.manner), "answers": len(self.theirs.tokens), "reasons": self.reasons}
        return own | figures | {"different_answers": self.num_different, "is_explained": self.is_explained}


def questions(neutral: Questions, target: TargetFiles, engine: RunningEngine) -> list[Questions]:
    """Returns what a server is asked beside the neutral questions; an engine without a server is asked nothing."""
    if not engine.has_server:
        return []
    generation = engine.read_by(target)
    changes = set(generation.changes) - {*ONLY_SAMPLED, "max_new_tokens", "max_length"}
    neutral = neutral._replace(chat=None)
    few = neutral._replace(prompts=neutral.prompts[:FEW_PROMPTS])
    greedy = (neutral if changes else few)._replace(manner=Manner.greedy)
    if engine.why_not_sampled() or engine.refused_for(generation):
        return [greedy]
    return [greedy, few._replace(manner=Manner.plain)]


def probe_chat(target: TargetFiles) -> dict[str, Any] | None:
    """Returns the chat whose prompt an engine is asked for, if the target has a chat template."""
    chat = {"messages": CHAT, "chat_template_kwargs": dict(target.template_kwargs)}
    return chat if target.tokenizer.chat_template else None


def other_chat(target: TargetFiles, engine: str, theirs: list[int] | None) -> str:
    """Returns how an engine's prompt of the chat differs from that of the target's tokenizer; "" if not, or unknown."""
    if theirs is None or theirs == (ours := render_prompt(target.tokenizer, CHAT)):
        return ""
    start = len(commonprefix([ours, theirs]))  # noqa: RUF071 (tokens, not paths)
    texts = [target.tokenizer.decode(ids[start : start + 8]) for ids in (ours, theirs)]
    return (
        f"template: {engine} makes another prompt of a chat than the target's tokenizer: from token {start} on "
        f"{texts[1]!r}, not {texts[0]!r}; so it has another chat template or other rules for it, sets one of its "
        "variables, such as today's date, or adds a BOS that the template does not write"
    )


class AsServed:
    """Compares a server's answers to requests that leave settings out with our own loop."""

    def __init__(
        self, settings: AcceptanceConfig, target: Target, files: TargetFiles, head: Head, engine: RunningEngine
    ):
        self.settings, self.target, self.engine = settings, target, engine
        self.generation, self.tokenizer = engine.read_by(files), files.tokenizer
        self.drafter = HeadDrafter(head, target.parts, settings.num_speculative_tokens)

    def compare(self, asked: Questions, theirs: EngineRun, neutral: Sequence[list[int]], may_round: bool) -> Asked:
        """Returns how the answers differ from `neutral` greedy ones, and whether the engine drafts as we do.

        If our own loop gives the same answers, its counters must be equal. If it cannot, as for sampled answers, ours
        are those along the server's answers, and must be near: nobody knows what it would have chosen past their ends.
        """
        new_ends = other_ends(theirs.tokens, asked)
        num_different = sum(map(ne, theirs.tokens, neutral))
        reasons = [
            f"end: the server ends answers at token {token}, {self.tokenizer.decode([token])!r}, which neither "
            f"{self.generation.source} nor the tokenizer names as an end"
            for token in new_ends
        ]
        ours, more = self._same_answers(asked, theirs.tokens, (*asked.stop_token_ids, *new_ends))
        if num_different and asked.manner is Manner.greedy:
            reasons += more or ([] if ours else self._other_rules(may_round))
        elif num_different:
            reasons.append(self._how_sampled())
        is_exact = ours is not None and not may_round
        if ours is None:
            ours = self._decode(asked, Sampler(), (*asked.stop_token_ids, *new_ends), theirs.tokens)
        counts, _ = self.engine.counted(ours, self.settings.num_speculative_tokens, asked)
        drafts = ROUNDED_DRAFTS + len(asked.prompts)  # of each answer's last round, a part is past its end
        is_as_ours = theirs.counts is not None and (
            counts.is_equal(theirs.counts) if is_exact else counts.is_near(theirs.counts, drafts)
        )
        return Asked(asked.manner, theirs, counts, num_different, reasons, is_as_ours)

    def _same_answers(
        self, asked: Questions, answers: Sequence[list[int]], ends: Sequence[int]
    ) -> tuple[list[Generation] | None, list[str]]:
        """Returns our own greedy answers, with penalties or not, if they are these, and why they are not neutral."""
        sampling = self.generation.sampling
        penalties = {name: sampling[name] for name in PENALTIES if name in sampling}
        for sampler in (Sampler(), *([Sampler(**penalties)] if penalties else [])):
            ours = self._decode(asked, sampler, ends)
            if [generation.tokens for generation in ours] == list(answers):
                return ours, [
                    f"penalty: {as_words(penalties)} of {self.generation.source}"
                ] if sampler.has_penalties else []
        return None, []

    def _other_rules(self, may_round: bool) -> list[str]:
        """Returns which settings the engine applies by rules that our sampler does not have."""
        ours = (*ONLY_SAMPLED, *(PENALTIES if self.engine.has_our_penalties and not may_round else ()))
        added = self.engine.added_to(self.generation).items()
        applied = as_words({name: value for name, value in added if name not in ours})
        rule = f"{self.engine.name} applies {applied} of {self.generation.source}, by rules of its own"
        return [rule] if applied else []

    def _how_sampled(self) -> str:
        added = self.engine.added_to(self.generation).items()
        if applied := {name: value for name, value in added if name in NEUTRAL}:
            return f"sampling: {as_words(applied)} of {self.generation.source}"
        return f"sampling: {self.generation.source} sets nothing, and {self.engine.name} has defaults of its own"

    def _decode(
        self, asked: Questions, sampler: Sampler, ends: Sequence[int], answers: Sequence[list[int]] | None = None
    ) -> list[Generation]:
        return generate_in_batches(
            self.target,
            self.drafter,
            asked.prompts,
            sampler=sampler,
            eos_token_ids=ends,
            description=f"as served, {asked.manner}",
            answers=answers,
            **self.settings.limits | {"max_new_tokens": asked.max_new_tokens},
        )


def other_ends(answers: Sequence[list[int]], asked: Questions) -> list[int]:
    """Returns the tokens at which answers end early though no file of the target lists them."""
    early = [answer[-1] for answer in answers if answer and len(answer) < asked.max_new_tokens]
    return sorted(set(early) - set(asked.stop_token_ids))


def print_as_served(
    asked: Sequence[Asked], engine: RunningEngine, neutral_length: Figure, generation: GenerationDefaults
) -> None:
    """Print what requests get that leave settings out, and why that differs from what neutral ones get."""
    if not asked:
        return
    rows = []
    for each in asked:
        assert each.theirs.counts is not None
        lengths = (each.our_counts.acceptance_length, each.theirs.counts.acceptance_length, neutral_length)
        numbers = (str(len(each.theirs.tokens)), str(each.num_different))
        rows.append([each.manner, *numbers, *map(shown, lengths)])
    columns = ("requests set", "answers", "not as neutral", "ours", engine.name, "neutral, all")
    tables.print_table(f"As served by {engine.name}: acceptance length", columns, rows)
    greedy = next(each for each in asked if each.manner is Manner.greedy)
    applied = {name: value for name, value in engine.added_to(generation).items() if name not in ONLY_SAMPLED}
    if applied and not greedy.num_different:
        print(f"{generation.source} sets {as_words(applied)}, but the server adds nothing of that to these requests.")
    refused = [f"the engine refuses {name} with drafts" for name in engine.refused_for(generation)]
    if reasons := ", and ".join(filter(None, [engine.why_not_sampled(), *refused])):
        print(f"Requests that set nothing, and may be sampled, are not asked: {reasons}.")
    for each in asked:
        for reason in each.reasons:
            print(f"requests that set {each.manner}: {reason}")
        if not each.is_same_draft:
            print(
                f"requests that set {each.manner}: the engine must count as we do along its own answers, but counts "
                f"{each.theirs.counts}, and we {each.our_counts}; {engine.advice}",
                file=sys.stderr,
            )
        elif not each.is_explained:
            print(
                f"requests that set {each.manner}: {each.num_different} answers differ from those of neutral requests "
                f"for a reason that is not known here; compare {generation.source} of the server's model with ours",
                file=sys.stderr,
            )
