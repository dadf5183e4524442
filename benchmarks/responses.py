"""Compares the speed at which engines write responses with that of our own loop.

    python -m benchmarks.responses recipe=smollm2_135m_mtp target.path=SmolLM2-135M-Instruct.Q4_1.gguf

Each candidate is `mtptrain responses` with another `responses.engine`, and the settings of the command line. The
candidates take turns, and the fastest turn of each counts. The same command with answers of one token is subtracted, so
that neither the start nor reading the questions counts. Processor time is that of the command and of all that it
starts: other programs on the machine change it less than wall time.
"""

import argparse
import ctypes
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from mtptrain.config import AnsweringEngine, PipelineConfig
from mtptrain.utils.errors import UserError

from .command import Row, positive, print_table, run_benchmark

OWN = AnsweringEngine.transformers
OTHERS = [str(each) for each in AnsweringEngine if each not in (AnsweringEngine.auto, OWN)]
PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h
COLUMNS = {
    "engine": ("name", ""),
    "tokens": ("tokens", ",d"),
    "tokens/s": ("speed", ",.0f"),
    "vs. own loop": ("ratio", ".2f"),
    "per processor second": ("cpu_speed", ",.0f"),
    "vs. own loop, processor": ("cpu_ratio", ".2f"),
}


def main(config: PipelineConfig, options: argparse.Namespace) -> None:
    if sys.platform == "linux":  # an engine's processes may outlive the one that started them
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    lengths, least = (1, options.tokens), defaultdict[tuple[str, int], list[float]](lambda: [math.inf] * 2)
    engines, written = dict.fromkeys([str(OWN), *options.engines]), dict[str, int]()
    with TemporaryDirectory(prefix="mtptrain-bench-") as name:
        path = Path(name, "questions.jsonl")
        asked = [f"Write a story about a town with {i} bridges." for i in range(options.questions)]
        rows = [{"messages": [{"role": "user", "content": text}]} for text in asked]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for turn in range(options.repeats):
            for engine, length in ((engine, length) for engine in engines for length in lengths):
                run_dir, before = Path(name, f"{engine}_{length}_{turn}"), (time.perf_counter(), children_s())
                overrides = [f"responses.engine={engine}", f"responses.max_new_tokens={length}", f"run_dir={run_dir}"]
                overrides += [f"prompts.paths=[{path}]", "prompts.source=responses"]
                command = [sys.executable, "-m", "mtptrain", "responses", *sys.argv[1:], *overrides]
                if subprocess.run(command, check=False).returncode:
                    raise UserError(f"--engines: must be engines that answer, but {engine} does not; leave it out")
                spent = time.perf_counter() - before[0], children_s() - before[1]
                least[engine, length] = [min(each) for each in zip(least[engine, length], spent, strict=True)]
                written[engine] = json.loads((run_dir / "responses/manifest.json").read_text())["counts"][
                    "answer_tokens"
                ]
    table: list[Row] = []
    for engine in engines:
        wall, cpu = (long - short for short, long in zip(*(least[engine, length] for length in lengths), strict=True))
        tokens, wall = written[engine] - options.questions, wall if wall > 0 else math.nan  # on a busy machine
        row = {"name": engine, "tokens": tokens, "speed": tokens / wall, "cpu_speed": tokens / cpu}
        own = (table or [row])[0]
        table.append(row | {key: row[of] / own[of] for key, of in (("ratio", "speed"), ("cpu_ratio", "cpu_speed"))})
    print_table(f"{config.target.path}, {options.questions} questions of {options.tokens} tokens", COLUMNS, table)


def children_s() -> float:
    """Returns the processor time of all ended children of this process, and of theirs, orphans too."""
    with suppress(ChildProcessError):
        while True:
            os.wait()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="*", default=OTHERS, help="values of responses.engine")
    parser.add_argument("--questions", type=positive, default=64, help="questions of one short sentence")
    parser.add_argument("--tokens", type=positive, default=128, help="most tokens of an answer")
    run_benchmark(main, parser)
