"""Stage 4: measures the acceptance of the trained head with the real draft and verify loop.

Reads `run_dir/train/best/` (`last/` if no head was measured, or the head of `head.init_from` if nothing was trained)
and the held-out prompts of `run_dir/prompts/` (or `acceptance.prompts_file`). Writes `report.json`, `report.html` and
the answers (`generations.jsonl`, and `generations_NAME.jsonl` for each other row) to `run_dir/acceptance/`, and prints
a table. It also has the baselines of `acceptance.baselines` (plain decoding, prompt lookup, a small model, trees, the
head combined with prompt lookup, and the head that training started from), and the head at other temperatures and
confidence thresholds.

    mtptrain acceptance recipe=quickstart acceptance.num_speculative_tokens=5
    mtptrain acceptance recipe=quickstart "acceptance.baselines=[none,tree,hybrid]" acceptance.batch_size=1
    mtptrain acceptance recipe=quickstart "acceptance.temperatures=[0.7,1]" acceptance.top_p=0.9
    torchrun --nproc-per-node 8 -m mtptrain acceptance recipe=llama3_1_8b_mtp
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mtptrain.cli import tables
from mtptrain.config import AcceptanceConfig, Baseline, PipelineConfig, Tracker
from mtptrain.decoding.acceptance import has_loop
from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.drafters import (
    HYBRID_MIN_MATCH,
    HeadDrafter,
    HybridDrafter,
    NoDrafter,
    PromptLookupDrafter,
    TreeDrafter,
)
from mtptrain.decoding.prompts import check_head_context, read_prompts
from mtptrain.decoding.prompts_file import Prompts
from mtptrain.decoding.sampler import Sampler
from mtptrain.engines.base import Applied, Engine
from mtptrain.engines.table import engine_of
from mtptrain.engines.verdict import bench_of
from mtptrain.heads.base import Head
from mtptrain.heads.files import RESTORE
from mtptrain.init_from.start import RunHead, initial_head, load_draft_model, trained_or_initial_head
from mtptrain.run_dir import Run, become_cpu_ranks
from mtptrain.stage_dir import StageDir
from mtptrain.target.generation import ONLY_SAMPLED, PENALTIES
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from mtptrain.training.held_out import held_out_losses
from mtptrain.training.losses import LossSettings
from mtptrain.training.metrics import METRICS, read_metrics, track_report
from mtptrain.utils.distributed import Ranks, device_name, init_ranks
from mtptrain.utils.errors import UserError, warn
from mtptrain.utils.figures import shown
from mtptrain.utils.files import read_sealed, write_sealed, write_text
from mtptrain.utils.startup import command

from .draft_quality import DraftQuality
from .examples import examples
from .measurement import Candidate, Measured, Measurement
from .report_page import MEASURED_WITH, write_page


def main(config: PipelineConfig) -> None:
    run = Run(config)
    with StageDir(config.acceptance_dir, "acceptance.output_dir").writing() as output_dir:
        become_cpu_ranks(run, config.acceptance.dtype)
        measure_head(run, init_ranks(config.distributed_timeout_hours), output_dir)


def measure_head(run: Run, ranks: Ranks, output_dir: Path) -> None:
    """Measure the head and the baselines on all ranks, and write and print the report on the first."""
    config, settings = run.config, run.config.acceptance
    engine = engine_of(config.export.engine)
    warn_of_greedy_drafts(config, engine)
    dtype = getattr(torch, settings.dtype)
    run_head = trained_or_initial_head(run.stage_dir("train"), run.head, run.target, dtype, ranks.device)
    trained_on = training_facts(run_head)  # refuses damaged records before the measurement
    prompts = read_prompts(settings, config.prompts, run.target, run.stage_dir("prompts"))
    model = initial = None
    if settings.draft_model is not None:
        model = load_draft_model(settings.draft_model, run.target, dtype, ranks.device)
    if Baseline.initial in settings.baselines:
        initial = initial_head(run.head, run.target, dtype, ranks.device).head
    for setting, head in {"head": run_head.head, "acceptance.draft_model": model, "head.init_from": initial}.items():
        if head is not None:
            lengths = settings.max_new_tokens, settings.num_speculative_tokens
            check_head_context(head, prompts.input_ids.values(), *lengths, setting)
    target = load_target(run.target.directory, dtype, ranks.device)

    served = served_settings(run)
    candidates = candidates_of(settings, run_head, target, model, initial, ranks.rank, served, engine.sampling)
    tokenizer = run.target.tokenizer
    longest = longest_prompt(target, [run_head.head, model, initial], settings)
    measured = Measurement(settings, target, tokenizer, prompts, ranks, longest).run(candidates)
    # The head's losses are those on the target's answers to the first turn of each prompt.
    own = list(prompts.input_ids.items())[ranks.rank :: ranks.world_size]
    answered = [(list(prompt), measured["head"].answers[prompt_id, 1].generation) for prompt_id, prompt in own]
    of_loss = LossSettings.of(config.train)
    held_out = held_out_losses(run_head.head, target, answered, config.head.ttt_steps, of_loss, ranks)
    if ranks.is_first:
        StageDir(output_dir).record(config, "report.json")
        remove_generations(output_dir)
        for name, each in measured.items():
            write_generations(output_dir / f"generations{'' if name == 'head' else f'_{name}'}.jsonl", each)
        described = report(run, run_head, prompts, ranks, measured) | trained_on
        described["held_out"] = None if held_out is None else asdict(held_out)
        described["examples"] = examples(measured["head"], prompts.input_ids, tokenizer)
        write_sealed(output_dir / "report.json", described)
        print_table(config, measured)
        for note in engine.notes(run.target):
            print(note)
        write_page(described, output_dir, bench_of(config, described))
        if config.train.tracker is Tracker.wandb:
            figures = {name: described[name] for name in ("acceptance_length", "acceptance_rate_at", "tokens_per_step")}
            files = [path for path in (output_dir / "report.html", output_dir / "report.json") if path.is_file()]
            track_report(output_dir, config, figures, files)
        if not run_head.is_trained:
            print(f"head: {run_head.directory}, unchanged from head.init_from; this run has not trained a head")


def warn_of_greedy_drafts(config: PipelineConfig, engine: Engine) -> None:
    if config.acceptance.sample_drafts and config.head.name not in engine.sampled_drafts:
        warn(
            f"acceptance.sample_drafts: must be false for head {config.head.name} and {engine.name} {engine.version}, "
            "which takes its likeliest tokens and accepts another share of them, but is true; leave it out, or set "
            "export.engine to the engine that will serve the head"
        )


def longest_prompt(target: Target, heads: Sequence[Head | None], settings: AcceptanceConfig) -> int:
    """Returns the largest number of prompt tokens whose answer and drafts fit the contexts of target and heads."""
    new_tokens, num_drafts = settings.max_new_tokens, settings.num_speculative_tokens
    contexts = [head.context_tokens for head in heads if head is not None and head.context_tokens is not None]
    # Drafts past the end of an answer are not kept, so the target needs room for them only in the first round. A head's
    # own context must hold them, too.
    longest_of_target = target.config.max_position_embeddings - max(new_tokens, num_drafts)
    return min([longest_of_target, *(context - new_tokens - num_drafts for context in contexts)])


def served_settings(run: Run) -> dict[str, dict[str, Any]]:
    """Returns how the engine of the export samples for requests that leave settings out, by the name of a row.

    `as_served` are requests with the temperature of the other rows, `as_served_sampled` those without one. There is no
    row for what generation_config.json does not set, the engine does not add or refuses, or adds by rules of its own.
    """
    engine = engine_of(run.config.export.engine)
    generation = engine.read_by(run.target)
    added, rows = engine.added_to(generation), dict[str, dict[str, Any]]()
    if engine.why_it_fails(run.target):
        return rows
    penalties = {name: value for name, value in added.items() if name in PENALTIES}
    if (penalties and not engine.has_our_penalties) or added.keys() & generation.processors.keys():
        return rows
    if penalties:
        rows["as_served"] = {"temperature": run.config.acceptance.temperature, **penalties}
    sampled = {name: value for name, value in added.items() if name in ONLY_SAMPLED}
    is_sampled = generation.samples if engine.applies.get("do_sample") is Applied.yes else bool(sampled)
    if is_sampled and not engine.refused_for(generation):
        rows["as_served_sampled"] = {**engine.defaults, **sampled, **penalties}
    return rows


def candidates_of(
    settings: AcceptanceConfig,
    run_head: RunHead,
    target: Target,
    model: Head | None,
    initial: Head | None,
    rank: int,
    served: Mapping[str, Mapping[str, Any]],
    rules: Mapping[str, Any],
) -> dict[str, Candidate]:
    """Returns the candidates by name: the head, as it is served, baselines, other temperatures and thresholds.

    Their samplers have the `rules` of an engine.
    """
    if Baseline.tree in settings.baselines and target.form.keeps_states:
        raise UserError(
            "acceptance.baselines: must not contain tree for a target whose layers keep states, which cannot be read "
            "again for each branch, but does; remove it"
        )
    depths, vocab_size = settings.num_speculative_tokens, len(target.parts.lm_head)
    own_size = vocab_size if run_head.head.lm_head is None else run_head.head.lm_head.out_features
    if Baseline.tree in settings.baselines and settings.tree_top_k > own_size:
        raise UserError(
            f"acceptance.tree_top_k: must be at most {own_size}, the number of tokens that the head can draft, but is "
            f"{settings.tree_top_k}; lower it"
        )

    def sampler(temperature: float) -> Sampler:
        return Sampler(temperature, settings.seed + rank, settings.top_p, settings.top_k, **rules)

    def drafter(
        head: Head | None = run_head.head, sample_drafts: bool = settings.sample_drafts, threshold: float = 0.0
    ) -> HeadDrafter:
        assert head is not None, "see check_acceptance"
        return HeadDrafter(head, target.parts, depths, sample_drafts, threshold)

    def head_candidate(temperature: float, sample_drafts: bool) -> Candidate:
        quality = DraftQuality(run_head.head, sampler(temperature), vocab_size, depths)
        return Candidate(drafter(sample_drafts=sample_drafts), sampler(temperature), quality)

    baselines: dict[Baseline, Callable[[], Drafter]] = {
        Baseline.none: NoDrafter,
        Baseline.prompt_lookup: lambda: PromptLookupDrafter(depths),
        Baseline.model: lambda: drafter(model),
        Baseline.initial: lambda: drafter(initial),
        Baseline.tree: lambda: TreeDrafter(
            run_head.head, target.parts, depths, settings.tree_nodes, settings.tree_top_k
        ),
        Baseline.hybrid: lambda: HybridDrafter(drafter()),
    }
    candidates = {"head": head_candidate(settings.temperature, settings.sample_drafts)}
    for name, sampling in served.items():
        candidates[name] = Candidate(drafter(), Sampler(seed=settings.seed + rank, **sampling, **rules))
    for baseline in settings.baselines:
        candidates[baseline] = Candidate(baselines[baseline](), sampler(settings.temperature))
    for temperature in settings.temperatures:
        candidates[f"temperature_{temperature:g}"] = head_candidate(temperature, sample_drafts=False)
        candidates[f"temperature_{temperature:g}_sampled_drafts"] = head_candidate(temperature, sample_drafts=True)
    for threshold in settings.confidence_thresholds:
        candidates[f"confidence_{threshold:g}"] = Candidate(drafter(threshold=threshold), sampler(settings.temperature))
    return candidates


def report(
    run: Run, run_head: RunHead, prompts: Prompts, ranks: Ranks, measured: dict[str, Measured]
) -> dict[str, Any]:
    settings = run.config.acceptance
    described = {name: each.describe() for name, each in measured.items()}
    return {
        "command": command(),
        **described.pop("head"),
        **{name: getattr(settings, name) for name in MEASURED_WITH},
        "num_ranks": ranks.world_size,
        "device": device_name(ranks.device),
        "tree": f"{settings.tree_nodes} nodes, top {settings.tree_top_k}",
        "hybrid": f"matches of {HYBRID_MIN_MATCH} tokens",
        "model": settings.draft_model,
        "target": run.target.path,
        "target_weights_sha256": run.target.weights_sha256,
        "head": str(run_head.directory),
        "head_name": run.config.head.name,
        "head_sha256": run_head.sha256,
        "sampled_as": run.config.export.engine,
        "prompts_file": settings.prompts_file,
        "prompts_sha256": prompts.sha256,
        "baselines": described,
        "as_served": served_settings(run),
        "generation_config": engine_of(run.config.export.engine).read_by(run.target).changes,
        "speed": {
            name: {"tokens_per_s": each.tokens_per_s, "seconds": each.seconds} for name, each in measured.items()
        },
    }


def training_facts(run_head: RunHead) -> dict[str, int | None]:
    """Returns the number of tokens that a head was trained on in this run, and the seed; None if it was not."""
    if not run_head.is_trained:
        return {"train_tokens": None, "train_seed": None}
    facts = read_sealed(run_head.directory / "head.json", RESTORE, ["step"])
    records = [record for _, record in read_metrics(run_head.directory.parent / METRICS)]
    tokens = sum(each.get("tokens", 0) for each in records if each["step"] <= facts["step"])
    return {"train_tokens": int(tokens) or None, "train_seed": facts.get("seed")}


def remove_generations(output_dir: Path) -> None:
    """Remove an earlier measurement's answers of the rows that this one may lack: all but the head's."""
    names = "|".join(
        (*Baseline, "as_served(_sampled)?", r"temperature_[0-9.e+-]+(_sampled_drafts)?", r"confidence_[0-9.e-]+")
    )
    for path in list(output_dir.iterdir()):
        if re.fullmatch(rf"generations_({names})\.jsonl", path.name):
            path.unlink()


def write_generations(path: Path, measured: Measured) -> None:
    """Write one line per answer, with its tokens and its counts, whose sums give the report's pooled figures."""
    lines = []
    for (prompt_id, turn), answer in measured.answers.items():
        loops = has_loop(answer.generation.tokens)
        lines.append(json.dumps({"id": prompt_id, "turn": turn, **asdict(answer.generation), "has_loop": loops}))
    write_text(path, "".join(f"{line}\n" for line in lines))


def print_table(config: PipelineConfig, measured: dict[str, Measured]) -> None:
    settings = config.acceptance
    depths, head = range(settings.num_speculative_tokens), f"head {config.head.name}"
    title = (
        f"Acceptance: K={len(depths)}, temperature {settings.temperature:g}, {settings.dtype}, batches of "
        f"{settings.batch_size}"
    )
    rates_at = (f"at {depth}" for depth in depths)
    columns = ("", "length", "rate", *rates_at, "per step", "prompts", "tokens/s", "draft", "verify")
    rows = []
    for name, each in measured.items():
        speed = [
            f"{each.tokens_per_s:,.0f}",
            *(f"{each.seconds.get(phase, 0) / each.seconds['all']:.0%}" for phase in ("draft", "verify")),
        ]
        row_name = head if name == "head" else name.replace("_", " ")
        for label, acceptance, more in (
            (row_name, each.pooled, speed),
            ("  no loops", each.without_loops, ["", "", ""]),
        ):
            rates = acceptance.acceptance_rate_at or [None for _ in depths]
            figures = [acceptance.acceptance_length, acceptance.acceptance_rate, *rates, acceptance.tokens_per_step]
            rows.append([label, *map(shown, figures), str(acceptance.prompts), *more])
    tables.print_table(f"{title}, up to {settings.max_new_tokens} new tokens", columns, rows)
    if len(measured["head"].sources) == 1:
        print("no confidence intervals: all prompts come from one file or question; add prompts from another")
