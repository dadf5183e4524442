"""Writes settings for engines with the fastest number of drafts at each batch size, and the commands that use them."""

from pathlib import Path

from mtptrain.engines.base import Served
from mtptrain.engines.requests import Speeds, best_num_drafts
from mtptrain.engines.table import ENGINES, engine_of, format_for
from mtptrain.settings.heads import HeadConfig
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json, write_text

README = "README.md"


def remove_engine_settings(output_dir: Path) -> None:
    """Remove the files of an earlier `write_engine_settings`."""
    for name in (*(f"{key}.json" for key in ENGINES), README):
        (output_dir / name).unlink(missing_ok=True)


def write_engine_settings(output_dir: Path, speeds: Speeds, served: Served, head: HeadConfig) -> str:
    """Write a file for each engine that can vary K, and `README.md` with the commands.

    Nothing is written if decoding without drafts is the fastest at every concurrency. Returns a line that says what was
    found.
    """
    best = best_num_drafts(speeds)
    if not any(best.values()):
        return "decoding without drafts was the fastest at every concurrency: serve the target without the head"
    parts = ["# The fastest number of drafts at each batch size"]
    for key in ENGINES:
        if not (engine := engine_of(key)).varies_drafts:
            continue
        path = (output_dir / f"{key}.json").resolve()
        try:
            format_for(key, head, served.target.config)
            settings, text = engine.settings_for(speeds, served, head, path)
        except UserError as error:
            settings, text = None, f"No settings: {error}."
        if settings is not None:
            write_json(path, settings)
        parts += [f"## {engine.name}", text]
    write_text(output_dir / README, "\n\n".join(parts) + "\n")
    found = ", ".join(f"{num_drafts} at {size}" for size, num_drafts in best.items())
    return f"fastest K by requests in flight: {found}; settings and commands: {output_dir / README}"
