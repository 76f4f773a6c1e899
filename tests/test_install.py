"""``pip install`` without a native core: it installs, says so once and why, and runs on Numba."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]

USE = """
import logging; logging.basicConfig(format="%(message)s")
import megaindex
with megaindex.IndexedDatasetWriter("c") as writer:
    for _ in range(9):
        writer.add_document(range(40))
for _ in range(2):
    index = megaindex.build_index("c", sequence_length=16, seed=1)
print(megaindex.__file__, megaindex.backend(), index.shuffle_index.tolist())
"""
CHOOSE = """
import logging; logging.basicConfig(format="%(message)s")
import megaindex
megaindex.backend()
print(megaindex.__file__, megaindex.backend())
"""


def install(target: Path, *, by_pip: bool, **environment: str) -> None:
    """Install a copy of this checkout, or only build what pip would install: seconds less."""
    copy = target.parent / "source"
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "*.so", "*.egg-info", "demo-data", "tests"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    shutil.rmtree(copy / "build", ignore_errors=True)  # of an earlier installation
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
           "--disable-pip-version-check", "--no-compile", "--target", str(target), "."]  # fmt: skip
    build = ["setup.py", "-q", "build", "--build-lib", str(target)]
    subprocess.run(
        [sys.executable, *(pip if by_pip else build)], check=True, cwd=copy, capture_output=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def add_compiled_kernels(target: Path) -> None:
    """What Numba compiled in this checkout; it takes what was compiled from the same source."""
    kernels = Path("megaindex", "kernels", "jit", "__pycache__")
    for path in (ROOT / kernels).glob("*.nb?"):
        (target / kernels).mkdir(exist_ok=True)
        shutil.copy(path, target / kernels)


def version(site: Path) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-m", "megaindex", "--version"], check=True, capture_output=True,
        text=True, cwd=site.parent,
        env={**os.environ, "PYTHONPATH": str(site), "MEGAINDEX_BACKEND": ""},
    )  # fmt: skip
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        pytest.param({"MEGAINDEX_NO_NATIVE": "1"}, "left out, as MEGAINDEX_NO_NATIVE=1 asked for",
                     id="left-out", marks=pytest.mark.slow),
        pytest.param({"CC": "/bin/false", "CXX": "/bin/false", "MEGAINDEX_DEV": "0"},
                     "command '/bin/false' failed with exit code 1", id="no-compiler",
                     marks=pytest.mark.slow),
        pytest.param({"MEGAINDEX_CXXFLAGS": "-include no/header", "MEGAINDEX_DEV": "0"},
                     "failed with exit code 1", id="an-error"),
    ],
)  # fmt: skip
def test_without_a_native_core_it_installs_and_runs_on_numba(
    tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    install(tmp_path / "site", by_pip=environment.get("CC") == "/bin/false", **environment)
    add_compiled_kernels(tmp_path / "site")
    use = CHOOSE if "MEGAINDEX_CXXFLAGS" in environment else USE
    result = subprocess.run(
        [sys.executable, "-c", use], check=True, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "MEGAINDEX_BACKEND": ""},
    )  # fmt: skip
    said = version(tmp_path / "site")
    assert said[:2] == [said[0], "backend: numba"]
    assert said[2].startswith("no native core: ")
    assert reason in said[2]
    if "MEGAINDEX_CXXFLAGS" in environment:  # and what the compiler said
        assert any("error: no/header" in line for line in said[3:]), said
    assert reason in result.stderr
    where, backend, *arrays = result.stdout.strip().split(" ", 2)
    assert where.startswith(str(tmp_path))
    assert backend == "numba"
    assert result.stderr.count("runs on Numba") == 1
    if use is USE:
        import megaindex

        native = megaindex.build_index(str(tmp_path / "c"), sequence_length=16, seed=1)
        assert arrays == [str(native.shuffle_index.tolist())]


def test_a_checkout_installs_without_a_compiler() -> None:
    """As ``make demo`` does it: not with the flags of those who develop it."""
    made = dry_run("demo")
    assert "--editable ." in made
    assert "MEGAINDEX_DEV" not in made
    assert "MEGAINDEX_DEV=1" in dry_run("test")


def dry_run(target: str) -> str:
    """What make would do in a new checkout."""
    return subprocess.run(
        ["make", "--dry-run", "--always-make", "VENV=nowhere", target],
        check=True, capture_output=True, text=True, cwd=ROOT,
    ).stdout  # fmt: skip


def test_the_version_says_which_backend_runs(capsys: pytest.CaptureFixture[str]) -> None:
    import megaindex
    from megaindex.cli import main
    from megaindex.kernels import choose

    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"megaindex {megaindex.__version__}", f"backend: {choose()}"]


def test_a_wrong_backend_does_not_hide_the_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megaindex.cli import main

    monkeypatch.setenv("MEGAINDEX_BACKEND", "cuda")
    assert main(["--version"]) == 0
    assert "must be native, numba or reference, got 'cuda'" in capsys.readouterr().out


def test_every_file_that_names_the_version_names_this_one() -> None:
    import megaindex

    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == megaindex.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == megaindex.__version__
    assert set(citation) >= {"cff-version", "message", "title", "authors"}
    for page in (ROOT / "docs").glob("*.md"):
        named = re.findall(r"megaindex (\d+\.\d+\.\d+) is active", page.read_text())
        assert set(named) <= {megaindex.__version__}, page.name


def test_the_sdist_holds_the_sources_of_the_core_and_no_tests(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "sdist",
         "--formats", "gztar", "--dist-dir", str(tmp_path)],
        check=True, cwd=ROOT, capture_output=True,
    )  # fmt: skip
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        str(path.relative_to(ROOT))
        for folder, endings in (("csrc", ("cpp", "hpp")), ("megaindex", ("py", "pyi", "typed")))
        for ending in endings
        for path in (ROOT / folder).rglob(f"*.{ending}")
    }
    assert sources <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith("tests") or name.endswith(".so")]


@pytest.mark.slow
def test_the_quick_tests_need_no_optional_package() -> None:
    """They are collected for every wheel, where no torch and no tokenizers are installed."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--quick", "--collect-only", "-q", "-p",
         "no:cacheprovider"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-2000:]
