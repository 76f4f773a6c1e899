"""Index arrays under a framework's own file names, and beside them what identifies them.

A framework finds its arrays by path and settings alone. The sidecar ``…-megaindex.json`` adds which
corpus they were cut from, so that a corpus that changed is noticed, and which files it speaks of,
so that arrays that the framework put in their place are not taken for them. Runs with and without
megaindex share the arrays; the framework never reads the sidecar. Sidecars of sets that were built
together are hard links to one file that lists them all: hundreds of sets cost one file to write and
to read.

A sidecar of this boot, or one that says that its files are on the disk, is taken at its word. After
another boot its arrays are read once and compared with their checksums: a power loss takes pages
that were not written yet, and leaves the sizes as they were.

Arrays that have none were written by the framework: they are checked, accepted, logged and recorded
as ``found``. What is found is never written to, and what was built here is rebuilt when the corpus
has changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, MissingFile, StorageError
from megaindex.io.mapping import map_with_status
from megaindex.kernels.types import IntArray
from megaindex.store.array_set import (
    ArrayFiles,
    ArrayRecord,
    Arrays,
    FileState,
    Identity,
    Sidecar,
    changed,
    state_of,
)
from megaindex.store.fingerprint import array_checksum
from megaindex.store.listing import Listing, current_states
from megaindex.store.npy import ARRAY_DTYPES, map_npy
from megaindex.store.sidecar_file import make_sets_durable_later, read_sidecar, write_sidecars

logger = logging.getLogger("megaindex")


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
        return _verified(files, sidecar, listing) if sidecar.in_doubt else sidecar
    if listing is not None:  # a new file may have got the inode of a removed one: look at it
        return find_arrays(files, identity, check)
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


def _verified(files: ArrayFiles, sidecar: Sidecar, listing: Listing | None) -> Sidecar | None:
    """The sidecar of another boot if nothing was lost since; None where arrays are to be built."""
    try:
        damaged = damaged_arrays(files, sidecar)
    except MissingFile:  # removed just now, by who builds them anew
        return None
    if damaged and sidecar.origin != "built":
        raise FormatError(
            f"{files.arrays[damaged[0]]}: does not hold what it held when it was accepted; a power "
            "loss takes what is not yet on the disk; remove all files of that name, they will be "
            "built again"
        )
    if damaged:
        names = ", ".join(damaged)
        logger.warning("%s: %s lost what was written; rebuilt", files, names)
        return None
    logger.info("%s: recorded under another boot; nothing is lost", files)
    sidecar.in_doubt = False
    if listing is None:
        make_sets_durable_later([(files, sidecar)])
    else:
        listing.verified.append((files, sidecar))
    return sidecar


def damaged_arrays(files: ArrayFiles, sidecar: Sidecar) -> list[str]:
    """Names of the arrays that do not hold what the sidecar says; every byte is read.

    Raises:
        MissingFile, FormatError: as `map_arrays`.
    """
    assert sidecar.checksums is not None, "they are read where a sidecar is in doubt"
    arrays = map_arrays(files, sidecar)
    return [name for name, a in arrays.items() if array_checksum(a) != sidecar.checksums[name]]


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
    records = {
        name: (array.dtype.name, array.shape, offset) for name, (array, offset) in arrays.items()
    }
    checksums = {name: array_checksum(array) for name, (array, _) in arrays.items()}
    sidecar = identity.sidecar("found", records, states, checksums)
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
    else:
        make_sets_durable_later(sets)


def map_arrays(files: ArrayFiles, sidecar: Sidecar) -> Arrays:
    """The arrays of a set, read-only; pickled objects are never loaded.

    Raises:
        MissingFile: a file was removed meanwhile.
        FormatError: a file was replaced or written to, or has another size than the sidecar says.
    """
    arrays = {}
    for name, path in files.arrays.items():
        data, status = map_with_status(path)
        if state_of(status) != sidecar.files[name]:
            raise changed(files)
        array = _elements(data, sidecar.arrays[name])
        if array is None:
            dtype, shape, offset = sidecar.arrays[name]
            raise FormatError(
                f"{path}: {files.sidecar} promises {dtype} of shape {shape} after {offset} bytes, "
                f"the file has {data.size}; remove both files, they will be built again"
            )
        arrays[name] = array
    return arrays


def _elements(data: npt.NDArray[np.uint8], record: ArrayRecord) -> IntArray | None:
    """What a file holds behind its header; None if it has another size than that takes."""
    dtype, shape, offset = record
    try:
        if data.size == offset + math.prod(shape) * _ITEMSIZE[dtype]:
            return data[offset:].view(dtype).reshape(shape)
    except (KeyError, TypeError, ValueError):  # no sizes or no type: nobody wrote that here
        pass
    return None


def _is_ours_damaged(sidecar: Sidecar, states: dict[str, FileState]) -> bool:
    """Whether one of the very files that were written here has another size now."""
    return sidecar.origin == "built" and any(
        size != states[name][0] and inode == states[name][-1]
        for name, (size, _, inode) in sidecar.files.items()
    )


_ITEMSIZE = {name: np.dtype(name).itemsize for name in ARRAY_DTYPES}
