"""Compares the plan with real figures: bytes of a written store, tokens and steps of a run, numbers of parameters."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from mtptrain.config import PipelineConfig, StoreDtype
from mtptrain.data.prompt_files import Documents
from mtptrain.hidden_states.shard_format import DOCUMENT_BYTES
from mtptrain.hidden_states.store import HiddenStore, StoreManifest
from mtptrain.planning.costs import target_costs
from mtptrain.planning.plan import make_plan
from mtptrain.planning.planner import print_plan
from mtptrain.target.families import read_target_config
from mtptrain.target.loading import load_target
from mtptrain.training.batches import BatchSchedule
from tests.conftest import FAMILIES, make_config, make_target, run_program
from tests.published_targets import PUBLISHED_TARGETS


def tensor_bytes(store_dir: Path) -> int:
    """Returns the tensor bytes of all shards, without the headers of the safetensors files."""
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
    result = run_program("hidden-states", *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    check_disk(StoreDtype.fp8, make_config(*settings))


def check_disk(dtype: StoreDtype, config: PipelineConfig) -> None:
    plan, manifest = make_plan(config), StoreManifest.read(config.stage_dir("hidden_states"))
    # Each shard stores one more offset than it has documents; the plan does not count it.
    last_offsets = 8 * len(manifest.shards)
    assert plan.store_bytes[dtype] + last_offsets == tensor_bytes(config.stage_dir("hidden_states"))
    assert (
        plan.bytes_per_token[dtype]
        == (plan.store_bytes[dtype] - DOCUMENT_BYTES * manifest.num_documents) / manifest.num_tokens
    )


def test_the_documents_of_stage_1_are_counted(tiny_run: tuple[Path, tuple[str, ...]]) -> None:
    run_dir, overrides = tiny_run
    work = make_plan(make_config(*overrides, f"run_dir={run_dir}")).workload
    documents = Documents.load(run_dir / "prompts/train.safetensors")
    lengths = [len(documents.token_ids(i)) for i in range(len(documents))]
    assert work.is_counted
    assert (work.documents, work.tokens, work.longest_tokens) == (len(lengths), sum(lengths), max(lengths))
    assert work.supervised_tokens == sum(int(documents.mask(i).sum()) for i in range(len(documents)))
    # This is the mean document length, weighted by tokens.
    assert work.mean_tokens == pytest.approx(sum(length for length in lengths for _ in range(length)) / sum(lengths))


def test_the_planned_steps_are_those_of_training(tiny_run: tuple[Path, tuple[str, ...]]) -> None:
    """Dividing the tokens by the tokens per step would give too few steps, because steps are not completely full."""
    run_dir, overrides = tiny_run
    config = make_config(
        *overrides, f"run_dir={run_dir}", "train.max_steps=0", "train.epochs=2", "train.batch_tokens=200"
    )
    store = HiddenStore(run_dir / "hidden_states", StoreManifest.read(run_dir / "hidden_states"))
    micro_batches = config.train.micro_batches_per_step
    schedule = BatchSchedule(store, config.head.ttt_steps, 200, micro_batches, config.seed, for_gpu=False)
    plan = make_plan(config)
    assert plan.num_steps == 2 * schedule.steps_per_epoch > 2 * plan.workload.tokens // (200 * micro_batches)


@pytest.mark.parametrize(("tokens", "steps"), [(100, 1), (2048, 1), (2049, 2)])
def test_the_last_step_of_an_epoch_counts_even_if_it_is_not_full(
    config_for: Callable[..., PipelineConfig], tokens: int, steps: int
) -> None:
    sizes = ("train.batch_tokens=1024", "train.micro_batches_per_step=2", "train.max_steps=0", "train.epochs=3")
    assert make_plan(config_for(f"prompts.max_train_tokens={tokens}", *sizes)).num_steps == 3 * steps


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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planned_parameters_are_those_of_the_target(family: str, tmp_path: Path) -> None:
    model_type, settings = FAMILIES[family]
    target = make_target(tmp_path, model_type, settings)
    model = load_target(target, torch.float32, torch.device("cpu")).model
    costs = target_costs(read_target_config(target))
    assert costs.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 0 < costs.active_parameters < costs.num_parameters


@pytest.mark.parametrize("model_type", ["qwen2", "mimo"])
def test_a_target_of_a_family_without_a_setting_for_the_head_dim_is_planned(model_type: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = AutoConfig.for_model(model_type, **sizes)
    assert not hasattr(config, "head_dim")
    assert target_costs(config).attention_flops == target_costs(AutoConfig.for_model("llama", **sizes)).attention_flops


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
    """The figures are bytes per parameter on each of 4 GPUs.

    zero0 trains in fp32 without master weights. zero1 and zero2 train in bf16 and divide the fp32 master weights
    (4 bytes) and Adam moments (8 bytes) among the GPUs; zero2 also divides the gradients.
    """
    plan = make_plan(config_for(f"deepspeed={zero}", "planner.num_gpus=4"))
    memory, count = plan.memory, plan.head_parameters
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        weights * count,
        gradients * count,
        optimizer * count,
    )
    assert memory.frozen_parts == (64 * 260 + 64) * (4 if zero == "zero0" else 2)  # tied


def test_quantised_files_are_planned_at_their_own_size(tiny_target: Path, tmp_path: Path) -> None:
    """The weight files are local here. A plan from a config alone assumes `hidden_states.dtype` for every parameter."""
    config = AutoConfig.from_pretrained(tiny_target)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tiny_target / "model.safetensors")
    plan = make_plan(make_config(f"target.path={tmp_path}", f"run_dir={tmp_path}/run"))
    assert plan.target_bytes == (tiny_target / "model.safetensors").stat().st_size
