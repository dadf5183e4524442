"""Finds the engines of this machine, and says what is known of their versions."""

from collections.abc import Callable

from mtptrain.serving.exports import WRITTEN_FOR
from mtptrain.serving.llama_server import find_llama_server, llama_version
from mtptrain.serving.openvino_client import find_openvino_python, openvino_version
from mtptrain.serving.vllm_client import find_python, vllm_version
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.utils.errors import UserError

KNOWN = {
    ("vLLM", "0.32"): "tested; on a CPU it samples wrongly with drafts above temperature 0",
    ("vLLM", "0.33"): "not tested; it has no medusa",
}
"""Facts about versions of engines."""
FOUND: dict[str, tuple[str, Callable[[ServingConfig], str | None]]] = {
    "vLLM": ("vllm", lambda serving: vllm_version(find_python(serving.python, warns=False))),
    "llama.cpp": ("llama_cpp", lambda serving: llama_version(find_llama_server(serving.llama_server))),
    "OpenVINO GenAI": ("openvino", lambda serving: openvino_version(find_openvino_python(serving.openvino_python))),
}
"""Each engine by the name that users know, with its key in `WRITTEN_FOR`, and what finds its version."""


def describe_engines(serving: ServingConfig) -> str:
    """Returns a line for each engine: its version and what is known of it, or that it was not found and what to do."""
    lines = []
    for name, (engine, find) in FOUND.items():
        try:
            version = find(serving) or "of an unknown version"
        except (UserError, OSError) as error:  # OSError: a Python that cannot be run
            lines.append(f"{name}: not found ({str(error).rpartition('; ')[2]})")
            continue
        known = KNOWN.get((name, ".".join(version.split(".")[:2])), f"tested is {WRITTEN_FOR[engine]}")
        lines.append(f"{name} {version}: {known}")
    return "\n".join(lines)
