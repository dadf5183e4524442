"""Compares a target's weight files with the hub's hashes of them."""

import re
import warnings
from pathlib import Path

from mtptrain.target.hub import DOWNLOAD_AGAIN, weight_files
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256
from mtptrain.utils.progress import ProgressBar

SHA256 = re.compile("[0-9a-f]{64}")


def verify_weights(target_dir: Path) -> None:
    """Compare weight files with their sha256 on the hub. Warns of files of which huggingface_hub recorded no hash.

    Reads all other files completely, which takes minutes for a large target.
    """
    files = weight_files(target_dir)
    known = {path: sha256 for path in files if (sha256 := hub_sha256(path))}
    if not known:
        raise UserError(
            f"target.verify: the hub's hashes of the weights must be known, but {target_dir} has none; download the "
            "target with huggingface_hub, or set target.verify=false"
        )
    if unknown := [path.name for path in files if path not in known]:
        warnings.warn(
            f"target.verify: all {len(files)} weight files should have a known hash, but {len(unknown)} have none, "
            f"such as {unknown[0]}; download them with huggingface_hub",
            stacklevel=2,
        )
    for path, wanted in ProgressBar(known.items(), desc="weights", unit="file"):
        if (found := file_sha256(path)) != wanted:
            raise UserError(f"{path}: must have the hub's sha256 {wanted}, but has {found}; {DOWNLOAD_AGAIN}")


def hub_sha256(path: Path) -> str | None:
    """Returns the hub's sha256 of a downloaded file, or None if it is not known.

    The etag of a large file is its sha256. In huggingface_hub's cache, the file is a link to a blob named by its etag.
    After a download to another directory, the second line of a metadata file in that directory holds the etag.
    """
    metadata = path.parent / ".cache/huggingface/download" / f"{path.name}.metadata"
    etags = [path.resolve().name, *(metadata.read_text().splitlines()[1:2] if metadata.is_file() else [])]
    return next((etag for etag in etags if SHA256.fullmatch(etag)), None)
