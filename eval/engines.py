"""Finds the engine of `mtptrain serving-check` and `mtptrain serving-bench`, after quick checks of what it needs."""

from collections.abc import Sequence
from pathlib import Path

import torch

from mtptrain.config import PipelineConfig
from mtptrain.decoding.prompts import check_head_context
from mtptrain.engines.base import Served
from mtptrain.engines.exports import read_serving_facts
from mtptrain.engines.server import EngineServer
from mtptrain.engines.table import running_engine
from mtptrain.init_from.start import trained_or_initial_head
from mtptrain.run_dir import Run
from mtptrain.stage_dir import StageDir

Prompts = Sequence[Sequence[int]]


def spare_tokens(num_drafts: int) -> int:
    """Returns the number of tokens to keep free at the end of the context with K = `num_drafts`.

    If one request comes closer to the end than twice K tokens, vLLM's drafts become useless for all requests, and
    llama.cpp drafts fewer tokens.
    """
    return 2 * num_drafts


def context_tokens(prompts: Prompts, max_new_tokens: int, num_drafts: int) -> int:
    return max(map(len, prompts)) + max_new_tokens + spare_tokens(num_drafts)


def output_folder(config: PipelineConfig, program: str) -> StageDir:
    return StageDir(Path(config.serving.output_dir or config.run_dir) / program, "serving.output_dir")


def find_server(run: Run, prompts: Prompts, num_drafts: int, concurrency: int = 1) -> EngineServer | None:
    serving, kind = run.config.serving, running_engine(run.config.serving.engine).server
    if serving.url is None:
        return None
    assert kind is not None, "see ENGINES_WITH"
    server = kind(serving.url)
    server.check_model(run.target, run.served_head_dir)
    server.check_room(context_tokens(prompts, run.config.acceptance.max_new_tokens, num_drafts), concurrency)
    return server


def find_served(run: Run, prompts: Prompts, num_drafts: int, log_dir: Path, concurrency: int) -> Served:
    """Returns the target and the export for an engine that is started here, with at most K = `num_drafts`."""
    engine = running_engine(run.config.serving.engine)
    engine.check_target(run.target)
    program = engine.find_program(run.config.serving)
    head_sha256, config = check_head(run, prompts, num_drafts), run.config
    return Served(
        program=program,
        target=run.target,
        head_dir=run.served_head_dir,
        facts=read_serving_facts(run.served_head_dir, config.serving.engine, head_sha256),
        serving=config.serving,
        dtype=str(config.acceptance.dtype),
        context_tokens=context_tokens(prompts, config.acceptance.max_new_tokens, num_drafts),
        concurrency=concurrency,
        log_dir=log_dir,
        server_args=config.serving_bench.server_args,
    )


def check_head(run: Run, prompts: Prompts, num_drafts: int) -> str:
    """Returns the hash of the run's head."""
    dtype = getattr(torch, run.config.acceptance.dtype)
    found = trained_or_initial_head(run.stage_dir("train"), run.head, run.target, dtype, torch.device("cpu"))
    check_head_context(found.head, prompts, run.config.acceptance.max_new_tokens, num_drafts, "head")
    return found.sha256
