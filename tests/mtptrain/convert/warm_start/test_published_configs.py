"""Tests that a published head's config.json is honoured, or refused with the name of the key."""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.convert.limits import BLOCK_DRAFTERS
from mtptrain.convert.published.config_json import DSPARK_NESTED, MODEL_OPT_EAGLE3
from mtptrain.convert.warm_start import load_init
from mtptrain.heads.dflash2 import Dflash2Head
from mtptrain.heads.draft_model import DraftModelHead
from mtptrain.heads.dspark import DsparkHead
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.files import save_head
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.peagle import PeagleHead
from mtptrain.settings.heads import HeadConfig
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from tests.conftest import make_target
from tests.mimo import MIMO_HEAD, add_mimo_layer
from tests.mtptrain.convert.warm_start.test_native_mtp import native_checkpoint
from tests.mtptrain.convert.warm_start.written_heads import (
    DFLASH,
    EAGLE,
    EAGLE3,
    MTP,
    random_state,
    rewrite,
    unchanged,
    without,
    write,
)
from tests.sealed import seal_again

DSPARK = DsparkHead.Config(capture_layers=[1, 2], ttt_steps=3, num_layers=2, markov_rank=4, mask_token_id=7)
DFLASH2 = Dflash2Head.Config(
    capture_layers=[1, 2], ttt_steps=3, num_layers=2, selector_rank=4, selector_top_k=5, mask_token_id=7
)
PEAGLE = PeagleHead.Config(capture_layers=[1, 2], mask_token_id=7)
EXPORTS: dict[str, tuple[str, HeadConfig]] = {
    "mtp": ("vllm", MTP),
    "mtp for SGLang": ("sglang", MTP),
    "eagle": ("vllm", EAGLE),
    "eagle3": ("vllm", EAGLE3),
    "peagle": ("vllm", PEAGLE),
    "dflash": ("vllm", DFLASH),
    "dspark": ("vllm", DSPARK),
    "dflash2": ("vllm", DFLASH2),
    "medusa": ("vllm", MedusaHead.Config(ttt_steps=2)),
}
KINDS = (*EXPORTS, "native", "mimo")
WITH_LAYERS = [kind for kind in KINDS if kind != "medusa"]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, HeadConfig]]:
    """Returns a directory, the target's directory and the config of each kind of head."""
    root = tmp_path_factory.mktemp("published")
    target = make_target(root / "target")
    found: dict[str, tuple[Path, Path, HeadConfig]] = {}
    for kind, (engine, config) in EXPORTS.items():
        write(root / kind, engine, config, target)
        found[kind] = (root / kind, target, config)
    native_checkpoint(root / "native", target)
    add_mimo_layer(make_target(root / "mimo", "mimo"))
    mimo_target = make_target(root / "mimo target", "mimo")
    return found | {"native": (root / "native", target, MTP), "mimo": (root / "mimo", mimo_target, MIMO_HEAD)}


class Published:
    """A head whose config.json is changed for one attempt to read it."""

    def __init__(self, directory: Path, target: Path, config: HeadConfig) -> None:
        self.directory, self.target, self.config = directory, target, config

    def load(self, change: dict[str, Any], removed: tuple[str, ...] = ()) -> None:
        """Read the head with other settings; a section of the change is added to that of the head."""
        path = self.directory / "config.json"
        text = path.read_text()
        config = {name: value for name, value in json.loads(text).items() if name not in removed}
        for name, value in change.items():
            config[name] = {**(config.get(name) or {}), **value} if isinstance(value, dict) else value
        path.write_text(json.dumps(config))
        try:
            load_init(str(self.directory), self.config, TargetFiles(self.target))
        finally:
            path.write_text(text)

    def refuses(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message) as refusal:
            self.load(change)
        assert "; " in str(refusal.value), "must say what to do"


@pytest.fixture
def published(request: pytest.FixtureRequest, heads: dict[str, tuple[Path, Path, HeadConfig]]) -> Published:
    return Published(*heads[request.param])


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Makes warnings errors, so that a test must expect those that it provokes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize("published", KINDS, indirect=True)
def test_a_key_that_is_not_in_the_whitelist_is_refused_by_name_with_its_value_and_file(published: Published) -> None:
    message = (
        re.escape(str(published.directory / "config.json"))
        + r": must hold only settings that mtptrain understands, .* but has attention_sink=\[4, 8\], sink_bias=true; "
        r"choose another head, or remove attention_sink, sink_bias from a copy"
    )
    published.refuses({"attention_sink": [4, 8], "sink_bias": True}, message)


@pytest.mark.parametrize("published", KINDS, indirect=True)
def test_keys_that_change_nothing_are_accepted(published: Published) -> None:
    published.load(
        {
            "torch_dtype": "float16",
            "transformers_version": "4.36.2",
            "use_cache": True,
            "_torchspec_version": "0.1.0",
            "auto_map": {"AutoModel": "dflash.DFlash"},
            "attention_sink": None,
        }
    )


WINDOWS: list[tuple[dict[str, Any], str]] = [
    (
        {"layer_types": ["sliding_attention"]},
        r"layer_types must be full_attention .*, but is \[\"sliding_attention\"\]",
    ),
    ({"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types must be full_attention"),
    ({"use_sliding_window": True}, r"use_sliding_window must be false, because our heads have no window, but is true"),
    (
        {"sliding_window": 64, "layer_types": None, "use_sliding_window": None},
        r"sliding_window must be null or .* is 64",
    ),
]


@pytest.mark.parametrize(("change", "message"), WINDOWS)
@pytest.mark.parametrize("published", [kind for kind in WITH_LAYERS if kind not in BLOCK_DRAFTERS], indirect=True)
def test_a_window_is_refused_in_every_kind_of_head_without_windows(
    published: Published, change: dict[str, Any], message: str
) -> None:
    published.refuses(change, message)


@pytest.mark.parametrize("published", WITH_LAYERS, indirect=True)
def test_a_window_that_no_layer_has_is_accepted(published: Published) -> None:
    unused = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    published.load(unused)
    published.load({**unused, "layer_types": ["full_attention"] * 2})


HALVES, WHOLE = (
    r"must be true, because our heads rotate halves, but is false",
    r"must be 1\.0, because our heads rotate",
)
FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"is_neox_style": False}, rf"is_neox_style {HALVES}"),
    ({"rope_interleave": True}, r"rope_interleave must be false, because our heads rotate halves, not"),
    ({"rope_parameters": {"mrope_section": [8, 12, 12]}}, r"but has rope_parameters\.mrope_section=\[8, 12, 12\]"),
    ({"partial_rotary_factor": 0.5}, rf"partial_rotary_factor {WHOLE}"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, rf"rope_parameters\.partial_rotary_factor {WHOLE}"),
    ({"rope_parameters": None, "rope_scaling": "yarn"}, r'rope_scaling must hold settings, but is "yarn"'),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, r"rope_scaling must be the same as rope_parameters"),
    ({"rope_parameters": {"rope_type": "yarn"}}, r"the RoPE parameters must be readable by .*'factor'.*; download"),
    ({"rope_parameters": {"factor": "4"}}, r'rope_parameters\.factor must be a number above 0, but is "4"'),
    ({"rope_theta": "10k"}, r'rope_theta must be a number above 0, but is "10k"'),
    ({"rms_norm_eps": True}, r"rms_norm_eps must be a number above 0, but is true"),
    ({"num_target_layers": "2"}, r'num_target_layers must be 2 for this target, but is "2"'),
    ({"vocab_size": 261}, r"vocab_size must be 260 for this target, but is 261"),
    ({"num_target_layers": 36}, r"num_target_layers must be 2 for this target, but is 36"),
    ({"num_attention_heads": 0}, r"num_attention_heads must be a whole number from 1"),
    ({"head_dim": 48}, r"head_dim must be one of \(64, 128\), as in our heads, .* are 48, 1 and 1"),
    ({"quantization_config": {"quant_method": "fp8"}}, r"but has quantization_config=\{"),
]


@pytest.mark.parametrize(("change", "message"), FOREIGN)
@pytest.mark.parametrize("published", WITH_LAYERS, indirect=True)
def test_another_arithmetic_or_target_is_refused_by_the_key(
    published: Published, change: dict[str, Any], message: str
) -> None:
    published.refuses(change, message)


BLOCK: list[tuple[dict[str, Any], str]] = [
    ({"is_causal": "no"}, r"is_causal must be .*true or false"),
    (
        {"dflash_config": {"use_swa": True}},
        r"config\.json: must have a sliding_window, and use_sliding_window=true, for its sliding layers, but does",
    ),
    (
        {"layer_types": ["sliding_attention"] * 2},
        r"config\.json: must have a sliding_window, and use_sliding_window=true, for its sliding layers, but",
    ),
    (  # transformers' Qwen3Config drops this window
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": False},
        r"config\.json: must have a sliding_window, and use_sliding_window=true, for its sliding layers, but",
    ),
    ({"layer_types": ["full_attention"] * 9}, r"config\.json: must have 2 layer_types, but does not"),
    (
        {"layer_types": ["chunked_attention"] * 2},
        r"layer_types must be full_attention or sliding_attention in each layer",
    ),
    ({"dflash_config": {"use_swa": True, "swa_window_size": 9}}, r"set head\.layer_types=\[sliding_attention,sl"),
    ({"is_causal": True}, r"head\.causal \(all there, none here\); set head\.causal=all"),
    ({"dflash_config": {"attention_value_scale": 0.5}}, r"dflash_config\.attention_value_scale must be 1\.0"),
    ({"dflash_config": {"sample_from_anchor": True}}, r"dflash_config\.sample_from_anchor must be false, .* is true"),
    (
        {"sample_from_anchor": True},
        r"sample_from_anchor must be false, because heads of this class draft nothing",
    ),
    ({"dflash_config": {"shift_label": True}}, r"dflash_config\.shift_label must be false"),
    ({"dflash_config": {"projector_type": "mlp"}}, r'but has dflash_config\.projector_type="mlp"'),
    ({"dflash_config": {"block_size": 9}}, r"dflash_config\.block_size must be the same as block_size, 4, but is 9"),
    (
        {"dflash_config": {"target_layer_ids": [1, 1]}},
        r"target_layer_ids must name different layers .* \[2, 2\] layers",
    ),
    ({"dflash_config": {"target_layer_ids": [1, 5]}}, r"target_layer_ids must name different layers of the target's 2"),
    ({"dflash_config": {"mask_token_id": 260}}, r"mask_token_id must be within 0\.\.259, the target's vocabulary"),
    ({"block_size": 1}, r"block_size must be a whole number from 2 to 65, but is 1"),
    ({"use_sliding_window": True, "layer_types": None}, r"use_sliding_window must be false, or stand with layer_types"),
    ({"markov_rank": 16}, r"but has markov_rank=16"),
    ({"draft_vocab_size": 48}, r"draft_vocab_size must be 260, the rows of the lm_head that the head uses, but is 48"),
]


@pytest.mark.parametrize(("change", "message"), BLOCK)
@pytest.mark.parametrize("published", ["dflash"], indirect=True)
def test_a_block_drafter_of_another_layout_is_refused_by_the_key(
    published: Published, change: dict[str, Any], message: str
) -> None:
    published.refuses(change, message)


@pytest.mark.parametrize("published", ["dflash"], indirect=True)
def test_a_block_drafter_of_our_layout_is_read_however_its_config_says_so(published: Published) -> None:
    nested = {"causal": False, "use_swa": False, "swa_window_size": 64, "sample_from_anchor": False, "block_size": 4}
    published.load({"dflash_config": nested, "sample_from_anchor": False, "is_causal": False})
    published.load({"dflash_config": {"block_size": 4}}, removed=("block_size", "vocab_size"))
    neutral = {"output_multiplier": 1.0, "input_embedding_scale": 1.0, "final_logit_softcapping": None}
    published.load({"architectures": ["Qwen3DFlashDraftModel"], "dflash_config": neutral})  # NeMo Automodel
    published.load({"rope_theta": 1e6})  # rope_parameters takes precedence
    published.load({"rope_scaling": {"type": "default"}})  # SpecForge repeats rope_parameters without the theta
    published.load({"rope_theta": 1e4}, removed=("rope_parameters",))


WINDOW = {"sliding_window": 64, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"causal": "all"}, [{"is_causal": True}, {"is_causal": None, "dflash_config": {"causal": True}}]),
        (
            {"sliding_window": 64},  # z-lab's: the last layer sees everything
            [
                {"layer_types": ["sliding_attention", "full_attention"], **WINDOW},
                {"layer_types": ["sliding_attention", "full_attention"], "dflash_config": {"swa_window_size": 64}},
            ],
        ),
        (
            {"sliding_window": 64, "causal": "sliding"},
            [{"layer_types": ["sliding_attention", "full_attention"], "is_causal": None, **WINDOW}],
        ),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2},  # XiaomiMiMo's: use_swa is not causal
            [
                {"is_causal": None, "dflash_config": {"use_swa": True, "swa_window_size": 64}},
                {"is_causal": None, "layer_types": None, "sliding_window": 64, "dflash_config": {"use_swa": True}},
            ],
        ),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2, "causal": "all"},
            [
                {"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 64}, "is_causal": True},
                {"layer_types": ["sliding_attention"] * 2, "is_causal": True, **WINDOW},
            ],
        ),
    ],
    ids=["causal", "sliding", "sliding causal", "use_swa", "all sliding, causal"],
)
def test_every_variant_of_a_block_drafter_is_read_and_written_back(
    heads: dict[str, tuple[Path, Path, HeadConfig]],
    tmp_path: Path,
    settings: dict[str, Any],
    changes: list[dict[str, Any]],
) -> None:
    directory, target, _ = heads["dflash"]
    config = replace(DFLASH, **settings)
    for change in changes:
        Published(directory, target, config).load(change)
        with pytest.raises(ValueError, match=r"head\.init_from: the head's settings must be those of"):
            Published(directory, target, DFLASH).load(change)
    state = write(tmp_path / "written", "vllm", config, target)
    read = load_init(str(tmp_path / "written"), config, TargetFiles(target))
    assert read.keys() >= state.keys() and all(torch.equal(read[name], state[name]) for name in state)


@pytest.mark.parametrize("published", ["dspark"], indirect=True)
def test_a_dspark_head_is_read_with_keys_at_either_place_or_refused_by_the_key(published: Published) -> None:
    published.load({})
    published.load({}, removed=("target_layer_ids", "mask_token_id", "sample_from_anchor"))
    published.load({"architectures": ["DSparkDraftModel"]}, removed=("dflash_config",))
    published.refuses({"markov_head_type": "gated"}, r"markov_head_type must be .*vanilla.*, but is .*gated")
    published.refuses({"confidence_head_with_markov": False}, r"confidence_head_with_markov must be true")
    published.refuses({"sample_from_anchor": False}, r"head\.sample_from_anchor \(False there, True here\)")
    for_mtp = Published(published.directory, published.target, MtpHead.Config())
    for_mtp.refuses({"sample_from_anchor": False}, r"set head=dspark .*head\.sample_from_anchor=false.*, or choose")
    published.load({"dflash_config": {"sample_from_anchor": True}}, removed=("sample_from_anchor",))
    nested = {"dflash_config": {"sample_from_anchor": False}}
    published.refuses(nested, r"dflash_config\.sample_from_anchor must be the same as sample_from_anchor, true, but is")
    published.refuses(nested | {"sample_from_anchor": None}, r"head\.sample_from_anchor \(False there, True here\)")
    published.refuses({"block_size": 4}, r"head\.ttt_steps \(4 there, 3 here\); set head\.ttt_steps=4")
    published.refuses({"markov_rank": 8}, r"head\.markov_rank \(8 there, 4 here\)")
    published.refuses({"markov_rank": None}, r"must have markov_rank, but does not")
    published.refuses({"block_size": 65}, r"block_size must be a whole number from 1 to 64, but is 65")
    published.load({"num_anchors": 512}, removed=("dflash_config",))  # DeepSpec
    spec_forge = {"confidence_head_alpha": 1.0, "attention_mode": "gqa", "projector_type": "dspark"}
    stored = json.loads((published.directory / "config.json").read_text())
    own = {name: stored[name] for name in DSPARK_NESTED}
    published.load({"dflash_config": spec_forge | own}, removed=DSPARK_NESTED)
    published.load({"dflash_config": spec_forge | own})
    published.refuses({"dflash_config": {"markov_rank": 8}}, r"dflash_config\.markov_rank must be the same as markov_r")
    published.refuses({"dflash_config": {"projector_type": "x"}}, r"dflash_config\.projector_type must be .*dspark")


@pytest.mark.parametrize("published", ["dspark"], indirect=True)
def test_deepspecs_dflash_is_read_as_anchor_first_dflash(published: Published, tmp_path: Path) -> None:
    shutil.copytree(published.directory, tmp_path / "head")
    rewrite(tmp_path / "head", lambda tensors: without("markov_head.")(without("confidence_head.")(tensors)))
    head = Published(tmp_path / "head", published.target, replace(DFLASH, sample_from_anchor=True))
    plain = {"markov_rank": 0, "enable_confidence_head": False, "num_anchors": 512}
    removed = ("dflash_config", "markov_head_type", "confidence_head_with_markov", "sample_from_anchor")
    head.load(plain, removed=removed)
    head.refuses(plain | {"enable_confidence_head": True}, r"enable_confidence_head must be false, because a head with")
    for_dspark = Published(tmp_path / "head", published.target, DSPARK)
    for_dspark.refuses(plain | dict.fromkeys(removed[1:]), r"set head=dflash .*head\.sample_from_anchor=true")


@pytest.mark.parametrize("published", ["dspark"], indirect=True)
@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_a_block_of_one_draft_is_read_back(published: Published, tmp_path: Path, sample_from_anchor: bool) -> None:
    config = replace(DSPARK, ttt_steps=1, sample_from_anchor=sample_from_anchor)
    write(tmp_path / "head", "vllm", config, published.target)
    Published(tmp_path / "head", published.target, config).load({})


@pytest.mark.parametrize("published", ["dspark"], indirect=True)
def test_a_copy_of_the_targets_lm_head_need_not_become_a_vocabulary_of_its_own(
    published: Published, tmp_path: Path
) -> None:
    parts = load_frozen_parts(published.target)  # DeepSpec stores both
    shutil.copytree(published.directory, tmp_path / "head")
    copies = {"embed_tokens.weight": parts.embed_tokens.clone(), "lm_head.weight": parts.lm_head.clone()}
    rewrite(tmp_path / "head", lambda tensors: tensors | copies)
    for size in (None, 260):
        Published(tmp_path / "head", published.target, replace(DSPARK, draft_vocab_size=size)).load({})
    rewrite(tmp_path / "head", lambda tensors: tensors | {"lm_head.weight": 2 * parts.lm_head})
    Published(tmp_path / "head", published.target, DSPARK).refuses(
        {}, r"head\.draft_vocab_size \(260 there, None here\)"
    )


@pytest.mark.parametrize("published", ["dflash"], indirect=True)
def test_drafters_that_are_not_trained_here_are_refused_by_name(published: Published) -> None:
    section = json.loads((published.directory / "config.json").read_text())["dflash_config"]
    for change, message in (
        (
            {"dflash_config": section | {"projector_type": "domino", "emb_dim": 8}},
            r"holds Domino \(domino\), which it does not \(SGLang",
        ),
        ({"architectures": ["Qwen3XPressModel"]}, r"holds XPress \(Qwen3XPressModel\), which it does not \(vLLM 0\.33"),
        ({"architectures": ["DFlash2BeamDraftModel"]}, r"holds DFlash 2 that drafts beams \(DFlash2BeamDraftModel\)"),
        ({"architectures": ["LiLiCorrDraftModel"]}, r"holds LiLiCorr \(LiLiCorrDraftModel\), .* train head=dspark"),
    ):
        published.refuses(change, message)
    published.refuses({"dflash_config": "x"}, r"dflash_config must hold settings, but is .?x")
    published.refuses({"dflash_config": section | {"projector_type": ["domino"]}}, r"projector_type=\[.*domino")


@pytest.mark.parametrize("published", ["dflash2"], indirect=True)
def test_a_dflash2_head_is_read_or_refused_by_the_key(published: Published) -> None:
    section = json.loads((published.directory / "config.json").read_text())["dflash_config"]
    published.load({})
    published.load({"dflash_config": section | {"output_multiplier": 1.0}}, removed=("block_size",))
    for key, value, message in (
        ("output_multiplier", 2.0, r"dflash_config\.output_multiplier must be 1\.0, as in our heads, but is 2\.0"),
        ("output_multiplier", True, r"dflash_config\.output_multiplier must be 1\.0, as in our heads, but is true"),
        (
            "final_logit_softcapping",
            30.0,
            r"final_logit_softcapping must be 0\.0, as in our heads, but is 30\.0",
        ),
        ("selector_top_k", 6, r"head\.selector_top_k \(6 there, 5 here\); set head\.selector_top_k=6"),
        ("conv_kernel_size", 3, r"head\.conv_kernel_size \(3 there, 2 here\)"),
        ("selector_rank", None, r"must have dflash_config\.selector_rank, but does not"),
        ("candidate_width", 3, r"has dflash_config\.candidate_width=3"),
    ):
        published.refuses({"dflash_config": section | {key: value}}, message)
    for key, value, bound in (("conv_kernel_size", 17, 16), ("selector_top_k", 2000, "1,024")):
        message = rf"dflash_config\.{key} must be .* {bound}, but is {value}"
        published.refuses({"dflash_config": section | {key: value}}, message)
    published.refuses({"sample_from_anchor": True}, r"sample_from_anchor must be false")
    tensors, path = load_file(published.directory / "model.safetensors"), published.directory / "model.safetensors"
    try:  # a copy of the target's lm_head is no vocabulary of the head's own
        save_file(tensors | {"lm_head.weight": load_frozen_parts(published.target).lm_head.contiguous()}, path)
        published.load({})
    finally:
        save_file(tensors, path)


@pytest.mark.parametrize("published", ["dflash"], indirect=True)
def test_a_trained_mask_embedding_is_refused(published: Published) -> None:
    (path := published.directory / "mask_embedding.pt").touch()
    try:
        published.refuses({}, r"mask_embedding\.pt: must not exist, because head dflash takes the embedding")
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("change", "removed", "message"),
    [
        ({"rope_parameters": {"rope_theta": 5e5}}, (), r"rope_parameters should be .* but is .*500000"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            ("rope_parameters",),
            r"rope_parameters should be .* but is .*yarn",
        ),
        ({"rms_norm_eps": 1e-3}, (), r"rms_norm_eps should be 1e-06, .* but is 0\.001"),
    ],
    ids=["theta", "yarn", "eps"],
)
@pytest.mark.parametrize("published", ["eagle", "dflash", "native", "mimo"], indirect=True)
def test_another_rope_or_eps_than_the_targets_is_warned_of(
    published: Published, change: dict[str, Any], removed: tuple[str, ...], message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        published.load(change, removed)


@pytest.mark.parametrize("published", ["eagle"], indirect=True)
def test_an_eps_that_gguf_rounds_to_fp32_is_the_same(published: Published) -> None:
    published.load({"rms_norm_eps": 9.999999974752427e-07})


@pytest.mark.parametrize("published", ["dflash"], indirect=True)
def test_a_block_drafter_without_rope_has_the_theta_of_engines(published: Published) -> None:
    with pytest.warns(UserWarning, match=r"rope_parameters should be .*10000\.0.* but is .*1000000"):
        published.load({}, removed=("rope_parameters",))


FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 2}, r"num_hidden_layers must be 1, as in our heads, but is 2"),
    ({"num_aux_hidden_states": 3}, r"num_aux_hidden_states must be 2, the number of captured layers, but is 3"),
    ({"draft_vocab_size": 96}, r"draft_vocab_size must be 48, the rows of the lm_head .*, but is 96"),
    ({"norm_output": "yes"}, r'norm_output must be true or false, but is "yes"'),
    ({"target_hidden_size": 128}, r"target_hidden_size must be 64 for this target, but is 128"),
    ({"eagle_config": {"eh_proj_before_attn": True}}, r"eagle_config\.eh_proj_before_attn must be false"),
    ({"use_last_layernorm": False}, r"use_last_layernorm must be true, as in our heads, but is false"),
    ({"eagle_config": {"use_mtp_layernorm": True}}, r"eagle_config\.use_mtp_layernorm must be false, as in our heads"),
    (
        {"eagle_aux_hidden_state_layer_ids": "[1,2]", "eagle_config": None},
        r'must be a list of layer ids, but is "\[1,2',
    ),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}, r"must be the same as eagle_aux_hidden_state_l"),
    ({"eagle_aux_hidden_state_layer_ids": [1, "2"], "eagle_config": None}, r"must be a list of layer ids, but is"),
    (
        {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, "2"]}},
        r"eagle_aux_hidden_state_layer_ids must be a list of layer ids, but is \[1, \"2\"\]",
    ),
    (
        {"eagle_aux_hidden_state_layer_ids": [2, 2], "eagle_config": None},
        r"eagle_aux_hidden_state_layer_ids must name different layers of the target's 2 in rising order, but mean the "
        r"streams after \[2, 2\] or \[3, 3\] layers",
    ),
]


@pytest.mark.parametrize(("change", "message"), FLAGS)
@pytest.mark.parametrize("published", ["eagle3"], indirect=True)
def test_a_setting_of_eagle3_that_cannot_be_honoured_is_refused_by_the_key(
    published: Published, change: dict[str, Any], message: str
) -> None:
    published.refuses(change, message)


@pytest.mark.parametrize("published", ["eagle3"], indirect=True)
def test_the_keys_of_model_opt_with_their_defaults_are_read(published: Published) -> None:
    published.load(MODEL_OPT_EAGLE3 | {"eagle_config": MODEL_OPT_EAGLE3 | {"parallel_draft_heads_num_layers": 1}})


def test_default_layers_that_no_head_can_capture_are_not_proposed(tmp_path: Path) -> None:
    """For a target of 6 layers the engines' default is 2, 3 and 3, which `head.capture_layers` does not accept."""
    target = make_target(tmp_path / "target", num_hidden_layers=6)
    write(tmp_path / "head", "vllm", replace(EAGLE3, capture_layers=[1, 3, 5]), target)
    rewrite(tmp_path / "head", unchanged, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    message = r"eagle_aux_hidden_state_layer_ids must name different layers .* after \[2, 3, 3\] layers \(2, n // 2 and"
    with pytest.raises(ValueError, match=message):
        load_init(str(tmp_path / "head"), Eagle3Head.Config(capture_layers=[1, 3, 5]), TargetFiles(target))


@pytest.mark.parametrize("config", [MTP, DraftModelHead.Config()], ids=["mtp", "draft_model"])
def test_a_setting_of_our_own_head_that_this_version_does_not_have_is_refused(
    tmp_path: Path, tiny_target: Path, config: HeadConfig
) -> None:
    save_head(tmp_path / "best", random_state(config, tiny_target), config, {})
    stored = json.loads((tmp_path / "best/head.json").read_text())
    stored["head"]["sliding_window"] = 64
    seal_again(tmp_path / "best/head.json", **stored)
    with pytest.raises(
        ValueError, match=r"head\.json: must hold only settings of head .*, but has sliding_window=64; "
    ):
        load_init(str(tmp_path / "best"), config, TargetFiles(tiny_target))


@pytest.mark.parametrize(("name", "count"), [("num_hidden_layers", 99), ("num_nextn_predict_layers", 2)])
def test_a_checkpoint_with_another_number_of_layers_is_refused(
    heads: dict[str, tuple[Path, Path, HeadConfig]], name: str, count: int
) -> None:
    Published(*heads["native"]).refuses({name: count}, rf"config\.json: {name} must be ")
