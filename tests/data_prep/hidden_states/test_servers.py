"""Tests that servers write the bytes of one, whichever of them ends, comes late or is cut off, and what is refused."""

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data_prep.hidden_states import extract_hidden_states
from mtptrain.config import PipelineConfig
from mtptrain.hidden_states.extraction import server_streams
from mtptrain.run_dir import Run
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
        self.fails_at = self.tears_at = -1
        """The numbers of the request that gets no answer, and of the one whose file is not complete."""
        self.when_it_fails: Callable[[], None] = lambda: None
        self.states_of = self.random_states

    def random_states(self, prompt: list[int]) -> tuple[torch.Tensor, int]:
        states = torch.randn(len(prompt), 1, 64, generator=torch.Generator().manual_seed(sum(prompt)))
        return states, int(self.parts.logits(self.parts.final_norm(states[-1, -1])).argmax())


class StatesHandler(Handler):
    server: StatesServer

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self.server.num_answered += 1
        if self.server.num_answered == self.server.fails_at:
            self.server.when_it_fails()
            return  # without an answer
        states, token = self.server.states_of(prompt)
        path = self.server.folder / f"{uuid.uuid4()}.safetensors"
        path.with_name(f"{path.name}.lock").touch()
        save_file({"hidden_states": states, "token_ids": torch.tensor(prompt)}, path)
        if self.server.num_answered == self.server.tears_at:
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


def config_of(prepared: ConfigFor, *servers: StatesServer) -> PipelineConfig:
    urls = ",".join(server.url for server in servers)
    backend = ("hidden_states.backend=vllm", f"hidden_states.servers=[{urls}]", "hidden_states.dtype=float32")
    return prepared(*backend, lengths=[40, 17, 64, 5] * 12)


def test_servers_that_end_or_are_cut_off_leave_the_bytes_of_an_undisturbed_run(
    prepared: ConfigFor, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = extracted(prepared, serve())
    steady, ending, cut_off = serve(), serve(), serve()

    def slowly(prompt: list[int]) -> tuple[torch.Tensor, int]:
        time.sleep(0.1)
        return steady.random_states(prompt)

    steady.states_of = slowly
    ending.fails_at, ending.tears_at, cut_off.fails_at = 6, 5, 8
    cut_off.when_it_fails = lambda: time.sleep(20.0)
    assert extracted(prepared, steady, ending, cut_off) == expected
    assert ending.num_answered > 8 and cut_off.num_answered >= 8
    assert not list(steady.folder.glob("*.safetensors*")), "no file is left"


def test_a_server_may_come_late_and_a_stopped_extraction_goes_on_with_another_one(
    prepared: ConfigFor, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = extracted(prepared, serve())
    late, second = serve(), serve()
    late.status = 503
    monkeypatch.setattr(server_streams, "GIVE_UP_S", 1.0)
    with pytest.raises(UserError, match=r"a server must answer within 1 s, but none does \(.*answers 503.*start one"):
        extracted(prepared, late)
    second.fails_at = 30
    second.when_it_fails = lambda: setattr(second, "status", 503)
    threading.Timer(0.5, lambda: setattr(late, "status", 200)).start()
    assert extracted(prepared, second, late) == expected


REFUSED: dict[str, str] = {
    "another model": "must serve .*, but serves .*other",
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
    servers = [serve()]
    server, right = servers[0], servers[0].states_of
    if case == "another model":
        server.serves(make_target(tmp_path / "other", seed=5))
    elif case == "a short context":
        models = json.dumps({"data": [{"id": "a", "root": str(tmp_path.name), "max_model_len": 64}]})
        server.answers["/v1/models"] = models.replace(tmp_path.name, Run(config_of(prepared)).target.path).encode()
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
