"""Tests that no stage uses a file that was changed after an earlier stage wrote it: the stage names the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedConfig

from data_prep.responses.dialogue import RegeneratedConversation
from data_prep.responses.store import ResponsesIdentity, ResponsesStore, line_of
from eval.choose_head import heads_to_measure
from mtptrain.engines.exports import SERVING, read_serving_facts
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.native_mtp import NATIVE_MTP
from mtptrain.hidden_states.stream import STREAM, released_windows
from mtptrain.hidden_states.writer import begin_store
from mtptrain.init_from.native_mtp import read_native_mtp
from mtptrain.init_from.published import read_published
from mtptrain.init_from.start import load_init
from mtptrain.target.files import TargetFiles
from mtptrain.training.metrics import read_metrics
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import SEAL, sealed, write_json, write_sealed
from tests.conftest import Run, run_program
from tests.mtptrain.hidden_states.small_store import EVERY_SHARD, IDENTITY, SHARD_TOKENS, make_shard, write_shard
from tests.sealed import flip_bit

Change = Callable[[Path], None]


def edit(key: str, value: object) -> Change:
    """Returns a change of one entry of a JSON file."""

    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        assert content[key] != value
        path.write_text(json.dumps(content | {key: value}, indent=2) + "\n")

    return change


def ask_another_question(path: Path) -> None:
    path.write_text(path.read_text().replace('"window": 0', '"window": 1', 1))


@pytest.mark.parametrize(
    ("name", "change", "module"),
    [
        ("prompts/documents.jsonl", ask_another_question, "acceptance"),
        ("hidden_states/manifest.json", edit("num_documents", value=1), "train"),
        ("train/best/head.safetensors", flip_bit, "export"),
        ("train/checkpoints/step_00000020/state.safetensors", flip_bit, "train"),
        ("acceptance/report.json", edit("acceptance_length", value=9.077), "export"),
        (f"export/vllm/{SERVING}", Path.unlink, "run"),
    ],
)
def test_a_changed_file_is_named_before_it_is_used(
    finished: Run, tmp_path: Path, name: str, change: Change, module: str
) -> None:
    shutil.copytree(finished[0], tmp_path / "run")
    if module == "run":  # passes over all stages, because links are to folders of other runs
        (tmp_path / "run").rename(tmp_path / "other")
        (tmp_path / "run").mkdir()
        for stage in (tmp_path / "other").iterdir():
            (tmp_path / "run" / stage.name).symlink_to(stage)
    change(tmp_path / "run" / name)
    result = run_program(module, *finished[1], f"run_dir={tmp_path}/run")
    assert result.returncode == 1, result.stdout[-2000:]
    reason = "exist, but does not" if change is Path.unlink else "be as mtptrain wrote it, but was changed or damaged"
    assert result.stderr.startswith("error: ") and f"{tmp_path}/run/{name}: must {reason}" in result.stderr


DAMAGED = r"{}: must be as mtptrain wrote it, but was changed or damaged"


def test_a_changed_export_is_named_before_it_is_served_or_trained_from(
    finished: Run, tiny_target: Path, tmp_path: Path
) -> None:
    target, export = TargetFiles(tiny_target), finished[0] / "export/vllm"
    sha256 = json.loads((export / SERVING).read_text())["head_sha256"]
    assert read_serving_facts(export, "vllm", sha256)["engine"] == "vllm"
    assert read_published(str(export), target).tensors
    for name, change in (("model.safetensors", flip_bit), (SERVING, edit("method", value="other"))):
        changed = shutil.copytree(export, tmp_path / name / "head")
        change(changed / name)
        with pytest.raises(UserError, match=DAMAGED.format(name)):
            read_serving_facts(changed, "vllm", sha256)
        with pytest.raises(UserError, match=DAMAGED.format(name)):
            read_published(str(changed), target)
    changed = shutil.copytree(export, tmp_path / "without_seal")
    facts = json.loads((changed / SERVING).read_text())
    write_json(changed / SERVING, {name: value for name, value in facts.items() if name != SEAL})
    with pytest.raises(UserError, match=rf"without_seal/{SERVING}: must have the entry seal, but lacks it"):
        read_published(str(changed), target)
    (changed / SERVING).unlink()
    with pytest.raises(UserError, match=rf"without_seal/{SERVING}: must exist, but does not"):
        read_published(str(changed), target)
    trained = shutil.copytree(finished[0] / "train/best", tmp_path / "trained")
    flip_bit(trained / "head.safetensors")
    with pytest.raises(UserError, match=DAMAGED.format(r"head\.safetensors")):
        read_published(str(trained), target)


def test_a_changed_export_with_a_model_is_named_before_training_starts_from_it(
    tiny_target: Path, tmp_path: Path
) -> None:
    exported = str(shutil.copytree(tiny_target, tmp_path / "export"))
    write_sealed(Path(exported) / SERVING, {"head_sha256": "a"}, ["model.safetensors"])
    flip_bit(Path(exported) / "model.safetensors")
    family: Any = SimpleNamespace(config=PreTrainedConfig(model_type=next(iter(NATIVE_MTP))))
    with pytest.raises(UserError, match=DAMAGED.format(r"model\.safetensors")):
        load_init(exported, DraftModelHead.Config(init_from=exported), TargetFiles(tiny_target))
    with pytest.raises(UserError, match=DAMAGED.format(r"model\.safetensors")):
        read_native_mtp(exported, family)


LINE, OTHER_LINE = line_of(RegeneratedConversation(1, "chat1")), json.dumps(sealed({"step": 1})) + "\n"
ANSWERS = [
    ('"chat1"', '"chat7"', "be as mtptrain wrote it, but was changed or damaged since"),
    (f'"{SEAL}"', '"other"', "have the entry seal, but lacks it"),
    ('{"row": 1', '{"row": 1}', "be JSON, but is not"),
    (LINE, OTHER_LINE, "be a conversation, but is not .KeyError.'ended_by'"),
]


@pytest.mark.parametrize("name", ["answers_00000.jsonl", "conversations.jsonl"])
def test_a_changed_answer_of_a_killed_run_is_named(tmp_path: Path, name: str) -> None:
    identity = ResponsesIdentity(IDENTITY.target, {}, "server", "tiny", {})
    store = ResponsesStore(tmp_path)
    store.begin(identity)
    store.mark_unfinished([])
    lines = "".join(line_of(RegeneratedConversation(row, f"chat{row}")) for row in range(3))
    (tmp_path / name).write_text(lines + '{"row": 3, "i')
    store.begin(identity)
    assert set(store.lines) == {0, 1, 2} and (tmp_path / name).read_text() == lines
    for old, new, reason in ANSWERS:
        (tmp_path / name).write_text(lines.replace(old, new))
        number = lines[: lines.index(old)].count("\n") + 1
        with pytest.raises(UserError, match=rf"{name}:{number}: must {reason}.*; delete the line, or {tmp_path} if an"):
            ResponsesStore(tmp_path).begin(identity)


def test_a_kept_head_that_was_renamed_is_named(finished: Run, tmp_path: Path) -> None:
    shutil.copytree(finished[0] / "train/best", tmp_path / "heads/step_00000099")
    step = json.loads((tmp_path / "heads/step_00000099/head.json").read_text())["step"]
    with pytest.raises(UserError, match=rf"step_00000099: must be the folder of step {step}, but was renamed"):
        heads_to_measure(tmp_path)


METRICS = [
    ("{oops}", "must be JSON, but is not"),
    ('{"step": "7"}', "must hold the numbers of a step, but does not"),
    ('{"step": 2, "kl_at": [1.0, "x"]}', "must hold the numbers of a step, but does not"),
]


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line, reason in METRICS:
        path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n{"step": 4, "lo')
        with pytest.raises(UserError, match=rf"metrics\.jsonl:2: {reason}.*; remove the line"):
            read_metrics(path)
    path.write_text('{"step": 1}\n{"step": 4, "lo')
    assert [record for _, record in read_metrics(path)] == [{"step": 1}]


def copy_of(name: str) -> Change:
    return lambda path: shutil.copy(path.with_name(name), path)  # type: ignore[return-value]


UNFINISHED: list[tuple[str, Change, str]] = [
    ("plan.json", copy_of("shard_00000.json"), "as mtptrain hidden-states writes it, .*delete .* and run mtptrain hid"),
    ("shard_00000.json", copy_of("plan.json"), "as mtptrain hidden-states writes it, .*delete it and run .* recompute"),
    ("shard_00000.json", edit("num_tokens", value=1), "as mtptrain wrote it, but was changed or damaged"),
    ("shard_00001.json", copy_of("shard_00000.json"), r"the record of shard_00001\.safetensors, but is that of sha"),
]


def test_a_changed_record_or_one_of_another_kind_in_an_unfinished_store_is_named(tmp_path: Path) -> None:
    for number, (name, change, reason) in enumerate(UNFINISHED):
        directory = tmp_path / str(number)
        begin_store(directory, IDENTITY, SHARD_TOKENS, EVERY_SHARD)
        write_shard(directory, 0, make_shard(0, range(0, 3)))
        change(directory / name)
        with pytest.raises(UserError, match=rf"{name}: must be {reason}"):
            begin_store(directory, IDENTITY, SHARD_TOKENS, EVERY_SHARD)


STREAMS: list[tuple[dict[str, object], str]] = [
    ({"released_windows": 1, "windows": [], "a": 9}, "be as mtptrain train writes it, but has the unknown entry a"),
    ({"windows": [[0], [1]]}, "be as mtptrain train writes it, but lacks released_windows"),
    ({"released_windows": 0, "windows": []}, r"be \[0\], \.\.\., but are missing"),
]


def test_a_changed_number_of_released_windows_is_named_before_shards_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / STREAM
    write_sealed(path, {"released_windows": 1, "windows": [[0], [1]]})
    assert released_windows(tmp_path, [[0], [1]]) == 1
    edit("released_windows", value=3)(path)
    with pytest.raises(UserError, match=DAMAGED.format(STREAM)):
        released_windows(tmp_path, [[0], [1]])
    for content, reason in STREAMS:
        write_json(path, sealed(content))
        with pytest.raises(UserError, match=rf"{STREAM}: .*must {reason}.*; delete this file, and start both programs"):
            released_windows(tmp_path, [[0], [1]])
