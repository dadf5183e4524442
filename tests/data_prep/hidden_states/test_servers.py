"""Tests that servers write the bytes of one, whichever of them ends, comes late or is cut off, and what is refused."""

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from data_prep.hidden_states import extract_hidden_states
from mtptrain.config import PipelineConfig
from mtptrain.hidden_states.extraction import server_streams
from mtptrain.hidden_states.extraction.server_streams import ServerStreams, served_name
from mtptrain.run_dir import Run
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import FrozenParts, load_frozen_parts
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.data_prep.hidden_states.stage import ONE_RANK, ConfigFor, read_store
from tests.mtptrain.engines.fake_server import FakeServer, Handler, fake_server


class StatesServer(FakeServer):
    """Writes random states, which depend on the prompt alone, as vLLM's connector does."""

    def __init__(self, parts: FrozenParts, folder: Path) -> None:
        super().__init__()
        self.RequestHandlerClass = StatesHandler
        self.parts, self.folder = parts, folder
        self.numbers = count(1)
        self.is_silent: Callable[[int, list[int]], bool] = lambda number, prompt: False
        """Returns whether the request of this number, for this prompt, gets no answer."""
        self.tears_at = -1
        """Number of the request whose file is not complete."""
        self.states_of = self.random_states

    def serves(self, root: object, name: str = "") -> None:
        super().serves(root)
        name = name or served_name(TargetFiles(Path(str(root))), [2])
        self.answers["/v1/models"] = self.answers["/v1/models"].replace(b'"a"', f'"{name}"'.encode())

    def random_states(self, prompt: list[int]) -> tuple[torch.Tensor, int]:
        states = torch.randn(len(prompt), 1, 64, generator=torch.Generator().manual_seed(sum(prompt)))
        return states, int(self.parts.logits(self.parts.final_norm(states[-1, -1])).argmax())


class StatesHandler(Handler):
    server: StatesServer

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        number = self.server.num_answered = next(self.server.numbers)
        if self.server.is_silent(number, prompt):
            return
        states, token = self.server.states_of(prompt)
        path = self.server.folder / f"{uuid.uuid4()}.safetensors"
        path.with_name(f"{path.name}.lock").touch()
        save_file({"hidden_states": states, "token_ids": torch.tensor(prompt)}, path)
        if number == self.server.tears_at:
            path.write_bytes(path.read_bytes()[:-40])  # as a server that is killed while it writes
        choice = {"index": 0, "token_ids": [token]}
        self.reply(json.dumps({"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}))


Serve = Callable[[], StatesServer]


@pytest.fixture
def serve(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Returns a function that starts a server for the tiny target."""
    monkeypatch.setattr(server_streams, "RETRY_S", 0.05)
    parts = load_frozen_parts(tiny_target)
    with ExitStack() as stack:

        def start() -> StatesServer:
            server = stack.enter_context(fake_server(partial(StatesServer, parts, tmp_path)))
            server.serves(tiny_target)
            return server

        yield start


def extracted(prepared: ConfigFor, *servers: StatesServer) -> dict[str, bytes]:
    """Returns the files of a store that these servers have filled, and removes them."""
    config = config_of(prepared, *servers)
    extract_hidden_states(Run(config), ONE_RANK)
    files = read_store(config.stage_dir("hidden_states"))
    shutil.rmtree(config.stage_dir("hidden_states"))
    return files


def config_of(prepared: ConfigFor, *servers: StatesServer, num_servers: int = 0) -> PipelineConfig:
    asked = f"hidden_states.servers=[{','.join(server.url for server in servers)}]"
    settings = ("hidden_states.backend=vllm", asked, f"hidden_states.num_servers={num_servers}")
    return prepared(*settings, "hidden_states.dtype=float32", lengths=[40, 17, 64, 5] * 12)


def test_servers_that_end_or_are_cut_off_leave_the_bytes_of_an_undisturbed_run(
    prepared: ConfigFor, serve: Serve
) -> None:
    expected = extracted(prepared, serve())
    steady, ending, cut_off = serve(), serve(), serve()
    is_cut_off, goes_on, is_over = threading.Event(), threading.Event(), threading.Event()

    def answer(server: StatesServer, prompt: list[int]) -> tuple[torch.Tensor, int]:
        """Wait until the other servers have been disturbed, so that prompts are left for those."""
        if server is ending and ending.num_answered > 8:  # after both disturbances, and a check after each
            goes_on.set()
        is_through = goes_on.is_set() if server is ending else server is steady or is_cut_off.is_set()
        assert not is_through or (goes_on.wait(60.0) and is_cut_off.wait(60.0))
        return server.random_states(prompt)

    def cut(number: int, prompt: list[int]) -> bool:
        if len(prompt) == 64 or is_cut_off.is_set():  # a check has the longest prompt
            return False
        is_cut_off.set()
        return is_over.wait(60.0)

    for server in (steady, ending, cut_off):
        server.states_of = partial(answer, server)
    ending.tears_at, ending.is_silent, cut_off.is_silent = 5, lambda number, prompt: number == 6, cut
    assert extracted(prepared, steady, ending, cut_off) == expected
    is_over.set()
    assert goes_on.is_set() and is_cut_off.is_set()
    assert not list(steady.folder.glob("*.safetensors*")), "no file is left"


def test_a_server_may_come_late_and_a_stopped_extraction_goes_on_with_another_one(
    prepared: ConfigFor, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = extracted(prepared, serve())
    late, second = serve(), serve()
    late.status = 503
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"a server must answer within 1 s, but none does \(.*answers 503.*start one"),
    ):
        patch.setattr(server_streams, "GIVE_UP_S", 1.0)
        extracted(prepared, late)

    def changes_places(number: int, prompt: list[int]) -> bool:
        if number >= 30:
            second.status, late.status = 503, 200
        return number >= 30

    second.is_silent = changes_places
    assert extracted(prepared, second, late) == expected
    assert second.num_answered >= 30 and late.num_answered


def test_servers_are_found_by_their_files_where_they_are_now(
    prepared: ConfigFor, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One moves to another address during the extraction, and one never comes."""
    expected = extracted(prepared, serve())
    first, second, config = serve(), serve(), config_of(prepared, num_servers=2)
    place, store = config.stage_dir("servers") / "0", config.stage_dir("hidden_states")
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=f"no server has written its address to {place}"),
    ):
        patch.setattr(server_streams, "GIVE_UP_S", 1.0)
        extract_hidden_states(Run(config), ONE_RANK)
    place.parent.mkdir()
    place.write_text(first.url)

    def moves(number: int, prompt: list[int]) -> bool:
        if number >= 20:
            place.write_text(second.url)
            first.status = 503
        return number >= 20

    first.is_silent = moves
    extract_hidden_states(Run(config), ONE_RANK)
    assert read_store(store) == expected and first.num_answered >= 20 and second.num_answered
    assert not place.parent.exists()


def test_a_late_answer_is_not_taken_for_one_of_the_next_window(serve: Serve, tiny_target: Path) -> None:
    slow, steady = serve(), serve()
    checked, first, second = (np.arange(n, n + length, dtype=np.int32) for n, length in ((3, 9), (13, 6), (23, 6)))
    is_asked, may_answer, has_answered = threading.Event(), threading.Event(), threading.Event()

    def late(prompt: list[int]) -> tuple[torch.Tensor, int]:
        if len(prompt) == len(first):
            is_asked.set()
            assert may_answer.wait(60.0)
            has_answered.set()
        return slow.random_states(prompt)

    def after_it(prompt: list[int]) -> tuple[torch.Tensor, int]:
        assert len(prompt) != len(first) or is_asked.wait(60.0)
        if prompt == second.tolist():
            may_answer.set()
            assert has_answered.wait(60.0)
            time.sleep(0.5)  # until the late answer is read
        return steady.random_states(prompt)

    slow.states_of, steady.states_of = late, after_it
    with ServerStreams([slow.url, steady.url], TargetFiles(tiny_target), (2,), torch.float32, 64) as streams:
        for prompt in (first, second):
            (shard,) = ({index: states for index, states in each} for each in streams.extract([[checked, prompt]]))
            assert torch.equal(shard[1], steady.random_states(prompt.tolist())[0])
        assert len(streams._threads) == 4


REFUSED: dict[str, str] = {
    "another model": "must serve .*, but serves .*other",
    "a head with other layers": "must have the --served-model-name layers-2-of-.* but has layers-1-2",
    "another revision": "must have the --served-model-name layers-2-of-.* but has layers-2-of-",
    "a short context": "must have a --max-model-len of 65, but has 64",
    "two layers": r"must write torch.float32 states of 1 layers for 64 tokens, but wrote .*\(64, 2, 64\)",
    "bf16": "but wrote torch.bfloat16",
    "an earlier layer": "must write the states of the last layer too, but those give another token",
    "other states each time": "must write the same states again .--no-enable-prefix-caching.",
    "another disk": "must write to a disk that is here too, but wrote /nowhere/1, which is not here",
    "other states than the first": "must write the states that other servers write, but differs by",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_would_write_other_states_is_refused(
    prepared: ConfigFor, serve: Serve, tmp_path: Path, case: str
) -> None:
    servers, target = [serve()], Run(config_of(prepared)).target
    server, right = servers[0], servers[0].states_of
    if case == "another model":
        server.serves(make_target(tmp_path / "other", seed=5))
    elif case == "a head with other layers":
        server.serves(target.path, "layers-1-2")
    elif case == "another revision":
        other = TargetFiles(make_target(tmp_path / "other", seed=5))
        server.serves(f"/of/another/node/{Path(target.path).name}", served_name(other, [2]))
    elif case == "a short context":
        models = json.dumps(
            {"data": [{"id": served_name(target, [2]), "root": str(tmp_path.name), "max_model_len": 64}]}
        )
        server.answers["/v1/models"] = models.replace(tmp_path.name, target.path).encode()
    elif case == "another disk":
        answer = {"choices": [{"token_ids": [1]}], "kv_transfer_params": {"hidden_states_path": "/nowhere/1"}}
        server.answers["/v1/completions"] = json.dumps(answer).encode()
    else:
        wrong = {
            "two layers": lambda states: states.repeat(1, 2, 1),
            "bf16": lambda states: states.bfloat16(),
            "an earlier layer": lambda states: -states,
            "other states each time": lambda states: states + server.num_answered * 1e-6,
            "other states than the first": lambda states: states * torch.linspace(0.5, 1, len(states))[:, None, None],
        }[case]
        changed = serve() if case == "other states than the first" else server
        changed.states_of = lambda prompt: (wrong(right(prompt)[0]), right(prompt)[1])
        servers = [*{server: None, changed: None}]
    with pytest.raises(UserError, match=f"hidden_states.servers: .*{REFUSED[case]}"):
        extracted(prepared, *servers)
