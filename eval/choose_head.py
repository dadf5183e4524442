"""After stage 3: measures the heads that training kept without measuring them, and chooses the best.

With `train.validation_prompts=0`, as for targets too large for validation, training keeps a head every
`train.validate_every` steps, and the last one, in `run_dir/train/heads/`. These, and the best head of an earlier
measurement, are measured on the prompts of validation, by default as many. Writes `run_dir/train/best/` and
`run_dir/train/choice.json`, and prints a table.

    mtptrain choose-head recipe=llama3_3_70b_mtp
"""

from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file

from mtptrain.cli import tables
from mtptrain.config import PipelineConfig, TrainConfig
from mtptrain.decoding.prompts import HeldOut, held_out_documents
from mtptrain.heads.files import (
    CHOICE,
    RESTORE,
    WEIGHTS,
    check_head_target,
    checked_weights,
    kept_heads,
    save_head,
    stored_config,
)
from mtptrain.init_from.start import load_head
from mtptrain.run_dir import Run
from mtptrain.stage_dir import StageDir
from mtptrain.training.validation import Validated, Validation, measured_with
from mtptrain.utils.distributed import Ranks, init_ranks
from mtptrain.utils.errors import StageMissing, UserError
from mtptrain.utils.figures import shown
from mtptrain.utils.files import file_sha256, read_sealed, write_sealed
from mtptrain.utils.startup import command


def main(config: PipelineConfig) -> None:
    with StageDir(config.stage_dir("train")).writing() as stage_dir:
        choose(config, init_ranks(config.distributed_timeout_hours), stage_dir)


def choose(config: PipelineConfig, ranks: Ranks, stage_dir: Path) -> None:
    """Measure the kept heads on all ranks, and keep the best one."""
    heads = heads_to_measure(stage_dir)
    measured = measure(config, heads, ranks)
    if ranks.is_first:
        # Among equal heads, max returns the first, which is also the one that training would keep.
        if all(each.acceptance.acceptance_length is None for each in measured.values()):
            raise UserError(
                "train.validation_new_tokens: an answer to a held-out prompt must be long enough for a draft, by which "
                f"heads differ, but none is with {config.train.validation_new_tokens} tokens at most; raise it"
            )
        best_step = max(measured, key=lambda step: measured[step].acceptance.acceptance_length or 0.0)
        best = heads[best_step]
        facts = read_sealed(best / "head.json", RESTORE) | measured[best_step].record()
        del facts["head"]
        save_head(stage_dir / "best", load_file(checked_weights(best)), stored_config(best), facts)
        choice = {
            "command": command(),
            "best_step": best_step,
            **measured_with(config.acceptance, config.train.validation_new_tokens),
            "heads": [{"step": step, **asdict(each.acceptance), **each.record()} for step, each in measured.items()],
        }
        write_sealed(stage_dir / CHOICE, choice)
        print_table(config, measured, best_step)
        print(f"best head: {stage_dir / 'best'}, from step {best_step}; measurements: {stage_dir / CHOICE}")


def heads_to_measure(stage_dir: Path) -> dict[int, Path]:
    """Returns the directories of the kept heads by step, and that of the best head so far if there is one."""
    heads = kept_heads(stage_dir)
    if not heads:
        raise StageMissing(
            f"{stage_dir / 'heads'}: must hold the heads to choose from, but holds none; run mtptrain train with the "
            "same recipe and run_dir, train.validation_prompts=0 and train.validate_every=N, which keeps the head "
            f"every N steps; if training has already ended, first delete {stage_dir / 'checkpoints'}"
        )
    for step, directory in heads.items():
        if (stored := read_sealed(directory / "head.json", RESTORE, ["step"])["step"]) != step:
            raise UserError(f"{directory}: must be the folder of step {stored}, but was renamed; rename it back")
    best = stage_dir / "best/head.json"
    facts = read_sealed(best, RESTORE) if best.is_file() else {}
    if "acceptance_length" in facts:
        kept = heads.setdefault(facts["step"], best.parent)
        if file_sha256(kept / WEIGHTS) != file_sha256(best.with_name(WEIGHTS)):
            raise UserError(
                f"{best.parent}: must be the same head as {kept}, which is of the same step, but has other weights; "
                "move one of the two away"
            )
    return dict(sorted(heads.items()))


def measure(config: PipelineConfig, heads: dict[int, Path], ranks: Ranks) -> dict[int, Validated]:
    """Returns the figures of every head by step. All heads must belong to the target, which is loaded once."""
    run, num_prompts = Run(config), config.train.validation_prompts or TrainConfig.validation_prompts
    documents = held_out_documents(config.stage_dir("prompts"), HeldOut.choosing)
    validation = Validation(documents, num_prompts, run.head, config.train, config.acceptance, run.target, ranks)
    for directory in heads.values():
        check_head_target(directory, run.target)
    measured = {}
    for number, (step, directory) in enumerate(heads.items(), 1):
        _, head = load_head(str(directory), run.head, run.target, validation.dtype, ranks.device)
        description = f"head of step {step}, {number} of {len(heads)}" if ranks.is_first else None
        measured[step] = validation.measure_head(head, description)
    return measured


def print_table(config: PipelineConfig, measured: dict[int, Validated], best_step: int) -> None:
    acceptance = measured[best_step].acceptance
    rows = [
        (
            f"{step:,}",
            shown(validated.acceptance.acceptance_length),
            "" if validated.held_out is None else shown(validated.held_out.kl_at[0]),
            "best" if step == best_step else "",
        )
        for step, validated in measured.items()
    ]
    title = f"{acceptance.prompts} held-out prompts, greedy, K={len(acceptance.accepted_at)}"
    tables.print_table(title, ("step", "acceptance length", "held-out KL of depth 0", ""), rows)
