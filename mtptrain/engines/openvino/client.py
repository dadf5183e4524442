"""Decodes prompts with OpenVINO GenAI, in a process started here, and counts our drafts by its rules.

OpenVINO's converter needs other versions of transformers than training does. It therefore has an environment of its own
(`make .venv-openvino/.installed`).
"""

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtptrain.decoding.speculate import Generation
from mtptrain.engines.engine import Decoder, EngineCounts, EngineRun
from mtptrain.engines.exports import WRITTEN_FOR, warn_of_other_version
from mtptrain.engines.worker import EngineCrashed, how_to_install, printed_by, run_worker
from mtptrain.settings.evaluation import OpenvinoWeights
from mtptrain.utils.errors import UserError

NAME = "OpenVINO"
WORKER = Path(__file__).with_name("openvino_worker.py")
DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-openvino" / "bin" / "python"
RULE = (
    "OpenVINO reports the tokens of each round and neither the drafted ones nor those past the end of an answer: in "
    "each round, ours are counted as its tokens without the last one, and drafted tokens are not compared."
)


def find_openvino_python(python: str | None) -> Path:
    """Returns the Python interpreter for OpenVINO: `python`, or that of `.venv-openvino` at the top of the checkout.

    Raises:
        UserError: the interpreter does not exist, or OpenVINO GenAI is not installed for it.
    """
    path = DEFAULT_PYTHON if python is None else Path(python)
    if not path.is_file() or not openvino_version(path):
        packages = f"openvino-genai=={WRITTEN_FOR['openvino']}.* and optimum-intel"
        install = how_to_install(".venv-openvino", f"install {packages} into an environment of its own")
        raise UserError(
            f"serving.openvino_python: must be a Python with OpenVINO GenAI, but {path} "
            f"{'has none' if path.is_file() else 'does not exist'}; {install}, or set "
            "serving.openvino_python to the Python of an environment with openvino-genai and optimum-intel"
        )
    return path


def openvino_version(python: Path) -> str | None:
    """Returns the version of OpenVINO GenAI that is installed for an interpreter; None if there is none."""
    return printed_by(python, "from importlib.metadata import version; print(version('openvino-genai'))")


@dataclass(frozen=True)
class OpenvinoModels:
    """A target and an exported head, which OpenVINO's Python converts."""

    python: Path
    target_dir: Path
    head_dir: Path
    weights: OpenvinoWeights = OpenvinoWeights.fp32
    """The type of the weights after conversion."""
    converted_target: Path | None = None
    """A folder that keeps the converted target for later runs, set only by tests; None converts it for one run."""
    converted_head: Path | None = None
    """A folder that keeps the converted head, set only by tests; None converts it for one run."""

    def job(self, directory: Path, num_speculative_tokens: int, **more: Any) -> dict[str, Any]:
        """Returns a job of the worker, which converts into `directory` whatever has no folder that keeps it."""
        return more | {
            "target": str(self.target_dir),
            "head": str(self.head_dir),
            "converted_target": str(self.converted_target or directory / "target"),
            "converted_head": str(self.converted_head or directory / "head"),
            "weights": str(self.weights),
            "num_speculative_tokens": num_speculative_tokens,
        }

    def run(self, mode: str, job: dict[str, Any]) -> dict[str, Any]:
        """Returns the worker's result for a job, and warns of a version that was not tested.

        If OpenVINO crashes, it is started once more: 2026.4 seldom but at random damages its own memory and ends.
        Source: github.com/openvinotoolkit/openvino.genai/issues/4425.

        Raises:
            UserError: OpenVINO cannot convert or serve the target or the head.
        """
        try:
            result = run_worker(self.python, WORKER, mode, job, NAME)
        except EngineCrashed as crash:
            warnings.warn(f"OpenVINO crashed, and is started once more: {crash}", stacklevel=2)
            result = run_worker(self.python, WORKER, mode, job, NAME)
        if result["version"].rsplit(".", 1)[0] != WRITTEN_FOR["openvino"]:
            place = f"serving.openvino_python={self.python}"
            warn_of_other_version("openvino", "OpenVINO GenAI", result["version"], place)
        return result


@dataclass(frozen=True)
class OpenvinoProcess(Decoder):
    """Decodes with OpenVINO in a new process for each list of prompts."""

    models: OpenvinoModels
    num_speculative_tokens: int
    name = NAME
    advice = "export the head again"

    @property
    def may_round(self) -> bool:
        """Whether the converted weights are other than the target's."""
        return self.models.weights is not OpenvinoWeights.fp32

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> EngineRun:
        """Returns greedy answers to prompts of token ids, in fp32, and the drafts accepted in each round.

        Raises:
            UserError: OpenVINO cannot convert or serve the target or the head.
        """
        with tempfile.TemporaryDirectory(prefix="mtptrain-openvino-") as directory:
            job = self.models.job(
                Path(directory),
                self.num_speculative_tokens,
                max_new_tokens=max_new_tokens,
                stop_token_ids=list(stop_token_ids),
                prompts=[list(prompt) for prompt in prompts],
            )
            result = self.models.run("decode", job)
        accepted = accepted_of(result["steps"])
        counts = counts_of(accepted, self.num_speculative_tokens)
        return EngineRun(result["version"], result["tokens"], counts, accepted)

    def counted(
        self,
        generations: Sequence[Generation],
        num_speculative_tokens: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> tuple[EngineCounts, str]:
        """Returns what OpenVINO counts for our answers, and a sentence on its rules."""
        accepted = []
        for generation in generations:
            rounds, position = [], 1  # the target chose token 0 itself
            for num_accepted in generation.accepted_by_round:
                rounds.append(min(num_accepted, len(generation.tokens) - position - 1))
                position += num_accepted + 1
            accepted.append(rounds)
        return counts_of(accepted, num_speculative_tokens), RULE


def accepted_of(steps: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the number of accepted drafts in each round of each answer, from the number of tokens of each step.

    The first step reads the prompt. In every other one, the last token is the target's own.
    """
    return [[num_tokens - 1 for num_tokens in of_answer[1:]] for of_answer in steps]


def counts_of(accepted: Sequence[Sequence[int]], num_speculative_tokens: int) -> EngineCounts:
    """Returns the counters for the number of accepted drafts in each round of each answer."""
    rounds = [num_accepted for answer in accepted for num_accepted in answer]
    depths = range(max((num_speculative_tokens, *rounds)))
    return EngineCounts(len(rounds), None, [sum(depth < num for num in rounds) for depth in depths])
