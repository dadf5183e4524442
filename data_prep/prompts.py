"""Stage 1: tokenize files or conversations, and write token ids and loss masks to `run_dir/prompts/`.

Reads the target's tokenizer and `prompts.paths`, or `run_dir/responses/` with `prompts.source=responses`; writes
train.safetensors, validation.safetensors, documents.jsonl, report.json and, last, manifest.json.

    mtptrain prompts recipe=quickstart
"""

from collections.abc import Mapping
from dataclasses import asdict

from transformers import PreTrainedTokenizerBase

from mtptrain.config import PipelineConfig, PromptsConfig
from mtptrain.data.chat_template import require_chat_template
from mtptrain.data.identity import TokenizerIdentity
from mtptrain.data.prompt_files import SCHEMA_VERSION, DocumentEntry, Documents, PromptsManifest, Split, is_held_out
from mtptrain.run import Run
from mtptrain.run_dir import write_provenance, writing
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json

from .assistant_masks import empty_mask_error
from .prompt_sources import Source, read_source
from .prompt_windows import Collector, collect_windows
from .prompts_report import (
    DuplicatesReport,
    PromptsReport,
    RewrittenReport,
    SplitReport,
    group_refusals,
    has_drafts,
    print_report,
)
from .renderings import NO_ANSWER


def main(config: PipelineConfig) -> None:
    with writing(config.stage_dir("prompts")):
        report = prepare_prompts(Run(config))
    print_report(report)
    print(f"written to {config.stage_dir('prompts')}")


def prepare_prompts(run: Run) -> PromptsReport:
    """Read, tokenize, split and write the prompts.

    Raises:
        UserError: one of these is true.
            - The target, a directory, a file or a hub data set does not exist, or no file matches.
            - A file has an unknown format.
            - The tokenizer belongs to another model, or its chat template is missing or fails.
            - No token is supervised, no answer is long enough for a draft, or a split would be empty.
            - `run_dir/prompts` holds files of somebody else.
    """
    config, vocab_size, tokenizer = run.config, int(run.target.config.vocab_size), run.target.tokenizer
    source = read_source(config.prompts, run.target, run.stage_dir("responses"))
    check_source(source, config.prompts)

    collector = collect_windows(source, config.prompts, vocab_size)
    check_any_supervised(collector, tokenizer)
    splits = {split: collector.documents(split) for split in Split}
    check_splits(splits, collector, config.prompts)
    is_dated = config.prompts.source.is_chat and "strftime_now" in require_chat_template(tokenizer)

    stage_dir = run.stage_dir("prompts")
    write_provenance(stage_dir, config, "manifest.json")
    for split, documents in splits.items():
        documents.save(stage_dir / split.filename)
    DocumentEntry.write_all(stage_dir, [entry for entry, _ in collector.windows])
    report = make_report(source, config.prompts, splits, collector, is_dated)
    write_json(stage_dir / "report.json", asdict(report))
    train, validation = splits[Split.train], splits[Split.validation]
    PromptsManifest(
        schema_version=SCHEMA_VERSION,
        tokenizer=TokenizerIdentity.of(tokenizer, run.target.template_kwargs_json),
        vocab_size=vocab_size,
        max_document_tokens=config.prompts.max_document_tokens,
        train_documents=len(train),
        train_tokens=len(train.input_ids),
        validation_documents=len(validation),
        validation_tokens=len(validation.input_ids),
    ).write(stage_dir)
    return report


def check_source(source: Source, prompts: PromptsConfig) -> None:
    """Raise before the expensive work if there is no document, or if a split would be empty."""
    if not source.names:  # rows without a usable one have been refused, file by file
        raise UserError(
            f"prompts.paths: must hold at least one file with text that matches {prompts.pattern!r}, but "
            f"{', '.join(prompts.paths)} holds none{_reasons(source.refused)}; correct the paths, prompts.pattern or "
            "the data"
        )
    num_held_out = sum(is_held_out(cluster, prompts.validation_fraction) for cluster in source.clusters)
    for split, count in ((Split.validation, num_held_out), (Split.train, len(source.clusters) - num_held_out)):
        if not count:
            num_clusters = len(set(source.clusters))
            is_fewer = num_clusters < len(source.names)
            shared = f" (different questions, near-duplicates left out: {num_clusters:,})" if is_fewer else ""
            raise _empty_split(split, f": none of {len(source.names):,} documents{shared} belongs to it", prompts)


def check_any_supervised(collector: Collector, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise if no token is supervised, since training would then have zero loss."""
    if collector.windows or collector.is_full:
        return
    if not collector.windows_unsupervised and set(collector.refused.values()) == {NO_ANSWER}:
        raise UserError(
            "prompts.paths: conversations must have an assistant turn to learn from, but none of "
            f"{len(collector.refused):,} has one (the first is {next(iter(collector.refused))}); choose data with "
            "answers, or let the target answer: run mtptrain responses and set prompts.source=responses"
        )
    if not collector.windows_unsupervised and not any("chat template" in why for why in collector.refused.values()):
        raise UserError(
            "prompts.paths: conversations must have an answer to learn from, but none of "
            f"{len(collector.refused):,} has one that can be used{_reasons(collector.refused)}; correct the data, or "
            "let the target answer: run mtptrain responses and set prompts.source=responses"
        )
    reason = f"{collector.windows_unsupervised} windows without a supervised token{_reasons(collector.refused)}"
    raise empty_mask_error(tokenizer, reason)


def check_splits(splits: Mapping[Split, Documents], collector: Collector, prompts: PromptsConfig) -> None:
    for split, documents in splits.items():
        if not len(documents):
            reasons = _reasons(collector.refused)
            raise _empty_split(
                split, f": {collector.windows_unsupervised} windows without a supervised token{reasons}", prompts
            )
    train = splits[Split.train]
    if not any(has_drafts(train.mask(i)) for i in range(len(train))):
        raise UserError(
            "prompts: the train split must hold a document in which two generated tokens follow another token, since a "
            f"head drafts from the second on, but none of its {len(train):,} documents does with "
            f"prompts.max_document_tokens={prompts.max_document_tokens}; add data with longer answers"
        )


def _empty_split(split: Split, reason: str, prompts: PromptsConfig) -> UserError:
    return UserError(
        f"prompts: the {split} split must hold at least one document, but holds none with "
        f"prompts.validation_fraction={prompts.validation_fraction} and "
        f"prompts.max_train_tokens={prompts.max_train_tokens}{reason}; add data or change these settings"
    )


def _reasons(refused: Mapping[str, str]) -> str:
    return "".join(f", {group.count} refused ({group.reason})" for group in group_refusals(refused))


def make_report(
    source: Source,
    prompts: PromptsConfig,
    splits: Mapping[Split, Documents],
    collector: Collector,
    is_dated: bool,
) -> PromptsReport:
    rewritten = [window for entry, window in collector.windows if entry.turn]
    num_tokens = sum(len(window.input_ids) for window in rewritten)
    return PromptsReport(
        source=prompts.source,
        splits={split: SplitReport.of(documents) for split, documents in splits.items()},
        items_cut=collector.items_cut,
        windows_cut=collector.windows_cut,
        windows_unsupervised=collector.windows_unsupervised,
        rewritten=RewrittenReport(
            collector.answers_rewritten,
            len(rewritten),
            num_tokens,
            num_tokens - sum(int(window.loss_mask.sum()) for window in rewritten),
        ),
        duplicates=DuplicatesReport.of(source.groups, source.clusters, prompts.validation_fraction, collector.copies),
        answers_left_out=collector.answers_left_out,
        answers_untrained=collector.answers_untrained,
        answers_inserted=collector.answers_inserted,
        beyond_max_train_tokens=collector.beyond_max_train_tokens,
        refused=group_refusals(collector.refused),
        items=len(source.names) + len(source.refused),
        is_dated=is_dated,
    )
