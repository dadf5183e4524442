"""Plans against the truth: a written store, a real head, real memory, FLOPs by hand; and a warning for all that will
not fit."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from mtptrain.config import PipelineConfig, StoreDtype
from mtptrain.data.prompt_files import Documents
from mtptrain.heads import HEADS
from mtptrain.heads.attention import cpu_blocks
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES
from mtptrain.hidden_states.store import HiddenStore, StoreManifest
from mtptrain.planning.costs import MicroBatch, _packing, _step, head_parameters, step_costs, target_costs
from mtptrain.planning.plan import Plan, make_plan
from mtptrain.planning.planner import plan_rows, plan_warnings, print_plan
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.hub import config_dir
from mtptrain.target.model import load_target
from mtptrain.training.batches import BatchSchedule
from tests.conftest import FAMILIES, make_config, make_target, run_program
from tests.published_targets import PUBLISHED_TARGETS

ROOT = Path(__file__).parents[3]


def tensor_bytes(store_dir: Path) -> int:
    """Of all shards, without the headers of their files."""
    total = 0
    for record in StoreManifest.read(store_dir).shards:
        with (store_dir / record.file).open("rb") as file:
            total += record.num_bytes - 8 - int.from_bytes(file.read(8), "little")
    return total


def test_the_planned_disk_is_what_a_store_takes(tiny_run: tuple[Path, tuple[str, ...]]) -> None:
    run_dir, overrides = tiny_run
    check_disk(StoreDtype.bfloat16, make_config(*overrides, f"run_dir={run_dir}"))


def test_the_planned_disk_is_what_a_store_of_eight_bits_and_captured_layers_takes(
    tiny_run: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    (tmp_path / "prompts").symlink_to(tiny_run[0] / "prompts")
    eagle3 = ("head=eagle3", "head.capture_layers=[0,1,2]", "hidden_states.store_dtype=fp8")
    settings = (*tiny_run[1], *eagle3, f"run_dir={tmp_path}")
    result = run_program("data_prep.hidden_states", *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    check_disk(StoreDtype.fp8, make_config(*settings))


def check_disk(dtype: StoreDtype, config: PipelineConfig) -> None:
    plan, manifest = make_plan(config), StoreManifest.read(config.stage_dir("hidden_states"))
    last_offsets = 8 * len(manifest.shards)  # D + 1 of them in a shard
    assert plan.store_bytes[dtype] + last_offsets == tensor_bytes(config.stage_dir("hidden_states"))
    assert (
        plan.bytes_per_token[dtype]
        == (plan.store_bytes[dtype] - DOCUMENT_BYTES * manifest.num_documents) / manifest.num_tokens
    )


def test_the_documents_of_stage_1_are_counted(tiny_run: tuple[Path, tuple[str, ...]]) -> None:
    run_dir, overrides = tiny_run
    work = make_plan(make_config(*overrides, f"run_dir={run_dir}")).workload
    documents = Documents.load(run_dir / "prompts/train.safetensors")
    lengths = [len(documents.tokens(i)) for i in range(len(documents))]
    assert work.is_counted
    assert (work.documents, work.tokens, work.longest_tokens) == (len(lengths), sum(lengths), max(lengths))
    assert work.supervised_tokens == sum(int(documents.mask(i).sum()) for i in range(len(documents)))
    # Tokens stand in documents of this length on the average.
    assert work.mean_tokens == pytest.approx(sum(length for length in lengths for _ in range(length)) / sum(lengths))


def test_the_planned_steps_are_those_of_training(tiny_run: tuple[Path, tuple[str, ...]]) -> None:
    """Tokens over the tokens of a step are fewer: no step is quite full."""
    run_dir, overrides = tiny_run
    config = make_config(
        *overrides, f"run_dir={run_dir}", "train.max_steps=0", "train.epochs=2", "train.batch_tokens=200"
    )
    store = HiddenStore(run_dir / "hidden_states", StoreManifest.read(run_dir / "hidden_states"))
    micro_batches = config.train.micro_batches_per_step
    schedule = BatchSchedule(store, config.head.ttt_steps, 200, micro_batches, config.seed, for_gpu=False)
    plan = make_plan(config)
    assert plan.num_steps == 2 * schedule.steps_per_epoch > 2 * plan.workload.tokens // (200 * micro_batches)


def test_before_stage_1_the_recipes_bounds_are_planned(config_for: Callable[..., PipelineConfig]) -> None:
    plan = make_plan(config_for("prompts.max_train_tokens=5000", "prompts.max_document_tokens=100"))
    assert not plan.workload.is_counted
    assert (plan.workload.tokens, plan.workload.supervised_tokens, plan.workload.longest_tokens) == (5000, 5000, 100)
    assert plan.store_bytes[StoreDtype.bfloat16] == 5000 * (2 * 64 + 5)


def test_without_any_bound_a_million_tokens_are_planned(
    config_for: Callable[..., PipelineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = print_plan(config_for("prompts.max_train_tokens=0", "prompts.max_document_tokens=100"))
    assert plan.workload.tokens == 1_000_000
    printed = capsys.readouterr().out
    assert "an assumed 1,000,000 tokens" in printed and "of host memory" in printed


@pytest.mark.parametrize(
    "head",
    [
        HEADS["mtp"].Config(),
        HEADS["eagle"].Config(),
        HEADS["eagle3"].Config(capture_layers=[0, 1, 2], fc_norm=True),
        HEADS["eagle3"].Config(capture_layers=[1, 2], draft_vocab_size=40),
        HEADS["medusa"].Config(num_layers=2),
        HEADS["hydra"].Config(num_layers=2),
        HEADS["draft_model"].Config(num_hidden_layers=2, tie_word_embeddings=True),
    ],
    ids=["mtp", "eagle", "eagle3", "eagle3 with its own vocabulary", "medusa", "hydra", "draft_model"],
)
def test_the_planned_parameters_are_those_of_the_head(head: object, tiny_target: Path) -> None:
    target_config = read_target_config(tiny_target)
    assert head_parameters(head, target_config) == sum(p.numel() for p in build_head(head, target_config).parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planned_parameters_are_those_of_the_target(family: str, tmp_path: Path) -> None:
    model_type, settings = FAMILIES[family]
    target = make_target(tmp_path, model_type, settings)
    model = load_target(target, torch.float32, torch.device("cpu")).model
    costs = target_costs(read_target_config(target))
    assert costs.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 0 < costs.active_parameters < costs.num_parameters


def test_a_token_meets_the_experts_that_it_is_sent_to() -> None:
    """Qwen3-30B-A3B is published with 3.3 B active parameters, embeddings and lm_head included."""
    config = PUBLISHED_TARGETS["qwen3_30b_a3b"].config()
    tables = 2 * config.vocab_size * config.hidden_size
    assert target_costs(config).active_parameters + tables == pytest.approx(3.3e9, rel=0.02)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"), [("zero0", 4, 4, 8), ("zero1", 2, 2, 3), ("zero2", 2, 0.5, 3)]
)
def test_the_optimizers_memory_is_shared_out_by_zero_stage(
    zero: str, weights: float, gradients: float, optimizer: float, config_for: Callable[..., PipelineConfig]
) -> None:
    """Bytes for each parameter on each of 4 GPUs: fp32 without master weights; bf16 with 4 + 8 bytes of fp32 over 4."""
    plan = make_plan(config_for(f"deepspeed={zero}", "planner.num_gpus=4"))
    memory, count = plan.memory, plan.head_parameters
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        weights * count,
        gradients * count,
        optimizer * count,
    )
    assert memory.frozen_parts == (64 * 260 + 64) * (4 if zero == "zero0" else 2)  # tied


def test_times_come_from_given_tokens_per_s(config_for: Callable[..., PipelineConfig]) -> None:
    plan = make_plan(
        config_for(
            "prompts.max_train_tokens=100_000",
            "planner.hidden_states_tokens_per_s=500",
            "planner.train_tokens_per_s=1000",
            "train.epochs=3",
        )
    )
    assert (plan.extraction_speed.seconds, plan.training_speed.seconds) == (200.0, 300.0)


def test_times_come_from_flops_and_the_peak(config_for: Callable[..., PipelineConfig]) -> None:
    config = config_for(
        "prompts.max_train_tokens=1_000_000", "prompts.max_document_tokens=128", "planner.gpu_tflops=1e-3"
    )
    plan = make_plan(config)
    layer = 2 * 64 * 64 + 2 * 64 * 64 + 3 * 64 * 96 + 2 * 64  # q, o, k, v, MLP, norms of the tiny target
    flops = 2 * (2 * layer + 64) + 2 * 2 * 2 * 64 * 128 / 2  # 2 layers; scores and values over half a document
    assert plan.extraction_speed.flops_per_token == flops
    assert plan.extraction_speed.tokens_per_s == pytest.approx(8 * 1e9 * 0.4 / flops)
    assert plan.extraction_speed.seconds == pytest.approx(1e6 * flops / (8 * 1e9 * 0.4))


def test_a_slow_disk_holds_both_stages_up(config_for: Callable[..., PipelineConfig]) -> None:
    plan = make_plan(
        config_for("prompts.max_train_tokens=1_000_000", "planner.gpu_tflops=1000", "planner.disk_gb_per_s=0.001")
    )
    assert plan.extraction_speed.seconds == pytest.approx(1e6 * (2 * 64 + 5) / 1e6)
    assert "disk of 0.001 GB/s" in plan.training_speed.basis


def test_without_a_given_peak_the_device_at_hand_is_measured(config_for: Callable[..., PipelineConfig]) -> None:
    plan = make_plan(config_for())
    assert plan.extraction_speed.tokens_per_s > 0
    assert ("CPU" in plan.training_speed.basis) != torch.cuda.is_available()


@pytest.mark.parametrize("packed", [False, True], ids=["spans", "single draft positions"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_step_of_blocks_costs_what_the_formula_says(packed: bool, num_layers: int, tiny_target: Path) -> None:
    """Attention in blocks has two more columns in two products, and computes its scores twice."""
    depths, length, vocab_size, drafts = 3, 65, 260, 11 if packed else None
    target_config = read_target_config(tiny_target)
    config = HEADS["dflash"].Config(
        ttt_steps=depths, capture_layers=[0, 1, 2], num_layers=num_layers, anchors_per_document=drafts
    )
    costs = step_costs(MicroBatch(config, target_config, torch.float32, [length] * 4, 0.5, loss_chunk_rows=32))
    rows = drafts or 32
    packing = _packing([length] * 4, [32] * 4, drafts)
    head = build_head(config, target_config)
    flops = head.step_flops(vocab_size, depths)
    attention = head.layers[0].self_attn
    pairs = sum(  # a causal part is computed in a block of whole rows, whose keys are padded
        q * (-(-k // cpu_blocks.KEY_MULTIPLE) * cpu_blocks.KEY_MULTIPLE if part.is_causal else k)
        for part in packing.segments
        for q, k in part.lengths
    )
    num_queries = num_layers * (depths + 1) - 1
    inside = num_queries * (depths + 1) * attention.o_proj.in_features * 4 * rows
    # Single draft positions recompute the teacher's logits at each depth.
    teachers = 2 * vocab_size * target_config.hidden_size * (depths - 1) * 4 * rows * packed
    expected = flops.per_token * 4 * length + flops.per_row * 4 * rows + 2 * inside + teachers
    expected += flops.per_pair * pairs * (14 + 8 / attention.head_dim) / 12
    assert costs.flops == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["mtp", "eagle", "eagle3", "medusa", "hydra"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_training_step_costs_what_the_formula_says(
    share: float, name: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Head.step_flops` against the operators that run; flash attention computes its scores twice, so that it has 14
    for the formula's 12, and attention to prompts in blocks two more columns in two products."""
    monkeypatch.setattr(cpu_blocks, "SHORT_TOKENS", 0)  # blocks of rows compute more than the causal half
    depths, length, vocab_size = 3, 65, 260
    target_config = read_target_config(tiny_target)
    settings = {"eagle3": {"capture_layers": [0, 1, 2]}, "medusa": {"num_layers": 2}, "hydra": {"num_layers": 2}}
    config = HEADS[name].Config(ttt_steps=depths, **settings.get(name, {}))
    rows = round((length - 1) * share)
    packing = Packing.of([length] * 4, [(i, length - 1 - rows, rows) for i in range(4)])
    head = build_head(config, target_config)
    flops = head.step_flops(vocab_size, depths)
    of_prompts = (14 + 8 / 64) / 12  # the head dim is 64
    pairs = sum(
        q * k * (14 / 12 / 2 if part.is_causal else of_prompts) for part in packing.segments for q, k in part.lengths
    )
    expected = flops.per_token * 4 * length + flops.per_row * 4 * rows + flops.per_pair * pairs
    costs = step_costs(MicroBatch(config, target_config, torch.float32, [length] * 4, share, loss_chunk_rows=32))
    assert costs.flops == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_training_step_of_a_draft_model_costs_what_the_formula_says(
    share: float, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token passes all layers, one more of each document too; flash attention has 14 for the formula's 12."""
    monkeypatch.setattr(cpu_blocks, "SHORT_TOKENS", 0)
    length, rows = 65, round(64 * share)
    target_config = read_target_config(tiny_target)
    config = HEADS["draft_model"].Config(num_hidden_layers=2, intermediate_size=80, tie_word_embeddings=False)
    flops = build_head(config, target_config).step_flops(260, ttt_steps=1)
    layer = 4 * 64 * 64 + 3 * 64 * 80
    assert (flops.per_token, flops.per_row) == (6 * 2 * layer, 260 * 64 * 8)
    attention = flops.per_document_pair * 4 * (length + 1) ** 2 / 2 * 14 / 12
    expected = flops.per_token * 4 * (length + 1) + flops.per_row * 4 * rows + attention
    costs = step_costs(MicroBatch(config, target_config, torch.float32, [length] * 4, share, loss_chunk_rows=32))
    assert costs.flops == pytest.approx(expected, rel=1e-9)


def test_a_draft_models_memory_in_serving_is_planned_beside_a_heads(
    config_for: Callable[..., PipelineConfig],
) -> None:
    sizes = (
        "head.num_hidden_layers=3",
        "head.hidden_size=128",
        "head.num_attention_heads=4",
        "head.intermediate_size=96",
    )
    config = config_for("head=draft_model", *sizes, "head.num_key_value_heads=2", "deepspeed=zero1")
    plan = make_plan(config)
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 96 + 2 * 128  # q, o, k, v, MLP, norms
    weights = 2 * (260 * 128 + 3 * layer + 128)
    assert plan.serving is not None and weights == 2 * plan.head_parameters
    assert plan.serving.startswith(
        f"{weights / 1e9:.3g} GB of weights and {2 * 3 * 2 * 2 * 32} bytes of keys and values"
    )
    assert plan.serving.endswith(
        "256 bytes; the target caches 512 bytes per token"
    )  # one key and value head of 64, and two layers
    assert ("serving", plan.serving) in plan_rows(plan, config)
    assert make_plan(config_for()).serving is None


@pytest.mark.parametrize("lengths", [[2048], [100] * 20], ids=["one document", "twenty documents"])
def test_the_planned_activations_are_the_memory_that_a_step_takes(lengths: list[int], tiny_target: Path) -> None:
    """Against the allocations that torch's profiler records of the same step with data."""
    target_config = read_target_config(tiny_target)
    config = HEADS["mtp"].Config(ttt_steps=3)
    planned = step_costs(MicroBatch(config, target_config, torch.float32, lengths, 1.0, loss_chunk_rows=256)).peak_bytes
    head, parts = build_head(config, target_config), load_frozen_parts(tiny_target)
    with torch.profiler.profile(profile_memory=True) as profile:
        _step_with_data(head, parts, lengths)
    assert planned == pytest.approx(peak_of(profile), rel=0.1)


def _step_with_data(head: torch.nn.Module, parts: object, lengths: list[int]) -> None:
    torch.manual_seed(0)
    empty = torch.empty

    def filled(*size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if dtype is torch.long:
            return torch.zeros(*size, dtype=dtype)
        return torch.ones(*size, dtype=dtype) if dtype is torch.bool else torch.randn(*size, dtype=dtype)

    torch.empty = filled  # type: ignore[assignment]
    try:
        _step(head, parts, 3, 64, lengths, 1.0, 256)  # type: ignore[arg-type]
    finally:
        torch.empty = empty


def peak_of(profile: torch.profiler.profile) -> int:
    """Most bytes that were allocated at once."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def warnings_for(plan: Plan, config: PipelineConfig) -> str:
    return "\n".join(plan_warnings(plan, config))


FITTING = ("planner.num_gpus=1", "prompts.max_document_tokens=128")


def test_what_fits_is_not_warned_of(config_for: Callable[..., PipelineConfig]) -> None:
    config = config_for(*FITTING)
    assert plan_warnings(make_plan(config), config) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompts.max_document_tokens=600"], "must have at most 512 tokens, the target's max_position_embeddings, but "
                                              "have up to 600"),
        (["train.batch_tokens=100"], "train.batch_tokens: must be at least the 128 tokens of the longest document, but "
                                     "is 100"),
        (["planner.num_gpus=3", "train.micro_batches_per_step=4"],
            "train.micro_batches_per_step: must be a multiple of the 3 GPUs of planner.num_gpus, but is 4; set it to "
            "6"),
        (["hidden_states.backend=vllm", "hidden_states.tensor_parallel_size=2"],
            "hidden_states.tensor_parallel_size: must divide the 1 GPUs of planner.num_gpus, but is 2"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_warned_of(
    overrides: list[str], message: str, config_for: Callable[..., PipelineConfig]
) -> None:
    config = config_for(*FITTING, *overrides)
    assert message in warnings_for(make_plan(config), config)


WINDOWS = ("train.stream_shards=2", "hidden_states.shard_tokens=100_000")
"""Three windows of two shards: 600,000 of a million tokens."""


def test_a_disk_that_is_too_small_is_warned_of(config_for: Callable[..., PipelineConfig]) -> None:
    config = config_for(*FITTING, "prompts.max_train_tokens=1_000_000")
    plan = make_plan(config, free_bytes=100_000_000)
    assert f"0.133 GB must be free for the hidden states, but {config.run_dir} has 0.1 GB; set" in warnings_for(
        plan, config
    )
    assert "set hidden_states.store_dtype=fp8 (0.073 GB)" in warnings_for(plan, config)
    assert warnings_for(replace(plan, free_bytes=133_000_000), config) == ""


def test_streaming_is_planned_and_offered_where_the_store_does_not_fit(
    config_for: Callable[..., PipelineConfig],
) -> None:
    streamed = config_for(
        *FITTING, "prompts.max_train_tokens=1_000_000", "train.stream=true", "train.epochs=1", *WINDOWS
    )
    small = make_plan(streamed, free_bytes=100_000_000)
    assert not [warning for warning in plan_warnings(small, streamed) if "must be free" in warning]
    assert ("streamed", "0.0798 GB at a time") in plan_rows(small, streamed)
    plain = config_for(*FITTING, "prompts.max_train_tokens=1_000_000", *WINDOWS)
    assert "train.stream=true train.epochs=1 (0.0798 GB at a time)" in warnings_for(
        make_plan(plain, free_bytes=100_000_000), plain
    )


def test_the_disk_of_a_folder_that_does_not_exist_yet_is_found(
    config_for: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    plan = make_plan(config_for(f"run_dir={tmp_path}/not/yet/there"))
    assert plan.free_bytes > 0
    assert not (tmp_path / "not").exists()


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama_70b")
    PUBLISHED_TARGETS["llama3_3_70b"].config().save_pretrained(directory)
    return directory


LARGE = (
    "hidden_states.batch_tokens=16384",
    "deepspeed=zero1",
    "planner.gpu_tflops=989",
    "train.micro_batches_per_step=8",
    "acceptance.dtype=bfloat16",
    "train.loss_chunk_rows=4096",
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["planner.num_gpus=1"], "weights must fit into 64 GB of each GPU in extraction, but take 141 GB; use "
            "8 GPUs with hidden_states.backend=vllm hidden_states.tensor_parallel_size=8, or at least 3 GPUs in one "
            "machine with hidden_states.backend=transformers"),
        ([], "weights must fit into 64 GB of one GPU for all GPUs to work at once, but take 141 GB; start "
             "data_prep.hidden_states as one"),
        ([], "set hidden_states.backend=vllm hidden_states.tensor_parallel_size=8"),
        (["hidden_states.backend=vllm"], "weights must fit into 64 GB of each GPU in extraction, but take 141 GB"),
        (["planner.num_gpus=1", "prompts.max_document_tokens=65536"],
            "weights must fit into 64 GB of each GPU in extraction, but take 141 GB; use at least 3 GPUs in "
            "one machine with hidden_states.backend=transformers"),
        (["hidden_states.backend=vllm", "hidden_states.tensor_parallel_size=4", "prompts.max_document_tokens=1024"],
            "weights and states in flight must fit into 72 GB of each GPU with vLLM, but take 79.6 GB: 44.3 GB for "
            "the states of two batches of 16,384 tokens and a document of 1,024, and the rest for weights, the only "
            "part that tensor parallelism divides; set "
            "hidden_states.tensor_parallel_size=8, a lower hidden_states.batch_tokens, a lower "
            "prompts.max_document_tokens, or "
            "hidden_states.backend=transformers"),
        (["hidden_states.backend=vllm", "hidden_states.tensor_parallel_size=8", "hidden_states.batch_tokens=32768"],
            "the only part that tensor parallelism divides; set a lower hidden_states.batch_tokens"),
        ([], "for validation, the target must fit on every GPU next to training, but takes 141 GB"),
        (["planner.gpu_memory_gb=165"], "138 GB are left; set a lower train.batch_tokens; or set train.validation"),
        ([], "are left; set train.validation_prompts=0 and run eval.choose_head after training; or use GPUs"),
        (["prompts.max_document_tokens=32768", "train.batch_tokens=65536"],
            "train.batch_tokens: training must fit into 80 GB of each GPU, but takes"),
        (["prompts.max_document_tokens=32768", "train.batch_tokens=65536"], "set train.activation_checkpointing=true, "
                                                                            "or lower train.batch_tokens"),
    ],
)  # fmt: skip
def test_memory_that_does_not_suffice_is_warned_of(overrides: list[str], message: str, llama_70b: Path) -> None:
    config = make_config(f"target.path={llama_70b}", *LARGE, *overrides)
    assert message in warnings_for(make_plan(config), config)


def test_a_target_spread_over_gpus_is_planned_at_the_speed_of_one(llama_70b: Path) -> None:
    spread = make_plan(make_config(f"target.path={llama_70b}", *LARGE))
    shared = make_plan(
        make_config(
            f"target.path={llama_70b}", *LARGE, "hidden_states.backend=vllm", "hidden_states.tensor_parallel_size=4"
        )
    )
    assert spread.extraction_speed.tokens_per_s == pytest.approx(shared.extraction_speed.tokens_per_s / 8)
    assert not shared.is_spread and shared.target_bytes_per_gpu == spread.target_bytes // 4


def test_without_validation_in_training_no_target_stands_beside_it(llama_70b: Path) -> None:
    config = make_config(f"target.path={llama_70b}", *LARGE, "train.validation_prompts=0")
    plan = make_plan(config)
    assert plan.memory.validation_target == 0
    assert "validation" not in warnings_for(plan, config) + str(plan_rows(plan, config))


@pytest.mark.parametrize(
    ("head", "num_streams"),
    [
        ("head=mtp", 1),
        ("head=eagle3 head.capture_layers=[2,40,77]", 4),
        ("head=eagle3 head.capture_layers=[2,40,80]", 3),
    ],
)
def test_states_in_flight_take_a_page_in_every_layer_of_each_gpu(head: str, num_streams: int, llama_70b: Path) -> None:
    """Two batches and the longest document, whatever the tensor parallelism; the last layer once, where it is captured
    too."""
    settings = (
        "hidden_states.backend=vllm",
        "hidden_states.batch_tokens=512",
        "prompts.max_document_tokens=100",
        *head.split(),
    )
    for size in (4, 8):
        config = make_config(
            f"target.path={llama_70b}", *LARGE, *settings, f"hidden_states.tensor_parallel_size={size}"
        )
        plan = make_plan(config)
        states, weights = (2 * 512 + 100) * 80 * num_streams * 8192 * 2, 2 * plan.target.num_parameters // size
        assert (plan.states_in_flight_bytes, plan.target_bytes_per_gpu) == (states, weights)
        shown = (
            f"{(weights + states) / 1e9:.3g} GB: weights {weights / 1e9:.3g} GB, states in flight {states / 1e9:.3g} GB"
        )
        assert ("extraction, each GPU", shown) in plan_rows(plan, config)
        assert "in flight" not in warnings_for(plan, config)


def test_a_target_is_spread_without_a_warning_where_vllm_has_no_room_either(llama_70b: Path) -> None:
    config = make_config(
        f"target.path={llama_70b}", *LARGE, "hidden_states.batch_tokens=32768", "train.validation_prompts=0"
    )
    plan = make_plan(config)
    assert plan.is_spread
    assert "target.path" not in warnings_for(plan, config)
    assert "spread by accelerate over 8 in one process" in dict(plan_rows(plan, config))["target"]


def test_the_program_prints_the_plan_and_does_nothing_else(tiny_target: Path, tmp_path: Path) -> None:
    result = run_program(
        "data_prep.hidden_states", "plan=true", f"target.path={tiny_target}", f"run_dir={tmp_path}/run"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "data_prep.prompts has not been run" in " ".join(result.stdout.replace("│", " ").split())
    assert "WARNING train.micro_batches_per_step" in result.stdout
    assert not (tmp_path / "run").exists()


@pytest.fixture
def hub(tiny_target: Path) -> Iterator[tuple[str, list[str]]]:
    """A hub that has the tiny target as `someone/model`: its address, and the files that were asked for."""
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


def test_a_target_that_is_nowhere_is_refused_by_name() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"^target\.path: must be a local directory, a hub name or `demo`, but 'not a name'"
    ):
        config_dir("not a name", None)


def test_states_that_vllm_does_not_extract_are_not_planned_with_it(tmp_path: Path) -> None:
    PUBLISHED_TARGETS["deepseek_v2_lite"].config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"set hidden_states\.backend=transformers"):
        make_plan(make_config(f"target.path={tmp_path}", "hidden_states.backend=vllm"))


def test_quantised_files_are_planned_at_their_own_size(tiny_target: Path, tmp_path: Path) -> None:
    """Where the weights lie here; a plan from a config alone takes every parameter in `hidden_states.dtype`."""
    config = AutoConfig.from_pretrained(tiny_target)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tiny_target / "model.safetensors")
    plan = make_plan(make_config(f"target.path={tmp_path}", f"run_dir={tmp_path}/run"))
    assert plan.target_bytes == (tiny_target / "model.safetensors").stat().st_size
