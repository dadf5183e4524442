"""Damages a copy of a working target or its data, and checks that a program refuses them.

A program must refuse hostile input before it writes anything. Apart from progress bars, it must print exactly one line
to stderr, which begins with `error: ` and says what must hold.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from mtptrain.heads.files import TARGET_WEIGHTS, build_head, save_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import weights_fingerprint
from mtptrain.utils.files import save_tensors
from tests.conftest import TINY_SETTINGS, run_program, write_text_files

NESTED, GARBAGE, DIGITS = b"[" * 100_000, b"{\xff\xfe}", b'{"a": ' + b"1" * 5000 + b"}"
PROGRESS = re.compile(r"\s*|.*(\d%\|.*|\[\d\d:\d\d.*\])(\x1b\[A)?")
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
QUESTION = b'{"id": "a", "text": "hi"}'
PROMPTS, STATES, ACCEPTANCE, RESPONSES, TRAIN = (
    "data_prep.prompts",
    "data_prep.hidden_states",
    "eval.acceptance",
    "data_prep.responses",
    "mtptrain.train",
)


@dataclass(frozen=True)
class Place:
    """Holds the target, the data and the run directory of one test, any of which the test may damage."""

    directory: Path

    @property
    def target(self) -> Path:
        return self.directory / "target"

    @property
    def data(self) -> Path:
        return self.directory / "data"


Damage = Callable[[Place], list[str]]
"""Damages the target, the data or a setting, and returns the overrides to run a program with."""


def errors(stderr: str) -> list[str]:
    """Returns the lines of stderr that are not progress bars."""
    return [line for line in re.split(r"[\r\n]+", stderr) if not PROGRESS.fullmatch(line)]


def refused(place: Place, program: str, overrides: list[str], message: str, code: int = 1) -> None:
    """Checks that a program exits with `code`, prints one line that matches `message`, and writes no file to `run/`."""
    ran = run_program(
        program, *TINY_SETTINGS, f"target.path={place.target}", f"run_dir={place.directory}/run", *overrides
    )
    lines = errors(ran.stderr)
    assert ran.returncode == code, ran.stderr[-3000:]
    assert len(lines) == 1 and "Traceback" not in ran.stderr, ran.stderr[-3000:]
    assert re.match(rf"error: {message}", lines[0]), lines[0]
    written = [path for path in (place.directory / "run").rglob("*") if path.is_file() and "wandb" not in path.parts]
    assert written == []


def text_files(place: Place) -> list[str]:
    return [f"prompts.paths=[{write_text_files(place.data / 'files')}]"]


def in_target(name: str, content: bytes) -> Damage:
    """Returns a damage that replaces a file of the target."""

    def damage(place: Place) -> list[str]:
        (place.target / name).write_bytes(content)
        return text_files(place)

    return damage


def in_config(**settings: object) -> Damage:
    """Returns a damage that changes settings of the target's config.json. The value `...` removes a setting."""

    def damage(place: Place) -> list[str]:
        path = place.target / "config.json"
        content = {**json.loads(path.read_text()), **settings}
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
        return text_files(place)

    return damage


def in_weights(change: Callable[[bytes], bytes]) -> Damage:
    def damage(place: Place) -> list[str]:
        path = place.target / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))
        return []

    return damage


def integer_weights(place: Place) -> list[str]:
    weights = load_file(place.target / "model.safetensors")
    save_tensors(place.target / "model.safetensors", {name: tensor.to(torch.int8) for name, tensor in weights.items()})
    return []


def template(text: str) -> Damage:
    def damage(place: Place) -> list[str]:
        (place.target / "chat_template.jinja").write_text(text)
        return conversations(json.dumps(CHAT).encode())(place)

    return damage


def conversations(*lines: bytes, name: str = "chats.jsonl") -> Damage:
    def damage(place: Place) -> list[str]:
        (place.data / name).write_bytes(b"\n".join(lines) + b"\n")
        return ["prompts.source=conversations", f"prompts.paths=[{place.data / name}]"]

    return damage


def parquet(rows: int, flipped: bool) -> Damage:
    def damage(place: Place) -> list[str]:
        path = place.data / "chats.parquet"
        schema = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
        pq.write_table(pa.Table.from_pylist([CHAT] * rows, schema=schema), path)
        content = bytearray(path.read_bytes())
        if flipped:
            content[-6] ^= 0xFF  # a byte of the footer's length
        path.write_bytes(content)
        return ["prompts.source=conversations", f"prompts.paths=[{path}]"]

    return damage


def settings(*overrides: str) -> Damage:
    return lambda place: [*text_files(place), *overrides]


def prompts_file(content: bytes) -> Damage:
    """Returns a damage that writes prompts and a random head for `mtptrain acceptance`."""

    def damage(place: Place) -> list[str]:
        (place.data / "prompts.jsonl").write_bytes(content + b"\n")
        return [f"acceptance.prompts_file={place.data}/prompts.jsonl", *random_head(place)]

    return damage


def random_head(place: Place) -> list[str]:
    config = MtpHead.Config()
    state = build_head(config, read_target_config(place.target)).state_dict()
    save_head(place.data / "head", state, config, {TARGET_WEIGHTS: weights_fingerprint(place.target)})
    return [f"head.init_from={place.data}/head"]
