"""Tests that MLX's counters equal ours, and that each of its traps is found."""

import json
import random
import shlex
import shutil
import string
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mtptrain.decoding.drafters import HeadDrafter, NoDrafter
from mtptrain.engines.mlx.engine import ENGINE, FAMILIES
from mtptrain.engines.mlx.formats import keys_for_mlx_lm
from mtptrain.engines.process import started
from mtptrain.engines.requests import Questions
from mtptrain.heads.base import Head
from mtptrain.heads.files import build_head
from mtptrain.settings.evaluation import ServingConfig, ServingEngine
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_json, write_json
from tests.conftest import Run, make_target
from tests.families import EXACT, EXPERTS, LOCAL_EXPERTS, SHARED_EXPERT, SIZES
from tests.mtptrain.engines.conftest import export_head, head_config
from tests.serving.breaks import BREAKS
from tests.serving.cases import EOS, HEADS, MAX_NEW_TOKENS, PROMPTS, Case, cases_of, each
from tests.serving.ours import OnDisk, Serve, check_equal, decoded_here, served_from
from tests.serving.test_generation_config import AS_GREEDY, HOT
from tests.serving.workers import launch_of, run_readme

TARGETS = {"eagle3": "qwen3_5", "dflash": "qwen3_5_shared", "draft_model": "llama"}


@each(cases_of("mlx"))
def test_mlx_counts_as_we_do(serve_by_mlx: Serve, case: Case) -> None:
    check_equal(serve_by_mlx, case)


@each({Case(head, TARGETS[head], broken=name): head == "eagle3" for head in TARGETS for name in BREAKS[f"mlx {head}"]})
def test_what_is_moved_by_one_changes_the_counters(serve_by_mlx: Serve, case: Case) -> None:
    ours, theirs, counted = serve_by_mlx(case)
    assert theirs.counts != counted and theirs.tokens == [generation.tokens for generation in ours]


@pytest.mark.slow
def test_mlx_vlm_drafts_with_the_targets_embeddings_whatever_the_head_has(serve_by_mlx: Serve) -> None:
    check_equal(serve_by_mlx, Case("eagle3", "qwen3_5", broken="embeddings"))


@pytest.mark.slow
@pytest.mark.parametrize(("head", "settings", "changed"), [
    ("draft_model", {"kv_bits": 4, "quantized_kv_start": 0}, {"tokens", "counts"}),
    ("eagle3", {"prefill_step_size": 7}, {"counts"}),
    ("dflash", {"prefill_step_size": 7}, set()),
])  # fmt: skip
def test_keys_of_4_bits_change_answers_and_a_prompt_in_chunks_the_drafts_of_eagle3(
    serve_by_mlx: Serve, monkeypatch: pytest.MonkeyPatch, head: str, settings: dict[str, int], changed: set[str]
) -> None:
    monkeypatch.setattr(type(ENGINE), "worker", Path(__file__).with_name("set_mlx_worker.py"))
    monkeypatch.setenv("MLX_SETTINGS", json.dumps(settings))
    ours, theirs, counted = serve_by_mlx(Case(head, TARGETS[head]))
    equal = {"tokens": theirs.tokens == [each.tokens for each in ours], "counts": theirs.counts == counted}
    assert {name for name, is_equal in equal.items() if not is_equal} == changed


@pytest.mark.slow
@pytest.mark.parametrize("head", ["draft_model", "eagle3"])
def test_what_the_packages_apply_of_generation_config(
    mlx_python: Path,
    mlx_target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path: Path,
    head: str,
) -> None:
    """mlx-vlm applies what the table says, and mlx-lm, which serves draft models, the ends alone."""
    on_disk, prompts = mlx_target_of(TARGETS[head]), [prompt[-5:] for prompt in PROMPTS]
    target_dir = shutil.copytree(on_disk.directory, tmp_path / "target")
    state = head_of(head, TARGETS[head]).state_dict()
    export_head(tmp_path / "head", "mlx", HEADS[head], state, target_dir)
    served = replace(served_from(mlx_python, target_dir, tmp_path / "head"), facts={"method": head})
    asked = Questions(prompts, MAX_NEW_TOKENS, [], manner="nothing")

    def answers(file: dict[str, Any]) -> list[list[int]]:
        write_json(target_dir / "generation_config.json", {"do_sample": False, "temperature": 0.0} | file)
        return ENGINE.decode(served, ENGINE.job(served, 3, tmp_path), [asked])[0].tokens

    ours = [each.tokens for each in decoded_here(on_disk.target, NoDrafter(), 0, prompts=prompts)]
    end = next(each for each in ours if EOS not in each)[5]
    cut = [each[: each.index(end) + 1] if end in each else each for each in ours]
    assert answers({"eos_token_id": end}) == cut and {each[-1] for each in cut} >= {EOS, end}
    files = {"hot": HOT, **AS_GREEDY}  # at temperature 50, because the target is sure of its tokens
    files = {name: file | ({"temperature": 50.0} if file["temperature"] > 1 else {}) for name, file in files.items()}
    hot = answers(files.pop("hot"))
    applied = {*ENGINE.applies} & {*AS_GREEDY} if head == "eagle3" else set()
    assert {name for name, file in files.items() if answers(file) == ours != hot} == applied


@each({Case(*item): item[0] == "eagle3" for item in TARGETS.items()})
def test_a_head_that_misses_the_prompts_first_token_accepts_other_drafts(
    serve_by_mlx: Serve, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(ENGINE), "worker", Path(__file__).with_name("moved_mlx_worker.py"))
    ours, theirs, counted = serve_by_mlx(case)
    assert theirs.counts != counted and theirs.tokens == [generation.tokens for generation in ours]


def compare(directory: Path, family: str, left_out: str = "", **settings: Any) -> None:
    """Exports a draft model for a tiny target without one key in its config.json, and compares both with mlx-lm's."""
    target_dir = make_target(directory / "target", family, **SIZES | settings)
    config = read_json(target_dir / "config.json")
    config |= keys_for_mlx_lm(config)
    write_json(target_dir / "config.json", {name: value for name, value in config.items() if name != left_out})
    weights = load_file(target_dir / "model.safetensors")
    biases = {name: torch.empty_like(each).uniform_(0.5, 1.5) for name, each in weights.items() if "bias" in name}
    save_file(weights | biases, target_dir / "model.safetensors", metadata={"format": "pt"})
    head, target = head_config("draft_model", num_hidden_layers=1), TargetFiles(target_dir)
    state = build_head(head, target.config).state_dict()
    form = export_head(directory / "export", "mlx", head, state, target_dir)
    ENGINE.compare(directory / "export", form, target, ServingConfig(engine=ServingEngine.mlx))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
NO_WINDOW = {"sliding_window": None}
SERVED_EQUAL = {family: (family, EXACT.get(family, (family, {}))[1]) for family in FAMILIES} | {
    **{family: (family, NO_WINDOW) for family in ("mistral", "phi3")},
    "qwen3 with yarn": ("qwen3", {"rope_parameters": YARN}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "seed_oss with biases": ("seed_oss", {"attention_bias": True, "attention_out_bias": True}),
}
OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "experts' shares": ("qwen2_moe", {**EXPERTS, **SHARED_EXPERT, "norm_topk_prob": True}),
    "clipped": ("olmoe", {**EXACT["olmoe"][1], "clip_qkv": 0.5}),
    "no biases": ("qwen2_moe", {**EXPERTS, **SHARED_EXPERT, "qkv_bias": False}),
    "one expert, after dense layers": (
        "deepseek_v3",
        {**EXACT["deepseek_v3"][1], "num_experts_per_tok": 1, "norm_topk_prob": True, "first_k_dense_replace": 2}
        | {"num_hidden_layers": 4},
    ),
    "norms of keys": ("phi", {"qk_layernorm": True}),
    "head_dim of mixtral": ("mixtral", {**LOCAL_EXPERTS, "head_dim": 32}),
    "biases": ("qwen3", {"attention_bias": True}),
    "truncate": ("llama", {"rope_parameters": YARN | {"truncate": False}}),
    "untied llama": ("llama", {"left_out": "tie_word_embeddings"}),
    "untied qwen2": ("qwen2", {"left_out": "tie_word_embeddings"}),
}
QUICK = ("qwen3", "truncate", "clipped")


def named(names: Iterable[str]) -> pytest.MarkDecorator:
    """Runs a test with each case. All but a few are slow."""
    marked = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


@named(SERVED_EQUAL)
def test_a_family_that_is_served_has_the_logits_of_transformers(mlx_python: Path, tmp_path: Path, name: str) -> None:
    family, settings = SERVED_EQUAL[name]
    compare(tmp_path, family, **settings)


@named(OTHERWISE)
def test_a_target_that_mlx_lm_computes_otherwise_is_refused(mlx_python: Path, tmp_path: Path, name: str) -> None:
    family, settings = OTHERWISE[name]
    with pytest.raises(UserError, match=r"mlx-lm must have the logits of transformers for the model in .*/target, but"):
        compare(tmp_path, family, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings", "message"), [
    ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.4}}, "must have the logits of .*/export, but they"),
    ("phi3", {**NO_WINDOW, "head_dim": 32}, "(?s)MLX: the worker must end with .*Last dimension of first input"),
])  # fmt: skip
def test_an_export_that_mlx_lm_computes_otherwise_or_not_at_all_is_refused(
    mlx_python: Path, tmp_path: Path, family: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        compare(tmp_path, family, **settings)


@pytest.mark.slow
def test_the_readme_of_a_draft_models_export_starts_a_server(
    run_of: Callable[[str], Run], mlx_python: Path, tmp_path: Path
) -> None:
    """Its greedy answers are those without drafts, of prompts that begin alike too, and no warning is logged."""
    program, *arguments = shlex.split(launch_of(run_of("mlx draft_model")[0] / "export/mlx"))
    plain = arguments[: arguments.index("--draft-model")]
    answers = []
    for number, options in enumerate((arguments, plain)):
        log = tmp_path / f"log{number}"
        with started(program, [mlx_python.parent / program, *options], log) as server:
            server.wait()
            asked = [{"prompt": prompt, "max_tokens": 16, "temperature": 0} for prompt in ("def main", "def f", "if x")]
            posted = [httpx.post(f"{server.url}/v1/completions", json=each, timeout=60.0) for each in asked * 2]
            answers.append([each.json()["choices"][0]["text"] for each in posted])
        assert "does not match" not in log.read_text()  # the tokenizers of target and draft model
    assert answers[0] == answers[1] and all(answers[0])


@pytest.mark.slow
@pytest.mark.parametrize("head", ["eagle3", "dflash"])
def test_the_readme_of_an_export_has_a_program_that_accepts_our_drafts(
    run_of: Callable[[str], Run],
    mlx_python: Path,
    mlx_target_of: Callable[[str], OnDisk],
    head_of: Callable[[str, str], Head],
    tmp_path: Path,
    head: str,
) -> None:
    """With another block size, or a prompt of which the head sees the last token, other drafts are accepted."""
    readme = (run_of(f"mlx {head}")[0] / "export/mlx/README.md").read_text()
    text = "".join(random.Random(1).choices(string.ascii_letters, k=200))
    shown = "print('\\n', *draft.accept_lens)\nEND"
    (tmp_path / "README.md").write_text(readme.replace("def main", text).replace("\nEND", f"\n{shown}"))
    theirs = [int(each) for each in run_readme(tmp_path, mlx_python, tmp_path).rpartition("\n ")[2].split()]
    on_disk = mlx_target_of(TARGETS[head])
    prompt = AutoTokenizer.from_pretrained(on_disk.directory)(text).input_ids
    drafter = HeadDrafter(head_of(head, TARGETS[head]), on_disk.target.parts, 3)
    [ours] = decoded_here(on_disk.target, drafter, 3, prompts=[prompt])
    *rounds, _ = ours.accepted_by_round  # the last may be cut off, where the program's answer is longer
    assert theirs[: len(rounds)] == rounds and max(rounds) == 3, (theirs, rounds)
