"""Serves the cases of all selected tests in one vLLM process per session, and starts vLLM servers for single tests."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.process import CHECKOUT, started_server
from mtptrain.engines.vllm import client as vllm
from mtptrain.engines.vllm.engine import ENVIRONMENT
from mtptrain.engines.vllm.formats import speculative_config
from mtptrain.engines.vllm.server import VllmServer
from mtptrain.heads.base import Head
from mtptrain.heads.files import TARGET_WEIGHTS, save_head
from mtptrain.target.hub import weights_fingerprint
from mtptrain.target.loading import load_target
from tests.conftest import TINY_SETTINGS, Run, make_config, succeed, write_text_files
from tests.serving.cases import Case, broken_cases, cases_of
from tests.serving.llama_cpp import gguf_of, llama_server, serve_by_llama  # noqa: F401 (fixtures)
from tests.serving.ours import OnDisk, drafted_here
from tests.serving.vllm_jobs import KV_CACHE_BYTES, JobRun, generate, job_of
from tests.serving.workers import (  # noqa: F401 (fixtures)
    mlx_python,
    mlx_target_of,
    openvino_dir,
    openvino_python,
    serve_by_mlx,
    serve_by_openvino,
)
from tests.serving.writing import make_head, make_served_target, write_served_head

CPU_PYTHON = CHECKOUT / ".venv-vllm-cpu" / "bin" / "python"
"""Python with vLLM for CPUs on a machine with GPUs, where `.venv-vllm` holds vLLM for GPUs."""

EAGLE3 = ["head=eagle3", "head.capture_layers=[1,2,3]", "head.norm_before_fc=false", "head.norm_output=false"]
SETTINGS = {
    "eagle3": EAGLE3,
    "dflash": ["head=dflash", "head.capture_layers=[1,2,3]", "head.ttt_steps=3"],
    "draft_model": ["head=draft_model", "head.num_hidden_layers=2"],
}


@dataclass(frozen=True)
class Served:
    """Holds what mtptrain and vLLM generated for a case."""

    ours: list[Generation]
    """mtptrain's answers with the intact head, even if vLLM served a broken one."""
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
    """Returns a function that makes each head of `HEADS` once for each target."""
    return cache(lambda head, target: make_head(target_of(target).target, head))


@pytest.fixture(scope="session")
def serve_by_vllm(
    vllm_python: str,
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Sequence[Case], bool], dict[Case, Served]]:
    """Returns a function that serves cases in one process of vLLM, while mtptrain decodes the same prompts."""

    def serve(cases: Sequence[Case], with_plugin: bool) -> dict[Case, Served]:
        exports, jobs = tmp_path_factory.mktemp("exports"), []
        for number, case in enumerate(cases):
            head = deepcopy(head_of(case.head, case.target)).to(getattr(torch, case.dtype))
            on_disk, export = target_of(case.target), exports / f"export_{number}"
            facts = write_served_head(export, on_disk.target, on_disk.directory, case, head)
            if with_plugin:
                config = json.loads((export / "config.json").read_text())
                (export / "config.json").write_text(json.dumps(config | {"architectures": ["DFlashDraftModel"]}))
                facts["method"] = "dflash"
            target_dir = export if facts["holds_target"] else on_disk.directory
            draft = speculative_config(facts, export, case.num_speculative_tokens)
            jobs.append(job_of(str(case), target_dir, draft, case.dtype))
        with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patched:
            if with_plugin:
                patched.setenv("PYTHONPATH", str(Path(__file__).parent / "vllm_plugin"))
            running = pool.submit(generate, jobs, Path(vllm_python))
            whole = {
                case: drafted_here(case, target_of, head_of) for case in {replace(each, broken="") for each in cases}
            }
            runs = running.result()
        return {case: Served(whole[replace(case, broken="")], run) for case, run in zip(cases, runs, strict=True)}

    return serve


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest, serve_by_vllm: Callable[[Sequence[Case], bool], dict[Case, Served]]
) -> Callable[[Case], Served]:
    """Returns a function that serves a case, together with those of all other selected tests when it is first asked."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    selected = {each.params["case"]: None for each in parameters if each and isinstance(each.params.get("case"), Case)}
    for_plugin = {*cases_of("vllm with a plugin"), *broken_cases("vllm with a plugin")}
    kinds = {False: {*cases_of("vllm"), *cases_of("vllm in bf16"), *broken_cases("vllm")}, True: for_plugin}

    @cache
    def serve_all(with_plugin: bool) -> dict[Case, Served]:
        return serve_by_vllm([case for case in selected if case in kinds[with_plugin]], with_plugin)

    return lambda case: serve_all(case in for_plugin)[case]


@pytest.fixture(scope="session")
def run_of(
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Callable[[str], Run]:
    """Returns a function that makes the folder of a run with a trained head that is exported for an engine, and the
    run's overrides, once for each engine. For MLX, a head may follow the engine."""

    @cache
    def make(kind: str) -> Run:
        engine, head = {"mlx": "mlx draft_model"}.get(kind, f"{kind} eagle3").split()[:2]
        directory, target = tmp_path_factory.mktemp("run"), "llama"
        targets = target_of
        if engine == "mlx":
            targets = request.getfixturevalue("mlx_target_of")
            target = {"eagle3": "qwen3_5", "dflash": "qwen3_5_shared"}.get(head, "llama")
        target_dir = targets(target).directory
        programs = {
            "vllm": lambda: f"serving.program={request.getfixturevalue('vllm_python')}",
            "llama_cpp": lambda: f"target.gguf={request.getfixturevalue('gguf_of')('llama')}",
            "openvino": lambda: f"serving.program={request.getfixturevalue('openvino_python')}",
            "mlx": lambda: f"serving.program={request.getfixturevalue('mlx_python')}",
        }
        overrides = (
            *(setting for setting in TINY_SETTINGS if not setting.startswith("acceptance.")),
            *(f"run_dir={directory}", f"target.path={target_dir}"),
            f"prompts.paths=[{write_text_files(directory / 'files', num_files=80)}]",
            *SETTINGS[head],
            *("acceptance.prompt_tokens=32", "acceptance.num_prompts=12", "acceptance.max_new_tokens=32"),
            *(f"export.engine={engine}", f"serving.engine={engine}", programs[engine]()),
        )
        facts: dict[str, object] = {TARGET_WEIGHTS: weights_fingerprint(target_dir)}
        state = head_of(head, target).state_dict()
        save_head(directory / "train/best", state, make_config(*overrides).head, facts)
        for module in ("prompts", "export"):
            succeed(module, *overrides)
        return directory, overrides

    return make


@contextmanager
def vllm_server(python: str, target_dir: Path, log_path: Path, *arguments: str) -> Iterator[str]:
    """Starts a vLLM server of the target in fp32, with a context of 512 tokens, and yields its address."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target_dir), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    with started_server(VllmServer, [*command, *arguments], log_path, ENVIRONMENT) as server:
        yield server.url
