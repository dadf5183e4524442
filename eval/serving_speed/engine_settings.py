"""Writes settings for vLLM 0.32 and SGLang 0.5.23 with the fastest number of drafts at each batch size."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.serving_speed.bench_rows import Speeds
from mtptrain.engines.base import Served
from mtptrain.engines.exports import served_model, speculative_config
from mtptrain.engines.table import format_for
from mtptrain.settings.heads import HeadConfig
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import write_json, write_text

VLLM_FILE, SGLANG_FILE, README = "vllm.json", "sglang.json", "README.md"
DYNAMIC_METHODS = ("eagle", "eagle3", "mtp", "draft_model", "ngram")
"""Methods of vLLM 0.32 that can draft a different number of tokens in each batch. Others, such as `medusa`, cannot."""
ADAPTIVE_ALGORITHMS = ("EAGLE", "EAGLE3")
"""Values of SGLang's `--speculative-algorithm` that can vary the number of drafted tokens.

Source: `adaptive_unsupported_reason` in adaptive_spec_params.py.
"""


def remove_engine_settings(output_dir: Path) -> None:
    """Remove the files of an earlier `write_engine_settings`."""
    for name in (VLLM_FILE, SGLANG_FILE, README):
        (output_dir / name).unlink(missing_ok=True)


def write_engine_settings(output_dir: Path, speeds: Speeds, served: Served, head: HeadConfig) -> str:
    """Write `vllm.json`, `sglang.json` if SGLang can vary K for the head, and `README.md` with the commands.

    Nothing is written if decoding without drafts is the fastest at every concurrency. Returns a line that says what was
    found.
    """
    best = best_num_drafts(speeds)
    if not any(best.values()):
        return "decoding without drafts was the fastest at every concurrency: serve the target without the head"
    settings, said = vllm_settings(speeds, served.facts, served.head_dir)
    write_json(output_dir / VLLM_FILE, settings)
    model = served_model(served.facts, served.head_dir, served.target.name_for_engines)
    command = f'vllm serve {shlex.quote(str(model))} --speculative-config "$(cat {quoted(output_dir / VLLM_FILE)})"'
    parts = ["# The fastest number of drafts at each batch size", "## vLLM", said, f"```bash\n{command}\n```"]
    parts += ["## SGLang", sglang_part(output_dir / SGLANG_FILE, best, served, head)]
    write_text(output_dir / README, "\n\n".join(parts) + "\n")
    found = ", ".join(f"{num_drafts} at {size}" for size, num_drafts in best.items())
    return f"fastest K by requests in flight: {found}; settings and commands: {output_dir / README}"


def best_num_drafts(speeds: Speeds) -> dict[int, int]:
    """Returns the fastest K at each concurrency. If several are equally fast, the smallest is chosen."""
    return {
        concurrency: max(sorted(tokens_per_s), key=lambda num_drafts: tokens_per_s[num_drafts])
        for concurrency, tokens_per_s in sorted(speeds.items())
    }


def best_fixed_num_drafts(speeds: Speeds) -> int:
    """Returns the K above 0 with the largest geometric mean of tokens/s over all concurrencies."""
    choices = sorted({num_drafts for tokens_per_s in speeds.values() for num_drafts in tokens_per_s if num_drafts})
    return max(choices, key=lambda choice: sum(math.log(tokens_per_s[choice]) for tokens_per_s in speeds.values()))


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


def why_fixed(method: str, speculative_settings: Mapping[str, Any]) -> str | None:
    """Returns why vLLM must draft the same number of tokens in every batch; None if the number can vary."""
    if speculative_settings.get("parallel_drafting"):
        return "vLLM fixes the number of mask tokens of a parallel drafter when it starts"
    return None if method in DYNAMIC_METHODS else f"vLLM's method {method} drafts a fixed number of tokens"


def per_batch_size(best: Mapping[int, int]) -> list[list[int]]:
    """Returns vLLM's `num_speculative_tokens_per_batch_size`: ranges `[first, last, K]`, both sizes included.

    Sizes between two measured ones get the K of the smaller one, which is also how vLLM fills gaps. The first range
    starts at 1, as vLLM requires, and vLLM extends the last one. Adjacent ranges with the same K are merged.
    """
    sizes = sorted(best)
    ranges: list[list[int]] = []
    for size, first, following in zip(sizes, [1, *sizes[1:]], [*sizes[1:], sizes[-1] + 1], strict=True):
        if ranges and ranges[-1][2] == best[size]:
            ranges[-1][1] = following - 1
        else:
            ranges.append([first, following - 1, best[size]])
    return ranges


def sglang_part(path: Path, best: Mapping[int, int], served: Served, head: HeadConfig) -> str:
    """Write SGLang's settings and return their section of the README, or return the reason why there are none.

    For each batch, SGLang uses the entry of the closest size in `--speculative-adaptive-config`.
    """
    try:
        form = format_for("sglang", head, served.target.config)
    except UserError as error:
        return f"No settings: {error}."
    if form.method not in ADAPTIVE_ALGORITHMS:
        return f"No settings: SGLang drafts a fixed number of tokens with {form.method}."
    write_json(path, {str(size): {"candidate_steps": [num_drafts]} for size, num_drafts in sorted(best.items())})
    sglang_dir = served.head_dir.resolve().with_name("sglang")
    launch = form.launch(served.target.name_for_engines, sglang_dir, max(best.values()))
    return (
        "For each batch, SGLang uses the entry of the closest size. The speeds were measured with vLLM, and SGLang was "
        "not run. Write the head for SGLang first, with `mtptrain export`, `export.engine=sglang` and "
        f"`export.output_dir={sglang_dir}`.\n\n"
        f"```bash\n{launch} \\\n    --speculative-adaptive --speculative-adaptive-config {quoted(path)}\n```"
    )


def quoted(path: Path) -> str:
    return shlex.quote(str(path.resolve()))
