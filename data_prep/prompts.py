"""Stage 1: tokenize files or conversations, and write token ids and loss masks to `run_dir/prompts/`.

Reads the target's tokenizer and `prompts.paths`, or `run_dir/responses/` with `prompts.source=responses`; writes
train.safetensors, validation.safetensors, documents.jsonl, report.json and, last, manifest.json.

    mtptrain prompts recipe=quickstart
"""

from collections.abc import Mapping
from dataclasses import asdict

from mtptrain.config import PipelineConfig, PromptsConfig
from mtptrain.data.chat_template import require_chat_template
from mtptrain.data.identity import TokenizerIdentity
from mtptrain.data.prompt_files import SCHEMA_VERSION, DocumentEntry, Documents, PromptsManifest, Split, is_held_out
from mtptrain.run import Run
from mtptrain.run_dir import write_provenance, writing
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json

from .prompt_sources import Source, read_source
from .prompt_windows import collect_windows
from .prompts_report import DuplicatesReport, PromptsReport, SplitReport, group_refusals, has_drafts, print_report


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
    prompts, vocab_size, tokenizer = run.config.prompts, int(run.target.config.vocab_size), run.target.tokenizer
    source = read_source(prompts, run.target, run.stage_dir("responses"))
    check_source(source, prompts)

    report = PromptsReport(
        source=prompts.source,
        items=len(source.names) + len(source.refused),
        duplicates=DuplicatesReport.of(source.groups, source.clusters, prompts.validation_fraction),
        passed_over=sorted(source.passed_over),
        is_dated=prompts.source.is_chat and "strftime_now" in require_chat_template(tokenizer),
    )
    collector, refused = collect_windows(source, prompts, vocab_size, report)
    splits = {split: collector.documents(split) for split in Split}
    report.splits = {split: SplitReport.of(documents) for split, documents in splits.items()}
    report.refused = group_refusals(refused)
    if not collector.windows and not collector.is_full:
        raise UserError(
            "prompts.paths: conversations must have an answer to learn from, after exactly the prompt that a server "
            f"sends, but with the chat template of {tokenizer.name_or_path} none of {report.items:,} has one: "
            f"{report.windows_unsupervised} windows without a supervised token{_reasons(report)}; correct the data or "
            "the template, or let the target answer (mtptrain responses, prompts.source=responses)"
        )
    check_splits(splits, report, prompts)

    stage_dir = run.stage_dir("prompts")
    write_provenance(stage_dir, run.config, "manifest.json")
    for split, documents in splits.items():
        documents.save(stage_dir / split.filename)
    DocumentEntry.write_all(stage_dir, [entry for entry, _ in collector.windows])
    write_json(stage_dir / "report.json", asdict(report))
    train, validation = splits[Split.train], splits[Split.validation]
    PromptsManifest(
        schema_version=SCHEMA_VERSION,
        tokenizer=TokenizerIdentity.of(tokenizer, run.target.template_kwargs_json),
        vocab_size=vocab_size,
        max_document_tokens=prompts.max_document_tokens,
        train_documents=len(train),
        train_tokens=len(train.input_ids),
        validation_documents=len(validation),
        validation_tokens=len(validation.input_ids),
    ).write(stage_dir)
    return report


def check_source(source: Source, prompts: PromptsConfig) -> None:
    """Raise before the expensive work if there is no document, or if a split would be empty."""
    if not source.names:  # rows without a usable one have been refused, file by file
        counted = "".join(f", {each.count} refused ({each.reason})" for each in group_refusals(source.refused))
        raise UserError(
            f"prompts.paths: must hold at least one file with text that matches {prompts.pattern!r}, but "
            f"{', '.join(prompts.paths)} holds none{counted}; correct the paths, prompts.pattern or the data"
        )
    num_held_out = sum(is_held_out(cluster, prompts.validation_fraction) for cluster in source.clusters)
    for split, count in ((Split.validation, num_held_out), (Split.train, len(source.clusters) - num_held_out)):
        if not count:
            num_clusters = len(set(source.clusters))
            is_fewer = num_clusters < len(source.names)
            shared = f" (different questions, near-duplicates left out: {num_clusters:,})" if is_fewer else ""
            raise _empty_split(split, f": none of {len(source.names):,} documents{shared} belongs to it", prompts)


def check_splits(splits: Mapping[Split, Documents], report: PromptsReport, prompts: PromptsConfig) -> None:
    for split, documents in splits.items():
        if not len(documents):
            left_out = f"{report.windows_unsupervised} windows without a supervised token{_reasons(report)}"
            raise _empty_split(split, f": {left_out}", prompts)
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


def _reasons(report: PromptsReport) -> str:
    return "".join(f", {group.count} refused ({group.reason})" for group in report.refused)
