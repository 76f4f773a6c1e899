"""Killed runs resume from the finished parts that are still valid."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.tokenizing import InThisProcess, names, pair, run, train_bpe, write_jsonl

from megaindex.corpus import tokenize
from megaindex.corpus.tokenize import encode, work_folder
from megaindex.corpus.tokenize import run as run_module
from megaindex.corpus.tokenize.inputs import find_sources
from megaindex.corpus.tokenize.work_folder import WorkFolder
from megaindex.errors import EngineError, FormatError, InvalidArgument, StorageError
from megaindex.format import IndexedDataset
from megaindex.format.provenance import nameless_file
from megaindex.format.tokenizers import find_tokenizer, load

LINES = [f"line number {i} of a corpus that takes a while" for i in range(8_000)]
PARTS = ["--part-size", "5000"]


def start(output: Path, source: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megaindex", "tokenize", str(output), str(source),
         "--tokenizer", "bytes", "--workers", "2", *PARTS, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


def finished(output: Path) -> int:
    try:
        return sum(name.endswith(".json") for name in os.listdir(f"{output}.parts"))
    except FileNotFoundError:
        return 0


def wait_until_finished(process: subprocess.Popen[str], output: Path, parts: int) -> None:
    deadline = time.monotonic() + 30
    while finished(output) < parts:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def workers_of(pid: int) -> list[int]:
    """Return the worker processes of a run, without multiprocessing's tracker."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [
        child for child in map(int, text.split())
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]  # fmt: skip


def held_worker(process: subprocess.Popen[str], output: Path, parts: int) -> int:
    """Stop a worker in the middle of a part until the other one has finished ``parts``."""
    worker = workers_of(process.pid)[0]
    os.kill(worker, signal.SIGSTOP)
    wait_until_finished(process, output, finished(output) + parts)
    return worker


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("in") / "a.jsonl", LINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"run.claim.{'0' * 16}", "megaindex.tmp.a_1"])
def test_a_file_that_a_run_gives_a_name_for_a_moment_is_removed(tmp_path: Path, name: str) -> None:
    """If the run is killed at that moment, the work folder would otherwise stay for ever."""
    source = write_jsonl(tmp_path / "a.jsonl", LINES[:3])
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / name).write_text("{}")
    tokenize(tmp_path / "out", [source], tokenizer="bytes")
    assert names(tmp_path) == {"a.jsonl", "out.bin", "out.idx", "out.provenance"}


def test_nameless_files_have_a_name_of_ours_where_one_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on network file systems."""
    made: list[str] = []
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    monkeypatch.setattr(os, "unlink", lambda path, real=os.unlink: (made.append(path), real(path)))
    with ExitStack() as opened:
        nameless_file(opened, str(tmp_path), 1024)
    assert [work_folder._OURS.fullmatch(Path(path).name) is not None for path in made] == [True]


def test_a_part_whose_size_cannot_be_read_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> int:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(encode.os.path, "getsize", fail)
    with pytest.raises(StorageError, match=r"out\.parts: cannot read the size of a file"):
        tokenize(
            tmp_path / "out",
            [write_jsonl(tmp_path / "a.jsonl", LINES[:3])],
            tokenizer="bytes",
            engine=InThisProcess(),
        )


@pytest.fixture(scope="module")
def expected(source: Path) -> tuple[bytes, bytes]:
    output = source.with_name("expected")
    run(output, [source])
    return pair(output)


@pytest.mark.slow
def test_a_killed_run_resumes(tmp_path: Path, source: Path, expected: tuple[bytes, bytes]) -> None:
    output = tmp_path / "o"
    process = start(output, source)
    wait_until_finished(process, output, 1)
    worker = held_worker(process, output, 4)  # without its part the run cannot end
    process.kill()
    os.kill(worker, signal.SIGCONT)
    process.communicate()
    assert names(tmp_path) == {"o.parts"}
    kept = finished(output)
    again = start(output, source, "--json")
    said, errors = again.communicate()
    assert again.returncode == 0, errors
    made = json.loads(said)
    assert kept <= made["resumed"] < made["parts"]  # workers finish what they were at
    assert pair(output) == expected
    assert names(tmp_path) == {"o.bin", "o.provenance", "o.idx"}


@pytest.mark.slow
def test_a_killed_worker_costs_one_part(
    tmp_path: Path, source: Path, expected: tuple[bytes, bytes]
) -> None:
    output = tmp_path / "o"
    process = start(output, source)
    wait_until_finished(process, output, 1)
    os.kill(held_worker(process, output, 5), signal.SIGKILL)
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "killed by SIGKILL" in errors
    assert "8,000 documents" in said
    assert pair(output) == expected
    assert names(tmp_path) == {"o.bin", "o.provenance", "o.idx"}


class Stopped(BaseException):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Raise after this many parts, as if the process was killed."""
    real, calls = run_module.encode_part, iter(range(parts))

    def encode(task: Any) -> Any:
        if next(calls, None) is None:
            raise Stopped
        return real(task)

    monkeypatch.setattr(run_module, "encode_part", encode)


def half_done(
    monkeypatch: pytest.MonkeyPatch, output: Path, source: Path, parts: int = 4, **options: Any
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, parts)
        with pytest.raises(Stopped):
            run(output, [source], part_bytes=2000, **options)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "small.jsonl", LINES[:300])


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "changed"},
        {"eod": 256},
        {"dtype": "int32"},
        {"keys": ["id2"]},
        {"part_bytes": 1999},
    ],
    ids=lambda change: next(iter(change)),
)
def test_parts_of_other_settings_are_kept_unless_discarded(
    tmp_path: Path,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
) -> None:
    small.write_text(small.read_text().replace('{"id"', '{"id2": "other", "id"'))
    bpe = train_bpe(tmp_path / "bpe")
    half_done(monkeypatch, tmp_path / "o", small, tokenizer=bpe)
    (name,) = change
    if name == "tokenizer":  # the same path, other content
        bpe.write_bytes(train_bpe(tmp_path / "other", 300).read_bytes())
        change = {}
    options = {"tokenizer": bpe, "part_bytes": 2000, **change}
    before = names(tmp_path / "o.parts")
    message = rf"o\.parts: holds 4 finished parts of .* \({name} is .*, was .*--discard-parts"
    with pytest.raises(InvalidArgument, match=message):
        run(tmp_path / "o", [small], **options)
    assert names(tmp_path / "o.parts") == before
    with caplog.at_level(logging.WARNING):
        made = run(tmp_path / "o", [small], discard_parts=True, **options)
    assert made.resumed == 0
    assert "4 finished parts are of other inputs, settings or tokenizers" in caplog.text
    run(tmp_path / "fresh", [small], **options)
    assert pair(tmp_path / "o") == pair(tmp_path / "fresh")


def test_a_refused_change_of_settings_keeps_the_run_resumable(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(monkeypatch, tmp_path / "o", small)
    with pytest.raises(InvalidArgument, match=r"eod is 256, was None\); repeat that command"):
        run(tmp_path / "o", [small], part_bytes=2000, eod=256)
    made = run(tmp_path / "o", [small], part_bytes=2000)
    assert made.resumed == 4
    assert names(tmp_path) == {"o.bin", "o.provenance", "o.idx", "small.jsonl"}


def test_a_changed_input_is_done_again_and_the_others_are_not(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", LINES[:100])
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "concatenate", lambda *_, **__: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run(tmp_path / "o", [small, other], part_bytes=2000)
    size = other.stat().st_size
    other.write_text(other.read_text().replace("corpus", "CORPUS"))
    assert other.stat().st_size == size
    made = run(tmp_path / "o", [small, other], part_bytes=2000)
    assert 0 < made.resumed < made.parts
    run(tmp_path / "fresh", [small, other])
    assert pair(tmp_path / "o") == pair(tmp_path / "fresh")


@pytest.mark.parametrize("damage", ["pair", "outcome", "bad"])
def test_an_incomplete_part_is_tokenized_again(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    small.write_text("nonsense\n" + small.read_text())
    half_done(monkeypatch, tmp_path / "o", small, parts=1, on_bad_line="skip")
    (outcome,) = (path for path in (tmp_path / "o.parts").iterdir() if path.suffix == ".json")
    (tokens,) = (path for path in (tmp_path / "o.parts").iterdir() if path.suffix == ".bin")
    (bad,) = (path for path in (tmp_path / "o.parts").iterdir() if path.suffix == ".jsonl")
    if damage == "pair":
        os.truncate(tokens, 100)
    elif damage == "outcome":
        os.truncate(outcome, 30)
    else:
        bad.unlink()
    made = run(tmp_path / "o", [small], part_bytes=2000, on_bad_line="skip")
    assert made.resumed == 0
    run(tmp_path / "fresh", [small], on_bad_line="skip")
    assert pair(tmp_path / "o") == pair(tmp_path / "fresh")


NO_OUTCOMES = ["[" * 100_000, "[]", "{}", "9" * 5000, '{"key": 7}', "\xff"]


@pytest.mark.parametrize("text", [*NO_OUTCOMES, "documents", "empty", "attempt"])
def test_a_forged_result_is_ignored(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    half_done(monkeypatch, tmp_path / "o", small, parts=1)
    (outcome,) = (path for path in (tmp_path / "o.parts").iterdir() if path.suffix == ".json")
    fields = json.loads(outcome.read_text())
    if text in fields:
        forged = {"documents": "x", "empty": [], "attempt": "../x"}
        text = json.dumps({**fields, text: forged[text]})
    outcome.write_text(text, encoding="latin-1")
    made = run(tmp_path / "o", [small], part_bytes=2000)
    assert made.resumed == 0
    run(tmp_path / "fresh", [small])
    assert pair(tmp_path / "o") == pair(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("field", "message"),
    [("lines", "its pieces differ in number"), ("documents", "its documents differ in number")],
)
def test_a_result_of_another_size_is_refused(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, field: str, message: str
) -> None:
    half_done(monkeypatch, tmp_path / "o", small, parts=1)
    (outcome,) = (path for path in (tmp_path / "o.parts").iterdir() if path.suffix == ".json")
    fields = json.loads(outcome.read_text())
    fields[field] += [1] if field == "lines" else 1
    outcome.write_text(json.dumps(fields))
    with pytest.raises(FormatError, match=message):
        run(tmp_path / "o", [small], part_bytes=2000)
    assert not (tmp_path / "o.idx").exists()


def test_parts_of_unknown_settings_are_kept(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(monkeypatch, tmp_path / "o", small)
    (tmp_path / "o.parts/run.settings").write_text('{"eod"')
    with pytest.raises(InvalidArgument, match=r"4 finished parts .* \(its settings are unknown\)"):
        run(tmp_path / "o", [small], part_bytes=3000)
    assert run(tmp_path / "o", [small], part_bytes=2000).resumed == 4


@pytest.mark.parametrize("name", ["merging.json", "run.claim", "run.settings"])
def test_a_forged_merging_record_is_ignored(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    half_done(monkeypatch, tmp_path / "o", small, parts=1)
    monkeypatch.setattr(work_folder, "Claim", partial(work_folder.Claim, stale_after=0.2))
    (tmp_path / "o.parts" / name).write_text("[" * 100_000)
    assert run(tmp_path / "o", [small], part_bytes=2000).resumed == 1
    run(tmp_path / "fresh", [small])
    assert pair(tmp_path / "o") == pair(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "line 1: it is nested too deeply"),
        ("{}", "line 1: not an entry of a bad line"),
        ('{"piece": 7, "place": 0, "rule": "json", "detail": ""}', "it names piece 7"),
    ],
    ids=["deep", "empty", "piece"],
)
def test_forged_bad_lines_are_refused(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    small.write_text("nonsense\n" + small.read_text())
    half_done(monkeypatch, tmp_path / "o", small, parts=1, on_bad_line="skip")
    (bad,) = (path for path in (tmp_path / "o.parts").iterdir() if path.suffix == ".jsonl")
    bad.write_text(text)
    with pytest.raises(FormatError, match=rf"bad\.jsonl: .*{message}"):
        run(tmp_path / "o", [small], part_bytes=2000, on_bad_line="skip")
    assert not (tmp_path / "o.idx").exists()


def test_stop_tokenizes_parts_with_bad_lines_again(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_text(small.read_text() + "nonsense\n")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "concatenate", lambda *_, **__: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run(tmp_path / "o", [small], part_bytes=2000, on_bad_line="skip")
    with pytest.raises(FormatError, match="line 301: is not valid JSON"):
        run(tmp_path / "o", [small], part_bytes=2000)
    made = run(tmp_path / "o", [small], part_bytes=2000, on_bad_line="skip")
    assert made.resumed == made.parts
    assert made.bad is not None
    assert [line.number for line in made.bad.first] == [301]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["between pairs", "before the folder goes"])
def test_a_run_killed_while_publishing_resumes(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    small.write_text(small.read_text().replace('{"id"', '{"other": "too", "id"'))
    options: dict[str, Any] = {"keys": ["text", "other"], "part_bytes": 2000}
    with monkeypatch.context() as patch:
        if when == "between pairs":
            real, calls = run_module.concatenate, iter([1])

            def merge(*arguments: Any, **more: Any) -> Any:
                if next(calls, None) is None:
                    raise Stopped
                return real(*arguments, **more)

            patch.setattr(run_module, "concatenate", merge)
        else:
            patch.setattr(work_folder.WorkLock, "clear", lambda _: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run(tmp_path / "o", [small], **options)
    made = run(tmp_path / "o", [small], **options)
    assert made.resumed == made.parts
    run(tmp_path / "fresh", [small], **options)
    for key in ("text", "other"):
        assert pair(tmp_path / f"o_{key}_document") == pair(tmp_path / f"fresh_{key}_document")
    assert not (tmp_path / "o.parts").exists()


def test_finished_parts_stay_where_they_cannot_be_listed(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = WorkFolder.finished_keys, iter([1])

    def fail_in_the_end(folder: WorkFolder) -> set[str]:
        if next(calls, None) is None:
            raise StorageError("cannot list the work folder")
        return real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "finished_keys", fail_in_the_end)
        half_done(monkeypatch, tmp_path / "o", small, parts=4)
    assert finished(tmp_path / "o") == 4
    assert run(tmp_path / "o", [small], part_bytes=2000).resumed == 4


def end_after_publishing(monkeypatch: pytest.MonkeyPatch, prefix: Path, source: Path) -> None:
    """Run as a process that ends between the publication of the pair and the removal of parts."""
    with monkeypatch.context() as patch:
        patch.setattr(work_folder.WorkLock, "clear", lambda _: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run(prefix, [source])


def test_a_pair_of_a_killed_run_is_synced_before_its_parts_go(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may be killed between the rename of the last file and the sync of the directory."""
    end_after_publishing(monkeypatch, tmp_path / "o", small)
    synced, clear, folder = [], work_folder.WorkLock.clear, os.stat(tmp_path)
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.path.samestat(os.fstat(file), folder))
    )

    def checked_clear(lock: work_folder.WorkLock) -> None:
        assert any(synced)
        clear(lock)

    monkeypatch.setattr(work_folder.WorkLock, "clear", checked_clear)
    run(tmp_path / "o", [small])
    assert not (tmp_path / "o.parts").exists()


@pytest.mark.parametrize("gone", [(".bin", ".idx"), (".bin", ".provenance"), (".bin",)], ids=str)
def test_files_that_a_power_loss_left_without_the_bin_are_replaced(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, gone: tuple[str, ...]
) -> None:
    """Of the removal of a pair only a part may be on the disk."""
    end_after_publishing(monkeypatch, tmp_path / "o", small)
    for suffix in gone:
        (tmp_path / f"o{suffix}").unlink()
    made = run(tmp_path / "o", [small])
    assert made.resumed == made.parts
    run(tmp_path / "fresh", [small])
    assert pair(tmp_path / "o") == pair(tmp_path / "fresh")


def test_outputs_of_others_are_never_adopted(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(monkeypatch, tmp_path / "o", small)
    run(tmp_path / "foreign", [small], eod=256)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"foreign{suffix}").rename(tmp_path / f"o{suffix}")
    before = pair(tmp_path / "o")
    with pytest.raises(StorageError, match=r"o\.bin: already exists"):
        run(tmp_path / "o", [small], part_bytes=2000)
    assert pair(tmp_path / "o") == before
    run(tmp_path / "o", [small], part_bytes=2000, overwrite=True)
    run(tmp_path / "fresh", [small])
    assert pair(tmp_path / "o") == pair(tmp_path / "fresh")


def test_one_run_at_a_time(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_folder, "STALE_AFTER", 0.1)
    with (
        work_folder.WorkLock(str(tmp_path / "o")),
        pytest.raises(StorageError, match=rf"o: another run is writing it \(.*{os.getpid()}"),
    ):
        run(tmp_path / "o", [small])
    run(tmp_path / "o", [small])


def lengthen_with_each_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Append a line to a file whenever a part is done."""
    real = WorkFolder.write_done

    def write(folder: WorkFolder, done: Any) -> None:
        real(folder, done)
        with open(path, "a") as file:
            file.write('{"text": "more"}\n')

    monkeypatch.setattr(WorkFolder, "write_done", write)


def test_an_input_that_changes_meanwhile_is_noticed(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengthen_with_each_part(small, monkeypatch)
    with pytest.raises(StorageError, match=r"small\.jsonl: changed while it was tokenized"):
        run(tmp_path / "o", [small], part_bytes=2000)
    assert not (tmp_path / "o.bin").exists()


def test_a_tokenizer_that_is_replaced_before_a_worker_loads_it_is_noticed(tmp_path: Path) -> None:
    path = train_bpe(tmp_path / "bpe")
    file = find_tokenizer(path, add_special_tokens=True)
    path.write_bytes(train_bpe(tmp_path / "other", 300).read_bytes())
    with pytest.raises(StorageError, match="changed since the run began"):
        load(file)


def test_an_input_of_finished_parts_that_changes_meanwhile_is_noticed(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of it is read in this run, and its parts are those of the file that it was."""
    done = tmp_path / "done.jsonl"
    done.write_text(40 * ('{"text": "' + 87 * "x" + '"}\n'))  # two parts
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            run(tmp_path / "o", [done, small], part_bytes=2000)
    assert finished(tmp_path / "o") == 2
    lengthen_with_each_part(done, monkeypatch)
    with pytest.raises(StorageError, match=r"done\.jsonl: changed while it was tokenized"):
        run(tmp_path / "o", [done, small], part_bytes=2000)
    assert not (tmp_path / "o.bin").exists()


def test_a_part_that_always_kills_its_worker_is_named(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "encode_part", die)
    with pytest.raises(EngineError, match=r"small\.jsonl, bytes 0:"):
        run(tmp_path / "o", [small], workers=2)
    assert names(tmp_path) == {"small.jsonl"}


def die(task: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_parts_of_another_file_with_the_same_size_and_time_are_not_used(tmp_path: Path) -> None:
    """A file replaced or overwritten with its old time, as by rsync -t, cp -p and tar."""
    source, output = tmp_path / "a.jsonl", tmp_path / "o"
    lines = (json.dumps({"text": "A" * 40}) + "\n") * 300
    source.write_text(lines + '{"text":}\n')
    times = (10**18, 10**18)
    os.utime(source, ns=times)
    with pytest.raises(FormatError, match="line 301"):
        run(output, [source], part_bytes=5_000)
    assert finished(output) > 0
    source.write_text(lines.replace("A", "B") + " " * len('{"text":}') + "\n")
    os.utime(source, ns=times)
    run(output, [source], part_bytes=5_000)
    served = set(IndexedDataset(output).tokens.tolist())
    assert ord("B") in served
    assert ord("A") not in served


def test_an_input_that_is_replaced_during_the_run_is_noticed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    (found,) = find_sources([path], None)
    found.check_unchanged()
    before = path.stat()
    path.write_text(path.read_text().replace("two", "six"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StorageError, match=r"a\.jsonl: changed while it was tokenized"):
        found.check_unchanged()


def test_what_was_there_before_an_overwriting_run_is_not_adopted(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair has the sizes of the one to be merged."""
    other = write_jsonl(tmp_path / "other.jsonl", [line.upper() for line in LINES[:300]])
    run(tmp_path / "o", [other])
    before = pair(tmp_path / "o")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "concatenate", lambda *_, **__: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run(tmp_path / "o", [small], overwrite=True)
    with pytest.raises(StorageError, match=r"o\.bin: already exists"):
        run(tmp_path / "o", [small])
    assert pair(tmp_path / "o") == before
    run(tmp_path / "o", [small], overwrite=True)
    run(tmp_path / "fresh", [small])
    assert pair(tmp_path / "o") == pair(tmp_path / "fresh") != before
    assert (tmp_path / "o.provenance").exists()  # that of the new pair


def test_the_name_of_the_work_folder_is_synced_before_anything_is_published(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss might else keep a part of the output without the record of its run."""
    parent, synced, real = os.stat(tmp_path), [False], run_module.concatenate
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.path.samestat(os.fstat(file), parent))
    )

    def merge(*arguments: Any, **options: Any) -> Any:
        assert any(synced)
        return real(*arguments, **options)

    monkeypatch.setattr(run_module, "concatenate", merge)
    run(tmp_path / "o", [small])
