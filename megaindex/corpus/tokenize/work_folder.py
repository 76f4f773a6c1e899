"""The work folder of a tokenizing run: its lock and its finished parts.

A part has the files `<key>.<attempt>.0.bin/.idx` (and `.1`, … for further keys),
`<key>.<attempt>.provenance` with the place of each document in the pieces of the part,
`<key>.<attempt>.bad.jsonl` if it had bad lines, and `<key>.json`, written last: a part is finished
if that file exists and the others have the sizes stated in it. Each attempt has a random name, so
that two workers on one part do not collide. `<key>.<attempt>.pulse` holds the progress of an
unfinished part.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from megaindex.cache.claim import (
    STALE_AFTER,
    Claim,
    describe_holder,
    holder_is_dead,
    read_claim,
    remove_leftovers,
    token_of,
)
from megaindex.cache.entry import opened
from megaindex.corpus.tokenize.inputs import Refused
from megaindex.corpus.tokenize.parts import InputPart
from megaindex.errors import FormatError, InvalidArgument, StorageError
from megaindex.format.pair import pair_paths
from megaindex.format.provenance import InputRows, ProvenanceSpool, RowFile
from megaindex.format.sink import written_paths
from megaindex.io.atomic import AtomicFiles, Damaged, is_size, parse_object, read_object, write_file
from megaindex.io.paths import as_storage_error

logger = logging.getLogger("megaindex")

_EMPTY_IDX = 42  # bytes of the header and the first bound of an .idx
_RANDOM = re.compile(r"[0-9a-f]{16}")  # end of a temporary file's name, after .tmp.
MERGING = "merging.json"
_BEAT_SECONDS = 1.0
_ATTEMPT = re.compile(r"[0-9a-f]{8}")
_DONE = re.compile(r"[0-9a-f]{32}\.json")
_SETTINGS = "run.settings"
_BAD_LINE = {"piece": int, "place": int, "rule": str, "detail": str}
_OURS = re.compile(
    r"[0-9a-f]{32}\.json(\.tmp\.[0-9a-f]+)?"
    r"|[0-9a-f]{32}\.[0-9a-f]{8}\.(pulse|(\d+\.(bin|idx)|bad\.jsonl|provenance)(\.tmp\.[0-9a-f]+)?)"
    r"|merging\.json(\.tmp\.[0-9a-f]+)?"
    r"|run\.claim(\.[0-9a-f]+(\.claim|\.dead)?)*"
    r"|run\.settings(\.tmp\.[0-9a-f]+)?"
    r"|megaindex\.tmp\.\w+"  # a nameless file, where a file system cannot make one at once
    r"|\.nfs[0-9a-f]+"  # NFS: a file removed while open
)


class WorkLock:
    """Lock of an output and its work folder, held inside ``with``.

    Finished parts of earlier runs are kept; the lock of a dead run is taken over.

    Raises, on entering:
        InvalidArgument: the folder holds other files, or is not a folder.
        StorageError: another run holds the lock, or the folder cannot be made.
    """

    def __init__(self, output: str) -> None:
        self._output = output
        self.folder = WorkFolder(os.path.abspath(f"{output}.parts"))
        self._merging = os.path.join(self.folder.path, MERGING)
        self._settings = os.path.join(self.folder.path, _SETTINGS)
        self._claim = Claim(self.folder.path, "run")
        self._claim_path = Path(self.folder.path, "run.claim")
        self._token: object = None
        self._warned = False

    def __enter__(self) -> WorkLock:
        self.folder.check_own()
        with (
            as_storage_error(self.folder.path, "cannot create"),
            contextlib.suppress(FileExistsError),
        ):
            os.mkdir(self.folder.path)
        # after that time a holder that died on another machine is recognized as dead
        deadline = time.monotonic() + 1.5 * STALE_AFTER
        try:
            self._take(deadline)
        except BaseException:  # including Ctrl-C
            self._claim.give_up()
            raise
        return self

    def _take(self, deadline: float) -> None:
        try:
            while not self._claim.acquire():
                self._warn_of_holder()
                self._claim.wait(deadline)
        except StorageError as error:
            holder = read_claim(self._claim_path)
            if holder is None:
                raise
            raise StorageError(
                f"{self._output}: another run is writing it ({describe_holder(holder)}); wait for "
                "its end, or choose another prefix"
            ) from error
        self._claim.__enter__()
        self._token = token_of(read_claim(self._claim_path))
        self.folder.remove_temporaries()
        remove_leftovers(Path(self.folder.path), "run", at_once=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        finished: set[str] = set()
        try:
            finished = self.folder.finished_keys()
            if not finished:
                os.stat(self._merging)
        except FileNotFoundError:  # nothing can be resumed
            self.clear()
        except OSError:  # unknown
            pass
        self._claim.__exit__()
        try:
            os.rmdir(self.folder.path)
        except OSError:
            if finished and kind is not InvalidArgument:  # which has its own remedy
                logger.warning(
                    "%s: %d finished parts are kept there; repeat the command to resume from them, "
                    "or delete the folder",
                    self.folder.path,
                    len(finished),
                )

    def _warn_of_holder(self) -> None:
        """Warn once, since the wait may be longer than a minute."""
        holder = read_claim(self._claim_path)
        if holder is not None and not holder_is_dead(holder) and not self._warned:
            self._warned = True
            logger.warning(
                "%s: another run is writing it (%s); waiting up to %.0f seconds for it to end or "
                "to stop responding",
                self._output,
                describe_holder(holder),
                1.5 * STALE_AFTER,
            )

    def check_unused_parts(
        self, keys: set[str], settings: Mapping[str, object], *, discard: bool
    ) -> None:
        """Warn of finished parts whose key is not in `keys`, and record the run's settings;
        InvalidArgument if they are of a run with other settings, unless `discard`."""
        unused = len(self.folder.finished_keys() - keys)
        before = _read_record(self._settings)
        changes = [
            f"{name} is {value}, was {before[name]}"
            for name, value in settings.items()
            if before.get(name, value) != value
        ]
        if unused and not before:
            changes = ["its settings are unknown"]
        if unused and changes and not discard:
            raise InvalidArgument(
                f"{self.folder.path}: holds {unused} finished parts of a run with other settings "
                f"({'; '.join(changes)}); repeat that command to resume it, choose another prefix, "
                "or pass discard_parts=True (--discard-parts) to remove them"
            )
        if unused:
            logger.warning(
                "%s: %d finished parts are of other inputs, settings or tokenizers; they are not "
                "used, and removed with the folder at the end",
                self.folder.path,
                unused,
            )
        if before != settings:
            _write_record(self._settings, settings)

    def begin_merging(self, parts: Sequence[InputPart], *, overwrite: bool) -> None:
        """Record that merging begins and no output exists: outputs found later are of this run."""
        if self.is_merging(parts):
            return
        # with overwrite an old output looks like a new one
        _write_record(self._merging, {"parts": _digest(parts), "was_free": not overwrite})
        parent = os.path.dirname(self.folder.path)
        with contextlib.suppress(OSError), opened(parent) as directory:
            os.fsync(directory)  # a power loss might keep a part of the output without the folder

    def is_merging(self, parts: Sequence[InputPart]) -> bool:
        """Return True if an earlier run began to merge the same parts without existing outputs."""
        return _read_record(self._merging) == {"parts": _digest(parts), "was_free": True}

    def remove_leftovers(self, parts: Sequence[InputPart], prefixes: Sequence[str]) -> None:
        """Remove temporary files of an earlier run killed while it merged the same parts."""
        if _read_record(self._merging).get("parts") != _digest(parts):
            return
        finals = {path for prefix in prefixes for path in written_paths(os.path.abspath(prefix))}
        finals.add(os.path.abspath(f"{self._output}.bad.jsonl"))
        for folder in {os.path.dirname(path) for path in finals}:
            with as_storage_error(folder, "cannot list"):
                paths = [os.path.join(folder, name) for name in os.listdir(folder)]
            for path in paths:
                final, _, rest = path.rpartition(".tmp.")
                if final in finals and _RANDOM.fullmatch(rest):
                    with contextlib.suppress(OSError):
                        os.unlink(path)

    def clear(self) -> None:
        """Remove the files of runs, unless another run has taken over the lock meanwhile."""
        with contextlib.suppress(StorageError):  # the next run removes them
            if token_of(read_claim(self._claim_path)) == self._token:
                self.folder.clear()


def _write_record(path: str, record: Mapping[str, object]) -> None:
    """Write a JSON object, or replace the one that is there, so that a power loss keeps it."""
    text = json.dumps(record).encode()
    write_file(path, lambda file: file.write(text), overwrite=True)


def _read_record(path: str) -> dict[str, object]:
    """Return a record that `_write_record` wrote; an empty one if it is missing or damaged."""
    try:
        return read_object(path)
    except (OSError, Damaged):
        return {}


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a part."""

    key: str
    attempt: str
    """Random part of its files' names."""
    documents: int
    blank: int
    """Blank lines."""
    bad: int
    """Bad lines or rows."""
    tokens: tuple[int, ...]
    """For each key."""
    empty: tuple[int, ...]
    """Documents without a token, for each key."""
    lines: tuple[int, ...]
    """Lines or rows of each piece."""
    sizes: tuple[tuple[int, int], ...]
    """Bytes of the .bin and the .idx, for each key."""
    rows_bytes: int
    """Bytes of the provenance."""

    @property
    def name(self) -> str:
        return f"{self.key}.{self.attempt}"


class WorkFolder:
    """File names and finished parts of a work folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pair(self, name: str, number: int) -> str:
        """Return the prefix of a pair; `name` is `<key>.<attempt>`, here and below."""
        return os.path.join(self.path, f"{name}.{number}")

    def bad(self, name: str) -> str:
        return os.path.join(self.path, f"{name}.bad.jsonl")

    def rows(self, name: str) -> str:
        return os.path.join(self.path, f"{name}.provenance")

    def pulse(self, name: str) -> str:
        return os.path.join(self.path, f"{name}.pulse")

    def read_done(self, key: str, pairs: int) -> Done | None:
        """Return the result of a part, or None if it is unfinished or no longer complete."""
        try:
            fields = read_object(self._done(key))
            done = Done(**{name: _tuples(value) for name, value in fields.items()})
            if not _is_possible(done, pairs):
                return None
            sizes = tuple(pair_bytes(self.pair(done.name, number)) for number in range(pairs))
            rows_bytes = os.path.getsize(self.rows(done.name))
            bad_is_there = not done.bad or os.path.exists(self.bad(done.name))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        found = (key, sizes, rows_bytes)
        return done if (done.key, done.sizes, done.rows_bytes) == found and bad_is_there else None

    def write_done(self, done: Done) -> None:
        """Write the result of a part; it may replace that of another finished attempt."""
        _write_record(self._done(done.key), asdict(done))

    def bytes_in_progress(self) -> int:
        """Return the bytes of input that unfinished parts have read, from their heartbeats."""
        total = 0
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.path):
                if entry.name.endswith(".pulse"):
                    with contextlib.suppress(OSError, ValueError), open(entry.path) as file:
                        total += int(file.read() or 0)
        return total

    def finished_keys(self) -> set[str]:
        """Return the keys of finished parts of all runs."""
        with as_storage_error(self.path, "cannot list the work folder"):
            names = os.listdir(self.path)
        return {name.removesuffix(".json") for name in names if _DONE.fullmatch(name)}

    def remove_temporaries(self) -> None:
        """Remove the temporary files of workers that no longer run."""
        self._remove(name for name in self._own() if ".tmp." in name or name.endswith(".pulse"))

    def check_own(self) -> None:
        """Raise InvalidArgument if the path is not a folder, or holds files not made by a run.

        The folder is removed at the end of a run.
        """
        with as_storage_error(self.path, "cannot read the status of"):
            try:
                is_folder = stat.S_ISDIR(os.stat(self.path).st_mode)
            except FileNotFoundError:
                is_folder = not os.path.islink(self.path)
        if not is_folder:
            raise InvalidArgument(
                f"{self.path}: must be a folder or not exist, since finished parts are kept there; "
                f"move it away, or choose another prefix"
            )
        with contextlib.suppress(FileNotFoundError), as_storage_error(self.path, "cannot list"):
            for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
                if not _OURS.fullmatch(entry.name) or entry.is_dir(follow_symlinks=False):
                    raise InvalidArgument(
                        f"{self.path}: holds {entry.name}, which is not a file of a run, and the "
                        f"folder is removed at the end; move the file, or choose another prefix"
                    )

    def clear(self) -> None:
        """Remove the files of runs except the claim.

        Pairs are removed first, then results, then the record of merging: after an interruption
        in between, the next run still recognizes the pairs at the output as its own.
        """
        names = [name for name in self._own() if not name.startswith("run.claim")]
        self._remove(sorted(names, key=lambda name: (name == MERGING, bool(_DONE.fullmatch(name)))))

    def _own(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.path) if _OURS.fullmatch(name)]
        except OSError:
            return []

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))

    def _done(self, key: str) -> str:
        return os.path.join(self.path, f"{key}.json")


class BadLines:
    """Writer of the bad lines of a part: a JSON object with piece, place, rule and detail a line.

    The file is published at the end of the `with` block if there were any.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = AtomicFiles([path])
        self._file: BinaryIO | None = None
        self.count = 0

    def add(self, piece: int, refused: Refused) -> None:
        """Add a bad line of the piece with this number in the part."""
        if self._file is None:
            self._file = self._files.open(self._path)
        error = refused.error
        entry = {
            "piece": piece,
            "place": refused.place,
            "rule": error.rule,
            "detail": error.detail,
        }
        with as_storage_error(self._path, "cannot write"):
            self._file.write(json.dumps(entry).encode() + b"\n")
        self.count += 1

    def __enter__(self) -> BadLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._file is not None:
                self._files.publish()
        finally:
            self._files.discard()


class PartRows:
    """Writer of the provenance of a part, whose files are its pieces, published at the end."""

    def __init__(self, path: str, pieces: int) -> None:
        self._path = path
        self._files = AtomicFiles([path])
        self._spool = ProvenanceSpool(os.path.dirname(path))
        for piece in range(pieces):
            self._spool.number_of(RowFile(path=str(piece), format="piece"))

    def add(self, rows: InputRows) -> None:
        """Add documents; ``rows.file`` is the piece, ``rows.row`` the place in it."""
        with as_storage_error(self._path, "cannot write"):
            self._spool.add(rows)

    def __enter__(self) -> PartRows:
        self._spool.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with as_storage_error(self._path, "cannot write"):
                    self._spool.assemble(self._files.open(self._path), bytes(16))
                self._files.publish()
        finally:
            self._files.discard()
            self._spool.close()


def read_bad_lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the entries that `BadLines` wrote; raise FormatError for any other content."""
    with as_storage_error(path, "cannot read the bad lines"), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = parse_object(line)
                kinds = {name: type(value) for name, value in entry.items()}
            except Damaged as error:
                raise not_written(path, f"line {number}: {error}") from error
            if kinds != _BAD_LINE:
                raise not_written(path, f"line {number}: not an entry of a bad line")
            yield entry


def not_written(path: str, what: str) -> FormatError:
    return FormatError(
        f"{path}: was changed after a run wrote it: {what}; delete its folder and repeat the "
        "command"
    )


class Heartbeat:
    """A file with the progress of a part, written every second for the progress bar."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._last = time.monotonic()
        self._before = 0

    def update(self, done: int) -> None:
        """Record that `done` bytes of the current piece are read."""
        now = time.monotonic()
        if now - self._last >= _BEAT_SECONDS:
            self._last = now
            with contextlib.suppress(OSError), open(self._path, "w") as file:
                file.write(str(self._before + done))

    def piece_done(self, nbytes: int) -> None:
        self._before += nbytes

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def pair_bytes(prefix: str) -> tuple[int, int]:
    """Return the sizes of the .bin and the .idx; raise OSError if one is missing."""
    first, second = pair_paths(prefix)
    return os.path.getsize(first), os.path.getsize(second)


def is_published(prefix: str, parts: Sequence[tuple[int, int]]) -> bool:
    """Return True if a pair exists with the sizes of the merged `parts`."""
    bins = sum(size for size, _ in parts)
    idxs = sum(size - _EMPTY_IDX for _, size in parts) + _EMPTY_IDX
    try:
        return pair_bytes(prefix) == (bins, idxs)
    except OSError:
        return False


def is_half_published(prefix: str, parts: Sequence[tuple[int, int]]) -> bool:
    """Return True if a killed run left a part of the pair of the merged `parts`.

    After a power loss this may be the .idx or the provenance without the .bin, which a run that
    cannot publish removes last.
    """
    tokens, provenance, index = written_paths(prefix)
    try:
        whole = os.path.getsize(tokens) == sum(size for size, _ in parts)
    except FileNotFoundError:
        return os.path.lexists(provenance) or os.path.lexists(index)
    except OSError:
        return False
    return whole and not os.path.lexists(index)


def _digest(parts: Sequence[InputPart]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(part.key for part in parts).encode())


def _is_possible(done: Done, pairs: int) -> bool:
    """Return True if the fields used as paths and counts are valid."""
    counts = (done.documents, done.blank, done.bad, done.rows_bytes, *done.tokens)
    counts += (*done.empty, *done.lines)
    return (
        isinstance(done.attempt, str)
        and _ATTEMPT.fullmatch(done.attempt) is not None
        and len(done.tokens) == len(done.empty) == len(done.sizes) == pairs
        and all(map(is_size, counts))
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
