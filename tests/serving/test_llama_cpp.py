"""Tests that llama.cpp's counters equal ours, and that each of its traps is found. Its server is built once by make."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from mtptrain.engines.llama_cpp.server import HOST_SAMPLING, LlamaServer, server_arguments
from mtptrain.engines.load import send
from mtptrain.engines.process import started_server
from mtptrain.engines.requests import Load, Requests
from mtptrain.engines.table import format_for
from mtptrain.export import write_head
from mtptrain.heads.base import Head
from tests.conftest import Run, run_program
from tests.gguf_files import F32, write_gguf
from tests.gguf_files import tensors_of as tensors_of_target
from tests.sealed import describe_again
from tests.serving.cases import CONTEXT_TOKENS, HEAD_CONFIGS, LLAMA_CPP_CASES, MAX_NEW_TOKENS, PROMPTS, Case, each
from tests.serving.llama_cpp import convert
from tests.serving.ours import SHORT_BENCH, OnDisk, Serve, check_equal, drafted_here

ONE_OF_EACH = [
    Case("eagle3", "llama"),
    Case("dflash", "llama_shared"),
    Case("dspark", "llama"),
    Case("dflash2", "llama"),
    Case("draft_model", "qwen3"),
]


@each(LLAMA_CPP_CASES, ONE_OF_EACH)
def test_llama_cpp_counts_as_we_do(serve_by_llama: Serve, case: Case) -> None:
    check_equal(serve_by_llama, case)


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}


def metadata_of(path: Path) -> dict[str, object]:
    fields = GGUFReader(path).fields.values()
    return {field.name: field.contents() for field in fields if not field.name.startswith(("GGUF.", "general."))}


@pytest.mark.parametrize(
    "kind", ["eagle3", "eagle3_small_vocabulary", "eagle3_norms_before_inside", "dflash", "dflash2"]
)
def test_our_file_is_that_of_llama_cpps_converter(
    kind: str,
    llama_server: Path,
    gguf_of: Callable[[str], Path],
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path: Path,
) -> None:
    """Tests also that the converter reads the layers of our export for vLLM."""
    target = target_of("llama_8_layers" if kind.startswith("dflash") else "llama")
    name = target.directory.name.rstrip("0123456789")
    state, config = head_of(kind, name).state_dict(), HEAD_CONFIGS[kind]
    write_head(tmp_path / "vllm", format_for("vllm", config, target.target.config), state)
    write_head(tmp_path / "ours", format_for("llama_cpp", config, target.target.config, gguf_of(name)), state)
    converted = convert(tmp_path / "vllm", tmp_path / "converted.gguf", "--target-model-dir", str(target.directory))
    ours, theirs = tensors_of(tmp_path / "ours/model.gguf"), tensors_of(converted)
    assert ours.keys() == theirs.keys()
    for tensor in ours:  # RoPE factors are computed in another order
        assert np.allclose(ours[tensor], theirs[tensor], rtol=1e-6 if tensor == "rope_freqs.weight" else 0, atol=0)
    our_metadata, their_metadata = metadata_of(tmp_path / "ours/model.gguf"), metadata_of(converted)
    wanted = {key for key in our_metadata if key.startswith(("eagle3.", "dflash."))} & their_metadata.keys()
    assert len(wanted) >= 12 and any(key.endswith(".target_layers") for key in wanted)
    assert {key: our_metadata[key] for key in wanted} == {key: pytest.approx(their_metadata[key]) for key in wanted}
    # Without the ids at the top level, the converter takes its default layers and says nothing.
    if kind == "eagle3":
        path = tmp_path / "vllm/config.json"
        config_json = json.loads(path.read_text())
        del config_json["eagle_aux_hidden_state_layer_ids"]
        path.write_text(json.dumps(config_json))
        wrong = convert(tmp_path / "vllm", tmp_path / "wrong.gguf", "--target-model-dir", str(target.directory))
        assert metadata_of(wrong)["eagle3.target_layers"] != our_metadata["eagle3.target_layers"]


def test_a_head_without_the_targets_rope_factors_counts_otherwise(
    serve_by_llama: Serve,
    head_of: Callable[[str, str], Head],
    target_of: Callable[[str], OnDisk],
    tmp_path: Path,
) -> None:
    case = Case("eagle3", "llama")
    form = format_for("llama_cpp", HEAD_CONFIGS["eagle3"], target_of("llama").target.config)
    tensors = form.tensors(head_of("eagle3", "llama").state_dict())
    del tensors["rope_freqs.weight"]
    form.write(tmp_path, tensors)
    _, theirs, counted = serve_by_llama(case, file=tmp_path / form.weights_name)
    assert theirs.counts != counted


def test_keys_that_half_precision_cannot_hold_are_exact_with_our_arguments(
    serve_by_llama: Serve, target_of: Callable[[str], OnDisk], tmp_path: Path
) -> None:
    """Tests our arguments for keys and values with a target of larger keys and smaller queries."""
    case, directory = Case("eagle3_default_layers", "llama_8_layers"), target_of("llama_8_layers").directory
    tensors = tensors_of_target(directory)
    scales = {".attn_k.": 2.0**17, ".attn_q.": 2.0**-17}
    larger = {name: tensors[name] * scale for part, scale in scales.items() for name in tensors if part in name}
    target = write_gguf(tmp_path / "larger.gguf", directory, F32, tensors=larger)
    ours, theirs, counted = serve_by_llama(case, target=target)
    assert theirs.tokens == [generation.tokens for generation in ours] and theirs.counts == counted
    _, rounded, _ = serve_by_llama(case, target=target, is_exact=False)
    assert rounded.tokens != theirs.tokens


def test_without_the_kind_of_draft_nothing_is_drafted(serve_by_llama: Serve) -> None:
    _, theirs, _ = serve_by_llama(Case("eagle3", "llama"), without=("--spec-type",))
    assert theirs.counts is not None and (theirs.counts.rounds, theirs.counts.accepted_at) == (0, [])


@pytest.mark.parametrize("is_on_host", [True, False], ids=["with our argument", "without"])
def test_two_requests_at_once_are_drafted_for_as_one(
    llama_server: Path,
    gguf_of: Callable[[str], Path],
    target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path: Path,
    is_on_host: bool,
) -> None:
    """b11434 samples the drafts of the second request from logits of the first, unless they are sampled on the host."""
    case = Case("eagle3", "llama")
    form = format_for("llama_cpp", HEAD_CONFIGS["eagle3"], target_of("llama").target.config)
    form.write(tmp_path, form.tensors(head_of("eagle3", "llama").state_dict()))
    head = (tmp_path / form.weights_name, form.method, case.num_speculative_tokens)
    arguments = server_arguments(gguf_of("llama"), CONTEXT_TOKENS, 2, True, head)
    if not is_on_host:
        arguments.remove(HOST_SAMPLING)
    command = [llama_server, *arguments]
    counted = {}
    with started_server(LlamaServer, command, tmp_path / "log") as server:
        for num_at_once in (1, 2):
            before = server.counters()
            with ThreadPoolExecutor(num_at_once) as pool:
                answers = list(pool.map(partial(complete, server), PROMPTS))
            counted[num_at_once] = answers, server.counts_since(before, len(PROMPTS))
    assert counted[1][0] == counted[2][0] == [each.tokens for each in drafted_here(case, target_of, head_of)]
    assert (counted[1][1] == counted[2][1]) == is_on_host


def complete(server: LlamaServer, prompt: list[int]) -> list[int]:
    """Returns the greedy answer to a prompt, as `LlamaServer.generate` asks for it."""
    content = {"prompt": prompt, "n_predict": MAX_NEW_TOKENS, "temperature": 0.0, "return_tokens": True}
    content |= {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "cache_prompt": False}
    return server.read("/completion", lambda body: json.loads(body)["tokens"], content)


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run], llama_server: Path, gguf_of: Callable[[str], Path]) -> Run:
    """Returns a run whose head is exported for llama.cpp."""
    engine = ("export.engine=llama_cpp", "serving.engine=llama_cpp", f"target.gguf={gguf_of('llama')}")
    head = ("head=eagle3", "head.capture_layers=[1,2,3]")
    return make_run("eagle3", *head, *engine, "acceptance.num_prompts=12", "acceptance.max_new_tokens=32")


def test_serving_check_starts_llama_cpp(run: Run, tmp_path: Path) -> None:
    result = run_program("serving-check", *run[1], f"serving.output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_equal"] and report["ours"] == report["theirs"] and report["engine"] == "llama_cpp"
    assert report["ours"]["plain_greedy_answers"] == 12 and report["theirs"]["accepted_at"][0] > 0
    assert report["rule"].startswith("llama.cpp drafts at most one token less")
    assert "Serving check: llama.cpp" in result.stdout and "ours are counted by the same rules" in result.stdout
    readme = (run[0] / "export/llama_cpp/README.md").read_text()
    assert f"--spec-type draft-eagle3 --spec-draft-n-max 3 --spec-draft-p-min 0 {HOST_SAMPLING}" in readme
    assert "for llama_cpp b11434" in readme


@pytest.mark.parametrize("drafts", [True, False])
def test_serving_check_asks_a_running_server(run: Run, llama_server: Path, tmp_path: Path, drafts: bool) -> None:
    target = Path(run[1][-3].removeprefix("target.gguf="))
    arguments = server_arguments(target, 512, 1, True, (run[0] / "export/llama_cpp/model.gguf", "draft-eagle3", 3))
    if not drafts:
        index = arguments.index("--spec-type")
        del arguments[index : index + 2]
    command = [llama_server, *arguments]
    with started_server(LlamaServer, command, tmp_path / "log") as server:
        settings = f"serving.output_dir={tmp_path / 'check'}", f"serving.url={server.url}"
        result = run_program("serving-check", *run[1], *settings)
    if drafts:
        assert result.returncode == 0, result.stderr[-3000:]
        assert json.loads((tmp_path / "check/report.json").read_text())["is_equal"]
    else:
        assert result.returncode != 0
        assert "drafts 0; " in result.stderr and "makes none without --spec-type" in result.stderr


@pytest.mark.slow
def test_serving_check_refuses_what_it_cannot_serve(run: Run, gguf_of: Callable[[str], Path], tmp_path: Path) -> None:
    for override, message in (
        ("target.gguf=null", "target.gguf: must be the target as a GGUF file, which llama.cpp serves, but is left out"),
        ("serving.llama_server=/nowhere", "serving.llama_server: must be llama.cpp's program llama-server, but"),
        (f"target.gguf={gguf_of('llama_8_layers')}", "whose block_count is 4, but in"),
    ):
        result = run_program("serving-check", *run[1], f"serving.output_dir={tmp_path}", override)
        assert result.returncode != 0 and message in result.stderr


def test_serving_bench_measures_llama_cpp(run: Run, tmp_path: Path) -> None:
    settings = *SHORT_BENCH, f"serving_bench.output_dir={tmp_path / 'bench'}"
    result = run_program("serving-bench", *run[1], *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "bench/report.json").read_text())
    assert report["engine"] == "llama_cpp" and "llama.cpp" in result.stdout
    rows = report["rows"]
    assert [(row["num_speculative_tokens"], row["concurrency"]) for row in rows] == [
        (num_drafts, concurrency) for num_drafts in (0, 1, 3) for concurrency in (1, 2)
    ]
    for row in rows:
        assert row["requests"] == 6 and row["output_tokens"] == 6 * 32
        assert row["ttft_ms"]["p50"] > 0 and row["tpot_ms"]["p50"] > 0 and row["output_tokens_per_s"] > 0
        drafts = row["accepted_at"]
        assert drafts is None or len(drafts) == row["num_speculative_tokens"]
    assert all(row["rounds"] > 0 and sum(row["accepted_at"]) > 0 for row in rows[2:])
    assert (tmp_path / "bench/plot.svg").is_file() and not (tmp_path / "bench/vllm.json").exists()


def test_a_head_with_a_vocabulary_of_its_own_is_checked_by_the_programs(
    make_run: Callable[..., Run], llama_server: Path, gguf_of: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = ("export.engine=llama_cpp", "serving.engine=llama_cpp", f"target.gguf={gguf_of('llama')}")
    head = ("head=eagle3", "head.capture_layers=[1,2,3]", "head.draft_vocab_size=200")
    _, overrides = make_run("eagle3_small_vocabulary", *head, *settings, "acceptance.num_prompts=6")
    result = run_program("serving-check", *overrides, f"serving.output_dir={tmp_path / 'check'}")
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((tmp_path / "check/report.json").read_text())["is_equal"]
    result = run_program(
        "serving-check", *overrides, f"serving.output_dir={tmp_path / 'short'}", "acceptance.max_new_tokens=2"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((tmp_path / "short/report.json").read_text())["theirs"]["rounds"] == 0


def test_a_server_of_another_file_is_refused(run: Run, llama_server: Path, quantised: Path, tmp_path: Path) -> None:
    command = [llama_server, *server_arguments(quantised, 512, 1, True, None)]
    with started_server(LlamaServer, command, tmp_path / "log") as server:
        for program in ("serving-check", "serving-bench"):
            result = run_program(program, *run[1], f"serving.url={server.url}", f"run_dir={run[0]}")
            assert result.returncode != 0 and "which is another file; ask another server" in result.stderr


@pytest.mark.parametrize("drafts", [False, True])
def test_many_requests_of_a_bench_are_all_answered_and_their_steps_counted(
    run: Run, llama_server: Path, gguf_of: Callable[[str], Path], tmp_path: Path, drafts: bool
) -> None:
    """A connection that was kept after a stream made every tenth request fail.

    A step takes less than a millisecond. It gives one token and those that it accepts. A token of ASCII has a message.
    """
    head = (run[0] / "export/llama_cpp/model.gguf", "draft-eagle3", 3) if drafts else None
    command = [llama_server, *server_arguments(gguf_of("llama"), 256, 2, False, head)]
    requests = Requests([[1, 2, 3], [4, 5]], 24, 0.0, 1.0, 0, True, 0)
    with started_server(AsciiServer, command, tmp_path / "log") as server:
        result = send(server, requests, Load("load", 60, 2))
    assert [answer.num_tokens for answer in result.answers] == [24] * 60
    assert (result.counts is not None and result.counts.rounds > 0) == drafts
    accepted = 0 if result.counts is None else sum(result.counts.accepted_at)  # by a random head, from 0 to 11
    assert sum(len(answer.steps_s) for answer in result.answers) == 1440 - accepted


class AsciiServer(LlamaServer):
    """A server that is asked for answers of ASCII."""

    def streamed_request(self, *request: Any) -> tuple[str, dict[str, Any]]:
        path, content = super().streamed_request(*request)
        return path, content | {"logit_bias": [[token, False] for token in range(128, 260)]}


@pytest.fixture(scope="module")
def quantised(target_of: Callable[[str], OnDisk], llama_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a target in q8_0, whose activations llama.cpp quantises too."""
    out = tmp_path_factory.mktemp("quantised") / "q8_0.gguf"
    return convert(target_of("llama").directory, out, "--outtype", "q8_0")


def test_quantised_weights_are_compared_on_the_engines_answers(run: Run, quantised: Path, tmp_path: Path) -> None:
    settings = f"target.gguf={quantised}", f"serving.output_dir={tmp_path / 'check'}"
    result = run_program("serving-check", *run[1], *settings)
    report = json.loads((tmp_path / "check/report.json").read_text())
    assert result.returncode == 0, (result.stdout, result.stderr[-3000:])
    assert not report["is_equal"] and "ours are those along the engine's answers" in result.stdout
    ours, theirs = report["ours_on_their_answers"], report["theirs"]
    assert abs(ours["accepted_at"][0] - theirs["accepted_at"][0]) <= 0.05 * theirs["rounds"]


def test_a_head_in_8_bits_accepts_nearly_as_much(run: Run, tmp_path: Path) -> None:
    export = ("export.dtype=q8_0", f"export.output_dir={tmp_path / 'q8_0'}")
    result = run_program("export", *run[1], *export)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "rounded to 8 bits" in (tmp_path / "q8_0/README.md").read_text()
    settings = f"serving.head_dir={tmp_path / 'q8_0'}", f"serving.output_dir={tmp_path / 'check'}"
    result = run_program("serving-check", *run[1], *settings)
    assert result.returncode == 0, (result.stdout, result.stderr[-3000:])
    report = json.loads((tmp_path / "check/report.json").read_text())
    assert report["theirs"]["plain_greedy_answers"] == 12, "a rounded head must not change the answers"


def test_a_wrong_head_is_found_with_quantised_weights_too(run: Run, quantised: Path, tmp_path: Path) -> None:
    wrong = shutil.copytree(run[0] / "export/llama_cpp", tmp_path / "wrong")
    tensors = GGUFReader(wrong / "model.gguf", "r+").tensors
    next(tensor for tensor in tensors if tensor.name == "output_norm.weight").data[:] = 0
    describe_again(wrong / "serving.json")
    settings = f"target.gguf={quantised}", f"serving.output_dir={tmp_path / 'check'}", f"serving.head_dir={wrong}"
    result = run_program("serving-check", *run[1], *settings)
    assert result.returncode == 1 and "but they differ in" in result.stderr
