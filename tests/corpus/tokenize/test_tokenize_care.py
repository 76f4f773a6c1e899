"""Files beside the output of a run: its own are used or removed, others are kept."""

from __future__ import annotations

import json
import logging
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.files import closed
from support.tokenizing import names, pair, run, write_jsonl

from megaindex.corpus.tokenize import run as run_module
from megaindex.corpus.tokenize import work_folder
from megaindex.corpus.tokenize.work_folder import WorkFolder
from megaindex.errors import FormatError, InvalidArgument, StorageError

TEXTS = [f"text number {i}" for i in range(100)]


class Stopped(BaseException):
    pass


def stop(*_: Any, **__: Any) -> None:
    raise Stopped


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", TEXTS)


@pytest.fixture
def expected(tmp_path: Path, source: Path) -> tuple[bytes, bytes]:
    (tmp_path / "expected").mkdir()
    run(tmp_path / "expected" / "o", [source])
    return pair(tmp_path / "expected" / "o")


def interrupted(
    monkeypatch: pytest.MonkeyPatch, output: Path, source: Path, **options: Any
) -> None:
    """Run until the merge of parts, then fail."""
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "concatenate", stop)
        with pytest.raises(Stopped):
            run(output, [source], part_bytes=1000, **options)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "o.parts"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS)
    with pytest.raises(InvalidArgument, match=r"o\.parts: holds a\.jsonl"):
        run(tmp_path / "o", [folder])
    assert names(folder) == {"a.jsonl"}
    assert names(tmp_path) == {"o.parts"}
    (folder / "a.jsonl").unlink()
    (folder / f"{'0' * 32}.json").mkdir()  # a name of ours, and no file
    with pytest.raises(InvalidArgument, match=r"holds 0+\.json, which"):
        WorkFolder(str(folder)).check_own()


def test_a_file_in_place_of_the_work_folder(tmp_path: Path, source: Path) -> None:
    (tmp_path / "o.parts").write_text("precious")
    with pytest.raises(InvalidArgument, match=r"o\.parts: must be a folder"):
        run(tmp_path / "o", [source])
    assert (tmp_path / "o.parts").read_text() == "precious"


@pytest.mark.parametrize("bad", [b"", b"nonsense\n"])
def test_a_report_of_another_program_is_kept(tmp_path: Path, source: Path, bad: bytes) -> None:
    source.write_bytes(source.read_bytes() + bad)
    report = tmp_path / "o.bad.jsonl"
    report.write_text('{"text": "precious"}\n')
    with pytest.raises(InvalidArgument, match=r"o\.bad\.jsonl: is both an input"):
        run(tmp_path / "o", [source, report], on_bad_line="skip", overwrite=True)
    with pytest.raises(StorageError, match=r"o\.bad\.jsonl: already exists"):
        run(tmp_path / "o", [source], on_bad_line="skip")
    assert report.read_text() == '{"text": "precious"}\n'
    assert names(tmp_path) == {"a.jsonl", "o.bad.jsonl"}
    made = run(tmp_path / "o", [tmp_path], on_bad_line="skip", overwrite=True)  # not of itself
    assert made.documents == 100
    assert report.exists() == bool(bad)


def test_the_report_of_an_interrupted_run_is_replaced(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text(source.read_text() + "nonsense\n")
    interrupted(monkeypatch, tmp_path / "o", source, on_bad_line="skip")
    assert (tmp_path / "o.bad.jsonl").exists()
    made = run(tmp_path / "o", [source], part_bytes=1000, on_bad_line="skip")
    assert made.bad is not None
    assert made.resumed == made.parts
    assert made.new_tokens == 0


def test_pipes_are_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.jsonl")
    for path in (tmp_path / "p.jsonl", Path("/dev/null")):
        with pytest.raises(InvalidArgument, match=f"{path}: is a pipe or a device"):
            run(tmp_path / "o", [path])


def test_a_kill_between_the_two_files_of_a_pair(
    tmp_path: Path, source: Path, expected: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o"
    interrupted(monkeypatch, output, source)
    (tmp_path / "o.bin").write_bytes(expected[0])
    random = secrets.token_hex(8)
    os.link(tmp_path / "o.bin", tmp_path / f"o.bin.tmp.{random}")
    for name in (f"o.idx.tmp.{random}", f"other.idx.tmp.{random}", "o.idx.tmp.mine"):
        (tmp_path / name).write_text("")
    run(output, [source], part_bytes=1000)
    assert pair(output) == expected
    assert names(tmp_path) == {
        "a.jsonl", "expected", "o.bin", "o.provenance", "o.idx", f"other.idx.tmp.{random}",
        "o.idx.tmp.mine",
    }  # fmt: skip


def test_a_file_of_another_program_is_not_half_of_the_pair(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, tmp_path / "o", source)
    (tmp_path / "o.bin").write_bytes(b"precious")
    with pytest.raises(StorageError, match=r"o\.bin: already exists"):
        run(tmp_path / "o", [source], part_bytes=1000)
    assert (tmp_path / "o.bin").read_bytes() == b"precious"


@pytest.mark.slow
@pytest.mark.parametrize("removed", [0, 1, 7, 20, 27, 30])
def test_a_kill_while_the_folder_is_emptied(
    tmp_path: Path,
    source: Path,
    expected: tuple[bytes, bytes],
    monkeypatch: pytest.MonkeyPatch,
    removed: int,
) -> None:
    real = WorkFolder._remove

    def some(folder: WorkFolder, to_go: Any) -> None:
        found = list(to_go)
        if "merging.json" not in found:
            return real(folder, found)
        assert len(found) > removed
        real(folder, found[:removed])
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "_remove", some)
        with pytest.raises(Stopped):
            run(tmp_path / "o", [source], part_bytes=400)
    run(tmp_path / "o", [source], part_bytes=400)
    assert pair(tmp_path / "o") == expected
    assert names(tmp_path) == {"a.jsonl", "expected", "o.bin", "o.provenance", "o.idx"}


def test_invalid_prefixes(tmp_path: Path, source: Path) -> None:
    (tmp_path / "d").mkdir()
    for output in (str(source), str(tmp_path / "d"), f"{tmp_path}/e/", ""):
        with pytest.raises(InvalidArgument, match="give the prefix of the new pair first"):
            run_module.tokenize(output, [source], tokenizer="bytes")
    assert names(tmp_path) == {"a.jsonl", "d"}


@pytest.mark.parametrize("key", ["a/b", "a\0b"])
def test_keys_that_cannot_be_in_a_name(tmp_path: Path, key: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS, key)
    with pytest.raises(InvalidArgument, match="key .* must not contain / or NUL"):
        run(tmp_path / "o", [source], keys=[key], megatron_names=True)
    assert names(tmp_path) == {"a.jsonl"}
    assert run(tmp_path / "o", [source], keys=[key]).documents == 100


def test_an_input_of_a_finished_part_that_changes_is_noticed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, tmp_path / "o", source)
    real = run_module._all_done

    def then_changed(*arguments: Any) -> Any:
        done = real(*arguments)
        assert not done[1]  # all were there
        source.write_text(source.read_text() + "{}\n")
        return done

    monkeypatch.setattr(run_module, "_all_done", then_changed)
    with pytest.raises(StorageError, match=r"a\.jsonl: changed while it was tokenized"):
        run(tmp_path / "o", [source], part_bytes=1000)
    assert not (tmp_path / "o.bin").exists()


def test_skipped_files_of_a_folder_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "a.jsonl", TEXTS)
    (tmp_path / "in" / "README.md").write_text("")
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "o", [tmp_path / "in"])
    assert "in: 2 files and folders in it are skipped, first README.md" in caplog.text


def test_only_bad_lines_raise_with_the_report(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("nonsense\n{}\n")
    for _ in range(2):  # the same again
        message = r"2 bad \(.*o\.bad\.jsonl lists them, first .*a\.jsonl: line 1"
        with pytest.raises(FormatError, match=message):
            run(tmp_path / "o", [source], on_bad_line="skip")
        lines = (tmp_path / "o.bad.jsonl").read_text().splitlines()
        assert [json.loads(line)["line"] for line in lines] == [1, 2]


def test_urls_are_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"s3://bucket/o: lies in an object store"):
        run("s3://bucket/o", [source])


def test_finished_parts_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("nonsense\n")
    with pytest.raises(FormatError, match="not valid JSON"):
        run(tmp_path / "o", [source])
    assert names(tmp_path) == {"a.jsonl"}
    assert "kept" not in caplog.text
    write_jsonl(source, TEXTS)
    interrupted(monkeypatch, tmp_path / "o", source)
    assert "finished parts are kept there" in caplog.text


def test_the_progress_of_parts_is_the_sum_of_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = work_folder.WorkLock(str(tmp_path / "o")).folder
    assert folder.bytes_in_progress() == 0  # it is not there yet
    Path(folder.path).mkdir()
    with work_folder.Heartbeat(folder.pulse("a")) as quiet:
        quiet.update(9)
        assert folder.bytes_in_progress() == 0  # within the first second
    monkeypatch.setattr(work_folder, "_BEAT_SECONDS", 0)
    with (
        work_folder.Heartbeat(folder.pulse("a")) as one,
        work_folder.Heartbeat(folder.pulse("b")) as other,
    ):
        one.update(5)
        assert folder.bytes_in_progress() == 5
        one.piece_done(7)
        one.update(3)
        other.update(100)
        assert folder.bytes_in_progress() == 110
        for name, text in (("c.pulse", ""), ("d.pulse", "x"), ("e.txt", "7")):
            Path(folder.path, name).write_text(text)
        assert folder.bytes_in_progress() == 110


def test_a_work_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    folder = work_folder.WorkLock(str(tmp_path / "o")).folder
    folder.clear()
    assert names(tmp_path) == set()


def test_a_pair_below_a_file_is_not_half_published(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not work_folder.is_half_published(str(tmp_path / "file" / "o"), [(8, 8)])


def test_a_work_folder_that_cannot_be_written_says_so() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:  # others may enter it
        Path(outer).chmod(0o755)
        lock = work_folder.WorkLock(f"{outer}/o")
        for folder in (Path(lock.folder.path), Path(outer, "closed")):
            folder.mkdir(0o555)
        with closed(Path(outer, "closed")), pytest.raises(StorageError, match="Permission denied"):
            lock.__enter__()
        Path(lock.folder.path).chmod(0o755)


def test_waiting_for_another_run_is_logged_once(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(work_folder, "STALE_AFTER", 0.1)
    with (
        work_folder.WorkLock(str(tmp_path / "o")),
        pytest.raises(StorageError, match="another run"),
    ):
        run(tmp_path / "o", [source])
    held = [line for line in caplog.messages if "another run is writing it" in line]
    assert len(held) == 1
    assert f"process {os.getpid()} on" in held[0]


def test_long_windows_of_zstd(tmp_path: Path) -> None:
    """A frame of zstd --ultra --long=30: a window of 1 GiB, one raw block."""
    line = b'{"text": "far"}\n'
    header = b"\x28\xb5\x2f\xfd" + bytes([0, (30 - 10) << 3])
    block = (len(line) << 3 | 1).to_bytes(3, "little") + line
    (tmp_path / "a.jsonl.zst").write_bytes(header + block)
    run(tmp_path / "o", [tmp_path / "a.jsonl.zst"])
    assert pair(tmp_path / "o")[0][::2] == b"far"
