"""What opening a recipe learned of its sources, so that the next process need not look again.

Checking every entry of an .idx takes seconds for each billion documents, and reads all of it: on
each of thousands of ranks, which all learn the same. One of them writes it down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megaindex.format import IndexedDataset
from megaindex.io.json_files import is_size
from megaindex.io.locations import absolute, check_local
from megaindex.store.fingerprint import contents_of, corpus_fingerprint, entry_key
from megaindex.store.records import Record, read_records, stamps_of, write_records


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a look at every entry of a pair tells."""

    num_tokens: int
    fingerprint: str
    content: dict[str, str] = field(default_factory=dict)
    """`content_fingerprint` of its tokens as far as asked for: ``sampled``, ``whole``."""


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
        self._is_new = False
        """Whether something is known that is not written down."""
        if cache_dir is None:
            return
        check_local(cache_dir, "give a directory as cache_dir")
        key = entry_key({"known_sources": 1, "prefixes": self._prefixes})
        self._path = Path(cache_dir) / f"sources-{key}-megaindex.json"
        records = read_records(self._path, self._prefixes, _is_sound)
        for record in records or ():
            self._known[record["prefix"]] = Known(
                num_tokens=record["num_tokens"],
                fingerprint=record["fingerprint"],
                content=record.get("content", {}),  # earlier versions kept none
            )
        stamps = None if records is None else [record["stamp"] for record in records]
        self._stamps = stamps_of(self._prefixes) if stamps is None else stamps

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

    def content(self, dataset: IndexedDataset, *, whole: bool = False) -> dict[str, str]:
        """`contents_of` one of the pairs, read if it was not known; `save` writes it down.

        Raises:
            StorageError: tokens cannot be read, or changed since the pair was opened.
        """
        prefix = absolute(dataset.path_prefix)
        known = self._known.get(prefix)
        content = contents_of(dataset, whole=whole, known={} if known is None else known.content)
        if known is not None and content != known.content:
            self._known[prefix] = replace(known, content=content)
            self._is_new = True
        return content

    def keep(self, datasets: Sequence[IndexedDataset]) -> None:
        """Write down what these, opened here, told; unless it was known, or they changed since."""
        if self._path is None or self._known:
            return
        told = {absolute(dataset.path_prefix): dataset for dataset in datasets}
        self._known = {
            prefix: Known(num_tokens=d.num_tokens, fingerprint=corpus_fingerprint(d))
            for prefix, d in told.items()
        }
        self._is_new = True
        self.save()

    def save(self) -> None:
        """Write down what was found out here, unless one of the pairs changed since."""
        is_new, self._is_new = self._is_new, False
        if self._path is None or not is_new or self._stamps != stamps_of(self._prefixes):
            return
        records = [
            {"prefix": prefix, "stamp": stamp, **vars(self._known[prefix])}
            for prefix, stamp in zip(self._prefixes, self._stamps, strict=True)
        ]
        write_records(self._path, records)


def _is_sound(record: Record) -> bool:
    content = record.get("content", {})
    texts = [record["fingerprint"], *content.keys(), *content.values()]
    return is_size(record["num_tokens"]) and all(isinstance(text, str) for text in texts)
