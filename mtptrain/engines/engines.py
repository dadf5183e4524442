"""The table of engines, and what is known of those on this machine."""

from mtptrain.engines.base import Engine
from mtptrain.engines.exports import WRITTEN_FOR
from mtptrain.engines.llama_cpp.engine import LlamaCpp
from mtptrain.engines.openvino.engine import Openvino
from mtptrain.engines.vllm.engine import Vllm
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.utils.errors import UserError

ENGINES: dict[str, Engine] = {"vllm": Vllm(), "llama_cpp": LlamaCpp(), "openvino": Openvino()}


def describe_engines(serving: ServingConfig) -> str:
    """Returns a line for each engine: its version and what is known of it, or that it was not found and what to do."""
    lines = []
    for key, engine in ENGINES.items():
        try:
            version = engine.version(engine.find_program(serving, warns=False)) or "of an unknown version"
        except (UserError, OSError) as error:  # OSError: a Python that cannot be run
            lines.append(f"{engine.name}: not found ({str(error).rpartition('; ')[2]})")
            continue
        known = engine.known_of.get(".".join(version.split(".")[:2]), f"tested is {WRITTEN_FOR[key]}")
        lines.append(f"{engine.name} {version}: {known}")
    return "\n".join(lines)
