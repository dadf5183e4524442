"""Decodes prompts on a running vLLM server, and reads its counters."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mtptrain.decoding.speculate import Generation
from mtptrain.serving.engine import NEUTRAL_SAMPLING, EngineCounts, EngineRun, counts_of_all_rounds
from mtptrain.serving.engine_server import Counters, EngineServer, counts_of
from mtptrain.serving.exports import warn_of_untested_vllm
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json

MAX_CONCURRENT_REQUESTS = 16


class VllmServer(EngineServer):
    """A running `vllm serve` at a base URL."""

    name = "vLLM"
    command = "vllm serve"
    advice = "export the head again; a server must be idle and be started with --no-enable-chunked-prefill"
    may_round = False

    def __init__(self, url: str, *, is_ours: bool = False) -> None:
        """Ask the server for its version, model and context length.

        Args:
            url: its base URL.
            is_ours: whether this program started it, with a Python whose version of vLLM it has checked.

        Raises:
            UserError: the server does not answer, or the server is not vLLM.
        """
        super().__init__(url)
        self.version = self.read("/version", _version)
        if not is_ours:
            warn_of_untested_vllm(self.version, f"serving.url={self.shown_url}")
        self.model, self.root, self.max_model_len = self.read("/v1/models", _model)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> EngineRun:
        """Returns greedy answers to prompts of token ids, and how much the counters grew. Several requests run at once.

        Raises:
            UserError: the server does not answer, or the server answers with an error, or the server serves other
                requests in the meantime, which makes its counters useless.
        """
        before = self.counters()

        def ask(prompt: Sequence[int]) -> tuple[list[int], list[int] | None]:
            request = {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": max_new_tokens,
                "temperature": 0.0,
                **{"top_p": 1.0, "top_k": 0, **NEUTRAL_SAMPLING},
                "ignore_eos": True,
                "stop_token_ids": list(stop_token_ids),
                "return_token_ids": True,
            }
            return self.read("/v1/completions", _completion, request)

        with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
            answers = list(pool.map(ask, prompts))
        accepted = [rounds for _, rounds in answers]
        return EngineRun(
            self.version,
            [tokens for tokens, _ in answers],
            self.counts_since(before, len(prompts)),
            None if all(rounds is None for rounds in accepted) else [rounds or [] for rounds in accepted],
        )

    def counts_since(self, before: Counters, num_requests: int) -> EngineCounts | None:
        """Returns how much the drafting counters grew; None if the server does not draft.

        Raises:
            UserError: the server finished other requests than these in the meantime, or its counters keep changing.
        """
        after = self.settled_counters()
        counts = {name: after[name] - before.get(name, 0) for name in after}
        num_finished = sum(count for (name, _), count in counts.items() if name == "request_success")
        if num_finished != num_requests:
            raise UserError(
                f"{self.shown_url}: the server must serve no other requests during the check, but finished "
                f"{num_finished} requests instead of {num_requests}; repeat the check when it is idle"
            )
        return counts_of(counts)

    def counted(self, generations: Sequence[Generation], *limits: object) -> tuple[EngineCounts, str]:
        return counts_of_all_rounds(generations), ""


def _version(body: bytes) -> str:
    version = parse_json(body, "version")["version"]
    if not isinstance(version, str):
        raise TypeError
    return version


def _model(body: bytes) -> tuple[str, str, int]:
    """Returns the model's name, the path or hub name that the server was started with, and its context length."""
    model = parse_json(body, "models")["data"][0]
    name, length = model["id"], model["max_model_len"]
    root = model.get("root") or name
    if not isinstance(name, str) or not isinstance(root, str) or type(length) is not int or length < 1:
        raise TypeError
    return name, root, length


def _completion(body: bytes) -> tuple[list[int], list[int] | None]:
    """Returns the tokens of a completion, and the number of accepted drafts in each round.

    The second is None unless the server runs with `--per-request-spec-decode-metrics detailed`.
    """
    answer = parse_json(body, "completion")
    tokens = answer["choices"][0]["token_ids"]
    accepted = ((answer.get("metrics") or {}).get("speculative_decoding") or {}).get("per_step_accepted")
    for numbers in (tokens, accepted or []):
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise TypeError
    return tokens, accepted
