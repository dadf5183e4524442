"""Decodes prompts with several drafters, which take turns, and measures each of them."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtptrain.config import AcceptanceConfig
from mtptrain.data.chat_template import render_prompt
from mtptrain.decoding.acceptance import Acceptance, Intervals, has_loop, intervals, summarise, token_batches
from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.prompts_file import Prompts
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation, Round, speculate
from mtptrain.target.model import Target
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.figures import shown
from mtptrain.utils.progress import ProgressBar

from .draft_quality import DraftQuality, QualityFigures

CONTEXT_BUCKETS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Shortest prompt length of each bucket, in tokens."""


@dataclass(frozen=True)
class Candidate:
    """A drafter to measure, and the sampler to decode with."""

    drafter: Drafter
    sampler: Sampler
    quality: DraftQuality | None = None
    """Observes the trained head while it drafts chains; None for baselines."""


@dataclass(frozen=True)
class DecodedPrompt:
    """The answer to a prompt, or to a later turn of a conversation."""

    generation: Generation
    prompt_tokens: int
    category: str | None
    source: str
    """File or question that the prompt was cut from; the prompt's id if it is from `acceptance.prompts_file`."""


@dataclass(frozen=True)
class Measured:
    """A candidate's answers from all ranks, and its speed on this rank. Reports are written by the first rank."""

    answers: dict[tuple[str, int], DecodedPrompt]
    """By prompt id and turn; turns start at 1."""
    seconds: dict[str, float]
    """Seconds on this rank, by phase (see `PHASES` of `speculate`) and in total (`all`)."""
    tokens_per_s: float
    """New tokens per second on this rank."""
    cut_conversations: int
    """Number of conversations cut short because the next turn, its answer and drafts would not have fitted the context
    of the target, the head or the draft model."""
    quality: QualityFigures | None
    """None for baselines."""

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
    def sources(self) -> dict[str, list[Generation]]:
        by_source: dict[str, list[Generation]] = {}
        for answer in self.answers.values():
            by_source.setdefault(answer.source, []).append(answer.generation)
        return by_source

    @property
    def intervals(self) -> Intervals | None:
        """Confidence intervals, or None if all prompts are from one source."""
        return intervals(list(self.sources.values()))

    def describe(self) -> dict[str, Any]:
        """Returns the figures of a report: pooled, without loops, by prompt length and by category."""
        answers = self.answers.values()
        bounds = zip(CONTEXT_BUCKETS, [*CONTEXT_BUCKETS[1:], 2**62], strict=True)
        buckets = {
            str(first): [each.generation for each in answers if first <= each.prompt_tokens < end]
            for first, end in bounds
        }
        bootstrapped = self.intervals
        categories = sorted({each.category for each in answers if each.category is not None})
        by_category = {name: [each.generation for each in answers if each.category == name] for name in categories}
        return {
            **asdict(self.pooled),
            "intervals": None if bootstrapped is None else asdict(bootstrapped),
            "sources": len(self.sources),
            "conversations": len({prompt_id for prompt_id, _ in self.answers}),
            "cut_conversations": self.cut_conversations,
            "without_loops": asdict(self.without_loops),
            "by_prompt_tokens": {name: asdict(summarise(part)) for name, part in buckets.items() if part},
            "by_category": {name: asdict(summarise(part)) for name, part in by_category.items()},
            "acceptance_length_of_prompts": [each.acceptance_length for each in self.generations if each.rounds],
            "quality": None if self.quality is None else asdict(self.quality),
        }


@dataclass
class Share:
    """One rank's progress with one candidate."""

    clock: PhaseClock
    waiting: dict[str, list[int]]
    """Prompts of the current turn, by id."""
    answers: dict[tuple[str, int], DecodedPrompt] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds of decoding, including the calls of `quality`."""
    num_cut: int = 0
    """Number of conversations cut short."""


def in_batches(prompts: dict[str, list[int]], settings: AcceptanceConfig) -> list[dict[str, list[int]]]:
    ids = list(prompts)
    lengths = [len(prompt) for prompt in prompts.values()]
    batches = token_batches(lengths, settings.max_new_tokens, settings.batch_size, settings.batch_tokens)
    return [{ids[index]: prompts[ids[index]] for index in batch} for batch in batches]


@dataclass(frozen=True)
class Measurement:
    """Decodes prompts turn by turn. Candidates alternate after each batch, so that a busy machine slows all alike."""

    settings: AcceptanceConfig
    target: Target
    tokenizer: PreTrainedTokenizerBase
    """Renders the later turns of conversations."""
    prompts: Prompts
    ranks: Ranks
    longest_prompt: int
    """A conversation ends before the turn whose prompt would have more tokens."""

    def run(self, candidates: dict[str, Candidate]) -> dict[str, Measured]:
        """Decode this rank's prompts with every candidate, of which one is `head`, and gather all ranks' answers."""
        own = dict(list(self.prompts.input_ids.items())[self.ranks.rank :: self.ranks.world_size])
        shares = {name: Share(PhaseClock(self.ranks.device), dict(own)) for name in candidates}
        turn = 1
        while any(share.waiting for share in shares.values()):
            batches = {name: in_batches(share.waiting, self.settings) for name, share in shares.items()}
            total = sum(len(share.waiting) for share in shares.values())
            title = ("acceptance" if turn == 1 else f"turn {turn}") + self.ranks.label
            drawn = {"disable": not self.ranks.is_first, "miniters": 0, "mininterval": 0.5, "smoothing": 0}
            with ProgressBar(total=total, desc=title, unit="prompt", **drawn) as bar:
                for index in range(max(map(len, batches.values()))):
                    for name, candidate in candidates.items():
                        if index < len(batches[name]):
                            self._decode(candidate, batches[name][index], shares[name], turn, bar)
                            bar.update(len(batches[name][index]))
                    done = summarise([answer.generation for answer in shares["head"].answers.values()])
                    bar.add_tokens(0, f", acceptance length {shown(done.acceptance_length, 2)}")
            for share in shares.values():
                self._advance_turn(share, turn)
            turn += 1
        if self.ranks.is_first and self.ranks.world_size > 1:
            ProgressBar.write("acceptance: waiting for the other ranks")
        return {name: self._gather(candidate, shares[name]) for name, candidate in candidates.items()}

    def _decode(
        self, candidate: Candidate, batch: dict[str, list[int]], share: Share, turn: int, bar: ProgressBar
    ) -> None:
        def observe(each: Round) -> None:
            if candidate.quality is not None:
                candidate.quality(each)
            if self.ranks.device.type == "cpu":  # a GPU would have to be waited for
                bar.add_tokens(each.num_tokens())

        started = time.perf_counter()
        generations = speculate(
            self.target,
            candidate.drafter,
            list(batch.values()),
            num_speculative_tokens=self.settings.num_speculative_tokens,
            max_new_tokens=self.settings.max_new_tokens,
            sampler=candidate.sampler,
            eos_token_ids=self.target.eos_token_ids,
            clock=share.clock,
            observe=observe,
        )
        share.seconds += time.perf_counter() - started
        for (prompt_id, prompt), generation in zip(batch.items(), generations, strict=True):
            category, source = self.prompts.categories.get(prompt_id), self.prompts.sources.get(prompt_id, prompt_id)
            share.answers[prompt_id, turn] = DecodedPrompt(generation, len(prompt), category, source)

    def _advance_turn(self, share: Share, turn: int) -> None:
        """Set the prompts of the next turn. Each is the conversation so far plus the user's next message."""
        following = {
            prompt_id: self._next_prompt(share, prompt_id, turn)
            for prompt_id in share.waiting
            if turn < len(self.prompts.turns.get(prompt_id, []))
        }
        share.waiting = {
            prompt_id: prompt for prompt_id, prompt in following.items() if len(prompt) <= self.longest_prompt
        }
        share.num_cut += len(following) - len(share.waiting)

    def _next_prompt(self, share: Share, prompt_id: str, turn: int) -> list[int]:
        messages = []
        for number, content in enumerate(self.prompts.turns[prompt_id][: turn + 1], 1):
            messages.append({"role": "user", "content": content})
            if number <= turn:
                tokens = share.answers[prompt_id, number].generation.tokens
                messages.append(
                    {"role": "assistant", "content": str(self.tokenizer.decode(tokens, skip_special_tokens=True))}
                )
        return render_prompt(self.tokenizer, messages, f"acceptance.prompts_file: id {prompt_id}, turn {turn + 1}")

    def _gather(self, candidate: Candidate, share: Share) -> Measured:
        phases = share.clock.read()
        seconds = {"all": share.seconds - phases.pop("observe", 0.0)} | phases
        merged = {key: answer for part in self.ranks.gather(share.answers) for key, answer in part.items()}
        order = {prompt_id: index for index, prompt_id in enumerate(self.prompts.input_ids)}
        num_tokens = sum(len(answer.generation.tokens) for answer in share.answers.values())
        quality = None
        if candidate.quality is not None:
            first, *others = self.ranks.gather(candidate.quality.sums())
            quality = candidate.quality.figures(sum(others, start=first))
        return Measured(
            answers={key: merged[key] for key in sorted(merged, key=lambda key: (order[key[0]], key[1]))},
            seconds=seconds,
            tokens_per_s=num_tokens / max(seconds["all"], 1e-9),  # a rank may have no prompt
            cut_conversations=sum(self.ranks.gather(share.num_cut)),
            quality=quality,
        )
