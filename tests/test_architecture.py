"""Layers, circles and names of modules, public names, and what importing the package loads."""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import gc
import importlib
import os
import pydoc
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.inputs import for_each

ROOT = Path(__file__).parents[1]

# each layer may import those below it, and no package another of its layer
LAYERS = [
    {"cli"},
    {"adapters", "door"},
    {"verify"},
    {"audit"},
    {"loader"},
    {"lock", "corpus"},
    {"plan"},
    {"run"},
    {"builders"},
    {"recipe"},
    {"cache", "settings"},
    {"index"},
    {"format", "helpers", "keys"},
    {"kernels", "objects"},
    {"engine", "progress", "validation", "console"},
    {"io", "arithmetic", "markup", "_lazy"},
    {"errors", "_types"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted((ROOT / "megaindex").rglob("*.py"))}


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is looked for among the nodes of a text, half a million in all modules."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@functools.cache
def facts(path: Path) -> tuple[set[tuple[str, str]], list[str]]:
    """As `imported_from`, of everything that a file imports anywhere, for type checks too; and the
    names of its classes."""
    with no_collection():
        tree = ast.parse(path.read_text())
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        return imported_from(tree), classes


def imported_names(path: Path) -> set[tuple[str, str]]:
    return facts(path)[0]


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, for type checks too."""
    pairs = imported_names(path)
    names = {home for home, _ in pairs} | {f"{home}.{name}" for home, name in pairs}
    found = names & MODULES.keys()
    # a package is named on the way to its module
    return {m for m in found if not any(other.startswith(f"{m}.") for other in found)}


def layer_of(path: Path) -> str:
    """Part of the package that a file belongs to.

    What ``python -m`` runs is a command: ``python -m megaindex.plan`` is promised to users.
    """
    own = path.relative_to(ROOT / "megaindex").parts[0].removesuffix(".py")
    return "cli" if path.name == "__main__.py" else own


def test_every_part_has_a_layer() -> None:
    parts = {layer_of(path) for path in MODULES.values()} - {"__init__"}
    assert parts == set(LEVEL)


def imports_between_parts() -> dict[str, tuple[str, str]]:
    """Each import of another part of the package: a sentence, and the two parts."""
    return {
        f"{path.relative_to(ROOT)} imports {module}": (own, part)
        for path in MODULES.values()
        for module in imported_modules(path)
        if (part := module.split(".")[1] if "." in module else "") in LEVEL
        and (own := layer_of(path)) in LEVEL
        and part != own
    }


def test_imports_point_down() -> None:
    """Hence no two packages import each other."""
    found = imports_between_parts()
    assert len(found) > 500
    assert [each for each, (own, part) in found.items() if LEVEL[part] <= LEVEL[own]] == []


# beside the commands
NEEDS_CORPUS = {"verify": "compares rows with their input files, and shares the subjects of a path"}


def test_nothing_that_trains_imports_the_making_of_pairs() -> None:
    importers = {own for own, part in imports_between_parts().values() if part == "corpus"}
    assert importers - {"cli"} == NEEDS_CORPUS.keys()


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {name: imported_modules(path) - {name} for name, path in MODULES.items()}
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert sorted(graph) == []


# with a private class of lock, loader and verify; compiled kernels on disks name _Targets
TWINS = {"Check", "Lease", "Plan", "Targets"}


def test_classes_have_names_of_their_own() -> None:
    """Private ones too: one name, one meaning, with an underscore or without."""
    homes = collections.defaultdict(list)
    for name, path in MODULES.items():
        for found in facts(path)[1]:
            homes[found.lstrip("_")].append((name, found))
    shared = {name: where for name, where in homes.items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if name not in TWINS} == {}
    public = [name for name, where in shared.items() if sum(n == name for _, n in where) > 1]
    assert public == []


# what users import from; of adapters each module, too
FACADES = {
    f"megaindex{name}"
    for name in (
        *("", ".plan", ".recipe", ".loader", ".corpus", ".audit", ".lock", ".keys"),
        *(".adapters", ".helpers"),
    )
}

FRAMEWORKS = ("megatron", "neox")


def imported_from(tree: ast.Module) -> set[tuple[str, str]]:
    """(module, name) of everything that a text imports of megaindex; of a module itself, ""."""
    found = set()
    for node in statements_of(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(home, name) for home, name in found if home.split(".")[0] == "megaindex"}


def statements_of(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements of a text, in blocks too; `ast.walk` looks into expressions as well."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, block, ())


def is_public(home: str, name: str) -> bool:
    module = importlib.import_module(home)
    names = getattr(module, "__all__", vars(module))
    return not name or name in names or f"{home}.{name}" in FACADES


@for_each(
    "facade",
    sorted(FACADES - {"megaindex.helpers"} | {f"megaindex.adapters.{n}" for n in FRAMEWORKS}),
)
def test_every_public_name_resolves_and_is_listed(facade: str) -> None:
    module = importlib.import_module(facade)
    stub = imported_names(Path(module.__path__[0]) / "__init__.pyi")
    public = [name for name in module.__all__ if name != "__version__"]
    assert public
    packages = {name for home, name in stub if home == facade}
    assert public == sorted(name for _, name in stub if name not in packages)
    assert dir(module) == sorted({*module.__all__, *packages})
    for home, name in stub:
        if "torch" in home or home.endswith(("neox_dataset", "run_loader")):
            pytest.importorskip("torch")
        if home.endswith("megatron.patches"):  # whose classes derive from Megatron's
            pytest.importorskip("megatron.core")
        value = getattr(module, name)
        assert value is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = module.other


def test_packages_are_found_without_their_import() -> None:
    """`import *` loads none of them: some need torch."""
    code = """
import sys, megaindex
assert {"make_plan", "build_index", "plan", "loader", "audit", "recipe"} <= set(dir(megaindex))
assert not [name for name in dir(megaindex) if name.startswith("_") and name != "__version__"]
from megaindex import *
assert "megaindex.audit" not in sys.modules and "megaindex.loader" not in sys.modules
assert megaindex.plan.make_plan is megaindex.make_plan is make_plan
assert megaindex.audit is sys.modules["megaindex.audit"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_function_with_the_name_of_its_module_stays_the_function() -> None:
    """Whichever of the two is imported first."""
    code = """
import megaindex.corpus.merge, megaindex.recipe.amend
from megaindex.corpus.merge import merge as function
from megaindex.corpus import merge
from megaindex.recipe import amend
import megaindex.recipe.amend
assert merge is function and callable(amend) and megaindex.recipe.amend is amend
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_import_from_modules_not_from_facades() -> None:
    wrong = []
    for path in MODULES.values():
        for home, name in imported_names(path):
            package = importlib.import_module(home) if home in FACADES else None
            if package and name != "__version__" and name in getattr(package, "_homes", ()):
                wrong.append(f"{path.relative_to(ROOT)} imports {name} from {home}")
    assert wrong == []


def test_documentation_imports_from_facades_alone() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    seen, deeper = 0, []
    for page in pages:
        for block in re.findall(r"```(?:python|py)\n(.*?)```", page.read_text(), re.DOTALL):
            for home, name in imported_from(ast.parse(block)):
                seen += 1
                public = home in FACADES or home.rpartition(".")[0] == "megaindex.adapters"
                if f"{home}.{name}" not in FACADES and not (public and is_public(home, name)):
                    deeper.append(f"{page.name}: {home} {name}")
    assert seen > 20
    assert deeper == []


def test_help_begins_with_an_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of six lines, which run."""
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("torch does not run under the sanitizers")
    pytest.importorskip("torch")
    import megaindex

    text = pydoc.plain(pydoc.render_doc(megaindex)).partition("\nDESCRIPTION\n")[2]
    example = textwrap.dedent(re.split(r"\n *\n", text, maxsplit=1)[0])  # Python 3.12: no blanks
    assert len(example.splitlines()) == 6
    with megaindex.IndexedDatasetWriter(str(tmp_path / "c"), "uint16") as writer:
        writer.add_document([7] * (65 * 2048))
    assert capsys.readouterr().out == ""
    exec(example.replace("/data/my_corpus_text_document", str(tmp_path / "c")), {})
    assert capsys.readouterr().out.count("tensor(") == 2  # 64 samples in batches of 4 on 8 ranks


def test_kernels_know_neither_python_nor_files() -> None:
    headers = sorted((ROOT / "csrc/megaindex").glob("*.hpp"))
    assert headers
    for header in headers:
        for banned in ("Python.h", "pybind11", "<iostream>", "<cstdio>", "<fstream>"):
            assert banned not in header.read_text(), f"{header.name} includes {banned}"


def test_one_header_asks_for_the_processor() -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "csrc").rglob("*.?pp")}
    words = ("__x86_64__", "__aarch64__", "__builtin_cpu", "immintrin.h", 'target("', "__AVX")
    asking = {name for name, text in sources.items() if any(word in text for word in words)}
    assert asking == {"cpu.hpp"}


@pytest.mark.parametrize(
    "module", ["megaindex", "megaindex.errors", "megaindex.progress", "megaindex.cli.options"]
)
def test_importing_the_package_loads_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print(sorted({'numpy', 'numba', 'torch', 'rich', 'yaml'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_reading_and_building_load_no_heavy_package(tmp_path: Path) -> None:
    if os.environ.get("MEGAINDEX_NO_NATIVE") == "1":
        pytest.skip("without the native core, Numba builds")
    code = f"""
import sys, megaindex
with megaindex.IndexedDatasetWriter({str(tmp_path / "c")!r}) as writer:
    for _ in range(9):
        writer.add_document(range(40))
index = megaindex.build_index({str(tmp_path / "c")!r}, sequence_length=16, seed=1)
assert index.num_samples == 22 and megaindex.backend() == "native"
print(sorted({{'numba', 'rich', 'torch', 'yaml'}} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


# Calls that can run code of a file or of a text, and where each is needed
RUNNING_CODE = re.compile(
    r"eval|exec|compile|__import__|loads|system|popen|Popen|run_path|Unpickler"
    r"|(pickle|cPickle|dill|marshal|shelve|joblib|torch)\.loads?"
    r"|pickle\.Unpickler|runpy\.run_\w+|subprocess\..*|pty\..*|os\.(system|popen|exec\w*|spawn\w*)"
    r"|yaml\.(load|load_all|unsafe_\w+|full_\w+)|(np|numpy)\.load"
)
NEEDED = {
    (
        "adapters/megatron/__main__.py",
        "runpy.run_path",
    ): "the training script to start",
    ("adapters/megatron/core.py", "runpy.run_path"): "megatron-core's own version file",
    ("engine/local.py", "pickle.loads"): "of an exception that this process has just pickled",
    (
        "settings/capture.py",
        "subprocess.Popen",
    ): "the script that `megaindex capture` is asked to run",
    ("settings/yaml_sections.py", "yaml.load"): "with a subclass of SafeLoader",
}


def dotted(node: ast.expr) -> str:
    """The name of a function that is called, such as ``os.path.join``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_package_runs_no_code_of_its_inputs() -> None:
    found = set()
    suspect = re.compile(rf"(?<![\w.])({RUNNING_CODE.pattern})\s*\(|\bshell\s*=")
    for path in MODULES.values():
        text = path.read_text()
        for call in ast.walk(ast.parse(text)) if suspect.search(text) else ():
            if not isinstance(call, ast.Call):
                continue
            name, options = dotted(call.func), {k.arg: k.value for k in call.keywords}
            assert "shell" not in options, path
            if RUNNING_CODE.fullmatch(name):
                found.add((str(path.relative_to(ROOT / "megaindex")), name))
            if name in ("np.load", "numpy.load"):
                assert ast.unparse(options["allow_pickle"]) == "False", path
    assert found == NEEDED.keys()


def test_tests_named_in_the_page_on_reliability_are_there() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    named = re.findall(r"(tests/[\w/]+(?:\.\w+)?|`)(?:::(\w+))?", text)
    assert sum(bool(name) for _, name in named) >= 20
    file = ROOT
    for path, name in named:
        if path != "`":  # else of the file named before
            file = ROOT / path
        assert file.exists(), path
        assert not name or re.search(rf"^def {name}\(", file.read_text(), re.M), name


def test_the_guide_for_developers_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:megaindex|csrc|tests|docs)/[^`]*)`", text))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not list(ROOT.glob(path.rstrip("/")))] == []
    named = re.findall(r"`(\w+)` in `(megaindex/[^`]+\.py)`", text)
    assert len(named) >= 3
    for name, path in named:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / path).read_text(), re.M), name
