"""Starts engines that generate responses: one server for each GPU or group of GPUs, or one on a CPU."""

import json
import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers import PreTrainedTokenizerBase

from mtptrain.config import AnsweringEngine, ResponsesConfig
from mtptrain.data.chat_template import render_prompt
from mtptrain.engines.base import ServedTarget
from mtptrain.engines.process import started
from mtptrain.engines.table import running_engine
from mtptrain.run_dir import Run
from mtptrain.utils.errors import UserError

from ..conversations import Conversations
from .dialogue import Sampling, questions
from .server import CompletionServer

PROBE = [{"role": "user", "content": "What is two and two?"}]
TOKENS_AROUND = 32
"""More tokens than a template puts around a message, or than a response gains if its text is tokenized again."""


def concurrency_of(settings: ResponsesConfig) -> int:
    """Returns the number of conversations in flight at each server."""
    return settings.concurrency or (64 if settings.url is not None else 256 if torch.cuda.is_available() else 16)


def choose_engine(run: Run) -> None:
    """Replace `responses.engine=auto` by what it stands for, and say so in a line."""
    engine, reason = run.answering
    if run.config.responses.engine is AnsweringEngine.auto and os.environ.get("RANK", "0") == "0":
        print(f"responses.engine: {engine}, {reason}", flush=True)
    run.config.responses.engine = AnsweringEngine(engine)


def start_engines(run: Run, sampling: Sampling, context_tokens: int, stack: ExitStack) -> list[CompletionServer]:
    """Start the servers of `responses.engine`, which end with the stack, and return them once they answer."""
    settings, target = run.config.responses, run.target
    engine, serving = running_engine(settings.engine), run.config.serving.of(settings.engine)
    if why := engine.why_not_answers(target, sampling.settings):
        raise UserError(
            f"responses.engine: must be an engine that answers as the target is sampled, but is {settings.engine}: "
            f"{why}; leave it out, or set responses.engine={AnsweringEngine.transformers}"
        )
    concurrency = concurrency_of(settings)
    program, dtype, kind = engine.find_program(serving), str(settings.dtype), engine.server
    assert kind is not None, "see AnsweringEngine"
    served = ServedTarget(program, target, serving, dtype, context_tokens, concurrency)
    name = f"mtptrain-{uuid.uuid4().hex}"  # no other server at the same port has this model
    command, logs = engine.answering_command(served, name), run.stage_dir("responses")
    processes = [
        stack.enter_context(started(kind.program, command, logs / f"server_{i}.log", engine.environment, devices))
        for i, devices in enumerate(device_groups(serving.tensor_parallel_size))
    ]
    servers = []
    for process in processes:
        process.wait()
        server = CompletionServer(
            process.url + kind.base_path, settings, sampling, target.tokenizer, target.config.vocab_size,
            kind, name, process.check,
        )  # fmt: skip
        server.check(render_prompt(target.tokenizer, PROBE))
        servers.append(server)
    print(
        f"responses.engine: {len(servers)} x {servers[0].version}, each with up to {concurrency} conversations of at "
        f"most {context_tokens:,} tokens; log {logs}/server_*.log",
        flush=True,
    )
    return servers


def device_groups(size: int) -> list[str]:
    """Returns the GPUs of each engine, `size` of them, as CUDA_VISIBLE_DEVICES names them; one empty group if none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return [",".join(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)] or [""]


def longest_tokens(
    conversations: Conversations, rows: Sequence[int], tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> int:
    """Returns how many tokens the longest of these conversations has at most, its responses included.

    A text has at most as many tokens as bytes, so only texts that may be the longest are tokenized.
    """
    around, texts, others = len(render_prompt(tokenizer, PROBE)), dict[int, str](), dict[int, int]()
    for row in rows:
        groups = questions(conversations.messages(row))
        num_messages = sum(map(len, groups)) + len(groups)
        texts[row] = json.dumps(groups, ensure_ascii=False)
        others[row] = around + TOKENS_AROUND * num_messages + max_new_tokens * len(groups)
    most = {row: len(texts[row].encode(errors="replace")) + others[row] for row in rows}
    longest = 0
    for row in sorted(rows, key=most.__getitem__, reverse=True):
        if most[row] <= longest:
            break
        longest = max(longest, len(tokenizer(texts[row])["input_ids"]) + others[row])
    return longest
