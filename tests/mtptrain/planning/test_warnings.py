"""Tests that a plan warns about everything that will not fit, and about nothing that fits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mtptrain.config import PipelineConfig
from mtptrain.planning.plan import Plan, make_plan
from mtptrain.planning.planner import plan_rows, plan_warnings
from tests.conftest import make_config
from tests.published_targets import PUBLISHED_TARGETS


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


def test_fewer_documents_than_micro_batches_are_warned_of(tiny_run: tuple[Path, tuple[str, ...]]) -> None:
    run_dir, overrides = tiny_run
    settings = (f"run_dir={run_dir}", "train.max_steps=0", "train.micro_batches_per_step=1000", "planner.num_gpus=1")
    plan = make_plan(config := make_config(*overrides, *settings))
    assert plan.num_steps == 0
    message = f"train.micro_batches_per_step: must be at most the {plan.workload.documents} documents, but is 1000; "
    assert message in warnings_for(plan, config)


WINDOWS = ("train.stream_shards=2", "hidden_states.shard_tokens=100_000")
"""With these settings, at most three windows of two shards, 600,000 tokens, are on disk."""


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
    ("overrides", "messages"),
    [
        (["planner.num_gpus=1"], ["weights must fit into 64 GB of each GPU in extraction, but take 141 GB; use "
            "8 GPUs with hidden_states.backend=vllm hidden_states.tensor_parallel_size=8, or at least 3 GPUs in one "
            "machine with hidden_states.backend=transformers"]),
        ([], ["weights must fit into 64 GB of one GPU for all GPUs to work at once, but take 141 GB; start mtptrain "
              "hidden-states as one", "set hidden_states.backend=vllm hidden_states.tensor_parallel_size=8",
              "for validation, the target must fit on every GPU next to training, but takes 141 GB",
              "are left; set train.validation_prompts=0 and run mtptrain choose-head after training; or use GPUs"]),
        (["hidden_states.backend=vllm"], ["weights must fit into 64 GB of each GPU in extraction, but take 141 GB"]),
        (["planner.num_gpus=1", "prompts.max_document_tokens=65536"],
            ["weights must fit into 64 GB of each GPU in extraction, but take 141 GB; use at least 3 GPUs in "
             "one machine with hidden_states.backend=transformers"]),
        (["hidden_states.backend=vllm", "hidden_states.tensor_parallel_size=4", "prompts.max_document_tokens=1024"],
            ["weights and states in flight must fit into 72 GB of each GPU with vLLM, but take 79.6 GB: 44.3 GB for "
            "the states of two batches of 16,384 tokens and a document of 1,024, and the rest for weights, the only "
            "part that tensor parallelism divides; set "
            "hidden_states.tensor_parallel_size=8, a lower hidden_states.batch_tokens, a lower "
            "prompts.max_document_tokens, or "
            "hidden_states.backend=transformers"]),
        (["hidden_states.backend=vllm", "hidden_states.tensor_parallel_size=8", "hidden_states.batch_tokens=32768"],
            ["the only part that tensor parallelism divides; set a lower hidden_states.batch_tokens"]),
        (["planner.gpu_memory_gb=165"], ["138 GB are left; set a lower train.batch_tokens; or set train.validation"]),
        (["prompts.max_document_tokens=32768", "train.batch_tokens=65536"],
            ["train.batch_tokens: training must fit into 80 GB of each GPU, but takes",
             "set train.activation_checkpointing=true, or lower train.batch_tokens"]),
    ],
)  # fmt: skip
def test_memory_that_does_not_suffice_is_warned_of(overrides: list[str], messages: list[str], llama_70b: Path) -> None:
    config = make_config(f"target.path={llama_70b}", *LARGE, *overrides)
    warnings = warnings_for(make_plan(config), config)
    assert [message for message in messages if message not in warnings] == []


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
    """Every GPU needs pages for two batches and the longest document, whatever the tensor-parallel size.

    The last layer counts once, even if it is also captured.
    """
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


def test_states_that_vllm_does_not_extract_are_not_planned_with_it(tmp_path: Path) -> None:
    PUBLISHED_TARGETS["deepseek_v2_lite"].config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"set hidden_states\.backend=transformers"):
        make_plan(make_config(f"target.path={tmp_path}", "hidden_states.backend=vllm"))
    assert make_plan(make_config(f"target.path={tmp_path}", "hidden_states.backend=auto")).backend == "transformers"


def test_a_head_that_could_not_be_exported_is_warned_of(config_for: Callable[..., PipelineConfig]) -> None:
    with pytest.warns(UserWarning, match=r"not exported: head\.zero_first_embedding: must be true for a mimo target"):
        make_plan(config_for(*FITTING, "head.zero_first_embedding=true"))
