"""Tests the layout of the packages: the direction of imports, and dependencies.

Imports point one way, data_prep -> mtptrain <- eval. Programs are started, never imported. No package imports
`benchmarks`, which is not installed.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

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
    "run_dir",
    "planning",
    "train",
    "export",
    "all_stages",
    "api",
    "clean",
    "doctor",
    "init",
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
    "mtptrain": 2385,
    "mtptrain/cli": 718,
    "mtptrain/data": 1436,
    "mtptrain/decoding": 1745,
    "mtptrain/engines": 5264,
    "mtptrain/heads": 3178,
    "mtptrain/hidden_states": 2027,
    "mtptrain/init_from": 1374,
    "mtptrain/planning": 891,
    "mtptrain/settings": 1226,
    "mtptrain/target": 3671,
    "mtptrain/training": 2808,
    "mtptrain/utils": 1175,
    "data_prep": 2821,
    "eval": 2242,
    "slurm": 143,
    "benchmarks": 808,
    "tests": 23552,
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


def imports(name: str, path: Path) -> Iterator[str]:
    """Yields the dotted name of everything that a module imports. `from a import b` yields a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[: None if path.name == "__init__.py" else -1]
            base = [*package[: len(package) - node.level + 1], node.module] if node.level else [node.module]
            source = ".".join(part for part in base if part)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def test_imports_point_one_way_and_programs_are_never_imported() -> None:
    all_modules = modules(ROOT)
    assert len(all_modules) > 10
    programs = {stage.program for stage in STAGES.values()}
    programs |= {name for name, path in all_modules.items() if IS_SCRIPT.search(path.read_text())}
    for name, path in all_modules.items():
        imported = set(imports(name, path))
        assert {each.split(".")[0] for each in imported}.isdisjoint(FORBIDDEN[name.split(".")[0]]), name
        assert imported.isdisjoint(programs), f"{name} imports a program"


def upward_imports(name: str, imported: Iterable[str]) -> list[str]:
    """Returns what a module of `mtptrain/` imports from a part after its own in `PARTS`, or from one to keep apart."""
    package, part = [*name.split("."), ""][:2]
    found = []
    for each in imported:
        other_package, other = [*each.split("."), ""][:2]
        if package == other_package == "mtptrain" and part and other in PARTS:
            is_apart = {part, other} == set(APART) and not each.startswith(DESCRIPTION)
            if PARTS.index(other) > PARTS.index(part) or is_apart:
                found.append(f"{name} must not import {each}")
    return found


def test_no_import_of_mtptrain_runs_upward_or_in_a_circle() -> None:
    """Imports inside functions count."""
    all_modules = modules(ROOT)
    graph = {name: set(imports(name, path)) - {name} for name, path in all_modules.items()}
    assert {name.split(".")[1] for name in graph if name.startswith("mtptrain.")} == set(PARTS)
    assert [each for name, imported in graph.items() for each in upward_imports(name, imported)] == []
    TopologicalSorter({name: imported & graph.keys() for name, imported in graph.items()}).prepare()


def test_no_room_has_more_lines_than_its_ceiling() -> None:
    """A room is a folder of `mtptrain/`, the modules beside them, or another package."""
    lines: Counter[str] = Counter()
    for room in {room.split("/")[0] for room in LINES}:
        for path in (ROOT / room).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            name = "/".join(parts[:2]) if room == "mtptrain" and len(parts) > 2 else room
            lines[name] += len(path.read_text().splitlines())
    assert set(lines) == set(LINES)
    assert {room: count for room, count in lines.items() if count > LINES[room]} == {}


def test_an_engines_name_is_in_its_own_file_the_table_and_the_settings_alone() -> None:
    """vLLM is left out: it also extracts hidden states, and heads are described by what it computes."""
    shared = {"mtptrain.engines.table", "mtptrain.settings.evaluation"}
    readers = {"sglang": {"mtptrain.init_from.readers"}, "llama_cpp": {"mtptrain.settings.data"}}
    for engine in ("sglang", "llama_cpp", "openvino", "mlx", "tensorrt_llm"):
        found = {name for name, path in modules(ROOT).items() if engine in path.read_text()}
        others = {name for name in found if not name.startswith(f"mtptrain.engines.{engine}")}
        assert others == shared | readers.get(engine, set()), engine


NOT_DECLARED = {
    "mtptrain.engines.vllm.vllm_worker": {"vllm"},
    "mtptrain.engines.openvino.openvino_worker": {"openvino", "openvino_genai"},
    "mtptrain.engines.mlx.mlx_worker": {"mlx", "mlx_lm", "mlx_vlm"},
    "benchmarks.learning_peer": {"speculators"},
    "mtptrain.target.quantised": {"compressed_tensors"},
}
"""What modules import that run in the Python environment of an engine or another trainer, and optional packages."""


def test_every_third_party_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in project["dependencies"]}
    distributions = packages_distributions()
    imported = {
        top: str(path.relative_to(ROOT))
        for name, path in modules(ROOT).items()
        for source in imports(name, path)
        if (top := source.split(".")[0]) not in {*FORBIDDEN, *sys.stdlib_module_names, *NOT_DECLARED.get(name, ())}
    }
    undeclared = {
        top: where
        for top, where in imported.items()
        if declared.isdisjoint(d.lower() for d in distributions.get(top, [top]))
    }
    assert undeclared == {}
