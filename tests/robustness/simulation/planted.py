"""Bugs that are planted one at a time, each of which the simulation has to find."""

from __future__ import annotations

import contextlib
import gc
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from robustness.simulation.interleavings import Search
from robustness.simulation.scenarios import simulate

from megaindex.cache import array_group as group
from megaindex.cache import cache, claim, entry, npy, sidecar
from megaindex.corpus.tokenize import work_folder
from megaindex.format import pair
from megaindex.io import atomic

INTERLEAVINGS = "interleavings"
"""Scenario of three builders, of which one may be killed, in all orders of their calls."""


@dataclass(frozen=True)
class Bug:
    """A change of the text of a function, and the scenario that finds it, or `INTERLEAVINGS`."""

    name: str
    function: Callable[..., Any]
    old: str
    new: str
    scenario: str
    seeds: int = 10_000
    """Number of seeds, or of interleavings, within which it is found."""
    first_seed: int = 0
    """The first seed to try, for a bug that few seeds find."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Change the function inside the ``with`` block, wherever it is already imported."""
        text = textwrap.dedent(inspect.getsource(self.function))
        assert text.count(self.old) == 1, f"{self.name}: {self.old!r} is not there once"
        names: dict[str, Any] = {}
        exec(text.replace(self.old, self.new), self.function.__globals__, names)
        original = self.function.__code__
        self.function.__code__ = names[self.function.__name__].__code__
        try:
            yield
        finally:
            self.function.__code__ = original

    def search(self) -> int | None:
        """Return the first seed that finds the bug, or the number of runs; None if none does."""
        with self.planted():
            if self.scenario == INTERLEAVINGS:
                search = Search(builders=3, kills=1)
                try:
                    search.run(self.seeds)
                except AssertionError:
                    return search.runs
                return None
            for seed in range(self.first_seed, self.first_seed + self.seeds):
                if simulate(self.scenario, seed).error is not None:
                    return seed
                if seed % 100 == 0:
                    gc.collect()
        return None


_FSYNC = "os.fsync(stream.fileno())"
BUGS = [
    Bug("files are not synced", atomic.AtomicFiles.publish, _FSYNC, "pass", "pairs"),
    Bug(
        "an error of a sync is ignored",
        atomic.AtomicFiles.publish,
        _FSYNC,
        f"with contextlib.suppress(OSError): {_FSYNC}",
        "pairs",
    ),
    Bug("names are not synced", atomic.sync_directory, "os.fsync(descriptor)", "pass", "pairs"),
    Bug(
        "names are synced only together",
        atomic.AtomicFiles.publish,
        "if others:",
        "if 0:",
        "power",
    ),
    Bug(
        "the old .idx stays while the .bin is replaced",
        atomic.AtomicFiles._hide_old_set,
        "os.rename(last, self._aside)",
        "os.link(last, self._aside)",
        "pairs",
    ),
    Bug(
        "a set replaced in part by another writer is left",
        atomic.AtomicFiles.publish,
        "self._check_set()",
        "pass",
        "pairs",
    ),
    Bug(
        "a pair is mapped while it is replaced",
        pair.map_pair,
        "_is_in_place(pair)",
        "True",
        "pairs",
    ),
    Bug("a claim is not exclusive", claim.Claim._link, "os.link(", "os.replace(", "claims"),
    Bug(
        "a token is used again", claim.Claim.__init__, "secrets.token_hex(8)", "'0' * 16", "claims"
    ),
    Bug(
        "a claim of another is removed",
        claim.Claim.give_up,
        "if token_of(read_claim(self._path)) == self._token:",
        "if True:",
        "claims",
    ),
    Bug(
        "a dead claim is removed without a guard",
        claim.remove_dead,
        "not guard.acquire()",
        "False",
        INTERLEAVINGS,
    ),
    Bug(
        "every other machine is taken for this one",
        claim.holder_is_dead,
        "not alike",
        "False",
        "claims",
    ),
    Bug(
        "a builder shows no life",
        claim.Claim._beat,
        "while not self._stop.wait(self._stale_after / _BEATS):",
        "while False:",
        "claims",
    ),
    Bug(
        "the result is not looked for again",
        claim.build_once,
        "found = find()  # may have",
        "found = None  # may have",
        "claims",
    ),
    Bug("a short write is not completed", npy._write, "while written <", "while 0 <", "cache"),
    Bug(
        "an entry is published before its manifest",
        entry.EntryWriter.publish,
        "path.write_text(manifest.dumps())",
        "os.rename(self._tmp, self._root / self._key)\n"
        "        (self._root / self._key / MANIFEST).write_text(manifest.dumps())\n"
        "        return True",
        "cache",
    ),
    Bug(
        "checksums are not compared after a reboot",
        cache._still_in_memory,
        "manifest.boot_id == boot_id()",
        "True",
        "cache",
    ),
    Bug(
        "an entry is marked before it is on the disk",
        entry.make_durable,
        "os.fsync(file)",
        "pass",
        "cache",
    ),
    Bug(
        "a file that was replaced while it was read is used",
        cache.map_array,
        "raise MissingFile(",
        "str(",
        "cache",
        first_seed=60,
    ),
    Bug(
        "arrays are marked before they are on the disk",
        sidecar._sync,
        "os.fsync(descriptor)",
        "pass",
        "framework",
        first_seed=36,
    ),
    Bug(
        "the last file has its name first",
        group.ArrayWriter.rename_into_place,
        "while self._unnamed:",
        "self._unnamed.reverse()\n    while self._unnamed:",
        "framework",
    ),
    Bug(
        "files that are being replaced are called damaged",
        sidecar._verified,
        "not _is_replaced(files, sidecar, sidecar.files)",
        "True",
        "framework",
    ),
    Bug(
        "the beginning of a merge is not recorded",
        work_folder.WorkLock.begin_merging,
        "_write_record(",
        "(lambda *_: None)(",
        "tokenizing",
    ),
    Bug(
        "what a killed run linked its claim from stays",
        work_folder.WorkLock._take,
        "remove_leftovers(",
        "(lambda *_, at_once: None)(",
        "tokenizing",
    ),
    Bug(
        "the record of a merge is not synced",
        work_folder._write_record,
        "write_file(path, lambda file: file.write(text), overwrite=True)",
        "Path(path).write_bytes(text)",
        "tokenizing",
    ),
]
