"""Writes settings for vLLM 0.32 and SGLang 0.5.23 with the fastest number of drafts at each batch size."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mtptrain.convert.formats import format_for
from mtptrain.serving.depth_choice import (
    ADAPTIVE_ALGORITHMS,
    Speeds,
    adaptive_steps,
    best_fixed_num_drafts,
    best_num_drafts,
    per_batch_size,
    why_fixed,
)
from mtptrain.serving.exports import served_model, speculative_config
from mtptrain.settings.heads import HeadConfig
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json, write_text

VLLM_FILE, SGLANG_FILE, README = "vllm.json", "sglang.json", "README.md"
FILES = (VLLM_FILE, SGLANG_FILE, README)


def remove_engine_settings(output_dir: Path) -> None:
    """Remove the files of an earlier `write_engine_settings`."""
    for name in FILES:
        (output_dir / name).unlink(missing_ok=True)


def write_engine_settings(
    output_dir: Path,
    speeds: Speeds,
    facts: dict[str, Any],
    head_dir: Path,
    target: str,
    head: HeadConfig,
    target_config: PreTrainedConfig,
) -> str:
    """Write `vllm.json`, `sglang.json` if SGLang can vary K for the head, and `README.md` with the commands.

    Nothing is written if decoding without drafts is the fastest at every concurrency.

    Args:
        output_dir: directory of the files.
        speeds: output tokens/s by concurrency and K, with K = 0 for decoding without drafts.
        facts: contents of the export's `serving.json`.
        head_dir: the export for vLLM.
        target: the target's path or name, for the commands.
        head: the head's config.
        target_config: the target's config.

    Returns:
        One line that summarises the result.
    """
    best = best_num_drafts(speeds)
    if not any(best.values()):
        return "decoding without drafts was the fastest at every concurrency: serve the target without the head"
    settings, said = vllm_settings(speeds, facts, head_dir)
    write_json(output_dir / VLLM_FILE, settings)
    parts = ["# The fastest number of drafts at each batch size", table(speeds, best), "## vLLM", said]
    served = str(served_model(facts, head_dir, target))
    parts.append(f"```bash\n{vllm_command(output_dir / VLLM_FILE, served)}\n```")
    parts += ["## SGLang", sglang_part(output_dir / SGLANG_FILE, best, head_dir, target, head, target_config)]
    write_text(output_dir / README, "\n\n".join(parts) + "\n")
    found = ", ".join(f"{num_drafts} at {size}" for size, num_drafts in best.items())
    return f"fastest K by requests in flight: {found}; settings and commands: {output_dir / README}"


def vllm_settings(speeds: Speeds, facts: dict[str, Any], head_dir: Path) -> tuple[dict[str, Any], str]:
    """Returns the value of vLLM's `--speculative-config`, and the text that explains it."""
    reason = why_fixed(facts["method"], facts.get("speculative_settings", {}))
    if reason is not None:
        fixed = best_fixed_num_drafts(speeds)
        return speculative_config(facts, head_dir, fixed), (
            f"One K for all batch sizes, because {reason}: K = {fixed} has the largest geometric mean of tokens/s."
        )
    best = best_num_drafts(speeds)
    ranges = per_batch_size(best)
    settings = speculative_config(facts, head_dir, max(best.values()))
    said = ", ".join(f"K = {num_drafts} from batch size {first}" for first, _, num_drafts in ranges)
    return {**settings, "num_speculative_tokens_per_batch_size": ranges}, (
        f"{said}. With data parallelism, vLLM ignores these batch sizes. At K = 0 it still fills the head's cache, "
        "which takes time that the measured engine without drafts does not spend."
    )


def vllm_command(settings_path: Path, target: str) -> str:
    path = shlex.quote(str(settings_path.resolve()))
    return f'vllm serve {shlex.quote(target)} --speculative-config "$(cat {path})"'


def sglang_part(
    path: Path, best: Mapping[int, int], head_dir: Path, target: str, head: HeadConfig, target_config: PreTrainedConfig
) -> str:
    """Write SGLang's settings and return their section of the README, or return the reason why there are none."""
    try:
        form = format_for("sglang", head, target_config)
    except UserError as error:
        return f"No settings: {error}."
    if form.method not in ADAPTIVE_ALGORITHMS:
        return f"No settings: SGLang drafts a fixed number of tokens with {form.method}."
    write_json(path, adaptive_steps(best))
    sglang_dir = head_dir.resolve().with_name("sglang")
    launch = form.launch(target, sglang_dir, max(best.values()))
    return (
        "For each batch, SGLang uses the entry of the closest size. The speeds were measured with vLLM, and SGLang was "
        "not run. Write the head for SGLang first, with `mtptrain export`, `export.engine=sglang` and "
        f"`export.output_dir={sglang_dir}`.\n\n"
        f"```bash\n{launch} \\\n    --speculative-adaptive --speculative-adaptive-config "
        f"{shlex.quote(str(path.resolve()))}\n```"
    )


def table(speeds: Speeds, best: Mapping[int, int]) -> str:
    """Returns a table of tokens/s by concurrency and K, with the fastest K of each row in bold."""
    choices = sorted({num_drafts for tokens_per_s in speeds.values() for num_drafts in tokens_per_s})
    lines = [
        f"| requests in flight |{''.join(f' K = {choice} |' for choice in choices)}",
        "|---|" + "---|" * len(choices),
    ]
    for size, tokens_per_s in sorted(speeds.items()):
        cells = [f"{tokens_per_s[choice]:,.0f}" for choice in choices]
        marked = [f"**{cell}**" if choice == best[size] else cell for choice, cell in zip(choices, cells, strict=True)]
        lines.append(f"| {size} | {' | '.join(marked)} |")
    return "Output tokens/s, the fastest in bold; K = 0 is decoding without drafts:\n\n" + "\n".join(lines)
