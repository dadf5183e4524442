"""Stage 3: fit a head to the stored hidden states.

Reads `run_dir/hidden_states/`, `run_dir/prompts/` (to identify the prompts of the hidden states, for validation, and
with `train.stream` for document lengths and loss masks), and `run_dir/draft_vocab/` if the head has a draft vocabulary
and no `head.init_from`.

Writes `run_dir/train/`: `metrics.jsonl`, `checkpoints/`, `last/` and `best/` (the head with the highest measured
acceptance length). With `train.validation_prompts=0` nothing is measured and there is no `best/`; with
`train.validate_every` above 0 training then writes `heads/`, from which `mtptrain choose-head` chooses the best.

    mtptrain train recipe=quickstart
    torchrun --nproc-per-node 8 -m mtptrain train recipe=llama3_1_8b_mtp train.lr=1e-4

On SIGTERM or SIGUSR1, training finishes the current step, saves a checkpoint and exits with code 75 (torchrun itself
exits with 1). The same command resumes from there.
"""

import os
import signal
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mtptrain.config import PipelineConfig, PromptSource, Tracker, TrainConfig
from mtptrain.data.draft_vocab import initialise_own_vocabulary, require_draft_vocab
from mtptrain.data.identity import StoreIdentity
from mtptrain.data.prompt_files import Split, training_data_facts
from mtptrain.decoding.prompts import HeldOut, check_document_lengths, held_out_documents
from mtptrain.engines.table import warn_of_limits
from mtptrain.heads import HEADS
from mtptrain.heads.base import Head
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.files import (
    CHOICE,
    TARGET_WEIGHTS,
    build_head,
    kept_head,
    refuse_earlier_best,
    remove_stale_heads,
    save_head,
)
from mtptrain.hidden_states.store import HiddenStates, HiddenStore
from mtptrain.hidden_states.stream import StreamedStates
from mtptrain.init_from.from_target import start_from_target
from mtptrain.init_from.start import check_one_start, load_init
from mtptrain.planning.costs import step_flops
from mtptrain.run_dir import Run, become_cpu_ranks
from mtptrain.settings.precision import announce_precision, train_dtype
from mtptrain.stage_dir import StageDir
from mtptrain.target.frozen_parts import FrozenParts, load_frozen_parts
from mtptrain.training.batches import BatchSchedule
from mtptrain.training.checkpoint import (
    MARKER,
    NUM_STEPS,
    OLDER,
    Progress,
    check_checkpoint,
    describe_newest,
    load_checkpoint,
    newest_whole_checkpoint,
    resume_facts,
    save_checkpoint,
    step_of,
)
from mtptrain.training.deepspeed_engine import check_deepspeed, check_device
from mtptrain.training.flops import matmul_peak
from mtptrain.training.metrics import StepMeter, Tracer, Tracking, start_wandb
from mtptrain.training.optimizer import warn_of_rate
from mtptrain.training.summary import in_progress_bar, print_summary
from mtptrain.training.trainer import Trainer, check_batch_ranks, is_compiled, learning_rate, warmup_of
from mtptrain.training.validation import Validation
from mtptrain.utils.distributed import EXIT_STOPPED, Ranks, StopSignal, init_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.figures import shown
from mtptrain.utils.files import read_sealed
from mtptrain.utils.progress import ProgressBar

CHECKPOINTS = "checkpoints"


def main(config: PipelineConfig) -> None:
    # Tensor sizes differ from step to step, which fragments GPU memory. Torch reads this when it first uses a GPU. Only
    # training sets it: vLLM's workers would inherit it, and they cannot share memory in expandable segments.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))
    run = Run(config)
    try:
        with StageDir(config.stage_dir("train")).writing():
            become_cpu_ranks(run, config.acceptance.dtype, divides=config.train.micro_batches_per_step)
            ranks = init_ranks(config.distributed_timeout_hours)
            stop = StopSignal(ranks)
            training = prepare(run, ranks, stop)
            progress = fit(training, ranks, stop)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(describe_newest(config.stage_dir("train") / CHECKPOINTS)) from None
    if progress.step < training.num_steps:
        sys.exit(EXIT_STOPPED)
    if ranks.is_first:
        print_summary(training.stage_dir, progress, config.train)


@dataclass
class Training:
    config: PipelineConfig
    states: HiddenStates
    schedule: BatchSchedule
    num_steps: int
    trainer: Trainer
    meter: StepMeter
    validation: Validation | None
    """None if `train.validation_prompts` is 0."""
    progress: Progress
    resume_facts: dict[str, object]
    head_facts: dict[str, object]
    """Facts saved with every head: the sha256 of its target's weights, the seed, the chat template's arguments, and
    `data_facts`."""

    @property
    def stage_dir(self) -> Path:
        return self.config.stage_dir("train")


def prepare(run: Run, ranks: Ranks, stop: StopSignal) -> Training:
    """Check every input, then build the engine, load the newest whole checkpoint, and remove what is newer than it."""
    config, checkpoints = replace(run.config, head=run.head), run.stage_dir("train") / CHECKPOINTS
    # 1. Refuse settings that cannot work, before anything is loaded.
    check_batch_ranks(config.train.micro_batches_per_step, ranks.world_size)
    check_deepspeed(config.deepspeed)
    check_device(ranks.device, config.deepspeed)
    check_one_start(config.head)
    # 2. Build the head and initialise its weights.
    torch.manual_seed(config.seed)
    HEADS[config.head.name].check_trainable(config.head, run.target.config)
    head = build_head(config.head, run.target.config)
    if ranks.is_first:
        warn_of_rate(config.train)
        warn_of_limits(config.export.engine, config.head, run.target.config, run.target.gguf)
    run.prompts_file(Split.train)  # so that an error names stage 1 if both its files and those of stage 2 are missing
    if config.head.init_from is None and head.d2t is not None:
        require_draft_vocab(run.stage_dir("draft_vocab"))
    identity = run.identity(head.capture_layers)
    parts = load_frozen_parts(run.target.directory)
    with warnings.catch_warnings():
        if not ranks.is_first:
            warnings.simplefilter("ignore")  # the first rank warns for all
        initialise(run, head, parts, identity.prompts_sha256)  # refuses other settings than those of its start
    if ranks.is_first:
        run.announce_mask_token()
    # 3. Open the hidden states, and find the checkpoint to resume from.
    states = open_states(run, identity, ranks, stop)
    check_document_lengths(int(states.document_lengths.max()), head.context_tokens, "draft model")
    facts = resume_facts(config.head, config.train, config.seed, states, head)
    checkpoint = newest_whole_checkpoint(checkpoints, ranks)
    if checkpoint is not None:
        check_checkpoint(checkpoint, facts)
    elif ranks.is_first:
        warn_of_lost_checkpoints(run.stage_dir("train"))
    # 4. Choose the validation prompts and pack the documents into steps.
    validation = None
    if num_prompts := config.train.validation_prompts:
        documents = held_out_documents(run.stage_dir("prompts"), HeldOut.choosing)
        validation = Validation(documents, num_prompts, config.head, config.train, config.acceptance, run.target, ranks)
    if checkpoint is None and validation is None and not config.train.validate_every:
        refuse_earlier_best(run.stage_dir("train"))
    schedule = BatchSchedule(
        states,
        config.head.ttt_steps,
        config.train.batch_tokens,
        config.train.micro_batches_per_step,
        config.seed,
        for_gpu=ranks.device.type == "cuda",
        drafts_per_document=head.drafts_per_document,
        window=head.shared_window,
    )
    states.set_steps(schedule.first_epoch)
    num_steps = count_steps(config.train, schedule.steps_per_epoch)
    if checkpoint is not None and step_of(checkpoint) > num_steps:
        raise UserError(
            f"train.max_steps: must be at least {step_of(checkpoint)}, the step of {checkpoint}, but the settings ask "
            f"for {num_steps} steps; set train.max_steps={step_of(checkpoint)}, or another run_dir"
        )
    if checkpoint is not None and ranks.is_first:
        warn_of_other_schedule(checkpoint, config.train, num_steps)
    if ranks.is_first:
        announce_precision("deepspeed", train_dtype(config.deepspeed))
        if (warmup := warmup_of(config.train, num_steps)) < config.train.warmup_steps:
            print(f"train.warmup_steps: {warmup} of the {num_steps} steps, as train.warmup_share says")
        StageDir(run.stage_dir("train")).record(run.config)
    ranks.barrier()
    # 5. Build the engine, and load the checkpoint into it.
    trainer = Trainer(head, parts, config.train, config.deepspeed, num_steps, ranks)
    progress = Progress() if checkpoint is None else load_checkpoint(trainer.engine, checkpoint)
    if ranks.is_first:
        remove_stale_heads(run.stage_dir("train"), progress.step)
    flops = step_flops(head, run.target.config, trainer.loss_settings)
    meter = StepMeter(ranks.device, trainer.clock, flops, matmul_peak(ranks.device, trainer.dtype))
    head_facts: dict[str, object] = {
        TARGET_WEIGHTS: identity.target.weights_sha256,
        "seed": config.seed,
        "template_kwargs": run.target.template_kwargs_json,
        "data": data_facts(run) if ranks.is_first else {},
    }
    states.release(progress.step, progress.step == num_steps, ranks.is_first)
    return Training(config, states, schedule, num_steps, trainer, meter, validation, progress, facts, head_facts)


def data_facts(run: Run) -> dict[str, object]:
    """Returns facts of the training data for `head.json`, with the sampling of answers that the target wrote."""
    source, given = run.config.prompts.source, vars(run.config.responses)
    sampling = run.target.generation.sampled_with({name: given[name] for name in ("temperature", "top_p", "top_k")})
    of_target = sampling if source is PromptSource.responses else None
    return {"source": source, "sampling": of_target, **training_data_facts(run.documents(Split.train))}


def open_states(run: Run, identity: StoreIdentity, ranks: Ranks, stop: StopSignal) -> HiddenStates:
    """Opens the finished hidden states, or with `train.stream` waits for those that are being written."""
    directory, settings = run.stage_dir("hidden_states"), run.config.train
    if not settings.stream:
        return HiddenStore.open(directory, identity)
    documents, shard_tokens = run.documents(Split.train), run.config.hidden_states.shard_tokens
    return StreamedStates.open(
        directory, identity, documents, shard_tokens, settings.stream_shards, run.config.seed, ranks, stop
    )


def warn_of_lost_checkpoints(stage_dir: Path) -> None:
    """Say that training starts again although a head of this run exists, as after its checkpoints were removed."""
    if (last := stage_dir / "last").joinpath("head.json").is_file():
        print(
            f"WARNING {last}: must have a checkpoint beside it from which training resumes, but has none; training "
            "starts from step 0 and will replace this head"
        )


def warn_of_other_schedule(checkpoint: Path, settings: TrainConfig, num_steps: int) -> None:
    """Say what a run that resumes with another number of steps does to the learning rate, which depends on it."""
    step, former = step_of(checkpoint), read_sealed(checkpoint / MARKER, OLDER).get(NUM_STEPS, num_steps)
    if former != num_steps:
        before, now = (learning_rate(settings, step, steps) for steps in (former, num_steps))
        print(
            f"WARNING train.max_steps, train.epochs: {checkpoint} is of a schedule of {former:,} steps, but this run "
            f"has {num_steps:,}, to whose end the learning rate now falls: step {step + 1:,} has {now:.3g} instead of "
            f"{before:.3g}"
        )


def initialise(run: Run, head: Head, parts: FrozenParts, prompts_sha256: str) -> None:
    """Replace a head's random weights, in whole or in part, with the initial weights that its settings ask for."""
    settings = run.head
    if settings.start_from_target:
        start_from_target(head, run.target)
    if settings.init_from is not None:
        head.load_state_dict(load_init(settings.init_from, settings, run.target)[1])
    elif not isinstance(head, DraftModelHead):
        initialise_own_vocabulary(head, parts, run.stage_dir("draft_vocab"), prompts_sha256)


def count_steps(settings: TrainConfig, steps_per_epoch: int) -> int:
    """Returns the number of steps of the run, which with `train.stream` may need one epoch at most."""
    num_steps = settings.max_steps or settings.epochs * steps_per_epoch
    if settings.stream and num_steps > steps_per_epoch:
        raise UserError(
            f"train.max_steps: must be at most {steps_per_epoch}, the steps of one epoch, with train.stream=true, but "
            f"is {num_steps}; lower it, or set train.stream=false"
        )
    return num_steps


def fit(training: Training, ranks: Ranks, stop: StopSignal) -> Progress:
    """Train until the last step or until a signal arrives. Returns the progress at which the run stopped."""
    stage_dir, settings, progress = training.stage_dir, training.config.train, training.progress
    tracking = None
    if ranks.is_first:
        has_wandb = settings.tracker is Tracker.wandb
        in_wandb = start_wandb(stage_dir, training.config, "train") if has_wandb else None
        tracking = Tracking(stage_dir, progress.step, in_wandb)
    bar = ProgressBar(
        total=training.num_steps, initial=progress.step, desc="train", unit="step", disable=not ranks.is_first
    )
    tracer = Tracer(stage_dir / f"trace_{ranks.rank}.json") if settings.profile else None
    postfix: dict[str, str] = {}
    # 1. Wait for the states of the first step, if they are streamed.
    stopped_by = wait_for_states(training, progress.step, ranks, stop)
    is_compiling = progress.step < training.num_steps and is_compiled(
        settings.compile, ranks.device, training.num_steps
    )
    if ranks.is_first and not stopped_by and is_compiling:
        ProgressBar.write(
            "train: compiling the first step, one or two minutes on a CPU; train.compile=false switches it off"
        )
    training.meter.restart()
    last_step = progress.step if stopped_by else training.num_steps
    for batches in training.schedule.prefetch(progress.step, last_step, ranks.rank, ranks.world_size):
        # 2. Make a step.
        training.meter.data_arrived()
        metrics = training.trainer.step(batches)
        training.meter.step_done(batches)
        if tracer is not None:
            tracer.step_done()
        progress = Progress(progress.step + 1, progress.best_acceptance_length)
        if is_compiling and progress.step == training.progress.step + 1:
            bar.unpause()  # the time of compiling says nothing of the steps that are left
        bar.update()
        # 3. Decide what follows the step.
        is_last = progress.step == training.num_steps
        stopped_by = None if is_last else stop.agreed()
        frees_disk = training.states.frees_disk_after(progress.step)
        is_validated = is_last or is_due(progress.step, settings.validate_every)
        is_saved = is_last or stopped_by or frees_disk or is_due(progress.step, settings.save_every)
        # 4. Record the metrics since the last record, and check the new weights before they are kept.
        if is_saved or is_validated or is_due(progress.step, settings.log_every):
            record = training.trainer.describe(metrics, progress.step) | training.meter.read(ranks)
            bar.set_postfix(postfix := postfix | in_progress_bar(record))
            if tracking is not None:
                tracking.write(progress.step, record)
        if ranks.is_first and is_validated and training.validation is not None:
            ProgressBar.write(
                f"step {progress.step}: measuring the head on {training.validation.num_prompts} held-out prompts"
            )
        if is_saved or is_validated:
            training.trainer.check_weights(progress.step, batches)
        # 5. Measure the head, or keep it to be measured later.
        if is_validated:
            progress, entries = measure_or_keep(training, progress, tracking)
            postfix |= entries
            training.meter.restart()
        # 6. Save a checkpoint, after which a streamed store can free disk space.
        if is_saved:
            save(training, progress, ranks)
            training.states.release(progress.step, is_last, ranks.is_first)
            training.meter.restart()
        # 7. Wait for the next step's states. Do so after the release, because extraction may need the freed disk space.
        stopped_by = stopped_by or wait_for_states(training, progress.step, ranks, stop)
        if stopped_by and not is_saved:
            training.trainer.check_weights(progress.step, batches)
            save(training, progress, ranks)
        if stopped_by:
            break
    if stopped_by and ranks.is_first and progress.step > training.progress.step:  # it made a step
        ProgressBar.write(
            f"step {progress.step}: {stopped_by.name}, checkpoint saved; the same command continues from it"
        )
    bar.close()
    for closed in (tracer, tracking):
        if closed is not None:
            closed.close()
    return progress


def wait_for_states(training: Training, step: int, ranks: Ranks, stop: StopSignal) -> signal.Signals | None:
    """Wait until the states of step `step` (from 0) exist. Returns the signal if a rank received one meanwhile."""
    return None if step >= training.num_steps else training.states.wait_for(step, ranks, stop)


def save(training: Training, progress: Progress, ranks: Ranks) -> None:
    directory, keep = training.stage_dir / CHECKPOINTS, training.config.train.keep_checkpoints
    facts = training.resume_facts | {NUM_STEPS: training.num_steps}
    save_checkpoint(training.trainer.engine, directory, progress, facts, keep, ranks)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def measure_or_keep(
    training: Training, progress: Progress, tracking: Tracking | None
) -> tuple[Progress, dict[str, str]]:
    """Measure the head's acceptance on all ranks, or keep it to be measured later. Returns the run's progress, and
    entries for the progress bar.

    Rank 0 saves the head as `last`. It also saves it as `best` if its acceptance length is the highest so far or, if
    nothing is measured and `train.validate_every` is above 0, in `heads`.
    """
    stage_dir, head_state = training.stage_dir, training.trainer.engine.module.state_dict()
    directories, best = [stage_dir / "last"], progress.best_acceptance_length
    entries: dict[str, str] = {}
    facts: dict[str, object] = {"step": progress.step, **training.head_facts}
    if training.validation is not None:
        validated = training.validation.measure(
            head_state, None if tracking is None else f"validation{training.validation.ranks.label}"
        )
        acceptance, length = validated.acceptance, validated.acceptance.acceptance_length
        entries = {"acceptance": shown(length)}
        if is_best := (length or 0.0) > best:
            best = length or 0.0
            directories.append(stage_dir / "best")
        if tracking is not None:
            tracking.write(progress.step, measured := validated.record())
            facts |= measured
            ProgressBar.write(
                f"step {progress.step}: acceptance length {shown(length) or 'not measured, since no round had a draft'}"
                f" ({acceptance.prompts} held-out prompts, greedy, K={len(acceptance.accepted_at)})"
                f"{', the best so far' if is_best else ''}"
            )
            if is_best:
                (stage_dir / CHOICE).unlink(missing_ok=True)  # it names the head that is replaced
    elif training.config.train.validate_every:
        directories.append(kept_head(stage_dir, progress.step))
    if tracking is not None:
        for directory in directories:
            save_head(directory, head_state, training.config.head, facts)
    return Progress(progress.step, best), entries
