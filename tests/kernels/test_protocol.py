"""Every backend has the functions of the reference, with their argument names and defaults."""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.compile_kernels import MODULES
from support.inputs import for_each

from megaindex import kernels
from megaindex.errors import InvalidArgument
from megaindex.kernels import load, protocol
from megaindex.kernels.protocol import NATIVE_INTERFACE

if TYPE_CHECKING:
    from megaindex.kernels.protocol import Backend

REFERENCE = load("reference")
FUNCTIONS = [name for name, value in vars(REFERENCE).items() if inspect.isfunction(value)]


def arguments(function: object) -> list[tuple[str, str]]:
    """Names and defaults; of a compiled function they stand in the first line of its docstring."""
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except ValueError:
        text = (function.__doc__ or "").partition("(")[2].partition(") ->")[0]
        text = re.sub(r"\[[^]]*\]", "", text)
        found = [re.match(r"(\w+): [^=]*(?:= (.*))?$", part) for part in text.split(", ") if part]
        return [(match[1], match[2] or "") for match in found if match is not None]
    empty = inspect.Parameter.empty
    named = [p for p in parameters if p.name != "self"]
    return [(p.name, "" if p.default is empty else str(p.default)) for p in named]


@for_each("name", FUNCTIONS)
def test_backends_have_the_functions_of_the_specification(backend: Backend, name: str) -> None:
    assert arguments(getattr(backend, name)) == arguments(getattr(REFERENCE, name))


def test_the_protocol_has_the_functions_of_the_specification() -> None:
    text = Path(protocol.__file__).read_text()
    named = re.findall(r"^ +(\w+) = staticmethod\(reference\.\1\)", text, re.M)
    assert sorted(named) == sorted(FUNCTIONS)
    assert len(FUNCTIONS) > 30


def test_every_numba_kernel_is_compiled_before_the_tests() -> None:
    """By `support.compile_kernels`, which calls each."""
    numba = load("numba")
    called = set()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            called.add(name)
            return getattr(numba, name)

    for module in MODULES:
        module(Recorder())
    not_compiled = {"seed_state", "tokens_within", "token_table", "span_table", "row_table"}
    not_compiled |= {"read_rows"}  # calls two others
    assert called | not_compiled == set(FUNCTIONS)


def test_the_interface_of_the_native_core_has_its_version() -> None:
    """If this fails: raise NATIVE_INTERFACE and kInterface in csrc/python/module.cpp by one, then
    write the number and the new digest here."""
    native = pytest.importorskip("megaindex.kernels._native")
    names = {name for name, value in vars(native).items() if callable(value)} - set(FUNCTIONS)
    text = "\n".join(
        f"{name}{arguments(getattr(owner, name))}"
        for owner, named in ((REFERENCE, FUNCTIONS), (native, names))
        for name in sorted(named)
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert (NATIVE_INTERFACE, digest) == (8, "c77c8fbfddfe5888")
    assert native.INTERFACE == NATIVE_INTERFACE


@pytest.fixture
def undecided() -> Iterator[None]:
    """No backend is chosen yet."""
    cached = (kernels.backend, kernels.active, kernels.file_mapper)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def stale(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A native core of an earlier build, which the package has not looked at yet."""
    native = pytest.importorskip("megaindex.kernels._native")
    monkeypatch.delattr(native, "INTERFACE")


@pytest.mark.parametrize(
    ("wanted", "maps"), [("", True), ("native", True), ("numba", False), ("reference", False)]
)
def test_the_native_core_maps_files_where_it_is_in_use(
    undecided: None, monkeypatch: pytest.MonkeyPatch, wanted: str, maps: bool
) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    monkeypatch.setenv("MEGAINDEX_BACKEND", wanted)
    assert kernels.file_mapper() is (native if maps else None)


@pytest.mark.parametrize(
    ("written", "reason"),
    [("no compiler was found\n", "no compiler was found"), (" \n", "import of .* halted"),
     (None, "import of .* halted.*: the core was not built")],
)  # fmt: skip
def test_what_the_build_wrote_is_the_reason(
    written: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if written is not None:
        (tmp_path / "reason.txt").write_text(written)
    monkeypatch.setattr(kernels, "_REASON", tmp_path / "reason.txt")
    monkeypatch.setitem(sys.modules, "megaindex.kernels._native", None)
    monkeypatch.delattr(kernels, "_native", raising=False)
    found = kernels.why_not_native()
    assert found is not None
    assert re.match(reason, found)


def test_a_core_of_another_version_is_not_used(
    stale: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MEGAINDEX_BACKEND", raising=False)
    with caplog.at_level(logging.WARNING, "megaindex"):
        assert kernels.backend() == "numba"
    assert kernels.file_mapper() is None
    (message,) = caplog.messages
    assert re.search(r"_native\S*\.so was built for another version of megaindex", message)
    assert "reinstall megaindex" in message
    monkeypatch.setenv("MEGAINDEX_BACKEND", "reference")
    assert kernels.choose() == "reference"
    monkeypatch.setenv("MEGAINDEX_BACKEND", "native")
    with pytest.raises(InvalidArgument, match=r"built for another version"):
        kernels.choose()
