"""Tests that an export holds the right tensors, proposes as the head, and gets its name once it is complete."""

import json
import shlex
import shutil
from base64 import b64decode
from copy import deepcopy
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from mtptrain.cli.stages import settings_of
from mtptrain.config import PipelineConfig
from mtptrain.data.prompt_files import Documents, training_data_facts
from mtptrain.decoding.export_proof import DRAFTS, ROUNDS, propose, prove_equal_proposals, random_documents
from mtptrain.engines import mimo
from mtptrain.engines.table import engine_of, format_for
from mtptrain.export import check_tensors, export, mode_note, model_card, reload_head, write_head
from mtptrain.heads.dspark import DsparkHead
from mtptrain.heads.files import TARGET_WEIGHTS, build_head, save_head
from mtptrain.heads.medusa import MedusaHead
from mtptrain.heads.mtp import MtpHead
from mtptrain.run_dir import Run
from mtptrain.stage_dir import StageDir
from mtptrain.target.families import read_target_config
from mtptrain.target.files import TargetFiles
from mtptrain.target.frozen_parts import load_frozen_parts
from mtptrain.target.hub import weights_fingerprint
from mtptrain.target.loading import load_target
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import file_sha256, read_sealed, write_json, write_sealed
from tests.conftest import GENERATION_TEMPLATE, make_config, make_tokenizer
from tests.mtptrain.engines.conftest import random_head
from tests.sealed import MANIFEST, seal_again, seal_prompts

EAGLE3 = ("head=eagle3", "head.capture_layers=[1,3]", "head.draft_vocab_size=96")
EXPORTS = {
    "vllm, medusa": ("vllm", ("head=medusa", "head.num_layers=2"), "MedusaModel", "medusa"),
    "sglang, eagle3": ("sglang", EAGLE3, "LlamaForCausalLMEagle3", "EAGLE3"),
    "transformers, mtp": ("transformers", (), "LlamaForCausalLM", "use_mtp"),
}


def trained(run_dir: Path, target_dir: Path, *overrides: str) -> PipelineConfig:
    """The config of a run that has a head of random weights and its measured acceptance."""
    config = make_config(f"run_dir={run_dir}", f"target.path={target_dir}", *overrides)
    (run_dir / "acceptance").mkdir(parents=True)
    head = random_head(config.head, read_target_config(target_dir))
    facts = {TARGET_WEIGHTS: weights_fingerprint(target_dir)}
    save_head(run_dir / "train/best", head.to(torch.bfloat16).state_dict(), config.head, facts)
    report = {
        "head_sha256": file_sha256(run_dir / "train/best/head.safetensors"),
        "acceptance_length": 2.5,
        "acceptance_rate_at": [0.75, 0.5, 0.25],
        "num_speculative_tokens": 3,
        "temperature": 0.7,
        "sample_drafts": True,
        "prompts": 4,
        "dtype": "float32",
        "as_served": {"as_served": {"repetition_penalty": 1.05}},
        "baselines": {"as_served": {"acceptance_length": 2.25}},
    }
    write_sealed(run_dir / "acceptance/report.json", report)
    return config


@pytest.mark.parametrize("case", EXPORTS)
def test_an_export_holds_all_that_serving_needs(
    tmp_path: Path, deep_target: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, overrides, architecture, method = EXPORTS[case]
    config = trained(tmp_path / "run", deep_target, f"export.engine={engine}", *overrides)
    export(Run(config))
    directory = tmp_path / "run/export" / engine
    assert f"written to {directory};" in capsys.readouterr().out, "the path is whole in a pipe too"
    form = format_for(engine, config.head, read_target_config(deep_target))
    assert {"config.json", "README.md", "serving.json", "stage.json", form.weights_name} <= {
        path.name for path in directory.iterdir()
    }
    assert read_sealed(directory / "serving.json", "export again", files=None) == {
        "engine": engine,
        "architecture": architecture,
        "method": method,
        "speculative_settings": {},
        "holds_target": False,
        "head_sha256": file_sha256(tmp_path / "run/train/best/head.safetensors"),
        TARGET_WEIGHTS: weights_fingerprint(deep_target),
    }
    readme = (directory / "README.md").read_text()
    dtype = "" if engine == "transformers" else " --dtype float32"  # else vLLM and SGLang make it 16 bits
    assert form.launch(str(deep_target), directory.resolve(), 3) + f"{dtype}\n```" in readme
    assert "Acceptance length 2.500 (bonus token included), rate by position 0.750, 0.500, 0.250" in readme
    assert "Requests that leave settings out (repetition_penalty 1.05): 2.250." in readme
    assert all(note in readme for note in form.notes())
    assert ('sampled: add `"draft_sample_method"' in readme) == (engine == "vllm" and method != "medusa")
    assert {path.name for path in directory.parent.iterdir()} == {engine}, "nothing temporary is left"
    tensors = load_file(directory / form.weights_name)
    trained_head = load_file(tmp_path / "run/train/best/head.safetensors")
    assert all(torch.equal(tensor, trained_head[name]) for name, tensor in form.state(tensors).items())
    if "d2t" in tensors:
        assert tensors["d2t"].dtype is torch.int64 and int(tensors["t2d"].sum()) == 96


def test_only_a_head_that_is_better_than_the_one_that_it_started_from_is_exported_if_asked(
    tmp_path: Path, deep_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    better = ("head.init_from=x", "acceptance.baselines=[initial]", "export.only_if_better=true")
    run = Run(trained(tmp_path / "run", deep_target, *better, "export.engine=vllm"))
    report, exported = tmp_path / "run/acceptance/report.json", tmp_path / "run/export/vllm"
    with pytest.raises(UserError, match=r"must have this head and the one of head.init_from .*run mtptrain acceptance"):
        export(run)
    for length, is_better in ((2.5, False), (3.0, False), (2.4, True), (None, True)):
        seal_again(report, as_served={}, baselines={"initial": {"acceptance_length": length}})
        export(run)
        refused = f"not exported: acceptance length {length or 1:.3f} before and 2.500 after, 4 prompts; export.only_if"
        assert exported.is_dir() == is_better != (refused in capsys.readouterr().out)
        shutil.rmtree(exported, ignore_errors=True)


def test_the_mask_token_is_that_of_the_prompts_and_the_readme_tells_what_the_head_was_trained_on(
    tmp_path: Path, deep_target: Path
) -> None:
    overrides = ("export.engine=vllm", "head=dflash", "head.capture_layers=[1,2]", "prompts=conversations")
    config, best = trained(tmp_path / "run", deep_target, *overrides), tmp_path / "run/train/best"
    config.stage_dir("prompts").mkdir()
    seal_prompts(config.stage_dir("prompts"), replace(MANIFEST, unused_token=7))
    with pytest.raises(UserError, match=r"head\.mask_token_id \(259 there, 7 here\); set head\.mask_token_id=259"):
        export(Run(config))
    documents = Documents.from_list([(0, [9, 8, 256, 8, 256], [0, 1, 1, 0, 1]), (1, [9, 256], [1, 1])])
    data = {"source": "responses", "sampling": {"temperature": 0.7}, **training_data_facts(documents)}
    seal_again(best / "head.json", head=asdict(config.head) | {"mask_token_id": 7}, data=data)
    export(Run(config))
    described, readme = ((tmp_path / "run/export/vllm" / name).read_text() for name in ("config.json", "README.md"))
    assert json.loads(described)["dflash_config"]["mask_token_id"] == 7
    assert "2 documents (responses) with 7 tokens, of which 5 are supervised. The longest has 5 tokens" in readme
    assert "end with `<|end|>` (256), where a server must stop." in readme and "with temperature 0.7." in readme


def test_the_mode_of_the_chat_template_is_that_of_the_training_and_stands_in_the_readme(
    tmp_path: Path, deep_target: Path
) -> None:
    target = Path(shutil.copytree(deep_target, tmp_path / "target"))
    make_tokenizer(GENERATION_TEMPLATE + "{{ enable_thinking }}").save_pretrained(target)
    write_json(target / "chat_template.json", {"chat_template": "another"})
    overrides = ("prompts=conversations", "+prompts.template_kwargs={enable_thinking: false}")
    config = trained(tmp_path / "run", target, "export.engine=vllm", *overrides)
    export(Run(config))
    readme = (tmp_path / "run/export/vllm/README.md").read_text()
    assert """`"chat_template_kwargs": {"enable_thinking": false}`""" in readme
    assert "differs from that of chat_template.json, taken by processors" in readme and "--chat-template-file" in readme
    head = random_head(config.head, read_target_config(target))
    facts = {TARGET_WEIGHTS: weights_fingerprint(target), "template_kwargs": "{}"}
    save_head(tmp_path / "run/train/best", head.state_dict(), config.head, facts)
    with pytest.raises(
        ValueError, match=r'json: template_kwargs must be {"enable_thinking": false}, but is {}; set no'
    ):
        export(Run(config))
    files = TargetFiles(target, template_kwargs={"user": "O'Brien"})
    mode = json.dumps({"user": "O'Brien"})
    assert shlex.split(mode_note(files, engine_of("vllm")).split("`")[5]) == ["--default-chat-template-kwargs", mode]
    assert "Pass them to `apply_chat_template`." in mode_note(files, engine_of("transformers"))
    files.config.model_type = "gpt_oss"
    assert "vLLM reads only `reasoning_effort` of them" in mode_note(files, engine_of("vllm"))
    assert "default-chat-template-kwargs" not in mode_note(files, engine_of("vllm"))
    assert "chat_template_kwargs" in mode_note(files, engine_of("sglang"))
    files = TargetFiles(target)
    files.config.model_type = "gpt_oss"
    assert any("openai_harmony" in each for each in engine_of("vllm").notes(files))


def test_what_is_refused_is_refused_before_anything_is_read_or_written(tmp_path: Path, deep_target: Path) -> None:
    overrides = ("export.engine=sglang", "head=eagle3", "head.capture_layers=[1,4]")
    config = make_config(f"run_dir={tmp_path}/run", f"target.path={deep_target}", *overrides)
    with pytest.raises(ValueError, match=r"head\.capture_layers: must be below the target's last layer"):
        export(Run(config))
    config = make_config(f"run_dir={tmp_path}/run", f"target.path={deep_target}", "head=hydra")
    with pytest.raises(ValueError, match=r"head: must be one of .* to export .*, but is hydra: no engine has a"):
        export(Run(config))
    config = make_config(f"run_dir={tmp_path}/dflash", f"target.path={deep_target}", "export.engine=vllm")
    with pytest.raises(ValueError, match="vLLM must not infer a method other than"):
        export(Run(config))
    assert not list(tmp_path.iterdir())


def test_the_readme_shows_the_acceptance_of_this_head_from_wherever_its_report_was_written(
    tmp_path: Path, deep_target: Path
) -> None:
    config, readme = trained(tmp_path / "run", deep_target), tmp_path / "run/export/vllm/README.md"
    shutil.move(tmp_path / "run/acceptance", tmp_path / "measured")
    export(Run(config))
    assert "Not measured: run `mtptrain acceptance`" in readme.read_text()
    config.acceptance.output_dir = str(tmp_path / "measured")
    export(Run(config))
    assert "Acceptance length 2.500" in readme.read_text()


def test_an_export_that_would_propose_otherwise_is_refused_and_leaves_nothing(
    tmp_path: Path, deep_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained(tmp_path / "run", deep_target, "export.engine=sglang")
    monkeypatch.setattr(mimo, "swap_halves", lambda weight: weight.roll(1, 1))  # not its own inverse
    message = "the exported head must propose the same tokens as the trained one, as surely, but proposes"
    with pytest.raises(UserError, match=message):
        export(Run(config))
    assert not list((tmp_path / "run/export").iterdir())


def test_an_export_shows_no_path_of_the_home(
    tmp_path: Path, deep_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_dir = shutil.copytree(deep_target, tmp_path / "target")
    settings = json.loads((target_dir / "tokenizer_config.json").read_text())
    write_json(target_dir / "tokenizer_config.json", settings | {"name_or_path": str(target_dir)})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["export", f"export.output_dir={tmp_path}/heads/served"])
    config = trained(
        tmp_path / "run", target_dir, f"export.output_dir={tmp_path}/heads/served", "export.engine=transformers"
    )
    export(Run(config))
    texts = {path.name: path.read_text() for path in (tmp_path / "heads/served").glob("*.[jmy]*")}
    assert {"README.md", "config.json", "stage.json", "serving.json"} <= texts.keys()
    assert [name for name, text in texts.items() if str(tmp_path) in text] == []
    assert "~/heads/served" in texts["README.md"] and "`~` is the home directory" in texts["README.md"]
    assert StageDir(tmp_path / "heads/served").was_made_with(config, settings_of("export")), (
        "mtptrain run need not export again"
    )
    export(Run(config))


def test_an_export_reads_no_decoder_layer_of_the_target(tmp_path: Path, deep_target: Path) -> None:
    """A 70B target would take 282 GB in fp32. Its embeddings and lm_head take 13 GB, in bf16 and fp32 together."""
    target_dir = Path(shutil.copytree(deep_target, tmp_path / "target"))
    tensors = load_file(target_dir / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.")}
    save_file(without, target_dir / "model.safetensors")
    with pytest.raises(ValueError, match=r"the checkpoint must hold model\.layers"):
        load_target(target_dir, torch.float32, torch.device("cpu"))
    for name, overrides in (("mtp", ["export.engine=vllm"]), ("eagle3", ["export.engine=sglang", *EAGLE3])):
        config = trained(tmp_path / name, target_dir, *overrides)
        export(Run(config))
        assert (config.stage_dir("export") / config.export.engine / "serving.json").is_file()


CONFIG = MtpHead.Config()


@pytest.fixture
def exported(tmp_path: Path, tiny_target: Path) -> Path:
    torch.manual_seed(0)
    form = format_for("vllm", CONFIG, read_target_config(tiny_target))
    write_head(tmp_path / "vllm", form, build_head(CONFIG, form.target).state_dict())
    return tmp_path / "vllm"


def test_the_reloaded_head_proposes_the_same_and_a_damaged_one_does_not(exported: Path, tiny_target: Path) -> None:
    torch.manual_seed(0)
    form, parts = format_for("vllm", CONFIG, read_target_config(tiny_target)), load_frozen_parts(tiny_target)
    head = build_head(CONFIG, form.target).eval()
    assert prove_equal_proposals(parts, head, reload_head(exported, form)) == 8 * (ROUNDS + 1) * DRAFTS
    tensors = load_file(exported / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].roll(64, 1)  # puts the columns of the hidden state first
    save_file(tensors, exported / "model.safetensors")
    with pytest.raises(UserError, match="must propose the same tokens as the trained one"):
        prove_equal_proposals(parts, head, reload_head(exported, form))


def test_the_proof_compares_every_depth_that_a_head_is_bound_to_and_confidences(tiny_target: Path) -> None:
    target_config = read_target_config(tiny_target)
    parts = load_frozen_parts(tiny_target).to(torch.device("cpu"), torch.float32)
    head = random_head(MedusaHead.Config(ttt_steps=5), target_config).eval()
    document = random_documents(head, parts)
    before = propose(head, parts, *document).tokens
    with torch.no_grad():
        head.blocks[4].layers[0].weight.neg_()
    after = propose(head, parts, *document).tokens
    assert before.shape == (8, ROUNDS + 1, 5) and torch.equal(before[..., :-1], after[..., :-1])
    assert not torch.equal(before[..., -1], after[..., -1])
    head = random_head(DsparkHead.Config(capture_layers=[1, 2], ttt_steps=3), target_config).eval()
    assert prove_equal_proposals(parts, head, deepcopy(head)) > 100
    other = deepcopy(head)
    assert isinstance(other, DsparkHead)
    other.calibrate(1.5, -1)
    with pytest.raises(UserError, match="must propose the same tokens as the trained one, as surely, but"):
        prove_equal_proposals(parts, head, other)


def test_a_missing_unknown_or_misshapen_tensor_is_an_error(exported: Path, tiny_target: Path) -> None:
    whole, form = load_file(exported / "model.safetensors"), format_for("vllm", CONFIG, read_target_config(tiny_target))
    for tensors, message in (
        ({name: x for name, x in whole.items() if name != "hnorm.weight"}, r"hnorm\.weight must be .* but is absent"),
        (whole | {"extra.weight": torch.zeros(3)}, r"extra\.weight must be absent, but is of shape \(3,\)"),
        (whole | {"fc.weight": torch.zeros(64, 64)}, r"fc\.weight must be of shape \(64, 128\), but is of shape"),
    ):
        save_file(tensors, exported / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            check_tensors(exported, form)


class Hub(ThreadingHTTPServer):
    """Answers what huggingface_hub asks when it makes a repository and uploads files to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files: dict[str, bytes] = {}
        self.is_full = False


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = 200, dict[str, object]()
        if self.headers["Authorization"] != "Bearer hf_right":
            status = 401
        elif self.path.endswith("/create"):
            answer = {"url": "https://huggingface.co/user/name"}
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            answer = {
                "files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]
            }
        elif "/commit/" in self.path and self.server.is_full:
            status = 403
        elif "/commit/" in self.path:
            lines = [json.loads(line)["value"] for line in body.splitlines()]
            self.server.files |= {each["path"]: b64decode(each["content"]) for each in lines if "path" in each}
            answer = {"commitUrl": "https://huggingface.co/user/name/commit/1", "commitOid": "1"}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


def test_an_export_is_kept_if_the_hub_refuses_it_and_uploaded_by_the_same_command(
    tmp_path: Path, deep_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    config, hub = trained(tmp_path / "run", deep_target, "export.hub=user/name"), Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    Thread(target=hub.serve_forever, daemon=True).start()
    directory = tmp_path / "run/export/vllm"
    for token, hub.is_full, reason in (("", False, "401"), ("hf_wrong", False, "401"), ("hf_right", True, "403")):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UserError, match=rf"export\.hub: .* the hub reports .*{reason}.* is kept in {directory}"):
            export(Run(config))
        assert (directory / "serving.json").is_file()
    hub.is_full = False
    export(Run(config))
    assert hub.files == {path.name: path.read_bytes() for path in directory.iterdir()}
    assert capsys.readouterr().out.endswith("/user/name\n")
    card = ModelCard(hub.files["README.md"].decode())
    assert (card.data.library_name, card.data.base_model) == ("mtptrain", None)
    assert "Acceptance length 2.500" in card.text and "hf download user/name --local-dir name\nvllm serve" in card.text
    config.target.path = "meta-llama/Llama-3.2-1B"
    assert "base_model: meta-llama/Llama-3.2-1B\n" in model_card(config, TargetFiles(deep_target, config.target.path))
    with pytest.raises(UserError, match="vLLM must not infer a method other than"):
        export(Run(make_config(f"run_dir={tmp_path}/run", f"target.path={deep_target}", "export.hub=user/my-eagle3")))
    with pytest.raises(UserError, match=r"export\.hub: must be the name of a repository, USER/NAME, but is 'name'"):
        make_config("export.hub=name")
    monkeypatch.setattr("mtptrain.settings.evaluation.get_token", lambda: None)
    with pytest.raises(
        UserError, match=r"export\.hub: a token .* to upload to user/name, but none is; log in with `hf"
    ):
        make_config("export.hub=user/name")  # before hours of other stages
    hub.shutdown()
