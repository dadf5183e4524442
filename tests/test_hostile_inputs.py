"""Tests that programs refuse hostile targets, data and settings in one line and write nothing.

Each case stands for a kind of input; the tests of the functions that read it have all its damages.
"""

import json
import re
import shutil
from collections.abc import Callable
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


def chats(place: Path, content: bytes) -> list[str]:
    (place / "chats.jsonl").write_bytes(content)
    return ["prompts.source=conversations", f"prompts.paths=[{place}/chats.jsonl]"]


def text_files(place: Path, *overrides: str) -> list[str]:
    return [f"prompts.paths=[{write_text_files(place / 'files')}]", *overrides]


def config_garbage(place: Path) -> list[str]:
    (place / "target/config.json").write_bytes(GARBAGE)
    return text_files(place)


def failing_template(place: Path) -> list[str]:
    (place / "target/chat_template.jinja").write_text("{{ 'a' + 1 }}")
    return chats(place, json.dumps(CHAT).encode())


def weights_truncated(place: Path) -> list[str]:
    path = place / "target/model.safetensors"
    path.write_bytes(path.read_bytes()[:-99])
    return []


def prompts_garbage(place: Path) -> list[str]:
    """Writes prompts and a random head for `mtptrain acceptance`."""
    (place / "prompts.jsonl").write_bytes(GARBAGE)
    state = build_head(MtpHead.Config(), read_target_config(place / "target")).state_dict()
    facts: dict[str, object] = {TARGET_WEIGHTS: weights_fingerprint(place / "target")}
    save_head(place / "head", state, MtpHead.Config(), facts)
    return [f"acceptance.prompts_file={place}/prompts.jsonl", f"head.init_from={place}/head"]


CASES: dict[str, tuple[str, Callable[[Path], list[str]], str]] = {
    "config": ("prompts", config_garbage, r"\S+/config\.json: must be UTF-8, but is not"),
    "template": ("prompts", failing_template, r"prompts\.paths: .* 1 refused \(the chat template fails: TypeError"),
    "data": (
        "prompts",
        lambda place: chats(place, NESTED),
        r"\S+/chats\.jsonl:1: must be JSON, but is nested too deep",
    ),
    "weights": ("hidden-states", weights_truncated, r"\S+/model\.safetensors: must be a complete safetensors file"),
    "paths": (
        "prompts",
        lambda place: text_files(place, "prompts.paths=[[a]]"),
        r"prompts\.paths: must be .*\[\['a'\]\];",
    ),
    "prompts": ("acceptance", prompts_garbage, r"\S+prompts\.jsonl.*UTF-8"),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_input_is_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, tiny_target: Path, tiny_run: tuple[Path, tuple[str, ...]], case: str
) -> None:
    program, damage, message = CASES[case]
    shutil.copytree(tiny_target, tmp_path / "target")
    run_dir = tmp_path / "run"
    if program == "hidden-states":  # with the prompts of the undamaged target
        shutil.copytree(tiny_run[0] / "prompts", run_dir / "prompts")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    overrides = damage(tmp_path)
    ran = run_program(program, *TINY_SETTINGS, f"target.path={tmp_path}/target", f"run_dir={run_dir}", *overrides)
    assert ran.returncode == 1, ran.stderr[-3000:]
    [line] = [line for line in re.split(r"[\r\n]+", ran.stderr) if not PROGRESS.fullmatch(line)]
    assert re.match(rf"error: {message}", line), line
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
