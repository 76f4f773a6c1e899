"""Workloads of the simulation: what processes do, and what must hold whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from robustness.simulation.calls import LOCAL, Calls, restore
from robustness.simulation.filesystem import ROOT
from robustness.simulation.world import Decisions, Faults, Machine, Process, World
from support.tokenizing import InThisProcess

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.cache import cache, npy
from megaindex.cache.array_files import ArrayFiles, Identity, Sidecar
from megaindex.cache.array_group import ArrayWriter, write_together
from megaindex.cache.claim import build_once
from megaindex.cache.sidecar import find_arrays, map_arrays
from megaindex.corpus import tokenize
from megaindex.errors import FormatError, MegaIndexError, MissingFile, StorageError
from megaindex.format.pair import pair_paths
from megaindex.format.sink import written_paths
from megaindex.io.atomic import write_file
from megaindex.io.paths import as_storage_error

FOLDER = f"{ROOT}/folder"
_UNMARKED = (b'"durable":"1', b'"durable":"0')
_LOCAL_FAULTS = ("kill", "kill", "power", "power", "error", "error", "freeze", "clock")
_SHARED_FAULTS = ("kill", "error", "freeze", "clock", "reply")


class Violation(AssertionError):
    """A guarantee that does not hold."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Violation(text)


class Scenario:
    """One world: a state to begin with, processes that meet faults, and an audit without faults."""

    processes = 3
    local_faults: tuple[str, ...] = _LOCAL_FAULTS
    """Kinds that a world of one machine may have, each as likely as it is often named."""
    is_damaged = False
    """True if what was prepared has to be built again."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.draw = world.decisions.draw
        self.results: dict[Process, object] = {}
        self._builds: list[tuple[object, Process]] = []
        self._done: set[tuple[object, Process]] = set()

    def prepare(self) -> None:
        """Make the state to begin with, as one process without faults."""

    def act(self) -> None:
        """Do what every process does, with faults."""

    def audit(self) -> None:
        """Check the state in the end, as one process without faults; what is left is removed."""

    @property
    def process(self) -> Process:
        assert LOCAL.task is not None
        return LOCAL.task.process

    @property
    def was_disturbed(self) -> bool:
        """True if a builder may have been taken for dead although it lives."""
        return bool(self.world.happened & {"freeze", "clock"})

    @contextlib.contextmanager
    def building(self, key: object = "") -> Iterator[None]:
        """Check that no two processes build a key at a time, nor twice without a cause; let the
        build take some time."""
        process = self.process
        others = [p for name, p in self._builds if name == key]
        require(
            self.was_disturbed or all(p.dead or (key, p) in self._done for p in others), "two build"
        )
        require(bool(self.world.happened) or not others or self.is_damaged, "built twice")
        self._builds.append((key, process))
        self._done.discard((key, process))
        if self.draw(3) == 0:
            time.sleep((0.01, 3.0, 150.0)[self.draw(3)])
        try:
            yield
        finally:
            self._done.add((key, process))

    def attempt(self) -> None:
        """Do `act`; only a process that met an error may raise one, of the package's own types."""
        try:
            self.act()
            self.results[self.process] = "done"
        except MegaIndexError as error:
            require(self.may_raise(error), f"raised without a cause: {error!r}")
            self.results[self.process] = error

    def may_raise(self, error: MegaIndexError) -> bool:
        return self.process.was_hit

    def audit_late(self) -> None:
        """Do `audit` when no client of a network file system can have an old view."""
        time.sleep(60.0)
        self.audit()

    def names_left(self, known: str, folder: str = FOLDER) -> None:
        """Check that no other names are left than ``known``, where leftovers are recognized."""
        if self.world.shared or self.world.happened & {"power", "freeze", "clock"}:
            return  # a claim of another machine or boot may be one of a living process
        build_once(FOLDER, "another", lambda: None, lambda: True)  # removes leftovers
        left = [name for name in os.listdir(folder) if not re.fullmatch(known, name)]
        require(not left, f"left in the folder: {left}")


class Claims(Scenario):
    """Three builders of one file, published by one rename."""

    path = Path(FOLDER, "result")

    def _find(self) -> str | None:
        with contextlib.suppress(MissingFile), as_storage_error(str(self.path), "cannot read"):
            return self.path.read_text()
        return None

    def _build(self) -> str:
        with self.building():
            write_file(str(self.path), lambda file: file.write(b"content"), overwrite=True)
            return "content"

    def act(self) -> None:
        found = build_once(FOLDER, "key", self._find, self._build)
        require(found == "content", f"found {found!r}")

    def audit(self) -> None:
        self.act()
        self.names_left(r"result(\.tmp\..*)?")


class CacheEntries(Scenario):
    """Entries of a cache: two keys, small arrays written or mapped, perhaps damaged before."""

    processes = 4
    sizes = (20, 3)

    def prepare(self) -> None:
        self.mapped = self.draw(4) == 0
        self.is_damaged = self.draw(3) == 0
        if self.is_damaged:
            self._fetch(0)
            (entry,) = (name for name in os.listdir(FOLDER) if re.fullmatch("[0-9a-f]{32}", name))
            with open(f"{FOLDER}/{entry}/b.npy", "r+b") as file:
                file.truncate(90)

    def act(self) -> None:
        numbers = [0, self.draw(2)]
        fetched = [(number, self._fetch(number)) for number in numbers]
        time.sleep((0.0, 1.0, 10.0)[self.draw(3)])
        for number, arrays in fetched:
            self._compare(number, arrays, "later")

    def audit(self) -> None:
        for _ in range(2):
            for number in range(2):
                self._fetch(number)
        self.names_left("[0-9a-f]{32}")

    def _fetch(self, number: int) -> Mapping[str, Any]:
        npy.WORTH_MAPPING = 0 if self.mapped else 1 << 25
        expected = self._expected(number)

        def build(sink: Any) -> None:
            with self.building(number):
                for name, values in expected.items():
                    sink.allocate(name, values.shape, "int64")[...] = values
                    sink.seal(name)

        shapes = {name: (values.shape, "int64") for name, values in expected.items()}
        arrays, _ = cache.fetch(FOLDER, lambda: {"number": number}, build, shapes)
        self._compare(number, arrays, "now")
        return arrays

    def _expected(self, number: int) -> dict[str, Any]:
        return {
            name: np.arange(size) + 100 * number
            for name, size in zip("ab", self.sizes, strict=True)
        }

    def _compare(self, number: int, arrays: Mapping[str, Any], when: str) -> None:
        for name, values in self._expected(number).items():
            same = np.array_equal(arrays[name], values)
            require(same, f"entry {number} has other values {when}: {arrays[name].tolist()}")


class FrameworkFiles(Scenario):
    """Two sets of arrays under a framework's names, with a sidecar, over old ones or none."""

    begin = "none"

    def prepare(self) -> None:
        self.begin = ("none", "old", "theirs", "lost")[self.draw(4)]
        self.together = self.draw(2) == 1
        self.is_damaged = self.begin in ("old", "lost")
        if self.begin != "none":
            self._request("old" if self.begin == "old" else "new")
        if self.begin == "theirs":
            for number in self._numbers:
                os.unlink(self._files(number).sidecar)
        if self.begin == "lost":  # power was lost before the set was marked as synced
            time.sleep(60.0)
            files, disk = self._files(0), self.world.files
            disk.replace_content(files.sidecar, lambda text: text.replace(*_UNMARKED))
            disk.replace_content(files.arrays["b"], lambda values: values[:-8] + bytes(8))
            self.process.machine.boot += 1

    @property
    def _numbers(self) -> range:
        return range(2 if self.together else 1)

    def act(self) -> None:
        self._request("new")

    def may_raise(self, error: MegaIndexError) -> bool:
        return super().may_raise(error) or self._lost_its_record(error)

    def _lost_its_record(self, error: MegaIndexError) -> bool:
        """Return True for what a power loss may have done: arrays without a record, or without
        their content, are refused. Arrays that another builder replaces never are."""
        replaced = "these are not the files that" in str(error)
        power = "power" in self.world.happened
        return power and isinstance(error, FormatError) and not replaced

    def audit(self) -> None:
        for _ in range(2):
            self._request_again()
        for number in self._numbers:
            for path, values in self._arrays_of(number).items():
                with open(path, "rb") as file:
                    require(values.tobytes() == file.read()[-values.nbytes :], f"{path} differs")
        self.names_left(r"\d-(a\.npy|b\.npy|description\.txt|megaindex\.json)")

    def _request_again(self) -> None:
        """Request the arrays; those that are refused are removed, as the message says."""
        try:
            self._request("new")
        except FormatError as error:
            require(self._lost_its_record(error), f"refused: {error}")
            for name in os.listdir(FOLDER):
                if ".claim" not in name:
                    os.unlink(f"{FOLDER}/{name}")
            self._request("new")

    def _arrays_of(self, number: int) -> dict[str, Any]:
        paths = self._files(number).arrays.values()
        return dict(zip(paths, self._contents(number, "new").values(), strict=True))

    def _request(self, corpus: str) -> None:
        npy.WORTH_MAPPING = 1 << 25
        identity = Identity(settings=lambda: {"seed": 1}, corpus=lambda: corpus)
        files = [self._files(number) for number in self._numbers]

        def check(number: int) -> Callable[[Mapping[str, Any]], None]:
            def compare(arrays: Mapping[str, Any]) -> None:
                for name, values in self._contents(number, corpus).items():
                    if not np.array_equal(arrays[name], values):
                        raise FormatError("other values than those of the corpus")

            return compare

        def find() -> list[Sidecar] | None:
            found = [find_arrays(each, identity, check(k)) for k, each in enumerate(files)]
            return None if None in found else [one for one in found if one is not None]

        def build() -> list[Sidecar]:
            with self.building():
                if not self.together:
                    with ArrayWriter(files[0]) as writer:
                        self._fill(0, writer, corpus)
                        return [writer.publish(identity, corpus)]
                return write_together(
                    [(ArrayWriter(each), identity, corpus) for each in files],
                    lambda k, writer: self._fill(k, writer, corpus),
                )

        for _ in range(5):  # they may be replaced meanwhile, as `ArrayRequest.open` expects
            found = build_once(FOLDER, "blend", find, build)
            try:
                mapped = [map_arrays(*each) for each in zip(files, found, strict=True)]
                break
            except (FormatError, MissingFile):
                continue
        else:
            raise StorageError("arrays are replaced again and again")
        for number, arrays in enumerate(mapped):
            for name, values in self._contents(number, corpus).items():
                same = np.array_equal(arrays[name], values)
                require(same, f"set {number} has other values: {name} {arrays[name].tolist()}")

    def _files(self, number: int) -> ArrayFiles:
        base = f"{FOLDER}/{number}"
        return ArrayFiles(
            arrays={name: f"{base}-{name}.npy" for name in "ab"},
            sidecar=f"{base}-megaindex.json",
            marker=f"{base}-description.txt",
        )

    def _contents(self, number: int, corpus: str) -> dict[str, Any]:
        first = 100 * number + (50 if corpus == "new" else 0)
        return {"a": np.arange(first, first + 20), "b": np.arange(20) - first}

    def _fill(self, number: int, writer: ArrayWriter, corpus: str) -> None:
        for name, values in self._contents(number, corpus).items():
            writer.allocate(name, values.shape, values.dtype.name)[...] = values
            writer.seal(name)


class Pairs(Scenario):
    """Writers of one pair, over an old one or none, and readers of it."""

    _LENGTHS = ((9, 1, 20), (1, 9, 20), (20, 1, 9), (9, 20, 1))

    def prepare(self) -> None:
        self.writers = 1 + self.draw(2)
        self.has_old = self.draw(2) == 1
        self.overwrite = self.has_old or self.draw(2) == 1
        if self.has_old:
            self._write(0, overwrite=False)

    def act(self) -> None:
        number = self.process.number
        if number % 3 < self.writers:
            self._write(1 + number % 3, overwrite=self.overwrite)
            self.results[self.process] = "done"
        else:
            for _ in range(2):
                self.read()

    def may_raise(self, error: MegaIndexError) -> bool:
        exists = "already exists" in str(error) and not self.overwrite
        return super().may_raise(error) or exists or self.writers > 1

    def read(self, *, audit: bool = False) -> int | None:
        """Return the number of the writer whose pair is there, None without one."""
        try:
            dataset = IndexedDataset(f"{FOLDER}/pair")
            documents = [dataset[k].tolist() for k in range(len(dataset))]
        except MissingFile:
            return None
        number = documents[0][0]
        # of two writers that overwrite a pair, a check tells the second: not at once, nor if killed
        may_mix = self.writers > 1 and self.overwrite and (self.world.happened or not audit)
        require(documents == self._documents(number) or bool(may_mix), f"a mixture: {documents}")
        return int(number)

    def audit(self) -> None:
        found = self.read(audit=True)
        has_idx = os.path.exists(f"{FOLDER}/pair.idx")
        require(found is not None or not has_idx or self.writers > 1, "an .idx without its .bin")
        if self.writers == 1 and self.finished and self.begun[-1] == self.finished[-1]:
            require(found == self.finished[-1], f"the pair that was written is lost: {found}")
        if self.begun == (0,):  # a writer that began may leave none, if it is killed or at work
            require(found == 0, "there is no pair")
        if not has_idx:
            self._write(3, overwrite=True)
            require(self.read(audit=True) == 3, "the pair is not the one that was written last")
        unfinished = r"(\.tmp\..*)?|megaindex\.tmp\..*" if self.world.happened else ""
        self.names_left(r"pair\.(bin|idx)" + unfinished)

    begun: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()

    def _documents(self, number: int) -> list[list[int]]:
        return [[number] * length for length in self._LENGTHS[number % 4]]

    def _write(self, number: int, *, overwrite: bool) -> None:
        self.begun += (number,)
        writer = IndexedDatasetWriter(f"{FOLDER}/pair", np.int32, overwrite=overwrite)
        with writer:
            for tokens in self._documents(number):
                writer.add_document(tokens)
        self.finished += (number,)


class PowerLoss(Pairs):
    """One writer of a pair, on a machine that loses power and starts nothing again."""

    processes = 1
    local_faults = ("power",)

    def prepare(self) -> None:
        super().prepare()
        self.writers = 1
        self.world.restarts = lambda process: False

    def act(self) -> None:
        self._write(1, overwrite=self.overwrite)
        self.results[self.process] = "done"


class Tokenizing(Scenario):
    """Two runs that tokenize to one output, and runs after them that resume it."""

    processes = 2
    _TEXTS = ("one", "", "some more words", "x", "the last")

    def prepare(self) -> None:
        with open(f"{FOLDER}/in.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in self._TEXTS)
        self._tokenize("reference")
        self.expected = self._outputs("reference")

    def _tokenize(self, name: str) -> None:
        settings: dict[str, Any] = {"tokenizer": "bytes", "eod": 0, "part_bytes": 60}
        tokenize(f"{FOLDER}/{name}", [f"{FOLDER}/in.jsonl"], **settings, engine=InThisProcess())

    def _outputs(self, name: str) -> list[bytes]:
        return [Path(path).read_bytes() for path in written_paths(f"{FOLDER}/{name}")]

    def act(self) -> None:
        self._tokenize("out")
        with as_storage_error(FOLDER, "cannot read"):
            require(self._outputs("out") == self.expected, "other bytes")

    def may_raise(self, error: MegaIndexError) -> bool:
        """Two runs exclude each other; one that was frozen finds that the other has finished."""
        return isinstance(error, StorageError) or super().may_raise(error)

    def audit(self) -> None:
        if all(map(os.path.exists, pair_paths(f"{FOLDER}/out"))):  # else it is no pair
            require(self._outputs("out") == self.expected, "other bytes than those of one run")
        else:
            self._tokenize("out")
            require(self._outputs("out") == self.expected, "other bytes after resuming")
            self.names_left(r"in\.jsonl|(out|reference)\.(bin|idx|provenance)")


SCENARIOS: dict[str, type[Scenario]] = {
    "claims": Claims,
    "cache": CacheEntries,
    "framework": FrameworkFiles,
    "pairs": Pairs,
    "power": PowerLoss,
    "tokenizing": Tokenizing,
}


def simulate(name: str, seed: int) -> World:
    """Run a scenario with the decisions of a seed; the world has ``error`` if it found one.

    Call inside `installed`.
    """
    world = World(Decisions(seed), LOCAL, restore=restore)
    draw = world.decisions.draw
    world.shared = draw(3) == 0
    world.calls = Calls(world)
    scenario = SCENARIOS[name](world)
    machines = [Machine(f"node{k}", pids=100 * k) for k in range(2 if world.shared else 1)]
    faults = Faults(
        kinds=_SHARED_FAULTS if world.shared else scenario.local_faults,
        budget=draw(4),
        rarity=(15, 60, 200)[draw(3)],
    )
    try:
        world.files.mkdir(FOLDER)
        world.start(machines[0], "prepare", scenario.prepare)
        world.run()
        world.files.sync()
        world.faults = faults
        for number in range(scenario.processes):
            world.start(machines[number % len(machines)], f"p{number}", scenario.attempt)
        world.run()
        world.faults = Faults()
        if not world.shared and draw(3) == 0:
            world.happened.add("power")
            world.lose_power(machines[0])
        for machine in machines:
            world.start(machine, "audit", scenario.audit_late)
            world.run()
    except BaseException as error:
        world.error = error
        if not isinstance(error, Exception):
            raise
    return world
