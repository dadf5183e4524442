"""The interface of an engine. Each engine implements it in a file of its own, and `engines.ENGINES` names them all."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtptrain.engines.engine import Decoder, Load, LoadResult, Requests
from mtptrain.engines.server import EngineServer
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.files import TargetFiles


@dataclass(frozen=True)
class Served:
    """A target and an exported head that an engine serves, and how."""

    program: Path
    """The result of the engine's `find_program`."""
    target: TargetFiles
    head_dir: Path
    """The export."""
    facts: dict[str, Any]
    """Contents of the export's `serving.json`."""
    serving: ServingConfig
    dtype: str
    """`acceptance.dtype`."""
    context_tokens: int
    """Number of tokens of the longest prompt, its answer and spare drafts."""
    concurrency: int
    """Maximum number of requests in flight."""
    log_dir: Path
    server_args: Sequence[str] = ()
    """`serving_bench.server_args`."""

    def log_path(self, num_drafts: int) -> Path:
        """Returns the file for what a server prints that drafts K = `num_drafts` tokens."""
        return self.log_dir / f"server_K{num_drafts}.log"


class Engine(ABC):
    """An engine that mtptrain starts or asks."""

    name: str
    """The name that users know."""
    program_setting: str
    """The field of `ServingConfig` that names the engine's program."""
    server: type[EngineServer] | None = None
    """The client of a running server; None if the engine has no server."""
    has_settings = False
    """Whether settings for K at each batch size are written from its speeds."""
    known_of: Mapping[str, str] = {}
    """Remarks on versions, by their first two numbers."""

    @abstractmethod
    def find_program(self, serving: ServingConfig, *, warns: bool = True) -> Path:
        """Returns the engine's program, or a Python that has the engine, and warns of a version that was not tested.

        Raises:
            UserError: it does not exist, or is another program.
        """

    @abstractmethod
    def version(self, program: Path) -> str | None:
        """Returns the version of the engine; None if that is unknown."""

    def check_target(self, target: TargetFiles) -> None:  # noqa: B027 (most engines read the target's directory)
        """Check that the engine has a file of the target.

        Raises:
            UserError: it has none.
        """

    def check_bench(self, program: Path, head_name: str, concurrency: int, temperature: float) -> None:  # noqa: B027
        """Check that the engine can run a benchmark with a head, with this many requests in flight.

        Raises:
            UserError: it cannot.
        """

    def report_types(self, target: TargetFiles, serving: ServingConfig, dtype: str) -> dict[str, str | None]:
        """Returns entries of a report: what chose the type of the weights. `dtype` is None if that setting did not."""
        return {"dtype": dtype}

    def served_types(self, target: TargetFiles, serving: ServingConfig, export_dtype: str) -> list[str | None] | None:
        """Returns what tells the weights that the engine serves from others of the same run; None if nothing does."""
        return None

    @abstractmethod
    def decoder(self, served: Served, num_drafts: int) -> Decoder:
        """Returns the engine with K = `num_drafts`, which starts when it is asked."""

    @abstractmethod
    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        """Run loads one after another with K = `num_drafts`; 0 decodes without drafts. Returns version and results.

        The engine may keep files for a benchmark's next K in `scratch_dir`.

        Raises:
            UserError: the engine or a request failed.
        """
