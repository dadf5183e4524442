"""Tests `mtptrain run`: which stages it runs, on how many ranks, what it passes over, and how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from mtptrain import all_stages
from mtptrain.cli.program import stage_command
from mtptrain.cli.stages import STAGES, stages_of
from mtptrain.engines.table import has_format
from mtptrain.heads import HEADS
from mtptrain.heads.files import CHOICE
from mtptrain.settings.evaluation import ServingEngine
from mtptrain.stage_dir import STAGE, StageDir
from mtptrain.training.validation import measured_with
from mtptrain.utils.errors import UserError
from mtptrain.utils.files import read_sealed, save_tensors, write_sealed
from tests.conftest import PLAIN, Run, make_config
from tests.mtptrain.engines.conftest import target_config
from tests.programs import ROOT, run_ranks


def test_a_whole_run_has_the_stages_that_its_settings_need() -> None:
    answered = ("prompts.source=responses", "prompts.paths=[a.jsonl]", "head=eagle3", "head.draft_vocab_size=64")
    for overrides, names in (
        ((), "prompts hidden-states train acceptance export"),
        (answered, "responses prompts draft-vocab hidden-states train acceptance export"),
        (
            ("train.validation_prompts=0", "train.validate_every=500"),
            "prompts hidden-states train choose-head acceptance export",
        ),
    ):
        assert " ".join(name for name, _, _ in stages_of(make_config(*overrides))) == names


REPORT = {"tokens_per_step": 1.5, "prompts": 2, "acceptance_length": 1.6, "baselines": {}, "intervals": None}


def test_a_head_that_no_engine_has_a_class_for_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in HEADS.keys() - {"hydra"}:
        assert has_format(name)
    config = make_config("head=hydra", "head.start_from_target=false", f"acceptance.output_dir={tmp_path}")
    assert not has_format("hydra")
    speed = {"head": {"tokens_per_s": 30.0}, "none": {"tokens_per_s": 20.0}}
    write_sealed(tmp_path / "report.json", REPORT | {"speed": speed})
    all_stages.print_summary(config, [], [])  # a kill has left no page
    shown = capsys.readouterr().out
    assert f"{tmp_path}/report.json shows it\nno engine has a class for head hydra" in shown
    assert "1.50 times plain decoding" in shown
    (tmp_path / "report.html").touch()
    all_stages.print_summary(config, [], [])
    assert f"{tmp_path}/report.html shows it\n" in capsys.readouterr().out
    with pytest.warns(match="no engine has a class for hydra, so the run ends with its acceptance"):
        all_stages.check(config)


def test_a_run_ends_with_commands_for_the_engine_of_its_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for engine, command in ENDS.items():
        folder = tmp_path / engine
        config = make_config(f"acceptance.output_dir={folder}", f"export.engine={engine}", "head=draft_model")
        speed = {"head": {"tokens_per_s": 30.0}}
        folder.mkdir()
        write_sealed(folder / "report.json", REPORT | {"speed": speed})
        all_stages.print_summary(config, [], ["recipe=mtp"])
        _, _, commands = capsys.readouterr().out.partition("the command that serves it.\n")
        assert commands.partition("serving-check ")[2].partition("    #")[0] == command
        bench = f"{command} {AT_ONCE}" if engine == "mlx" else command
        assert commands.partition("serving-bench ")[2].partition("    #")[0] == bench


AT_ONCE = "'serving_bench.concurrency=[1]'"
ENDS = {"vllm": "recipe=mtp", "mlx": "recipe=mtp serving.engine=mlx", "sglang": ""}

ALONE = "train 1, hidden-states 1, choose-head 1, acceptance 1, prompts 1, engines 1"
RANKS = {  # for each number of GPUs and their memory
    (0, 0): ALONE,
    (1, 10**12): ALONE,
    (8, 10**12): "train 8, hidden-states 8, choose-head 1, acceptance 8, prompts 1, engines 2",
    (8, 10**6): "train 8, hidden-states 1, choose-head 1, acceptance 1, prompts 1, engines 2",
}


def test_a_stage_gets_a_rank_for_each_gpu_or_engine_and_one_if_the_target_does_not_fit_a_gpu() -> None:
    config, engines = make_config(), ("hidden_states.backend=vllm", "hidden_states.tensor_parallel_size=4")
    for (num_gpus, memory), expected in RANKS.items():
        gpu = SimpleNamespace(total_memory=memory)
        with (
            patch("torch.cuda.device_count", lambda num_gpus=num_gpus: num_gpus),
            patch("torch.cuda.get_device_properties", lambda _, gpu=gpu: gpu),
        ):
            ranks = {
                name: all_stages.num_ranks(name, STAGES[name].runner, config)
                for name in ("train", "hidden-states", "choose-head", "acceptance", "prompts")
            }
            ranks["engines"] = all_stages.num_ranks("hidden-states", "ranks", make_config(*engines))
        assert ", ".join(f"{name} {count}" for name, count in ranks.items()) == expected
    assert stage_command("prompts", [], 0) == [sys.executable, "-m", "mtptrain", "prompts"]
    command = stage_command("train", ["recipe=quickstart"], 8)
    assert command[-6:] == ["--nproc-per-node", "8", "-m", "mtptrain", "train", "recipe=quickstart"]


def test_a_stage_is_passed_over_only_if_it_is_newer_and_was_made_with_the_same_settings(tmp_path: Path) -> None:
    config = make_config(f"run_dir={tmp_path}")
    output = all_stages.output_of("prompts", STAGES["prompts"], config)
    assert output == tmp_path / "prompts/manifest.json" and not all_stages.is_finished("prompts", output, 0.0, config)
    StageDir(output.parent).record(config)
    assert not all_stages.is_finished("prompts", output, 0.0, config)
    output.write_text("{}")
    assert all_stages.is_finished("prompts", output, 0.0, config)
    assert not all_stages.is_finished("prompts", output, time.time() + 60, config)
    for damaged in ("{", '{"seed": 0}'):
        (output.parent / STAGE).write_text(damaged)
        assert not all_stages.is_finished("prompts", output, 0.0, config)
    moved = make_config(f"acceptance.output_dir={tmp_path}/a", f"export.output_dir={tmp_path}/b")
    found = [all_stages.output_of(name, STAGES[name], moved) for name in ("acceptance", "export")]
    assert found == [tmp_path / "a/report.json", tmp_path / "b/serving.json"]


CHANGED = {  # each setting, and the stages that are not finished once it has changed
    "+prompts.template_kwargs.thinking=false": "prompts hidden-states acceptance export",  # it was 0
    "prompts.max_train_tokens=7": "prompts hidden-states acceptance export",
    "head.ttt_steps=2": "hidden-states acceptance export",
    "hidden_states.batch_tokens=7": "hidden-states acceptance export",
    "train.lr=0.5": "acceptance export",
    "acceptance.num_prompts=7": "acceptance export",
    "export.dtype=float16": "export",
    "serving.tensor_parallel_size=2": "",
    "distributed_timeout_hours=1": "",
    "run_dir=elsewhere": "",  # as after the folder was moved
}


def test_a_changed_setting_repeats_only_the_stages_whose_output_it_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    config = make_config(f"run_dir={tmp_path}", "+prompts.template_kwargs.thinking=0")
    names = ("prompts", "hidden-states", "acceptance", "export")
    outputs = {name: all_stages.output_of(name, STAGES[name], config) for name in names}
    for name, output in outputs.items():
        StageDir(output.parent).record(config)
        output.touch()
        assert all_stages.is_finished(name, output, 0.0, config)
    for setting, repeated in CHANGED.items():
        changed = make_config(f"run_dir={tmp_path}", "+prompts.template_kwargs.thinking=0", setting)
        unfinished = [name for name in names if not all_stages.is_finished(name, outputs[name], 0.0, changed)]
        assert " ".join(unfinished) == repeated, setting
    published = make_config(f"run_dir={tmp_path}", "+prompts.template_kwargs.thinking=0", "export.hub=me/head")
    StageDir(outputs["export"].parent).record(published)
    assert not all_stages.is_finished("export", outputs["export"], 0.0, published), "an upload may have failed"


def test_choosing_among_kept_heads_is_not_repeated(tmp_path: Path) -> None:
    config = make_config(f"run_dir={tmp_path}")
    StageDir(tmp_path / "train").record(config)  # training writes it
    output = all_stages.output_of("choose-head", STAGES["choose-head"], config)
    assert not all_stages.is_finished("choose-head", output, 0.0, config)
    write_sealed(tmp_path / "train" / CHOICE, measured_with(config.acceptance, config.train.validation_new_tokens))
    assert all_stages.is_finished("choose-head", output, 0.0, config) and all_stages.chose_with(output, config)
    assert not all_stages.chose_with(output, make_config("acceptance.num_speculative_tokens=2"))


VARIANTS = {  # exit codes and errors
    "seed=0,1 run_dir=/none/${seed} export.output_dir=/none/x": (
        *(1, "export.output_dir: must differ between the variants of --multirun, but is /none/x for both (recipe="),
    ),
    "train.lr=1e-3,-1 run_dir=/none/${train.lr}": (1, "train.lr: must be a number of at least 0.0, but is -1.0"),
    "train.lrr=1,2": (2, "train.lrr: must be the name of a setting, but no setting has this name; did you mean"),
    "head=mtp,mtpp": (2, "head: must be one of dflash, "),
}


def test_variants_are_checked_before_the_first_begins() -> None:
    for overrides, (code, message) in VARIANTS.items():
        ended = run_ranks("mtptrain", ["run", "--multirun", "recipe=quickstart", *overrides.split()])
        assert (ended.returncode, ended.stdout) == (code, "")
        assert ended.stderr.startswith(f"error: {message}") and ended.stderr.count("\n") == 1


def test_a_run_ends_with_the_exit_code_of_the_stage_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    for code, ended in (("", None), ("sys.exit(75)", 75), ("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1)):
        monkeypatch.setattr(all_stages.program, "run_stage", lambda name, code=code: exec(code))
        with pytest.raises(SystemExit) if ended else nullcontext() as failure:
            all_stages.run_stage("prompts", [], 1)
        assert signal.getsignal(signal.SIGINT) is before or ended
        assert failure is None or failure.value.code == ended


def test_ctrl_c_is_left_to_the_stage(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the run, to its stage and to the ranks of the stage; the first says what it keeps."""
    program = f"""
import time
from pathlib import Path
from mtptrain import all_stages
from mtptrain.utils.distributed import become_ranks
from mtptrain.utils.errors import errors_as_lines

def stage(name):
    become_ranks(2)
    with errors_as_lines():
        Path({str(tmp_path)!r}, "began").touch()
        time.sleep(60)

all_stages.program.run_stage = stage
all_stages.run_stage("train", [], 1)
"""
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=alone, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (tmp_path / "began").exists():
        time.sleep(0.05)
    time.sleep(0.5)  # until both ranks wait
    os.killpg(process.pid, signal.SIGINT)
    line = "stopped by Ctrl-C; the same command starts again\n"
    assert (process.communicate(timeout=60)[1], process.returncode) == (line, 130)


FORKS = """
import os, signal, sys, torch
from mtptrain import all_stages
from mtptrain.cli import program

def run_stages(config, overrides, typed):
    for compute in (lambda: all_stages.planned_seconds(config), lambda: torch.ones(10**7).exp().sum()):
        if (process := os.fork()) == 0:
            torch.set_num_threads(all_stages.NUM_THREADS)
            compute()
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0
    print("computed, as typed:", *typed)

all_stages.run_stages = run_stages
program.run_stage("run")
"""


def test_what_is_checked_before_the_stages_starts_no_threads_for_which_forks_would_wait(tmp_path: Path) -> None:
    own = tmp_path / "my.yaml"
    own.write_text("recipe: quickstart_eagle3\nhead: {norm_before_fc: false, norm_output: false}\n")
    settings = [str(own), f"run_dir={tmp_path}", "export.engine=openvino"]
    two = os.environ | {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "1000"}
    command = [sys.executable, "-c", FORKS, *settings]
    ended = subprocess.run(
        command, cwd=ROOT, env=two, capture_output=True, text=True, timeout=120, start_new_session=True
    )
    assert f"computed, as typed: {' '.join(settings)}\n" in ended.stdout, ended.stderr


MISSING = "serving.engine=vllm serving.program=/none/python"
STREAMED = "train.stream=true train.epochs=1"
REFUSED = {
    "head.start_from_target=true head.init_from=x": "head.start_from_target: must be false when head.init_from is set",
    "head.start_from_target=false head.init_from=/none": "head.init_from: must be a local directory, ",
    "acceptance.prompts_file=/none.jsonl": "acceptance.prompts_file: must be a jsonl file, but /none.jsonl does",
    f"export.output_dir={ROOT}/docs": "export.output_dir: ",
    "export.engine=openvino head=medusa": "for it; set export.engine=vllm, or train head=dflash",
    "export.engine=transformers head=eagle3 target.path={gemma}": "for it; set export.engine=sglang",
    "export.engine=llama_cpp head=eagle3 target.path={gemma}": "has been compared with ours; set export.engine=sglang",
    "head=eagle3 target.path={gemma}": "streams; set export.engine=sglang, or train head=eagle or medusa or mtp",
    f"{MISSING} hidden_states.backend=vllm": "with vLLM, but /none/python does not exist; run `make .venv-vllm/",
    f"{MISSING} prompts.source=responses responses.engine=vllm": "PYTHON, or set responses.engine=transformers",
    "+deepspeed.gradient_clipping=0.5": "deepspeed.gradient_clipping: must not be set, but is 0.5",
    **{f"serving.engine={each} serving.program=/none": ", or leave serving.program out" for each in ServingEngine},
    STREAMED: "train.stream: must be false for a whole run, which runs one stage after the other",
}


def test_what_a_later_stage_would_refuse_is_refused_before_the_first(tmp_path: Path) -> None:
    target_config("gemma3_text").save_pretrained(tmp_path)
    for settings, message in REFUSED.items():
        with pytest.raises(UserError, match=re.escape(message)):
            all_stages.check(make_config(*settings.format(gemma=tmp_path).split()))
    with patch("mtptrain.all_stages.started_stage", lambda: "plan"):
        all_stages.check(make_config(*STREAMED.split()))
        with pytest.warns(match="hidden_states.backend=transformers"):
            all_stages.check(make_config(*MISSING.split(), "hidden_states.backend=vllm"))
        (other := tmp_path / "head").mkdir()
        (other / "config.json").write_text("{}")
        save_tensors(other / "model.safetensors", {"a": torch.zeros(1)})
        with pytest.raises(UserError, match=r"head\.init_from: must hold head\.json, a model with an MTP layer"):
            all_stages.check(make_config(f"head.init_from={other}"))
        (tmp_path / "gptq").mkdir()
        quantised = target_config().to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        (tmp_path / "gptq/config.json").write_text(json.dumps(quantised))
        gptq = make_config(f"target.path={tmp_path}/gptq", "head=eagle", "head.start_from_target=false")
        with pytest.warns(match=r"must be able to run the quantised weights .* or run this target in vLLM only"):
            all_stages.check(gptq)
        save_tensors(tmp_path / "gptq/model.safetensors", {"lm_head.qweight": torch.zeros(8, 260).int()})
        with pytest.raises(UserError, match=r"lm_head must be unquantised, .* has gptq and no scheme for it; choose"):
            all_stages.check(gptq)
        with pytest.raises(UserError, match="to export head eagle3 for vllm"):
            all_stages.check(make_config("head=eagle3", f"target.path={tmp_path}"))
    servers = ("hidden_states.backend=vllm", "hidden_states.servers=[http://a:1]", "responses.url=http://b:1/v1")
    with patch("mtptrain.engines.process.made_python", lambda _: tmp_path):
        all_stages.check(make_config(*servers, "prompts.source=responses"))
    with pytest.warns(match="train.lr: heads learn at 1e-4 to 5e-3"):
        all_stages.check(make_config("train.lr=0.02"))
    with patch("torch.cuda.device_count", lambda: 3), pytest.raises(UserError, match="micro_batches_per_step"):
        all_stages.check(make_config("train.micro_batches_per_step=8"))


@pytest.mark.slow
def test_a_whole_run_ends_with_a_table_and_variants_repeat_only_what_differs(tiny_run: Run, tmp_path: Path) -> None:
    shutil.copytree(tiny_run[0], tmp_path / "run")
    before = {path.name for path in ROOT.iterdir()}
    overrides = ["recipe=quickstart", *tiny_run[1], *PLAIN]
    in_run_dir = ["run", *overrides, f"run_dir={tmp_path}/run"]
    first = run_ranks("mtptrain", in_run_dir)
    assert first.returncode == 0, first.stderr[-3000:]
    assert stages_run(first.stdout) == ["train:", "acceptance:", "export:"]
    assert first.stdout.count("done before") == 2  # the prompts and hidden states that were copied
    assert "tokens per step" in first.stdout and f"{tmp_path}/run/export/vllm has the head" in first.stdout
    report = (tmp_path / "run/acceptance/report.json").read_bytes()
    assert run_ranks("mtptrain", in_run_dir).stdout.count("done before") >= 3
    assert (tmp_path / "run/acceptance/report.json").read_bytes() == report
    for number in (2, 3):
        (tmp_path / f"{number}").mkdir()
        for stage in ("prompts", "hidden_states", "train"):
            (tmp_path / f"{number}" / stage).symlink_to(tmp_path / "run" / stage)
    more = ["acceptance.num_prompts=2,3", f"run_dir={tmp_path}/${{acceptance.num_prompts}}"]
    several = run_ranks("mtptrain", ["run", "--multirun", *overrides, *more])
    assert several.returncode == 0, several.stderr[-3000:]
    assert stages_run(several.stdout) == 2 * ["acceptance:", "export:"]
    reports = [read_sealed(tmp_path / f"{number}/acceptance/report.json", "") for number in (2, 3)]
    assert [report["prompts"] for report in reports] == [2, 3]
    assert before == {path.name for path in ROOT.iterdir()}


def stages_run(output: str) -> list[str]:
    return [line.split()[2] for line in output.splitlines() if line.startswith("== mtptrain ")]
