"""Random locks, and locks with a forged value: opened with the same samples, or refused.

MEGAINDEX_TEST_EXAMPLES sets the number of forged values, MEGAINDEX_EXPLORE_SEED their seed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.locked_runs import RUNS, write_inputs

from megaindex import FormatError, InvalidArgument, MegaIndexError
from megaindex.lock import make_lock, open_run, read_lock, verify_lock
from megaindex.lock.lock_file import SECTIONS, section_digest
from megaindex.lock.opening import open_stream
from megaindex.recipe.recipe_file import recipe_of

SEED = int(os.environ.get("MEGAINDEX_EXPLORE_SEED", "7"))
EXAMPLES = int(os.environ.get("MEGAINDEX_TEST_EXAMPLES", "60"))
RANDOM_LOCKS = max(20, EXAMPLES * 3 // 10)
STRIDE = max(1, 1000 // EXAMPLES)  # of the bytes that are changed
DEEP = 200
DIGESTS = ("digests", "digest")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of corpora, in which every run is locked as NAME.lock."""
    folder = tmp_path_factory.mktemp("runs")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, flags in RUNS.items():
            assert cli("lock", *flags.split(), "--out", f"{name}.lock", "--tokens")[::2] == (0, "")
        yield folder


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def signed(content: Any) -> bytes:
    """Return a lock of any values with the digests of its text."""
    fields = {name: value for name, value in content.items() if name not in DIGESTS}
    digests = {name: section_digest(fields[name]) for name in SECTIONS if name in fields}
    text = json.dumps({**fields, "digests": digests})[:-1] + ', "digest": "'
    return f'{text}{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values of a lock."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        yield (*place, key)
        if isinstance(each, (dict, list)):
            yield from places(each, (*place, key))


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"order": "sequence", "parts": [{"ranges": [[0, 1, 1]], "index": inner}]}
    return inner


def forged(content: Any, rng: random.Random) -> tuple[str, Any]:
    """Return a place and the lock with another value there, or without the value."""
    every = [place for place in places(content) if place[0] not in DIGESTS]
    place, content = rng.choice(every), copy.deepcopy(content)
    *outer, key = place
    inside, other = content, content
    for name in outer:
        inside = inside[name]
    for name in rng.choice(every):
        other = other[name]
    value, other = inside[key], copy.deepcopy(other)
    is_number = type(value) is int
    values = [
        None, True, "", "x", "\ud800", "a\0b", [], {}, [[]], [value], {"a": value}, -1, 0, 1,
        2**31, 5 * 10**7, 10**12, 2**63 - 1, 2**63, 10**30, other, nested(DEEP, value), str(value),
        *([value + 1, value - 1, -value, value * 1000] if is_number else []),
        *([value[:-1], value * 2] if isinstance(value, (list, str)) else []),
    ]  # fmt: skip
    chosen = rng.randrange(len(values) + 2)
    if chosen < len(values):
        inside[key] = values[chosen]
    elif isinstance(inside, list):
        del inside[key]
    elif chosen == len(values):
        del inside[key]
    else:
        inside["unknown"] = value
    return ".".join(map(str, place)), content


def ends_well(path: str, kind: str) -> list[str]:
    """Call everything that reads a lock; return what was not refused."""
    calls = {
        "verify": lambda: verify_lock(path, whole=True, tokens=True).is_clean,
        "verify a step": lambda: verify_lock(path, step=1).is_clean,
        "open": lambda: open_run(path) is not None,
    }
    taken = []
    for name, call in calls.items():
        try:
            if call():
                taken.append(name)
        except MegaIndexError as error:
            assert "\n" not in str(error), path
    for words in (
        ("prove", f"{kind}.lock", path),
        ("diff-order", path, f"{kind}.lock"),
        ("trace", "--lock", path, "--step", 1),
        ("report", path),
    ):
        status, _, err = cli(*words)
        assert status in (0, 1, 2), words
        assert err.count("\n") <= 1, err
    return taken


def test_a_forged_value_is_refused_or_found(home: Path) -> None:
    """By an error or a finding of one line, never by a traceback or an exhausted memory."""
    pytest.importorskip("torch")
    rng, names = random.Random(SEED), list(RUNS)
    contents = {name: json.loads(Path(f"{name}.lock").read_bytes()) for name in names}
    for _ in range(EXAMPLES):
        name = rng.choice(names)
        place, content = forged(contents[name], rng)
        Path("forged.lock").write_bytes(signed(content))
        try:
            ends_well("forged.lock", name)
        except Exception as error:
            Path("failed.lock").write_bytes(Path("forged.lock").read_bytes())
            raise AssertionError(f"{name}: {place} of {home}/failed.lock") from error
