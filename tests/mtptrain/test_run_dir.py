"""Tests that programs neither delete nor overwrite what somebody else has written."""

import importlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from mtptrain import run_dir
from mtptrain.command_line.stages import STAGES
from mtptrain.config import RECIPES, load_config
from mtptrain.run_dir import PROVENANCE, check_stage_dir, claim_stage_dir, replaced, write_provenance
from mtptrain.utils.files import write_json
from tests.conftest import PLAIN, make_config

SOMEBODYS = {
    "prompts": ["prompts/train.safetensors", "prompts/notes/today.txt"],
    "draft-vocab": ["draft_vocab/manifest.json"],
    "responses": ["responses/conversations.jsonl", "responses/answers_00000.jsonl"],
    "hidden-states": ["hidden_states/shard_99999.json", "hidden_states/paper.tmp"],
    "train": [
        *("train/config.yaml", "train/checkpoints/step_00000001/thesis.tex", "train/heads/step_best/a.bin"),
        *("train/metrics.jsonl", "train/provenance.json", "train/best/head.json"),
    ],
    "choose-head": ["train/heads/step_00000009/head.json"],
    "acceptance": ["acceptance/report.json", "acceptance/report.html"],
    "export": ["export/vllm/serving.json", "export/vllm/.git/config", "export/vllm.mtptrain_new/a.txt"],
    "serving-check": ["serving_check/report.json"],
    "serving-bench": ["serving_bench/README.md"],
}
"""Files of somebody else that each program finds where it would write."""


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("module", "file"), [(module, file) for module, files in SOMEBODYS.items() for file in files])
def test_a_folder_of_somebody_else_is_refused_before_any_work(tmp_path: Path, module: str, file: str) -> None:
    """The target does not exist, which every program would report first if it did any work before."""
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text('{"mine": true}')
    overrides = ["recipe=quickstart_eagle3", *PLAIN, f"run_dir={tmp_path}", f"target.path={tmp_path}/nowhere"]
    more = {"responses": ["prompts.source=responses", "prompts.paths=[a.jsonl]"]}
    with initialize_config_dir(RECIPES, version_base="1.3"):
        cfg = compose("pipeline", [*overrides, *more.get(module, [])])
    before = files_of(tmp_path)
    with pytest.raises(
        ValueError, match=r"must be new, empty or written by mtptrain, .*; move that away, or set another"
    ):
        importlib.import_module(STAGES[module].program if module in STAGES else module).main(load_config(cfg))
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("case", ["new", "empty", "empty folder", "ours", "ours and another", "part of ours", "killed"])
def test_a_folder_that_is_new_empty_or_ours_is_taken(tmp_path: Path, case: str) -> None:
    directory, config = tmp_path / "stage", make_config()
    if case != "new":
        directory.mkdir()
    if case.startswith("ours"):
        write_provenance(directory, config)
    if case == "ours and another":
        (directory / "notes.txt").write_text("mine")
    if case == "part of ours":  # such as serving_bench/break_even in serving_bench
        write_provenance(directory / "part", config)
    if case == "empty folder":
        (directory / "part").mkdir()
    if case == "killed":
        (directory / f"{PROVENANCE}.node.7.mtptrain.tmp").write_text("{")
    check_stage_dir(directory)
    write_provenance(directory, config)
    written = (directory / PROVENANCE).read_bytes()
    claim_stage_dir(directory, make_config("seed=5"))
    assert (directory / PROVENANCE).read_bytes() == written and "seed: 0" in (directory / "config.yaml").read_text()


def test_the_provenance_is_the_first_file_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a killed program would leave a folder that is refused for ever."""
    monkeypatch.setattr(run_dir, "write_text", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_provenance(tmp_path / "stage", make_config())
    assert [path.name for path in (tmp_path / "stage").iterdir()] == [PROVENANCE]


@pytest.mark.parametrize(("package", "is_ours"), [("mtptrain", True), (".venv/mtptrain", False)])
def test_the_revision_is_not_that_of_a_checkout_in_which_mtptrain_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, is_ours: bool
) -> None:
    commit = ["-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "--allow-empty", "-m", "first"]
    for arguments in (["init", "-q"], commit):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    (tmp_path / package).mkdir(parents=True)
    monkeypatch.setattr(run_dir, "__file__", str(tmp_path / package / "run_dir.py"))
    write_provenance(tmp_path / "stage", make_config())
    assert (json.loads((tmp_path / "stage" / PROVENANCE).read_text())["git_revision"] is not None) == is_ours


def test_a_path_that_is_a_file_or_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for name, found in (("file", "is a file"), ("link", "is a link to nothing")):
        with pytest.raises(ValueError, match=rf"^run_dir: \S+/{name} must be new, .* but {found}; move"):
            check_stage_dir(tmp_path / name)


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / "report.json.tmp").symlink_to(tmp_path / "thesis")
    write_json(tmp_path / "report.json", {})
    assert (tmp_path / "thesis").read_text() == "mine" and not (tmp_path / "report.json").is_symlink()


def replace(directory: Path, text: str) -> None:
    with replaced(directory, make_config(), (), "export.output_dir") as new:
        (new / "head.txt").write_text(text)


ADDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "thesis": (lambda path: (path / "thesis.tex").write_text("mine"), r"but thesis\.tex is none of them; move it"),
    "git": (lambda path: (path / ".git").mkdir(), r"but \.git is none of them; move it away"),
    "edited": (lambda path: (path / "head.txt").write_text("new text"), r"but head\.txt was changed since; move it"),
    "weights": (lambda path: (path / "head.txt").write_text("OLD"), r"but head\.txt was changed since; move it"),
}


@pytest.mark.parametrize("case", ADDED)
def test_a_folder_to_which_somebody_added_files_is_not_replaced(tmp_path: Path, case: str) -> None:
    add, message = ADDED[case]
    replace(tmp_path / "vllm", "old")
    add(tmp_path / "vllm")
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=rf"^export\.output_dir: \S+/vllm must hold only the files of .*{message}"):
        replace(tmp_path / "vllm", "new")
    assert files_of(tmp_path) == before and (case != "git" or (tmp_path / "vllm/.git").is_dir())


def test_a_folder_in_place_of_an_old_exports_file_is_kept(tmp_path: Path) -> None:
    write_provenance(tmp_path / "vllm", make_config())
    (tmp_path / "vllm/README.md").mkdir()
    known = ("README.md", "config.yaml")
    with (
        pytest.raises(ValueError, match=r"but README\.md is none of them"),
        replaced(tmp_path / "vllm", make_config(), known, "export.output_dir"),
    ):
        pass


def test_a_link_beside_an_export_is_not_followed(tmp_path: Path) -> None:
    replace(tmp_path / "other", "mine")
    (tmp_path / "vllm.mtptrain_new").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=r"vllm\.mtptrain_new must not be a link, but is; move it away"):
        replace(tmp_path / "vllm", "new")
    assert (tmp_path / "other/head.txt").read_text() == "mine"


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"^export\.output_dir: \. must not be the directory in which the command runs"
    ):
        replace(Path("."), "new")


def test_a_file_that_is_added_during_the_export_is_kept(tmp_path: Path) -> None:
    replace(tmp_path / "vllm", "old")
    with (
        pytest.raises(ValueError, match=r"thesis\.tex is none of them"),
        replaced(tmp_path / "vllm", make_config(), (), "export.output_dir"),
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
    ("name", "count"), [("rename", 0), ("rename", 1), ("unlink", 0), ("unlink", 2), ("rmdir", 0), ("write_text", 1)]
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
    os.waitpid(child, 0)
    if directory.exists():
        assert (directory / "head.txt").read_text() in ("old", "new") and "files" in json.loads(
            (directory / PROVENANCE).read_text()
        )
    replace(directory, "newest")
    assert (directory / "head.txt").read_text() == "newest"
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"]


def test_the_old_folder_comes_back_after_a_kill_between_the_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(tmp_path / "vllm", "old")
    (tmp_path / "vllm").rename(tmp_path / "vllm.mtptrain_old")
    with (
        pytest.raises(RuntimeError, match="differs"),
        replaced(tmp_path / "vllm", make_config(), (), "export.output_dir"),
    ):
        raise RuntimeError("differs")
    assert (tmp_path / "vllm/head.txt").read_text() == "old"
