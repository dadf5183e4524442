"""The exported directory: exact keys, shapes and columns, and the same proposals after reloading."""

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.config import PipelineConfig
from mtptrain.convert import mimo
from mtptrain.convert.export_proof import (
    DRAFTS,
    ROUNDS,
    TOKENS,
    proof_bytes,
    propose,
    random_document,
    stored_documents,
)
from mtptrain.convert.formats import format_for
from mtptrain.data.prompt_files import DocumentEntry, Documents, Split
from mtptrain.export import check_directory_name, check_tensors, export, reload_head, write_head
from mtptrain.heads.files import TARGET_WEIGHTS, build_head, check_head_target, load_head, save_head
from mtptrain.heads.layers import head_dims
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.mtp import MtpHead, RestoredNorm
from mtptrain.run_dir import write_provenance
from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import EMBED_TOKENS, FINAL_NORM, LM_HEAD, load_frozen_parts
from mtptrain.target.hub import weights_fingerprint
from mtptrain.target.model import load_target
from mtptrain.target.position_cache import PositionCache
from mtptrain.utils.files import file_sha256, write_json
from tests.conftest import make_config, make_target, run_program
from tests.mtptrain.convert.conftest import random_head

CONFIG = MtpHead.Config()


@pytest.fixture
def exported(tmp_path: Path, tiny_target: Path) -> Path:
    torch.manual_seed(0)
    target_config = read_target_config(tiny_target)
    write_head(
        tmp_path / "vllm", format_for("vllm", CONFIG, target_config), build_head(CONFIG, target_config).state_dict()
    )
    return tmp_path / "vllm"


def test_the_directory_holds_exactly_the_tensors_that_vllm_reads(exported: Path) -> None:
    """Names and shapes from vllm/model_executor/models/deepseek_eagle.py 0.32: H=64, I=96, one head and one kv head of
    64."""
    assert {name: list(tensor.shape) for name, tensor in load_file(exported / "model.safetensors").items()} == {
        "enorm.weight": [64],
        "hnorm.weight": [64],
        "norm.weight": [64],
        "fc.weight": [64, 128],
        "layers.0.input_layernorm.weight": [64],
        "layers.0.post_attention_layernorm.weight": [64],
        "layers.0.self_attn.qkv_proj.weight": [192, 64],
        "layers.0.self_attn.o_proj.weight": [64, 64],
        "layers.0.mlp.gate_proj.weight": [96, 64],
        "layers.0.mlp.up_proj.weight": [96, 64],
        "layers.0.mlp.down_proj.weight": [64, 96],
    }


def test_the_config_names_the_class_and_copies_the_targets_rope(exported: Path, tiny_target: Path) -> None:
    config, target_config = json.loads((exported / "config.json").read_text()), read_target_config(tiny_target)
    assert config["architectures"] == ["EagleDeepSeekMTPModel"]
    assert config["model_type"] == "llama"
    assert config["qk_nope_head_dim"] == config["qk_rope_head_dim"] == config["n_routed_experts"] == 0
    assert config["first_k_dense_replace"] > target_config.num_hidden_layers
    assert config["rope_parameters"] == target_config.rope_parameters
    assert config["max_position_embeddings"] == 512 and config["vocab_size"] == 260 and config["dtype"] == "float32"


def test_query_key_and_value_are_fused_in_this_order_and_embedding_columns_come_first(
    exported: Path, tiny_target: Path
) -> None:
    torch.manual_seed(0)
    head = build_head(CONFIG, read_target_config(tiny_target))
    tensors = load_file(exported / "model.safetensors")
    fused = tensors["layers.0.self_attn.qkv_proj.weight"]
    for part, tensor in zip("qkv", fused.split(64), strict=True):
        assert torch.equal(tensor, head.state_dict()[f"self_attn.{part}_proj.weight"])
    embeddings, hidden = torch.randn(2, 64), torch.zeros(2, 64)
    assert torch.allclose(
        head.eh_proj(torch.cat([embeddings, hidden], -1)), embeddings @ tensors["fc.weight"][:, :64].T, atol=1e-5
    )


def test_the_reloaded_head_proposes_the_same_and_a_damaged_one_does_not(exported: Path, tiny_target: Path) -> None:
    torch.manual_seed(0)
    target_config, parts = read_target_config(tiny_target), load_frozen_parts(tiny_target)
    head = build_head(CONFIG, target_config).eval()
    document = random_document(head, parts)
    ours = propose(head, parts, *document)
    theirs = propose(reload_head(exported, format_for("vllm", CONFIG, target_config)), parts, *document)
    assert ours.shape == (8, ROUNDS + 1, DRAFTS) and torch.equal(ours, theirs)
    tensors = load_file(exported / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].roll(64, 1)  # hidden columns first
    save_file(tensors, exported / "model.safetensors")
    broken = propose(reload_head(exported, format_for("vllm", CONFIG, target_config)), parts, *document)
    assert not torch.equal(ours, broken)


@pytest.mark.parametrize("depths", [1, 2, 5])
def test_the_proof_compares_every_depth_that_a_head_is_bound_to(tiny_target: Path, depths: int) -> None:
    target_config, parts = read_target_config(tiny_target), load_frozen_parts(tiny_target)
    head = random_head(MedusaHead.Config(ttt_steps=depths), target_config).eval()
    document = random_document(head, parts)
    before = propose(head, parts, *document)
    with torch.no_grad():
        head.blocks[depths - 1].layers[0].weight.neg_()
    after = propose(head, parts, *document)
    assert before.shape == (8, ROUNDS + 1, depths) and torch.equal(before[..., :-1], after[..., :-1])
    assert not torch.equal(before[..., -1], after[..., -1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "missing",
            r"hnorm\.weight must be of shape \(64,\), but is absent; the engine would serve random weights; export "
            r"again",
        ),
        ("unknown", r"extra\.weight must be absent, but is of shape \(3,\)"),
        ("shape", r"fc\.weight must be of shape \(64, 128\), but is of shape \(64, 64\)"),
    ],
)
def test_a_missing_unknown_or_misshapen_tensor_is_an_error(
    exported: Path, tiny_target: Path, change: str, message: str
) -> None:
    tensors = load_file(exported / "model.safetensors")
    if change == "missing":
        del tensors["hnorm.weight"]
    elif change == "unknown":
        tensors["extra.weight"] = torch.zeros(3)
    else:
        tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        check_tensors(exported, format_for("vllm", CONFIG, read_target_config(tiny_target)))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("eagle-head", "eagle3"),
        ("my_eagle3", "eagle"),
        ("DFlash", "eagle"),
        ("dspark", "eagle3"),
        ("eagle3-by-eagle-4", "eagle3"),
    ],
)
def test_a_directory_whose_name_switches_vllms_method_is_refused(tmp_path: Path, name: str, method: str) -> None:
    message = rf"export\.output_dir: vLLM must not infer a method other than {method} from the path, but .* contains"
    with pytest.raises(ValueError, match=message):
        check_directory_name(tmp_path / name / "vllm", method)


@pytest.mark.parametrize(
    ("name", "method"), [("eagle-head", "eagle"), ("llama_eagle3", "eagle3"), ("quickstart", "eagle")]
)
def test_a_directory_whose_name_stands_for_the_right_method_is_taken(tmp_path: Path, name: str, method: str) -> None:
    """A run of recipe `..._eagle3` goes to a folder of that name."""
    check_directory_name(tmp_path / name / "vllm", method)


def test_a_quantised_target_is_refused(tiny_target: Path) -> None:
    config = read_target_config(tiny_target)
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(
        ValueError, match=r"target\.path: must be a target that is not quantised .* for vllm, but is .* 'fp8'"
    ):
        format_for("vllm", CONFIG, config)


@pytest.mark.parametrize(
    ("hidden_size", "heads", "expected"),
    [(2560, 32, 20), (5120, 64, 40), (4096, 32, 32), (256, 4, 4), (64, 1, 1)],
)
def test_the_heads_head_dim_is_one_that_engines_have_kernels_for(
    tmp_path: Path, hidden_size: int, heads: int, expected: int
) -> None:
    """Trap: hidden size over heads is 80 for Qwen3-4B and Qwen3-32B."""
    make_target(tmp_path, num_attention_heads=1)
    target_config = read_target_config(tmp_path)
    target_config.hidden_size, target_config.num_attention_heads = hidden_size, heads
    assert head_dims(CONFIG, target_config).num_attention_heads == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MtpHead.Config(num_attention_heads=2),
            r"head\.num_attention_heads: the head dim \(hidden size 64 / heads\) must be one of",
        ),
        (
            MtpHead.Config(num_key_value_heads=2),
            r"head\.num_key_value_heads: must divide the 1 attention heads, but is 2",
        ),
    ],
)
def test_sizes_that_no_engine_serves_are_refused(tiny_target: Path, config: MtpHead.Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head(config, read_target_config(tiny_target))


def test_a_head_from_before_a_setting_has_its_default(tmp_path: Path, tiny_target: Path) -> None:
    target_config = read_target_config(tiny_target)
    facts: dict[str, object] = {"step": 3, TARGET_WEIGHTS: "aa"}
    save_head(tmp_path / "head", build_head(CONFIG, target_config).state_dict(), CONFIG, facts)
    stored = json.loads((tmp_path / "head/head.json").read_text())
    del stored["head"]["norms"]
    (tmp_path / "head/head.json").write_text(json.dumps(stored))
    load_head(tmp_path / "head", CONFIG, target_config, None, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"differ in head\.norms \(\['enorm', .*\] stored, \['norm'\] in the config\); change"
    ):
        load_head(
            tmp_path / "head", replace(CONFIG, norms=[RestoredNorm.norm]), target_config, None, torch.device("cpu")
        )


def test_a_head_of_other_settings_or_of_another_target_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    target_config = read_target_config(tiny_target)
    save_head(tmp_path / "head", build_head(CONFIG, target_config).state_dict(), CONFIG, {"step": 3})
    with pytest.raises(
        ValueError,
        match=r"the head's settings must match the config, but differ in head\.ttt_steps \(4 stored, 2 in the config\)",
    ):
        load_head(tmp_path / "head", MtpHead.Config(ttt_steps=2), target_config, None, torch.device("cpu"))
    other = read_target_config(make_target(tmp_path / "target", intermediate_size=80))
    with pytest.raises(ValueError, match=r"mlp\.\w+_proj\.weight must be of shape .* for this target, but is"):
        load_head(tmp_path / "head", CONFIG, other, None, torch.device("cpu"))
    with pytest.raises(
        FileNotFoundError, match=r"must hold a trained head, but has no head\.json; run mtptrain\.train first"
    ):
        load_head(tmp_path / "none", CONFIG, target_config, None, torch.device("cpu"))


EAGLE3 = ("head=eagle3", "head.capture_layers=[1,3]", "head.draft_vocab_size=96")
EXPORTS = {
    "vllm, medusa": ("vllm", ("head=medusa", "head.num_layers=2"), "MedusaModel", "medusa"),
    "vllm, eagle3": ("vllm", EAGLE3, "LlamaForCausalLMEagle3", "eagle3"),
    "sglang, eagle3": ("sglang", EAGLE3, "LlamaForCausalLMEagle3", "EAGLE3"),
    "sglang, mtp": ("sglang", (), "MiMoForCausalLM", "EAGLE"),
    "transformers, mtp": ("transformers", (), "LlamaForCausalLM", "use_mtp"),
}


@pytest.fixture(scope="module")
def target_of_four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


def trained(run_dir: Path, target_dir: Path, *overrides: str) -> PipelineConfig:
    """The config of a run that has held-out prompts, a head of random weights, and its measured acceptance."""
    config = make_config(f"run_dir={run_dir}", f"target.path={target_dir}", "acceptance.prompt_tokens=8", *overrides)
    tokens = torch.randint(0, 250, (4, 16), generator=torch.Generator().manual_seed(0)).tolist()
    for stage in ("prompts", "acceptance"):
        (run_dir / stage).mkdir(parents=True)
    Documents.from_list([(i, row, [1] * 16) for i, row in enumerate(tokens)]).save(
        run_dir / "prompts/validation.safetensors"
    )
    DocumentEntry.write_all(
        run_dir / "prompts", [DocumentEntry(i, f"file {i}", Split.validation, 16, 0, 0) for i in range(4)]
    )
    head = random_head(config.head, read_target_config(target_dir))
    facts = {TARGET_WEIGHTS: weights_fingerprint(target_dir)}
    save_head(run_dir / "train/best", head.to(torch.bfloat16).state_dict(), config.head, facts)
    report = {
        "head_sha256": file_sha256(run_dir / "train/best/head.safetensors"),
        "acceptance_length": 2.5,
        "acceptance_rate_at": [0.75, 0.5, 0.25],
        "num_speculative_tokens": 3,
        "temperature": 0.0,
        "prompts": 4,
        "dtype": "float32",
    }
    write_json(run_dir / "acceptance/report.json", report)
    return config


@pytest.mark.parametrize("case", EXPORTS)
def test_an_export_holds_all_that_serving_needs(tmp_path: Path, target_of_four_layers: Path, case: str) -> None:
    engine, overrides, architecture, method = EXPORTS[case]
    config = trained(tmp_path / "run", target_of_four_layers, f"export.engine={engine}", *overrides)
    export(config)
    directory = tmp_path / "run/export" / engine
    form = format_for(engine, config.head, read_target_config(target_of_four_layers))
    assert {"config.json", "README.md", "serving.json", "provenance.json", "config.yaml", form.weights_name} <= {
        path.name for path in directory.iterdir()
    }
    assert json.loads((directory / "serving.json").read_text()) == {
        "engine": engine,
        "architecture": architecture,
        "method": method,
        "hf_overrides": None,
        "speculative_settings": {},
        "holds_target": False,
        "head_sha256": file_sha256(tmp_path / "run/train/best/head.safetensors"),
    }
    readme = (directory / "README.md").read_text()
    assert form.launch(str(target_of_four_layers), directory.resolve(), 3) in readme
    assert "Acceptance length 2.500 (bonus token included), rate by position 0.750, 0.500, 0.250" in readme
    assert all(note in readme for note in form.notes())
    assert {path.name for path in directory.parent.iterdir()} == {engine}, "nothing temporary is left"
    tensors = load_file(directory / form.weights_name)
    trained_head = load_file(tmp_path / "run/train/best/head.safetensors")
    assert all(torch.equal(tensor, trained_head[name]) for name, tensor in form.state(tensors).items())
    if "d2t" in tensors:
        assert tensors["d2t"].dtype is torch.int64 and int(tensors["t2d"].sum()) == 96


def test_what_is_refused_is_refused_before_anything_is_read_or_written(
    tmp_path: Path, target_of_four_layers: Path
) -> None:
    overrides = ("export.engine=sglang", "head=eagle3", "head.capture_layers=[1,4]")
    config = make_config(f"run_dir={tmp_path}/run", f"target.path={target_of_four_layers}", *overrides)
    with pytest.raises(ValueError, match=r"head\.capture_layers: must be below the target's last layer"):
        export(config)
    config = make_config(f"run_dir={tmp_path}/run", f"target.path={target_of_four_layers}", "head=hydra")
    with pytest.raises(
        ValueError, match=r"head: must be one of .* to be exported, but is hydra, which no engine has a"
    ):
        export(config)
    config = make_config(f"run_dir={tmp_path}/dflash", f"target.path={target_of_four_layers}", "export.engine=vllm")
    with pytest.raises(ValueError, match="vLLM must not infer a method other than"):
        export(config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "must be JSON, but is nested too deep to be read"),
        ('{"head_sha256": "HEAD"}', "must have all figures that eval.acceptance writes, but some are missing"),
    ],
    ids=["nested", "incomplete"],
)
def test_a_damaged_report_is_refused_before_anything_is_written(
    tmp_path: Path, target_of_four_layers: Path, content: str, message: str
) -> None:
    config = trained(tmp_path / "run", target_of_four_layers)
    sha256 = file_sha256(tmp_path / "run/train/best/head.safetensors")
    (tmp_path / "run/acceptance/report.json").write_text(content.replace("HEAD", sha256))
    with pytest.raises(ValueError, match=rf"acceptance/report\.json: {message}.*; run eval\.acceptance again, or"):
        export(config)
    assert not (tmp_path / "run/export").exists()


def test_an_export_that_cannot_be_written_leaves_nothing(tmp_path: Path, target_of_four_layers: Path) -> None:
    config = trained(tmp_path / "run", target_of_four_layers)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"vllm\.tmp/\w+\.safetensors"):
            export(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "run/export").iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "must have the entries head, but lacks head"),
        ('{"head": [1]}', r"head must be the settings of one of .*, but is \[1\]"),
        ('{"head": {"name": "none"}}', "head must be the settings of one of .*mtp"),
    ],
)
def test_damaged_facts_of_a_head_are_refused(tmp_path: Path, tiny_target: Path, content: str, message: str) -> None:
    target_config = read_target_config(tiny_target)
    (tmp_path / "head.json").write_text(content)
    with pytest.raises(ValueError, match=rf"head\.json: {message}.*; copy it again, or train again"):
        load_head(tmp_path, CONFIG, target_config, None, torch.device("cpu"))
    with pytest.raises(ValueError, match=rf"head\.json: must have the entries {TARGET_WEIGHTS}, but lacks"):
        check_head_target(tmp_path, tiny_target)


def test_only_an_earlier_export_is_replaced(tmp_path: Path, target_of_four_layers: Path) -> None:
    config = trained(tmp_path / "run", target_of_four_layers)
    write_provenance(tmp_path / "run/train", config)
    config.export.output_dir = str(tmp_path / "run/train")
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(ValueError, match=r"export\.output_dir: must be new, empty or an earlier export, but \S+ holds"):
        export(config)
    assert sorted((tmp_path / "run").rglob("*")) == before
    config.export.output_dir = str(tmp_path / "served")
    export(config)
    (tmp_path / "served/README.md").unlink()
    export(config)
    assert (tmp_path / "served/README.md").is_file()


def test_a_head_that_comes_back_different_is_not_exported(
    tmp_path: Path, target_of_four_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained(tmp_path / "run", target_of_four_layers, "export.engine=sglang")
    monkeypatch.setattr(mimo, "swap_halves", lambda weight: weight.roll(1, 1))  # not its own inverse
    with pytest.raises(
        RuntimeError, match="the exported head must propose the same tokens as the trained one, but proposes"
    ):
        export(config)
    assert not (tmp_path / "run/export/sglang").exists()


def without_layers(target_dir: Path, directory: Path) -> Path:
    """A copy of a target whose checkpoint holds no decoder layer."""
    shutil.copytree(target_dir, directory)
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: tensors[name] for name in (EMBED_TOKENS, FINAL_NORM, LM_HEAD) if name in tensors},
        directory / "model.safetensors",
    )
    return directory


@pytest.mark.parametrize(
    "overrides", [("export.engine=vllm",), ("export.engine=sglang", *EAGLE3)], ids=["vllm, mtp", "sglang, eagle3"]
)
def test_an_export_reads_no_decoder_layer_of_the_target(
    tmp_path: Path, target_of_four_layers: Path, overrides: tuple[str, ...]
) -> None:
    """A target of 70B parameters would take 282 GB in fp32, its embeddings and lm_head take 13."""
    target_dir = without_layers(target_of_four_layers, tmp_path / "target")
    with pytest.raises(ValueError, match=r"the checkpoint must hold model\.layers"):
        load_target(target_dir, torch.float32, torch.device("cpu"))
    config = trained(tmp_path / "run", target_dir, *overrides)
    shutil.rmtree(tmp_path / "run/prompts")
    export(config)
    assert (config.stage_dir("export") / config.export.engine / "serving.json").is_file()


def test_the_proof_drafts_over_the_stored_states_where_there_are_some(
    tiny_run: tuple[Path, tuple[str, ...]], tiny_target: Path
) -> None:
    config, parts = make_config(f"run_dir={tiny_run[0]}", *tiny_run[1]), load_frozen_parts(tiny_target)
    head = build_head(config.head, read_target_config(tiny_target))
    documents = stored_documents(tiny_run[0] / "hidden_states", head, parts)
    assert len(documents) > 1
    target, (tokens, states) = load_target(tiny_target, torch.float32, torch.device("cpu")), documents[0]
    whole = target.forward(tokens, torch.arange(TOKENS + 1)[None], PositionCache(TOKENS + 1)).hidden_states
    assert (whole[:, :-1] - states.hidden_states).norm() < 0.01 * whole.norm(), "the store rounds to bf16"
    other = build_head(config.head, read_target_config(tiny_target))
    other.capture_layers = (1,)
    assert stored_documents(tiny_run[0] / "hidden_states", other, parts) == [], "states of other layers are of no use"
    assert stored_documents(tiny_run[0] / "nothing", head, parts) == []


def test_the_memory_of_the_proof_does_not_grow_with_the_target() -> None:
    assert proof_bytes(128_256, 8192, 10**9, num_tables=2) == pytest.approx(20.6e9, rel=0.01)


def test_export_before_training_says_what_to_run(tmp_path: Path, tiny_target: Path) -> None:
    result = run_program("mtptrain.export", f"run_dir={tmp_path}/run", f"target.path={tiny_target}")
    assert result.returncode != 0
    assert "must hold a trained head, but has no head.json; run mtptrain.train first" in result.stderr
    assert not (tmp_path / "run/export").exists()
