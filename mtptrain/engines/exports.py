"""Says what an export is: the names of its files, where it goes, and its `serving.json`."""

from pathlib import Path
from typing import Any

from mtptrain.config import PipelineConfig
from mtptrain.stage_dir import StageDir, require
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import SEAL, read_json, read_sealed, refuse_absent

SERVING = "serving.json"
"""Name of the file in an export that describes it for programs."""
README = "README.md"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""The key of engines for the captured layers of EAGLE-3."""
FROM_1_IN_SGLANG = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
"""Families in which SGLang reads id k as the stream after k layers, as vLLM does.

If the first id is 1, it reads them as in other families: id k is then the stream after k + 1 layers. Source:
`set_eagle3_layers_to_capture` of their classes.
"""
REQUIRED = ("engine", "method", "head_sha256")
"""Entries of `serving.json` that every export has."""


def read_serving_facts(head_dir: Path, engine: str, head_sha256: str) -> dict[str, Any]:
    """Returns the `serving.json` by which an engine loads a head; refuses that of another engine or head."""
    export = f"mtptrain export export.engine={engine}"
    path = require(head_dir / SERVING, export)
    facts = read_sealed(path, f"run {export} again", REQUIRED, files=None)
    if facts["engine"] != engine:
        raise UserError(
            f"{path}: engine must be {engine}, but is {facts['engine']}; run {export}, or correct serving.engine or "
            "serving.head_dir"
        )
    if facts["head_sha256"] != head_sha256:
        raise UserError(
            f"{path}: head_sha256 must be {head_sha256}, the hash of this run's head, but is "
            f"{facts['head_sha256']}, the hash of another head; run {export} again, or correct serving.head_dir"
        )
    return facts


def refuse_changed_export(directory: Path, advice: str = "copy or download it again") -> None:
    """Raises UserError if a folder is an export of ours whose `serving.json`, weights or config.json have changed.

    An export is recognised by either its `serving.json` or its `stage.json`, which lists that file.
    """
    path = directory / SERVING
    is_ours = path.is_file() and not {SEAL, "head_sha256"}.isdisjoint(read_json(path, advice))
    if is_ours or SERVING in StageDir(directory).files():
        refuse_absent(path, advice)
        read_sealed(path, advice, files=None)


def export_dir(config: PipelineConfig) -> StageDir:
    directory = Path(config.export.output_dir or config.stage_dir("export") / config.export.engine)
    if directory.is_symlink():  # a directory cannot be renamed to a link
        directory = directory.resolve()
    return StageDir(directory, "export.output_dir")
