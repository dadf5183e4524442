"""Tests that the wheel is complete, and that programs run from any folder, both installed and from a checkout."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from mtptrain.cli.stages import STAGES
from tests.conftest import TINY_SETTINGS, write_text_files

ROOT = Path(__file__).parents[1]
PACKAGES = ("mtptrain", "data_prep", "eval", "recipes")
DEMO_TARGET = ("config.json", "tokenizer.json", "model.safetensors")
WHERE = "import mtptrain, mtptrain.config as config; print(mtptrain.__file__, config.RECIPES, sep='\\n')"


def run(*command: str | Path, cwd: Path, pythonpath: Path | None = None) -> str:
    """Runs a command without this checkout on its Python path, and returns its standard output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if pythonpath:
        environment["PYTHONPATH"] = str(pythonpath)
    result = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the files to package, so that building leaves no files here and packages no stale ones."""
    directory = tmp_path_factory.mktemp("checkout")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    return directory


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(checkout, output_dir / "source")  # setuptools leaves build/ in the folder that it builds
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", output_dir, source, cwd=output_dir)
    [built] = output_dir.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of a clean environment that has the wheel and can import this environment's dependencies."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    options = ("--quiet", "--no-index", "--no-deps")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=directory)
    [site_packages] = directory.glob("lib/python*/site-packages")
    # Python searches a path listed in a .pth file for packages, but ignores .pth files in that path, such as those of
    # an editable install.
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    return python


def test_the_wheel_holds_every_module_every_recipe_and_the_demo_target(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        ("" if package == "mtptrain" else "mtptrain/") + path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for suffix in ("py", "yaml", "jinja")
        for path in (ROOT / package).rglob(f"*.{suffix}")
    }
    assert files | {f"mtptrain/demo_target/{name}" for name in DEMO_TARGET} <= names
    assert {name.split("/")[0] for name in names} == {"mtptrain", "mtptrain-0.2.0.dist-info"}


@pytest.mark.slow
def test_an_installed_run_ends_with_an_exported_head(installed: Path, tiny_target: Path, tmp_path: Path) -> None:
    package, recipes = map(Path, run(installed, "-c", WHERE, cwd=Path("/")).split())
    assert package.is_relative_to(installed.parents[1]) and recipes == package.parent / "recipes"
    settings = [*TINY_SETTINGS, f"target.path={tiny_target}", "train.compile=false", f"run_dir={tmp_path}/run"]
    files = write_text_files(tmp_path / "files")
    command = [installed.with_name("mtptrain"), "run", "recipe=quickstart", *settings, f"prompts.paths=[{files}]"]
    output = run(*command, cwd=Path("/"))
    assert "acceptance length" in output and (tmp_path / "run/export/vllm/model.safetensors").is_file()
    assert [stage for stage in STAGES if f"== mtptrain {stage}:" in output] == [
        *("prompts", "hidden-states", "train", "acceptance", "export")
    ]
    provenance = json.loads((tmp_path / "run/prompts/stage.json").read_text())
    assert provenance["argv"][0] == str(installed.with_name("mtptrain"))


@pytest.mark.slow
def test_a_bare_checkout_runs_from_any_folder(checkout: Path, tiny_target: Path, tmp_path: Path) -> None:
    package, recipes = map(Path, run(sys.executable, "-c", WHERE, cwd=Path("/"), pythonpath=checkout).split())
    assert package == checkout / "mtptrain" / "__init__.py"
    assert recipes == checkout / "recipes"

    settings = [*TINY_SETTINGS, f"target.path={tiny_target}", f"prompts.paths=[{write_text_files(tmp_path / 'files')}]"]
    command = ["recipe=quickstart", *settings, f"run_dir={tmp_path}/run"]
    run(sys.executable, "-m", "mtptrain", "prompts", *command, cwd=Path("/"), pythonpath=checkout)
    assert (tmp_path / "run/prompts/stage.json").is_file()
