"""Metrics of a run, written to `metrics.jsonl` and optionally to wandb."""

import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mtptrain.config import PipelineConfig
from mtptrain.training.batches import Batch
from mtptrain.training.flops import StepFlops
from mtptrain.utils.clock import PhaseClock
from mtptrain.utils.distributed import Ranks
from mtptrain.utils.errors import UserError, error_summary, refusing
from mtptrain.utils.files import append_text, parse_json, write_text
from mtptrain.utils.masking import hide_passwords
from mtptrain.utils.progress import ProgressBar

METRICS = "metrics.jsonl"
PHASES = ("forward", "loss", "backward", "optimizer")
"""Phases of a step, named as in the trainer's clock."""


def read_metrics(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Returns the lines of `metrics.jsonl` with their records, but not a last line that a kill left incomplete."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith(b"}"):
            break
        record = parse_json(line, f"{path}:{number}", "remove the line")
        values = record.values() if isinstance(record, dict) else [""]
        numbers = chain.from_iterable(each if isinstance(each, list) else [each] for each in values)
        if not all(isinstance(each, int | float | None) for each in numbers) or type(record.get("step")) is not int:
            raise UserError(f"{path}:{number}: must hold the numbers of a step, but does not; remove the line")
        records.append((line.decode(), record))
    return records


class Tracking:
    """Writes one line per record to `metrics.jsonl`, and sends it to wandb if configured. Only rank 0 makes one."""

    def __init__(self, directory: Path, first_step: int, in_wandb: Any) -> None:
        self.path, self._wandb = directory / METRICS, in_wandb
        # A resumed run repeats the steps since its checkpoint, so their old records are dropped.
        kept = [line for line, record in read_metrics(self.path) if record["step"] <= first_step] if first_step else []
        write_text(self.path, "".join(line + "\n" for line in kept))

    def write(self, step: int, metrics: dict[str, object]) -> None:
        append_text(self.path, json.dumps({"step": step, **metrics}) + "\n")
        if self._wandb is not None:
            self._wandb.log(curves(metrics), step=step)

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


def start_wandb(directory: Path, config: PipelineConfig, job_type: str) -> Any:
    """Start a wandb run with all settings, in the group of `run_dir`, offline unless WANDB_MODE says otherwise."""
    import wandb  # makes folders in /tmp, which stay behind if a process is killed

    os.environ.setdefault("WANDB_MODE", "offline")
    must = f"train.tracker: wandb must start with WANDB_MODE={os.environ['WANDB_MODE']}"
    with refusing(must, "mend that, or set WANDB_MODE=offline or train.tracker=none", "wandb"):
        return wandb.init(
            project="mtptrain",
            group=str(config.run_dir),
            job_type=job_type,
            dir=directory,
            config=hide_passwords(asdict(config)),
            settings={"silent": True},
        )


def curves(metrics: dict[str, object]) -> dict[str, object]:
    """Returns the metrics that have data, with lists over depths split into one number each, which wandb can plot."""
    numbers: dict[str, object] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            numbers |= {f"{name.removesuffix('_at')}/depth_{depth}": each for depth, each in enumerate(value)}
        else:
            numbers[name] = value
    return {name: number for name, number in numbers.items() if number is not None}


def track_report(directory: Path, config: PipelineConfig, figures: dict[str, object], files: Sequence[Path]) -> None:
    """Log an acceptance report to wandb, in the group of the training run; warn if that fails."""
    import wandb

    try:
        run = start_wandb(directory, config, "acceptance")
        run.log(curves(figures))
        artifact = wandb.Artifact(f"report-{run.id}", type="report")
        for file in files:
            artifact.add_file(str(file))
        run.log_artifact(artifact)
        run.finish()
    except (wandb.Error, ValueError) as error:  # a UserError of `start_wandb` is a ValueError
        print(f"warning: the report is not logged to wandb: {error_summary(error)}")


class StepMeter:
    """Measures throughput and the time spent in each phase since the last call of `read` or `restart`."""

    def __init__(self, device: torch.device, clock: PhaseClock, flops: StepFlops, peak_flops: float) -> None:
        self.device, self.clock, self.flops, self.peak_flops = device, clock, flops, peak_flops
        self.restart()

    def restart(self) -> None:
        self.clock.read()
        self._started = self._step_ended = time.perf_counter()
        self._data_wait_s, self._tokens, self._drafts, self._flops = 0.0, 0, 0, 0.0

    def data_arrived(self) -> None:
        self._data_wait_s += time.perf_counter() - self._step_ended

    def step_done(self, batches: Sequence[Batch]) -> None:
        self._tokens += sum(batch.document_tokens for batch in batches)
        self._drafts += sum(batch.num_draft_positions for batch in batches)
        self._flops += sum(self.flops.of(batch.packing) for batch in batches)
        self._step_ended = time.perf_counter()

    def read(self, ranks: Ranks) -> dict[str, float]:
        """Returns the measurements since the last restart, summed over all ranks, and restarts.

        Tokens are those of whole documents. The MFU is the required FLOPs divided by those possible at the matmul peak,
        or at the fastest rate so far if that is higher. `peak_bytes` is of the rank with the highest memory use.
        """
        phases = self.clock.read()
        seconds = time.perf_counter() - self._started
        # The host may wait for data while a GPU still runs queued kernels, so only time outside all phases counts.
        data_wait_s = min(self._data_wait_s, max(0.0, seconds - sum(phases.values())))
        counts = [self._tokens, self._drafts, self._flops, data_wait_s, *(phases.get(name, 0.0) for name in PHASES)]
        tokens, drafts, flops, data_wait_s, *phase_s = ranks.sum(
            torch.tensor(counts, dtype=torch.float64, device=self.device)
        ).tolist()
        self.restart()
        rank_seconds = seconds * ranks.world_size
        self.peak_flops = max(self.peak_flops, flops / rank_seconds)  # a rate that was reached is possible
        return {
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "draft_positions_per_s": drafts / seconds,
            "data_wait_share": data_wait_s / rank_seconds,
            **{f"{name}_share": spent / rank_seconds for name, spent in zip(PHASES, phase_s, strict=True)},
            "mfu": flops / (rank_seconds * self.peak_flops),
            "peak_bytes": float(max(ranks.gather(peak_bytes(self.device)))),
        }


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Tracer:
    """Writes a trace of the sixth, seventh and eighth step of this process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=4, warmup=1, active=3, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        )
        self._profiler.start()

    def step_done(self) -> None:
        self._profiler.step()

    def close(self) -> None:
        self._profiler.stop()
        if (num_steps := self._profiler.step_num) < 6:
            self._path.unlink(missing_ok=True)  # after five steps, `stop` wrote a trace of the sixth, which never began
            ProgressBar.write(
                f"train.profile: this process must make at least six steps for {self._path}, a trace of its sixth "
                f"to eighth step, but made {num_steps}; train for more steps"
            )
