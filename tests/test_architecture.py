"""Imports point down only, kernels know no Python, and the package loads nothing heavy."""

from __future__ import annotations

import ast
import collections
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# each layer may import those below it
LAYERS = [
    {"cli"},
    {"adapters"},
    {"loader", "audit", "corpus", "verify", "imports", "tokenize"},
    {"plan"},
    {"builders"},
    {"recipe"},
    {"cache", "configs"},
    {"index"},
    {"format", "kernels", "helpers"},
    {"objects"},
    {"io", "engine", "_types", "arithmetic", "validation", "console"},
    {"errors", "_lazy"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted((ROOT / "megaindex").rglob("*.py"))}


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, for type checks too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name for name in names if name in MODULES}
    # a package is named on the way to its module
    return {m for m in found if not any(other.startswith(f"{m}.") for other in found)}


def layer_of(path: Path) -> str:
    """Part of the package that a file belongs to; what ``python -m`` runs is a command."""
    own = path.relative_to(ROOT / "megaindex").parts[0].removesuffix(".py")
    return "cli" if path.name == "__main__.py" else own


def test_every_part_has_a_layer() -> None:
    parts = {layer_of(path) for path in MODULES.values()} - {"__init__"}
    assert parts == set(LEVEL)


def test_imports_point_down() -> None:
    assert len(MODULES) > 20
    upward = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in MODULES.values()
        for module in imported_modules(path)
        if (part := module.split(".")[1] if "." in module else "") in LEVEL
        and (own := layer_of(path)) in LEVEL
        and part != own
        and LEVEL[part] < LEVEL[own]
    ]
    assert upward == []


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {name: imported_modules(path) - {name} for name, path in MODULES.items()}
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert sorted(graph) == []


def test_public_classes_have_names_of_their_own() -> None:
    homes = collections.defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_kernels_know_neither_python_nor_files() -> None:
    headers = sorted((ROOT / "csrc/megaindex").glob("*.hpp"))
    assert headers
    for header in headers:
        for banned in ("Python.h", "pybind11", "<iostream>", "<cstdio>", "<fstream>"):
            assert banned not in header.read_text(), f"{header.name} includes {banned}"


@pytest.mark.parametrize("module", ["megaindex", "megaindex.errors"])
def test_importing_the_package_loads_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print(sorted({'numpy', 'numba', 'torch', 'rich', 'yaml'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_reading_and_building_load_neither_torch_nor_numba(tmp_path: Path) -> None:
    if os.environ.get("MEGAINDEX_NO_NATIVE") == "1":
        pytest.skip("without the native core, Numba builds")
    code = f"""
import sys, megaindex
with megaindex.IndexedDatasetWriter({str(tmp_path / "c")!r}) as writer:
    for _ in range(9):
        writer.add_document(range(40))
index = megaindex.build_index({str(tmp_path / "c")!r}, sequence_length=16, seed=1)
assert index.num_samples == 22 and megaindex.backend() == "native"
print(sorted({{'numba', 'torch'}} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_guide_for_developers_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:megaindex|csrc|tests|docs)/[^`]*)`", text))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not list(ROOT.glob(path.rstrip("/")))] == []
    named = re.findall(r"`(\w+)` in `(megaindex/[^`]+\.py)`", text)
    assert len(named) >= 3
    for name, path in named:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / path).read_text(), re.M), name
