"""Index arrays under a framework's own file names, and beside them what identifies them.

A framework finds its arrays by path and settings alone. The sidecar ``…-megaindex.json`` adds which
corpus they were cut from, so that a corpus that changed is noticed, and which files it speaks of,
so that arrays that the framework put in their place are not taken for them. Runs with and without
megaindex share the arrays; the framework never reads the sidecar. Sidecars of sets that were built
together are hard links to one file that lists them all: hundreds of sets cost one file to write and
to read.

Arrays that have none were written by the framework: they are checked, accepted, logged and recorded
as ``found``. What is found is never written to, and what was built here is rebuilt when the corpus
has changed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from megaindex.errors import FormatError, StorageError
from megaindex.io.failures import as_storage_error
from megaindex.io.mapping import map_readonly
from megaindex.store.array_set import (
    ArrayFiles,
    Arrays,
    FileState,
    Identity,
    Sidecar,
)
from megaindex.store.fingerprint import canonical_json
from megaindex.store.listing import Listing, current_states
from megaindex.store.manifest import ARRAY_DTYPES
from megaindex.store.npy import map_npy

logger = logging.getLogger("megaindex")

SIDECAR_FORMAT = 2


def find_arrays(
    files: ArrayFiles,
    identity: Identity,
    check: Callable[[Arrays], None],
    listing: Listing | None = None,
) -> Sidecar | None:
    """The sidecar of arrays that may be used; None where they have to be built.

    ``check`` looks at arrays that have no sidecar, or other files than it was written for, and
    raises FormatError if they are not those that ``identity`` asks for. With a ``listing`` of their
    directory no file is looked at but sidecars: files that were written to since are left to
    `check_unchanged`; and what is accepted is not recorded, but noted in ``listing.accepted``.

    Raises:
        FormatError: arrays that megaindex did not write belong to another corpus or are damaged.
    """
    sidecar = read_sidecar(files, listing)
    states = current_states(files, sidecar, listing)
    if states is None or (sidecar is not None and _is_ours_damaged(sidecar, states)):
        if sidecar is not None:
            logger.warning("%s: files are missing or of another size; not used", files)
        return None
    if sidecar is None or states != sidecar.files:
        return _accept(files, states, identity, check, listing)
    if identity.is_of(sidecar):
        return sidecar
    if sidecar.origin != "built":
        _refuse(files)
    logger.warning("%s: built from other data or with other settings; rebuilt", files)
    return None


def _refuse(files: ArrayFiles) -> NoReturn:
    raise FormatError(
        f"{files}-*: these index arrays were written by the framework, not by megaindex, and are "
        "not those of the corpus and the settings of this run: the corpus changed after they were "
        "built, or a setting did that their name does not tell; remove the files of that name, or "
        "choose another cache directory"
    )


def _accept(
    files: ArrayFiles,
    states: dict[str, FileState],
    identity: Identity,
    check: Callable[[Arrays], None],
    listing: Listing | None,
) -> Sidecar:
    arrays = {name: map_npy(path) for name, path in files.arrays.items()}
    try:
        check({name: array for name, (array, _) in arrays.items()})
    except FormatError as error:
        logger.warning("%s: %s", files, error)
        _refuse(files)
    logger.info("%s: not recorded as they are now; checked and used", files)
    sidecar = identity.sidecar(
        "found",
        {name: (a.dtype.name, a.shape, offset) for name, (a, offset) in arrays.items()},
        states,
    )
    if listing is None:
        record_accepted([(files, sidecar)])
    else:
        listing.accepted.append((files, sidecar))
    return sidecar


def record_accepted(sets: Sequence[tuple[ArrayFiles, Sidecar]]) -> None:
    """Record sets of one directory where it can be written to: else they are checked each time."""
    try:
        write_sidecars(sets)
    except StorageError as error:
        logger.warning("%s; these arrays are used, and will be checked again", error)


def write_sidecars(sets: Sequence[tuple[ArrayFiles, Sidecar]]) -> None:
    """Record sets of one directory, in one file that has a name for each of them."""
    body = {files.name: vars(sidecar) for files, sidecar in sets}
    text = canonical_json({"sidecar_format": SIDECAR_FORMAT, "sets": body})
    first = sets[0][0].sidecar
    temporary = f"{first}.tmp.{secrets.token_hex(8)}"
    with as_storage_error(first, "cannot write"):
        try:
            with open(temporary, "xb", buffering=0) as file:
                file.write(text.encode())
            for files, sidecar in sets[1:]:
                if not _link(temporary, files.sidecar):
                    write_sidecars([(files, sidecar)])
            os.rename(temporary, first)
        except BaseException:
            remove(temporary)
            raise


def _link(source: str, name: str) -> bool:
    """Whether ``name`` is now one of ``source``: not where there is a file of that name already,
    nor on a file system without hard links."""
    try:
        os.link(source, name)
    except OSError:
        return False
    return True


def remove(path: str) -> None:
    """Remove a file if it is there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def read_sidecar(files: ArrayFiles, listing: Listing | None = None) -> Sidecar | None:
    """The sidecar; None where there is none that can be read: the arrays are then checked."""
    if listing is not None and files.sidecar not in listing:
        return None
    try:
        sidecar = _sets_of(files.sidecar, listing)[files.name]
        if not sidecar.arrays.keys() == sidecar.files.keys() == files.arrays.keys():
            raise ValueError("it describes other arrays")
        return sidecar
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s: cannot be read (%s); the arrays are checked anew", files.sidecar, error)
        return None


def _sets_of(path: str, listing: Listing | None) -> dict[str, Sidecar]:
    """The sets a sidecar lists, read once for all names that a listing shows to be one file."""
    inode = None if listing is None else listing.inode(path)
    if listing is not None and inode in listing.sidecars:
        return listing.sidecars[inode]
    with as_storage_error(path, "cannot read"):
        read_inode, sets = _sets_in(path)
    if listing is not None and inode == read_inode:
        listing.sidecars[inode] = sets
    return sets


_read_last: tuple[tuple[int, ...], dict[str, Sidecar]] | None = None


def _sets_in(path: str) -> tuple[int, dict[str, Sidecar]]:
    """The inode of a sidecar, and the sets it lists. The one read last is kept: the next set is
    often in it too."""
    global _read_last  # noqa: PLW0603
    status = os.stat(path)
    identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    last = _read_last
    if last is not None and last[0] == identity:
        return status.st_ino, last[1]
    with open(path, "rb", buffering=0) as file:
        body = json.loads(file.read())
    if body["sidecar_format"] != SIDECAR_FORMAT:
        raise ValueError("it is of another format")
    sets = {name: _parsed(**fields) for name, fields in body["sets"].items()}
    _read_last = identity, sets
    return status.st_ino, sets


def _parsed(arrays: dict[str, Any], files: dict[str, Any], **fields: Any) -> Sidecar:
    records = {
        name: (dtype, tuple(shape), offset) for name, (dtype, shape, offset) in arrays.items()
    }
    states = {name: [size, time, inode] for name, (size, time, inode) in files.items()}
    return Sidecar(arrays=records, files=states, **fields)


def map_arrays(files: ArrayFiles, sidecar: Sidecar) -> Arrays:
    """The arrays of a set, read-only; pickled objects are never loaded.

    Raises:
        MissingFile: a file was removed meanwhile.
        FormatError: a file has another size than the sidecar says.
    """
    arrays = {}
    for name, path in files.arrays.items():
        dtype, shape, offset = sidecar.arrays[name]
        data = map_readonly(path)
        nbytes = offset + math.prod(shape) * _ITEMSIZE[dtype]
        if data.size != nbytes or dtype not in ARRAY_DTYPES:
            raise FormatError(
                f"{path}: {files.sidecar} promises {nbytes} bytes of {dtype}, the file has "
                f"{data.size}; remove both files, they will be built again"
            )
        arrays[name] = data[offset:].view(dtype).reshape(shape)
    return arrays


def _is_ours_damaged(sidecar: Sidecar, states: dict[str, FileState]) -> bool:
    """Whether one of the very files that were written here has another size now."""
    return sidecar.origin == "built" and any(
        size != states[name][0] and inode == states[name][-1]
        for name, (size, _, inode) in sidecar.files.items()
    )


_ITEMSIZE = {name: np.dtype(name).itemsize for name in ARRAY_DTYPES}
