"""A cache entry while it is written: arrays appear under a temporary name, then all at once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import logging
import math
import mmap
import os
import secrets
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megaindex.io.failures import as_storage_error
from megaindex.io.filesystem import is_local
from megaindex.kernels.types import IntArray
from megaindex.store.durable import make_durable_later
from megaindex.store.fingerprint import array_bytes
from megaindex.store.manifest import MANIFEST, ArrayRecord, Manifest

logger = logging.getLogger("megaindex")


class EntryWriter:
    """A sink for index arrays that publishes them as ``<cache_dir>/<key>/`` or not at all.

    Large arrays on a local file system are mapped files: what a kernel writes is already in place,
    and their pages are brought in ahead of the kernels. Others are written from memory. Either way,
    and for the checksums, this happens while the next kernel runs. `publish` writes the manifest
    last and renames the directory. Whoever comes second drops its copy: both are equal.
    """

    def __init__(self, cache_dir: str | os.PathLike[str], key: str) -> None:
        self._root = Path(cache_dir)
        self._key = key
        self._tmp = self._root / f"tmp.{key}.{secrets.token_hex(8)}"
        self._local = True
        self._arrays: dict[str, IntArray] = {}
        self._checksums: dict[str, Future[str]] = {}
        self._pool = ThreadPoolExecutor(1, "megaindex-publish")

    def __enter__(self) -> EntryWriter:
        with as_storage_error(str(self._root), "cannot create a cache entry in it"):
            self._root.mkdir(parents=True, exist_ok=True)
            self._tmp.mkdir()
        self._local = is_local(self._tmp)
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._arrays.clear()
        shutil.rmtree(self._tmp, ignore_errors=True)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> IntArray:
        array: IntArray = np.empty(shape, dtype)  # takes no memory before it is touched
        if self._is_mapped(array):
            array = map_new(self._file(name), shape, dtype)
            self._pool.submit(populate, array)
        self._arrays[name] = array
        return array

    def done(self, name: str) -> None:
        array = self._arrays[name]
        if self._is_mapped(array):
            task = self._pool.submit(lambda: xxhash.xxh3_128_hexdigest(array_bytes(array)))
        else:
            task = self._pool.submit(write_new, self._file(name), array)
        self._checksums[name] = task

    def publish(self, parameters: dict[str, Any]) -> bool:
        """Make the entry visible under its key; False if another process did so before."""
        manifest = Manifest(
            key=self._key,
            parameters=parameters,
            arrays={name: self._record(name) for name in self._arrays},
            boot_id=boot_id(),
        )
        path = self._tmp / MANIFEST
        with as_storage_error(str(path), "cannot write"):
            path.write_text(manifest.dumps())
        target = self._root / self._key
        with as_storage_error(str(target), "cannot publish the cache entry"):
            try:
                os.rename(self._tmp, target)
            except OSError as error:
                # A network file system may refuse the name, and not show the entry that has it yet.
                taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
                if not taken and not (target / MANIFEST).exists():
                    raise
                logger.info("%s: another process published it first, using that one", target)
                return False
        make_durable_later(target)
        return True

    def _is_mapped(self, array: IntArray) -> bool:
        return self._local and array.nbytes >= WORTH_MAPPING

    def _file(self, name: str) -> Path:
        return self._tmp / f"{name}.npy"

    def _record(self, name: str) -> ArrayRecord:
        array = self._arrays[name]
        return ArrayRecord(
            file=f"{name}.npy",
            dtype=array.dtype.name,
            shape=array.shape,
            offset=len(npy_header(array.shape, array.dtype.name)),
            checksum=self._checksums[name].result(),
        )


def map_new(path: Path, shape: tuple[int, ...], dtype: str) -> IntArray:
    """A new .npy file of that shape, mapped for writing; its room on the disk is reserved."""
    header = npy_header(shape, dtype)
    size = len(header) + math.prod(shape) * np.dtype(dtype).itemsize
    with as_storage_error(str(path), f"cannot reserve {size} bytes"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            # A full disk must be an error here, not a signal in the middle of a kernel.
            os.posix_fallocate(fd, 0, size)
            os.pwrite(fd, header, 0)
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
    array: IntArray = np.frombuffer(mapping, dtype, offset=len(header)).reshape(shape)
    return array


def write_new(path: Path, array: IntArray) -> str:
    """Write a new .npy file from its first byte to its last; returns the elements' checksum."""
    data = array_bytes(array)
    digest = xxhash.xxh3_128()
    with as_storage_error(str(path), "cannot write"), open(path, "xb", buffering=0) as file:
        file.write(npy_header(array.shape, array.dtype.name))
        for begin in range(0, len(data), _WRITE_BYTES):
            part = data[begin : begin + _WRITE_BYTES]
            digest.update(part)
            while part:  # a write may take less than it was given
                part = part[file.write(part) :]
    return digest.hexdigest()


_WRITE_BYTES = 8 << 20
WORTH_MAPPING = 32 << 20  # bytes; page faults of fewer cost more than writing them


def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """The .npy header, so that ``numpy.load`` reads the arrays of an entry too."""
    buffer = io.BytesIO()
    fields = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def populate(array: IntArray) -> None:
    """Bring the pages of a mapped array in, in one call instead of a page fault for each.

    Only a hint: kernels before Linux 5.14 refuse it, and the faults happen one by one.
    """
    page = mmap.PAGESIZE
    begin = array.ctypes.data // page * page
    size = array.ctypes.data + array.nbytes - begin
    _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(_POPULATE_WRITE))


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_MADVISE = ctypes.CDLL(None, use_errno=True).madvise


def boot_id() -> str:
    """Identifies this boot of this machine: pages written under it are still in its memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def set_aside(entry: Path) -> None:
    """Remove an entry at once for everybody, then its files."""
    aside = entry.with_name(f"tmp.{entry.name}.{secrets.token_hex(8)}")
    with as_storage_error(str(entry), "cannot remove the damaged entry"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(entry, aside)
        if aside.is_symlink() or aside.is_file():  # someone put it there; what it names is left
            aside.unlink(missing_ok=True)
        else:
            shutil.rmtree(aside, ignore_errors=True)
