"""Writes an engine's settings with the fastest number of drafts at each batch size, and the command that uses them."""

from pathlib import Path

from mtptrain.engines.base import RunningEngine, Served
from mtptrain.engines.requests import Speeds, best_num_drafts
from mtptrain.utils.files import write_json, write_text

SETTINGS, README = "vllm.json", "README.md"
"""vLLM is the only engine with such settings that mtptrain starts."""


def remove_engine_settings(output_dir: Path) -> None:
    """Remove the files of an earlier `write_engine_settings`."""
    for name in (SETTINGS, README):
        (output_dir / name).unlink(missing_ok=True)


def write_engine_settings(output_dir: Path, speeds: Speeds, served: Served, engine: RunningEngine) -> str:
    """Write the engine's settings, and `README.md` with the command; returns a line that says what was found.

    Nothing is written if the engine has no such settings, or if decoding without drafts is always the fastest.
    """
    best = best_num_drafts(speeds)
    if not any(best.values()):
        return "decoding without drafts was the fastest at every concurrency: serve the target without the head"
    path = (output_dir / SETTINGS).resolve()
    fastest = "fastest K by requests in flight: " + ", ".join(f"{count} at {size}" for size, count in best.items())
    if (found := engine.settings_for(speeds, served, path)) is None:
        return fastest
    settings, text = found
    write_json(path, settings)
    write_text(output_dir / README, f"# The fastest number of drafts at each batch size\n\n{text}\n")
    return f"{fastest}; settings and command: {output_dir / README}"
