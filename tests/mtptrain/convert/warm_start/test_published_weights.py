"""Tests that tensors of published heads which contradict each other, or which mtptrain cannot read, are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.convert.base import Tensors
from mtptrain.convert.warm_start import load_init
from mtptrain.target.files import TargetFiles
from tests.mtptrain.convert.warm_start.written_heads import DFLASH, EAGLE3, write


def write_eagle3(directory: Path, target: Path) -> tuple[Path, Tensors]:
    """Writes an EAGLE-3 head, and returns the file of its weights and the weights."""
    write(directory, "vllm", EAGLE3, target)
    return directory / "model.safetensors", load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "marked"),
    [
        (lambda t2d: t2d.roll(1), "marks 48 among 260"),
        (lambda t2d: t2d & (torch.arange(260) < 50), "marks 25 among 260"),
        (lambda t2d: t2d[:100], "among 100"),
    ],
    ids=["other tokens", "fewer", "shorter"],
)
@pytest.mark.parametrize("head", ["eagle3", "dflash"])
def test_t2d_that_contradicts_d2t_is_refused(
    tmp_path: Path, tiny_target: Path, head: str, change: Any, marked: str
) -> None:
    config = EAGLE3 if head == "eagle3" else replace(DFLASH, draft_vocab_size=48)
    write(tmp_path / "head", "vllm", config, tiny_target)
    path = tmp_path / "head/model.safetensors"
    t2d = torch.zeros(260, dtype=torch.bool)
    t2d[torch.arange(48) * 2 + 1] = True

    def store(mask: torch.Tensor) -> Tensors:
        return {**load_file(path), "t2d": mask.contiguous()}

    save_file(store(t2d), path)
    load_init(str(tmp_path / "head"), config, TargetFiles(tiny_target))
    save_file(store(change(t2d)), path)
    with pytest.raises(ValueError, match=rf"t2d of .* the 48 that the head drafts according to d2t, but .*{marked}"):
        load_init(str(tmp_path / "head"), config, TargetFiles(tiny_target))


@pytest.mark.parametrize(("old", "new"), [("midlayer.", "layers.0."), ("fc.", "model.fc.")])
def test_a_tensor_under_two_names_is_refused(tmp_path: Path, tiny_target: Path, old: str, new: str) -> None:
    path, tensors = write_eagle3(tmp_path / "head", tiny_target)
    name = next(name for name in tensors if name.startswith(old))
    save_file(tensors | {name.replace(old, new): torch.zeros_like(tensors[name])}, path)
    with pytest.raises(ValueError, match=r"a tensor must have one name, but \S+ and \S+ are both \S+; remove the one"):
        load_init(str(tmp_path / "head"), EAGLE3, TargetFiles(tiny_target))


@pytest.mark.parametrize("weight_map", [[], {"fc.weight": 1}, {"fc.weight": {}}])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, tiny_target: Path, weight_map: object) -> None:
    write_eagle3(tmp_path / "head", tiny_target)
    (tmp_path / "head/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    message = r"index\.json: must name the file of each tensor in weight_map, but does not; download the head again"
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), EAGLE3, TargetFiles(tiny_target))


def test_weights_in_eight_bits_are_refused_by_name(tmp_path: Path, tiny_target: Path) -> None:
    path, tensors = write_eagle3(tmp_path / "head", tiny_target)
    save_file({name: x.to(torch.float8_e4m3fn) if x.ndim == 2 else x for name, x in tensors.items()}, path)
    with pytest.raises(ValueError, match=r"must hold numbers of 16 bits or more, .* but has torch\.float8_e4m3fn"):
        load_init(str(tmp_path / "head"), EAGLE3, TargetFiles(tiny_target))
