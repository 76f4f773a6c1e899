"""Many processes and one cache entry: one build while its builder lives, the same for all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from robustness.faults.delayed import Delayed
from robustness.faults.racing import Race, digest, frozen, killed, lasting
from support.corpora import write_corpus

import megaindex
from megaindex.cache import entry as manifest
from megaindex.cache import fingerprint

# From Python 3.12 on, forking warns once anything has started a thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

MANY = [16, pytest.param(64, marks=pytest.mark.slow)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", np.full(500, 37))
    return tmp_path


def expected(folder: Path) -> str:
    corpus = folder / "corpus"
    return digest(megaindex.build_index(corpus, sequence_length=16, seed=1, epochs=3))


def check(race: Race, statuses: list[int], *, builds: range, served: int) -> None:
    assert race.reports("failed") == []
    assert race.reports("got") == [expected(race.folder)] * served
    assert len(race.reports("built")) in builds
    assert statuses.count(0) == served
    (entry,) = race.cache.iterdir()  # no claim and no temporary either
    assert sorted(path.name for path in entry.iterdir() if path.name != "durable") == [
        "document_index.npy", "manifest.json", "sample_index.npy", "shuffle_index.npy"
    ]  # fmt: skip


@pytest.mark.parametrize("count", MANY)
def test_one_builds_and_all_get_it(folder: Path, count: int) -> None:
    race = Race(folder, folder / "cache", count, during=lasting)
    check(race, race.run(), builds=range(1, 2), served=count)


@pytest.mark.parametrize("count", MANY)
def test_a_killed_builder_is_replaced(folder: Path, count: int) -> None:
    """By one, whichever waiters stand still between reading the claim and removing it."""
    race = Race(folder, folder / "cache", count, during=killed)
    check(race, race.run(), builds=range(1, 2), served=count - 1)
    assert len(race.reports("began")) == 2


@pytest.mark.slow
def test_a_frozen_builder_is_replaced_and_goes_on_without_harm(folder: Path) -> None:
    """When it wakes up its temporaries are gone and the entry is there: it takes that.

    Small arrays are written while they are built, so it may notice before its build has ended.
    """
    race = Race(folder, folder / "cache", 64, stale_after=2.0, during=frozen)
    check(race, race.run(), builds=range(1, 4), served=64)


@pytest.mark.slow
def test_what_others_did_is_seen_late(folder: Path) -> None:
    """Then builds may happen again, which changes nothing."""

    def see_late(race: Race, number: int) -> None:
        if number % 2:
            Delayed(race.cache, 0.7).install()

    race = Race(folder, folder / "cache", 64, before=see_late, during=lasting)
    check(race, race.run(), builds=range(1, 64), served=64)


@pytest.mark.slow
def test_two_versions_share_a_directory(folder: Path) -> None:
    """Their entries have other names, and neither touches what it does not know."""

    def of_another_version(race: Race, number: int) -> None:
        if number % 2:
            fingerprint.CACHE_FORMAT = manifest.CACHE_FORMAT = 2

    race = Race(folder, folder / "cache", 8, before=of_another_version, during=lasting)
    assert race.run() == [0] * 8
    assert race.reports("got") == [expected(folder)] * 8
    assert len(race.reports("built")) == 2
    assert len(list((folder / "cache").iterdir())) == 2
    again = Race(folder, folder / "cache", 4, before=of_another_version)
    for path in folder.glob("built-*"):
        path.unlink()
    assert again.run() == [0] * 4
    assert again.reports("built") == []


def test_no_lock_is_taken(folder: Path) -> None:
    """Locks are unreliable on network file systems, so that none may be relied on."""
    code = (
        "import sys, megaindex\n"
        "taken = []\n"
        "sys.addaudithook(lambda name, args: taken.append(name) if name.startswith('fcntl.') or "
        "name == 'os.lockf' else None)\n"
        "megaindex.build_index(sys.argv[1], sequence_length=16, seed=1, cache_dir=sys.argv[2])\n"
        "assert not [n for n in taken if 'lock' in n], taken\n"
    )
    arguments = [sys.executable, "-c", code, str(folder / "corpus"), str(folder / "cache")]
    subprocess.run(arguments, check=True)
