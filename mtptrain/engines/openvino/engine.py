"""OpenVINO as an engine that `engines.ENGINES` names. It has no server: its worker decodes the requests of a load."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mtptrain.engines.base import Engine, Served
from mtptrain.engines.engine import Answer, Load, LoadResult, Requests
from mtptrain.engines.openvino.client import (
    NAME,
    OpenvinoModels,
    OpenvinoProcess,
    accepted_of,
    counts_of,
    find_openvino_python,
    openvino_version,
)
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError


class Openvino(Engine):
    """OpenVINO GenAI in an environment of its own."""

    name = NAME
    program_setting = "openvino_python"

    def find_program(self, serving: ServingConfig, *, warns: bool = True) -> Path:
        return find_openvino_python(serving.openvino_python)

    def version(self, program: Path) -> str | None:
        return openvino_version(program)

    def check_bench(self, program: Path, head_name: str, concurrency: int, temperature: float) -> None:
        """Refuse what OpenVINO cannot do: sample with drafts, or decode several requests at a time with `dflash`.

        Raises:
            UserError: it is asked to.
        """
        if temperature > 0:
            raise UserError(
                "acceptance.temperature: must be 0 in OpenVINO 2026.4, which with a draft samples other texts than "
                f"without (with an EAGLE-3 head, garbage), but is {temperature:g}; leave it out, or set another "
                "serving.engine"
            )
        if head_name == "dflash" and concurrency > 1:
            raise UserError(
                "serving_bench.concurrency: must be [1] with head dflash in OpenVINO, which decodes one request at a "
                f"time with it, but goes up to {concurrency}; set serving_bench.concurrency=[1]"
            )

    def report_types(self, target: TargetFiles, serving: ServingConfig, dtype: str) -> dict[str, str | None]:
        return {"dtype": None, "openvino_weights": str(serving.openvino_weights)}

    def served_types(self, target: TargetFiles, serving: ServingConfig, export_dtype: str) -> list[str | None] | None:
        return [str(serving.openvino_weights)]

    def decoder(self, served: Served, num_drafts: int) -> OpenvinoProcess:
        return OpenvinoProcess(models_of(served), num_drafts)

    def run_loads(
        self, served: Served, num_drafts: int, requests: Requests, loads: Sequence[Load], scratch_dir: Path
    ) -> tuple[str, list[LoadResult]]:
        """Decode in one process, which keeps the converted models for the next K in `scratch_dir`."""
        jobs = {"requests": asdict(requests), "loads": [asdict(load) for load in loads]}
        models = models_of(served)
        result = models.run("load", models.job(scratch_dir, num_drafts, **jobs))
        results = []
        for found in result["results"]:
            answers = [
                Answer(steps_s, sum(tokens))
                for steps_s, tokens in zip(found["steps_s"], found["tokens_of_steps"], strict=True)
            ]
            counts = counts_of(accepted_of(found["tokens_of_steps"]), num_drafts) if num_drafts else None
            results.append(LoadResult(answers, found["duration_s"], counts))
        return result["version"], results


def models_of(served: Served) -> OpenvinoModels:
    return OpenvinoModels(served.program, served.target.directory, served.head_dir, served.serving.openvino_weights)
