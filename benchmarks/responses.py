"""Compares the engines that generate responses: tokens per second of wall time and of processor time.

    python -m benchmarks.responses recipe=smollm2_135m_mtp target.path=FILE.gguf "prompts.paths=[questions.jsonl]" \
        responses.max_new_tokens=128 responses.concurrency=32 --questions 64 --engines llama_cpp transformers:bfloat16

The candidates take turns, with a dtype after a colon. Starting is left out. Our own loop is one process. Processor time
is that of this process and its servers, which on a machine with other work says more than wall time.
"""

import argparse
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from data_prep.conversations import read_conversations
from data_prep.responses.dialogue import Dialogue, RegeneratedConversation
from data_prep.responses.engines import concurrency_of, longest_tokens, start_engines
from data_prep.responses.regenerate import ResponsesBar, fill_from_servers, sampling_of, survey
from data_prep.responses.store import ResponsesStore
from data_prep.responses.target import regenerate_with_target
from mtptrain.config import AnsweringEngine, Dtype, PipelineConfig
from mtptrain.data.rows import RowFormat
from mtptrain.run_dir import Run
from mtptrain.target.loading import load_target
from mtptrain.utils.distributed import Ranks, init_ranks

from .command import positive, print_table, run_benchmark


def main(config: PipelineConfig, options: argparse.Namespace) -> None:
    ranks, best = init_ranks(config.distributed_timeout_hours), dict[str, tuple[int, float, float]]()
    torch.set_num_threads(os.cpu_count() or 1)
    with TemporaryDirectory(prefix="mtptrain-bench-") as folder, ExitStack() as stack:
        runs = {
            name: prepared(config, name, Path(folder) / name, options.questions, ranks, stack)
            for name in options.engines
        }
        for _ in range(options.repeats):
            for name, run in runs.items():
                before, began = processor_s(), time.perf_counter()
                num_tokens = run()
                measured = num_tokens, time.perf_counter() - began, processor_s() - before
                best[name] = min(best.get(name, (0, math.inf, math.inf)), measured, key=lambda each: each[2])
    columns = {"": ("name", ""), "tokens": ("tokens", ",d"), "tokens/s": ("speed", ",.1f")}
    columns |= {"processor s": ("cpu", ".1f"), "tokens/processor s": ("cpu_speed", ",.1f")}
    rows = [
        {"name": name, "tokens": tokens, "speed": tokens / wall, "cpu": cpu, "cpu_speed": tokens / cpu}
        for name, (tokens, wall, cpu) in best.items()
    ]
    print_table(f"Responses, {config.target.path}, {options.questions} questions", columns, rows)


def prepared(
    config: PipelineConfig, name: str, run_dir: Path, num_questions: int, ranks: Ranks, stack: ExitStack
) -> Callable[[], int]:
    """Returns a function that answers the questions with a loaded engine, and returns the number of tokens."""
    engine, _, dtype = name.partition(":")
    responses = replace(config.responses, engine=AnsweringEngine(engine), dtype=Dtype(dtype or config.responses.dtype))
    run = Run(replace(config, run_dir=str(run_dir), responses=responses))
    sampling, store = sampling_of(responses, run.target, config.seed), ResponsesStore(run.stage_dir("responses"))
    store.directory.mkdir(parents=True)
    conversations = read_conversations(config.prompts.paths, RowFormat.of(config.prompts), config.prompts.split)
    rows = list(survey(conversations)[0])[:num_questions]
    room = longest_tokens(conversations, rows, run.target.tokenizer, responses.max_new_tokens)

    def dialogues() -> list[Dialogue]:
        names = {row: RegeneratedConversation(row, conversations.names[row]) for row in rows}
        return [Dialogue(run.target.tokenizer, names[row], conversations.messages(row), sampling, room) for row in rows]

    def answer() -> int:
        with ResponsesBar(len(rows), ranks) as bar:
            if servers:
                assert not fill_from_servers(servers, dialogues(), concurrency_of(responses), store, bar)
            else:
                waiting, size = dialogues(), responses.batch_size
                batches = (waiting[start : start + size] for start in range(0, len(waiting), size))
                assert model is not None
                for conversation in regenerate_with_target(model, batches, sampling, bar.add_tokens):
                    store.append(0, conversation)
        return bar.num_tokens

    is_ours = responses.engine is AnsweringEngine.transformers
    servers = [] if is_ours else start_engines(run, sampling, room, stack)
    model = load_target(run.target.directory, getattr(torch, responses.dtype), ranks.device) if is_ours else None
    return answer


def processor_s() -> float:
    """Returns the processor time of this process and of all that it has started and that still run."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=[str(AnsweringEngine.transformers)], metavar="ENGINE[:DTYPE]")
    parser.add_argument("--questions", type=positive, default=64)
    run_benchmark(main, parser)
