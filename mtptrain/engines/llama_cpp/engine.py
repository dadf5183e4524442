"""llama.cpp as an engine that `engines.ENGINES` names: what it needs, and how it is started."""

from collections.abc import Sequence
from pathlib import Path

from mtptrain.engines.base import Engine, Served
from mtptrain.engines.engine import Load, LoadResult, Requests
from mtptrain.engines.llama_cpp.server import (
    HEAD_FILE,
    LlamaProcess,
    LlamaServer,
    find_llama_server,
    is_in_fp32,
    llama_version,
    server_arguments,
)
from mtptrain.engines.load import send_all
from mtptrain.engines.server_process import started_server
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.gguf import fingerprint, require_same_sizes
from mtptrain.utils.errors import UserError


class LlamaCpp(Engine):
    """llama.cpp's program `llama-server`."""

    name = "llama.cpp"
    program_setting = "llama_server"
    server = LlamaServer

    def find_program(self, serving: ServingConfig, *, warns: bool = True) -> Path:
        return find_llama_server(serving.llama_server)

    def version(self, program: Path) -> str | None:
        return llama_version(program)

    def check_target(self, target: TargetFiles) -> None:
        """Check the target's GGUF file.

        Raises:
            UserError: no setting names it, or it is that of another target.
        """
        if target.gguf is None:
            raise UserError(
                "target.gguf: must be the target as a GGUF file, which llama.cpp serves, but is left out; convert the "
                f"target with `python convert_hf_to_gguf.py {target.directory} --outtype f32 --outfile TARGET.gguf` of "
                "llama.cpp, and set target.gguf=TARGET.gguf"
            )
        require_same_sizes(target.gguf, target.config)

    def report_types(self, target: TargetFiles, serving: ServingConfig, dtype: str) -> dict[str, str | None]:
        return {"dtype": None, "gguf": str(target.gguf)}

    def served_types(self, target: TargetFiles, serving: ServingConfig, export_dtype: str) -> list[str | None] | None:
        file = target.gguf
        return [fingerprint(file) if file and file.is_file() else None, export_dtype]

    def decoder(self, served: Served, num_drafts: int) -> LlamaProcess:
        gguf, head_file = served.target.gguf, served.head_dir / HEAD_FILE
        assert gguf is not None
        command = server_command(served, num_drafts, num_slots=1, is_exact=served.dtype == "float32")
        may_round = not (is_in_fp32(gguf) and is_in_fp32(head_file))
        return LlamaProcess(command, served.log_dir / "llama-server.log", may_round)

    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        command = [*server_command(served, num_drafts, served.concurrency, is_exact=False), *served.server_args]
        with started_server(LlamaServer, command, served.log_path(num_drafts)) as server:
            return send_all(server, requests, loads)


def server_command(served: Served, num_drafts: int, num_slots: int, is_exact: bool) -> list[Path | str]:
    """Returns the command that serves a target and an exported head with K = `num_drafts`; 0 serves the target alone.

    `num_slots` requests are answered at a time.
    """
    assert served.target.gguf is not None
    head = (served.head_dir / HEAD_FILE, str(served.facts["method"]), num_drafts) if num_drafts else None
    return [served.program, *server_arguments(served.target.gguf, served.context_tokens, num_slots, is_exact, head)]
