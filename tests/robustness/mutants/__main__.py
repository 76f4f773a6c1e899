"""Mutation score of the package and of the native core: ``make mutants``.

Draws a sample of small changes to the code, applies each alone in a copy of the tree, and runs the
tests that reach it, the nearest and fastest first, until one fails that passes without it; for a
header then the C++ driver of ``make sanitize``, and at last the tests of ``make slow``. A change
that no test notices has survived. Results are appended to a file, so that a run that was ended goes
on where it was. A first run of all tests, kept for later ones, finds out which lines each of them
reaches.

``equivalent.json`` lists survivors that change no result, each with the reason; they are not tried
again, and do not count.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import hashlib
import heapq
import itertools
import json
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from robustness.mutants.operators import Edit, edits_of
from robustness.mutants.reached import REACHED, REACHED_SLOWLY, ROOT, Reached, collect

EQUIVALENT = Path(__file__).with_name("equivalent.json")
DRIVER = "tests/robustness/sanitize/driver.cpp"
COMPILED = ("tests/kernels/", "tests/index/", "tests/cache/test_mapped_files")
LEAST_SCORE = 95  # percent
BACKENDS = {"reference", "numba", "native"}
_FEWEST = 2  # mutants of each package
_BATCHES = (1, 5, 30, 100, 300)  # seconds of tests, under coverage, after which a batch ends
_SECONDS = 30  # of CPU time, added to twice what the tests take without a mutation
_JIT_SECONDS = 150  # where kernels are compiled again
_WAIT = 15  # times as long by the clock, on a machine that does other work
_OPTIONS = [
    "-q", "-x", "-p", "no:cacheprovider", "--basetemp=tmp", "--tb=no",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",  # of what the worker has imported
]  # fmt: skip
_FLAGS = [
    "-O1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-pthread", "-Icsrc", "-I", sysconfig.get_path("include"),
]  # fmt: skip
_SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@dataclass(frozen=True)
class Mutant:
    """One edit of one file of the tree."""

    file: str
    edit: Edit

    @cached_property
    def source(self) -> bytes:
        return (ROOT / self.file).read_bytes()

    @property
    def package(self) -> str:
        """The folder below megaindex, ``csrc``, or an empty text for a module at the top."""
        top, *folders, _ = Path(self.file).parts
        return "csrc" if top == "csrc" else next(iter(folders), "")

    @cached_property
    def lines(self) -> tuple[str, str]:
        """The changed lines before and after."""
        begin = self.source.rfind(b"\n", 0, self.edit.begin) + 1
        end = self.source.find(b"\n", self.edit.end)
        after = self.edit.applied_to(self.source)
        kept = len(after) - len(self.source) + end
        return self.source[begin:end].decode(), after[begin:kept].decode()

    @property
    def line(self) -> int:
        return self.source[: self.edit.begin].count(b"\n") + 1

    @property
    def identity(self) -> str:
        """A name that does not change where other lines of the file do."""
        at = self.source[: self.edit.begin].count(self.lines[0].encode())
        column = self.edit.begin - self.source.rfind(b"\n", 0, self.edit.begin)
        return f"{self.file} {at} {column} {self.lines[0].strip()} -> {self.lines[1].strip()}"

    def __str__(self) -> str:
        old, new = ("\n".join(mark + part for part in text.split("\n")) for mark, text in (
            ("-", self.lines[0]), ("+", self.lines[1])))  # fmt: skip
        return f"{self.file}:{self.line}\n{old}\n{new}"


def all_mutants(patterns: list[str]) -> list[Mutant]:
    files = [*ROOT.glob("megaindex/**/*.py"), *ROOT.glob("csrc/**/*.hpp")]
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    return [
        Mutant(name, edit)
        for name in names
        if any(fnmatch(name, pattern) for pattern in patterns)
        for edit in edits_of(name, (ROOT / name).read_bytes())
    ]


def draw_sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return mutants of every package, in proportion to their numbers, in random order.

    Each has a place of its own in the order of a seed, so that a sample stays nearly the same while
    the code changes.
    """
    packages = defaultdict(list)
    for mutant in mutants:
        packages[mutant.package].append(mutant)

    def place(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.identity}".encode()).digest()

    chosen: list[Mutant] = []
    for _, members in sorted(packages.items()):
        share = max(_FEWEST, -(-count * len(members) // len(mutants)))
        chosen += heapq.nsmallest(share, members, place)
    return sorted(chosen, key=place)


def tests_of(mutant: Mutant, reached: Reached) -> list[str]:
    """Return the tests that may notice a mutant: those that reach the body of a changed head first,
    then the nearest, then the fastest; after them the others of the same files, which may look at
    what a fixture of all made, and of the file named like the module.

    Coverage does not see compiled code: for it, the tests of its backend in `COMPILED`, and then
    all others that may run it.
    """
    path = Path(mutant.file)
    stem = path.stem.split("_")[0].rstrip("s") or mutant.package
    compiled = "native" if mutant.package == "csrc" else "numba" if "/jit/" in mutant.file else ""
    inside: set[str] = set()
    if not compiled:
        names, inside = reached.tests(mutant.file, mutant.source, mutant.line)
    else:
        names = {
            name
            for name in reached.times
            if name.startswith(COMPILED)
            and (stem in _file(name) or compiled in _words(name))
            and not _words(name) & BACKENDS - {compiled}
        }

    found = set(names)
    if compiled:  # the native core is everyone's; Numba is used where it is asked for
        found |= {n for n in reached.times if compiled == "native" or compiled in _words(n)}
        found -= {n for n in found if _words(n) & BACKENDS - {compiled}}
    else:
        own = f"tests/{mutant.package}/test_{stem}"
        files = set(map(_file, names))
        found |= {n for n in reached.times if _file(n) in files or n.startswith(own)}

    def place(name: str) -> tuple[bool, bool, bool, bool, float, str]:
        file = _file(name)
        far = not file.startswith(f"tests/{mutant.package}/")
        seconds = reached.times[name]
        unlike = stem not in Path(file).stem
        return name not in names, name not in inside, unlike, far, seconds, name

    return sorted(found, key=place)


def _file(name: str) -> str:
    return name.partition("::")[0]


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name))


def in_batches(tests: list[str], times: dict[str, float]) -> Iterator[list[str]]:
    """Yield tests in batches, the last of which ends at the last time of `_BATCHES`."""
    ends = list(itertools.accumulate(times[name] for name in tests))
    bounds = [0, *(bisect.bisect(ends, seconds) + 1 for seconds in _BATCHES)]
    yield from filter(None, (tests[low:high] for low, high in itertools.pairwise(bounds)))


class Tree:
    """A copy of the working tree in which mutants are applied, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.output = folder / "output"
        self._jit = Path("megaindex/kernels/jit/__pycache__")
        self._kept = folder / "kept"
        self._built = folder
        self._worker: subprocess.Popen[str] | None = None
        self._child = 0
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode()
        core = next(ROOT.glob("megaindex/kernels/_native*.so"))
        self._core = str(core.relative_to(ROOT))
        for name in (*names.split("\0")[:-1], self._core):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        if (ROOT / self._jit).is_dir():
            shutil.copytree(ROOT / self._jit, self.root / self._jit)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[bool]:
        """Apply a mutant; False if it does not compile."""
        path = self.root / mutant.file
        jit = self.root / self._jit
        status = path.stat()
        units = self._units if mutant.package == "csrc" else {}
        path.write_bytes(mutant.edit.applied_to(mutant.source))
        try:
            if "/jit/" in mutant.file and jit.is_dir():
                jit.rename(self._kept)
                shutil.copytree(self._kept, jit, ignore=self._users(path))
            yield not units or self._link(units, mutant.file)
        finally:
            path.write_bytes(mutant.source)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # Numba compares it
            if self._kept.is_dir():
                shutil.rmtree(jit, ignore_errors=True)
                self._kept.rename(jit)
            if units:
                shutil.copy2(ROOT / self._core, self.root / self._core)

    @staticmethod
    def _users(path: Path) -> Callable[[Any, list[str]], set[str]]:
        """Return what leaves out the code that Numba compiled without a mutation of a module."""
        texts = {other.stem: other.read_text() for other in path.parent.glob("*.py")}
        stale = {path.stem}
        for _ in texts:
            stale |= {name for name in texts for other in stale if f"jit.{other} " in texts[name]}
        return shutil.ignore_patterns(*(f"{name}.*.nb?" for name in stale))

    @cached_property
    def _units(self) -> dict[str, str]:
        """The native core's units, compiled without a mutation, and the headers of each."""
        units = {}
        for path in sorted((self.root / "csrc").glob("*.cpp")):
            if not self._compile(path.stem, f"{path.stem}.o"):
                raise RuntimeError(f"{path} does not compile without a mutation")
            units[path.stem] = (self._built / f"{path.stem}.d").read_text()
        return units

    def _compile(self, unit: str, target: str) -> bool:
        import pybind11

        flags = [*_FLAGS, "-I", pybind11.get_include(), "-MMD", "-w"]
        return self._run("g++", *flags, "-c", f"csrc/{unit}.cpp", "-o", str(self._built / target))

    def _link(self, units: dict[str, str], changed: str) -> bool:
        """Compile the units that include a header again, and link them with the others."""
        objects = []
        for unit, headers in units.items():
            mutated = Path(changed).name in headers
            objects.append(str(self._built / f"{'changed-' * mutated}{unit}.o"))
            if mutated and not self._compile(unit, Path(objects[-1]).name):
                return False
        core = str(self._built / "core.so")
        linked = self._run("g++", "-shared", "-pthread", *objects, "-o", core)
        os.replace(core, self.root / self._core)
        return linked

    def drives(self, seconds: float) -> bool:
        """Return whether the driver of ``make sanitize`` passes on the headers within a time, with
        AVX2 and without."""
        return all(self._drives(seconds, *flags) for flags in ((), ("-DMEGAINDEX_WITHOUT_AVX2",)))

    def _drives(self, seconds: float, *flags: str) -> bool:
        driver = str(self._built / "driver")
        if not self._run("g++", *_FLAGS, *_SANITIZED, *flags, "-w", DRIVER, "-o", driver):
            return False
        try:
            subprocess.run([driver], capture_output=True, check=True, timeout=seconds)
        except subprocess.SubprocessError:
            return False
        return True

    def _run(self, *command: str) -> bool:
        done = subprocess.run(command, cwd=self.root, capture_output=True, check=False)
        return done.returncode == 0

    def test(self, tests: list[str], seconds: float) -> int:
        """Return pytest's exit status, or that of a killed process after so many seconds."""
        if self._worker is None:
            environment = {**os.environ, "PYTHONPATH": str(self.root)}
            self._worker = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker.py"))], cwd=self.root,
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        self.output.unlink(missing_ok=True)
        to, answers = self._worker.stdin, self._worker.stdout
        assert to is not None
        assert answers is not None
        arguments = [*_OPTIONS, *tests]
        print(json.dumps([arguments, str(self.output), round(seconds)]), file=to, flush=True)
        self._child = int(answers.readline())
        timer = threading.Timer(_WAIT * seconds, self._kill_child)  # where it waits for itself
        timer.start()
        try:
            return int(answers.readline())
        finally:
            timer.cancel()
            self._kill_child()  # what it has started

    def failed(self) -> str:
        """Return the test that failed, as pytest's summary names it."""
        found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", self.output.read_text(), re.M)
        return found[1] if found else ""

    def _kill_child(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)

    def end(self) -> None:
        """End the worker and its child."""
        if self._worker is not None:
            self._worker.kill()
            self._kill_child()


class Run:
    """The mutants of a sample, and their results in a file."""

    def __init__(
        self, mutants: list[Mutant], results: Path, seconds: float, reached: list[Reached]
    ) -> None:
        self._results = results
        self._end = time.monotonic() + seconds
        self._reached = reached  # by the quick tests, and by the slow ones
        self._times = {name: s for each in reached for name, s in each.times.items()}
        self._lock = threading.Lock()
        self.found: dict[str, str] = {}
        self.error: BaseException | None = None
        self._trees: list[Tree] = []
        self._stopped = False
        self.unreliable: set[str] = set()  # tests that failed without a mutation
        if results.exists():
            for line in results.read_text().splitlines():
                row = json.loads(line)
                if row["result"] != "survived":  # these are tried again: tests may have come
                    self.found[row["mutant"]] = row["result"]
        self._left: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        known = known_as_equivalent()
        for mutant in mutants:
            if mutant.identity not in self.found and not is_equivalent(mutant, known):
                self._left.put(mutant)

    def work(self) -> None:
        """Try mutants in a tree of this thread's own until none or no time is left."""
        try:
            self._work()
        except Exception as error:
            if not self._stopped:
                self.error = error
            self.stop()

    def stop(self) -> None:
        """End all threads; the mutants under way have no result."""
        self._stopped = True
        for tree in self._trees:
            tree.end()

    def _work(self) -> None:
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            tree = Tree(Path(folder))
            self._trees.append(tree)
            try:
                while time.monotonic() < self._end and not self._stopped:
                    mutant = self._left.get_nowait()
                    began = time.monotonic()
                    result, test = self._try(tree, mutant)
                    if self._stopped:
                        return
                    self._record(mutant, result, test, time.monotonic() - began)
            except queue.Empty:
                return
            finally:
                tree.end()

    def _try(self, tree: Tree, mutant: Mutant) -> tuple[str, str]:
        """Return the result, and the test that failed.

        The tests up to that one must pass without the mutation; one that does not is left out, here
        and for all other mutants.
        """
        while True:
            with tree.changed(mutant) as compiled:
                if not compiled:
                    return "does not compile", ""
                result, test, begun = self._first_failure(tree, mutant)
            if not begun or tree.test(begun, self._limit(begun, mutant)) == 0:
                return result, test
            wrong = {tree.failed()} & {*begun} or {*begun}
            with self._lock:
                self.unreliable |= wrong

    def _first_failure(self, tree: Tree, mutant: Mutant) -> tuple[str, str, list[str]]:
        """Return the result, the test that failed, and the tests of its process up to it."""
        for reached in self._reached:
            with self._lock:
                tests = [n for n in tests_of(mutant, reached) if n not in self.unreliable]
            for batch in in_batches(tests, reached.times):
                if status := tree.test(batch, self._limit(batch, mutant)):
                    failed = tree.failed()
                    result = "killed" if status > 0 or failed else "crashed or too slow"
                    end = batch.index(failed) + 1 if failed in batch else len(batch)
                    return result, failed, batch[:end]
            quick = reached is self._reached[0]
            if quick and mutant.package == "csrc" and not tree.drives(_WAIT * _SECONDS):
                return "killed", DRIVER, []
        return "survived", "", []

    def _limit(self, tests: list[str], mutant: Mutant) -> float:
        spare = _JIT_SECONDS if "/jit/" in mutant.file else _SECONDS
        return 2 * sum(self._times[name] for name in tests) + spare

    def _record(self, mutant: Mutant, result: str, test: str, seconds: float) -> None:
        row = {
            "mutant": mutant.identity, "result": result, "test": test, "seconds": round(seconds, 1)
        }  # fmt: skip
        with self._lock:
            self.found[mutant.identity] = result
            with self._results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = " ".join(mutant.identity.split())
            print(f"{len(self.found):4} {result:19} {shown}", flush=True)


def known_as_equivalent() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(EQUIVALENT.read_text())
    return rows


def is_equivalent(mutant: Mutant, known: list[dict[str, str]]) -> bool:
    old, new = (text.strip() for text in mutant.lines)
    return any((mutant.file, old, new) == (row["file"], row["old"], row["new"]) for row in known)


def report(mutants: list[Mutant], found: dict[str, str]) -> float:
    """Print survivors and scores; return the score in percent."""
    known = known_as_equivalent()
    killed, valid = Counter[str](), Counter[str]()
    for mutant in mutants:
        result = found.get(mutant.identity, "not tried")
        if result in ("not tried", "does not compile") or is_equivalent(mutant, known):
            continue
        valid[mutant.package or "(top)"] += 1
        killed[mutant.package or "(top)"] += result != "survived"
        if result == "survived":
            print(f"\nsurvived: {mutant}")
    print()
    for package in sorted(valid):
        print(f"{package:10} {killed[package]:4} of {valid[package]:4}")
    score = 100 * killed.total() / max(1, valid.total())
    print(f"{killed.total()} of {valid.total()} mutants killed: {score:.1f} %")
    return score


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sample", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, help="of the sample; by default a new one")
    parser.add_argument(
        "--files", nargs="+", default=["*"], help="patterns, such as 'megaindex/cache/*'"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="after which none is begun")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--results", type=Path, help="file to continue; build/mutants-SEED.jsonl")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    results = options.results or ROOT / f"build/mutants-{seed}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    everything = all_mutants(options.files)
    mutants = draw_sample(everything, options.sample, seed)
    print(f"seed {seed}: {len(mutants)} of {len(everything)} mutants; results in {results}")
    collect(REACHED, ROOT, options.jobs, branches=False)
    collect(REACHED_SLOWLY, ROOT, options.jobs, branches=False, slow=True)
    reached = [Reached(REACHED), Reached(REACHED_SLOWLY)]
    run = Run(mutants, results, options.seconds, reached)
    threads = [threading.Thread(target=run.work) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        run.stop()
        for thread in threads:
            thread.join()
    if run.error is not None:
        raise run.error
    for name in sorted(run.unreliable):
        print(f"fails without a mutation, and was left out: {name}")
    return int(report(mutants, run.found) < LEAST_SCORE)


if __name__ == "__main__":
    sys.exit(main())
