"""Imports point down only, kernels know no Python, and the package loads nothing heavy."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# each layer may import those below it
LAYERS = [
    {"cli"},
    {"adapters"},
    {"loader", "audit", "corpus"},
    {"plan"},
    {"build"},
    {"recipe", "store"},
    {"index"},
    {"format", "kernels", "helpers"},
    {"io", "engine"},
    {"errors"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {n.split(".")[1] for n in names if n.startswith("megaindex.")}
    return parts & set(LEVEL)


def part_of(path: Path) -> str:
    """What ``python -m`` runs is a command, in whichever folder it lies."""
    own = path.relative_to(ROOT / "megaindex").parts[0].removesuffix(".py")
    return "cli" if path.name == "__main__.py" else own


def test_imports_point_down() -> None:
    modules = sorted((ROOT / "megaindex").rglob("*.py"))
    assert len(modules) > 20
    upward = [
        f"{path.relative_to(ROOT)} imports {part}"
        for path in modules
        for part in imported_parts(path)
        if (own := part_of(path)) in LEVEL and part != own and LEVEL[part] < LEVEL[own]
    ]
    assert upward == []


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
