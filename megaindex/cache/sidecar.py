"""Sidecars: records of index arrays that have a framework's own file names.

{"durable":"10","boot":"5e1c…","checksums":"90ab…","endings":{"sample_index":"-sample_index.npy"},
 "marker":null,"sets":{"a-train":{…},"b-train":{…}},"sidecar_format":3}

A framework finds its arrays by path and settings alone. The sidecar ``…-megaindex.json`` records
the corpus they were built from, to detect a corpus that changed, and the state of each array file,
to detect files that the framework has replaced. Runs with and without megaindex share the arrays;
the framework never reads the sidecar. Sets that were built together share one sidecar file, which
has a hard link for each of them, so hundreds of sets cost one file to write and to read.

``durable`` has a character for each set, in their order: 1 after its files were synced. It is the
first value, so its offset is fixed and one byte is overwritten in place. ``checksums`` holds those
of all arrays, in their order, in one string, since most readers do not need them.

A set that was recorded under this boot, or is marked as durable, is used as recorded. After another
boot its arrays are read once and compared with their checksums: a power loss takes pages that were
not yet written to the disk and keeps the sizes.

Arrays without a sidecar were written by the framework: they are checked, logged and recorded as
``found``, and never written to. Arrays built by megaindex are rebuilt when the corpus has changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megaindex._types import IntArray
from megaindex.cache.array_files import (
    SUFFIX,
    ArrayFiles,
    ArrayRecord,
    Arrays,
    FileState,
    Identity,
    Listing,
    Sidecar,
    changed,
    current_states,
    state_of,
)
from megaindex.cache.entry import boot_id, opened, sync_later
from megaindex.cache.fingerprint import array_checksum, canonical_json
from megaindex.cache.npy import ARRAY_DTYPES, map_npy
from megaindex.errors import FormatError, MissingFile, StorageError
from megaindex.io.atomic import read_regular
from megaindex.io.mapping import map_with_status
from megaindex.io.paths import as_storage_error
from megaindex.kernels import file_mapper

logger = logging.getLogger("megaindex")

SIDECAR_FORMAT = 3


class OtherFormat(ValueError):
    """A sidecar that another release wrote."""


UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that parsing anything but a sidecar raises."""
_LONGEST = 1 << 28  # bytes; a set has about a thousand
_DIGITS = 32  # of a checksum
_NOT_RECORDED = ("checksums", "in_doubt")  # fields of a Sidecar that are not stored with its set
_HEAD = '{"durable":"'


@dataclass(frozen=True, kw_only=True)
class SidecarFile:
    """The content of one sidecar file."""

    boot: str
    """Boot id under which it was written."""
    endings: Mapping[str, str]
    """Endings of the names of the array files, after the name of the set."""
    marker: str | None
    """Ending of the name of the marker; None without one."""
    durable: str
    """A character for each set."""
    sets: dict[str, Sidecar]

    def is_durable(self, name: str) -> bool:
        """Return True if the files of a set were synced."""
        return self.durable[self.place_of(name)] == "1"

    def place_of(self, name: str) -> int:
        return list(self.sets).index(name)

    def files(self, directory: str, name: str) -> ArrayFiles:
        """Return the paths of a set; ValueError for a name that leads out of the directory."""
        for part in (name, *self.endings.values(), self.marker or ""):
            if "/" in part or "\0" in part:
                raise ValueError(f"it names files by {part!r}")
        if self.endings.keys() != self.sets[name].arrays.keys():
            raise ValueError(f"set {name!r} has other arrays than files")
        base = f"{directory}/{name}"
        return ArrayFiles(
            arrays={array: base + ending for array, ending in self.endings.items()},
            sidecar=base + SUFFIX,
            marker=None if self.marker is None else base + self.marker,
        )

    def own_sets(self, path: str) -> list[tuple[str, ArrayFiles]]:
        """Return the sets that still have this file, which is at `path`, as their sidecar."""
        directory = os.path.dirname(path) or "."
        sets = [(name, self.files(directory, name)) for name in self.sets]
        return [(name, files) for name, files in sets if _is_one_file(files.sidecar, path)]


def _is_one_file(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except FileNotFoundError:
        return False


def write_sidecars(sets: Sequence[tuple[ArrayFiles, Sidecar]]) -> None:
    """Write one sidecar file for sets of one directory, with a hard link for each of them."""
    first = sets[0][0].sidecar
    temporary = f"{first}.tmp.{secrets.token_hex(8)}"
    # the first name is made last, by rename, which replaces an older sidecar at once
    with as_storage_error(first, "cannot write"):
        try:
            with open(temporary, "xb", buffering=0) as file:
                file.write(_text(sets).encode())
            for files, sidecar in sets[1:]:
                # a name that exists belongs to an older record: this set gets a file of its own
                if not _link(temporary, files.sidecar):
                    write_sidecars([(files, sidecar)])
            os.rename(temporary, first)
        except BaseException:
            remove(temporary)
            raise


def _text(sets: Sequence[tuple[ArrayFiles, Sidecar]]) -> str:
    endings, marker = sets[0][0].endings
    by_name = {files.name: vars(sidecar) for files, sidecar in sets}
    checksums = [
        by_name[name]["checksums"][array]
        for name in sorted(by_name)
        for array in sorted(by_name[name]["arrays"])
    ]
    body = {
        "sidecar_format": SIDECAR_FORMAT,
        "boot": boot_id(),
        "checksums": "".join(checksums),
        "endings": endings,
        "marker": marker,
        "sets": {
            name: {key: value for key, value in facts.items() if key not in _NOT_RECORDED}
            for name, facts in by_name.items()
        },
    }
    return f'{_HEAD}{"0" * len(by_name)}",{canonical_json(body)[1:]}'


def _link(source: str, name: str) -> bool:
    """Return True if ``name`` was linked to ``source``; False if a file of that name exists, and on
    file systems without hard links."""
    try:
        os.link(source, name)
    except OSError:
        return False
    return True


def remove(path: str) -> None:
    """Remove a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def read_sidecar(files: ArrayFiles, listing: Listing | None = None) -> Sidecar | None:
    """Return the sidecar of a set; None if it is missing or cannot be parsed: the arrays are then
    checked."""
    if listing is not None and files.sidecar not in listing:
        return None
    try:
        sidecar = _sets_of(files.sidecar, listing)[files.name]
        if not sidecar.arrays.keys() == sidecar.files.keys() == files.arrays.keys():
            raise ValueError("it describes other arrays")
        return sidecar
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        logger.warning("%s: cannot be read (%s); the arrays are checked anew", files.sidecar, error)
        return None


def _sets_of(path: str, listing: Listing | None) -> dict[str, Sidecar]:
    """Return the sets of a sidecar file, read once for all of its hard links in a listing."""
    inode = None if listing is None else listing.inode(path)
    if listing is not None and inode in listing.sidecars:
        return listing.sidecars[inode]
    with as_storage_error(path, "cannot read"):
        read_inode, sets = _sets_in(path)
    # on union file systems the listing may show another inode than the file has
    if listing is not None and inode == read_inode:
        listing.sidecars[inode] = sets
    return sets


_read_last: tuple[tuple[int, ...], dict[str, Sidecar]] | None = None


def _sets_in(path: str) -> tuple[int, dict[str, Sidecar]]:
    """Return the inode of a sidecar file and its sets; those of the file read last are cached,
    since the next set is often in the same file."""
    global _read_last  # noqa: PLW0603
    status = os.lstat(path)
    # the inode alone would not do: it may be that of a removed file
    identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    last = _read_last
    if last is not None and last[0] == identity:
        return status.st_ino, last[1]
    sets = parse_sidecar(read_regular(path, longest=_LONGEST, follow=False)).sets
    _read_last = identity, sets
    return status.st_ino, sets


def parse_sidecar(text: bytes, *, with_checksums: bool = False) -> SidecarFile:
    """Parse a sidecar file; its sets have checksums if one of them is in doubt, or if asked for.

    Raises:
        One of `UNREADABLE`: the text has another format.
    """
    body = json.loads(text)
    if body["sidecar_format"] != SIDECAR_FORMAT:
        raise OtherFormat("it is of another format")
    # where boots cannot be told apart, every reader takes the file for one of another boot
    in_memory = body["boot"] == boot_id() != "unknown"
    durable = body["durable"]
    sets = {name: _parsed(**fields) for name, fields in body["sets"].items()}
    if len(durable) != len(sets):
        raise ValueError("it has not one mark for each set")
    if with_checksums or not (in_memory or durable == "1" * len(sets)):
        for mark, sidecar in zip(durable, sets.values(), strict=True):
            sidecar.in_doubt = not in_memory and mark != "1"
        _add_checksums(sets, body["checksums"])
    return SidecarFile(
        boot=body["boot"],
        endings=body["endings"],
        marker=body["marker"],
        durable=durable,
        sets=sets,
    )


def _add_checksums(sets: Mapping[str, Sidecar], text: str) -> None:
    if len(text) != _DIGITS * sum(len(sidecar.arrays) for sidecar in sets.values()):
        raise ValueError("it has not one checksum for each array")
    checksums = iter([text[k : k + _DIGITS] for k in range(0, len(text), _DIGITS)])
    for sidecar in sets.values():
        sidecar.checksums = {name: next(checksums) for name in sidecar.arrays}


def _parsed(arrays: dict[str, Any], files: dict[str, Any], **fields: Any) -> Sidecar:
    records = {
        name: (dtype, tuple(shape), offset) for name, (dtype, shape, offset) in arrays.items()
    }
    states = {name: [size, time, inode] for name, (size, time, inode) in files.items()}
    return Sidecar(arrays=records, files=states, checksums=None, **fields)


def load_sidecar(path: str) -> SidecarFile:
    """Parse a sidecar file of an untrusted writer.

    Raises:
        StorageError: the file cannot be read.
        ValueError or another of `UNREADABLE`: the file is not a sidecar.
    """
    with as_storage_error(path, "cannot read"):
        text = read_regular(path, longest=_LONGEST, follow=False)
    file = parse_sidecar(text, with_checksums=True)
    for sidecar in file.sets.values():
        sizes = [size for state in sidecar.files.values() for size in state]
        if sidecar.files.keys() != sidecar.arrays.keys() or {int} != {type(n) for n in sizes}:
            raise ValueError("it has files without arrays, or sizes that are not numbers")
    return file


def make_sets_durable_later(sets: Sequence[tuple[ArrayFiles, Sidecar]]) -> None:
    """Sync sets of one directory in the background and mark them as durable, so that they are not
    verified after a reboot."""
    sync_later(lambda: make_sets_durable(sets))


def make_sets_durable(sets: Sequence[tuple[ArrayFiles, Sidecar]]) -> None:
    """Sync sets of one directory, and mark those as durable whose files are still as recorded."""
    synced = [(files, sidecar) for files, sidecar in sets if _sync(files, sidecar)]
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        if synced:
            directory = os.path.dirname(synced[0][0].sidecar) or "."
            # names before marks: a mark that survives a power loss must not stand for lost names
            os.fsync(stack.enter_context(opened(directory)))
        sidecars: dict[int, tuple[int, SidecarFile]] = {}  # kept open, so that no inode is reused
        for files, sidecar in synced:
            with contextlib.suppress(FileNotFoundError, *UNREADABLE):
                inode = os.stat(files.sidecar).st_ino
                if inode not in sidecars:
                    descriptor = stack.enter_context(opened(files.sidecar, mode=os.O_RDWR))
                    os.fsync(descriptor)
                    file = parse_sidecar(os.pread(descriptor, _LONGEST, 0))
                    sidecars[os.fstat(descriptor).st_ino] = descriptor, file
                descriptor, file = sidecars[inode]
                # another builder may have replaced the set while it was synced
                if file.sets[files.name].files == sidecar.files:
                    os.pwrite(descriptor, b"1", len(_HEAD) + file.place_of(files.name))


def _sync(files: ArrayFiles, sidecar: Sidecar) -> bool:
    """Sync the arrays; return False if one is missing or not the recorded file."""
    with contextlib.suppress(OSError):
        for name, path in files.arrays.items():
            with opened(path) as descriptor:
                if state_of(os.fstat(descriptor)) != sidecar.files[name]:
                    return False
                os.fsync(descriptor)
        return True
    return False


def find_arrays(
    files: ArrayFiles,
    identity: Identity,
    check: Callable[[Arrays], None],
    listing: Listing | None = None,
) -> Sidecar | None:
    """Return the sidecar of arrays that may be used; None where they have to be built.

    ``check`` is called with arrays that have no sidecar or were replaced since, and raises
    FormatError if they are not those of ``identity``. With a ``listing`` of the directory only
    sidecars are opened: `map_arrays` detects files that were written to since. Arrays that are
    accepted are then appended to ``listing.accepted`` instead of being recorded.

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
        accepted = _accept(files, states, identity, check)
        # checked after the arrays were read: what was accepted must still be there
        if _is_replaced(files, sidecar, states):
            return find_arrays(files, identity, check)
        if accepted is None:
            _refuse(files)
        if listing is None:
            record_accepted([(files, accepted)])
        else:
            listing.accepted.append((files, accepted))
        return accepted
    if identity.is_of(sidecar):
        again = partial(find_arrays, files, identity, check)
        return _verified(files, sidecar, listing, again) if sidecar.in_doubt else sidecar
    if listing is not None:  # a new file may have the inode of a removed one
        return find_arrays(files, identity, check)
    if sidecar.origin == "exported":
        raise FormatError(
            f"{files}-*: megaindex export wrote these index arrays, in order "
            f"{sidecar.settings['order']}, for the framework without the adapter; do not install "
            "the adapter, remove the files of that name, or choose another folder for arrays "
            "(Megatron-LM: --data-cache-path; GPT-NeoX: install(cache_dir=…))"
        )
    if sidecar.origin != "built":
        _refuse(files)
    logger.warning("%s: built from other data or with other settings; rebuilt", files)
    return None


def _is_replaced(
    files: ArrayFiles, sidecar: Sidecar | None, states: Mapping[str, FileState]
) -> bool:
    """Return whether another builder replaced the set since it was looked up."""
    return read_sidecar(files) != sidecar or current_states(files, None, None) != states


def _refuse(files: ArrayFiles) -> NoReturn:
    raise FormatError(
        f"{files}-*: these index arrays were written by the framework, not by megaindex, and are "
        "not those of the corpus and the settings of this run: the corpus changed after they were "
        "built, or a setting that is not part of their name did; remove the files of that name, or "
        "choose another folder for arrays (Megatron-LM: --data-cache-path; GPT-NeoX: "
        "install(cache_dir=…))"
    )


def _verified(
    files: ArrayFiles,
    sidecar: Sidecar,
    listing: Listing | None,
    again: Callable[[], Sidecar | None],
) -> Sidecar | None:
    """Return a sidecar of another boot if its arrays are complete; None if they must be rebuilt."""
    try:
        damaged = damaged_arrays(files, sidecar)
    except MissingFile:  # removed meanwhile by another builder
        return None
    except FormatError:
        if not _is_replaced(files, sidecar, sidecar.files):
            raise
        return again()
    if damaged and sidecar.origin != "built":
        raise FormatError(
            f"{files.arrays[damaged[0]]}: the content is not that of the checksum recorded when it "
            "was accepted, as after a power loss; remove all files of that name, they will be "
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
    """Return the names of the arrays that differ from their checksums; every byte is read.

    Raises:
        MissingFile, FormatError: as `map_arrays`.
    """
    assert sidecar.checksums is not None, "a sidecar in doubt has checksums"
    arrays = map_arrays(files, sidecar)
    return [name for name, a in arrays.items() if array_checksum(a) != sidecar.checksums[name]]


def _accept(
    files: ArrayFiles,
    states: dict[str, FileState],
    identity: Identity,
    check: Callable[[Arrays], None],
) -> Sidecar | None:
    """Return the record of arrays that pass ``check``; None if they do not."""
    arrays = {name: map_npy(path) for name, path in files.arrays.items()}
    try:
        check({name: array for name, (array, _) in arrays.items()})
    except FormatError as error:
        logger.warning("%s: %s", files, error)
        return None
    logger.info("%s: not recorded as they are now; checked and used", files)
    records = {
        name: (array.dtype.name, array.shape, offset) for name, (array, offset) in arrays.items()
    }
    checksums = {name: array_checksum(array) for name, (array, _) in arrays.items()}
    return identity.sidecar("found", records, states, checksums)


def record_accepted(sets: Sequence[tuple[ArrayFiles, Sidecar]]) -> None:
    """Record sets of one directory; log a warning if it cannot be written to."""
    try:
        write_sidecars(sets)
    except StorageError as error:
        logger.warning("%s; these arrays are used, and will be checked again", error)
    else:
        make_sets_durable_later(sets)


def map_arrays(files: ArrayFiles, sidecar: Sidecar) -> Arrays:
    """Return the arrays of a set, read-only; pickled objects are never loaded.

    Raises:
        MissingFile: a file was removed meanwhile.
        FormatError: a file was replaced or written to, or has another size than the sidecar says.
    """
    core = file_mapper()
    if core is not None:
        mapped: Arrays | None = core.map_index_arrays(files.arrays, sidecar.arrays, sidecar.files)
        # the core maps all arrays in one call, and returns None for any that differ
        if mapped is not None:
            return mapped
    arrays = {}  # one by one, to find the file that differs
    for name, path in files.arrays.items():
        data, status = map_with_status(path)
        if state_of(status) != sidecar.files[name]:
            raise changed(files)
        array = _elements(data, sidecar.arrays[name])
        if array is None:
            dtype, shape, offset = sidecar.arrays[name]
            raise FormatError(
                f"{path}: {files.sidecar} records {dtype} of shape {shape} after {offset} bytes, "
                f"the file has {data.size}; remove both files, they will be built again"
            )
        arrays[name] = array
    return arrays


def _elements(data: npt.NDArray[np.uint8], record: ArrayRecord) -> IntArray | None:
    """Return the array behind the header of a file; None if the record does not fit its size."""
    dtype, shape, offset = record
    try:
        if data.size == offset + math.prod(shape) * _ITEMSIZE[dtype]:
            return data[offset:].view(dtype).reshape(shape)
    except (KeyError, TypeError, ValueError):  # the record holds no sizes or no dtype
        pass
    return None


def _is_ours_damaged(sidecar: Sidecar, states: dict[str, FileState]) -> bool:
    """Return True if a file that megaindex wrote has the recorded inode and another size."""
    return sidecar.origin == "built" and any(
        size != states[name][0] and inode == states[name][-1]
        for name, (size, _, inode) in sidecar.files.items()
    )


_ITEMSIZE = {name: np.dtype(name).itemsize for name in ARRAY_DTYPES}
