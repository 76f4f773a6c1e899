"""What document_index, sample_index and shuffle_index must be, whatever they were cut from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.format.faults import Fault
from megaindex.index.acceptance import rising_rows
from megaindex.store.array_set import Arrays

Located = tuple[str, Fault, int]
"""Name of an array, its first fault under a rule, and how many there are."""


def order_faults(arrays: Arrays, settings: Mapping[str, Any]) -> Iterator[Located]:
    """The broken rules of those arrays that are there.

    Args:
        arrays: by name; others than these three are not looked at.
        settings: of the set; ``documents`` [begin, end) bound document_index, where they are given.
    """
    documents, samples = arrays.get("document_index"), arrays.get("sample_index")
    shuffle = arrays.get("shuffle_index")
    if documents is not None:
        begin, end = _bounds(settings.get("documents"))
        outside = (documents < begin) | (documents >= end)
        yield from _located("document_index", "document-range", documents, outside,
                            f"documents from {begin} to below {end}")  # fmt: skip
    if samples is not None and samples.ndim == 2 and samples.shape[1] == 2 and len(samples):
        if documents is not None:
            beyond = (samples.min(axis=1) < 0) | (samples[:, 0] > documents.size)
            yield from _located("sample_index", "sample-range", samples, beyond,
                                f"rows within {documents.size} documents")  # fmt: skip
        behind = np.append(True, rising_rows(samples))
        yield from _located("sample_index", "sample-order", samples, ~behind,
                            "a row behind the row before it")  # fmt: skip
    if shuffle is not None:
        outside = (shuffle < 0) | (shuffle >= shuffle.size)
        yield from _located("shuffle_index", "shuffle-range", shuffle, outside,
                            f"samples below {shuffle.size}")  # fmt: skip
    # packings of whole documents, whose arrays are all int64, may serve a sample again
    if shuffle is not None and not (documents is not None and documents.dtype == np.int64):
        yield from _located("shuffle_index", "shuffle-repeat", shuffle, _repeated(shuffle),
                            "each sample once")  # fmt: skip


def _bounds(documents: object) -> tuple[int, int]:
    if isinstance(documents, list) and [type(each) for each in documents] == [int, int]:
        return documents[0], documents[1]
    return 0, 2**31


def _repeated(shuffle: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """bool[n]: which entries stand further to the front too."""
    again = np.ones(shuffle.size, bool)
    again[np.unique(shuffle, return_index=True)[1]] = False
    return again


def _located(
    name: str, rule: str, array: npt.NDArray[Any], broken: npt.NDArray[np.bool_], expected: str
) -> Iterator[Located]:
    if broken.any():
        first = int(broken.argmax())
        found = str(array[first].tolist())
        fault = Fault(
            rule=rule,
            where=f"entry {first}",
            found=found,
            expected=expected,
            text=f"{name} must hold {expected}, entry {first} is {found}",
        )
        yield name, fault, int(broken.sum())
