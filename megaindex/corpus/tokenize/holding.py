"""The work folder of an output, held by one run at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from megaindex.corpus.tokenize.parts import Part
from megaindex.corpus.tokenize.work import WorkFolder, pair_bytes
from megaindex.errors import StorageError
from megaindex.format.paths import check_not_a_half
from megaindex.io.failures import as_storage_error
from megaindex.store.claim import STALE_AFTER, Claim
from megaindex.store.holder import read_claim, who

logger = logging.getLogger("megaindex")

_EMPTY_IDX = 42  # header and first bound: what every .idx has once


class Holding:
    """Held inside ``with``; what another run left there is kept, what a dead one held is taken.

    Raises, on entering:
        StorageError: another run is at work on the same output, or the folder cannot be made.
    """

    def __init__(self, output: str) -> None:
        check_not_a_half(output)
        self._output = output
        self.folder = WorkFolder(os.path.abspath(f"{output}.parts"))
        self._merging = os.path.join(self.folder.path, "merging.json")
        self._claim = Claim(self.folder.path, "run")

    def __enter__(self) -> Holding:
        with (
            as_storage_error(self.folder.path, "cannot create"),
            contextlib.suppress(FileExistsError),
        ):
            os.mkdir(self.folder.path)
        # one that died on another machine shows by then
        deadline = time.monotonic() + 1.5 * STALE_AFTER
        try:
            while not self._claim.acquire():
                self._claim.wait(deadline)
        except StorageError as error:
            holder = read_claim(Path(self.folder.path, "run.claim"))
            if holder is None:
                raise
            raise StorageError(
                f"{self._output}: another run is at work on it ({who(holder)}); let it end, or "
                f"choose another prefix"
            ) from error
        self._claim.__enter__()
        self.folder.remove_temporaries()
        return self

    def __exit__(self, *_: object) -> None:
        self._claim.__exit__()
        try:
            os.rmdir(self.folder.path)
        except OSError:
            logger.warning(
                "%s: finished parts are kept there; give the same command again to go on from "
                "them, or delete the folder",
                self.folder.path,
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
        """Note that no output was there before, so that those found later are this run's."""
        with as_storage_error(self._merging, "cannot write"):
            if overwrite:  # an old output cannot be told from a new one
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._merging)
                return
            with open(self._merging, "w") as file:
                json.dump(_digest(parts), file)
                file.flush()
                os.fsync(file.fileno())

    def is_merging(self, parts: Sequence[Part]) -> bool:
        """Whether an earlier run had come to `begin_merging` with the same parts."""
        try:
            with open(self._merging) as file:
                return bool(json.load(file) == _digest(parts))
        except (OSError, ValueError):
            return False

    def is_over(self) -> None:
        """Remove all that is in the folder, but for the claim, which goes last.

        Outcomes go before pairs: where this is interrupted, no part looks finished that is not.
        """
        for entry in sorted(os.scandir(self.folder.path), key=lambda e: not _is_outcome(e.name)):
            if not entry.name.startswith("run.claim"):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def is_published(prefix: str, parts: Sequence[tuple[int, int]]) -> bool:
    """Whether a pair is there with the sizes that `parts`, of such sizes, have together."""
    bins = sum(size for size, _ in parts)
    idxs = sum(size - _EMPTY_IDX for _, size in parts) + _EMPTY_IDX
    try:
        return pair_bytes(prefix) == (bins, idxs)
    except OSError:
        return False


def _is_outcome(name: str) -> bool:
    return name.endswith(".json")


def _digest(parts: Sequence[Part]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(part.key for part in parts).encode())
