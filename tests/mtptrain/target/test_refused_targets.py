"""Tests that targets that are damaged, contradict themselves or cannot be run are refused with the reason.

None of their own Python code ever runs, whatever their configs name and whoever answers yes.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate import cpu_offload
from huggingface_hub.errors import HTTPError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mtptrain.target.families import read_target_config
from mtptrain.target.frozen_parts import check_weights, load_frozen_parts, load_last_layer
from mtptrain.target.hub import (
    MODEL_OPT_QUANTISATION,
    config_dir,
    load_tokenizer,
    resolve_target,
    weight_files,
    weights_fingerprint,
)
from mtptrain.target.loading import check_placement, load_target
from mtptrain.target.model import Target
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import save_tensors
from tests.mtptrain.target.inputs import CPU, write_config

Damage = Callable[[Path], object]
GARBAGE, NESTED = bytes(range(128, 256)), b"[" * 100_000 + b"]" * 100_000
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UP, LM_HEAD, EMBEDDINGS = "model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def target(tmp_path: Path, tiny_target: Path) -> Path:
    return shutil.copytree(tiny_target, tmp_path / "target")


def write(name: str, content: bytes | None) -> Damage:
    return lambda target: (target / name).unlink() if content is None else (target / name).write_bytes(content)


def change(name: str = "config.json", **settings: object) -> Damage:
    """Returns what changes settings of a JSON file; ... removes one."""

    def changed(target: Path) -> None:
        path = target / name
        content = {**(json.loads(path.read_text()) if path.is_file() else {}), **settings}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return changed


def tensors(changed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    return lambda target: save_tensors(target / WEIGHTS, changed(load_file(target / WEIGHTS)))


def both(*damages: Damage) -> Damage:
    return lambda target: [damage(target) for damage in damages]


def added(**values: torch.Tensor) -> Damage:
    """Returns what adds or replaces tensors of an untied target."""
    untied = tensors(lambda old: {LM_HEAD: torch.ones(260, 64), **old, **values})
    return both(untied, change(tie_word_embeddings=False))


def index(content: object) -> Damage:
    return write(INDEX, json.dumps(content).encode())


def load_whole(target: Path) -> Target:
    return load_target(target, torch.float32, CPU)


def place(target: Path) -> None:
    check_placement(target, torch.float32, CPU)


ROPE = {"rope_type": "default"}
EVIL_TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
EVIL_MODEL = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
OWN_CLASS = "tokenizer_class must be a class of transformers, because mtptrain never runs .*, but is"
NOT_READ = "the tokenizer must be readable by transformers, but transformers reports"
UNQUANTISED = r"target\.path: {} must be unquantised, .*model\.safetensors has {}\.\w+ in \w+; choose the unq"
UNKNOWN = r"target\.path: {} must be unquantised, or its weight .*quantised by compressed-tensors, .* has {} for it"
NO_METHOD = "no quant_method and no scheme"
MODEL_OPT = b'{"quantization": {"quant_algo": "FP8"}}'
NOT_RUN = (
    r"target\.path: transformers must be able to run the quantised weights that quantization_config in .*/config\.json "
    "describes, but transformers reports .*{}.*; install what it names, or run this target in vLLM only: hidden_states."
)
NO_NORM = tensors(lambda old: {name: x for name, x in old.items() if name != "model.norm.weight"})
NAN, IS_NAN = added(**{UP: torch.full((96, 64), math.nan)}), rf"must be finite, but {UP} of a llama .* has NaN or inf"
Cases = list[tuple[Damage, str]]
IN_CONFIG: Cases = [
    (write("config.json", b"[]"), r"/config\.json: must hold a JSON object, but holds a list; download it"),
    (write("generation_config.json", NESTED), r"/generation_config\.json: must be JSON, but is nested too"),
    (write("adapter_config.json", b"{}"), r"/adapter_config\.json: must not exist, .*; merge the ada"),
    (change(model_type=...), "/config.json: model_type must name a family of models, but is None; download"),
    (change(model_type="nonsense"), "/config.json: must be readable by transformers, but .*nonsense"),
    (change(model_type="t5"), r"target\.path: transformers must have a language model .* none for 't5'"),
    (change(num_hidden_layers=10**9), r"num_hidden_layers must be .* to 10000, but is 1000000000"),
    (change(num_key_value_heads=3), "num_attention_heads must be a multiple of num_key_value_heads, but"),
    (both(write("generation_config.json", None), change(eos_token_id=500)), "/config.json: eos_token_id must be token"),
    (change(model_type="gemma3_text", use_bidirectional_attention=True), "a token must not attend to later tokens, bu"),
    (
        change(sliding_window=16),
        "transformers must implement the sliding windows of 'llama', but .* remove sliding_window",
    ),
    (change(model_type="evil", **EVIL_MODEL), "must be readable by transformers, but transformers reports ValueError"),
    (change(attn_implementation="evil/kernels"), "attn_implementation must be unset, because"),
    (
        change(rope_parameters=ROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor must be 1, because transf",
    ),
]
IN_TOKENIZER: Cases = [
    (write("tokenizer.json", None), f"target: {NOT_READ} ValueError"),
    (
        write("chat_template.jinja", GARBAGE),
        r"target/chat_template\.jinja: must be text in UTF-8, .* UnicodeDecodeError",
    ),
    (
        write("tokenizer.json", b'{"version": "1.0", "model":'),
        r"target/tokenizer\.json: must be an object of JSON in UTF-8",
    ),
    (change("tokenizer.json", model={"type": "x"}), r"target/tokenizer\.json: must be readable by tokenizers, but"),
    (write("special_tokens_map.json", b"[1]"), r"target/special_tokens_map\.json: must be an object of JSON in UTF-8"),
    (
        change("tokenizer_config.json", eos_token=5),
        r"target/tokenizer_config\.json: eos_token must be a text, but is 5;",
    ),
    (
        change("tokenizer_config.json", model_max_length="x"),
        r"tokenizer_config\.json: model_max_length must be a number",
    ),
    (change("tokenizer_config.json", **EVIL_TOKENIZER, tokenizer_class="Evil"), f"{OWN_CLASS} 'Evil'"),
    (change("tokenizer_config.json", **EVIL_TOKENIZER, tokenizer_class=None), OWN_CLASS),
]
IN_WEIGHTS: Cases = [
    (change(vocab_size=1000), r"embed_tokens\.weight must have the shape \(1000, 64\) .*260"),
    (change(num_hidden_layers=1), "target: the weights must have num_hidden_layers=1 .*, but have 2"),
    (change(hidden_act="nonsense"), r"config\.json: must describe a model that transformers .*nonsense"),
    (added(**{UP: torch.ones(96, 64).int()}), rf"{UP} must have one of the dtypes F64, .* but has I32"),
    (
        lambda target: (target / WEIGHTS).write_bytes((target / WEIGHTS).read_bytes()[:-100]),
        r"model\.safetensors: must be a complete safetensors file, but cannot be",
    ),
    (  # which a tied config ignores
        tensors(lambda old: {**old, LM_HEAD: old[EMBEDDINGS] + 1}),
        r"lm_head\.weight must equal model\.embed_tokens\.weight, .* but differs",
    ),
    (NO_NORM, r"the checkpoint must hold model\.norm\.weight, but does not; download it again"),
    (write(WEIGHTS, None), "weights must be safetensors files, but .* does not exist"),
    (index({"weight_map": {"a": "../a.safetensors"}}), r"must .* its own .*, but names '\.\./a"),
    (index({"weight_map": {"a": "b.safetensors"}}), rf"target: must have either model\.safetensors or {INDEX}"),
    (
        lambda target: save_tensors(target / "model_ema.safetensors", {UP: torch.ones(96, 64)}),
        rf"one file with each tensor, but {UP} is in {WEIGHTS} and model_ema\.safetensors, and vLLM reads both",
    ),
    (added(**{"lm_head.weight_scale": torch.ones(260, 1)}), UNKNOWN.format("lm_head", NO_METHOD)),
    (added(**{EMBEDDINGS[:-7] + ".weight_scale": torch.ones(260, 1)}), UNQUANTISED.format(*[EMBEDDINGS[:-7]] * 2)),
]
CASES: list[tuple[Callable[[Path], object], Cases]] = [
    (read_target_config, IN_CONFIG),
    (load_tokenizer, IN_TOKENIZER),
    (load_frozen_parts, IN_WEIGHTS),
    (load_whole, [(NO_NORM, r"the checkpoint must hold model\.norm\.weight, but does not"), (NAN, IS_NAN)]),
    (weights_fingerprint, [(index({}), f"/{INDEX}: must name the file of each tensor in weight_map, but does not")]),
    (
        load_last_layer,
        [(added(**{UP: torch.zeros(96, 64).to(torch.float8_e4m3fn)}), UNKNOWN.format(UP[:-7], NO_METHOD))],
    ),
    (
        place,
        [
            (change(quantization_config={"quant_method": "gptq", "bits": 4}), NOT_RUN.format("optimum|gptqmodel")),
            (write(MODEL_OPT_QUANTISATION, MODEL_OPT), NOT_RUN.format("modelopt")),  # transformers reads no scales
            (index({"weight_map": {"a": WEIGHTS}}), rf"{INDEX}: must have the entries metadata, but lacks metadata"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Answers every question with yes, as `yes | mtptrain ...` does. Returns the questions."""
    questions: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *question: questions.append(question) or "y")
    return questions


def write_evil_code(target: Path) -> Path:
    """Write code that leaves a file if it runs. Its path is absolute: transformers would run a copy elsewhere."""
    trace = target / "it_ran"
    (target / "evil.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nclass Evil: pass\n")
    return trace


@pytest.mark.parametrize(("read", "cases"), CASES, ids=[read.__name__ for read, _ in CASES])
def test_a_target_is_refused_by_name_and_its_code_does_not_run(
    tmp_path: Path, tiny_target: Path, read: Callable[[Path], object], cases: Cases, asked: list[object]
) -> None:
    read(tiny_target)
    for number, (damage, message) in enumerate(cases):
        target = shutil.copytree(tiny_target, tmp_path / str(number) / "target")
        damage(target)
        trace = write_evil_code(target)
        with pytest.raises(UserError, match=message):
            read(target)
        assert not trace.exists() and not asked


def test_the_code_of_a_target_that_transformers_knows_is_ignored(target: Path, asked: list[object]) -> None:
    for name, settings in (
        ("tokenizer_config.json", EVIL_TOKENIZER),
        ("config.json", EVIL_MODEL),
        ("generation_config.json", {"auto_map": {"AutoGenerationConfig": "evil.Evil"}}),
    ):
        change(name, **settings)(target)
    trace = write_evil_code(target)
    load_tokenizer(target)
    load_whole(target)
    assert not trace.exists() and not asked


def test_what_looks_like_damage_and_is_none_is_read(target: Path) -> None:
    write_config(target.parent, model_type="llama", max_position_embeddings=512, sliding_window=512)
    # ModelOpt describes its weights beside the config, and only layers of the target may be quantised.
    added(**{UP: torch.ones(96, 64).char()})(target)
    write(MODEL_OPT_QUANTISATION, MODEL_OPT)(target)
    assert check_weights(target)[UP].dtype == "I8" and load_frozen_parts(target).lm_head.dtype == torch.float32
    # consolidated.safetensors repeats the weights of a checkpoint in another layout, and transformers ignores it.
    single, shard = target / WEIGHTS, target / "model-00001-of-00001.safetensors"
    shutil.copy(single, target / "consolidated.safetensors")
    save_tensors(target / "mtp.safetensors", {"mtp.norm.weight": torch.ones(4)})
    assert weight_files(target) == [single]
    index({"weight_map": dict.fromkeys(load_file(single), shard.name)})(target)
    single.rename(shard)
    assert weight_files(target) == [shard]


def test_a_target_whose_norm_accelerate_leaves_off_the_devices_is_refused(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    cpu_offload(model.model.norm, CPU)
    with pytest.raises(UserError, match=r"target\.path: .*lm_head of the target must fit .*, but accelerate has"):
        Target(model)


def test_a_target_that_cannot_be_downloaded_is_refused_with_the_whole_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_hub = OSError("401 Client Error. (Request ID: R)\n\nRepository Not Found for url: https://h.co/x.\nLog in.")
    whole = r"401 Client Error\. .* Repository Not Found for url: \S+ Log in\."
    for error, reason in ((of_hub, whole), (HTTPError("403 Forbidden"), "403 Forbidden")):  # the second one of a proxy
        for name, find in (("snapshot_download", resolve_target), ("hf_hub_download", config_dir)):
            monkeypatch.setattr(f"mtptrain.target.hub.{name}", Mock(side_effect=error))
            message = rf"unlike 'no/such', but the hub reports \w+: {reason}; correct the path, log"
            with pytest.raises(UserError, match=message):
                find("no/such")
    with pytest.raises(UserError, match=r"target\.path: must be a model directory, but .* has no config\.json"):
        resolve_target(str(tmp_path))


def test_a_target_that_several_ranks_cannot_place_is_refused_before_it_is_loaded(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates eight GPUs, of which only the number and the memory size are read."""
    size, cuda = (tiny_target / WEIGHTS).stat().st_size, torch.device("cuda")  # in fp32
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    message = r"must fit one device if several ranks share a machine, .*; start one process, .*validation_prompts=0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match=message):
        check_placement(tiny_target, torch.float32, cuda)
    check_placement(tiny_target, torch.bfloat16, cuda)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_placement(tiny_target, torch.float32, cuda)
