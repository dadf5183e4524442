"""Prompts decoded with one drafter after another, turn after turn, and what that says of each."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval.draft_quality import DraftQuality, QualityFigures
from mtptrain.acceptance import (
    Acceptance,
    Intervals,
    PromptNotes,
    eos_token_ids,
    generate_in_batches,
    has_loop,
    intervals,
    summarise,
)
from mtptrain.clock import PhaseClock
from mtptrain.config import AcceptanceConfig
from mtptrain.distributed import Ranks
from mtptrain.prompt_files import render_prompt
from mtptrain.speculate import Drafter, Generation, Sampler
from mtptrain.target import Target

CONTEXT_BUCKETS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Prompt lengths in tokens at which a bucket begins."""


@dataclass(frozen=True)
class Candidate:
    """What is measured."""

    drafter: Drafter
    sampler: Sampler
    quality: DraftQuality | None = None
    """Of a head that drafts chains."""


@dataclass(frozen=True)
class Answer:
    """One prompt decoded: a prompt of the file, or a later turn of a conversation."""

    generation: Generation
    prompt_tokens: int
    category: str | None


@dataclass(frozen=True)
class Measured:
    """A candidate's answers over all ranks."""

    answers: dict[tuple[str, int], Answer]
    """By prompt id and turn, from 1."""
    seconds: dict[str, float]
    """Of the first rank: of each of `PHASES`, and `all`."""
    tokens_per_s: float
    """New ones, of the first rank."""
    cut_conversations: int
    """Those whose next turn would not have fitted the target's context."""
    quality: QualityFigures | None

    @property
    def generations(self) -> list[Generation]:
        return [answer.generation for answer in self.answers.values()]

    @property
    def pooled(self) -> Acceptance:
        return summarise(self.generations)

    @property
    def without_loops(self) -> Acceptance:
        return summarise([generation for generation in self.generations if not has_loop(generation.tokens)])

    @property
    def intervals(self) -> Intervals:
        conversations: dict[str, list[Generation]] = {}
        for (prompt_id, _), answer in self.answers.items():
            conversations.setdefault(prompt_id, []).append(answer.generation)
        return intervals(list(conversations.values()))

    def describe(self) -> dict[str, Any]:
        """Figures of a report: pooled, without loops, by the length of the prompt and by category."""
        answers = self.answers.values()
        bounds = zip(CONTEXT_BUCKETS, [*CONTEXT_BUCKETS[1:], 2**62], strict=True)
        buckets = {
            str(first): [each.generation for each in answers if first <= each.prompt_tokens < behind] for first, behind in bounds
        }
        categories = sorted({each.category for each in answers if each.category is not None})
        by_category = {name: [each.generation for each in answers if each.category == name] for name in categories}
        return {
            **asdict(self.pooled),
            "intervals": asdict(self.intervals),
            "conversations": len({prompt_id for prompt_id, _ in self.answers}),
            "cut_conversations": self.cut_conversations,
            "without_loops": asdict(self.without_loops),
            "by_prompt_tokens": {name: asdict(summarise(part)) for name, part in buckets.items() if part},
            "by_category": {name: asdict(summarise(part)) for name, part in by_category.items()},
            "acceptance_length_of_prompts": [1 + sum(each.accepted_at) / each.rounds for each in self.generations if each.rounds],
            "quality": None if self.quality is None else asdict(self.quality),
        }


class Measurement:
    """Decodes prompts with one candidate, turn after turn."""

    def __init__(
        self,
        settings: AcceptanceConfig,
        target: Target,
        tokenizer: PreTrainedTokenizerBase | None,
        notes: PromptNotes,
        ranks: Ranks,
    ) -> None:
        self.settings = settings
        self.target = target
        self.tokenizer = tokenizer
        """Of conversations that go on; None where none does."""
        self.notes = notes
        self.ranks = ranks

    def run(self, candidate: Candidate, prompts: dict[str, list[int]], name: str) -> Measured:
        """Decode this rank's share of the prompts and gather everyone's."""
        waiting = {prompt_id: prompts[prompt_id] for prompt_id in list(prompts)[self.ranks.rank :: self.ranks.world_size]}
        messages = {prompt_id: [{"role": "user", "content": turns[0]}] for prompt_id, turns in self.notes.turns.items()}
        answers: dict[tuple[str, int], Answer] = {}
        clock = PhaseClock(self.ranks.device)
        started, turn, num_cut = time.perf_counter(), 1, 0
        while waiting:
            generations = self._generate(candidate, list(waiting.values()), name if turn == 1 else f"{name}, turn {turn}", clock)
            following: dict[str, list[int]] = {}
            for (prompt_id, prompt), generation in zip(waiting.items(), generations, strict=True):
                answers[prompt_id, turn] = Answer(generation, len(prompt), self.notes.categories.get(prompt_id))
                if turn < len(self.notes.turns.get(prompt_id, [])):
                    following[prompt_id] = self._next_prompt(messages[prompt_id], generation, self.notes.turns[prompt_id][turn])
            context_tokens = self.target.config.max_position_embeddings - self.settings.max_new_tokens
            waiting = {prompt_id: prompt for prompt_id, prompt in following.items() if len(prompt) <= context_tokens}
            num_cut, turn = num_cut + len(following) - len(waiting), turn + 1
        phases = clock.read()
        seconds = {"all": time.perf_counter() - started - phases.pop("observe", 0.0)} | phases
        merged = {key: answer for share in self.ranks.gather(answers) for key, answer in share.items()}
        place = {prompt_id: index for index, prompt_id in enumerate(prompts)}
        in_order = sorted(merged, key=lambda key: (place[key[0]], key[1]))
        num_tokens = sum(len(answer.generation.tokens) for answer in answers.values())
        quality = None
        if candidate.quality is not None:
            first, *others = self.ranks.gather(candidate.quality.sums())
            quality = candidate.quality.figures(sum(others, start=first))
        return Measured(
            answers={key: merged[key] for key in in_order},
            seconds=seconds,
            tokens_per_s=num_tokens / seconds["all"],
            cut_conversations=sum(self.ranks.gather(num_cut)),
            quality=quality,
        )

    def _generate(self, candidate: Candidate, prompts: list[list[int]], description: str, clock: PhaseClock) -> list[Generation]:
        return generate_in_batches(
            self.target,
            candidate.drafter,
            prompts,
            num_speculative_tokens=self.settings.num_speculative_tokens,
            max_new_tokens=self.settings.max_new_tokens,
            sampler=candidate.sampler,
            eos_token_ids=eos_token_ids(self.target),
            batch_size=self.settings.batch_size,
            description=description.replace("_", " ") if self.ranks.is_first else None,
            clock=clock,
            observe=candidate.quality,
        )

    def _next_prompt(self, messages: list[dict[str, str]], generation: Generation, said: str) -> list[int]:
        """Adds the target's answer and what the user says to it."""
        assert self.tokenizer is not None
        answer = str(self.tokenizer.decode(generation.tokens, skip_special_tokens=True))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
        return render_prompt(self.tokenizer, messages)
