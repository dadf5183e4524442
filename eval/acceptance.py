"""Stage 4: acceptance of the trained head, drafting and verifying with the real inference path.

Reads `run_dir/train/best/` (or, where nothing was trained, the head of `head.init_from`) and held-out prompts of `run_dir/prompts/`
(or `acceptance.prompts_file`); writes `report.json`, `report.html` and `generations.jsonl` into `run_dir/acceptance/`, and prints a
table with what `acceptance.beside` names beside the head: prompt lookup, trees, a small model, plain decoding.

    python -m eval.acceptance recipe=quickstart acceptance.num_speculative_tokens=5
    python -m eval.acceptance recipe=quickstart "acceptance.beside=[none,prompt_lookup,tree,hybrid]" acceptance.batch_size=1
    torchrun --nproc-per-node 8 -m eval.acceptance recipe=llama3_1_8b_mtp
"""

import hashlib
import itertools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from eval.report_page import write_page
from mtptrain.acceptance import (
    Acceptance,
    PromptNotes,
    eos_token_ids,
    generate_in_batches,
    has_loop,
    intervals,
    read_notes,
    read_prompts,
    summarise,
)
from mtptrain.clock import PhaseClock
from mtptrain.config import RECIPES, AcceptanceConfig, Beside, PipelineConfig, load_config
from mtptrain.distributed import Ranks, init_ranks
from mtptrain.drafters import HeadDrafter, HybridDrafter, ModelDrafter, NoDrafter, PromptLookupDrafter, TreeDrafter
from mtptrain.prompt_files import render_prompt
from mtptrain.run_dir import write_json, write_provenance
from mtptrain.speculate import PHASES, Drafter, Generation, Sampler
from mtptrain.target import Target, load_draft_model, load_target, load_tokenizer, resolve_target
from mtptrain.warm_start import RunHead, trained_or_initial_head

CONTEXT_BUCKETS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Prompt lengths in tokens at which a bucket begins."""


@hydra.main(config_path=RECIPES, config_name="pipeline", version_base="1.3")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    check(config)
    ranks = init_ranks()
    settings = config.acceptance
    target_dir = resolve_target(config.target.path, config.target.revision)
    dtype = getattr(torch, settings.dtype)
    found = trained_or_initial_head(config.stage_dir("train") / "best", config.head, target_dir, dtype, ranks.device)
    prompts = read_prompts(config, target_dir)
    model = None
    if Beside.model in settings.beside:
        model = load_draft_model(settings.draft_model or "", target_dir, dtype, ranks.device)
    target = load_target(target_dir, dtype, ranks.device)

    drafters = drafters_of(settings, found, target, model)
    notes = read_notes(Path(settings.prompts_file)) if settings.prompts_file else PromptNotes()
    tokenizer = load_tokenizer(target_dir) if notes.turns else None
    measured = {
        name: measure(config, target, drafter, prompts, notes, tokenizer, ranks, name) for name, drafter in drafters.items()
    }
    if ranks.is_first:
        output_dir = Path(settings.output_dir or config.stage_dir("acceptance"))
        write_provenance(output_dir, config)
        write_generations(output_dir / "generations.jsonl", measured["head"])
        described = report(config, found, prompts, measured)
        write_json(output_dir / "report.json", described)
        write_page(output_dir / "report.html", {str(output_dir): described})
        print_table(config, measured)
        print(f"plots: {output_dir / 'report.html'}")
        if not found.is_trained:
            print(f"head: {found.directory}, as it was published (head.init_from); this run has not trained one")


def check(config: PipelineConfig) -> None:
    """Raises ValueError for what cannot be measured together."""
    settings = config.acceptance
    if settings.sample_drafts and Beside.tree in settings.beside:
        raise ValueError(
            "acceptance.sample_drafts: must be false where acceptance.beside names `tree`, but is true: a tree holds the likeliest "
            "tokens; leave one of them out"
        )
    if (settings.draft_model is not None) != (Beside.model in settings.beside):
        raise ValueError(
            f"acceptance.draft_model: must be set where acceptance.beside names `model`, and only there, but is {settings.draft_model}; "
            'set both, for example acceptance.draft_model=DIR "acceptance.beside=[model]"'
        )


def drafters_of(settings: AcceptanceConfig, found: RunHead, target: Target, model: Target | None) -> dict[str, Drafter]:
    """By name, the head first."""
    depths = settings.num_speculative_tokens
    head = HeadDrafter(found.head, target.parts, depths, settings.sample_drafts)
    drafters: dict[str, Drafter] = {"head": head}
    for name in settings.beside:
        if name == Beside.none:
            drafters[name] = NoDrafter()
        elif name == Beside.prompt_lookup:
            drafters[name] = PromptLookupDrafter(depths)
        elif name == Beside.model:
            assert model is not None
            drafters[name] = ModelDrafter(model, depths, settings.sample_drafts)
        elif name == Beside.tree:
            drafters[name] = TreeDrafter(found.head, target.parts, depths, settings.tree_nodes, settings.tree_top_k)
        else:
            drafters[name] = HybridDrafter(head, settings.hybrid_min_match)
    return drafters


@dataclass(frozen=True)
class Answer:
    """One prompt decoded: a prompt of the file, or a later turn of a conversation."""

    generation: Generation
    prompt_tokens: int
    category: str | None


@dataclass(frozen=True)
class Measured:
    """A drafter's answers by prompt id, over all ranks; later turns follow as `ID turn 2`."""

    answers: dict[str, Answer]
    seconds: dict[str, float]
    """Of the first rank: of each of `PHASES`, and `all`."""
    num_tokens: int
    """New ones of the first rank."""

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
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds["all"]


def measure(
    config: PipelineConfig,
    target: Target,
    drafter: Drafter,
    prompts: dict[str, list[int]],
    notes: PromptNotes,
    tokenizer: PreTrainedTokenizerBase | None,
    ranks: Ranks,
    name: str,
) -> Measured:
    """Decode this rank's share of the prompts, turn after turn, and gather everyone's."""
    settings, clock = config.acceptance, PhaseClock(ranks.device)
    sampler = Sampler(settings.temperature, settings.seed + ranks.rank)
    spoken = {prompt_id: [turns[0]] for prompt_id, turns in notes.turns.items()}  # what user and target have said in turn
    waiting = {prompt_id: prompts[prompt_id] for prompt_id in list(prompts)[ranks.rank :: ranks.world_size]}
    answers: dict[str, Answer] = {}
    started, turn = time.perf_counter(), 1
    while waiting:
        generations = generate_in_batches(
            target,
            drafter,
            list(waiting.values()),
            num_speculative_tokens=settings.num_speculative_tokens,
            max_new_tokens=settings.max_new_tokens,
            sampler=sampler,
            eos_token_ids=eos_token_ids(target),
            batch_size=settings.batch_size,
            description=(name.replace("_", " ") + (f", turn {turn}" if turn > 1 else "")) if ranks.is_first else None,
            clock=clock,
        )
        following: dict[str, list[int]] = {}
        for (prompt_id, prompt), generation in zip(waiting.items(), generations, strict=True):
            shown = prompt_id if turn == 1 else f"{prompt_id} turn {turn}"
            answers[shown] = Answer(generation, len(prompt), notes.categories.get(prompt_id))
            if turn < len(notes.turns.get(prompt_id, [])):
                assert tokenizer is not None
                spoken[prompt_id] += [
                    str(tokenizer.decode(generation.tokens, skip_special_tokens=True)),
                    notes.turns[prompt_id][turn],
                ]
                roles = itertools.cycle(("user", "assistant"))
                messages = [{"role": role, "content": text} for role, text in zip(roles, spoken[prompt_id], strict=False)]
                following[prompt_id] = render_prompt(tokenizer, messages)
        context_tokens = target.config.max_position_embeddings - settings.max_new_tokens
        waiting = {prompt_id: prompt for prompt_id, prompt in following.items() if len(prompt) <= context_tokens}
        if len(waiting) < len(following):
            print(
                f"{name}: {len(following) - len(waiting)} conversations end before turn {turn + 1}: they fill the target's context"
            )
        turn += 1
    seconds = {"all": time.perf_counter() - started} | clock.read()
    merged = {prompt_id: answer for share in ranks.gather(answers) for prompt_id, answer in share.items()}
    order = {prompt_id: place for place, prompt_id in enumerate(prompts)}
    in_order = sorted(merged, key=lambda shown: (order.get(shown, len(order)), shown))
    num_tokens = sum(len(answer.generation.tokens) for answer in answers.values())
    return Measured({shown: merged[shown] for shown in in_order}, seconds, num_tokens)


def report(config: PipelineConfig, found: RunHead, prompts: dict[str, list[int]], measured: dict[str, Measured]) -> dict[str, Any]:
    settings = config.acceptance
    described = {name: describe(each) for name, each in measured.items()}
    return {
        **described.pop("head"),
        "num_speculative_tokens": settings.num_speculative_tokens,
        "temperature": settings.temperature,
        "sample_drafts": settings.sample_drafts,
        "max_new_tokens": settings.max_new_tokens,
        "dtype": str(settings.dtype),
        "seed": settings.seed,
        "batch_size": settings.batch_size,
        "target": config.target.path,
        "head": str(found.directory),
        "head_name": config.head.name,
        "head_sha256": found.sha256,
        "prompts_file": settings.prompts_file,
        "prompts_sha256": hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest(),
        "beside": described,
        "speed": {name: {"tokens_per_s": each.tokens_per_s, "seconds": each.seconds} for name, each in measured.items()},
    }


def describe(measured: Measured) -> dict[str, Any]:
    """A drafter's figures: pooled, without loops, by the length of the prompt and by category."""
    answers = measured.answers.values()
    bounds = zip(CONTEXT_BUCKETS, [*CONTEXT_BUCKETS[1:], 2**62], strict=True)
    buckets = {
        str(first): [each.generation for each in answers if first <= each.prompt_tokens < behind] for first, behind in bounds
    }
    categories = sorted({each.category for each in answers if each.category is not None})
    by_category = {name: [each.generation for each in answers if each.category == name] for name in categories}
    return {
        **asdict(measured.pooled),
        "intervals": asdict(intervals(measured.generations)),
        "without_loops": asdict(measured.without_loops),
        "by_prompt_tokens": {name: asdict(summarise(part)) for name, part in buckets.items() if part},
        "by_category": {name: asdict(summarise(part)) for name, part in by_category.items()},
        "acceptance_length_of_prompts": [1 + sum(each.accepted_at) / each.rounds for each in measured.generations if each.rounds],
    }


def write_generations(path: Path, measured: Measured) -> None:
    """One line per prompt: its new tokens and counts, so that every figure of the report can be checked."""
    with path.open("w") as file:
        for prompt_id, answer in measured.answers.items():
            generation = answer.generation
            file.write(json.dumps({"id": prompt_id, **asdict(generation), "has_loop": has_loop(generation.tokens)}) + "\n")


def print_table(config: PipelineConfig, measured: dict[str, Measured]) -> None:
    settings = config.acceptance
    depths = range(settings.num_speculative_tokens)
    title = f"Acceptance: K={len(depths)}, temperature {settings.temperature:g}, {settings.dtype}, batches of {settings.batch_size}"
    table = Table(title=f"{title}, up to {settings.max_new_tokens} new tokens")
    table.add_column("", no_wrap=True)
    for column in ("length", "rate", *(f"at {depth}" for depth in depths), "per step", "prompts", "tokens/s", "draft", "verify"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, each in measured.items():
        speed = [f"{each.tokens_per_s:,.0f}", *(f"{each.seconds.get(phase, 0) / each.seconds['all']:.0%}" for phase in PHASES[1:3])]
        shown = f"head {config.head.name}" if name == "head" else name.replace("_", " ")
        for label, acceptance, more in ((shown, each.pooled, speed), ("  no loops", each.without_loops, ["", "", ""])):
            rates = acceptance.acceptance_rate_at or [0.0 for _ in depths]
            figures = [acceptance.acceptance_length, acceptance.acceptance_rate, *rates, acceptance.tokens_per_step]
            table.add_row(label, *(f"{figure:.3f}" for figure in figures), str(acceptance.prompts), *more)
    console = Console()
    console.width = max(console.width, 88 + 8 * len(depths))
    console.print(table)


if __name__ == "__main__":
    main()
