"""Decodes prompts on a running vLLM server, and reads its counters."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtptrain.engines.requests import EngineCounts, EngineRun, Manner, Questions, Requests
from mtptrain.engines.server import Counters, EngineServer, counts_of, token_ids
from mtptrain.engines.vllm.client import warn_of_untested
from mtptrain.target.files import TargetFiles
from mtptrain.target.generation import NEUTRAL
from mtptrain.target.hub import weights_fingerprint
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json


class VllmServer(EngineServer):
    name = "vLLM"
    program = "vllm serve"
    context_option = "--max-model-len"

    def __init__(self, url: str, log_path: Path | None = None) -> None:
        super().__init__(url, log_path)
        self.version = self.read("/version", lambda body: str(parse_json(body, "version")["version"]))
        if log_path is None:  # the version in our Python was checked
            warn_of_untested(self.version, f"serving.url={self.shown_url}")
        self.model, self.root, self.max_model_len = self.read("/v1/models", _model)

    def generate(self, asked: Questions) -> EngineRun:
        before, settings = self.counters(), dict[str, Any]()
        if asked.manner is not Manner.plain:
            settings["temperature"] = 0.0
        if asked.manner is Manner.neutral:
            settings = {**NEUTRAL, "temperature": 0.0}  # what a request leaves out is that of generation_config.json
            settings |= {"ignore_eos": True, "stop_token_ids": list(asked.stop_token_ids)}

        def ask(prompt: Sequence[int]) -> tuple[list[int], list[int] | None]:
            request = {"model": self.model, "prompt": list(prompt), "max_tokens": asked.max_new_tokens, **settings}
            return self.read("/v1/completions", _completion, request | {"return_token_ids": True})

        answers = self.each_answer(asked, ask)
        accepted = [rounds for _, rounds in answers]
        return EngineRun(
            self.version,
            [tokens for tokens, _ in answers],
            self.counts_since(before, len(asked.prompts)),
            None if all(rounds is None for rounds in accepted) else [rounds or [] for rounds in accepted],
            None if asked.chat is None else self.chat_ids(asked.chat),
        )

    def chat_ids(self, chat: Mapping[str, Any]) -> list[int]:
        return self.read("/tokenize", token_ids, {"model": self.model, **chat})

    def counts_since(self, before: Counters, num_requests: int) -> EngineCounts | None:
        counts = self.growth_since(before)
        num_finished = sum(count for (name, _), count in counts.items() if name == "request_success")
        if num_finished != num_requests:
            raise self.is_busy(f"finished {num_finished} requests instead of {num_requests}")
        return counts_of(counts)

    def check_model(self, target: TargetFiles, head_dir: Path) -> None:
        """Check that the server serves the target, or the run's export. That of a MiMo head holds the target."""
        if Path(self.root).resolve() != head_dir.resolve() and not is_same_model(self.root, target):
            raise UserError(
                f"serving.url: the server must serve {target.path}, but {self.shown_url} serves {self.root}; ask "
                "another server, or set target.path"
            )

    def streamed_request(self, prompt: Sequence[int], requests: Requests, index: int) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": requests.max_new_tokens,
            **NEUTRAL,
            **{"temperature": requests.temperature, "top_p": requests.top_p, "top_k": requests.top_k},
            "ignore_eos": requests.ignore_eos,
            "seed": requests.seed + index,
            "cache_salt": uuid.uuid4().hex,  # requests with different salts share no cached prefix
            **{"stream": True, "stream_options": {"include_usage": True}},
        }

    def step_of(self, message: dict[str, Any]) -> tuple[object, int]:
        """Returns a new value for each message with tokens, all of a step, and the number of tokens of the last one."""
        if message["choices"]:
            return object(), 0
        return None, message["usage"]["completion_tokens"]


def is_same_model(root: str, target: TargetFiles) -> bool:
    """Returns whether a server that was started with `root` serves the target.

    If `root` is a directory on this machine, it must hold the target's weights. If it is a hub name or a path on
    another machine, its last component must be that of the target's path.
    """
    if Path(root).is_dir():
        return weights_fingerprint(Path(root)) == target.weights_sha256
    return Path(root).name.lower() in (Path(target.path).name.lower(), target.directory.name.lower())


def _model(body: bytes) -> tuple[str, str, int]:
    """Returns the model's name, the path or hub name that the server was started with, and its context length."""
    model = parse_json(body, "models")["data"][0]
    return str(model["id"]), str(model.get("root") or model["id"]), int(model["max_model_len"])


def _completion(body: bytes) -> tuple[list[int], list[int] | None]:
    """Returns the tokens of a completion, and the number of accepted drafts in each round.

    The second is None unless the server runs with `--per-request-spec-decode-metrics detailed`.
    """
    answer = parse_json(body, "completion")
    rounds = ((answer.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted")
    tokens = [int(token) for token in answer["choices"][0]["token_ids"]]
    return tokens, rounds and [int(accepted) for accepted in rounds]
