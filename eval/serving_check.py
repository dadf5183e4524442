"""After stage 5: serves the exported head with an engine, and compares the engine's counters with ours.

Reads `run_dir/export/<engine>/` (or `serving.head_dir`, or `export.output_dir`), the trained head, and the prompts of
`mtptrain acceptance`. With `serving.url`, it starts no engine and reads no export, but asks that server. A server is
asked twice more, with requests that leave settings out: see `eval/as_served.py`.
Writes `report.json` to `run_dir/serving_check/` and prints a table. In float32 all counters and answers must be equal,
or the program ends with status 1. With bfloat16, or weights that the target or the engine rounds, the acceptance
lengths along the engine's answers must agree within 2 % and two drafts, and the first different token must be explained
by rounding.

    mtptrain serving-check recipe=quickstart serving.engine=ENGINE
    mtptrain serving-check recipe=quickstart serving.url=http://localhost:8000
"""

import gc
import sys
from dataclasses import asdict, dataclass, replace
from operator import eq
from pathlib import Path
from typing import Any

import torch

from mtptrain.cli import tables
from mtptrain.config import AcceptanceConfig, Dtype, PipelineConfig
from mtptrain.decoding.acceptance import generate_in_batches
from mtptrain.decoding.divergence import Divergence, first_answer_divergence, first_draft_divergence
from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.decoding.prompts import read_prompts
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import Generation
from mtptrain.engines.base import RunningEngine
from mtptrain.engines.requests import TOLERANCE, EngineCounts, EngineRun, Questions
from mtptrain.engines.table import running_engine
from mtptrain.init_from.start import RunHead, trained_or_initial_head
from mtptrain.run_dir import Run
from mtptrain.stage_dir import StageDir
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.utils.distributed import init_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.figures import share, shown
from mtptrain.utils.files import write_sealed
from mtptrain.utils.startup import command

from .as_served import Asked, AsServed, other_chat, print_as_served, probe_chat, questions
from .engines import check_head, find_served, find_server, output_folder, spare_tokens

InputIds = dict[str, list[int]]
FEW_DRAFTS = 30
"""Number of accepted drafts below which lengths within the tolerance say little."""


def main(config: PipelineConfig) -> None:
    settings = config.acceptance
    if settings.temperature > 0:
        raise UserError(
            "acceptance.temperature: must be 0 for this check, because at a higher temperature drafts are accepted at "
            f"random, but is {settings.temperature:g}; leave it out"
        )
    with output_folder(config, "serving_check").writing() as output_dir:
        is_accepted = check_engine(Run(config), output_dir)
    sys.exit(0 if is_accepted else 1)


def check_engine(run: Run, output_dir: Path) -> bool:
    """Compare our loop with the engine, and write and print the report. Returns whether they agree as they must."""
    config, settings = run.config, run.config.acceptance
    # The check uses only the first turn of a conversation.
    num_drafts = settings.num_speculative_tokens
    prompts = read_prompts(
        settings, config.prompts, run.target, run.stage_dir("prompts"), spare_tokens(num_drafts)
    ).input_ids
    engine, all_prompts = running_engine(config.serving.engine), list(prompts.values())
    concurrency = config.serving_check.concurrency or engine.requests_in_flight
    server = find_server(run, all_prompts, num_drafts, concurrency)
    if server is None:
        served = find_served(run, all_prompts, num_drafts, output_dir, concurrency)
    else:
        check_head(run, all_prompts, num_drafts)

    def ask(*asked: Questions) -> list[EngineRun]:
        gc.collect()
        torch.cuda.empty_cache()  # the engine takes nearly all memory of this GPU, and fails if some is in use
        return engine.generate(served, num_drafts, asked) if server is None else [server.generate(x) for x in asked]

    ours = decode_here(run, prompts)
    StageDir(output_dir).claim(config)
    chat = probe_chat(run.target)
    asked = Questions(all_prompts, settings.max_new_tokens, ours.stop_token_ids, chat=chat, concurrency=concurrency)
    again = questions(asked, run.target, engine)
    theirs, *others = ask(asked, *again)
    may_round = engine.may_round(served) if server is None else server.may_round
    our_counts, rule = engine.counted(ours.drafted, num_drafts, asked)
    has_rounded_weights = may_round or getattr(run.target.config, "quantization_config", None) is not None
    may_round = settings.dtype == Dtype.bfloat16 or has_rounded_weights
    comparison = Comparison(ours, our_counts, theirs, check_counts(theirs.counts, our_counts, config, engine))
    if not comparison.is_equal and may_round:
        followed, _ = engine.counted(follow_answers(run, prompts, theirs.tokens), num_drafts, asked)
        comparison = replace(comparison, our_counts_on_their_answers=followed)
    divergence = None if comparison.is_equal else explain(run, all_prompts, comparison)
    agrees = comparison.is_equal or (comparison.is_near and (divergence is None or divergence.is_rounding))
    if not agrees and concurrency > 1:
        comparison = replace(comparison, alone=ask(asked._replace(concurrency=1))[0].counts)
    asked_again: list[Asked] = []
    if again:
        target, head = load_pair(run)
        as_served = AsServed(settings, target, run.target, head.head, engine)
        asked_again = [as_served.compare(*each, theirs.tokens, may_round) for each in zip(again, others, strict=True)]

    found = {"command": command(), **report(config, run.target, comparison, divergence), "rule": rule}
    found |= {"concurrency": concurrency, "theirs_alone": comparison.alone and asdict(comparison.alone)}
    found["as_served"] = [each.describe() for each in asked_again]
    found["other_chat"] = other_chat(run.target, engine.name, theirs.chat_ids)
    StageDir(output_dir).record(config, "report.json")
    write_sealed(output_dir / "report.json", found)
    print_table(config, comparison, engine.name, concurrency, rule)
    print_as_served(asked_again, engine, comparison.their_counts.acceptance_length, engine.read_by(run.target))
    if found["other_chat"]:
        print(found["other_chat"])
    if not agrees:
        advice = more_prompts(settings, len(prompts))
        print(what_differs(list(prompts), comparison, divergence, engine, concurrency, advice), file=sys.stderr)
    elif not comparison.is_equal:
        rounded = "rounded weights" if has_rounded_weights else settings.dtype
        print_rounding(list(prompts), comparison, divergence, rounded, more_prompts(settings, len(prompts)))
    return agrees and all(each.is_explained for each in asked_again)


@dataclass(frozen=True)
class OurRun:
    """The answers of our own decoding loop to all prompts."""

    drafted: list[Generation]
    plain: list[list[int]]
    """Answers of plain greedy decoding."""
    stop_token_ids: tuple[int, ...]
    head_sha256: str


def decode_here(run: Run, prompts: InputIds) -> OurRun:
    config, (target, found) = run.config, load_pair(run)
    head_drafter = HeadDrafter(found.head, target.parts, config.acceptance.num_speculative_tokens)
    drafted = decode(config, target, head_drafter, prompts, "head")
    plain = decode(config, target, NoDrafter(), prompts, "no drafts")
    return OurRun(drafted, [generation.tokens for generation in plain], target.eos_token_ids, found.sha256)


def load_pair(run: Run) -> tuple[Target, RunHead]:
    """Returns the target and the run's head, both in `acceptance.dtype`."""
    config = run.config
    device, dtype = init_ranks(config.distributed_timeout_hours).device, getattr(torch, config.acceptance.dtype)
    found = trained_or_initial_head(run.stage_dir("train"), run.head, run.target, dtype, device)
    return load_target(run.target.directory, dtype, device), found


def decode(
    config: PipelineConfig,
    target: Target,
    drafter: HeadDrafter | NoDrafter,
    prompts: InputIds,
    name: str | None = None,
    answers: list[list[int]] | None = None,
) -> list[Generation]:
    return generate_in_batches(
        target,
        drafter,
        list(prompts.values()),
        sampler=Sampler(),
        eos_token_ids=target.eos_token_ids,
        description=name,
        answers=answers,
        **config.acceptance.limits | {"num_speculative_tokens": drafter.draft_slots},
    )


def follow_answers(run: Run, prompts: InputIds, answers: list[list[int]]) -> list[Generation]:
    """Returns our rounds along the engine's answers."""
    config, (target, found) = run.config, load_pair(run)
    drafter = HeadDrafter(found.head, target.parts, config.acceptance.num_speculative_tokens)
    return decode(config, target, drafter, prompts, answers=answers)


def check_counts(
    theirs: EngineCounts | None, ours: EngineCounts, config: PipelineConfig, engine: RunningEngine
) -> EngineCounts:
    """Returns the engine's counts. Raises UserError if it does not draft `num_speculative_tokens` tokens a round."""
    if theirs is not None and theirs.rounds == ours.rounds == 0:
        return ours  # the answers are too short for drafts
    num_drafts = 0 if theirs is None else len(theirs.accepted_at)
    if theirs is None or num_drafts != config.acceptance.num_speculative_tokens:
        setting = "serving.engine" if config.serving.url is None else "serving.url"
        raise UserError(
            f"{setting}: the engine must draft {config.acceptance.num_speculative_tokens} tokens a round, but drafts "
            f"{num_drafts}; set acceptance.num_speculative_tokens, or start a server with the command of the export's "
            f"README{engine.why_no_drafts if num_drafts == 0 else ''}"
        )
    return theirs


@dataclass(frozen=True)
class Comparison:
    """The results of our own loop and of the engine."""

    ours: OurRun
    our_counts: EngineCounts
    """Our counters, by the engine's rules."""
    theirs: EngineRun
    their_counts: EngineCounts
    """The engine's counters."""
    our_counts_on_their_answers: EngineCounts | None = None
    """Our counters on the engine's answers, by its rules, if the two sides may round differently."""
    alone: EngineCounts | None = None
    """The engine's counters with one request in flight, if they differ from ours with several."""

    @property
    def num_plain(self) -> tuple[int, int]:
        """Number of our answers with drafts, and of the engine's answers, that equal plain greedy decoding."""
        ours = [generation.tokens for generation in self.ours.drafted]
        plain = self.ours.plain
        return sum(map(eq, ours, plain)), sum(map(eq, self.theirs.tokens, plain))

    @property
    def ours_are_plain(self) -> bool:
        return self.num_plain[0] == len(self.ours.plain)

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """Every compared figure: its name, our value and the engine's value."""
        ours, theirs = self.our_counts_on_their_answers or self.our_counts, self.their_counts
        # Not every engine reports how many tokens it drafted.
        drafted = [] if theirs.drafted is None else [("drafted tokens", ours.drafted or 0, theirs.drafted)]
        accepted = enumerate(zip(ours.accepted_at, theirs.accepted_at, strict=True))
        lengths = [(ours.acceptance_length, theirs.acceptance_length)]
        return [
            ("rounds", ours.rounds, theirs.rounds),
            *drafted,
            *((f"accepted at {depth}", our_count, their_count) for depth, (our_count, their_count) in accepted),
            *(("acceptance length", mine, other) for mine, other in lengths if mine and other),
            (f"answers equal to plain greedy, of {len(self.ours.plain)}", *self.num_plain),
        ]

    @property
    def is_equal(self) -> bool:
        is_plain = all(number == len(self.ours.plain) for number in self.num_plain)
        return is_plain and all(ours == theirs for _, ours, theirs in self.rows)

    @property
    def is_near(self) -> bool:
        """Whether the acceptance lengths on the engine's answers agree up to rounding."""
        counts = self.our_counts_on_their_answers
        return counts is not None and counts.is_near(self.their_counts)


def explain(run: Run, prompts: list[list[int]], comparison: Comparison) -> Divergence | None:
    """Returns the first token at which the two sides differ, or None if it cannot be found.

    For a draft, the engine must report its accepted drafts by round.
    """
    target, loaded = load_pair(run)
    divergence = first_answer_divergence(target, prompts, comparison.ours.plain, comparison.theirs.tokens)
    if divergence is not None or comparison.theirs.accepted_by_round is None or not comparison.ours_are_plain:
        return divergence
    depths = run.config.acceptance.num_speculative_tokens
    return first_draft_divergence(
        target, loaded.head, depths, prompts, comparison.ours.drafted, comparison.theirs.accepted_by_round
    )


def what_differs(
    prompt_ids: list[str],
    comparison: Comparison,
    divergence: Divergence | None,
    engine: RunningEngine,
    concurrency: int = 1,
    advice: str = "raise acceptance.num_prompts",
) -> str:
    unequal = [f"{name} ({ours:g} here, {theirs:g} there)" for name, ours, theirs in comparison.rows if ours != theirs]
    if divergence is not None:
        first = f"The first difference, for prompt id {prompt_ids[divergence.prompt]}: {divergence}"
    elif not comparison.ours_are_plain:
        first = "Our own answers with drafts differ from plain decoding, so no first difference is named"
    elif comparison.theirs.accepted_by_round is not None:
        first = "No round before the end of an answer differs"
    else:
        first = "The first token that differs cannot be found, because the engine does not say what each round accepted"
        first += engine.how_to_see_rounds
    problem = f"they differ in {', '.join(unequal)}" if unequal else "neither gives all of these answers"
    sides = f"mtptrain and {engine.name} {comparison.theirs.version}"
    expected = "have equal counters and give the answers of plain greedy decoding"
    if comparison.our_counts_on_their_answers is not None:
        expected = f"agree in the acceptance length on its answers within {TOLERANCE}, and first differ by rounding"
    if comparison.alone is not None:
        alone, together = (
            ", ".join(shown(share(count, counts.rounds)) for count in counts.accepted_at)
            for counts in (comparison.alone, comparison.their_counts)
        )
        is_same = comparison.alone == comparison.their_counts
        first += f". With one request in flight, {engine.name} accepts {alone} of its drafts by position, and with "
        first += f"{concurrency} {together}, so it drafts {'the same' if is_same else 'otherwise'} for several at once"
    return (
        f"serving check: {sides} must {expected}, but {problem}. {first}. In float32, a difference of logits below "
        f"1e-3 is rounding. If there are few rounds, {advice}. Otherwise {engine.advice}"
    )


def more_prompts(settings: AcceptanceConfig, num_prompts: int) -> str:
    """Returns how to check with more prompts than these, which may be all that a file has."""
    if settings.prompts_file is None or num_prompts == settings.num_prompts:
        return "raise acceptance.num_prompts"
    return f"add prompts to {settings.prompts_file}"


def report(
    config: PipelineConfig, target: TargetFiles, comparison: Comparison, divergence: Divergence | None
) -> dict[str, Any]:
    engine = running_engine(config.serving.engine)
    settings, followed = config.acceptance, comparison.our_counts_on_their_answers
    our_plain, their_plain = comparison.num_plain
    return {
        "is_equal": comparison.is_equal,
        "ours": comparison.our_counts.describe() | {"plain_greedy_answers": our_plain},
        "ours_on_their_answers": None if followed is None else asdict(followed),
        "theirs": comparison.their_counts.describe() | {"plain_greedy_answers": their_plain},
        "first_divergence": None if divergence is None else asdict(divergence),
        "head_sha256": comparison.ours.head_sha256,
        "engine": str(config.serving.engine),
        "version": comparison.theirs.version,
        "prompts": len(comparison.ours.plain),
        "num_speculative_tokens": settings.num_speculative_tokens,
        "max_new_tokens": settings.max_new_tokens,
        **engine.report_types(target, config.serving, str(settings.dtype)),
        "dtype": str(settings.dtype),
    }


def print_table(config: PipelineConfig, comparison: Comparison, engine: str, concurrency: int, rule: str) -> None:
    settings = config.acceptance
    title = (
        f"Serving check: {engine} {comparison.theirs.version}, K={settings.num_speculative_tokens}, greedy, "
        f"{settings.dtype}"
    )
    rows = []
    for name, ours, theirs in comparison.rows:
        figures = [f"{figure:,}" if isinstance(figure, int) else f"{figure:.3f}" for figure in (ours, theirs)]
        difference = f"{100 * (theirs - ours) / ours:+.2f} %" if ours else ""
        rows.append([name, *figures, "equal" if ours == theirs else difference])
    title += f", {len(comparison.ours.plain)} prompts, {concurrency} in flight"
    tables.print_table(title, ("", "ours", engine, "difference"), rows)
    if comparison.our_counts_on_their_answers is not None:
        print(
            "Because the two sides may round differently, ours are those along the engine's answers; on our own "
            f"answers the acceptance length is {shown(comparison.our_counts.acceptance_length)}."
        )
    if rule:
        print(rule)


def print_rounding(
    prompt_ids: list[str], comparison: Comparison, divergence: Divergence | None, rounded: str, advice: str
) -> None:
    print(
        f"the two sides differ by rounding, as {rounded} may: on the engine's answers, our acceptance length and its "
        f"own agree within {TOLERANCE}"
    )
    if (accepted := sum(comparison.their_counts.accepted_at)) < FEW_DRAFTS:
        print(
            f"{accepted} accepted drafts are too few to tell a right head from a wrong one: {advice}, or train the "
            "head further"
        )
    if divergence is not None:
        print(f"the first difference, for prompt id {prompt_ids[divergence.prompt]}: {divergence}")
