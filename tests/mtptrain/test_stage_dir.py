"""Tests that programs neither delete nor overwrite what somebody else has written, nor write two at a time."""

import errno
import fcntl
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from mtptrain import stage_dir
from mtptrain.cli.stages import STAGES
from mtptrain.config import PipelineConfig, load_config
from mtptrain.stage_dir import STAGE, StageDir
from mtptrain.utils.distributed import become_ranks
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json
from tests.conftest import PLAIN, compose_config, make_config
from tests.programs import ROOT

SOMEBODYS = {
    "prompts": "prompts/notes/today.txt",
    "draft-vocab": "draft_vocab/manifest.json",
    "responses": "responses/conversations.jsonl",
    "hidden-states": "hidden_states/paper.tmp",
    "train": "train/stage.json",
    "choose-head": "train/heads/step_00000009/head.json",
    "acceptance": "acceptance/report.json",
    "export": "export/vllm.mtptrain_new/a.txt",
    "serving-check": "serving_check/report.json",
    "serving-bench": "serving_bench/README.md",
}
"""A file of somebody else that each program finds where it would write."""


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("module", SOMEBODYS)
def test_a_folder_of_somebody_else_is_refused_before_any_work(tmp_path: Path, module: str) -> None:
    """The target does not exist, which every program would report first if it did any work before."""
    more = {"responses": ["prompts.source=responses", "prompts.paths=[a.jsonl]"]}
    overrides = ["recipe=quickstart_eagle3", *PLAIN, "target.path=/nowhere", *more.get(module, [])]
    file = tmp_path / SOMEBODYS[module]
    file.parent.mkdir(parents=True)
    file.write_text('{"mine": true}')
    before = files_of(tmp_path)
    message = r"must be new, empty or written by mtptrain, .*; move that away, or set another"
    with pytest.raises(ValueError, match=message):
        importlib.import_module(STAGES[module].program).main(
            load_config(compose_config(*overrides, f"run_dir={tmp_path}"))
        )
    assert files_of(tmp_path) == before


def test_a_folder_that_is_new_empty_or_ours_is_taken(tmp_path: Path) -> None:
    config = make_config()
    before: dict[str, Callable[[StageDir], object]] = {
        "new": lambda folder: None,
        "empty": lambda folder: (folder.path / "part").mkdir(parents=True),
        "ours": lambda folder: (folder.record(config), (folder.path / "notes.txt").write_text("mine")),
        "part of ours": lambda folder: StageDir(folder.path / "part").record(config),
        "killed": lambda folder: (folder.path.mkdir(), (folder.path / f"{STAGE}.node.7.tmp").write_text("{")),
    }
    for case, prepare in before.items():
        folder = StageDir(tmp_path / case)
        prepare(folder)
        folder.check()
        folder.record(config)
        written = (folder.path / STAGE).read_bytes()
        folder.claim(make_config("seed=5"))
        assert (folder.path / STAGE).read_bytes() == written
        assert (settings := folder.settings()) is not None and settings["seed"] == 0


def test_a_damaged_stage_json_is_named(tmp_path: Path) -> None:
    folder = StageDir(tmp_path / "stage")
    with folder.replaced(make_config()) as new:
        (new / "report.json").touch()
    content = json.loads((folder.path / STAGE).read_text())
    for files in (None, "report.json", ["report.json"]):
        (folder.path / STAGE).write_text(json.dumps(content | {"files": files}))
        with pytest.raises(UserError, match=r"but report\.json is none of them; move it away"):
            folder.check_replaceable()
    for text in ("", "[]", "{"):
        (folder.path / STAGE).write_text(text)
        with pytest.raises(UserError, match=r"which leaves stage\.json there, but its stage\.json cannot be read"):
            folder.check()


def test_stage_json_is_the_first_file_of_a_folder_and_a_finished_stage_loses_its_mark_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a killed program would leave a folder that is refused for ever, or old files under new settings."""
    StageDir(tmp_path / "stage").record(make_config())
    assert [path.name for path in (tmp_path / "stage").iterdir()] == [STAGE]
    (tmp_path / "stage/report.json").touch()
    monkeypatch.setattr(stage_dir, "write_json", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        StageDir(tmp_path / "stage").record(make_config("seed=5"), "report.json")
    assert [path.name for path in (tmp_path / "stage").iterdir()] == [STAGE]


def test_a_path_that_is_a_file_a_link_or_the_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^export\.output_dir: \. must not be the directory in which the command ru"):
        replace(Path("."), "new")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for name in ("file", "link"):
        with pytest.raises(UserError, match=rf"^run_dir: \S+/{name} must be new, .* but is no folder; move"):
            StageDir(tmp_path / name).check()
    replace(tmp_path / "other", "mine")
    (tmp_path / "vllm.mtptrain_new").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=r"vllm\.mtptrain_new must not be a link, but is; move it away"):
        replace(tmp_path / "vllm", "new")
    assert (tmp_path / "other/head.txt").read_text() == "mine"


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / "report.json.tmp").symlink_to(tmp_path / "thesis")
    write_json(tmp_path / "report.json", {})
    assert (tmp_path / "thesis").read_text() == "mine" and not (tmp_path / "report.json").is_symlink()


def replace(directory: Path, text: str, config: PipelineConfig | None = None) -> None:
    with StageDir(directory, "export.output_dir").replaced(config or make_config()) as new:
        (new / "head.txt").write_text(text)


ADDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "thesis": (lambda path: (path / "thesis.tex").write_text("mine"), r"but thesis\.tex is none of them; move it"),
    "git": (lambda path: (path / ".git").mkdir(), r"but \.git is none of them; move it away"),
    "weights": (lambda path: (path / "head.txt").write_text("OLD"), r"but head\.txt was changed since; move it"),
}


def test_a_folder_to_which_somebody_added_files_is_not_replaced(tmp_path: Path) -> None:
    for case, (add, message) in ADDED.items():
        folder = tmp_path / case / "vllm"
        replace(folder, "old")
        StageDir(folder).check_replaceable()
        add(folder)
        before = files_of(folder)
        with pytest.raises(UserError, match=rf"^export\.output_dir: \S+/vllm must hold only the files of .*{message}"):
            replace(folder, "new")
        assert files_of(folder) == before and (case != "git" or (folder / ".git").is_dir())


def test_a_file_that_is_added_during_the_export_is_kept(tmp_path: Path) -> None:
    replace(tmp_path / "vllm", "old")
    with (
        pytest.raises(ValueError, match=r"thesis\.tex is none of them"),
        StageDir(tmp_path / "vllm").replaced(make_config()),
    ):
        (tmp_path / "vllm/thesis.tex").write_text("mine")
    assert (tmp_path / "vllm/thesis.tex").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"]


def die_at(count: int, function: Callable[..., object]) -> Callable[..., object]:
    """Returns a function that ends the process, as SIGKILL does, instead of its call number `count`."""
    calls = iter(range(count + 1))

    def call(*args: object, **settings: object) -> object:
        if next(calls) == count:
            os._exit(9)
        return function(*args, **settings)

    return call


@pytest.mark.parametrize(
    ("name", "count"), [("rename", 0), ("rename", 1), ("unlink", 0), ("unlink", 3), ("rmdir", 0), ("write_text", 1)]
)
def test_a_kill_at_any_moment_leaves_the_old_the_new_or_no_folder_and_the_next_export_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    directory = tmp_path / "vllm"
    replace(directory, "old")
    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, name, die_at(count, getattr(Path, name)))
        replace(directory, "new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    if directory.exists():
        assert (directory / "head.txt").read_text() in ("old", "new") and "head.txt" in StageDir(directory).files()
    replace(directory, "newest")
    assert (directory / "head.txt").read_text() == "newest"
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"]


HOLD = """
import sys, time
from pathlib import Path
from mtptrain.stage_dir import StageDir
with StageDir(Path(sys.argv[1])).writing():
    print("held", flush=True)
    time.sleep(600)
"""
LOCK = ".mtptrain.lock"


def test_a_second_program_is_refused_and_the_lock_of_a_killed_one_is_free_and_a_finished_or_refused_one_leaves_none(
    tmp_path: Path,
) -> None:
    folder = StageDir(tmp_path / "run/train")
    command = [sys.executable, "-c", HOLD, str(folder.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"but process {process.pid} on .* writes there"), folder.writing():
            pass
        process.kill()
    assert (folder.path / LOCK).is_file()
    with folder.writing() as directory, StageDir(directory).writing(part=1):
        (directory / "metrics.jsonl").touch()
        folder.record(make_config())
    assert {each.name for each in folder.path.iterdir()} == {"metrics.jsonl", STAGE}
    with pytest.raises(KeyError), StageDir(tmp_path / "runs/a/train").writing():  # a program that is refused
        raise KeyError
    assert not (tmp_path / "runs").exists()


def test_ranks_that_a_program_becomes_keep_its_lock_until_all_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if (program := os.fork()) == 0:
        try:
            with StageDir(tmp_path / "train").writing():
                become_ranks(2)
                if os.environ["RANK"] == "1":
                    while not (tmp_path / "go_on").exists():
                        pass
        finally:
            if os.environ.get("RANK") == "0":
                (tmp_path / "first_has_ended").touch()
            os._exit(0)
    while not (tmp_path / "first_has_ended").exists():
        pass
    folder = StageDir(tmp_path / "train")
    with pytest.raises(UserError, match=f"but process {program} on .* writes there"), folder.writing():
        pass
    (tmp_path / "go_on").touch()
    os.waitpid(program, 0)
    with folder.writing():
        pass
    assert not folder.path.exists()


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.warns(UserWarning, match="do not start two programs"), StageDir(tmp_path).writing():
        pass
