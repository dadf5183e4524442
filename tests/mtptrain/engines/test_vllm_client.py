"""Tests, without vLLM, how its process reports failures, and what it is told to serve."""

import json
import shutil
from pathlib import Path
from typing import Any

from mtptrain.engines.base import Served
from mtptrain.engines.vllm.engine import cache_bytes, serve_arguments
from mtptrain.settings.evaluation import ServingConfig
from mtptrain.target.files import TargetFiles


def served_by(python: Path, target_dir: Path, head_dir: Path, **facts: Any) -> Served:
    target = TargetFiles(target_dir)
    return Served(
        python, target, head_dir, {"method": "mtp", **facts}, ServingConfig(), "float32", 72, 2, Path(), ["--x"]
    )


def test_the_layers_of_a_large_draft_model_count_in_the_cache(tiny_target: Path, tmp_path: Path) -> None:
    served, shared = served_by(Path(), tiny_target, tmp_path), {"hidden_size": 64, "num_attention_heads": 2}
    target = served.target.config
    num_tokens, bytes_of_layer = 72 + 128, 2 * 4 * 64
    for sizes in ({}, {"head_dim": 32, "num_key_value_heads": 2}):
        (tmp_path / "config.json").write_text(json.dumps({**shared, "num_hidden_layers": 24, **sizes}))
        assert cache_bytes(served, 1) - (64 << 20) == num_tokens * (target.num_hidden_layers + 24) * bytes_of_layer


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
