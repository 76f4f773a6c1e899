"""Mutation score of the package and of the native core: ``make mutants``.

Draws a sample of small changes to the code, applies each alone in a copy of the tree, and runs the
tests nearest to it, then those of its whole folder, until one fails. A change that no test notices
has survived. Results are appended to a file, so that a run that was ended goes on where it was.

``equivalent.json`` lists survivors that change no result, each with the reason; they do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from robustness.mutants.operators import Edit, edits_of

ROOT = Path(__file__).parents[3]
EQUIVALENT = Path(__file__).with_name("equivalent.json")
TESTS = Path("tests")
LEAST_SCORE = 95  # percent
_FEWEST = 2  # mutants of each package
_NO_TESTS = 5  # exit status of pytest
_SECONDS = 60  # added to three times what the tests take without a mutation
_MOST_BYTES = 1 << 33  # of memory
_SHOWN = 4000  # last characters of the output of tests that fail without a mutation

# Tests of a package in other folders than its own
WIDER = {
    "io": ("format", "cache"), "builders": ("index", "cache"), "verify": ("corpus",),
    "engine": ("builders",), "": ("index", "plan", "loader"), "csrc": ("index",),
    "kernels": ("index",), "loader": ("recipe",), "index": ("builders",), "cli": ("plan",),
    "configs": ("plan",), "recipe": ("plan",), "format": ("verify", "corpus"),
    "cache": ("verify", "robustness/faults/test_leftovers.py"),
}  # fmt: skip


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
    def identity(self) -> str:
        """A name that does not change where other lines of the file do."""
        at = self.source[: self.edit.begin].count(self.lines[0].encode())
        column = self.edit.begin - self.source.rfind(b"\n", 0, self.edit.begin)
        return f"{self.file} {at} {column} {self.lines[0].strip()} -> {self.lines[1].strip()}"

    def __str__(self) -> str:
        line = self.source[: self.edit.begin].count(b"\n") + 1
        old, new = ("\n".join(mark + part for part in text.split("\n")) for mark, text in (
            ("-", self.lines[0]), ("+", self.lines[1])))  # fmt: skip
        return f"{self.file}:{line}\n{old}\n{new}"


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
    """Return mutants of every package, in proportion to their numbers, in random order."""
    chance = random.Random(seed)
    packages = defaultdict(list)
    for mutant in mutants:
        packages[mutant.package].append(mutant)
    chosen = []
    for _, members in sorted(packages.items()):
        share = max(_FEWEST, round(count * len(members) / len(mutants)))
        chosen += chance.sample(members, min(share, len(members)))
    chance.shuffle(chosen)
    return chosen


def tests_of(mutant: Mutant) -> tuple[list[str], list[str]]:
    """Return the test files nearest to a mutant, and the folders of all that may notice it."""
    path = Path(mutant.file)
    folder = {"csrc": "kernels"}.get(mutant.package, mutant.package)
    first = path.stem.split("_")[0].rstrip("s")
    near = [TESTS / folder / f"test_{name}*.py" for name in (path.stem, first) if first]
    wide = [TESTS / name for name in (folder, *WIDER.get(mutant.package, ()))]
    if folder == "adapters" and len(path.parts) > 3:  # one of several frameworks
        framework = TESTS / folder / f"test_{path.parts[2]}*"
        near = [framework.with_name(f"{framework.name}{path.stem}*.py")]
        wide = [framework, TESTS / folder / "test_[!mn]*.py"]
    elif not folder:
        wide = [TESTS / name for name in ("test_[ohp]*.py", *WIDER[""])]
    return _existing(near), _existing(wide)


def _existing(patterns: list[Path]) -> list[str]:
    found = [str(path) for pattern in patterns for path in sorted(Path().glob(str(pattern)))]
    return list(dict.fromkeys(found))


class Tree:
    """A copy of the working tree in which mutants are applied, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._jit = Path("megaindex/kernels/jit/__pycache__")
        self._kept = folder / "kept"
        self._built = folder
        self.output = ""
        self._process: subprocess.Popen[bytes] | None = None
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.decode()
        cores = (str(path.relative_to(ROOT)) for path in ROOT.glob("megaindex/kernels/_native*.so"))
        self._cores = list(cores)
        for name in (*names.split("\0")[:-1], *self._cores):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        for name in self._cores:
            shutil.copy2(ROOT / name, folder)
        if (ROOT / self._jit).is_dir():
            shutil.copytree(ROOT / self._jit, self.root / self._jit)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[bool]:
        """Apply a mutant; False if it does not compile."""
        path = self.root / mutant.file
        jit = self.root / self._jit
        status = path.stat()
        path.write_bytes(mutant.edit.applied_to(mutant.source))
        try:
            if "/jit/" in mutant.file and jit.is_dir():
                jit.rename(self._kept)  # code that was compiled without the mutation
            yield mutant.package != "csrc" or self._compile()
        finally:
            path.write_bytes(mutant.source)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # Numba compares it
            if self._kept.is_dir():
                shutil.rmtree(jit, ignore_errors=True)
                self._kept.rename(jit)
            if mutant.package == "csrc":
                for name in self._cores:
                    shutil.copy2(self._built / Path(name).name, self.root / name)

    def _compile(self) -> bool:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        return self.run(command, 900, MEGAINDEX_BUILD_JOBS="1", MEGAINDEX_CXXFLAGS="-O1") == 0

    def test(self, tests: list[str], seconds: float) -> int | None:
        """Return pytest's exit status, or None where the time did not suffice."""
        options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--basetemp=tmp"]
        return self.run([sys.executable, "-m", "pytest", *options, *tests], seconds)

    def run(self, command: list[str], seconds: float, **variables: str) -> int | None:
        environment = {**os.environ, "PYTHONPATH": str(self.root), **variables}
        with tempfile.TemporaryFile() as output:
            process = self._process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=_limit,  # noqa: PLW1509
            )  # fmt: skip
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                self.kill()
                process.wait()
                output.seek(0)
                self.output = output.read().decode(errors="replace")[-_SHOWN:]

    def kill(self) -> None:
        """End the command that runs, and what it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _limit() -> None:
    """Keep a mutant from filling memory or disk."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))


class Run:
    """The mutants of a sample, and their results in a file."""

    def __init__(self, mutants: list[Mutant], results: Path, seconds: float) -> None:
        self._results = results
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._unchanged: dict[str, float] = {}
        self.found: dict[str, str] = {}
        self.error: BaseException | None = None
        self._trees: list[Tree] = []
        self._stopped = False
        if results.exists():
            for line in results.read_text().splitlines():
                row = json.loads(line)
                if row["result"] != "survived":  # these are tried again: tests may have come
                    self.found[row["mutant"]] = row["result"]
        self._left: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in mutants:
            if mutant.identity not in self.found:
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
            tree.kill()

    def _work(self) -> None:
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            tree = Tree(Path(folder))
            self._trees.append(tree)
            while time.monotonic() < self._end and not self._stopped:
                try:
                    mutant = self._left.get_nowait()
                except queue.Empty:
                    return
                began = time.monotonic()
                result = self._try(tree, mutant)
                if self._stopped:
                    return
                self._record(mutant, result, time.monotonic() - began)

    def _try(self, tree: Tree, mutant: Mutant) -> str:
        near, wide = tests_of(mutant)
        limit = 3 * self._seconds_of(tree, wide) + _SECONDS
        with tree.changed(mutant) as compiled:
            if not compiled:
                return "does not compile"
            for tests in filter(None, (near, [*wide, *(f"--ignore={name}" for name in near)])):
                status = tree.test(tests, limit)
                if status is None:
                    return "too slow"
                if status not in (0, _NO_TESTS):
                    return "killed"
        return "survived"

    def _seconds_of(self, tree: Tree, tests: list[str]) -> float:
        """Return how long tests take without a mutation; end the run if they fail."""
        key = " ".join(tests)
        with self._lock:
            if key not in self._unchanged:
                began = time.monotonic()
                if tree.test(tests, 1800) != 0:
                    raise RuntimeError(f"{tree.output}\nfails without a mutation: {key}")
                self._unchanged[key] = time.monotonic() - began
            return self._unchanged[key]

    def _record(self, mutant: Mutant, result: str, seconds: float) -> None:
        row = {"mutant": mutant.identity, "result": result, "seconds": round(seconds)}
        with self._lock:
            self.found[mutant.identity] = result
            with self._results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = " ".join(mutant.identity.split())
            print(f"{len(self.found):4} {result:16} {shown}", flush=True)


def is_equivalent(mutant: Mutant, known: list[dict[str, str]]) -> bool:
    old, new = (text.strip() for text in mutant.lines)
    return any((mutant.file, old, new) == (row["file"], row["old"], row["new"]) for row in known)


def report(mutants: list[Mutant], found: dict[str, str]) -> float:
    """Print survivors and scores; return the score in percent."""
    known: list[dict[str, str]] = json.loads(EQUIVALENT.read_text())
    killed, valid = Counter[str](), Counter[str]()
    for mutant in mutants:
        result = found.get(mutant.identity, "not tried")
        same = result == "survived" and is_equivalent(mutant, known)
        if result in ("not tried", "does not compile") or same:
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
    run = Run(mutants, results, options.seconds)
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
    return int(report(mutants, run.found) < LEAST_SCORE)


if __name__ == "__main__":
    sys.exit(main())
