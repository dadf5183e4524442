"""Tests plans against a written store, and their warnings."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig

from mtptrain.cli.arguments import compose_config
from mtptrain.config import PipelineConfig, StoreDtype
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.store import StoreManifest
from mtptrain.planning.plan import Plan, duration
from mtptrain.target import hub
from mtptrain.utils.errors import UserError
from tests.conftest import make_config, make_tokenizer, succeed
from tests.published_targets import PUBLISHED_TARGETS

EIGHT_GPUS = ("planner.num_gpus=8", "planner.gpu_memory_gb=80")


@pytest.fixture
def config_for(config_for: Callable[..., PipelineConfig]) -> Callable[..., PipelineConfig]:
    """Returns a function that makes a config without data, unless it is given some."""
    return lambda *overrides: config_for("prompts.paths=[]", "prompts.pattern='*'", *EIGHT_GPUS, *overrides)


def test_the_documents_of_stage_1_are_counted(tiny_run: tuple[Path, tuple[str, ...]]) -> None:
    run_dir, overrides = tiny_run
    plan = Plan(make_config(*overrides, f"run_dir={run_dir}"))
    documents = Documents.load(run_dir / "prompts/train.safetensors")
    lengths = [len(documents.token_ids(i)) for i in range(len(documents))]
    supervised = sum(int(documents.mask(i).sum()) for i in range(len(documents)))
    share = f"({supervised / sum(lengths):.0%})"
    counted = f"{len(lengths):,} with {sum(lengths):,} tokens, {supervised:,} supervised {share}; the longest has "
    assert plan.rows["documents"] == f"{counted}{max(lengths):,}"
    mean = sum(length for length in lengths for _ in range(length)) / sum(lengths)
    assert plan.mean_tokens == round(mean) > sum(lengths) / len(lengths)


def test_the_planned_disk_is_what_a_store_takes(tiny_run: tuple[Path, tuple[str, ...]], tmp_path: Path) -> None:
    run_dir, overrides = tiny_run
    (tmp_path / "prompts").symlink_to(run_dir / "prompts")
    head = ("head=eagle3", "head.capture_layers=[0,1,2]", "hidden_states.store_dtype=fp8")
    captured = (*overrides, f"run_dir={tmp_path}", *head)
    succeed("hidden-states", *captured)
    for settings, dtype in (((*overrides, f"run_dir='{run_dir}'"), StoreDtype.bfloat16), (captured, StoreDtype.fp8)):
        config, total = make_config(*settings), 0
        directory = config.stage_dir("hidden_states")
        shards = StoreManifest.read(directory).shards
        for record in shards:
            with (directory / record.file).open("rb") as file:
                total += record.num_bytes - 8 - int.from_bytes(file.read(8), "little")  # without the header
        # Each shard stores one more offset than it has documents; the plan does not count it.
        assert Plan(config).store_bytes[dtype] + 8 * len(shards) == total


def test_before_stage_1_the_recipes_bounds_are_planned(config_for: Callable[..., PipelineConfig]) -> None:
    bounds = ("prompts.max_train_tokens=5000", "prompts.max_document_tokens=100")
    sizes = ("train.batch_tokens=1024", "train.micro_batches_per_step=2", "train.max_steps=0", "train.epochs=3")
    plan = Plan(config := config_for(*bounds, *sizes))
    assert "at most 5,000 tokens in documents of up to 100, all supervised" in plan.rows["documents"]
    assert plan.store_bytes[StoreDtype.bfloat16] == 5000 * (2 * 64 + 5)
    assert plan.num_steps == 3 * 3  # the last step of an epoch counts even if it is not full
    config.prompts.max_train_tokens = 0
    assert "an assumed 1,000,000 tokens" in Plan(config).rows["documents"]


def test_text_files_are_planned_by_their_bytes_and_rows_of_parquet_by_their_number(
    config_for: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    """A character is a token, as is the beginning of a text."""
    (tmp_path / "texts").mkdir()
    for i in range(200):
        (tmp_path / f"texts/{i}.txt").write_text("x" * 9)
    splitting = ("prompts.validation_fraction=0.1", "prompts.max_train_tokens=0")
    plan = Plan(config_for("prompts.source=text_files", f"prompts.paths=[{tmp_path}/texts]", *splitting))
    assert (plan.num_documents, plan.num_tokens, plan.longest_tokens) == (180, 180 * 10, 10)
    sizes = []
    for name in ("chats.jsonl", "chats.parquet"):
        if name.endswith("l"):
            (tmp_path / name).write_text("\n".join(map(json.dumps, ROWS * 100)))
        else:
            Dataset.from_list(ROWS * 100).to_parquet(tmp_path / name)
        plan = Plan(config_for("prompts.source=responses", f"prompts.paths=[{tmp_path}/{name}]", *splitting))
        sizes.append(plan.expected)
    assert sizes[0] is not None and sizes[0] == sizes[1]


def test_the_rate_of_responses_says_where_it_is_from(config_for: Callable[..., PipelineConfig]) -> None:
    gpus, answers = ("planner.gpu_tflops=989", "prompts.source=responses"), dict[str, str]()
    for name, overrides in {
        "auto": gpus, "own": (*gpus, "responses.engine=transformers"), "cpu": ("prompts.source=responses",),
    }.items():  # fmt: skip
        answers[name] = Plan(config_for(*overrides)).rows["time of responses"]
    assert answers["auto"].endswith("of 8 x 989 TFLOP/s: published for vLLM, which auto takes if it is installed")
    assert answers["own"].endswith("at 0.3% of 8 x 989 TFLOP/s: measured with our own loop")
    assert torch.cuda.is_available() or "measured with our own loop on a CPU" in answers["cpu"]


def test_the_optimizers_memory_is_shared_out_by_zero_stage(config_for: Callable[..., PipelineConfig]) -> None:
    """Bytes per parameter on each of 4 GPUs. zero0 trains in fp32 without master weights; zero1 and zero2 in bf16, and
    divide fp32 master weights (4 bytes) and Adam moments (8 bytes) among the GPUs, zero2 also the gradients."""
    expected = {"zero0": (4, 4, 8), "zero1": (2, 2, 3), "zero2": (2, 0.5, 3)}
    for zero, per_parameter in expected.items():
        plan = Plan(config_for(f"deepspeed={zero}", "planner.num_gpus=4"))
        count = sum(parameter.numel() for parameter in plan.head.parameters())
        weights, gradients, optimizer, frozen, *_ = plan.memory.values()
        assert (weights, gradients, optimizer) == tuple(size * count for size in per_parameter)
        assert frozen == (64 * 260 + 64) * (4 if zero == "zero0" else 2)  # tied


def test_times_are_given_or_follow_from_the_peak_or_the_disk(config_for: Callable[..., PipelineConfig]) -> None:
    million = ("prompts.max_train_tokens=1_000_000", "prompts.max_document_tokens=128", "train.epochs=3")
    rates = ("planner.hidden_states_tokens_per_s=50", "planner.train_tokens_per_s=100")
    plan = Plan(config_for(*million, *rates))
    assert (plan.seconds["hidden-states"], plan.seconds["train"]) == (1e6 / 50, 3e6 / 100)
    assert plan.rows["time of training"] == "8.3 h at 100 tokens/s, as given"
    # Weights of one layer of the tiny target: q and o, k and v, MLP, norms.
    layer = 2 * 64 * 64 + 2 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    # FLOPs of two layers and the final norm, and of two attention matmuls per layer over half a document.
    flops = 2 * (2 * layer + 64) + 2 * 2 * 2 * 64 * 128 / 2
    plan = Plan(config_for(*million, "planner.gpu_tflops=1e-3"))
    assert f"at {8 * 1e9 * 0.4 / flops:,.0f} tokens/s, limited by " in plan.rows["time of hidden states"]
    assert plan.rows["time of training"].endswith("GFLOP/token at 50% of 8 x 0.001 TFLOP/s")
    compiled = Plan(config_for(*million, "planner.gpu_tflops=1e-3", "train.compile=true"))
    assert compiled.seconds["train"] == plan.seconds["train"] + 75
    assert compiled.rows["time of training"].endswith("after 75 s of compiling, which train.compile=false leaves out")
    # The head and two baselines answer 100 prompts with 128 tokens each.
    plan = Plan(config_for(*million, "planner.gpu_tflops=1e-3", "acceptance.baselines=[none,prompt_lookup]"))
    answering = 100 * 128 * 3 / (8 * 1e9 * 0.003 / flops)
    assert (plan.seconds["acceptance"], plan.seconds["export"]) == (pytest.approx(answering), 1)
    assert plan.rows["time of these"] == duration(sum(plan.seconds.values()))
    plan = Plan(config_for(*million, "planner.gpu_tflops=1000", "planner.disk_gb_per_s=0.001"))
    stored = plan.seconds["hidden-states"] + plan.seconds["train"]
    assert stored == pytest.approx((1 + 3) * 1e6 * (2 * 64 + 5) / 1e6)
    assert "disk of 0.001 GB/s" in plan.rows["time of training"]
    where = "measured on this CPU" if not torch.cuda.is_available() else torch.cuda.get_device_name()
    assert where in Plan(config_for()).rows["time of training"]


def test_a_machine_without_gpus_is_planned_by_its_ranks_and_at_the_share_of_its_peak_that_it_reaches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("mtptrain.planning.plan.matmul_peak", lambda *_: 1e12)
    config = compose_config("recipe=quickstart", f"run_dir={tmp_path}", "deepspeed=zero1")
    for has_amx, share in ((False, 25), (True, 7)):
        monkeypatch.setattr("mtptrain.planning.plan.has_amx", lambda has_amx=has_amx: has_amx)
        plan = Plan(config)
        assert f"at {share}% of 1 TFLOP/s measured on this CPU" in plan.rows["time of training"]
        assert "at 25% of 1 TFLOP/s" in plan.rows["time of hidden states"]
        assert "training, each rank" in plan.rows and not plan.warnings


def test_quantised_files_are_planned_at_their_own_size(tiny_target: Path, tmp_path: Path) -> None:
    """The weight files are local here. A plan from a config alone assumes `hidden_states.dtype` for every parameter."""
    config = AutoConfig.from_pretrained(tiny_target)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tiny_target / "model.safetensors")
    plan = Plan(make_config(f"target.path={tmp_path}", f"run_dir={tmp_path}/run"))
    assert f"{(tiny_target / 'model.safetensors').stat().st_size / 1e9:.3g} GB of weights" in plan.rows["target"]


FITTING = ("planner.num_gpus=1", "prompts.max_document_tokens=128")
WRONG = {
    "prompts.max_document_tokens=600": "at most 512 tokens, the target's max_position_embeddings, but have up to 600",
    "train.batch_tokens=100": "train.batch_tokens: must be at least the 128 tokens of the longest document, but is 100",
    "planner.num_gpus=3 train.micro_batches_per_step=4": "a multiple of the 3 GPUs of planner.num_gpus, but is 4; set",
    "hidden_states.backend=vllm hidden_states.tensor_parallel_size=2": "must divide the 1 GPUs of planner.num_gpus, bu",
}


def test_settings_that_do_not_fit_are_warned_of(config_for: Callable[..., PipelineConfig]) -> None:
    assert Plan(config_for(*FITTING)).warnings == []
    for overrides, message in WRONG.items():
        assert message in "\n".join(Plan(config_for(*FITTING, *overrides.split())).warnings)


ROWS = [{"messages": [{"role": "user", "content": "?" * n}, {"role": "assistant", "content": "." * 9}]} for n in (5, 9)]


def test_rows_of_files_bound_the_tokens_and_name_what_would_stop_a_later_stage(
    config_for: Callable[..., PipelineConfig], tiny_target: Path, tmp_path: Path
) -> None:
    """A role and an end are a token each; of 200 rows, 64 are rendered, half of each size."""
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, ROWS * 100)))
    chats = (f"prompts.paths=[{tmp_path}/chats.jsonl]", "prompts.validation_fraction=0.1", "train.epochs=1")
    answered = (*chats, "prompts.source=responses", "responses.max_new_tokens=20", "planner.responses_tokens_per_s=10")
    plan = Plan(config_for(*answered), free_bytes=10**12)
    assert (plan.num_documents, plan.longest_tokens) == (180, 9 + 3 + 20)
    assert (plan.num_tokens, plan.num_supervised, plan.least_tokens) == (180 * 30, 180 * 20, 180 * 10)
    assert plan.seconds["responses"] == 200 * 20 / 10 and "at most 400 s at 10 tok" in plan.rows["time of responses"]
    assert Plan(config_for(*answered, "prompts.max_document_tokens=14")).num_documents == 180  # not twice as many
    for free_bytes, has_disk in ((180 * 10 * 133 - 1, False), (180 * 10 * 133, True)):
        assert Plan(config_for(*answered), free_bytes).has_disk == has_disk
    with pytest.raises(UserError, match=r"run_dir: .* must be free for the hidden states"):
        Plan(config_for(*answered), free_bytes=1).check_disk()
    conversations = (*chats, "prompts.source=conversations")
    plan = Plan(config_for(*conversations, "prompts.max_train_tokens=1000"), free_bytes=10**12)
    assert Plan(config_for(*conversations, "prompts.max_document_tokens=14")).num_documents == 2 * 180
    assert (plan.num_tokens, plan.num_supervised) == (1000, round(1000 * 9 / 20)) and "responses" not in plan.seconds
    for content, message in (("{}", r"none of 1 rows can: .*chats\.jsonl:1: no messages"), ("", "but none of 0 rows")):
        (tmp_path / "chats.jsonl").write_text(content)
        with pytest.raises(UserError, match=message):
            Plan(config_for(*conversations))
    (tmp_path / "chats.jsonl").write_text(json.dumps(ROWS[0]))
    shutil.copytree(tiny_target, tmp_path / "plain")
    (tmp_path / "plain/chat_template.jinja").unlink(missing_ok=True)
    make_tokenizer(chat_template=None).save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="must have a chat template to render messages"):
        Plan(config_for(*conversations, f"target.path={tmp_path}/plain"))


def test_advice_about_memory_names_what_helps(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 1, "num_hidden_layers": 2}
    AutoConfig.for_model("llama", vocab_size=262_144, **sizes).save_pretrained(tmp_path)
    small = ("planner.gpu_memory_gb=1", "planner.gpu_tflops=1", "prompts.max_document_tokens=512")
    warnings = "\n".join(Plan(make_config(f"target.path={tmp_path}", *small)).warnings)
    assert "; set train.loss_chunk_rows=128 (saves " in warnings and "activation_checkpointing" not in warnings


def test_a_disk_that_is_too_small_is_warned_of(config_for: Callable[..., PipelineConfig], tmp_path: Path) -> None:
    """With these settings, at most three windows of two shards, 600,000 tokens, are on disk while streaming."""
    windows = ("train.stream_shards=2", "hidden_states.shard_tokens=100_000", "prompts.max_train_tokens=1_000_000")
    config = config_for(*FITTING, *windows)
    [warning] = Plan(config, free_bytes=100_000_000).warnings
    assert f"0.133 GB must be free for the hidden states, but {config.run_dir} has 0.1 GB; set" in warning
    assert "set hidden_states.store_dtype=fp8 (0.073 GB in all), train.stream=true train.epochs=1 (0.0798 GB" in warning
    assert Plan(config, free_bytes=133_000_000).warnings == []
    streamed = Plan(config_for(*FITTING, *windows, "train.stream=true", "train.epochs=1"), free_bytes=100_000_000)
    assert streamed.rows["streamed"] == "0.0798 GB at a time" and streamed.warnings == []
    assert "disk of run_dir" in Plan(config_for(f"run_dir={tmp_path}/not/yet/there")).rows["free disk"]
    assert not (tmp_path / "not").exists()


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama_70b")
    PUBLISHED_TARGETS["llama3_3_70b"].config().save_pretrained(directory)
    return directory


LARGE = (
    "hidden_states.batch_tokens=16384", "deepspeed=zero1", "planner.gpu_tflops=989", "train.micro_batches_per_step=8",
    "acceptance.dtype=bfloat16", *EIGHT_GPUS,
)  # fmt: skip
VLLM = "hidden_states.backend=vllm hidden_states.tensor_parallel_size"
TOO_MUCH = {
    "planner.num_gpus=1": "must fit into 64 GB of each GPU in extraction, but take 141 GB; use at least 3 GPUs in",
    "planner.num_gpus=8": "for validation, the target must fit on every GPU next to training, but takes 141 GB",
    f"{VLLM}=1": "weights must fit into 64 GB of each GPU in extraction, but take 141 GB",
    f"{VLLM}=4 prompts.max_document_tokens=1024": (
        "must fit into 72 GB of each GPU with vLLM, but take 79.6 GB, of which 44.3 GB are states"
    ),
    # The last layer, which is stored anyway, counts once, and every GPU has the states of all layers.
    f"{VLLM}=8 prompts.max_document_tokens=1024 head=eagle3 head.capture_layers=[2,40,80]": "of which 133 GB are",
    "planner.gpu_memory_gb=170 acceptance.batch_tokens=500000 acceptance.batch_size=99 train.validation_prompts=999": (
        "acceptance.batch_tokens: validation must fit into 170 GB of each GPU, but takes"
    ),
    "prompts.max_document_tokens=32768 train.batch_tokens=65536": (
        "train.batch_tokens: training must fit into 80 GB of each GPU, but takes"
    ),
}


def test_memory_that_does_not_suffice_is_warned_of(llama_70b: Path) -> None:
    for overrides, message in TOO_MUCH.items():
        assert message in "\n".join(Plan(make_config(f"target.path={llama_70b}", *LARGE, *overrides.split())).warnings)


def test_a_target_is_spread_where_one_gpu_has_no_room(llama_70b: Path) -> None:
    """Spread over all GPUs, it has the speed of one."""
    settings = (f"target.path={llama_70b}", *LARGE, "train.validation_prompts=0", "hidden_states.batch_tokens=32768")
    spread = Plan(make_config(*settings))
    assert spread.is_spread and "target.path" not in str(spread.warnings)
    assert "17.6 GB of weights on each GPU, spread by accelerate over 8 in one process" in spread.rows["target"]
    assert "% of 1 x 989" in spread.rows["time of hidden states"] and "% of 8 x 989" in spread.rows["time of training"]
    assert "validation" not in str(spread.rows) + str(spread.warnings)


def test_the_program_prints_the_plan_and_does_nothing_else(tiny_target: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run[bold]"
    result = succeed("plan", f"target.path={tiny_target}", f"run_dir='{run_dir}'", "planner.num_gpus=3")
    letters = "".join(result.stdout.replace("│", " ").split())
    assert f"planof{run_dir}:memory" in letters, "brackets are no markup"
    assert "byprompts.paths;thelongest" in letters and "ofhostmemory" in letters
    assert "WARNING train.micro_batches_per_step" in result.stdout
    assert not run_dir.exists()


def test_of_a_hub_target_only_the_config_is_fetched(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(repository: str, name: str, revision: str | None) -> str:
        return str(shutil.copy(tiny_target / name, tmp_path / name))

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    monkeypatch.delattr(hub, "snapshot_download")
    plan = Plan(make_config("target.path=someone/model", f"run_dir={tmp_path}/run"))
    assert plan.target.num_parameters > 0 and os.listdir(tmp_path) == ["config.json"]
