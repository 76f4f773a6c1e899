"""The work folder of a tokenizing run: its lock and its finished parts.

For a part there are `<key>.<attempt>.0.bin/.idx` (and `.1`, … for further keys),
`<key>.<attempt>.bad.jsonl` if it had bad lines, and `<key>.json`, put there last: a part is
finished if that is there and the sizes it states are those of the pairs. Attempts have names of
their own, so two workers at one part are not in each other's way. While a part is worked on,
`<key>.<attempt>.pulse` says how far.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
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
    token_of,
)
from megaindex.errors import FormatError, InvalidArgument, StorageError
from megaindex.format.pair import pair_paths
from megaindex.io.atomic import AtomicFiles
from megaindex.io.json_files import Damaged, is_size, parse_object, read_object
from megaindex.io.os_errors import as_storage_error
from megaindex.tokenize.parts import InputPart
from megaindex.tokenize.records import Refused

logger = logging.getLogger("megaindex")

_EMPTY_IDX = 42  # header and first bound: what every .idx has once
_RANDOM = re.compile(r"[0-9a-f]{16}")  # behind .tmp. in the name of a temporary
MERGING = "merging.json"
_BEAT_SECONDS = 1.0
_ATTEMPT = re.compile(r"[0-9a-f]{8}")
_DONE = re.compile(r"[0-9a-f]{32}\.json")
_BAD_LINE = {"piece": int, "place": int, "rule": str, "detail": str}
_OURS = re.compile(
    r"[0-9a-f]{32}\.json(\.tmp\.[0-9a-f]+)?"
    r"|[0-9a-f]{32}\.[0-9a-f]{8}\.(pulse|(\d+\.(bin|idx)|bad\.jsonl)(\.tmp\.[0-9a-f]+)?)"
    r"|merging\.json(\.tmp\.[0-9a-f]+)?"
    r"|run\.claim(\.[0-9a-f]+(\.dead)?)?"
    r"|\.nfs[0-9a-f]+"  # what a network file system makes of a file that is removed while open
)


class WorkLock:
    """Held inside ``with``; what another run left there is kept, what a dead one held is taken.

    Raises, on entering:
        InvalidArgument: the folder holds what no run made, or is not a folder.
        StorageError: another run is at work on the same output, or the folder cannot be made.
    """

    def __init__(self, output: str) -> None:
        self._output = output
        self.folder = WorkFolder(os.path.abspath(f"{output}.parts"))
        self._merging = os.path.join(self.folder.path, MERGING)
        self._claim = Claim(self.folder.path, "run")
        self._claim_path = Path(self.folder.path, "run.claim")
        self._token: object = None
        self._told = False

    def __enter__(self) -> WorkLock:
        self.folder.check_own()
        with (
            as_storage_error(self.folder.path, "cannot create"),
            contextlib.suppress(FileExistsError),
        ):
            os.mkdir(self.folder.path)
        # one that died on another machine shows by then
        deadline = time.monotonic() + 1.5 * STALE_AFTER
        try:
            self._take(deadline)
        except BaseException:  # a Ctrl-C too: nobody waits for a run that did not begin
            self._claim.give_up()
            raise
        return self

    def _take(self, deadline: float) -> None:
        try:
            while not self._claim.acquire():
                self._tell_who_holds_it()
                self._claim.wait(deadline)
        except StorageError as error:
            holder = read_claim(self._claim_path)
            if holder is None:
                raise
            raise StorageError(
                f"{self._output}: another run is at work on it ({describe_holder(holder)}); let it "
                "end, or "
                f"choose another prefix"
            ) from error
        self._claim.__enter__()
        self._token = token_of(read_claim(self._claim_path))
        self.folder.remove_temporaries()

    def __exit__(self, *_: object) -> None:
        finished: set[str] = set()
        with contextlib.suppress(StorageError):  # somebody took the folder away
            finished = self.folder.finished_keys()
        if not finished and not os.path.exists(self._merging):
            self.is_over()  # what is left is of no use to the next run
        self._claim.__exit__()
        try:
            os.rmdir(self.folder.path)
        except OSError:
            if finished:
                logger.warning(
                    "%s: %d finished parts are kept there; give the same command again to go on "
                    "from them, or delete the folder",
                    self.folder.path,
                    len(finished),
                )

    def _tell_who_holds_it(self) -> None:
        """Warn, once: the wait is of a minute and more."""
        holder = read_claim(self._claim_path)
        if holder is not None and not holder_is_dead(holder) and not self._told:
            self._told = True
            logger.warning(
                "%s: another run holds it (%s); waiting up to %.0f seconds for it to end or to "
                "show no sign of life",
                self._output,
                describe_holder(holder),
                1.5 * STALE_AFTER,
            )

    def tell_strangers(self, keys: set[str]) -> None:
        """Warn of finished parts that this run has no use for."""
        strangers = self.folder.finished_keys() - keys
        if strangers:
            logger.warning(
                "%s: %d finished parts are of other inputs, settings or tokenizers than now; they "
                "are not used, and go with the folder at the end",
                self.folder.path,
                len(strangers),
            )

    def begin_merging(self, parts: Sequence[InputPart], *, overwrite: bool) -> None:
        """Note whether no output was there before, so that those found later are this run's."""
        if self.is_merging(parts):  # as it was then
            return
        with as_storage_error(self._merging, "cannot write"), open(self._merging, "w") as file:
            # with overwrite an old output could not be told from a new one
            json.dump({"parts": _digest(parts), "was_free": not overwrite}, file)
            file.flush()
            os.fsync(file.fileno())

    def is_merging(self, parts: Sequence[InputPart]) -> bool:
        """Whether an earlier run had come to `begin_merging` with the same parts, and no output was
        there then."""
        return self._note() == {"parts": _digest(parts), "was_free": True}

    def remove_leftovers(self, parts: Sequence[InputPart], prefixes: Sequence[str]) -> None:
        """Remove the temporaries of an earlier run with the same parts that was killed while it put
        them together; no other run is at these outputs as long as this one is held."""
        if self._note().get("parts") != _digest(parts):
            return
        finals = {path for prefix in prefixes for path in pair_paths(os.path.abspath(prefix))}
        finals.add(os.path.abspath(f"{self._output}.bad.jsonl"))
        for folder in {os.path.dirname(path) for path in finals}:
            with as_storage_error(folder, "cannot list"):
                paths = [os.path.join(folder, name) for name in os.listdir(folder)]
            for path in paths:
                final, _, rest = path.rpartition(".tmp.")
                if final in finals and _RANDOM.fullmatch(rest):
                    with contextlib.suppress(OSError):
                        os.unlink(path)

    def is_over(self) -> None:
        """Remove all that runs made in the folder, but for the claim, which goes last.

        A run that was frozen for so long that another took the folder leaves it to that one.
        """
        with contextlib.suppress(StorageError):  # then the next run removes it
            if token_of(read_claim(self._claim_path)) == self._token:
                self.folder.clear()

    def _note(self) -> dict[str, object]:
        """Return what `begin_merging` wrote; empty where it did not."""
        try:
            return read_object(self._merging)
        except (OSError, Damaged):
            return {}


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a part."""

    key: str
    attempt: str
    """Part of the names of its files."""
    documents: int
    blank: int
    """Lines without a character."""
    bad: int
    tokens: tuple[int, ...]
    """For each key."""
    empty: tuple[int, ...]
    """Documents without a token, for each key."""
    lines: tuple[int, ...]
    """Lines or rows of each piece."""
    sizes: tuple[tuple[int, int], ...]
    """Bytes of the .bin and the .idx, for each key."""

    @property
    def name(self) -> str:
        return f"{self.key}.{self.attempt}"


class WorkFolder:
    """Names and finished parts of one folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pair(self, name: str, number: int) -> str:
        """Return prefix of a pair; `name` is `<key>.<attempt>`, here and below."""
        return os.path.join(self.path, f"{name}.{number}")

    def bad(self, name: str) -> str:
        return os.path.join(self.path, f"{name}.bad.jsonl")

    def pulse(self, name: str) -> str:
        return os.path.join(self.path, f"{name}.pulse")

    def read_done(self, key: str, pairs: int) -> Done | None:
        """Return the result of a part; None if it is not finished, or not whole any more."""
        try:
            fields = read_object(self._done(key))
            done = Done(**{name: _tuples(value) for name, value in fields.items()})
            if not _is_possible(done, pairs):
                return None
            sizes = tuple(pair_bytes(self.pair(done.name, number)) for number in range(pairs))
            bad_is_there = not done.bad or os.path.exists(self.bad(done.name))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return done if (done.key, done.sizes) == (key, sizes) and bad_is_there else None

    def write_done(self, done: Done) -> None:
        """Replaces what another attempt wrote: whichever is there, its files are too."""
        path = self._done(done.key)
        temporary = f"{path}.tmp.{done.attempt}"
        with as_storage_error(path, "cannot write"):
            with open(temporary, "w") as file:
                json.dump(asdict(done), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)

    def bytes_in_progress(self) -> int:
        """Return bytes of input that unfinished parts have behind them, as they last said."""
        total = 0
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.path):
                if entry.name.endswith(".pulse"):
                    with contextlib.suppress(OSError, ValueError), open(entry.path) as file:
                        total += int(file.read() or 0)
        return total

    def finished_keys(self) -> set[str]:
        """Keys of parts that are finished, of this run or another."""
        with as_storage_error(self.path, "cannot list the work folder"):
            names = os.listdir(self.path)
        return {name.removesuffix(".json") for name in names if _DONE.fullmatch(name)}

    def remove_temporaries(self) -> None:
        """Of workers that are gone."""
        self._remove(name for name in self._own() if ".tmp." in name or name.endswith(".pulse"))

    def check_own(self) -> None:
        """InvalidArgument if something is in the way of the folder, or in it and not of a run.

        At the end the folder goes with all that is in it, so it must hold nothing else.
        """
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise InvalidArgument(
                f"{self.path}: is no folder, and finished parts are kept in one of that name until "
                f"the end; move it away, or choose another prefix"
            )
        with contextlib.suppress(FileNotFoundError), as_storage_error(self.path, "cannot list"):
            for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
                if not _OURS.fullmatch(entry.name) or entry.is_dir(follow_symlinks=False):
                    raise InvalidArgument(
                        f"{self.path}: holds {entry.name}, which no run puts there, and the folder "
                        f"goes at the end; move that away, or choose another prefix"
                    )

    def clear(self) -> None:
        """Remove what runs made, but for the claim.

        Pairs go first, then the outcomes, which alone make no part look finished, then the note
        that parts were put together: a run that comes upon what an interruption left knows that
        the pairs at the output are those of the same parts.
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
    """The bad lines of a part, on disk: `{"piece", "place", "rule", "detail"}` on each line.

    The file appears when the `with` block ends, if there were any.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = AtomicFiles([path])
        self._file: BinaryIO | None = None
        self.count = 0

    def add(self, piece: int, refused: Refused) -> None:
        """`piece` by its number in the part."""
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


def read_bad_lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield what `BadLines` wrote; FormatError for anything else."""
    with as_storage_error(path, "cannot read the bad lines"), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = parse_object(line)
                kinds = {name: type(value) for name, value in entry.items()}
            except Damaged as error:
                raise not_written(path, f"line {number}: {error}") from error
            if kinds != _BAD_LINE:
                raise not_written(path, f"line {number}: it names no bad line")
            yield entry


def not_written(path: str, what: str) -> FormatError:
    return FormatError(
        f"{path}: must be as a run wrote it, but {what}; delete the folder it is in, and give the "
        f"command again"
    )


class Heartbeat:
    """A file with the progress of a part, written every second, for the progress bar alone."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._last = time.monotonic()
        self._behind = 0

    def beat(self, done: int) -> None:
        """`done` bytes of the current piece are read."""
        now = time.monotonic()
        if now - self._last >= _BEAT_SECONDS:
            self._last = now
            with contextlib.suppress(OSError), open(self._path, "w") as file:
                file.write(str(self._behind + done))

    def piece_done(self, nbytes: int) -> None:
        self._behind += nbytes

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def pair_bytes(prefix: str) -> tuple[int, int]:
    """Return sizes of the .bin and the .idx; OSError if one is not there."""
    first, second = pair_paths(prefix)
    return os.path.getsize(first), os.path.getsize(second)


def is_published(prefix: str, parts: Sequence[tuple[int, int]]) -> bool:
    """Return whether a pair is there with the sizes that `parts`, of such sizes, have together."""
    bins = sum(size for size, _ in parts)
    idxs = sum(size - _EMPTY_IDX for _, size in parts) + _EMPTY_IDX
    try:
        return pair_bytes(prefix) == (bins, idxs)
    except OSError:
        return False


def is_half_published(prefix: str, parts: Sequence[tuple[int, int]]) -> bool:
    """Whether a run that was killed while it published a pair left the .bin and no .idx yet."""
    tokens, index = pair_paths(prefix)
    try:
        whole = os.path.getsize(tokens) == sum(size for size, _ in parts)
    except OSError:
        return False
    return whole and not os.path.lexists(index)


def _digest(parts: Sequence[InputPart]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(part.key for part in parts).encode())


def _is_possible(done: Done, pairs: int) -> bool:
    """Whether a run can have written it: what becomes a path or is added up is as it must be."""
    counts = (done.documents, done.blank, done.bad, *done.tokens, *done.empty, *done.lines)
    return (
        isinstance(done.attempt, str)
        and _ATTEMPT.fullmatch(done.attempt) is not None
        and len(done.tokens) == len(done.empty) == len(done.sizes) == pairs
        and all(map(is_size, counts))
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
