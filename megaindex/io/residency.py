"""Pages of a mapped file: have them read ahead, or ask whether they are in memory."""

from __future__ import annotations

import ctypes
import mmap
import resource

import numpy as np

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
for _call, _third in ((_libc.madvise, ctypes.c_int), (_libc.mincore, ctypes.c_void_p)):
    _call.restype = ctypes.c_int
    _call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, _third]


def will_need(address: int, nbytes: int) -> None:
    """Have the pages of a mapping read into memory; returns before they are. Only a hint: where
    the kernel does not follow it, the first access reads them."""
    begin = address - address % _PAGE
    _libc.madvise(begin, address + nbytes - begin, mmap.MADV_WILLNEED)


def resident_pages(address: int, nbytes: int) -> tuple[int, int]:
    """How many pages of a mapped range are in memory, and how many it has.

    Where the kernel does not tell, which it refuses for files that the user could not write to, all
    count as there.
    """
    begin = address - address % _PAGE
    pages = -(-(address + nbytes - begin) // _PAGE)
    flags = np.zeros(pages, np.uint8)
    if _libc.mincore(begin, address + nbytes - begin, flags.ctypes.data) != 0:
        return pages, pages
    return int((flags & 1).sum()), pages


def major_faults() -> int:
    """Page faults of this process so far that had to read a device."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
