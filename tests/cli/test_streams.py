"""Commands with closed, full or missing standard streams: work and exit status."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.cli import main

RUN = ("--seq-length", "8", "--micro-batch-size", "1", "--data-parallel-size", "1")
VERBS = {
    "verify": ("verify", "a"),
    "inspect": ("inspect", "a"),
    "plan": ("plan", "--data-path", "a", *RUN, "--epochs", "1"),
    "audit": ("audit", "--data-path", "a", *RUN, "--epochs", "1"),
    "diff-order": ("diff-order", "--data-path", "a", "--seq-length", "8", "order=neox", "seed=1"),
    "merge": ("merge", "out", "a", "a", "--overwrite"),
    "help": ("plan", "--help"),
    "usage": ("--help",),
}
STARTED = [("merge", "<&- >&- 2>&-"), ("verify", ">&-")]  # the others are forked
STATUS = {"diff-order": 1}  # where all is well
REPEATING = ("plan", "--data-path", "a", *RUN, "--train-iters", "25", "--check")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streams")
    write_corpus(path / "a", [20, 3, 50, 9])
    write_corpus(path / "damaged", [20, 3, 50, 9])
    with open(path / "damaged.bin", "ab") as file:
        file.write(b"more")
    return path


def started(
    folder: Path, words: tuple[str, ...], redirection: str, **environment: str
) -> tuple[int, str, str]:
    """Run a command with a shell redirection; return status, stdout and stderr."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "megaindex"]
    done = subprocess.run(
        [*command, *words], cwd=folder, capture_output=True, check=False,
        text=True, encoding="utf-8", errors="replace",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def run(
    folder: Path, words: tuple[str, ...], redirection: str, encoding: str = "utf-8"
) -> tuple[int, str, str]:
    """As `started`, in a forked process, which imports nothing again."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            _run_forked(folder, words, redirection, encoding)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (out, err):
            file.seek(0)
        return status, out.read().decode(), err.read().decode()


def _run_forked(folder: Path, words: tuple[str, ...], redirection: str, encoding: str) -> NoReturn:
    """Begin with streams of these descriptors, and end as the interpreter does."""
    status = 120  # of Python, where its streams cannot be flushed at the end
    try:
        for number in range(3):
            if re.search(f"{'<' if number == 0 else '(?<!2)>' if number == 1 else '2>'}&-",
                         redirection):  # fmt: skip
                os.close(number)
            elif redirection == f"{number * (number > 1) or ''}>/dev/full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        sys.stdout, sys.stderr = (_stream(number, encoding) for number in (1, 2))
        os.chdir(folder)
        try:
            ended = main(list(words))
        except SystemExit as exit_:
            ended = int(exit_.code or 0)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        status = ended
    finally:
        os._exit(status)


def _stream(number: int, encoding: str) -> io.TextIOWrapper | None:
    try:
        return open(number, "w", encoding=encoding, closefd=False)
    except OSError:
        return None


@for_each("verb", VERBS)
def test_full_output_prints_one_line_with_status_2(folder: Path, verb: str) -> None:
    runs = started if verb == "verify" else run
    status, _, err = runs(folder, VERBS[verb], ">/dev/full")
    name = "" if verb == "usage" else f" {VERBS[verb][0]}"
    assert err == (
        f"megaindex{name}: standard output: cannot write: No space left on device; free some space "
        f"or choose another file system\n"
    )
    assert status == 2


def test_unprinted_findings_exit_with_2(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert main(["verify", "damaged"]) == 1
    assert run(folder, ("verify", "damaged"), ">/dev/full")[0] == 2
    assert started(folder, ("verify", "damaged"), ">/dev/full", PYTHONUNBUFFERED="1")[0] == 2
    assert main(list(REPEATING)) == 1
    assert run(folder, REPEATING, ">/dev/full")[0] == 2


@for_each(
    ("verb", "redirection"),
    [
        *((verb, "2>&-") for verb in VERBS if verb != "usage"),
        *(("merge", closed) for closed in (">&-", ">&- 2>&-", "<&- >&- 2>&-")),
        ("verify", ">&-"),
        ("help", ">&- 2>&-"),
    ],
)
def test_closed_streams_do_not_stop_the_work(folder: Path, verb: str, redirection: str) -> None:
    for path in folder.glob("out.*"):
        path.unlink()
    runs = started if (verb, redirection) in STARTED else run
    status, out, err = runs(folder, VERBS[verb], redirection)
    assert status == STATUS.get(verb, 0), err
    assert err == ""
    assert (out == "") == (">&-" in redirection.replace("2>&-", ""))
    if verb == "merge":
        assert (folder / "out.bin").read_bytes() == 2 * (folder / "a.bin").read_bytes()
        assert main(["verify", "--full", str(folder / "out")]) == 0


def test_processes_that_a_command_starts_have_the_streams_that_it_lacks() -> None:
    """Else the first file that a worker opens would get the text that it prints."""
    are_open = " && ".join(f"test -e /dev/fd/{number}" for number in range(3))
    code = (
        "import subprocess, sys; from megaindex.cli import prepared_streams as prepared\n"
        f"with prepared(): status = subprocess.run(['sh', '-c', '{are_open}']).returncode\n"
        "sys.exit(status)"
    )
    for closed in ("<&- >&- 2>&-", "2>&-"):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
        paths = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False)
        assert done.returncode == 0


def test_errors_without_stderr_keep_their_status(folder: Path) -> None:
    for redirection in ("2>&-", "2>/dev/full"):
        assert started(folder, ("merge", "out", "missing"), redirection)[0] == 2
        assert run(folder, ("merge", "out"), redirection)[0] == 2
        status, out, _ = run(folder, REPEATING, redirection)
        assert status == 1
        assert "train_iters" in out


@pytest.mark.slow
@for_each("verb", ["plan", "audit", "inspect", "diff-order", "help"])
def test_characters_outside_the_encoding_are_escaped(folder: Path, verb: str) -> None:
    if verb == "plan":
        status, out, err = started(folder, VERBS[verb], "", PYTHONIOENCODING="ascii")
    else:
        status, out, err = run(folder, VERBS[verb], "", "ascii")
    assert (status, err) == (STATUS.get(verb, 0), "")
    assert out
    assert out.isascii()


@pytest.mark.parametrize("words", [("inspect", *["a"] * 300), ("verify", "damaged")])
def test_closed_stdout_exits_with_141_in_silence(folder: Path, words: tuple[str, ...]) -> None:
    """The status is that of SIGPIPE; 0 or 1 would be a result."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megaindex", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with os.fdopen(write) as out:
        done = subprocess.run(
            command, cwd=folder, stdout=out, stderr=subprocess.PIPE, check=False, env=env
        )
    assert (done.returncode, done.stderr) == (141, b"")


INTERRUPTED = """
import runpy, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "numpy":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "words", "name"),
    [
        ("megaindex", VERBS["merge"], "merge"),
        ("megaindex", VERBS["plan"], "plan"),
        ("megaindex.plan", VERBS["plan"][1:], "plan"),
    ],
)
def test_ctrl_c_while_modules_are_imported(
    folder: Path, module: str, words: tuple[str, ...], name: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, *words],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.stderr == f"megaindex {name}: interrupted, nothing half-written was left\n"
    assert done.returncode == 130


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("closed", [False, True])
def test_streams_that_a_caller_has_taken_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, closed: bool
) -> None:
    """Within a process, as under pythonw or a service."""
    monkeypatch.chdir(folder)
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, name, stream if closed else None)
    assert main(["verify", "a"]) == 0
    assert main(["verify", "damaged"]) == 1


def test_progress_needs_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    from megaindex.progress import copying, counting, silent

    monkeypatch.setattr(sys, "stderr", None)
    with copying("merging") as bar, counting("building", 3) as count:
        assert bar is silent
        count(1)
