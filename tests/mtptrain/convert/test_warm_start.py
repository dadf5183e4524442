"""Warm starts: every format gives back the head that was written in it, and whatever is not that head is refused."""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.convert.base import Tensors
from mtptrain.convert.formats import FORMATS, format_for
from mtptrain.convert.warm_start import load_init, relative_difference, start_from_target, trained_or_initial_head
from mtptrain.export import write_head
from mtptrain.heads import HEADS
from mtptrain.heads.config import HeadConfig
from mtptrain.heads.dflash import DflashHead
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.files import TARGET_WEIGHTS, build_head, save_head
from mtptrain.heads.layer_head import LayerHead
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.peagle import PeagleHead
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.hub import weights_fingerprint
from mtptrain.target.model import load_target
from mtptrain.train import check_one_start
from tests.conftest import FAMILIES, make_target, run_program

MTP, EAGLE = MtpHead.Config(), EagleHead.Config()
EAGLE3 = Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=48)
VARIANTS = {
    "own vocabulary": EAGLE3,
    "shared lm_head": Eagle3Head.Config(capture_layers=[0, 1, 2]),
    "whole vocabulary": Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=260),
    "norms before": Eagle3Head.Config(capture_layers=[0, 2], norm_before_fc=True, norm_before_residual=True),
    "eagle3.1": Eagle3Head.Config(capture_layers=[0, 1, 2], fc_norm=True, norm_output=True),
}


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """What is ignored warns; nothing is ignored unless a test says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*which is used, but")
        yield


def random_state(config: HeadConfig, target_dir: Path) -> Tensors:
    """Weights of a head, norms that differ from one and offsets to odd tokens included."""
    torch.manual_seed(3)
    state = build_head(config, read_target_config(target_dir)).state_dict()
    for name, tensor in state.items():
        if name == "d2t":
            state[name] = torch.arange(len(tensor)) * 2 + 1 - torch.arange(len(tensor))
        elif tensor.ndim == 1 or not tensor.any():
            state[name] = torch.rand_like(tensor) + 0.5
    return state


def write(directory: Path, engine: str, config: HeadConfig, target_dir: Path) -> Tensors:
    """Export a random head; returns its weights."""
    state, target_config = random_state(config, target_dir), read_target_config(target_dir)
    form = format_for(engine, config, target_config)
    write_head(directory, form, state)
    form.add_target(directory, target_dir)
    return state


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def rewrite(directory: Path, change: Callable[[Tensors], Tensors], **config: object) -> None:
    """Change a written head's tensors, and settings of its config.json."""
    tensors = change(load_file(directory / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    stored = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**stored, **config}))
    (directory / "serving.json").unlink(missing_ok=True)


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


@pytest.mark.parametrize(("engine", "name"), FORMATS)
def test_every_exported_format_gives_back_the_weights_that_went_in(tmp_path: Path, engine: str, name: str) -> None:
    target_dir = make_target(tmp_path / "target", num_hidden_layers=4)
    eagle3 = Eagle3Head.Config(capture_layers=[1, 3], draft_vocab_size=48)
    peagle = PeagleHead.Config(capture_layers=[1, 3], draft_vocab_size=48, mask_token_id=7)
    medusa = MedusaHead.Config(num_layers=2, fc_bias=True)
    dflash = DflashHead.Config(
        capture_layers=[1, 3], draft_vocab_size=48, mask_token_id=7, num_layers=2, head_dim=64, ttt_steps=5
    )
    configs: dict[str, HeadConfig] = {"mtp": MTP, "eagle": EAGLE, "eagle3": eagle3, "peagle": peagle, "dflash": dflash}
    configs |= {"medusa": medusa, "draft_model": DraftModelHead.Config(num_hidden_layers=2)}
    config = configs[name]
    state = write(tmp_path / "head", engine, config, target_dir)
    if name in ("eagle3", "peagle"):
        (tmp_path / "head/serving.json").write_text(json.dumps({"engine": engine}))
    assert_equal(load_init(str(tmp_path / "head"), config, target_dir), state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_eagle3_is_recognised_by_its_flags_and_tensors(
    tmp_path: Path, tiny_target: Path, variant: str
) -> None:
    state = write(tmp_path / "head", "vllm", VARIANTS[variant], tiny_target)
    assert_equal(load_init(str(tmp_path / "head"), VARIANTS[variant], tiny_target), state)
    for other in VARIANTS.keys() - {variant}:
        with pytest.raises(
            ValueError, match=r"head\.init_from: the head's settings must be those of .*, but differ in head\."
        ):
            load_init(str(tmp_path / "head"), VARIANTS[other], tiny_target)


@pytest.mark.parametrize("config", [MTP, EAGLE, EAGLE3], ids=["mtp", "eagle", "eagle3"])
def test_a_head_of_ours_is_read_whatever_its_depths_and_its_own_start(
    tmp_path: Path, tiny_target: Path, config: HeadConfig
) -> None:
    state = random_state(config, tiny_target)
    settings = {**vars(config), "ttt_steps": 7, "init_from": "/elsewhere"}
    save_head(tmp_path / "best", state, type(config)(**settings), {TARGET_WEIGHTS: "of another target"})
    assert_equal(load_init(str(tmp_path / "best"), config, tiny_target), state)


def test_public_eagle3_names_and_extras_are_understood(tmp_path: Path, tiny_target: Path) -> None:
    """`model.` and `layers.0.`, the class of a plain Llama, rotary tables, a copy of the embeddings, biases of zero."""
    state = write(tmp_path / "head", "vllm", EAGLE3, tiny_target)

    def publish(tensors: Tensors) -> Tensors:
        renamed = {
            "model." + name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items() if "." in name
        }
        return {
            **renamed,
            "d2t": tensors["d2t"],
            "t2d": tensors["t2d"],
            "model.embed_tokens.weight": load_frozen_parts(tiny_target).embed_tokens.bfloat16(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32),
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
        }

    for architecture in ("LlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"):
        rewrite(
            tmp_path / "head",
            publish if architecture == "LlamaForCausalLM" else unchanged,
            architectures=[architecture],
        )
        assert_equal(load_init(str(tmp_path / "head"), EAGLE3, tiny_target), state)


def test_public_eagle1_names_and_extras_are_understood(tmp_path: Path, tiny_target: Path) -> None:
    state = write(tmp_path / "head", "vllm", EAGLE, tiny_target)
    embeddings = load_frozen_parts(tiny_target).embed_tokens
    rewrite(
        tmp_path / "head",
        lambda tensors: {**tensors, "embed_tokens.weight": embeddings},
        architectures=["LlamaForCausalLM"],
    )
    assert_equal(load_init(str(tmp_path / "head"), EAGLE, tiny_target), state)


def native_checkpoint(directory: Path, target_dir: Path, layers: tuple[int, ...] = (2,)) -> Tensors:
    """A target of two layers with MTP layers of DeepSeek's layout behind them; returns the head's weights."""
    make_target(directory)
    state = random_state(MTP, target_dir)
    tensors = load_file(directory / "model.safetensors")
    for layer in layers:
        names = {"norm.weight": "shared_head.norm.weight"}
        tensors |= {f"model.layers.{layer}.{names.get(name, name)}": tensor.clone() for name, tensor in state.items()}
        embeddings = tensors["model.embed_tokens.weight"]
        tensors |= {
            f"model.layers.{layer}.{name}": embeddings.clone()
            for name in ("embed_tokens.weight", "shared_head.head.weight")
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return state


def test_the_mtp_layer_of_a_checkpoint_is_read_without_the_rest_of_it(tmp_path: Path, tiny_target: Path) -> None:
    state = native_checkpoint(tmp_path / "target", tiny_target)
    assert_equal(load_init(str(tmp_path / "target"), MTP, tiny_target), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.2.self_attn.q_norm.weight": torch.ones(64)},
            r"self_attn\.q_norm\.weight of .* must be absent for head mtp and this target, but is of shape \(64,\); "
            r"choose another",
        ),
        (
            {"model.layers.2.self_attn.q_proj.bias": torch.ones(64)},
            r"self_attn\.q_proj\.bias of .* must be zero, because the head has no such bias, but is not; choose "
            r"another head",
        ),
        (
            {"model.layers.3.eh_proj.weight": torch.ones(64, 128)},
            r"must hold one MTP layer, as head mtp has, but .* has 2 \(model\.layers\.2\., model\.layers\.3\.\); "
            r"choose another",
        ),
        (
            {"model.layers.2.mlp.experts.0.up_proj.weight": torch.ones(96, 64)},
            r"must be dense and have plain attention, as head mtp has, but that of .*target has experts; choose",
        ),
        (
            {"model.layers.2.self_attn.kv_a_proj_with_mqa.weight": torch.ones(64, 64)},
            r"must be dense and have plain attention, as head mtp has, but that of .* has latent attention; choose",
        ),
    ],
    ids=["q_norm", "bias", "two", "experts", "latent attention"],
)
def test_an_mtp_layer_with_parts_that_our_head_does_not_have_is_refused(
    tmp_path: Path, tiny_target: Path, change: Tensors, message: str
) -> None:
    native_checkpoint(tmp_path / "target", tiny_target)
    rewrite(tmp_path / "target", lambda tensors: {**tensors, **change})
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "target"), MTP, tiny_target)


def test_an_mtp_layer_in_the_layout_of_qwen3_next_is_refused_by_name(tmp_path: Path, tiny_target: Path) -> None:
    make_target(tmp_path / "target")
    rewrite(
        tmp_path / "target",
        lambda tensors: {**tensors, "mtp.fc.weight": torch.ones(64, 128)},
        architectures=["Qwen3NextForCausalLM"],
    )
    with pytest.raises(
        ValueError,
        match=r"an MTP layer must have DeepSeek's or MiMo's layout .* that of the Qwen3NextForCausalLM in .*/target "
        r"has another one \(mtp\.\*\); choose another checkpoint",
    ):
        load_init(str(tmp_path / "target"), MTP, tiny_target)


def test_an_mtp_layer_that_reads_the_hidden_state_first_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    native_checkpoint(tmp_path / "target", tiny_target)
    rewrite(tmp_path / "target", unchanged, mtp_hidden_states_first=True)
    with pytest.raises(
        ValueError,
        match=r"mtp_hidden_states_first must be false, because eh_proj of head mtp reads the embedding first",
    ):
        load_init(str(tmp_path / "target"), MTP, tiny_target)


def test_explicit_layer_ids_are_taken_as_either_engine_counts_unless_the_export_says_for_which(
    tmp_path: Path, tiny_target: Path
) -> None:
    """Trap 4: id k is the stream after k layers for vLLM, after k + 1 for SGLang."""
    write(tmp_path / "head", "vllm", Eagle3Head.Config(capture_layers=[0, 1]), tiny_target)
    as_vllm, as_sglang = (Eagle3Head.Config(capture_layers=layers) for layers in ([0, 1], [1, 2]))
    load_init(str(tmp_path / "head"), as_vllm, tiny_target)
    load_init(str(tmp_path / "head"), as_sglang, tiny_target)
    with pytest.raises(
        ValueError,
        match=r"differ in head\.capture_layers \(\[0, 1\] \(vLLM's count\) or \[1, 2\] \(SGLang's count\) there, "
        r"\[0, 2\] here\); set head\.capture_layers=\[0,1\], or choose another head",
    ):
        load_init(str(tmp_path / "head"), Eagle3Head.Config(capture_layers=[0, 2]), tiny_target)
    for engine, right, wrong in (("vllm", as_vllm, as_sglang), ("sglang", as_sglang, as_vllm)):
        (tmp_path / "head/serving.json").write_text(json.dumps({"engine": engine}))
        load_init(str(tmp_path / "head"), right, tiny_target)
        with pytest.raises(ValueError, match=r"but differ in head\.capture_layers"):
            load_init(str(tmp_path / "head"), wrong, tiny_target)


def test_layer_ids_that_are_left_out_are_the_engines_default(tmp_path: Path) -> None:
    target_dir = make_target(tmp_path / "target", num_hidden_layers=8)
    state = write(tmp_path / "head", "vllm", Eagle3Head.Config(), target_dir)
    assert "eagle_config" not in json.loads((tmp_path / "head/config.json").read_text())
    assert_equal(load_init(str(tmp_path / "head"), Eagle3Head.Config(capture_layers=[2, 4, 5]), target_dir), state)
    with pytest.raises(ValueError, match=r"head\.capture_layers \(\[2, 4, 5\] there, \[1, 4, 5\] here\)"):
        load_init(str(tmp_path / "head"), Eagle3Head.Config(capture_layers=[1, 4, 5]), target_dir)


def test_another_head_is_refused_with_the_whole_command_line_that_fits(tmp_path: Path, tiny_target: Path) -> None:
    write(tmp_path / "head", "vllm", VARIANTS["eagle3.1"], tiny_target)
    with pytest.raises(
        ValueError,
        match=r"must hold a head mtp, as in the recipe, but holds a head eagle3; set head=eagle3 "
        r"head\.num_attention_heads=1 "
        r"head\.num_key_value_heads=1 head\.intermediate_size=96 head\.head_dim=64 head\.fc_norm=true "
        r"head\.norm_output=true "
        r"head\.capture_layers=\[0,1,2\], or choose another head",
    ):
        load_init(str(tmp_path / "head"), MTP, tiny_target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=40),
            r"differ in head\.draft_vocab_size \(48 there, 40 here\); set head\.draft_vocab_size=48, or choose",
        ),
        (
            Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=48, norm_output=True, intermediate_size=32),
            r"head\.intermediate_size \(96 there, 32 here\), head\.norm_output \(False there, True here\); "
            r"set head\.intermediate_size=96 head\.norm_output=false, or choose another head",
        ),
    ],
    ids=["size", "several"],
)
def test_other_settings_are_refused_with_those_to_set(
    tmp_path: Path, tiny_target: Path, config: HeadConfig, message: str
) -> None:
    write(tmp_path / "head", "vllm", EAGLE3, tiny_target)
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), config, tiny_target)


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            without("norm.weight"),
            {},
            r"norm\.weight of .* must be of shape \(64,\) for head eagle3 .*, but is absent; choose another",
        ),
        (lambda t: {**t, "mask_hidden": torch.ones(1, 3)}, {}, r"must hold a head eagle3, .*, but holds a head peagle"),
        (
            lambda t: {**t, "fc.weight": torch.ones(64, 64)},
            {},
            r"fc\.weight of .* must be of shape \(64, 128\) .*, but is of shape",
        ),
        (
            lambda t: {**t, "d2t": t["d2t"] + 300},
            {},
            r"d2t of .* within the target's 0\.\.259, but lead to 48 tokens within 301\.\.395",
        ),
        (
            lambda t: {**t, "d2t": -torch.arange(48)},
            {},
            r"different tokens within the target's 0\.\.259, but lead to 1 tokens within 0\.\.0",
        ),
        (
            lambda t: {**t, "fc.bias": torch.ones(64)},
            {},
            r"fc\.bias of .* must be zero, because the head has no such bias",
        ),
        (unchanged, {"hidden_act": "gelu"}, r"config\.json: hidden_act must be silu, as in our heads, but is gelu"),
        (unchanged, {"logit_scale": 0.5}, r"config\.json: logit_scale must be 1\.0, as in our heads, but is 0\.5"),
        (unchanged, {"hidden_size": 128}, r"must be for a hidden size of 64, the target's, but is for 128"),
        (
            unchanged,
            {"eagle_config": {"use_aux_hidden_state": False}},
            r"eagle_config\.use_aux_hidden_state must be true, because head eagle3 reads captured layers, but is false",
        ),
        (
            unchanged,
            {"architectures": ["EagleMiniCPMForCausalLM"]},
            r"must be a draft head of a known format \(EagleDeepSeekMTPModel, .*\), but .* is a "
            r"EagleMiniCPMForCausalLM; choose another",
        ),
    ],
    ids=[
        "missing",
        "unknown",
        "shape",
        "range",
        "twice",
        "bias",
        "activation",
        "scale",
        "hidden",
        "aux",
        "architecture",
    ],
)
def test_what_is_not_the_head_is_refused(
    tmp_path: Path, tiny_target: Path, change: Callable[[Tensors], Tensors], settings: dict[str, object], message: str
) -> None:
    write(tmp_path / "head", "vllm", EAGLE3, tiny_target)
    rewrite(tmp_path / "head", change, **settings)
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), EAGLE3, tiny_target)


@pytest.mark.parametrize(
    ("engine", "name"),
    [("vllm", "layers.0.self_attn.qkv_proj.weight"), ("sglang", "model.mtp_layers.0.input_proj.weight")],
)
def test_a_missing_tensor_that_is_taken_apart_is_refused(
    tmp_path: Path, tiny_target: Path, engine: str, name: str
) -> None:
    write(tmp_path / "head", engine, MTP, tiny_target)
    rewrite(tmp_path / "head", without(name))
    with pytest.raises(ValueError, match=r"must hold every tensor of its format, but does not \('.*'\); download it"):
        load_init(str(tmp_path / "head"), MTP, tiny_target)


def test_biases_that_an_engine_wants_are_refused_unless_they_are_zero(tmp_path: Path, tiny_target: Path) -> None:
    write(tmp_path / "head", "sglang", EAGLE, tiny_target)
    rewrite(tmp_path / "head", lambda tensors: {**tensors, "fc.bias": tensors["fc.bias"] + 1})
    with pytest.raises(ValueError, match=r"fc\.bias of .* must be zero, because the head has no such bias"):
        load_init(str(tmp_path / "head"), EAGLE, tiny_target)


def test_embeddings_rope_and_eps_of_its_own_are_left_out_with_a_warning(tmp_path: Path, tiny_target: Path) -> None:
    state = write(tmp_path / "head", "vllm", EAGLE, tiny_target)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    for change, settings, message in (
        (
            unchanged,
            {"rope_parameters": rope},
            r"rope_parameters should be .*10000\.0.*, the target's value, .* but is .*500000\.0",
        ),
        (
            unchanged,
            {"rope_parameters": None, "rms_norm_eps": 1e-5},
            r"rms_norm_eps should be 1e-06, the target's value",
        ),
        (
            lambda tensors: {**tensors, "lm_head.weight": torch.ones(260, 64)},
            {"rms_norm_eps": 1e-6},
            r"lm_head\.weight should equal the target's, which is used, but differs",
        ),
        (
            lambda tensors: {**without("lm_head.weight")(tensors), "embed_tokens.weight": torch.ones(100, 64)},
            {},
            r"embed_tokens\.weight should equal the target's, .* \(relative difference inf\)",
        ),
    ):
        rewrite(tmp_path / "head", change, **settings)
        with pytest.warns(UserWarning, match=message):
            assert_equal(load_init(str(tmp_path / "head"), EAGLE, tiny_target), state)


def test_the_relative_difference_is_that_of_a_plain_formula() -> None:
    found, wanted = torch.randn(9000, 3), torch.randn(9000, 3)
    assert relative_difference(found, wanted) == pytest.approx(float((found - wanted).norm() / wanted.norm()), rel=1e-5)
    assert relative_difference(wanted.bfloat16(), wanted) < 0.01 and relative_difference(wanted, wanted) == 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"config.json": "{}", "pytorch_model.bin": ""},
            r"weights must be safetensors files, but .* has none; convert pytorch_model.bin to safetensors",
        ),
        ({"config.json": "{}"}, r"has none; choose a head that has them, or convert its \.bin or \.pt file"),
        (
            {"model.safetensors": None},
            r"must hold head\.json or config\.json, but .* has neither; choose another directory",
        ),
        (
            {"model.safetensors": None, "config.json": '{"architectures": ["LlamaForCausalLM"]}'},
            r"is a LlamaForCausalLM; choose",
        ),
        (
            {"model.safetensors": None, "config.json": '{"architectures": ["EagleLlamaForCausalLM"]}'},
            r"config\.json: must have hidden_size, but does not; download the head again",
        ),
    ],
    ids=["pickle", "no weights", "no config", "no head", "empty config"],
)
def test_a_directory_without_a_readable_head_is_refused(
    tmp_path: Path, tiny_target: Path, files: dict[str, str | None], message: str
) -> None:
    for name, text in files.items():
        if text is None:
            save_file({"x": torch.ones(1)}, tmp_path / name)
        else:
            (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path), MTP, tiny_target)


def test_a_path_that_is_neither_directory_nor_hub_name_is_refused(tiny_target: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"head\.init_from: must be a local directory or a hub name, but '/no/head' is not"
    ):
        load_init("/no/head", MTP, tiny_target)


def test_a_run_without_a_trained_head_takes_the_initial_one_and_then_its_own(tmp_path: Path, tiny_target: Path) -> None:
    state, cpu, best_dir = write(tmp_path / "head", "vllm", EAGLE3, tiny_target), torch.device("cpu"), tmp_path / "best"
    config = Eagle3Head.Config(capture_layers=[1, 2], draft_vocab_size=48, init_from=str(tmp_path / "head"))
    found = trained_or_initial_head(best_dir, config, tiny_target, None, cpu)
    assert_equal(found.head.state_dict(), state)
    assert not found.is_trained and found.directory == tmp_path / "head"

    trained = {name: tensor if name == "d2t" else tensor * 2 for name, tensor in state.items()}
    save_head(best_dir, trained, EAGLE3, {TARGET_WEIGHTS: weights_fingerprint(tiny_target)})
    found = trained_or_initial_head(best_dir, config, tiny_target, None, cpu)
    assert_equal(found.head.state_dict(), trained)
    assert found.is_trained and found.directory == best_dir

    with pytest.raises(
        FileNotFoundError, match=r"must hold a trained head, but has no head\.json; run mtptrain\.train first"
    ):
        trained_or_initial_head(tmp_path / "none", EAGLE3, tiny_target, None, cpu)


def test_training_starts_from_the_published_head_and_acceptance_measures_it_before(
    fresh_run: tuple[Path, tuple[str, ...]], tmp_path: Path, tiny_target: Path
) -> None:
    run_dir, overrides = fresh_run
    state = write(tmp_path / "head", "sglang", MTP, tiny_target)
    init = f"head.init_from={tmp_path}/head"
    result = run_program("eval.acceptance", *overrides, init)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((run_dir / "acceptance/report.json").read_text())
    assert report["head"] == str(tmp_path / "head") and report["head_sha256"] == weights_fingerprint(tmp_path / "head")
    assert "unchanged from head.init_from; this run has not trained a head" in " ".join(result.stdout.split())

    result = run_program("mtptrain.train", *overrides, init, "train.max_steps=1", "train.lr=1e-9", "deepspeed=zero0")
    assert result.returncode == 0, result.stderr[-3000:]
    trained = load_file(run_dir / "train/best/head.safetensors")
    assert all(torch.allclose(trained[name], tensor, atol=1e-6) for name, tensor in state.items())
    result = run_program("eval.acceptance", *overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    again = json.loads((run_dir / "acceptance/report.json").read_text())
    assert again["head"] == str(run_dir / "train/best") and again["accepted_at"] == report["accepted_at"]


def test_a_block_drafter_of_another_block_size_or_without_its_settings_is_refused(tmp_path: Path) -> None:
    target_dir = make_target(tmp_path / "target", num_hidden_layers=4)
    config = DflashHead.Config(capture_layers=[1, 3], mask_token_id=7, ttt_steps=5)
    write(tmp_path / "head", "vllm", config, target_dir)
    other = replace(config, ttt_steps=3)
    with pytest.raises(ValueError, match=r"differ in head\.ttt_steps \(5 there, 3 here\); set head\.ttt_steps=5"):
        load_init(str(tmp_path / "head"), other, target_dir)
    rewrite(tmp_path / "head", unchanged, block_size=None)
    with pytest.raises(ValueError, match=r"config\.json: must have block_size, .* but does not have all of them"):
        load_init(str(tmp_path / "head"), config, target_dir)


def test_a_head_that_cannot_start_as_the_targets_last_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head\.start_from_target: must be false with head dflash, .* is true; set"):
        check_one_start(DflashHead.Config(start_from_target=True))
    check_one_start(DflashHead.Config())


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if issubclass(head, LayerHead)])
def test_a_head_starts_as_the_targets_last_layer_and_passes_its_states_on(name: str, tiny_target: Path) -> None:
    target = load_target(tiny_target, torch.float32, torch.device("cpu"))
    layer = dict(target.model.model.layers[-1].named_parameters())
    settings = {"capture_layers": [0, 1, 2]} if name in ("eagle3", "peagle") else {}
    torch.manual_seed(3)
    head, before = (build_head(HEADS[name].Config(**settings), target.config) for _ in range(2))
    before.load_state_dict(head.state_dict())
    start_from_target(head, tiny_target)
    weights, random = dict(head.named_parameters()), dict(before.named_parameters())
    for part in ("q_proj", "k_proj", "v_proj"):  # those of eagle3 read the embedding first
        weight = weights[f"self_attn.{part}.weight"]
        assert torch.equal(weight[:, -64:], layer[f"self_attn.{part}.weight"])
        assert torch.equal(weight[:, :-64], random[f"self_attn.{part}.weight"][:, :-64])
    for part in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
        assert torch.equal(weights[f"{part}.weight"], layer[f"{part}.weight"])
    if name != "eagle":
        assert torch.equal(weights["norm.weight"], target.model.model.norm.weight)
    fuse = "eh_proj.weight" if name == "mtp" else "fc.weight"
    passed = weights[fuse] - random[fuse] / 2
    torch.testing.assert_close(passed[:, -64:], torch.eye(64))
    assert not passed[:, :-64].any()


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_a_head_attends_as_a_target_whose_queries_and_keys_are_normed(family: str, tmp_path: Path) -> None:
    """The division by a row's own root mean square is what remains: scores of random rows differ by a tenth or so, by
    half as copied."""
    sizes = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    model_type, settings = FAMILIES[family]
    target_dir = make_target(tmp_path / "target", model_type, {**settings, **sizes})
    target = load_target(target_dir, torch.float32, torch.device("cpu"))
    layer = target.model.model.layers[-1]
    head = build_head(HEADS["mtp"].Config(), target.config)
    start_from_target(head, target_dir)
    x = layer.input_layernorm(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)))

    def scores(attention: torch.nn.Module) -> torch.Tensor:
        query, key = (project(x).unflatten(-1, (2, 128)) for project in (attention.q_proj, attention.k_proj))
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        return torch.einsum("nhd,mhd->hnm", query, key)

    with torch.no_grad():
        expected = scores(layer.self_attn)
        assert (scores(head.self_attn) - expected).norm() < 0.2 * expected.norm()


def test_a_target_whose_last_layer_looks_otherwise_is_refused(tmp_path: Path) -> None:
    target_dir = make_target(
        tmp_path / "target", num_attention_heads=2, num_key_value_heads=2, head_dim=20, intermediate_size=90
    )
    head = build_head(
        HEADS["mtp"].Config(intermediate_size=96, num_attention_heads=1, num_key_value_heads=1),
        read_target_config(target_dir),
    )
    with pytest.raises(
        ValueError, match=r"head\.start_from_target: the target's last layer must have projections of the head's shapes"
    ):
        start_from_target(head, target_dir)


def test_a_head_without_a_projection_of_the_targets_states_is_refused(tiny_target: Path) -> None:
    head = build_head(HEADS["mtp"].Config(), read_target_config(tiny_target))
    del head.eh_proj
    with pytest.raises(ValueError, match=r"head\.start_from_target: .* eh_proj or fc, but MtpHead has none; set"):
        start_from_target(head, tiny_target)
