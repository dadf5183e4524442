"""Builds what llama.cpp serves: targets by its own converter, heads by our export."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.llama_cpp.engine import DEFAULT_SERVER, ENGINE, find_llama_server
from mtptrain.engines.llama_cpp.server import LlamaServer, server_arguments
from mtptrain.engines.process import started_server
from mtptrain.engines.requests import EngineCounts
from mtptrain.engines.table import format_for
from mtptrain.export import check_tensors, write_head
from mtptrain.heads.base import Head
from tests.gguf_files import tokenizer_settings
from tests.serving.cases import CONTEXT_TOKENS, EOS, HEADS, Case
from tests.serving.ours import QUESTIONS, OnDisk, Serve, drafted_here

SOURCE = DEFAULT_SERVER.parents[1] / "source"
Ask = Callable[[LlamaServer], Any]
GREEDILY: Ask = methodcaller("generate", QUESTIONS)


def convert(source: Path, out: Path, *arguments: str) -> Path:
    """Converts a model or a head to GGUF with llama.cpp's own program, in fp32."""
    tokenizer = out.with_suffix(".json")
    tokenizer.write_text(json.dumps(tokenizer_settings(EOS)))
    command = [sys.executable, "tests/serving/llama_converter.py", str(SOURCE), str(tokenizer), str(source)]
    command += ["--outtype", "f32", "--outfile", str(out), *arguments]
    result = subprocess.run(command, capture_output=True, check=False, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return out


@pytest.fixture(scope="session")
def llama_server() -> Iterator[Path]:
    """Yields the program of the checkout, which uses one thread, or skips the test if it was not built."""
    if not (DEFAULT_SERVER.parents[1] / ".installed").is_file():
        pytest.skip("NOTHING IS SERVED BY LLAMA.CPP: run `make .engines/llama_cpp/.installed`")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_ARG_THREADS", "1")
        yield find_llama_server(None)


@pytest.fixture(scope="session")
def gguf_of(target_of: Callable[[str], OnDisk], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that converts each target once."""
    directory = tmp_path_factory.mktemp("gguf")
    return cache(lambda name: convert(target_of(name).directory, directory / f"{name}.gguf"))


@pytest.fixture(scope="session")
def serve_by_llama(
    llama_server: Path,
    gguf_of: Callable[[str], Path],
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path_factory: pytest.TempPathFactory,
) -> Serve:
    """Returns a function that serves a case, and returns our answers, the engine's, and our counts by its rules.

    With further arguments of the server, it may be asked otherwise than for greedy answers.
    """

    def serve(case: Case, *further: str, ask: Ask = GREEDILY) -> tuple[list[Generation], Any, EngineCounts]:
        directory, num_drafts, gguf = tmp_path_factory.mktemp("head"), case.num_speculative_tokens, gguf_of(case.target)
        form = format_for("llama_cpp", HEADS[case.head], target_of(case.target).target.config, gguf)
        write_head(directory, form, head_of(case.head, case.target).state_dict())
        check_tensors(directory, form)
        head = directory / form.weights_name, form.method, num_drafts
        arguments = server_arguments(gguf, CONTEXT_TOKENS, 1, True, head)
        with started_server(LlamaServer, [llama_server, *arguments, *further], directory / "server.log") as server:
            theirs = ask(server)
        ours = drafted_here(case, target_of, head_of)
        return ours, theirs, ENGINE.counted(ours, num_drafts, QUESTIONS)[0]

    return serve
