"""Decodes the requests of `mtptrain serving-bench` in OpenVINO, which has no server: its worker decodes them itself."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mtptrain.serving.engine import EngineCounts
from mtptrain.serving.load_generator import Latencies, Load, LoadGenerator
from mtptrain.serving.openvino_client import WORKER, OpenvinoModels, accepted_of, counts_of, warn_of_crash
from mtptrain.serving.server_process import EngineCrashed
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json


def check_openvino(head_name: str, concurrency: Sequence[int], temperature: float) -> None:
    """Refuse what OpenVINO cannot do: sample with drafts, or decode several requests at a time with `dflash`.

    Raises:
        UserError: it is asked to.
    """
    if temperature > 0:
        raise UserError(
            "acceptance.temperature: must be 0 in OpenVINO 2026.4, which with a draft samples other texts than without "
            f"(with an EAGLE-3 head, garbage), but is {temperature:g}; leave it out, or set another serving.engine"
        )
    if head_name == "dflash" and max(concurrency) > 1:
        raise UserError(
            f"serving_bench.concurrency: must be [1] with head dflash in OpenVINO, which decodes one request at a time "
            f"with it, but is {list(concurrency)}; set serving_bench.concurrency=[1]"
        )


class OpenvinoEngine(LoadGenerator):
    """OpenVINO with K drafts per round, or without drafts. The context manager starts and ends it."""

    name = "OpenVINO"

    def __init__(self, models: OpenvinoModels, num_speculative_tokens: int, directory: Path, log_path: Path) -> None:
        """Store the settings.

        Args:
            models: target and head. The head is loaded for K above 0 alone.
            num_speculative_tokens: K.
            directory: keeps the converted models for the next engine, and the worker's job.
            log_path: the file for everything that the worker prints.
        """
        job_path = directory / f"{log_path.stem}.json"
        write_json(job_path, models.job(directory, num_speculative_tokens))
        super().__init__([models.python, WORKER, "load", job_path], log_path, self.name)
        self.num_speculative_tokens = num_speculative_tokens

    def send(self, load: Load, finished: Callable[[int], None]) -> tuple[Latencies, EngineCounts | None]:
        """Decode a load, in a new process if OpenVINO crashes. Returns the latencies and the counters of its steps."""
        try:
            latencies = self.run(load, finished)
        except EngineCrashed as crash:
            warn_of_crash(crash)
            self._worker.end()
            self.__enter__()
            self.run(replace(load, num_requests=load.concurrency))  # warms up
            latencies = self.run(load, finished)
        if not self.num_speculative_tokens:
            return latencies, None
        steps = json.loads(Path(load.result_path).read_text())["tokens_of_steps"]
        return latencies, counts_of(accepted_of(steps), self.num_speculative_tokens)
