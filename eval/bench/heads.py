"""Compares what the heads cost on a target: parameters, bytes per token of a bf16 store, and drafting time per round.

    python -m eval.bench.heads recipe=quickstart "bench.draft_depths=[1,3,5]"

Heads have random weights; trained ones draft just as fast. They take turns to decode one prompt of random tokens, and
the fastest of `bench.repeats` runs counts.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedConfig

from mtptrain.command_line.program import command, program
from mtptrain.config import StoreDtype, load_config
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.config import HeadConfig
from mtptrain.heads.files import build_head
from mtptrain.hidden_states.shard_format import bytes_per_token
from mtptrain.run import Run
from mtptrain.target.model import Target, load_target
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.distributed import device_name, init_ranks
from mtptrain.utils.files import write_json

PROMPT_TOKENS, NEW_TOKENS, REFERENCE = 128, 64, "eagle3"


@program
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    ranks, bench = init_ranks(config.distributed_timeout_hours), config.bench
    target = load_target(Run(config).target.directory, getattr(torch, config.acceptance.dtype), ranks.device)
    torch.manual_seed(config.seed)
    heads = {name: random_head(name, target, max(bench.draft_depths)) for name in HEADS}
    times = draft_times(target, heads, bench.draft_depths, bench.repeats)
    rows = [
        {
            "head": name,
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "store_bytes_per_token": bytes_per_token(
                target.config.hidden_size, len(head.capture_layers), StoreDtype.bfloat16
            ),
            "draft_ms": {str(depths): times[name, depths] for depths in bench.draft_depths},
        }
        for name, head in heads.items()
    ]
    if bench.out:
        write_json(Path(bench.out), {"command": command(), "device": device_name(ranks.device), "rows": rows})
    print_table(rows)


def random_head(name: str, target: Target, ttt_steps: int) -> Head:
    config = head_config(name, target.config, ttt_steps)
    return (
        build_head(config, target.config)
        .to(target.device, target.parts.embed_tokens.dtype)
        .eval()
        .requires_grad_(False)
    )


def head_config(name: str, target_config: PreTrainedConfig, ttt_steps: int) -> HeadConfig:
    """Returns a head's settings for T depths, with early, middle and late captured layers if it captures any."""
    config_class, layers = HEADS[name].Config, target_config.num_hidden_layers
    captures = any(field.name == "capture_layers" for field in fields(config_class))
    settings = {"capture_layers": sorted({1, layers // 2 or 1, layers - 1 or 1})} if captures else {}
    config: HeadConfig = config_class(ttt_steps=ttt_steps, **settings)
    return config


def draft_times(
    target: Target, heads: dict[str, Head], draft_depths: Sequence[int], repeats: int
) -> dict[tuple[str, int], float]:
    """Returns the shortest drafting time per round over `repeats` runs, in milliseconds, by head and K."""
    prompt = torch.randint(len(target.parts.embed_tokens), (PROMPT_TOKENS,)).tolist()
    times: dict[tuple[str, int], float] = {}
    for _ in tqdm(range(repeats), desc="drafts", unit="turn"):
        for depths in draft_depths:
            for name, head in heads.items():
                clock = PhaseClock(target.device)
                (answer,) = speculate(
                    target,
                    HeadDrafter(head, target.parts, depths),
                    [prompt],
                    num_speculative_tokens=depths,
                    max_new_tokens=NEW_TOKENS,
                    sampler=Sampler(),
                    clock=clock,
                )
                milliseconds = clock.read()["draft"] / answer.rounds * 1e3
                times[name, depths] = min(times.get((name, depths), float("inf")), milliseconds)
    return times


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a row for each head. Ratios are relative to head `eagle3` with the same K."""
    reference = next(row for row in rows if row["head"] == REFERENCE)["draft_ms"]
    table = Table(title="What heads cost")
    for column in ("head", "parameters", "store bytes/token", *(f"draft ms, K={depths}" for depths in reference)):
        table.add_column(column, justify="left" if column == "head" else "right")
    for row in rows:
        drafts = [f"{ms:.2f} ({ms / reference[depths]:.2f}x)" for depths, ms in row["draft_ms"].items()]
        table.add_row(row["head"], f"{row['parameters']:,}", f"{row['store_bytes_per_token']:,}", *drafts)
    Console().print(table)


if __name__ == "__main__":
    main()
