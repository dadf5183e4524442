"""The frozen target in every family: partial reading, its cache by position, sliding windows, RoPE for heads, its
identity."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedConfig,
)

from mtptrain.data.identity import TargetIdentity
from mtptrain.decoding.draft import Drafter
from mtptrain.decoding.drafters import HeadDrafter, HybridDrafter, PromptLookupDrafter, TreeDrafter
from mtptrain.decoding.sampler import Sampler
from mtptrain.decoding.speculate import speculate
from mtptrain.heads import HEADS
from mtptrain.heads.layers import Rope
from mtptrain.target.families import SUPPORTED_MODEL_TYPES, head_rope_parameters, read_target_config
from mtptrain.target.frozen_parts import load_frozen_parts, load_last_layer
from mtptrain.target.hub import DEMO_DIR, load_tokenizer, resolve_target, weights_fingerprint
from mtptrain.target.model import Target, check_placement, load_target
from mtptrain.target.position_cache import PositionCache
from tests.conftest import FAMILIES, GENERATION_TEMPLATE, WINDOW, as_draft_model, make_target, make_tokenizer

CPU = torch.device("cpu")
NUM_TOKENS = 60
TOKENS = torch.randint(0, 256, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(NUM_TOKENS)[None]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """In matrices as small as these a second thread only waits."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """A tiny random target of every family, in fp32."""
    return {
        name: load_target(make_target(tmp_path_factory.mktemp("family"), *family), torch.float32, CPU)
        for name, family in FAMILIES.items()
    }


def test_the_family_table_holds_every_family() -> None:
    assert {model_type for model_type, _ in FAMILIES.values()} == set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied in one file", "untied in shards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_parts_alone_give_the_whole_models_logits(tmp_path: Path, family: str, is_tied: bool) -> None:
    make_target(tmp_path, *FAMILIES[family], tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if not is_tied:
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    parts = load_frozen_parts(tmp_path)
    assert (parts.lm_head is parts.embed_tokens) == is_tied
    for dtype in (torch.float32, torch.bfloat16):
        model, parts = model.to(dtype), parts.to(CPU, dtype)
        before_norm: list[torch.Tensor] = []
        handle = model.model.norm.register_forward_pre_hook(lambda module, args, kept=before_norm: kept.append(args[0]))
        with torch.no_grad():
            output = model(TOKENS, output_hidden_states=True)
        handle.remove()
        post_norm = parts.final_norm(before_norm[0])
        assert post_norm.dtype == dtype and torch.equal(post_norm, output.hidden_states[-1])
        assert torch.equal(parts.logits(post_norm), output.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_the_rows_of_the_table_without_the_scale_of_gemma(
    targets: dict[str, Target], family: str
) -> None:
    target = targets[family]
    scale = math.sqrt(target.config.hidden_size) if family == "gemma3_text" else 1.0
    embeddings = target.parts.embed(TOKENS)
    assert torch.equal(embeddings, target.model.model.embed_tokens.weight[TOKENS])
    assert torch.equal(embeddings * scale, target.model.model.embed_tokens(TOKENS))


def test_the_norm_of_another_family_and_a_missing_soft_cap_show(targets: dict[str, Target]) -> None:
    gemma, states = targets["gemma3_text"].parts, torch.randn(10, 64)
    other_norm = replace(gemma, has_offset_norm=False)
    assert (gemma.final_norm(states) - other_norm.final_norm(states)).abs().mean() > 0.5
    states = 30 * states
    assert gemma.logits(states).abs().max() <= 30 < replace(gemma, logit_softcap=None).logits(states).abs().max()


PROMPTS = [TOKENS[0, :num_tokens].tolist() for num_tokens in (3, 40, 9)]


def plain_greedy(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Each prompt alone, by transformers."""
    return [
        target.model.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)[
            0
        ][len(prompt) :].tolist()
        for prompt in prompts
    ]


@pytest.mark.parametrize("drafter_name", ["mtp", "prompt lookup", "tree", "hybrid", "model"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_speculation_of_ragged_prompts_equals_plain_decoding(
    targets: dict[str, Target], family: str, drafter_name: str
) -> None:
    target = targets[family]
    torch.manual_seed(0)
    head = HEADS["mtp"](HEADS["mtp"].Config(), target.config)
    drafters: dict[str, Drafter] = {
        "mtp": HeadDrafter(head, target.parts, 3),
        "prompt lookup": PromptLookupDrafter(3, min_ngram=1),
        "tree": TreeDrafter(head, target.parts, 3, num_nodes=20, top_k=4),
        "hybrid": HybridDrafter(HeadDrafter(head, target.parts, 3), min_match=1),
        "model": HeadDrafter(as_draft_model(target), target.parts, 3),
    }
    drafter = drafters[drafter_name]
    generations = speculate(
        target, drafter, PROMPTS, num_speculative_tokens=3, max_new_tokens=32, sampler=Sampler(), eos_token_ids=[256]
    )
    plain = plain_greedy(target, PROMPTS, 32)
    assert [generation.tokens for generation in generations] == plain
    assert len(set(plain[1])) > 10, "a constant answer would prove nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_streams_are_the_hidden_states_of_transformers(targets: dict[str, Target], family: str) -> None:
    target = targets[family]
    num_layers = target.config.num_hidden_layers
    with torch.no_grad():
        *expected, post_norm = target.model(TOKENS, output_hidden_states=True).hidden_states
    with torch.no_grad(), target.capturing(range(num_layers + 1)) as captured:
        target.model.model(TOKENS, use_cache=False)
    assert torch.equal(torch.stack([captured[k] for k in range(num_layers)]), torch.stack(expected))
    assert torch.equal(target.parts.final_norm(captured[num_layers]), post_norm)

    cache = PositionCache(NUM_TOKENS)
    chunks = [
        target.forward(TOKENS[:, part], POSITIONS[:, part], cache, tuple(range(num_layers)))
        for part in (slice(0, 30), slice(30, 31), slice(31, NUM_TOKENS))
    ]
    streams = torch.cat(
        [chunk.aux_hidden_states for chunk in chunks if chunk.aux_hidden_states is not None], 1
    )  # [1, S, L, H]
    torch.testing.assert_close(streams, torch.stack(expected, 2), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([chunk.hidden_states for chunk in chunks], 1), post_norm, atol=2e-5, rtol=1e-5)


def read_in_parts(target: Target, prompt_tokens: int) -> torch.Tensor:
    """Post-norm states [1, S, H]: of a prompt, by causal attention, and of the tokens after it, by a mask."""
    cache = PositionCache(NUM_TOKENS)
    parts = [slice(0, prompt_tokens), slice(prompt_tokens, NUM_TOKENS)][: 1 + (prompt_tokens < NUM_TOKENS)]
    return torch.cat([target.forward(TOKENS[:, part], POSITIONS[:, part], cache).hidden_states for part in parts], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_read_without_a_mask_gives_the_states_of_the_mask(targets: dict[str, Target], family: str) -> None:
    target = targets[family]
    by_mask, without = read_in_parts(target, 1), read_in_parts(target, NUM_TOKENS)
    torch.testing.assert_close(without, by_mask, atol=2e-5, rtol=1e-5)
    assert PositionCache(NUM_TOKENS).begin(POSITIONS) is None
    assert target.model.config._attn_implementation == "sdpa", "other callers of the model keep their attention"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.endswith("with window") or name == "gemma3_text"])
@pytest.mark.parametrize("window", [None, WINDOW - 1, WINDOW + 1])
def test_a_window_left_out_or_off_by_one_shows_behind_it(
    targets: dict[str, Target], family: str, window: int | None
) -> None:
    right = targets[family]
    assert right.window == WINDOW
    wrong = Target(right.model)
    wrong.window = window
    expected, states = (read_in_parts(target, 1)[0] for target in (right, wrong))
    first_wrong = min(WINDOW, window or WINDOW)
    assert torch.equal(states[:first_wrong], expected[:first_wrong])
    assert ((states - expected).abs().amax(-1)[first_wrong:] > 1e-5).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_config_names_what_heads_are_built_from(targets: dict[str, Target], family: str) -> None:
    config = targets[family].config
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    assert all(isinstance(getattr(config, name), int) for name in (*names, "max_position_embeddings"))
    assert isinstance(config.rms_norm_eps, float)


def write_config(directory: Path, **settings: object) -> PreTrainedConfig:
    (directory / "config.json").write_text(json.dumps(settings))
    return read_target_config(directory)


DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "max_position_embeddings": 163840,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}
"""As on the hub, in the format of older transformers."""


def yarn_angles(head_dim: int, theta: float, factor: float, original_tokens: int) -> list[float]:
    """Angles per position of YaRN (arXiv 2309.00071), sections 3.2 and 3.3, with the borders rounded outwards as in its
    code."""

    def pair_with(rotations: float) -> float:
        return head_dim * math.log(original_tokens / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_with(32)), 0), min(math.ceil(pair_with(1)), head_dim - 1)
    angles = []
    for pair in range(head_dim // 2):
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)  # 0: as it is, 1: stretched
        angles.append(theta ** (-2 * pair / head_dim) * ((1 - ramp) + ramp / factor))
    return angles


@pytest.mark.parametrize(
    ("mscales", "scale"),
    [
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        ({"mscale": None, "mscale_all_dim": None}, 0.1 * math.log(40) + 1),
    ],
)
def test_rope_of_a_head_for_deepseek_follows_the_formula_of_yarn(
    tmp_path: Path, mscales: dict[str, float | None], scale: float
) -> None:
    scaling = {**DEEPSEEK_V2_LITE["rope_scaling"], **mscales}
    config = write_config(
        tmp_path, **{**DEEPSEEK_V2_LITE, "rope_scaling": {k: v for k, v in scaling.items() if v is not None}}
    )
    positions = [0, 1, 77, 5000, 100_000]
    cos, sin = Rope(128, config).tables(torch.tensor(positions), torch.float32)  # [5, 1, 128]
    angles = (
        torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(yarn_angles(128, 1e4, 40, 4096)).double()
    )
    for table, function in ((cos, torch.cos), (sin, torch.sin)):
        wanted = (scale * function(torch.cat([angles, angles], -1))).float()[:, None]
        torch.testing.assert_close(table, wanted, atol=0.02, rtol=0)  # f32 angles of up to 1e5
        torch.testing.assert_close(table[:3], wanted[:3], atol=2e-5, rtol=0)


def test_heads_take_the_rope_of_gemmas_full_attention(tmp_path: Path) -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = write_config(tmp_path, model_type="gemma3_text", max_position_embeddings=512, **old)
    assert head_rope_parameters(config) == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    cos, _ = Rope(64, config).tables(torch.tensor([100]), torch.float32)
    wanted = [math.cos(100 / 8 * 1e6 ** (-2 * pair / 64)) for pair in range(32)]
    torch.testing.assert_close(cos[0, 0], torch.tensor(wanted * 2), atol=1e-5, rtol=0)


def test_rope_parameters_of_a_head_are_a_copy(targets: dict[str, Target]) -> None:
    for target in targets.values():
        before = json.dumps(target.config.rope_parameters)
        head_rope_parameters(target.config)["rope_theta"] = 0.0
        assert json.dumps(target.config.rope_parameters) == before


def test_going_back_to_an_earlier_position_forgets_what_was_written_there(tiny_target: Path) -> None:
    target = load_target(tiny_target, torch.float32, CPU)
    right, wrong = torch.arange(1, 13)[None], torch.tensor([[9, 9, 9]])
    positions = torch.arange(12)[None]
    cache = PositionCache(20)
    target.forward(right[:, :6], positions[:, :6], cache)
    target.forward(wrong, positions[:, 6:9], cache)
    resumed = target.forward(right[:, 6:], positions[:, 6:], cache).hidden_states
    whole = target.forward(right, positions, PositionCache(20)).hidden_states
    torch.testing.assert_close(resumed, whole[:, 6:], atol=1e-5, rtol=1e-5)


def identity(directory: Path) -> TargetIdentity:
    return TargetIdentity.of("name", None, directory, load_tokenizer(directory))


def test_identity_tells_weights_config_tokenizer_and_template_apart(tmp_path: Path) -> None:
    base = identity(make_target(tmp_path / "base"))
    assert identity(make_target(tmp_path / "again")) == base
    other_weights = identity(make_target(tmp_path / "weights", seed=1))
    assert other_weights.weights_sha256 != base.weights_sha256 and other_weights.config_sha256 == base.config_sha256
    assert identity(make_target(tmp_path / "config", rms_norm_eps=1e-4)).config_sha256 != base.config_sha256
    template = identity(make_target(tmp_path / "template", chat_template=GENERATION_TEMPLATE + " "))
    assert (
        template.chat_template_sha256 != base.chat_template_sha256
        and template.tokenizer_sha256 == base.tokenizer_sha256
    )
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(tmp_path / "again")
    assert identity(tmp_path / "again").tokenizer_sha256 != base.tokenizer_sha256


def test_fine_tuning_one_tensor_changes_the_identity(tmp_path: Path) -> None:
    base = identity(make_target(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path)
    assert identity(tmp_path).weights_sha256 != base.weights_sha256


def test_a_target_whose_norm_accelerate_leaves_off_the_devices_is_refused(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    cpu_offload(model.model.norm, CPU)
    with pytest.raises(
        ValueError, match=r"target\.path: .*lm_head of the target must fit the GPUs of one machine, but accelerate has"
    ):
        Target(model)


def test_an_unsupported_family_is_refused_by_name(tmp_path: Path) -> None:
    make_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"target\.path: the target's family must be one of llama, .* but is 'gpt2'"):
        read_target_config(tmp_path)


def test_a_checkpoint_without_its_final_norm_is_refused(tmp_path: Path) -> None:
    make_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    message = r"the checkpoint must hold model\.norm\.weight, but does not; download it again"
    with pytest.raises(ValueError, match=message):
        load_frozen_parts(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path, torch.float32, CPU)


QUANTISED_FILES = {
    "fp8 with a scale": {
        "lm_head.weight": torch.zeros(8, 4).to(torch.float8_e4m3fn),
        "lm_head.weight_scale": torch.ones(8, 1),
    },
    "a scale in bf16": {
        "lm_head.weight": torch.zeros(8, 4),
        "lm_head.weight_scale": torch.ones(8, 1, dtype=torch.bfloat16),
    },
    "GPTQ": {"lm_head.qweight": torch.zeros(1, 4, dtype=torch.int32), "lm_head.scales": torch.ones(1, 4)},
    "int8 embeddings": {"model.embed_tokens.weight": torch.zeros(8, 4, dtype=torch.int8)},
    "last layer in fp8": {"model.layers.1.mlp.down_proj.weight": torch.zeros(8, 4).to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("kind", QUANTISED_FILES)
def test_quantised_tensors_that_training_reads_are_refused(tmp_path: Path, kind: str) -> None:
    directory, added = make_target(tmp_path, "llama", tie_word_embeddings=False), QUANTISED_FILES[kind]
    tensors = load_file(directory / "model.safetensors")
    if "lm_head.qweight" in added:
        del tensors["lm_head.weight"]
    save_file(tensors | added, directory / "model.safetensors")
    module = next(iter(added)).rpartition(".")[0]
    read = load_last_layer if "last layer" in kind else load_frozen_parts
    message = (
        rf"target\.path: {module} must be unquantised, .*model\.safetensors has {module}\.\w+ in \w+; choose the unq"
    )
    with pytest.raises(ValueError, match=message):
        read(directory)


def test_a_target_with_quantised_layers_and_a_plain_lm_head_is_accepted(tmp_path: Path) -> None:
    directory = make_target(tmp_path, "llama", tie_word_embeddings=False, quantization_config={"quant_method": "fp8"})
    save_file(
        load_file(directory / "model.safetensors") | QUANTISED_FILES["last layer in fp8"],
        directory / "model.safetensors",
    )
    assert load_frozen_parts(directory).lm_head.dtype == torch.float32


def test_a_checkpoint_with_other_names_is_refused_and_not_filled_at_random(tmp_path: Path) -> None:
    make_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"must hold lm_head\.weight, model\.embed_tokens\.weight, .* and \d+ more, but does not"
    ):
        load_target(tmp_path, torch.float32, CPU)


def test_a_directory_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"target\.path: must be a model directory, but .* has no config\.json"):
        resolve_target(str(tmp_path))
    make_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"weights must be safetensors files, but .* does not exist"):
        load_frozen_parts(tmp_path)


def test_a_name_that_is_neither_here_nor_on_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match=r"target\.path: must be a local directory, a hub name or `demo`, but 'no/such' is not"
    ):
        resolve_target("no/such")


def test_a_multimodal_target_is_refused_and_its_text_model_taken(tmp_path: Path) -> None:
    _, text = FAMILIES["gemma3_text"]
    text = {**text, "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 1}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    config = Gemma3Config(text_config=text, vision_config={**vision, "patch_size": 14}, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    with pytest.raises(
        ValueError,
        match=r"but is 'gemma3' in .*config\.json; choose its text model alone, .* with model_type 'gemma3_text'",
    ):
        read_target_config(tmp_path / "whole")

    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    model = AutoModelForCausalLM.from_config(whole.config.text_config)
    model.model.load_state_dict(whole.model.language_model.state_dict())
    model.save_pretrained(tmp_path / "text")
    target = load_target(tmp_path / "text", torch.float32, CPU)
    states = target.forward(TOKENS, POSITIONS, PositionCache(NUM_TOKENS)).hidden_states
    with torch.no_grad():
        torch.testing.assert_close(states, whole.model(TOKENS).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_a_target_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"a token must not attend to later tokens, but use_bidirectional_attention is set in .*config\.json",
    ):
        write_config(tmp_path, model_type="gemma3_text", use_bidirectional_attention=True)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"sliding_window": 16}),
        ("deepseek_v2", {"sliding_window": 16}),
        (
            "llama",
            {"sliding_window": 16, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        ("qwen3_moe", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_windows_that_transformers_ignores_are_refused(
    tmp_path: Path, model_type: str, settings: dict[str, object]
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"transformers must implement the sliding windows of '{model_type}', but .* remove "
        r"sliding_window",
    ):
        write_config(tmp_path, model_type=model_type, **settings)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="llama", max_position_embeddings=512, sliding_window=512)


def test_a_change_to_any_one_tensor_changes_the_identity() -> None:
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        directory = Path(shutil.copytree(DEMO_DIR, Path(name) / "target"))
        tensors = load_file(directory / "model.safetensors")
        save_file(tensors, directory / "model.safetensors")
        base = weights_fingerprint(directory)
        for changed in tensors:
            save_file(
                {key: tensor * 1.5 if key == changed else tensor for key, tensor in tensors.items()},
                directory / "model.safetensors",
            )
            assert weights_fingerprint(directory) != base, changed


def test_a_target_that_several_ranks_cannot_place_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices that are not here: what is asked of them is how many there are, and how large."""
    directory = make_target(tmp_path)
    size = (directory / "model.safetensors").stat().st_size
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    message = (
        r"must fit one device if several ranks share a machine, but does not; start one process, "
        r".*train.validation_prompts=0"
    )
    with pytest.raises(ValueError, match=message):
        check_placement(directory, torch.bfloat16, torch.device("cuda"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_placement(directory, torch.bfloat16, torch.device("cuda"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2 * size))
    check_placement(directory, torch.bfloat16, torch.device("cuda"))
