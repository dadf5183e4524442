"""Tests the planned memory of validation against that of real decoding on tensors without data."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from mtptrain.config import PipelineConfig
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.heads.files import build_head
from mtptrain.planning.costs import _default_dtype
from mtptrain.planning.decoding_memory import cached_values, largest_batch, state_values, validation_bytes
from mtptrain.planning.meter import Meter
from mtptrain.planning.plan import make_plan
from mtptrain.planning.planner import plan_rows, plan_warnings
from mtptrain.target.model import Target, Verified
from mtptrain.target.position_cache import PositionCache
from mtptrain.target.state_cache import StateCache
from tests.conftest import FAMILIES, make_config
from tests.families import EXACT, KEEPS_STATES, SIZES

GB = 10**9


def read_prompts(target: Target, drafter: HeadDrafter, prompts: int, prompt_tokens: int, num_slots: int) -> None:
    """Run the first phase of `speculate`, in which first the target and then the head read the prompts."""
    tokens, cache = torch.zeros(prompts, num_slots, dtype=torch.long), PositionCache(num_slots)
    positions = torch.arange(prompt_tokens).expand(prompts, -1)
    drafter.start(prompts, num_slots)
    states = target.forward(tokens[:, :prompt_tokens], positions, cache, drafter.read_layers)
    drafter.first_depth(Verified(tokens, torch.full((prompts,), prompt_tokens + 1), positions, states))


def measured_bytes(
    config: PipelineConfig, target_config: PreTrainedConfig, prompts: int, prompt_tokens: int, num_slots: int
) -> int:
    meter = Meter()
    with FakeTensorMode(), _default_dtype(torch.bfloat16), torch.no_grad():
        target = Target(AutoModelForCausalLM.from_config(target_config, attn_implementation="sdpa"))
        head = build_head(config.head, target_config)
        meter.hold(*target.model.parameters(), *head.parameters(), *head.buffers())
        held = meter.peak_bytes["cpu"]
        with meter:
            read_prompts(target, HeadDrafter(head, target.parts, 3), prompts, prompt_tokens, num_slots)
    return meter.peak_bytes["cpu"] - held


def llama(kind: type[PreTrainedConfig] = LlamaConfig, **settings: int) -> PreTrainedConfig:
    """Returns the config of a Llama of 8B with fewer layers, or of another family with the same settings."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    return kind(
        **{**sizes, "vocab_size": 128256, "num_hidden_layers": 3, "max_position_embeddings": 131072, **settings}
    )


CONVERSATIONS = (
    "prompts.source=conversations",
    "prompts.paths=[none.jsonl]",
    "planner.num_gpus=1",
    "train.validation_new_tokens=64",
)


@pytest.mark.parametrize(
    ("head", "target_config"),
    [
        ((), llama()),
        (("head=eagle3", "head.capture_layers=[0,1,3]"), llama()),
        ((), llama(MixtralConfig)),  # every token is in two of eight experts, whose size is intermediate_size
    ],
    ids=["mtp", "eagle3", "mtp for a mixture"],
)
def test_validation_is_planned_with_the_memory_that_decoding_takes(
    head: tuple[str, ...], target_config: PreTrainedConfig
) -> None:
    config = make_config(*CONVERSATIONS, *head, "acceptance.dtype=bfloat16", "acceptance.num_speculative_tokens=3")
    planned = validation_bytes(config, target_config, longest_tokens=16384 - 64)
    num_slots = 16384 + 2 * (3 + 1) + 3  # the slots that `speculate` allocates
    assert planned == pytest.approx(measured_bytes(config, target_config, 2, 16384 - 64, num_slots), rel=0.05)


def test_reading_a_prompt_takes_memory_in_proportion_to_its_length() -> None:
    """With so small a target, a mask [B, 1, S, S] would take more memory than everything else already at 8,192 tokens,
    and four times as much at 16,384."""
    small = llama(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=512,
    )
    config = make_config(*CONVERSATIONS)
    short, long = (measured_bytes(config, small, 2, length, length + 64) for length in (8192, 16384))
    assert long == pytest.approx(2 * short, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_keeps_as_many_values_of_a_token_as_planned(family: str) -> None:
    model_type, settings = FAMILIES[family]
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    config = AutoConfig.for_model(model_type, **{**sizes, "num_hidden_layers": 2, "head_dim": 64, **settings})
    target, cache = Target(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")), PositionCache(10)
    target.forward(torch.zeros(2, 4, dtype=torch.long), torch.arange(4).expand(2, -1), cache)
    kept = sum(tensor.numel() for tensors in (cache._keys, cache._values) for tensor in tensors.values())
    assert kept == 2 * 10 * cached_values(config)


@pytest.mark.parametrize(
    ("overrides", "batch"),
    [
        ((), (8, 32768)),  # limited by the default acceptance.batch_tokens
        (("acceptance.batch_tokens=500000",), (8, 8 * 16384)),
        (("acceptance.batch_tokens=1000",), (8, 16384)),  # the longest prompt has a batch to itself, short ones share
        (("train.validation_prompts=1",), (1, 16384)),
        (("planner.num_gpus=16", "acceptance.batch_tokens=500000"), (2, 2 * 16384)),  # 2 of 32 prompts per rank
        (("prompts.source=text_files", "prompts.paths=[none]"), (8, 8 * (256 + 64))),  # cut to 256 prompt tokens
    ],
)
def test_the_largest_batch_follows_from_the_settings(overrides: tuple[str, ...], batch: tuple[int, int]) -> None:
    config = make_config(*CONVERSATIONS, *overrides)
    assert largest_batch(config, longest_tokens=16384 - 64, context_tokens=131072) == batch


def test_the_plan_prints_validation_and_warns_of_it(config_for: Callable[..., PipelineConfig]) -> None:
    config = config_for("planner.gpu_memory_gb=1", "planner.num_gpus=1")
    plan = make_plan(config)
    rows = dict(plan_rows(plan, config))
    assert plan.memory.validation > 0
    size = f"{plan.memory.validation / GB:.3g} GB"
    assert f"{size} for KV caches and the forward pass over the prompts" in rows["validation, each GPU"]
    assert not any("acceptance.batch_tokens" in warning for warning in plan_warnings(plan, config))
    plan.memory.__dict__["validation"] = 2 * GB  # as if the batch were too large for this GPU
    assert any(
        warning.startswith("acceptance.batch_tokens: validation must fit into 1 GB of each GPU, but takes 2")
        for warning in plan_warnings(plan, config)
    )
    without = config_for("train.validation_prompts=0")
    assert "validation, each GPU" not in dict(plan_rows(make_plan(without), without))


@pytest.mark.parametrize("name", KEEPS_STATES)
def test_the_states_of_a_sequence_are_planned_exactly(name: str) -> None:
    family, settings = EXACT[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **settings})
    target = Target(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    cache = target.cache(8)
    target.forward(torch.zeros(1, 5, dtype=torch.long), torch.arange(5)[None], cache)
    assert isinstance(cache, StateCache)
    assert state_values(target.config) == sum(state[0].numel() for state in cache._after[-1]) > 0
