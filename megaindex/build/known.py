"""What opening a recipe learned of its sources, so that the next process need not look again.

Checking every entry of an .idx takes seconds for each billion documents, and reads all of it: on
each of thousands of ranks, which all learn the same. One of them writes it down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaindex.format import IndexedDataset
from megaindex.io.json_files import is_size
from megaindex.io.locations import absolute, check_local
from megaindex.store.fingerprint import corpus_fingerprint, entry_key
from megaindex.store.records import Record, read_records, stamps_of, write_records


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a look at every entry of a pair tells."""

    num_tokens: int
    fingerprint: str


class KnownSources:
    """What is known of these pairs. Nothing without a directory: all is then found out here.

    Args:
        paths: prefixes, in any order.
        cache_dir: where it is kept; None: nowhere.

    Raises:
        InvalidArgument: ``cache_dir`` is a URL.
    """

    def __init__(self, paths: Sequence[str], cache_dir: str | None) -> None:
        self._known: dict[str, Known] = {}
        self._prefixes = sorted({absolute(path) for path in paths})
        self._path: Path | None = None
        if cache_dir is None:
            return
        check_local(cache_dir, "give a directory as cache_dir")
        key = entry_key({"known_sources": 1, "prefixes": self._prefixes})
        self._path = Path(cache_dir) / f"sources-{key}-megaindex.json"
        for record in read_records(self._path, self._prefixes, _is_sound) or ():
            self._known[record["prefix"]] = Known(
                num_tokens=record["num_tokens"], fingerprint=record["fingerprint"]
            )
        self._stamps = [] if self._known else stamps_of(self._prefixes)

    def open(self, path: str) -> IndexedDataset:
        """The pair, every entry of which is valid.

        Raises:
            As `IndexedDataset` and `IndexedDataset.validate`.
        """
        dataset = IndexedDataset(path)
        known = self._known.get(absolute(path))
        if known is None:
            dataset.validate()
        else:
            dataset.take_as_valid(known.num_tokens)
        return dataset

    def fingerprint(self, dataset: IndexedDataset) -> str:
        """`corpus_fingerprint` of one of the pairs."""
        known = self._known.get(absolute(dataset.path_prefix))
        return corpus_fingerprint(dataset) if known is None else known.fingerprint

    def keep(self, datasets: Sequence[IndexedDataset]) -> None:
        """Write down what these, opened here, told; unless it was known, or they changed since."""
        if self._path is None or self._known or self._stamps != stamps_of(self._prefixes):
            return
        told = {absolute(dataset.path_prefix): dataset for dataset in datasets}
        self._known = {
            prefix: Known(num_tokens=d.num_tokens, fingerprint=corpus_fingerprint(d))
            for prefix, d in told.items()
        }
        records = [
            {"prefix": prefix, "stamp": stamp, **vars(self._known[prefix])}
            for prefix, stamp in zip(self._prefixes, self._stamps, strict=True)
        ]
        write_records(self._path, records)


def _is_sound(record: Record) -> bool:
    return is_size(record["num_tokens"]) and isinstance(record["fingerprint"], str)
