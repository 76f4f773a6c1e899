"""Docstrings of public names, and the site that `make docs` builds of docs/ and of them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
from support.inputs import for_each

ROOT = Path(__file__).parents[1]
FACADES = [
    f"megaindex{name}"
    for name in (
        *("", ".plan", ".recipe", ".loader", ".corpus", ".audit", ".lock", ".keys", ".helpers"),
        ".adapters",
        *(".adapters.megatron", ".adapters.neox", ".adapters.grain"),
    )
]
_MEMBER = (property, cached_property, classmethod, staticmethod)


def public_names(facade: str) -> list[str]:
    """Return the public names of a package, without those of Megatron's own classes."""
    is_megatron = facade.endswith(".megatron")  # whose classes have Megatron's docstrings
    names = set(importlib.import_module(facade).__all__) - {"__version__"}
    return sorted(name for name in names if not (is_megatron and name[0].isupper()))


def public_docstrings(facade: str) -> Iterator[tuple[str, str]]:
    """Yield the docstring of each public class and function, and of the methods of classes."""
    for name in public_names(facade):
        value = getattr(importlib.import_module(facade), name)
        yield f"{facade}.{name}", value.__doc__ or ""
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            if not key.startswith("_") and (
                inspect.isfunction(member) or isinstance(member, _MEMBER)
            ):
                yield f"{facade}.{name}.{key}", inspect.getdoc(getattr(value, key)) or ""


def test_every_package_with_public_names_is_documented() -> None:
    stubs = (ROOT / "megaindex").rglob("__init__.pyi")
    packages = {".".join(stub.parent.relative_to(ROOT).parts) for stub in stubs}
    assert packages <= set(FACADES)


@for_each("facade", FACADES)
def test_every_public_name_has_a_docstring(facade: str) -> None:
    """Its first paragraph is a sentence, and not the signature that a dataclass has instead."""
    if facade.endswith(".loader"):
        pytest.importorskip("torch")
    docstrings = dict(public_docstrings(facade))
    assert docstrings
    wrong = []
    for name, docstring in docstrings.items():
        first = docstring.partition("\n\n")[0].strip()
        if not first.endswith((".", ":")) or first.startswith(f"{name.rpartition('.')[2]}("):
            wrong.append(name)
    assert wrong == []


def _public_fields(value: type) -> list[str]:
    """Return the fields of a dataclass that its callers give."""
    return [f.name for f in dataclasses.fields(value) if f.init and not f.name.startswith("_")]


def records(facade: str) -> Iterator[tuple[str, type, list[str]]]:
    """Yield the public dataclasses and named tuples, with the names of their fields."""
    for name in public_names(facade):
        value = getattr(importlib.import_module(facade), name)
        if inspect.isclass(value) and dataclasses.is_dataclass(value):
            yield f"{facade}.{name}", value, _public_fields(value)
        elif inspect.isclass(value) and hasattr(value, "_fields"):
            yield f"{facade}.{name}", value, list(value._fields)


@for_each("facade", FACADES)
def test_docstrings_describe_every_field_in_order(facade: str) -> None:
    """In the section ``Args:`` or ``Attributes:`` of the class, or of those that it extends."""
    if facade.endswith(".loader"):
        pytest.importorskip("torch")
    wrong = {}
    for name, value, fields in records(facade):
        texts = (inspect.cleandoc(vars(each).get("__doc__") or "") for each in value.__mro__[::-1])
        sections = re.findall(
            r"^(?:Args|Attributes):\n((?:    .*\n?)+)", "\n".join(texts), re.MULTILINE
        )
        described = re.findall(r"^    (\w+)(?: \([^)]*\))?: \S", "".join(sections), re.MULTILINE)
        if described != fields:
            wrong[name] = (described, fields)
    assert wrong == {}


def test_there_are_records_to_describe() -> None:
    pytest.importorskip("torch")
    assert len({value for facade in FACADES for _, value, _ in records(facade)}) >= 40


def build_site(folder: Path) -> tuple[int, str]:
    """Build the site of a copy of docs/, strictly; return the exit status and the warnings."""
    result = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "sphinx", "-W", "--keep-going", "-q"),
            *(folder / "docs", folder / "site"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    lines = result.stderr.splitlines()  # without log lines of packages that are imported
    return result.returncode, "\n".join(
        line for line in lines if "WARNING" in line or "ERROR" in line
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for package in ("sphinx", "myst_parser", "furo", "torch"):
        pytest.importorskip(package)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("generated"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for page in ROOT.glob("*.md"):
        shutil.copy(page, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_site_has_all_pages_and_names(folder: Path) -> None:
    assert build_site(folder) == (0, "")
    site = folder / "site"
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in pages["index.html"] or page.stem == "index"
    for facade in FACADES:
        page = pages[f"generated/{facade}.html"]
        for name in public_names(facade):
            assert re.search(rf'(id|href)="[^"]*megaindex[\w.]*\.{name}"', page), name
    identity = re.search(r"identity of the run (\w{32})", pages["record.html"])
    assert identity is not None
    assert identity[1] not in (site / "searchindex.js").read_text()  # an output of a command
    fetched = re.findall(r'<(?:script|link|img)[^>]*"(https?:[^"]*)"', "".join(pages.values()))
    assert fetched == []


@pytest.mark.slow
def test_the_site_is_not_built_with_errors(folder: Path) -> None:
    with (folder / "docs" / "index.md").open("a") as page:
        page.write("\n[a](missing.md) [b](planning.md#bad-anchor) [c](#no-anchor)\n")
    with (folder / "docs" / "conf.py").open("a") as conf:
        conf.write("\nimport megaindex.plan\nmegaindex.plan.make_plan.__doc__ = None\n")
    (folder / "docs" / "unlisted.md").write_text("# Not in the navigation\n")
    status, warnings = build_site(folder)
    assert status == 1
    for text in ("'missing.md'", "'bad-anchor'", "'no-anchor'", "make_plan has no docstring"):
        assert text in warnings
    assert "unlisted.md: WARNING: document isn't included in any toctree" in warnings
