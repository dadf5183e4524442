"""Decodes prompts on llama.cpp's `llama-server`, and reads its counters."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader

from mtptrain.engines.process import warn_of_version
from mtptrain.engines.requests import EngineCounts, EngineRun, Manner, Question, Questions, Requests
from mtptrain.engines.server import Counters, EngineServer, counts_of, token_ids
from mtptrain.target.files import TargetFiles
from mtptrain.target.gguf import fingerprint
from mtptrain.utils.cpu import has_amx
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json

VERSION = "b11434"
EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")
EXACT_DRAFT = ("-ctkd", "f32", "-ctvd", "f32")
"""Arguments for keys and values in fp32. By default they are rounded to f16, which changes some answers."""
HOST_SAMPLING = "--no-spec-draft-backend-sampling"
"""Without this argument, llama.cpp b11434 drafts wrong tokens with EAGLE-3 heads (and a few with others) as soon as two
requests are answered at once; by default it answers four. Answers stay right, so only counters and speed show it."""
NO_PENALTIES = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Values to set in every request: omitted ones come from the GGUF file, and penalties affect greedy decoding."""
SAMPLERS = ["temperature", "min_p", "top_k", "top_p"]
"""The order of our sampler and of vLLM, which is sent with each request for training data."""
HEAD_FILE = "model.gguf"
"""Name of the head's file in an export."""


def is_in_fp32(path: Path) -> bool:
    """Returns whether all matrices of a GGUF file are in fp32."""
    kinds = {tensor.tensor_type for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1}
    return kinds <= {GGMLQuantizationType.F32}


def draft_arguments(method: str, num_drafts: int) -> list[str]:
    """Returns the arguments of `llama-server` that draft K = `num_drafts` tokens by a method of llama.cpp."""
    return ["--spec-type", method, "--spec-draft-n-max", str(num_drafts), "--spec-draft-p-min", "0", HOST_SAMPLING]


def server_arguments(
    target: Path, max_context: int, num_slots: int, is_exact: bool, head: tuple[Path, str, int] | None
) -> list[str]:
    """Returns the arguments of `llama-server` that answer `num_slots` requests at a time, without host and port.

    Exact ones keep keys and values in fp32. The head is its exported file, the kind of draft, and K. Weights are not
    rearranged for AMX, with which llama.cpp b11434 can end by a signal.
    """
    arguments = ["-m", str(target), "-c", str(max_context * num_slots), "-np", str(num_slots)]
    arguments += ["--metrics", "--no-warmup", *(EXACT if is_exact else ()), *["--no-repack"] * has_amx()]
    if head is not None:
        file, method, num_drafts = head
        arguments += ["-md", str(file), *draft_arguments(method, num_drafts)]
        arguments += EXACT_DRAFT if is_exact else ()
    return arguments


class LlamaServer(EngineServer):
    """A running `llama-server` at a base URL."""

    name = "llama.cpp"
    program = "llama-server"
    options = " --metrics"
    context_option = "-c"
    base_path = ""
    kept_connections = 0  # the server closes each one, and a request sent before the client notices would fail

    def __init__(self, url: str, log_path: Path | None = None) -> None:
        """Ask the server for its version, target and context length."""
        super().__init__(url, log_path)
        self.version, self.root, self.max_model_len, self.num_slots, weights = self.read("/props", _properties)
        self.may_round = "all F32" not in weights
        self.counters()  # the page of metrics exists only with --metrics
        build = re.match(r"b(\d+)-", self.version)
        # Built from sources without a Git history, such as a package's, llama.cpp says b0.
        if build and int(build[1]) > 0 and f"b{build[1]}" != VERSION:
            warn_of_version(self.name, VERSION, self.version, self.place)

    def generate(self, asked: Questions) -> EngineRun:
        before, settings = self.counters(), dict[str, Any]()
        if asked.manner is not Manner.plain:
            settings["temperature"] = 0.0
        if asked.manner is Manner.neutral:
            settings |= NO_PENALTIES

        def ask(prompt: Sequence[int]) -> tuple[list[int], int]:
            request = {"prompt": list(prompt), "n_predict": asked.max_new_tokens, **settings}
            request |= {"return_tokens": True, "cache_prompt": False}
            tokens, num_drafted, ended = self.read("/completion", _completion, request)
            if asked.manner is Manner.neutral and (does := wrong_end(tokens, ended, asked.stop_token_ids)):
                raise UserError(f"{self.place}: {does}")
            return tokens, num_drafted

        answers = self.each_answer(asked, ask)
        drafted = sum(num_drafted for _, num_drafted in answers)
        counts = self.counts_since(before, len(asked.prompts))
        if counts is not None and counts.drafted != drafted:
            raise self.is_busy(f"drafted {counts.drafted} tokens instead of {drafted}")
        chat_ids = None if asked.chat is None else self.chat_ids(asked.chat)
        return EngineRun(self.version, [tokens for tokens, _ in answers], counts, None, chat_ids)

    def chat_ids(self, chat: Mapping[str, Any]) -> list[int]:
        prompt = self.read("/apply-template", lambda body: str(parse_json(body, "chat")["prompt"]), dict(chat))
        # As for its chats, the server adds the tokenizer's BOS to the text.
        return self.read("/tokenize", token_ids, {"content": prompt, "add_special": True, "parse_special": True})

    def counts_since(self, before: Counters, num_requests: int) -> EngineCounts | None:
        """Returns how much the drafting counters grew. The server does not count requests."""
        return counts_of(self.growth_since(before))

    def check_model(self, target: TargetFiles, head_dir: Path) -> None:
        """Refuse a server of another file than the target's. A file on another machine must have its name.

        Without a setting that names the target's file, nothing is compared.
        """
        head_file, gguf, served = head_dir / HEAD_FILE, target.gguf, Path(self.root)
        self.may_round |= head_file.is_file() and not is_in_fp32(head_file)
        if gguf is None:
            return
        are_here = served.is_file() and gguf.is_file()
        is_same = fingerprint(served) == fingerprint(gguf) if are_here else served.name == gguf.name
        if not is_same:
            raise UserError(
                f"serving.url: the server must serve {gguf}, but {self.shown_url} serves {self.root}, which is another "
                "file; ask another server, or set target.gguf"
            )

    def streamed_request(self, prompt: Sequence[int], requests: Requests, index: int) -> tuple[str, dict[str, Any]]:
        return "/completion", {
            "prompt": list(prompt),
            "n_predict": requests.max_new_tokens,
            **{"temperature": requests.temperature, "top_p": requests.top_p, "top_k": requests.top_k},
            **{"min_p": 0.0, **NO_PENALTIES},
            "ignore_eos": requests.ignore_eos,
            "seed": requests.seed + index,
            **{"stream": True, "cache_prompt": False, "timings_per_token": True},
        }

    def step_of(self, message: dict[str, Any]) -> tuple[object, int]:
        """Returns the time of a step, which llama.cpp reads once, although it sends a message for each token."""
        if message["stop"]:
            return None, message["tokens_predicted"]
        return message["timings"]["predicted_ms"], 0

    @classmethod
    def answer_request(cls, question: Question) -> dict[str, Any]:
        return {
            "model": question.model,
            "prompt": question.prompt,
            "n_predict": question.max_new_tokens,
            **{name: question.sampling[name] for name in SAMPLERS},
            **NO_PENALTIES,
            "samplers": SAMPLERS,
            "seed": question.seed,
            **{"return_tokens": True, "cache_prompt": False},
        }

    @classmethod
    def answer_of(cls, content: Any, question: Question) -> tuple[list[int], str, bool]:
        tokens, ended = _tokens(content)
        if does := wrong_end(tokens, ended, question.stop_token_ids):
            raise ValueError(does)
        return tokens, content["content"], not ended


def wrong_end(tokens: Sequence[int], ended: bool, stop_token_ids: Sequence[int]) -> str:
    """Returns what is wrong if an answer does not end at one of these tokens, or was cut after one; "" otherwise."""
    early = [token for token in tokens[:-1] if token in stop_token_ids]
    if not early and (not ended or tokens[-1] in stop_token_ids):
        return ""
    does = f"goes on after token {early[0]}" if early else f"ends an answer at token {tokens[-1]}"
    return (
        "the target's GGUF file must end answers at the tokens of the target's generation_config.json, "
        f"{list(stop_token_ids)}, but the server {does}; convert the target again, or correct eos_token_id in "
        "generation_config.json"
    )


def _properties(body: bytes) -> tuple[str, str, int, int, str]:
    """Returns the version, the target's file, a slot's context length, the slots and the type of the weights."""
    answer = parse_json(body, "props")
    sizes = int(answer["default_generation_settings"]["n_ctx"]), int(answer["total_slots"])
    return str(answer["build_info"]), str(answer["model_path"]), *sizes, str(answer["model_ftype"])


def _completion(body: bytes) -> tuple[list[int], int, bool]:
    """Returns the tokens of a completion, the number of drafted tokens, and whether it ended by itself."""
    answer = parse_json(body, "completion")
    tokens, ended = _tokens(answer)
    return tokens, int(answer["timings"].get("draft_n", 0)), ended


def _tokens(answer: Any) -> tuple[list[int], bool]:
    """Returns the tokens of a completion, and whether it ended by itself."""
    tokens = [int(token) for token in answer["tokens"]]
    if not tokens:
        raise ValueError("no token, not even that of the answer's end")
    return tokens, answer["stop_type"] == "eos"
