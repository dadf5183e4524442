"""Optional, before stage 1: regenerate the assistant turns of conversations with the target itself.

Reads the conversations of `prompts.paths`; writes `run_dir/responses/` (see data_prep/responses/store.py). With
`prompts.source=responses`, mtptrain prompts uses these instead of the original conversations. The target runs in this
process with transformers, or on a server at `responses.url`. An interrupted run continues where it stopped. If
conversations fail, the others are kept and the exit code is 1, so that a script stops before the next stage. The next
run retries the failed ones.

    torchrun --nproc-per-node 8 -m mtptrain responses recipe=R prompts.source=responses "prompts.paths=[chats.jsonl]"
    mtptrain responses recipe=R prompts.source=responses "prompts.paths=[chats.jsonl]" responses.url=URL
"""

import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TextIO

import httpx
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from mtptrain.command_line.program import stage_command
from mtptrain.config import PipelineConfig, PromptSource, ResponsesConfig
from mtptrain.data.chat_template import render_prompt, require_chat_template
from mtptrain.data.identity import TargetIdentity
from mtptrain.data.rows import RowFormat
from mtptrain.planning.costs import worthwhile_cpu_ranks
from mtptrain.run import Run
from mtptrain.run_dir import claim_stage_dir, write_provenance, writing
from mtptrain.settings.precision import announce_precision, fast_dtype
from mtptrain.target.families import eos_token_ids, read_generation_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.loading import load_target
from mtptrain.utils.distributed import CPU_THREADS, Ranks, continue_on_ranks, init_ranks, is_alone_on_cpu
from mtptrain.utils.errors import UserError

from ..conversations import Conversations, read_conversations
from .dialogue import Dialogue, RegeneratedConversation, Sampling, is_text_of
from .manifest import MANIFEST, ResponsesIdentity, ResponsesManifest
from .report import ResponsesProgress, print_report
from .server import CompletionServer, regenerate_with_server
from .store import FAILURES, ResponsesStore, line_of
from .survey import Survey, survey_conversations
from .target import regenerate_with_target

MIN_FAILURES_TO_STOP = 16
"""With a server, the run stops after this many consecutive failures, or after twice `responses.concurrency` if that is
more."""
_QUESTION = [{"role": "user", "content": "What is two and two?"}]


def main(config: PipelineConfig) -> None:
    ranks = init_ranks(config.distributed_timeout_hours)
    with writing(config.stage_dir("responses"), ranks):
        manifest = prepare_responses(Run(config), ranks)
    if manifest and manifest.failed:
        sys.exit(f"{manifest.failed:,} conversations failed; run mtptrain responses again to retry them")


@dataclass(frozen=True)
class Job:
    """The input and settings of a run."""

    target: TargetFiles
    """The model that answers."""
    conversations: Conversations
    """The conversations of `prompts.paths`."""
    survey: Survey
    """The turns to generate in each of them."""
    sampling: Sampling
    """How the target's tokens are chosen, and which of them end a response."""
    context_tokens: int
    """Maximum tokens of prompt plus response."""
    server: CompletionServer | None
    """None if the target runs in this process."""
    identity: ResponsesIdentity
    """Facts that earlier responses in the folder must have in common with these."""

    def dialogue(self, row: int) -> Dialogue:
        name, messages = self.conversations.names[row], self.conversations.messages(row)
        return Dialogue(self.target.tokenizer, row, name, messages, self.sampling, self.context_tokens)


def prepare_responses(run: Run, ranks: Ranks) -> ResponsesManifest | None:
    """Fill `run_dir/responses` with the responses that are missing. Every rank must call this.

    Returns:
        The manifest on the first rank, None on the others.

    Raises:
        UserError: the target or a file does not exist, or the settings do not fit, or no conversation is usable, or the
            server does not respond or does not serve the target, or the directory holds responses from a different
            target, data or settings, or too many conversations failed in a row, or none has a response.
    """
    config = run.config
    check_settings(config, ranks)
    job = make_job(run)
    store = ResponsesStore(run.stage_dir("responses"))
    if ranks.is_first:
        store.begin(job.identity, job.server.version if job.server else None)
    done = ranks.gather(store.rows)[0]
    missing = [row for row in job.survey.turns if row not in done]
    if missing and job.server is None and is_alone_on_cpu():
        settings = config.responses
        dtype, num_batches = getattr(torch, settings.dtype.value), -(-len(missing) // settings.batch_size)
        num_ranks = worthwhile_cpu_ranks(job.target.config, dtype, config.cpu_ranks, num_batches)
        continue_on_ranks(stage_command("responses", sys.argv[1:]), num_ranks)
    if missing and ranks.is_first:
        if job.server is None:
            announce_precision("responses.dtype", config.responses.dtype)
        claim_stage_dir(store.directory, config)
        store.mark_unfinished()
        write_provenance(store.directory, config)
    ranks.barrier()

    progress = ResponsesProgress.merge(ranks.gather(fill(job, missing, config.responses, store, ranks)))
    if not ranks.is_first:
        return None
    if missing or not store.is_finished:
        manifest = store.finish(progress.failed, job.survey.refused, job.conversations.location)
    else:
        store.clean()
        manifest = ResponsesManifest.read(store.directory / MANIFEST)
        print(f"{store.directory} is finished already", flush=True)
    left_out = job.survey.refused | {job.conversations.location(row): reason for row, reason in progress.failed.items()}
    print_report(store.directory, manifest, job.survey, progress, left_out)
    if not manifest.counts.answers:
        raise UserError(
            f"{store.directory}: at least one conversation must get a response, but none did; see {FAILURES} for the "
            "reasons"
        )
    return manifest


def check_settings(config: PipelineConfig, ranks: Ranks) -> None:
    if not config.prompts.source.is_chat:
        raise UserError(
            f"prompts.source: must be {PromptSource.responses} to generate responses, but is {config.prompts.source}; "
            "set it, and prompts.paths=[...] to files of conversations"
        )
    if config.prompts.source is PromptSource.conversations and ranks.is_first:
        warnings.warn(
            f"prompts.source: should be {PromptSource.responses}, but is {config.prompts.source}, with which "
            f"mtptrain prompts ignores the generated responses; set prompts.source={PromptSource.responses}",
            stacklevel=2,
        )
    if not config.prompts.paths:
        raise UserError(
            "prompts.paths: must name at least one file or data set of conversations, but is empty; set "
            "prompts.paths=[...]"
        )
    if config.responses.url and ranks.world_size > 1:
        raise UserError(
            f"responses.url: must be used by one process, but there are {ranks.world_size} ranks; run "
            "mtptrain responses without torchrun and set responses.concurrency"
        )


def make_job(run: Run) -> Job:
    """Read and check all inputs except the target's weights."""
    config, settings, target = run.config, run.config.responses, run.target
    tokenizer = target.tokenizer
    require_chat_template(tokenizer)
    sampling = Sampling(
        settings.temperature,
        settings.top_p,
        settings.top_k,
        settings.max_new_tokens,
        find_stop_token_ids(target),
        config.seed,
    )
    server = (
        None
        if settings.url is None
        else connect(settings.url, settings, sampling, tokenizer, int(target.config.vocab_size))
    )
    context_tokens = (
        server.context_tokens if server and server.context_tokens else target.config.max_position_embeddings
    )
    prompts = config.prompts
    conversations = read_conversations(prompts.paths, RowFormat.of(prompts), prompts.split)
    survey = survey_conversations(conversations, prompts.paths)
    identity = make_identity(config, context_tokens, TargetIdentity.of(target), survey.sources, server)
    return Job(target, conversations, survey, sampling, context_tokens, server, identity)


def find_stop_token_ids(target: TargetFiles) -> tuple[int, ...]:
    """Returns the tokens that end a response.

    Raises:
        UserError: there are none, so every response would be cut off.
    """
    stop_token_ids = eos_token_ids(target.config, read_generation_config(target.directory))
    if not stop_token_ids:
        raise UserError(
            "target.path: eos_token_id must be set in generation_config.json or config.json, since it ends a response, "
            f"but is not set in {target.directory}; add it"
        )
    return stop_token_ids


def connect(
    url: str, settings: ResponsesConfig, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> CompletionServer:
    """Connect to the server and check that it completes a prompt."""
    api_key = os.environ.get(settings.api_key_variable)
    if not all("!" <= character <= "~" for character in api_key or ""):
        raise UserError(
            f"responses.api_key_variable: {settings.api_key_variable} must hold a key of printable ASCII characters "
            "without spaces, but holds others, such as a line break or a quotation mark of a text editor; set it again"
        )
    server = CompletionServer(
        url,
        settings.model,
        sampling,
        vocab_size,
        max_retries=settings.max_retries,
        timeout_s=settings.timeout_s,
        api_key=api_key,
    )
    prompt_ids = render_prompt(tokenizer, _QUESTION)
    response = server.check(prompt_ids)
    if not is_text_of(tokenizer, prompt_ids, response):
        raise UserError(
            f"responses.url: the token_ids that {server.url} returns must be those of its text, but decode to another "
            f"text than {server.quote(response.text)!r}; serve the target there, with its own tokenizer"
        )
    print(f"responses.url: model {server.quote(server.model)} of {server.url} responds", flush=True)
    is_here = httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")
    is_slow = not torch.cuda.is_available() and fast_dtype(False)[0] == "float32"
    if is_here and is_slow and (server.version or "").startswith("vLLM"):
        warnings.warn(
            "responses.url: should not be vLLM on a CPU without bf16 instructions, where it takes several times as "
            f"long as transformers, but {server.url} is {server.version}; leave responses.url out, or serve the target "
            "with another engine",
            stacklevel=2,
        )
    return server


def make_identity(
    config: PipelineConfig,
    context_tokens: int,
    target: TargetIdentity,
    sources: dict[str, str],
    server: CompletionServer | None,
) -> ResponsesIdentity:
    names = ["temperature", "top_p", "top_k", "max_new_tokens", *([] if server else ["dtype", "batch_size"])]
    sampled = {f"responses.{name}": getattr(config.responses, name) for name in names}
    return ResponsesIdentity(
        target=target,
        sources=sources,
        backend="server" if server else "transformers",
        model=server.model if server else None,
        settings=sampled | {"seed": config.seed, "context_tokens": context_tokens},
    )


def fill(
    job: Job, missing: Sequence[int], settings: ResponsesConfig, store: ResponsesStore, ranks: Ranks
) -> ResponsesProgress:
    """Regenerate this rank's share of the missing conversations."""
    progress, started = ResponsesProgress(), time.monotonic()
    if missing:
        missing_rows = set(missing)
        # A response may depend on its batch, so if one conversation of a batch is missing, the whole batch is generated
        # again.
        batches = [rows for rows in job.survey.batches(settings.batch_size) if not missing_rows.isdisjoint(rows)]
        own = batches[ranks.rank :: ranks.world_size]
        num_own = sum(len(missing_rows.intersection(rows)) for rows in own)
        with store.journal(ranks.rank) as journal, ProgressBar(num_own, ranks) as bar:
            if job.server:
                fill_from_server(job.server, map(job.dialogue, missing), settings.concurrency, journal, progress, bar)
            elif own:
                if ranks.device.type == "cpu":
                    torch.set_num_threads(CPU_THREADS)
                target = load_target(job.target.directory, getattr(torch, settings.dtype.value), ranks.device)
                rank_batches = ([job.dialogue(row) for row in rows] for rows in own)
                for conversation in regenerate_with_target(target, rank_batches, job.sampling, bar.add_tokens):
                    if conversation.row in missing_rows:
                        save_conversation(conversation, journal, progress, bar)
    progress.seconds = time.monotonic() - started
    return progress


class ProgressBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """Shows the finished conversations of the first rank, and the tokens/s of all its answers, unfinished ones too.

    On a slow CPU a batch of conversations may take minutes, after which all of them are finished at once.
    """

    def __init__(self, num_rows: int, ranks: Ranks) -> None:
        name = "responses" if ranks.world_size == 1 else f"responses, rank 0 of {ranks.world_size}"
        # Every call may draw, at most twice a second; the time left follows from the mean over all rows.
        super().__init__(
            total=num_rows,
            desc=name,
            unit="row",
            disable=not ranks.is_first,
            miniters=0,
            mininterval=0.5,
            smoothing=0,
        )
        self.num_tokens = 0

    def add_tokens(self, num_tokens: int) -> None:
        """Add tokens that were generated just now."""
        self.num_tokens += num_tokens
        speed = self.num_tokens / max(self.format_dict["elapsed"], 1e-9)
        self.set_postfix_str(f"{self.num_tokens:,} tokens, {speed:,.0f} tok/s", refresh=False)
        self.update(0)


def fill_from_server(
    server: CompletionServer,
    dialogues: Iterator[Dialogue],
    concurrency: int,
    journal: TextIO,
    progress: ResponsesProgress,
    bar: ProgressBar,
) -> None:
    """Regenerate conversations with requests to the server.

    Raises:
        UserError: too many consecutive conversations failed.
    """
    failures_in_a_row = 0

    def save(conversation: RegeneratedConversation) -> None:
        save_conversation(conversation, journal, progress, bar)
        bar.add_tokens(sum(conversation.answer_tokens))

    with closing(regenerate_with_server(server, dialogues, concurrency, save)) as outcomes:
        for outcome in outcomes:
            if isinstance(outcome, RegeneratedConversation):
                save(outcome)
                failures_in_a_row = 0
                continue
            row, reason = outcome
            progress.failed[row] = reason
            failures_in_a_row += 1
            bar.update()
            if failures_in_a_row >= max(MIN_FAILURES_TO_STOP, 2 * concurrency):
                raise UserError(
                    f"mtptrain responses: conversations must not keep failing, but {failures_in_a_row} in a row did, "
                    f"the last one with: {reason}; correct the cause and run mtptrain responses again to generate the "
                    "rest"
                )


def save_conversation(
    conversation: RegeneratedConversation, journal: TextIO, progress: ResponsesProgress, bar: ProgressBar
) -> None:
    journal.write(line_of(conversation))
    progress.rows += 1
    progress.tokens += sum(conversation.answer_tokens)
    bar.update()
