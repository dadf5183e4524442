"""Checks every byte in the shards of a finished store of hidden states.

The ranks share the shards.

    torchrun --nproc-per-node 8 -m mtptrain hidden-states recipe=quickstart verify=true
"""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mtptrain.hidden_states.store import HiddenStore, find_damage
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError


def verify_store(directory: Path, ranks: Ranks) -> None:
    """Compare every shard of a store with its hash in the manifest, and print a table. Every rank must call this.

    Raises:
        UserError: the store does not exist or is unfinished, or, on the first rank only, shards are changed, missing or
            truncated; the message names each.
    """
    store, started = HiddenStore.open(directory), time.monotonic()
    shards = range(ranks.rank, len(store.manifest.shards), ranks.world_size)
    damage_by_rank = ranks.gather(find_damage(store, shards, show_progress=ranks.is_first))
    damaged = {index: problem for damage in damage_by_rank for index, problem in damage.items()}
    if ranks.is_first:
        print_table(store, len(damaged), time.monotonic() - started)
        if damaged:
            raise UserError("\n".join(damaged[index] for index in sorted(damaged)))


def print_table(store: HiddenStore, num_damaged: int, seconds: float) -> None:
    num_bytes = sum(record.num_bytes for record in store.manifest.shards)
    table = Table(title=f"verify {store.directory}", show_header=False)
    table.add_row("shards", f"{len(store.manifest.shards):,}")
    table.add_row("damaged", f"{num_damaged:,}")
    table.add_row("documents", f"{store.manifest.num_documents:,}")
    table.add_row("tokens", f"{store.manifest.num_tokens:,}")
    table.add_row("read", f"{num_bytes / 1e9:.3f} GB in {seconds:.1f} s, {num_bytes / 1e9 / seconds:.2f} GB/s")
    Console().print(table)
