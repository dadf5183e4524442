"""Optional, before stage 1: the assistant's turns of conversations, generated anew by the target itself.

Reads the conversations of `prompts.paths`; writes `run_dir/responses/` (see data_prep/responses/store.py), which data_prep.prompts
reads in their place with `prompts.source=responses`. The target runs here with transformers, or answers by `responses.url`. An
interrupted run continues with what is missing. Where conversations failed, the answers of the others are kept and the exit code is 1,
so that no later stage goes on with a part unasked; a further run tries them again.

    torchrun --nproc-per-node 8 -m data_prep.responses recipe=R prompts.source=responses prompts.paths=[chats.jsonl]
    python -m data_prep.responses recipe=R prompts.source=responses prompts.paths=[chats.jsonl] responses.url=http://localhost:8000/v1
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from mtptrain.command_line import program
from mtptrain.config import PipelineConfig, PromptSource, ResponsesConfig, load_config
from mtptrain.data.identity import TargetIdentity
from mtptrain.data.prompt_files import render_prompt, require_chat_template
from mtptrain.run_dir import write_provenance
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import load_tokenizer, resolve_target
from mtptrain.target.model import Target, load_target
from mtptrain.utils.distributed import Ranks, init_ranks

from ..conversations import Conversations, read_conversations
from .dialogue import AnsweredConversation, Dialogue, Limits, Sampling
from .manifest import MANIFEST, Manifest, ResponsesIdentity
from .report import Progress, print_report
from .server import AnswerServer, answer_with_server
from .store import FAILURES, Journal, ResponsesStore
from .survey import Survey, survey_conversations
from .target import answer_with_target

MIN_FAILURES_TO_STOP = 16
"""Conversations that fail one after the other, or twice as many as are in flight where that is more: then the server is gone."""
# As in extraction: another number of threads gives other bits, and torchrun sets another than plain python.
CPU_THREADS = 1
_QUESTION = [{"role": "user", "content": "What is two and two?"}]


@program
def main(cfg: DictConfig) -> None:
    config = load_config(cfg)
    manifest = prepare_responses(config, init_ranks(config.distributed_timeout_hours))
    if manifest and manifest.failed:
        sys.exit(f"{manifest.failed:,} conversations failed; run data_prep.responses again, which goes on with them")


@dataclass(frozen=True)
class Job:
    """What a run answers, and with what."""

    target_dir: Path
    tokenizer: PreTrainedTokenizerBase
    conversations: Conversations
    survey: Survey
    sampling: Sampling
    limits: Limits
    server: AnswerServer | None
    """None where the target runs here."""
    identity: ResponsesIdentity

    def dialogue(self, row: int) -> Dialogue:
        conversations = self.conversations
        return Dialogue(self.tokenizer, row, conversations.names[row], conversations.messages(row), self.limits)


def prepare_responses(config: PipelineConfig, ranks: Ranks) -> Manifest | None:
    """Fill `run_dir/responses`, or what is missing of it; every rank calls this.

    Returns:
        What is written, on the first rank.

    Raises:
        FileNotFoundError: the target or a file does not exist.
        ConnectionError: the server does not answer.
        ValueError: there is nothing to answer, the server does not serve the target, or the folder holds other answers.
        RuntimeError: the server went away, or no conversation has an answer.
    """
    check_settings(config, ranks)
    job = make_job(config)
    store = ResponsesStore(config.stage_dir("responses"))
    if ranks.is_first:
        store.begin(job.identity, job.server.version if job.server else None)
    answered = ranks.gather(store.rows)[0]
    missing = [row for row in job.survey.turns if row not in answered]
    if missing and ranks.is_first:
        store.resume()
        write_provenance(store.directory, config)
    ranks.barrier()

    progress = Progress.merge(ranks.gather(fill(job, missing, config.responses, store, ranks)))
    if not ranks.is_first:
        return None
    if missing or not store.is_finished:
        manifest = store.finish(progress.failed, job.survey.refused, job.conversations.place)
    else:
        store.clean()
        manifest = Manifest.read(store.directory / MANIFEST)
        print(f"{store.directory} is finished already", flush=True)
    left_out = job.survey.refused | {job.conversations.place(row): reason for row, reason in progress.failed.items()}
    print_report(store.directory, manifest, job.survey, progress, left_out)
    if not manifest.counts.answers:
        raise RuntimeError(f"{store.directory}: at least one conversation must be answered, but none is; {FAILURES} says why")
    return manifest


def check_settings(config: PipelineConfig, ranks: Ranks) -> None:
    if config.prompts.source is PromptSource.text_files:
        raise ValueError(
            f"prompts.source: must be {PromptSource.responses} where answers are generated, but is {config.prompts.source}; set it, and "
            "prompts.paths=[...] to files of conversations"
        )
    if not config.prompts.paths:
        raise ValueError("prompts.paths: must name at least one place of conversations, but is empty; give prompts.paths=[...]")
    if config.responses.url and ranks.world_size > 1:
        raise ValueError(
            f"responses.url: a server must be asked by one process, but there are {ranks.world_size} ranks; start it without torchrun and "
            "set responses.concurrency"
        )


def make_job(config: PipelineConfig) -> Job:
    """Read and check everything but the target's weights."""
    settings = config.responses
    target_dir = resolve_target(config.target.path, config.target.revision)
    target_config, tokenizer = read_target_config(target_dir), load_tokenizer(target_dir)
    require_chat_template(tokenizer)
    sampling = Sampling(
        settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens, find_stop_token_ids(target_dir)
    )
    server = None if settings.url is None else connect(settings.url, settings, sampling, tokenizer, int(target_config.vocab_size))
    context_tokens = server.context_tokens if server and server.context_tokens else target_config.max_position_embeddings
    limits = Limits(settings.max_new_tokens, context_tokens, config.seed)
    conversations = read_conversations(config.prompts.paths, config.prompts.schema, config.prompts.split)
    survey = survey_conversations(conversations, config.prompts.paths)
    target = TargetIdentity.of(config.target.path, config.target.revision, target_dir, tokenizer)
    identity = make_identity(settings, limits, target, survey.sources, server)
    return Job(target_dir, tokenizer, conversations, survey, sampling, limits, server, identity)


def find_stop_token_ids(target_dir: Path) -> list[int]:
    """Tokens that end an answer, from the generation config first, as engines do.

    Raises:
        ValueError: there are none, so that every answer would be cut.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = target_dir / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found = found or (ids if isinstance(ids, list) else [] if ids is None else [ids])
    if not found:
        raise ValueError(
            f"target.path: eos_token_id in generation_config.json or config.json must say what ends an answer, but {target_dir} has "
            "none; add it"
        )
    return found


def connect(
    url: str, settings: ResponsesConfig, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> AnswerServer:
    """The server, once it has completed a prompt of the target's."""
    server = AnswerServer(
        url,
        settings.model,
        sampling,
        vocab_size,
        max_retries=settings.max_retries,
        timeout_s=settings.timeout_s,
        api_key=os.environ.get(settings.api_key_variable),
    )
    server.check(render_prompt(tokenizer, _QUESTION))
    return server


def make_identity(
    settings: ResponsesConfig, limits: Limits, target: TargetIdentity, sources: dict[str, str], server: AnswerServer | None
) -> ResponsesIdentity:
    names = ["temperature", "top_p", "top_k", "max_new_tokens", *([] if server else ["dtype", "batch_size"])]
    sampled = {f"responses.{name}": getattr(settings, name) for name in names}
    return ResponsesIdentity(
        target=target,
        sources=sources,
        backend="server" if server else "transformers",
        model=server.model if server else None,
        settings=sampled | {"seed": limits.seed, "context_tokens": limits.context_tokens},
    )


def fill(job: Job, missing: Sequence[int], settings: ResponsesConfig, store: ResponsesStore, ranks: Ranks) -> Progress:
    """Answer this rank's share of what is missing."""
    progress, started = Progress(), time.monotonic()
    if missing:
        with store.journal(ranks.rank) as journal, progress_bar(len(missing), ranks) as bar:
            if job.server:
                ask_server(job.server, map(job.dialogue, missing), settings.concurrency, journal, progress, bar)
            else:
                target = load_on_rank(job.target_dir, settings, ranks)
                wanted = set(missing)
                batches = [rows for rows in job.survey.batches(settings.batch_size) if not wanted.isdisjoint(rows)]
                mine = ([job.dialogue(row) for row in rows] for rows in batches[ranks.rank :: ranks.world_size])
                for answered in answer_with_target(target, mine, job.sampling):
                    if answered.row in wanted:
                        note(answered, journal, progress, bar)
    progress.seconds = time.monotonic() - started
    return progress


def load_on_rank(target_dir: Path, settings: ResponsesConfig, ranks: Ranks) -> Target:
    if ranks.device.type == "cpu":
        torch.set_num_threads(CPU_THREADS)
    return load_target(target_dir, getattr(torch, settings.dtype.value), ranks.device)


def progress_bar(num_rows: int, ranks: Ranks) -> tqdm:
    share = -(-num_rows // ranks.world_size)
    name = "responses" if ranks.world_size == 1 else f"responses, rank 0 of {ranks.world_size}"
    return tqdm(total=share, desc=name, unit="row", disable=not ranks.is_first)


def ask_server(
    server: AnswerServer, dialogues: Iterator[Dialogue], concurrency: int, journal: Journal, progress: Progress, bar: tqdm
) -> None:
    """Answer by requests.

    Raises:
        RuntimeError: so many conversations fail in a row that the server must be gone.
    """
    failures_in_a_row = 0
    save = partial(note, journal=journal, progress=progress, bar=bar)
    with closing(answer_with_server(server, dialogues, concurrency, save)) as outcomes:
        for outcome in outcomes:
            if isinstance(outcome, AnsweredConversation):
                save(outcome)
                failures_in_a_row = 0
                continue
            row, reason = outcome
            progress.failed[row] = reason
            failures_in_a_row += 1
            bar.update()
            if failures_in_a_row >= max(MIN_FAILURES_TO_STOP, 2 * concurrency):
                raise RuntimeError(
                    f"responses.url: {server.url} must go on answering, but {failures_in_a_row} conversations in a row failed, the last "
                    f"one because {reason}; correct that and run data_prep.responses again, which goes on with what is missing"
                )


def note(answered: AnsweredConversation, journal: Journal, progress: Progress, bar: tqdm) -> None:
    journal.write(answered)
    progress.rows += 1
    progress.tokens += sum(answered.answer_tokens)
    bar.update()
    bar.set_postfix_str(f"{progress.tokens / max(bar.format_dict['elapsed'], 1e-9):,.0f} tok/s", refresh=False)


if __name__ == "__main__":
    main()
