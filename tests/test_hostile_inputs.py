"""Tests that programs refuse hostile targets, data and settings in one line and write nothing.

Each case stands for a kind of input; the tests of the functions that read it have all its damages.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mtptrain.heads.files import TARGET_WEIGHTS, build_head, save_head
from mtptrain.heads.mtp import MtpHead
from mtptrain.target.families import read_target_config
from mtptrain.target.hub import weights_fingerprint
from tests.conftest import TINY_SETTINGS, run_program, write_text_files

NESTED, GARBAGE = b"[" * 100_000, b"{\xff\xfe}"
PROGRESS = re.compile(r"\s*|.*(\d%\|.*|\[\d\d:\d\d.*\])(\x1b\[A)?")
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
PROMPTS, STATES, ACCEPTANCE = "prompts", "hidden-states", "acceptance"
VOCABULARY = ["head=eagle3", "head.capture_layers=[1,2]", "head.draft_vocab_size=64"]


@dataclass(frozen=True)
class Place:
    """Holds the target, the data and the run directory of one test, any of which the test may damage."""

    directory: Path

    @property
    def target(self) -> Path:
        return self.directory / "target"

    def chats(self, content: bytes, name: str = "chats.jsonl") -> list[str]:
        (self.directory / name).write_bytes(content)
        return ["prompts.source=conversations", f"prompts.paths=[{self.directory / name}]"]

    def text_files(self) -> list[str]:
        return [f"prompts.paths=[{write_text_files(self.directory / 'files')}]"]

    def prompts_file(self, content: bytes) -> list[str]:
        """Write prompts and a random head for `mtptrain acceptance`."""
        (self.directory / "prompts.jsonl").write_bytes(content)
        state = build_head(MtpHead.Config(), read_target_config(self.target)).state_dict()
        facts: dict[str, object] = {TARGET_WEIGHTS: weights_fingerprint(self.target)}
        save_head(self.directory / "head", state, MtpHead.Config(), facts)
        return [
            f"acceptance.prompts_file={self.directory}/prompts.jsonl",
            f"head.init_from={self.directory}/head",
        ]


@pytest.fixture
def place(tmp_path: Path, tiny_target: Path) -> Place:
    shutil.copytree(tiny_target, tmp_path / "target")
    return Place(tmp_path)


def config_garbage(place: Place) -> list[str]:
    (place.target / "config.json").write_bytes(GARBAGE)
    return place.text_files()


def template(text: str) -> Callable[[Place], list[str]]:
    def damage(place: Place) -> list[str]:
        (place.target / "chat_template.jinja").write_text(text)
        return place.chats(json.dumps(CHAT).encode())

    return damage


def weights_truncated(place: Place) -> list[str]:
    path = place.target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-99])
    return []


def setting(text: str) -> Callable[[Place], list[str]]:
    return lambda place: [*place.text_files(), text]


QUESTION = b'{"id": "a", "text": "hi"}'
CASES: dict[str, tuple[str, Callable[[Place], list[str]], str]] = {
    "config": (PROMPTS, config_garbage, r"\S+/config\.json: must be UTF-8, but is not"),
    "template": (
        PROMPTS,
        template("{{ 'a' + 1 }}"),
        r"prompts\.paths: each split must .* 1 refused \(the chat template fails: TypeError",
    ),
    "data": (PROMPTS, lambda place: place.chats(NESTED), r"\S+/chats\.jsonl:1: must be JSON, but is nested too deep"),
    "weights": (STATES, weights_truncated, r"\S+/model\.safetensors: must be a complete safetensors file"),
    "no draft vocabulary": ("train", lambda place: VOCABULARY, r"\S*draft_vocab\S*: .*mtptrain draft-vocab"),
    "unknown head": (
        PROMPTS,
        setting("head.name=foo"),
        r"head\.name: must be mtp, the head whose .*, but is foo; set",
    ),
    "number": (PROMPTS, setting(f"train.batch_tokens={10**20}"), r"train\.batch_tokens: must be below 2\*\*63, but"),
    "paths": (PROMPTS, setting("prompts.paths=[[a]]"), r"prompts\.paths: must be .*\[\['a'\]\];"),
    "drafts": (
        ACCEPTANCE,
        lambda place: [*place.prompts_file(QUESTION), "acceptance.num_speculative_tokens=5000"],
        r"acceptance\.num_speculative_tokens: must be at most \d+, .* context of 512 tokens, but is 5000",
    ),
    "prompts": (ACCEPTANCE, lambda place: place.prompts_file(GARBAGE), r"\S+prompts\.jsonl.*UTF-8"),
}


def errors(stderr: str) -> list[str]:
    """Returns the lines of stderr that are not progress bars."""
    return [line for line in re.split(r"[\r\n]+", stderr) if not PROGRESS.fullmatch(line)]


def files_of(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_hostile_input_is_refused_in_one_line_and_nothing_is_written(
    place: Place, tiny_run: tuple[Path, tuple[str, ...]], case: str
) -> None:
    program, damage, message = CASES[case]
    run_dir = place.directory / "run"
    if program not in (PROMPTS, ACCEPTANCE):
        # The prompts are those of the undamaged target, so only the damage can cause the refusal.
        shutil.copytree(tiny_run[0] / "prompts", run_dir / "prompts")
    before = files_of(run_dir)
    overrides = damage(place)
    ran = run_program(program, *TINY_SETTINGS, f"target.path={place.target}", f"run_dir={run_dir}", *overrides)
    assert ran.returncode == 1, ran.stderr[-3000:]
    [line] = errors(ran.stderr)
    assert re.match(rf"error: {message}", line), line
    assert files_of(run_dir) == before
