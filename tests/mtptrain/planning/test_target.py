"""Tests the planned size of a target, and of its memory in validation, against real models."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from mtptrain.config import PipelineConfig, TrainConfig
from mtptrain.decoding.drafters import HeadDrafter
from mtptrain.heads.files import build_head
from mtptrain.heads.packing import Packing
from mtptrain.planning.step import step_flops
from mtptrain.planning.target import cached_values, state_values, target_costs, validation_bytes
from mtptrain.settings.heads import NativeMtpConfig
from mtptrain.target.model import Target, Verified
from mtptrain.target.position_cache import PositionCache
from mtptrain.target.state_cache import StateCache
from mtptrain.training.losses import LossSettings
from tests.conftest import FAMILIES, make_config
from tests.cuda.meter import Meter
from tests.families import EXACT, EXPERTS, KEEPS_STATES, SIZES
from tests.published_targets import PUBLISHED_TARGETS

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "num_hidden_layers": 3, "max_position_embeddings": 131072,
}  # fmt: skip
PROMPT_TOKENS, DRAFTS = 16384 - 64, 3
CONVERSATIONS = (
    "prompts.source=conversations", "prompts.paths=[none.jsonl]", "planner.num_gpus=1",
    "train.validation_new_tokens=64", "acceptance.dtype=bfloat16", f"acceptance.num_speculative_tokens={DRAFTS}",
)  # fmt: skip


def test_a_model_is_counted_and_its_cache_too() -> None:
    for name, (model_type, settings) in FAMILIES.items():
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 1}
        sizes |= {"num_key_value_heads": 1, "num_hidden_layers": 2, "head_dim": 64, **settings}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), attn_implementation="sdpa")
        costs = target_costs(model.config)
        assert costs.num_parameters == sum(parameter.numel() for parameter in model.parameters()), name
        assert 0 < costs.active_parameters < costs.num_parameters, name
        cache = PositionCache(10)
        Target(model).forward(torch.zeros(2, 4, dtype=torch.long), torch.arange(4).expand(2, -1), cache)
        kept = sum(tensor.numel() for tensors in (cache._keys, cache._values) for tensor in tensors.values())
        assert kept == 2 * 10 * cached_values(model.config), name


def test_a_token_meets_few_of_the_experts() -> None:
    """Qwen3-30B-A3B is published with 3.3 B active parameters, embeddings and lm_head included."""
    config = PUBLISHED_TARGETS["qwen3_30b_a3b"].config()
    tables = 2 * config.vocab_size * config.hidden_size
    assert target_costs(config).active_parameters + tables == pytest.approx(3.3e9, rel=0.02)


def test_a_token_of_a_step_meets_few_of_the_experts() -> None:
    """Each of them has three matrices, whose products a step computes three times: 6 FLOPs a value."""
    packing, flops = Packing.of_spans([9], [(0, 0, 8)], None), {}
    for used in (2, 4):
        sizes = {**SIZES, **EXPERTS, "num_experts_per_tok": used}
        config = AutoConfig.for_model("qwen3_moe", **sizes)
        with torch.device("meta"):
            head = build_head(NativeMtpConfig(ttt_steps=1), config)
        flops[used] = step_flops(head, config, LossSettings.of(TrainConfig())).of(packing)
    assert flops[4] - flops[2] == 6 * 9 * 2 * 3 * SIZES["hidden_size"] * EXPERTS["moe_intermediate_size"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen3_next")) for name in KEEPS_STATES]
)
def test_the_states_of_a_sequence_are_planned_exactly(name: str) -> None:
    family, settings = EXACT[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **settings})
    target = Target(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    cache = target.cache(8)
    target.forward(torch.zeros(1, 5, dtype=torch.long), torch.arange(5)[None], cache)
    assert isinstance(cache, StateCache)
    assert state_values(target.config) == sum(state[0].numel() for state in cache._after[-1]) > 0


def read_prompts(config: PipelineConfig, model_type: str, sizes: dict[str, Any], prompt_tokens: int) -> int:
    """Returns the peak memory of reading two prompts, beyond the weights: first by the target, then by the head."""
    target_config, meter = AutoConfig.for_model(model_type, **sizes), Meter()
    num_slots = prompt_tokens + 64 + 2 * (DRAFTS + 1) + 3  # the slots that `speculate` allocates
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(), torch.no_grad():
            target = Target(AutoModelForCausalLM.from_config(target_config, attn_implementation="sdpa"))
            head = build_head(config.head, target_config)
            meter.hold(*target.model.parameters(), *head.parameters(), *head.buffers())
            held = meter.peak_bytes["cpu"]
            with meter:
                drafter, cache = HeadDrafter(head, target.parts, DRAFTS), PositionCache(num_slots)
                tokens, positions = torch.zeros(2, num_slots, dtype=torch.long), torch.arange(prompt_tokens)
                positions = positions.expand(2, -1)
                drafter.start(2, num_slots)
                states = target.forward(tokens[:, :prompt_tokens], positions, cache, drafter.read_layers)
                drafter.first_depth(Verified(tokens, torch.full((2,), prompt_tokens + 1), positions, states))
    finally:
        torch.set_default_dtype(torch.float32)
    return meter.peak_bytes["cpu"] - held


def test_validation_is_planned_with_the_memory_that_decoding_takes() -> None:
    for model_type, *head in (
        ("llama", "head=mtp"),
        ("llama", "head=eagle3", "head.capture_layers=[0,1,3]"),
        ("mixtral", "head=mtp"),  # every token is in two of eight experts, whose size is intermediate_size
    ):
        config = make_config(*CONVERSATIONS, *head)
        planned = validation_bytes(config, AutoConfig.for_model(model_type, **LLAMA_8B), PROMPT_TOKENS)
        assert planned == pytest.approx(read_prompts(config, model_type, LLAMA_8B, PROMPT_TOKENS), rel=0.05), head


@pytest.mark.slow
def test_reading_a_prompt_takes_memory_in_proportion_to_its_length() -> None:
    """With so small a target, a mask [B, 1, S, S] would take more memory than everything else already at 8,192 tokens,
    and four times as much at 16,384."""
    sizes = LLAMA_8B | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "vocab_size": 512}
    sizes |= {"num_key_value_heads": 1, "head_dim": 64}
    short, long = (read_prompts(make_config(*CONVERSATIONS), "llama", sizes, length) for length in (8192, 16384))
    assert long == pytest.approx(2 * short, rel=0.02)


def test_the_largest_batch_of_validation_follows_from_the_settings() -> None:
    """32,768 tokens by default; as many as 8 prompts have, or one has, or 2 of 32 on each of 16 GPUs, or text cut to
    256 tokens."""
    settings = {
        (): (2 * 16384, 8),
        ("acceptance.batch_tokens=500000",): (8 * 16384, 8),
        ("acceptance.batch_tokens=1000",): (16384, 8),
        ("train.validation_prompts=1",): (16384, 1),
        ("planner.num_gpus=16", "acceptance.batch_tokens=500000"): (2 * 16384, 2),
        ("prompts.source=text_files", "prompts.paths=[none]"): (8 * (256 + 64), 8),
    }
    target_config = AutoConfig.for_model("llama", **LLAMA_8B)
    slot = cached_values(target_config)
    read = slot + 3 * 14336 + 9 * 4096
    for overrides, (tokens, prompts) in settings.items():
        config = make_config(*CONVERSATIONS, "acceptance.batch_size=8", *overrides)
        planned = validation_bytes(config, target_config, PROMPT_TOKENS)
        assert planned == 2 * (tokens * read + prompts * (3 * DRAFTS + 2) * slot), overrides


def test_a_published_mixture_is_counted() -> None:
    """DeepSeek-V3 has latent attention, Qwen3-Next states: 671 and 79.7 billion parameters."""
    shared = {"hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16}
    states = {
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 256,
        "num_experts": 512, "num_experts_per_tok": 10, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 151936,
    }  # fmt: skip
    latent = {
        "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "moe_intermediate_size": 2048,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    for family, sizes, billions in (("deepseek_v3", latent, 671), ("qwen3_next", shared | states, 79.7)):
        config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=False)
        assert target_costs(config).num_parameters / 1e9 == pytest.approx(billions, rel=5e-3)
        for head in ("mtp", "native_mtp"):
            with torch.device("meta"):
                built = build_head(make_config(f"head={head}", "head.start_from_target=false").head, config)
            assert 0 < sum(x.numel() for x in built.parameters()) < target_costs(config).num_parameters / 20
