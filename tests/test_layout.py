"""Tests the layout of the packages: the direction of imports, and dependencies.

Imports point one way, data_prep -> mtptrain <- eval. Programs are started, never imported. No package imports
`benchmarks`, which is not installed.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from mtptrain.cli.stages import STAGES

ROOT = Path(__file__).parents[1]
PARTS = [
    "utils",
    "stage_dir",
    "settings",
    "config",
    "cli",
    "target",
    "heads",
    "data",
    "decoding",
    "engines",
    "hidden_states",
    "training",
    "init_from",
    "run",
    "planning",
    "train",
    "export",
    "all_stages",
    "__main__",
]
"""The parts of `mtptrain/`. Each may import only from those before it."""
APART, DESCRIPTION = ("init_from", "engines"), "mtptrain.engines.exports"
"""Nothing that writes exports is imported to read a head, nor the other way round; but both read what an export is."""
FORBIDDEN = {
    "mtptrain": {"data_prep", "eval", "benchmarks", "tests"},
    "data_prep": {"eval", "benchmarks", "tests"},
    "eval": {"data_prep", "benchmarks", "tests"},
    "benchmarks": {"tests"},
}
LINES = {
    "mtptrain": 1643,
    "mtptrain/cli": 423,
    "mtptrain/data": 1108,
    "mtptrain/decoding": 1807,
    "mtptrain/engines": 4268,
    "mtptrain/heads": 3282,
    "mtptrain/hidden_states": 2036,
    "mtptrain/init_from": 1268,
    "mtptrain/planning": 957,
    "mtptrain/settings": 1181,
    "mtptrain/target": 2706,
    "mtptrain/training": 2980,
    "mtptrain/utils": 1272,
    "data_prep": 3090,
    "eval": 2614,
    "slurm": 161,
    "benchmarks": 1015,
    "tests": 27151,
}
"""The most lines of Python in each room. Who needs more makes room elsewhere; who has made room lowers the number."""
IS_SCRIPT = re.compile(r"^if __name__ == ['\"]__main__['\"]:", re.MULTILINE)


def modules(root: Path) -> dict[str, Path]:
    """Returns the path of every module of the packages, by dotted name."""
    found: dict[str, Path] = {}
    for package in FORBIDDEN:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and dotted name of everything that a module imports, also inside functions.

    `from a import b` yields a and a.b.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[: None if path.name == "__init__.py" else -1]
            base = [*package[: len(package) - node.level + 1], node.module] if node.level else [node.module]
            source = ".".join(part for part in base if part)
            yield node.lineno, source
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def import_violations(root: Path) -> list[str]:
    """Returns imports in a forbidden direction and imports of programs, as `path:line: reason`."""
    all_modules = modules(root)
    stages = {stage.program for stage in STAGES.values()}
    programs = {name for name, path in all_modules.items() if name in stages or IS_SCRIPT.search(path.read_text())}
    violations = []
    for name, path in all_modules.items():
        package = name.split(".")[0]
        for line, imported in imports(name, path):
            top = imported.split(".")[0]
            if top in FORBIDDEN[package]:
                violations.append(f"{path.relative_to(root)}:{line}: {package} must not import {top}")
            elif imported in programs:
                violations.append(
                    f"{path.relative_to(root)}:{line}: {imported} is a program, which no module may import"
                )
    return list(dict.fromkeys(violations))


def test_imports_point_one_way_and_programs_are_never_imported() -> None:
    assert len(modules(ROOT)) > 10
    assert import_violations(ROOT) == []


def upward_imports(root: Path) -> list[str]:
    """Returns imports of one part of `mtptrain/` from a later one in `PARTS`, as `path:line: reason`."""
    found = []
    for name, path in modules(root).items():
        package, part = [*name.split("."), ""][:2]
        if package != "mtptrain" or not part:
            continue
        for line, imported in imports(name, path):
            package, other = [*imported.split("."), ""][:2]
            is_apart = {part, other} == set(APART) and not imported.startswith(DESCRIPTION)
            if package == "mtptrain" and other in PARTS and (PARTS.index(other) > PARTS.index(part) or is_apart):
                found.append(f"{path.relative_to(root)}:{line}: {part} must not import {other}")
    return list(dict.fromkeys(found))


def circles(root: Path) -> list[list[str]]:
    """Returns a circle of modules that import each other, if there is one. Imports inside functions count."""
    all_modules = modules(root)
    graph = {
        name: {each for _, each in imports(name, path) if each in all_modules} - {name}
        for name, path in all_modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


def test_no_import_of_mtptrain_runs_upward_or_in_a_circle() -> None:
    assert {name.split(".")[1] for name in modules(ROOT) if name.startswith("mtptrain.")} == set(PARTS)
    assert upward_imports(ROOT) == []
    assert circles(ROOT) == []


def test_the_top_of_mtptrain_has_the_config_the_run_three_programs_and_folders() -> None:
    files = {path.name for path in (ROOT / "mtptrain").glob("*.py")}
    programs = {"train.py", "export.py", "all_stages.py"}
    assert files == {"__init__.py", "__main__.py", "config.py", "stage_dir.py", "run.py"} | programs


def lines_of_rooms(root: Path) -> Counter[str]:
    """Returns the lines of Python in each room: a folder of `mtptrain/`, the modules beside them, another package."""
    lines: Counter[str] = Counter()
    for room in sorted({room.split("/")[0] for room in LINES}):
        for path in (root / room).rglob("*.py"):
            parts = path.relative_to(root).parts
            name = "/".join(parts[:2]) if room == "mtptrain" and len(parts) > 2 else room
            lines[name] += len(path.read_text().splitlines())
    return lines


def test_no_room_has_more_lines_than_its_ceiling() -> None:
    lines = lines_of_rooms(ROOT)
    assert set(lines) == set(LINES)
    assert {room: count for room, count in lines.items() if count > LINES[room]} == {}


def test_an_upward_import_and_a_circle_are_found(tmp_path: Path) -> None:
    for name in ("mtptrain/target/model.py", "mtptrain/heads/mtp.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "mtptrain/target/model.py").write_text("from mtptrain.heads.mtp import x\n")
    (tmp_path / "mtptrain/heads/mtp.py").write_text("def f():\n    from mtptrain.target import model\n")
    (tmp_path / "mtptrain/engines.py").write_text("from mtptrain.init_from import start\n")
    assert sorted(upward_imports(tmp_path)) == [
        "mtptrain/engines.py:1: engines must not import init_from",
        "mtptrain/target/model.py:1: target must not import heads",
    ]
    [circle] = circles(tmp_path)
    assert set(circle) == {"mtptrain.target.model", "mtptrain.heads.mtp"}


def test_an_engines_name_is_in_its_own_file_the_table_and_the_settings_alone() -> None:
    """vLLM is left out: it also extracts hidden states, and heads are described by what it computes."""
    shared = {"mtptrain.engines.table", "mtptrain.settings.evaluation"}
    readers = {"sglang": {"mtptrain.init_from.readers"}}
    for engine in ("sglang", "llama_cpp", "openvino", "tensorrt_llm"):
        found = {name for name, path in modules(ROOT).items() if engine in path.read_text()}
        others = {name for name in found if not name.startswith(f"mtptrain.engines.{engine}")}
        assert others == shared | readers.get(engine, set()), engine


def test_no_docstring_begins_with_a_word_that_makes_it_a_fragment() -> None:
    is_fragment = re.compile(r'"""(Of|Likewise|As|What|The same)\b')
    found = {name: is_fragment.findall(path.read_text()) for name, path in modules(ROOT).items()}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("module", "source", "violation"),
    [
        ("mtptrain/bad.py", "import data_prep.text_files", "1: mtptrain must not import data_prep"),
        ("mtptrain/bad.py", "from eval import acceptance", "1: mtptrain must not import eval"),
        ("eval/bad.py", "from benchmarks import command", "1: eval must not import benchmarks"),
        ("mtptrain/heads/bad.py", "from tests.conftest import x", "1: mtptrain must not import tests"),
        ("data_prep/bad.py", "from eval.acceptance import x", "1: data_prep must not import eval"),
        ("eval/bad.py", "def f():\n    import data_prep", "2: eval must not import data_prep"),
        (
            "mtptrain/bad.py",
            "from mtptrain.train import x",
            "1: mtptrain.train is a program, which no module may import",
        ),
        ("eval/bad.py", "from mtptrain import train", "1: mtptrain.train is a program, which no module may import"),
        ("mtptrain/heads/bad.py", "from .. import train", "1: mtptrain.train is a program, which no module may import"),
        (
            "mtptrain/heads/__init__.py",
            "from ..train import x",
            "1: mtptrain.train is a program, which no module may import",
        ),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, module: str, source: str, violation: str) -> None:
    for name in ("mtptrain/heads/mtp.py", "data_prep/text_files.py", "eval/acceptance.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("from mtptrain import config\n")
    (tmp_path / "mtptrain/train.py").write_text('import mtptrain.heads.mtp\n\nif __name__ == "__main__":\n    pass\n')
    assert import_violations(tmp_path) == []

    (tmp_path / module).write_text(source + "\n")
    assert import_violations(tmp_path) == [f"{module}:{violation}"]


IN_AN_ENVIRONMENT_OF_ITS_OWN = {
    "mtptrain.engines.vllm.vllm_worker": {"vllm"},
    "mtptrain.engines.openvino.openvino_worker": {"openvino", "openvino_genai"},
    "benchmarks.speculators_worker": {"speculators", "measuring"},
}
"""Modules that run in the Python environment of an engine or another trainer, and what else they can import there."""


def test_every_third_party_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in project["dependencies"]}
    distributions = packages_distributions()
    imported = {
        top: str(path.relative_to(ROOT))
        for name, path in modules(ROOT).items()
        for _, source in imports(name, path)
        if (top := source.split(".")[0])
        not in {*FORBIDDEN, *sys.stdlib_module_names, *IN_AN_ENVIRONMENT_OF_ITS_OWN.get(name, ())}
    }
    undeclared = {
        top: where
        for top, where in imported.items()
        if declared.isdisjoint(d.lower() for d in distributions.get(top, [top]))
    }
    assert undeclared == {}
