"""Finds the engine that `mtptrain serving-check` asks, after quick checks of everything that it needs.

`mtptrain serving-bench` shares the checks.
"""

from pathlib import Path
from typing import Any

import torch

from mtptrain.config import Dtype, PipelineConfig
from mtptrain.convert.llama_cpp import GgufFormat
from mtptrain.decoding.prompts import check_head_context
from mtptrain.run import Run
from mtptrain.serving.engine import Engine
from mtptrain.serving.exports import cache_bytes, read_serving_facts, served_model, speculative_config
from mtptrain.serving.llama_server import (
    LlamaProcess,
    LlamaServer,
    find_llama_server,
    is_in_fp32,
    server_arguments,
)
from mtptrain.serving.openvino_client import OpenvinoModels, OpenvinoProcess, find_openvino_python
from mtptrain.serving.vllm_client import GenerateJob, VllmProcess, find_python
from mtptrain.serving.vllm_server import VllmServer
from mtptrain.settings.evaluation import ServingConfig, ServingEngine
from mtptrain.target.files import TargetFiles
from mtptrain.target.gguf import fingerprint, require_same_sizes
from mtptrain.target.hub import weights_fingerprint
from mtptrain.utils.errors import UserError

CACHED_SEQUENCES = 64
"""Number of sequences that fit into the KV cache of vLLM on a CPU. Its default takes nearly all memory."""
SERVERS: dict[ServingEngine, type[VllmServer] | type[LlamaServer]] = {
    ServingEngine.vllm: VllmServer,
    ServingEngine.llama_cpp: LlamaServer,
}


def find_program(serving: ServingConfig) -> Path:
    """Returns the program that runs the engine of the settings: `llama-server`, or a Python that has the engine.

    Raises:
        UserError: it does not exist, or is another program.
    """
    if serving.engine is ServingEngine.llama_cpp:
        return find_llama_server(serving.llama_server)
    if serving.engine is ServingEngine.openvino:
        return find_openvino_python(serving.openvino_python)
    return find_python(serving.python)


def running_server(serving: ServingConfig) -> VllmServer | LlamaServer:
    """Returns the server at `serving.url`.

    Raises:
        UserError: it does not answer, or it is another engine's, or the engine has no server.
    """
    assert serving.url is not None
    if serving.engine not in SERVERS:
        raise UserError(
            f"serving.url: must be the address of a server of {' or '.join(SERVERS)}, but serving.engine is "
            f"{serving.engine}, which is started here; leave one of them out"
        )
    return SERVERS[serving.engine](serving.url)


def spare_tokens(config: PipelineConfig) -> int:
    """Returns the number of tokens to keep free at the end of the context.

    If one request comes closer to the end than twice K tokens, vLLM's drafts become useless for all
    requests, and llama.cpp drafts fewer tokens.
    """
    return 2 * config.acceptance.num_speculative_tokens


def find_engine(run: Run, prompts: dict[str, list[int]], output_dir: Path) -> Engine:
    """Returns the engine after quick checks: those of a running server, otherwise those of export and program.

    Raises:
        UserError: the engine's program or the exported head does not exist, or no server answers, or the export is for
            another engine or holds another head, or the server is of another kind or serves another model, or the
            server or the head has too short a context.
    """
    config, serving, settings = run.config, run.config.serving, run.config.acceptance
    found = run.head(getattr(torch, settings.dtype), torch.device("cpu"))
    lengths = settings.max_new_tokens, settings.num_speculative_tokens
    check_head_context(found.head, prompts.values(), *lengths, setting="head")
    needed_tokens = max(map(len, prompts.values())) + settings.max_new_tokens + spare_tokens(config)
    if serving.url is not None:
        server = running_server(serving)
        check_server(server, run.target, run.served_head_dir, needed_tokens)
        if isinstance(server, LlamaServer):
            head_file = run.served_head_dir / GgufFormat.weights_name
            server.may_round |= head_file.is_file() and not is_in_fp32(head_file)
        return server
    facts = read_serving_facts(run.served_head_dir, serving.engine, found.sha256)
    if serving.engine is ServingEngine.llama_cpp:
        return llama_process(run, str(facts["method"]), needed_tokens, output_dir)
    if serving.engine is ServingEngine.openvino:
        directories = run.target.directory, run.served_head_dir
        models = OpenvinoModels(find_program(serving), *directories, serving.openvino_weights)
        return OpenvinoProcess(models, settings.num_speculative_tokens)
    return vllm_process(run, facts, needed_tokens)


def vllm_process(run: Run, facts: dict[str, Any], needed_tokens: int) -> VllmProcess:
    serving, settings, head_dir = run.config.serving, run.config.acceptance, run.served_head_dir
    has_gpu = torch.cuda.is_available()
    job = GenerateJob(
        name="vllm",
        target_dir=str(served_model(facts, head_dir, run.target.directory)),
        prompts=(),
        max_new_tokens=settings.max_new_tokens,
        max_model_len=needed_tokens,
        speculative_config=speculative_config(facts, head_dir, settings.num_speculative_tokens),
        dtype=str(settings.dtype),
        kv_cache_memory_bytes=None
        if has_gpu
        else cache_bytes(run.target.config, head_dir, needed_tokens, CACHED_SEQUENCES),
        tensor_parallel_size=serving.tensor_parallel_size,
        device_type="cuda" if has_gpu else "cpu",
    )
    return VllmProcess(find_program(serving), job)


def llama_process(run: Run, method: str, needed_tokens: int, output_dir: Path) -> LlamaProcess:
    """Returns the server that decodes with the target's GGUF file.

    Raises:
        UserError: there is no `llama-server`, or no setting names the target's GGUF file, or it is another target's.
    """
    settings, head_file = run.config.acceptance, run.served_head_dir / GgufFormat.weights_name
    program, gguf = find_program(run.config.serving), require_gguf(run)
    may_round = not (is_in_fp32(gguf) and is_in_fp32(head_file))
    is_exact = settings.dtype == Dtype.float32
    head = head_file, method, settings.num_speculative_tokens
    arguments = server_arguments(gguf, needed_tokens, 1, is_exact, head)
    timeout_s = run.config.serving_bench.start_timeout_s
    return LlamaProcess(program, arguments, output_dir / "llama-server.log", timeout_s, may_round)


def check_server(server: VllmServer | LlamaServer, target: TargetFiles, head_dir: Path, needed_tokens: int) -> None:
    """Check that a running server serves the target, and that its context holds the longest prompt, answer and drafts.

    Args:
        server: the server.
        target: the target that it must serve.
        head_dir: the run's export. That of a MiMo head holds the target, and is what vLLM serves.
        needed_tokens: number of tokens of the longest prompt, its answer and spare drafts.

    Raises:
        UserError: it serves another model, or its context is shorter.
    """
    if isinstance(server, LlamaServer):
        check_served_file(server, target.gguf)
    elif Path(server.root).resolve() != head_dir.resolve() and not is_same_model(server.root, target):
        raise UserError(
            f"serving.url: the server must serve {target.path}, but {server.shown_url} serves {server.root}; ask "
            "another server, or set target.path"
        )
    if server.max_model_len < needed_tokens:
        raise UserError(
            f"serving.url: the server's context must hold {needed_tokens} tokens (the longest prompt, "
            "acceptance.max_new_tokens and 2 x acceptance.num_speculative_tokens), but holds "
            f"{server.max_model_len}; start it with {'-c' if isinstance(server, LlamaServer) else '--max-model-len'} "
            f"{needed_tokens}"
        )


def is_same_model(root: str, target: TargetFiles) -> bool:
    """Returns whether a server that was started with `root` serves the target.

    If `root` is a directory on this machine, it must hold the target's weights. If it is a hub name or a path on
    another machine, its last component must be that of the target's path.
    """
    if Path(root).is_dir():
        return weights_fingerprint(Path(root)) == target.weights_sha256
    return Path(root).name.lower() in (Path(target.path).name.lower(), target.directory.name.lower())


def check_served_file(server: LlamaServer, gguf: Path | None) -> None:
    """Refuse a running server of another file than the target's. A file on another machine must have its name.

    Without a setting that names the target's file, nothing is compared.

    Raises:
        UserError: it serves another file.
    """
    served = Path(server.root)
    if gguf is None:
        return
    are_here = served.is_file() and gguf.is_file()
    is_same = fingerprint(served) == fingerprint(gguf) if are_here else served.name == gguf.name
    if not is_same:
        raise UserError(
            f"serving.url: the server must serve {gguf}, but {server.shown_url} serves {server.root}, which is another "
            "file; ask another server, or set target.gguf"
        )


def require_gguf(run: Run) -> Path:
    """Returns the target's GGUF file.

    Raises:
        UserError: no setting names it, or it is that of another target.
    """
    gguf = run.target.gguf
    if gguf is None:
        raise UserError(
            "target.gguf: must be the target as a GGUF file, which llama.cpp serves, but is left out; convert the "
            f"target with `python convert_hf_to_gguf.py {run.target.directory} --outtype f32 --outfile TARGET.gguf` of "
            "llama.cpp, and set target.gguf=TARGET.gguf"
        )
    require_same_sizes(gguf, run.target.config)
    return gguf
