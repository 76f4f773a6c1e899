"""The work folder of an output, held by one run at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from megaindex.corpus.tokenize.parts import Part
from megaindex.corpus.tokenize.work import MERGING, WorkFolder, pair_bytes
from megaindex.errors import StorageError
from megaindex.format.paths import pair_paths
from megaindex.io.failures import as_storage_error
from megaindex.io.json_files import Damaged, read_object
from megaindex.store.claim import STALE_AFTER, Claim
from megaindex.store.holder import is_gone, read_claim, token_of, who

logger = logging.getLogger("megaindex")

_EMPTY_IDX = 42  # header and first bound: what every .idx has once
_RANDOM = re.compile(r"[0-9a-f]{16}")  # behind .tmp. in the name of a temporary


class Holding:
    """Held inside ``with``; what another run left there is kept, what a dead one held is taken.

    Raises, on entering:
        InvalidArgument: the folder holds what no run made, or is none.
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

    def __enter__(self) -> Holding:
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
                f"{self._output}: another run is at work on it ({who(holder)}); let it end, or "
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
        if holder is not None and not is_gone(holder) and not self._told:
            self._told = True
            logger.warning(
                "%s: another run holds it (%s); waiting up to %.0f seconds for it to end or to "
                "show no sign of life",
                self._output,
                who(holder),
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

    def begin_merging(self, parts: Sequence[Part], *, overwrite: bool) -> None:
        """Note whether no output was there before, so that those found later are this run's."""
        if self.is_merging(parts):  # as it was then
            return
        with as_storage_error(self._merging, "cannot write"), open(self._merging, "w") as file:
            # with overwrite an old output could not be told from a new one
            json.dump({"parts": _digest(parts), "was_free": not overwrite}, file)
            file.flush()
            os.fsync(file.fileno())

    def is_merging(self, parts: Sequence[Part]) -> bool:
        """Whether an earlier run had come to `begin_merging` with the same parts, and no output was
        there then."""
        return self._note() == {"parts": _digest(parts), "was_free": True}

    def remove_leftovers(self, parts: Sequence[Part], prefixes: Sequence[str]) -> None:
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
        """What `begin_merging` wrote; empty where it did not."""
        try:
            return read_object(self._merging)
        except (OSError, Damaged):
            return {}


def is_published(prefix: str, parts: Sequence[tuple[int, int]]) -> bool:
    """Whether a pair is there with the sizes that `parts`, of such sizes, have together."""
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


def _digest(parts: Sequence[Part]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(part.key for part in parts).encode())
