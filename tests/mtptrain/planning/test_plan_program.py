"""Tests that `plan=true` only prints a plan, and that a plan for a target on the hub fetches only its config."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtptrain.command_line.program import quoted
from tests.conftest import run_program
from tests.programs import ROOT


def test_the_program_prints_the_plan_and_does_nothing_else(tiny_target: Path, tmp_path: Path) -> None:
    run_dir, url = tmp_path / "run[bold]", "http://me:secret@localhost:1"
    settings = (f"target.path={tiny_target}", f"run_dir={quoted(run_dir)}", f"responses.url='{url}'")
    result = run_program("hidden-states", "plan=true", *settings, "hydra.job.name=plan")
    assert result.returncode == 0, result.stderr[-3000:]
    letters = "".join(result.stdout.replace("│", " ").split())
    assert f"planof{run_dir}:memory" in letters, "brackets are no markup"
    assert "notmeasured;mtptrainserving-benchrecipe=quickstart" in letters and f"'{run_dir}'" in letters
    assert "http://***@localhost:1" in letters and "hydra." not in letters and "plan=true" not in letters
    assert "mtptrain prompts has not been run" in " ".join(result.stdout.replace("│", " ").split())
    assert "WARNING train.micro_batches_per_step" in result.stdout
    assert not run_dir.exists()


@pytest.fixture
def hub(tiny_target: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves the tiny target as `someone/model` of a hub; yields the address and the names of the requested files."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def _answer(self, with_content: bool) -> None:
            repository, _, name = self.path.partition("/resolve/main/")
            asked.extend([name] * (repository == "/someone/model"))
            content = (tiny_target / name).read_bytes() if name in os.listdir(tiny_target) else None
            self.send_response(200 if content is not None else 404)
            for header, value in {
                "ETag": '"1"',
                "X-Repo-Commit": "0" * 40,
                "Content-Length": str(len(content or b"")),
            }.items():
                self.send_header(header, value)
            self.end_headers()
            if with_content and content is not None:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


PLAN_OF_HUB = """
import json, sys
from mtptrain.target.hub import config_dir
print(json.loads((config_dir(sys.argv[1], None) / "config.json").read_text())["hidden_size"])
"""


def plan_of_hub(endpoint: str, name: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PLAN_OF_HUB, name],
        cwd=ROOT,
        env={
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_of_a_hub_target_only_the_config_is_fetched(
    hub: tuple[str, list[str]], tiny_target: Path, tmp_path: Path
) -> None:
    endpoint, asked = hub
    result = plan_of_hub(endpoint, "someone/model", tmp_path)
    assert result.stdout.strip() == str(json.loads((tiny_target / "config.json").read_text())["hidden_size"]), (
        result.stderr
    )
    assert set(asked) == {"config.json"}
    assert not list(tmp_path.rglob("*.safetensors"))
