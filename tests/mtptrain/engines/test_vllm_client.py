"""Tests, without vLLM, how its process reports failures, and what it is told to serve."""

import shutil
from pathlib import Path
from typing import Any

from mtptrain.engines.base import Served
from mtptrain.engines.vllm.engine import serve_arguments
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.files import TargetFiles


def served_by(python: Path, target_dir: Path, head_dir: Path, **facts: Any) -> Served:
    target = TargetFiles(target_dir)
    return Served(
        python, target, head_dir, {"method": "mtp", **facts}, ServingConfig(), "float32", 72, 2, Path(), ["--x"]
    )


def test_a_server_without_drafts_loads_the_export_where_that_holds_the_target(
    tiny_target: Path, tmp_path: Path
) -> None:
    """vLLM refuses the folder of a published MiMo, whose config.json asks for code; that of the export does not."""
    head_dir = Path(shutil.copytree(tiny_target, tmp_path / "export"))
    for holds_target in (True, False):
        served = served_by(Path("python"), tiny_target, head_dir, holds_target=holds_target)
        models = set()
        for num_drafts in (0, 3):
            arguments = serve_arguments(served, num_drafts)
            models.add(arguments[1])
            assert ("--speculative-config" in arguments) == bool(num_drafts) and arguments[-1] == "--x"
        assert models == {str(head_dir if holds_target else tiny_target)}
