"""Stage 4: acceptance of the trained head, drafting and verifying with the real inference path.

Reads `run_dir/train/best/` (or, where nothing was trained, the head of `head.init_from`) and held-out prompts of `run_dir/prompts/`
(or `acceptance.prompts_file`); writes `report.json`, `report.html` and `generations.jsonl` into `run_dir/acceptance/`, and prints a
table with what `acceptance.beside` names beside the head: prompt lookup, trees, a small model, plain decoding.

    python -m eval.acceptance recipe=quickstart acceptance.num_speculative_tokens=5
    python -m eval.acceptance recipe=quickstart "acceptance.beside=[none,prompt_lookup,tree,hybrid]" acceptance.batch_size=1
    torchrun --nproc-per-node 8 -m eval.acceptance recipe=llama3_1_8b_mtp
"""

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
    Intervals,
    PromptNotes,
    eos_token_ids,
    generate_in_batches,
    has_loop,
    intervals,
    prompts_sha256,
    read_notes,
    read_prompts,
    summarise,
)
from mtptrain.clock import PhaseClock
from mtptrain.config import RECIPES, AcceptanceConfig, Beside, PipelineConfig, load_config
from mtptrain.distributed import Ranks, init_ranks
from mtptrain.drafters import HeadDrafter, HybridDrafter, ModelDrafter, NoDrafter, PromptLookupDrafter, TreeDrafter
from mtptrain.identity import weights_fingerprint
from mtptrain.prompt_files import render_prompt
from mtptrain.run_dir import write_json, write_provenance
from mtptrain.speculate import Drafter, Generation, Sampler
from mtptrain.target import Target, load_draft_model, load_target, load_tokenizer, resolve_target
from mtptrain.warm_start import RunHead, trained_or_initial_head

CONTEXT_BUCKETS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Prompt lengths in tokens at which a bucket begins."""


@hydra.main(config_path=RECIPES, config_name="pipeline", version_base="1.3")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    ranks = init_ranks()
    settings = config.acceptance
    target_dir = resolve_target(config.target.path, config.target.revision)
    dtype = getattr(torch, settings.dtype)
    found = trained_or_initial_head(config.stage_dir("train") / "best", config.head, target_dir, dtype, ranks.device)
    prompts = read_prompts(config, target_dir)
    notes = read_notes(Path(settings.prompts_file)) if settings.prompts_file else PromptNotes()
    model = None
    if settings.draft_model is not None:
        longest = max(map(len, prompts.values())) + settings.max_new_tokens + settings.num_speculative_tokens
        model = load_draft_model(settings.draft_model, target_dir, longest, dtype, ranks.device)
    target = load_target(target_dir, dtype, ranks.device)

    drafters = drafters_of(settings, found, target, model)
    tokenizer = load_tokenizer(target_dir) if notes.turns else None
    measured = {name: Measurement(config, target, tokenizer, notes, ranks).run(drafters[name], prompts, name) for name in drafters}
    if ranks.is_first:
        output_dir = Path(settings.output_dir or config.stage_dir("acceptance"))
        write_provenance(output_dir, config)
        for name, each in measured.items():
            write_generations(output_dir / ("generations.jsonl" if name == "head" else f"generations_{name}.jsonl"), each)
        described = report(config, found, target_dir, prompts, notes, ranks, measured)
        write_json(output_dir / "report.json", described)
        served = config.stage_dir("serving_check") / "report.json"
        write_page(
            output_dir / "report.html", {str(output_dir): described}, json.loads(served.read_text()) if served.exists() else None
        )
        print_table(config, measured)
        print(f"plots: {output_dir / 'report.html'}")
        if not found.is_trained:
            print(f"head: {found.directory}, as it was published (head.init_from); this run has not trained one")


def drafters_of(settings: AcceptanceConfig, found: RunHead, target: Target, model: Target | None) -> dict[str, Drafter]:
    """By name, the head first.

    Raises:
        ValueError: the head's vocabulary is smaller than a tree is wide.
    """
    depths, vocab_size = settings.num_speculative_tokens, len(target.parts.lm_head)
    own_size = vocab_size if found.head.lm_head is None else found.head.lm_head.out_features
    if Beside.tree in settings.beside and settings.tree_top_k > own_size:
        raise ValueError(
            f"acceptance.tree_top_k: must be at most {own_size}, the tokens that the head can draft, but is {settings.tree_top_k}; lower it"
        )
    head = HeadDrafter(found.head, target.parts, depths, settings.sample_drafts)
    drafters: dict[str, Drafter] = {"head": head}
    for name in settings.beside:
        if name == Beside.none:
            drafters[name] = NoDrafter()
        elif name == Beside.prompt_lookup:
            drafters[name] = PromptLookupDrafter(depths)
        elif name == Beside.model:
            assert model is not None
            drafters[name] = ModelDrafter(model, vocab_size, depths, settings.sample_drafts)
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
    """A drafter's answers over all ranks."""

    answers: dict[tuple[str, int], Answer]
    """By prompt id and turn, from 1."""
    seconds: dict[str, float]
    """Of the first rank: of each of `PHASES`, and `all`."""
    tokens_per_s: float
    """New ones, of the first rank."""
    cut_conversations: int
    """Those whose next turn would not have fitted the target's context."""

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


class Measurement:
    """Decodes prompts with one drafter, turn after turn."""

    def __init__(
        self,
        config: PipelineConfig,
        target: Target,
        tokenizer: PreTrainedTokenizerBase | None,
        notes: PromptNotes,
        ranks: Ranks,
    ) -> None:
        self.settings = config.acceptance
        self.target = target
        self.tokenizer = tokenizer
        """Of conversations that go on; None where none does."""
        self.notes = notes
        self.ranks = ranks
        self.clock = PhaseClock(ranks.device)
        self.sampler = Sampler(self.settings.temperature, self.settings.seed + ranks.rank)

    def run(self, drafter: Drafter, prompts: dict[str, list[int]], name: str) -> Measured:
        """Decode this rank's share of the prompts and gather everyone's."""
        waiting = {prompt_id: prompts[prompt_id] for prompt_id in list(prompts)[self.ranks.rank :: self.ranks.world_size]}
        messages = {prompt_id: [{"role": "user", "content": turns[0]}] for prompt_id, turns in self.notes.turns.items()}
        answers: dict[tuple[str, int], Answer] = {}
        started, turn, num_cut = time.perf_counter(), 1, 0
        while waiting:
            generations = self._generate(drafter, list(waiting.values()), name if turn == 1 else f"{name}, turn {turn}")
            following: dict[str, list[int]] = {}
            for (prompt_id, prompt), generation in zip(waiting.items(), generations, strict=True):
                answers[prompt_id, turn] = Answer(generation, len(prompt), self.notes.categories.get(prompt_id))
                if turn < len(self.notes.turns.get(prompt_id, [])):
                    following[prompt_id] = self._next_prompt(messages[prompt_id], generation, self.notes.turns[prompt_id][turn])
            context_tokens = self.target.config.max_position_embeddings - self.settings.max_new_tokens
            waiting = {prompt_id: prompt for prompt_id, prompt in following.items() if len(prompt) <= context_tokens}
            num_cut, turn = num_cut + len(following) - len(waiting), turn + 1
        seconds = {"all": time.perf_counter() - started} | self.clock.read()
        merged = {key: answer for share in self.ranks.gather(answers) for key, answer in share.items()}
        place = {prompt_id: index for index, prompt_id in enumerate(prompts)}
        in_order = sorted(merged, key=lambda key: (place[key[0]], key[1]))
        num_tokens = sum(len(answer.generation.tokens) for answer in answers.values())
        return Measured(
            {key: merged[key] for key in in_order}, seconds, num_tokens / seconds["all"], sum(self.ranks.gather(num_cut))
        )

    def _generate(self, drafter: Drafter, prompts: list[list[int]], description: str) -> list[Generation]:
        return generate_in_batches(
            self.target,
            drafter,
            prompts,
            num_speculative_tokens=self.settings.num_speculative_tokens,
            max_new_tokens=self.settings.max_new_tokens,
            sampler=self.sampler,
            eos_token_ids=eos_token_ids(self.target),
            batch_size=self.settings.batch_size,
            description=description.replace("_", " ") if self.ranks.is_first else None,
            clock=self.clock,
        )

    def _next_prompt(self, messages: list[dict[str, str]], generation: Generation, said: str) -> list[int]:
        """Adds the target's answer and what the user says to it."""
        assert self.tokenizer is not None
        answer = str(self.tokenizer.decode(generation.tokens, skip_special_tokens=True))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
        return render_prompt(self.tokenizer, messages)


def report(
    config: PipelineConfig,
    found: RunHead,
    target_dir: Path,
    prompts: dict[str, list[int]],
    notes: PromptNotes,
    ranks: Ranks,
    measured: dict[str, Measured],
) -> dict[str, Any]:
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
        "num_ranks": ranks.world_size,
        "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU",
        "tree": f"{settings.tree_nodes} nodes, top {settings.tree_top_k}",
        "hybrid": f"matches of {settings.hybrid_min_match}",
        "model": settings.draft_model,
        "target": config.target.path,
        "target_weights_sha256": weights_fingerprint(target_dir),
        "head": str(found.directory),
        "head_name": config.head.name,
        "head_sha256": found.sha256,
        "prompts_file": settings.prompts_file,
        "prompts_sha256": prompts_sha256(prompts, notes),
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
        "intervals": asdict(measured.intervals),
        "conversations": len({prompt_id for prompt_id, _ in measured.answers}),
        "cut_conversations": measured.cut_conversations,
        "without_loops": asdict(measured.without_loops),
        "by_prompt_tokens": {name: asdict(summarise(part)) for name, part in buckets.items() if part},
        "by_category": {name: asdict(summarise(part)) for name, part in by_category.items()},
        "acceptance_length_of_prompts": [1 + sum(each.accepted_at) / each.rounds for each in measured.generations if each.rounds],
    }


def write_generations(path: Path, measured: Measured) -> None:
    """One line per answer: its new tokens and counts, so that every figure of the report can be checked."""
    with path.open("w") as file:
        for (prompt_id, turn), answer in measured.answers.items():
            loops = has_loop(answer.generation.tokens)
            file.write(json.dumps({"id": prompt_id, "turn": turn, **asdict(answer.generation), "has_loop": loops}) + "\n")


def print_table(config: PipelineConfig, measured: dict[str, Measured]) -> None:
    settings = config.acceptance
    depths = range(settings.num_speculative_tokens)
    title = f"Acceptance: K={len(depths)}, temperature {settings.temperature:g}, {settings.dtype}, batches of {settings.batch_size}"
    table = Table(title=f"{title}, up to {settings.max_new_tokens} new tokens")
    table.add_column("", no_wrap=True)
    for column in ("length", "rate", *(f"at {depth}" for depth in depths), "per step", "prompts", "tokens/s", "draft", "verify"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, each in measured.items():
        speed = [
            f"{each.tokens_per_s:,.0f}",
            *(f"{each.seconds.get(phase, 0) / each.seconds['all']:.0%}" for phase in ("draft", "verify")),
        ]
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
