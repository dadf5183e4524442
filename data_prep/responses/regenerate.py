"""Optional, before stage 1: regenerate the assistant turns of conversations with the target itself.

Reads the conversations of `prompts.paths`; writes `run_dir/responses/` (see data_prep/responses/store.py). With
`prompts.source=responses`, mtptrain prompts uses these instead of the original conversations. The target runs in an
engine that is started (`responses.engine`), in this process with transformers, or on a server at `responses.url`. An
interrupted run continues where it stopped. If conversations fail, the others are kept and the exit code is 1, so that a
script stops before the next stage. The next run retries the failed ones.

    torchrun --nproc-per-node 8 -m mtptrain responses recipe=R prompts.source=responses "prompts.paths=[chats.jsonl]"
    mtptrain responses recipe=R prompts.source=responses "prompts.paths=[chats.jsonl]" responses.url=URL
"""

import asyncio
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mtptrain.cli.stages import is_served
from mtptrain.config import AnsweringEngine, PipelineConfig, PromptSource, ResponsesConfig
from mtptrain.data.chat_template import render_prompt, require_chat_template
from mtptrain.data.conversation import ConversationRefused
from mtptrain.data.identity import TargetIdentity
from mtptrain.data.prompt_files import describe_refusals, group_refusals
from mtptrain.data.rows import RowFormat
from mtptrain.engines.table import running_engine
from mtptrain.run_dir import Run, become_cpu_ranks
from mtptrain.settings.precision import announce_precision
from mtptrain.stage_dir import StageDir
from mtptrain.target import generation
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import check_parts, check_weights
from mtptrain.target.loading import load_target
from mtptrain.target.served_chats import chats_elsewhere, end_of_turn
from mtptrain.utils.distributed import CPU_THREADS, Ranks, init_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.progress import ProgressBar

from ..conversations import Conversations, read_conversations
from ..prompts_report import print_counts
from .dialogue import Dialogue, RegeneratedConversation, Sampling, questions
from .engines import PROBE, choose_engine, concurrency_of, longest_tokens, start_engines
from .server import CompletionServer, RequestFailed
from .store import COUNTS, FAILURES, MANIFEST, ResponsesIdentity, ResponsesManifest, ResponsesStore, hash_sources
from .target import regenerate_with_target

MIN_FAILURES_TO_STOP = 16
"""With a server, the run stops after this many consecutive failures, or after twice `responses.concurrency` if that is
more."""
NEARLY_ALL = 0.9
"""The share of responses that may be cut without a warning."""


def main(config: PipelineConfig) -> None:
    run = Run(config)
    with StageDir(config.stage_dir("responses")).writing():
        if config.responses.url is None:
            choose_engine(run)
            if config.responses.engine is AnsweringEngine.transformers:
                become_cpu_ranks(run, config.responses.dtype)
        manifest = prepare_responses(run, init_ranks(config.distributed_timeout_hours))
    if manifest and manifest.failed:
        sys.exit(f"{manifest.failed:,} conversations failed; run mtptrain responses again to retry them")


def prepare_responses(run: Run, ranks: Ranks) -> ResponsesManifest | None:
    """Fill `run_dir/responses` with the missing responses, on all ranks. Returns the manifest on the first rank."""
    # 1. Check the settings, the target and the server.
    config, settings, prompts, target = run.config, run.config.responses, run.config.prompts, run.target
    if settings.url is None:
        choose_engine(run)
    check_settings(config, ranks)
    require_chat_template(target.tokenizer)
    check_parts(target.directory, check_weights(target.directory))  # a later stage would refuse them after hours
    sampling = sampling_of(settings, target, config.seed)
    for difference in chats_elsewhere(target) if ranks.is_first else ():
        warnings.warn(difference, stacklevel=2)
    servers = [] if settings.url is None else [connect(settings.url, settings, sampling, target)]
    context_tokens = next((each.context_tokens for each in servers), None) or target.config.max_position_embeddings

    # 2. Read the conversations, and find those that earlier runs have not finished.
    conversations = read_conversations(prompts.paths, RowFormat.of(prompts), prompts.split)
    sizes, refused = survey(conversations)
    if not sizes:
        raise UserError(
            f"prompts.paths: {describe_refusals(len(refused), group_refusals(refused))}; "
            f"{', '.join(prompts.paths)} must hold at least one conversation that the target can answer: correct the "
            "paths or the data"
        )
    names = ["max_new_tokens", *([] if servers else ["dtype"])]
    always = ("temperature", "top_p", "top_k")
    sampled = {
        f"responses.{name}": value
        for name, value in sampling.settings.items()
        if name in always or value != generation.NEUTRAL[name]
    }
    identity = ResponsesIdentity(
        target=TargetIdentity.of(target),
        sources=hash_sources(conversations, prompts.paths),
        backend="server" if servers else str(settings.engine),
        model=servers[0].model if servers else None,
        settings=sampled
        | {f"responses.{name}": getattr(settings, name) for name in names}
        | ({} if is_served(config) else {"responses.batch_size": settings.batch_rows})
        | {"seed": config.seed, "context_tokens": context_tokens},
    )
    store = ResponsesStore(run.stage_dir("responses"))
    if ranks.is_first:
        store.begin(identity)
    done = ranks.gather(set(store.lines))[0]
    missing = [row for row in sizes if row not in done]

    # 3. Regenerate them.
    def dialogue(row: int) -> Dialogue:
        regenerated = RegeneratedConversation(row, conversations.names[row])
        return Dialogue(target.tokenizer, regenerated, conversations.messages(row), sampling, context_tokens)

    failed = dict[int, str]()
    # A response may depend on its batch, so batches, of rows of similar size, depend only on the data, and if one
    # conversation of a batch is missing, the whole batch is generated again.
    order, size = sorted(sizes, key=lambda row: (sizes[row], row)), settings.batch_rows
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    batches = [rows for rows in batches if not done.issuperset(rows)]
    num_turns = sum(num_turns for num_turns, _ in sizes.values())
    with ExitStack() as stack:
        if missing and is_served(config) and not servers:
            longest = longest_tokens(conversations, missing, target.tokenizer, settings.max_new_tokens)
            servers = start_engines(run, sampling, min(context_tokens, longest), stack)
        if missing and ranks.is_first:
            begin_to_write(config, store, servers)
        ranks.barrier()
        began = time.monotonic()
        most_tokens = settings.max_new_tokens * num_turns / len(sizes)
        bar = stack.enter_context(ResponsesBar(len(missing), ranks, most_tokens))
        if servers and missing:
            failed = fill_from_servers(servers, map(dialogue, missing), concurrency_of(settings), store, bar)
        elif ranks.rank < len(batches):
            if ranks.device.type == "cpu":
                torch.set_num_threads(CPU_THREADS)
            model = load_target(target.directory, getattr(torch, settings.dtype.value), ranks.device)
            # The longest come first: then ranks end together, and what does not fit into memory fails early.
            dialogues = (list(map(dialogue, rows)) for rows in ranks.share("batches", batches[::-1]))
            for conversation in regenerate_with_target(model, dialogues, sampling, bar.add_tokens):
                if is_new := conversation.row not in done:
                    store.append(ranks.rank, conversation)
                bar.finish(sum(conversation.answer_tokens), num_rows=int(is_new))
        ranks.barrier()
        bar.add_tokens(0)  # those of other ranks
        duration_s = time.monotonic() - began
    if not ranks.is_first:
        return None

    # 4. The first rank writes them in the order of the conversations.
    if missing or not store.is_finished:
        manifest = store.finish(failed, refused, conversations.location)
    else:
        manifest = ResponsesManifest.read(store.directory / MANIFEST)
        print(f"{store.directory} is finished already", flush=True)
    speed = f"{bar.num_tokens:,} tokens, {bar.num_tokens / max(duration_s, 1e-9):,.0f} tokens/s"
    this_run = f"{len(missing) - len(failed):,} conversations, {speed}"
    print_report(store.directory, manifest, num_turns, sampling.stop_token_ids, this_run)
    if not manifest.counts["answers"]:
        raise UserError(
            f"{store.directory}: at least one conversation must get a response, but none did; see {FAILURES} for the "
            "reasons"
        )
    return manifest


def begin_to_write(config: PipelineConfig, store: ResponsesStore, servers: Sequence[CompletionServer]) -> None:
    if config.responses.url is None:
        announce_precision("responses.dtype", config.responses.dtype)
    stage_dir = StageDir(store.directory)
    stage_dir.claim(config)
    store.mark_unfinished([each.version for each in servers if each.version])
    stage_dir.record(config)


def check_settings(config: PipelineConfig, ranks: Ranks) -> None:
    if config.prompts.source is not PromptSource.responses or not config.prompts.paths:
        raise UserError(
            f"prompts.source and prompts.paths: must be {PromptSource.responses} and at least one file or data set of "
            f"conversations, but are {config.prompts.source} and {config.prompts.paths}; set both"
        )
    if is_served(config) and ranks.world_size > 1:
        name = "url" if config.responses.url else f"engine={config.responses.engine}"
        raise UserError(
            f"responses.{name}: must be used by one process, but there are {ranks.world_size} ranks; run "
            "mtptrain responses without torchrun and set responses.concurrency"
        )


def sampling_of(settings: ResponsesConfig, target: TargetFiles, seed: int) -> Sampling:
    """Returns how responses are sampled and where they end, and says in a line if that is not as a server would."""
    own, stop_token_ids = target.generation, target.generation.eos_token_ids
    turn_end, _ = end_of_turn(target.tokenizer)
    if turn_end is not None and turn_end not in stop_token_ids:  # `chats_elsewhere` says so
        stop_token_ids = (*stop_token_ids, turn_end)
    if not stop_token_ids:
        raise UserError(
            f"target.path: eos_token_id must be set in {generation.FILE} or config.json, or eos_token of the "
            f"tokenizer, since it ends a response, but is not set in {target.directory}; add it"
        )
    sampled = own.sampled_with(settings.sampling)
    if os.environ.get("RANK", "0") == "0":
        says = "as" if sampled == own.own_sampling else f"while {_changes(own.own_sampling)} is what"
        what = f"{says} {own.source} of the target says"
        if own.do_sample is None and not own.sampling:
            what = f"and {own.source} of the target says nothing of sampling"
        others = {name: value for name, value in own.changes.items() if name not in generation.NEUTRAL}
        left_out = f"; it also sets {generation.as_words(others)}, which responses leave out" if others else ""
        print(
            f"responses: {_changes(sampled)}, {what}; responses.temperature, top_p and top_k override it{left_out}",
            flush=True,
        )
    return Sampling(sampled, settings.max_new_tokens, stop_token_ids, seed)


def _changes(sampling: Mapping[str, Any]) -> str:
    changed = {name: value for name, value in sampling.items() if value != generation.NEUTRAL[name]}
    words = ["greedy"] if changed.get("temperature") == 0 else []
    others = {name: value for name, value in changed.items() if name != "temperature" or value}
    return ", ".join([*words, *([generation.as_words(others)] if others else [])]) or "temperature 1"


def connect(url: str, settings: ResponsesConfig, sampling: Sampling, target: TargetFiles) -> CompletionServer:
    """Connect to the server and check that it completes a prompt."""
    server = CompletionServer(url, settings, sampling, target.tokenizer, int(target.config.vocab_size))
    server.check(render_prompt(target.tokenizer, PROBE))
    if why := running_engine("vllm").why_not_answers(target, sampling.settings):
        warnings.warn(f"responses.url: must not be vLLM: {why}", stacklevel=2)
    print(f"responses.url: model {server.quote(server.model)} of {server.url} responds", flush=True)
    return server


def survey(conversations: Conversations) -> tuple[dict[int, tuple[int, int]], dict[str, str]]:
    """Returns which conversations the target can answer, and why it cannot answer the other rows, by location.

    Those that it can answer have the number of responses to generate and of characters before the first one, by index.
    """
    sizes, refused = dict[int, tuple[int, int]](), dict(conversations.refused)
    for row in range(len(conversations.names)):
        try:
            groups = questions(conversations.messages(row))
            sizes[row] = len(groups), sum(len(message["content"]) for message in groups[0])
        except ConversationRefused as refusal:
            refused[conversations.location(row)] = str(refusal)
    return sizes, refused


class ResponsesBar(ProgressBar):
    """Shows the conversations and the tokens/s of all ranks.

    Unfinished conversations count together, by their tokens: one has at most `most_tokens`.
    """

    def __init__(self, num_rows: int, ranks: Ranks, most_tokens: float) -> None:
        self.ranks, self.most_tokens = ranks, most_tokens
        # Every call may draw, at most twice a second; the time left follows from the mean over all rows.
        shown = {"miniters": 0, "mininterval": 0.5, "smoothing": 0, "disable": not (num_rows and ranks.is_first)}
        super().__init__(total=num_rows, desc="responses", unit="row", **shown)

    def add_tokens(self, num_tokens: int, more: str = "") -> None:
        all_tokens = self.ranks.add("tokens", num_tokens)
        if self.disable:
            return
        unfinished = all_tokens - self.ranks.add("tokens of finished rows", 0)
        self.n = min(self.total, self.ranks.add("finished rows", 0) + int(unfinished / self.most_tokens))
        super().add_tokens(all_tokens - self.num_tokens, more)

    def finish(self, num_tokens: int, num_rows: int = 1) -> None:
        """Count a conversation, whose tokens were added before."""
        self.ranks.add("tokens of finished rows", num_tokens)
        self.ranks.add("finished rows", num_rows)
        self.add_tokens(0)


def fill_from_servers(
    servers: Sequence[CompletionServer],
    dialogues: Iterable[Dialogue],
    concurrency: int,
    store: ResponsesStore,
    bar: ResponsesBar,
) -> dict[int, str]:
    """Regenerate conversations with requests, `concurrency` at once to each server. Returns why one failed, by row."""
    most_failures = max(MIN_FAILURES_TO_STOP, 2 * concurrency * len(servers))
    remaining, failed, failures_in_a_row = iter(dialogues), dict[int, str](), 0

    async def converse(server: CompletionServer) -> None:
        nonlocal failures_in_a_row
        for dialogue in remaining:
            conversation = dialogue.regenerated
            try:
                while (prompt := dialogue.next_prompt()) is not None:
                    dialogue.add_response(await server.complete(prompt))
            except RequestFailed as failure:
                failed[conversation.row] = str(failure)
                failures_in_a_row += 1
                if failures_in_a_row == most_failures:
                    raise UserError(
                        f"mtptrain responses: conversations must not keep failing, but {failures_in_a_row} in a row "
                        f"did, the last one with: {failure}; correct the cause and run mtptrain responses again to "
                        "generate the rest"
                    ) from None
                bar.finish(0)
            else:
                failures_in_a_row = 0
                store.append(0, conversation)
                bar.add_tokens(sum(conversation.answer_tokens))
                bar.finish(sum(conversation.answer_tokens))

    async def converse_at_once() -> None:
        await asyncio.gather(*(converse(server) for _ in range(concurrency) for server in servers))

    asyncio.run(converse_at_once())
    return failed


def print_report(
    directory: Path, manifest: ResponsesManifest, num_turns: int, stop_token_ids: Sequence[int], this_run: str
) -> None:
    """Print the counts and, for each reason in `failures.jsonl`, the conversations left out or ended early."""
    words = {
        "turns": "turns to generate",
        **{name: words for name, (words, _) in COUNTS.items()},
        "failed": "conversations that failed, which the next run retries",
        "refused": "rows that cannot be used",
    }
    counts = {"turns": num_turns, **manifest.counts, "failed": manifest.failed, "refused": manifest.refused}
    failures = [json.loads(line) for line in (directory / FAILURES).read_text(encoding="utf-8").splitlines()]
    groups = group_refusals({failure["place"]: failure["reason"] for failure in failures})
    print_counts("mtptrain responses", counts, words, groups, f"this run: {this_run}")
    if (cut := counts["cut"]) > NEARLY_ALL * counts["answers"]:
        print(
            f"warning: {cut:,} of {counts['answers']:,} responses reached responses.max_new_tokens before an end of "
            f"text (tokens {list(stop_token_ids)}): raise it, or look in {directory} whether they go on past what ends "
            f"a turn, and add that token to eos_token_id in {generation.FILE} of the target",
            file=sys.stderr,
        )
    print(f"written to {directory}; {FAILURES} lists the conversations that were left out or ended early", flush=True)
