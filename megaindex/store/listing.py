"""What lies in a directory, read at once instead of asked for file by file."""

from __future__ import annotations

import os

from megaindex.errors import MissingFile
from megaindex.store.array_set import ArrayFiles, FileState, Sidecar, states_of


class Listing:
    """The names in a directory at one moment, for who would look for thousands of them.

    A blend of 1500 datasets looks for 7500 files: as many calls, or, on a network, messages, where
    a listing takes a few dozen. It tells that a file is there, not its size: who relies on it
    compares sizes when the files are opened.
    """

    def __init__(self, inodes: dict[str, int]) -> None:
        self._inodes = inodes
        self.sidecars: dict[int, dict[str, Sidecar]] = {}
        """Sets by name, of each sidecar file that was read, by inode: many names are links to one
        such file, which is read once."""
        self.accepted: list[tuple[ArrayFiles, Sidecar]] = []
        """Sets of the framework's that were checked and are to be recorded, together."""
        self.verified: list[tuple[ArrayFiles, Sidecar]] = []
        """Sets of another boot that lost nothing, and are to be noted as being on the disk."""

    @classmethod
    def of(cls, directory: str, at_most: int) -> Listing | None:
        """None where there are more names than ``at_most``, or it cannot be listed."""
        inodes: dict[str, int] = {}
        prefix = f"{directory}/"
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    inodes[prefix + entry.name] = entry.inode()
                    if len(inodes) > at_most:
                        return None
        except FileNotFoundError:
            return cls({})
        except OSError:
            return None
        return cls(inodes)

    def __contains__(self, path: str) -> bool:
        return path in self._inodes

    def inode(self, path: str) -> int | None:
        """Of a file's name; union file systems may tell another than ``os.stat`` does."""
        return self._inodes.get(path)

    def shows(self, files: ArrayFiles, sidecar: Sidecar) -> bool:
        """Whether all files are there and have the inodes that the sidecar has of them."""
        inodes = self._inodes
        return (
            not sidecar.in_doubt
            and (files.marker is None or files.marker in inodes)
            and all(
                inodes.get(path) == sidecar.files[name][-1] for name, path in files.arrays.items()
            )
        )


def current_states(
    files: ArrayFiles, sidecar: Sidecar | None, listing: Listing | None
) -> dict[str, FileState] | None:
    """The state of each array file, for all that is known; None where a file is missing."""
    if listing is not None and sidecar is not None and listing.shows(files, sidecar):
        return sidecar.files
    if not files.are_there(os.path.isfile if listing is None else listing.__contains__):
        return None
    try:
        return states_of(files.arrays)
    except MissingFile:  # removed just now, by who builds them anew
        return None
