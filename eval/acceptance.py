"""Stage 4: acceptance of the trained head, drafting and verifying with the real inference path.

Reads `run_dir/train/best/` (or, where nothing was trained, the head of `head.init_from`) and held-out prompts of `run_dir/prompts/`
(or `acceptance.prompts_file`); writes `report.json` and `generations.jsonl` into `run_dir/acceptance/`, and prints a table with
prompt lookup beside the head.

    python -m eval.acceptance recipe=quickstart acceptance.num_speculative_tokens=5
    torchrun --nproc-per-node 8 -m eval.acceptance recipe=llama3_1_8b_mtp
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from mtptrain.acceptance import (
    Acceptance,
    eos_token_ids,
    generate_in_batches,
    has_loop,
    read_prompts,
    summarise,
)
from mtptrain.config import RECIPES, PipelineConfig, load_config
from mtptrain.distributed import Ranks, init_ranks
from mtptrain.drafters import HeadDrafter, PromptLookupDrafter
from mtptrain.run_dir import write_json, write_provenance
from mtptrain.speculate import Drafter, Generation, Sampler
from mtptrain.target import Target, load_target, resolve_target
from mtptrain.warm_start import RunHead, trained_or_initial_head


@hydra.main(config_path=RECIPES, config_name="pipeline", version_base="1.3")
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    ranks = init_ranks()
    settings = config.acceptance
    target_dir = resolve_target(config.target.path, config.target.revision)
    dtype = getattr(torch, settings.dtype)
    found = trained_or_initial_head(config.stage_dir("train") / "best", config.head, target_dir, dtype, ranks.device)
    prompts = read_prompts(config, target_dir)
    target = load_target(target_dir, dtype, ranks.device)

    drafter = HeadDrafter(found.head, target.parts, settings.num_speculative_tokens, settings.sample_drafts)
    measured = measure(config, target, drafter, prompts, ranks, "head")
    look_up = measure(config, target, PromptLookupDrafter(settings.num_speculative_tokens), prompts, ranks, "prompt lookup")
    if ranks.is_first:
        output_dir = Path(settings.output_dir or config.stage_dir("acceptance"))
        write_provenance(output_dir, config)
        write_generations(output_dir / "generations.jsonl", measured)
        write_json(output_dir / "report.json", report(config, found, measured, look_up))
        print_table(config, measured, look_up)
        if not found.is_trained:
            print(f"head: {found.directory}, as it was published (head.init_from); this run has not trained one")


@dataclass(frozen=True)
class Measured:
    """A drafter's generations by prompt id, over all ranks."""

    generations: dict[str, Generation]

    @property
    def pooled(self) -> Acceptance:
        return summarise(list(self.generations.values()))

    @property
    def without_loops(self) -> Acceptance:
        return summarise([generation for generation in self.generations.values() if not has_loop(generation.tokens)])


def measure(
    config: PipelineConfig, target: Target, drafter: Drafter, prompts: dict[str, list[int]], ranks: Ranks, name: str
) -> Measured:
    """Decode this rank's share of the prompts and gather everyone's."""
    settings = config.acceptance
    ids = list(prompts)[ranks.rank :: ranks.world_size]
    generations = generate_in_batches(
        target,
        drafter,
        [prompts[prompt_id] for prompt_id in ids],
        num_speculative_tokens=settings.num_speculative_tokens,
        max_new_tokens=settings.max_new_tokens,
        sampler=Sampler(settings.temperature, settings.seed + ranks.rank),
        eos_token_ids=eos_token_ids(target),
        batch_size=settings.batch_size,
        description=name if ranks.is_first else None,
    )
    shares = ranks.gather(dict(zip(ids, generations, strict=True)))
    merged = {prompt_id: generation for share in shares for prompt_id, generation in share.items()}
    return Measured({prompt_id: merged[prompt_id] for prompt_id in prompts})


def report(config: PipelineConfig, found: RunHead, measured: Measured, look_up: Measured) -> dict[str, object]:
    settings = config.acceptance
    return {
        **asdict(measured.pooled),
        "num_speculative_tokens": settings.num_speculative_tokens,
        "temperature": settings.temperature,
        "sample_drafts": settings.sample_drafts,
        "max_new_tokens": settings.max_new_tokens,
        "dtype": str(settings.dtype),
        "seed": settings.seed,
        "target": config.target.path,
        "head": str(found.directory),
        "head_sha256": found.sha256,
        "prompts_file": settings.prompts_file,
        "without_loops": asdict(measured.without_loops),
        "prompt_lookup": {**asdict(look_up.pooled), "without_loops": asdict(look_up.without_loops)},
    }


def write_generations(path: Path, measured: Measured) -> None:
    """One line per prompt: its new tokens and counts, so that every figure of the report can be checked."""
    with path.open("w") as file:
        for prompt_id, generation in measured.generations.items():
            file.write(json.dumps({"id": prompt_id, **asdict(generation), "has_loop": has_loop(generation.tokens)}) + "\n")


def print_table(config: PipelineConfig, measured: Measured, look_up: Measured) -> None:
    settings = config.acceptance
    depths = range(settings.num_speculative_tokens)
    title = f"Acceptance: K={len(depths)}, temperature {settings.temperature:g}, {settings.dtype}"
    table = Table(title=f"{title}, up to {settings.max_new_tokens} new tokens")
    table.add_column("", no_wrap=True)
    for column in ("length", "rate", *(f"at {depth}" for depth in depths), "per step", "prompts"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [
        (f"head {config.head.name}", measured.pooled),
        ("  no loops", measured.without_loops),
        ("prompt lookup", look_up.pooled),
        ("  no loops", look_up.without_loops),
    ]
    for name, acceptance in rows:
        rates = acceptance.acceptance_rate_at or [0.0 for _ in depths]
        figures = [acceptance.acceptance_length, acceptance.acceptance_rate, *rates, acceptance.tokens_per_step]
        table.add_row(name, *(f"{figure:.3f}" for figure in figures), str(acceptance.prompts))
    console = Console()
    console.width = max(console.width, 56 + 8 * len(depths))
    console.print(table)


if __name__ == "__main__":
    main()
