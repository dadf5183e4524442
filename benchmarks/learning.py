"""Compares what a head learns from equal tokens with what vLLM Speculators learns from them.

    python3 -m venv .venv-peer && .venv-peer/bin/pip install torch==2.13.0 speculators==0.9.0
    python -m benchmarks.learning recipe=quickstart_eagle3 head.draft_vocab_size=null \
        prompts.max_train_tokens=600_000 serving.program=.venv-vllm/bin/python --peer .venv-peer/bin/python

Both train an EAGLE-3 head of the whole vocabulary on the same stored states, once over all of them, as deep as
`head.ttt_steps`: ours with the recipe's settings, the peer with the defaults of its trainer (Muon, its rates, schedule
and norms), except for `--peer-batch-tokens` (its 8,192 would be few steps of much attention on a CPU) and attention and
losses that run without a GPU. Then `mtptrain acceptance` and vLLM's own counters measure both on the same held-out
prompts. The seconds of ours are those of the whole program, those of the peer of its epoch alone.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file

from mtptrain.config import PipelineConfig
from mtptrain.hidden_states.store import HiddenStore
from mtptrain.run_dir import Run
from mtptrain.settings.heads import Eagle3Config
from mtptrain.utils.errors import UserError

from .command import Row, positive, print_table, run_benchmark

COLUMNS = {
    "": ("name", ""),
    "tokens": ("tokens", ",d"),
    "steps": ("steps", ",d"),
    "seconds": ("seconds", ",.0f"),
    "length": ("acceptance_length", ".3f"),
    "without loops": ("without_loops", ".3f"),
    "drafts of vLLM": ("drafted", ",d"),
    "accepted": ("accepted", ""),
}
PEER_ARGUMENTS = """--epochs 1 --on-missing raise --num-workers 2 --draft-attn-impl sdpa --loss-implementation eager
--full-attention-indices 0"""
"""No document is as long as the window that is the default of its one layer."""
PEER_NORMS = ("head.norm_before_fc=true", "head.norm_output=true", "head.norm_before_residual=true")
NUM_VALIDATED = 13
"""Documents at the end on which the peer measures its loss. They are the first ones again: nothing is chosen by it."""


def main(config: PipelineConfig, options: argparse.Namespace) -> None:
    head = config.head
    if not isinstance(head, Eagle3Config) or head.draft_vocab_size is not None or head.capture_layers is None:
        raise UserError(
            "head: must be eagle3 of the whole vocabulary with capture_layers, because the peer trains that; "
            "add recipe=quickstart_eagle3 head.draft_vocab_size=null"
        )
    peer, shown = options.peer, "import speculators.train.cli; print(version('speculators'))"
    asked = [peer, "-c", f"from importlib.metadata import version; {shown}"]
    found = shutil.which(peer) and subprocess.run(asked, capture_output=True, text=True)
    said = [*found.stderr.splitlines(), *found.stdout.splitlines()][-1:] if found else []
    if not found or found.returncode or not said or not said[0].startswith("0.9."):
        why = f", which says: {said[0]}" if said else ""
        raise UserError(f"--peer: must be the Python of an environment with speculators 0.9, but is {peer}{why}")
    overrides = sys.argv[1:]
    for stage in ("prompts", "hidden-states"):
        mtptrain(stage, overrides)
    run_dir, started = Path(config.run_dir), time.perf_counter()
    mtptrain("train", overrides)
    seconds = time.perf_counter() - started
    last = json.loads((run_dir / "train" / "metrics.jsonl").read_text().splitlines()[-1])
    rows = [row("mtptrain", run_dir, overrides, last["step"], seconds)]
    store = HiddenStore.open(run_dir / "hidden_states")
    layers = ["--target-layer-ids", *map(str, head.capture_layers)]
    rows.append(train_peer(config, options, store, layers, overrides))
    for each in rows:
        each["tokens"] = store.manifest.num_tokens
        print(json.dumps(each))
    print_table(options.command, COLUMNS, rows)
    ours, theirs = (each["acceptance_length"] - 1 for each in rows)
    share = seconds / rows[1]["seconds"]
    print(f"accepted drafts per step: {ours / theirs:.2f} times the peer's, in {share:.2f} of its time")


def mtptrain(stage: str, overrides: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "mtptrain", stage, *overrides], check=True)


def row(name: str, run_dir: Path, overrides: list[str], steps: int, seconds: float) -> Row:
    """Measures the head of a run, by our loop and by vLLM."""
    for stage in ("acceptance", "export", "serving-check"):
        mtptrain(stage, overrides)
    ours = json.loads((run_dir / "acceptance" / "report.json").read_text())
    served = json.loads((run_dir / "serving_check" / "report.json").read_text())["theirs"]
    return {
        "name": name,
        "steps": steps,
        "seconds": seconds,
        "acceptance_length": ours["acceptance_length"],
        "without_loops": ours["without_loops"]["acceptance_length"],
        "drafted": served["drafted"],
        "accepted": " / ".join(str(number) for number in served["accepted_at"]),
    }


def write_peer_data(store: HiddenStore, folder: Path) -> float:
    """Write the documents of a store as the peer reads them, and return its `train_data_ratio`."""
    rows: list[dict[str, Any]] = []
    (folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    for index in [*range(store.num_documents), *range(NUM_VALIDATED)]:
        document = store.document(index)
        assert document.aux_hidden_states is not None
        states = torch.cat([document.aux_hidden_states, document.hidden_states[:, None]], dim=1)
        ids = document.input_ids.long()
        path = folder / "hidden_states" / f"hs_{len(rows)}.safetensors"
        save_file({"hidden_states": states, "token_ids": ids}, path)
        mask = document.loss_mask.bool()
        rows.append({"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_len": len(ids)})
    Dataset.from_list(rows).with_format("torch").save_to_disk(folder)
    return (store.num_documents + 0.5) / len(rows)


def train_peer(
    config: PipelineConfig, options: argparse.Namespace, store: HiddenStore, layers: list[str], overrides: list[str]
) -> Row:
    """Returns the row of the peer's head, which it trains in its own environment."""
    peer_dir = Path(config.run_dir) / "peer"
    arguments = {
        "verifier-name-or-path": Run(config).target.directory,
        "data-path": peer_dir / "data",
        "save-path": peer_dir / "checkpoints",
        "train-data-ratio": write_peer_data(store, peer_dir / "data"),
        "total-seq-len": options.peer_batch_tokens,
        "ttt-steps": config.head.ttt_steps,
        "seed": config.seed,
    }
    worker = Path(__file__).with_name("learning_peer.py")
    texts = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    log = subprocess.run(
        [options.peer, worker, *PEER_ARGUMENTS.split(), *texts, *layers], check=True, stdout=subprocess.PIPE, text=True
    )
    trained = json.loads(log.stdout.splitlines()[-1])
    start = f"head.init_from={peer_dir / 'checkpoints' / '0'}"
    own = [*overrides, f"run_dir={peer_dir}", start, "head.start_from_target=false", *PEER_NORMS]
    mtptrain("prompts", own)
    return row("vLLM Speculators", peer_dir, own, trained["steps"], trained["seconds"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="Python of an environment with speculators")
    parser.add_argument("--peer-batch-tokens", type=positive, default=1024, help="tokens of one of the peer's steps")
    run_benchmark(main, parser)
