"""Text files as a corpus of bytes: token = byte, 256 = end of document."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from megaindex.format import IndexedDatasetWriter

END_OF_DOCUMENT = 256


def text_files(roots: Iterable[str | os.PathLike[str]], suffixes: tuple[str, ...]) -> list[Path]:
    """Regular files with one of the suffixes below ``roots``, each once, in path order."""
    found = {
        path.resolve()
        for root in roots
        for path in Path(root).rglob("*")
        if path.suffix in suffixes and path.is_file()
    }
    return sorted(found)


def write_byte_corpus(
    prefix: str | os.PathLike[str],
    files: Iterable[Path],
    *,
    max_tokens: int,
    progress: Callable[[int], None] = lambda _: None,
    overwrite: bool = False,
) -> list[Path]:
    """Write ``files`` as one uint16 document each until ``max_tokens``; returns those written.

    Raises:
        StorageError: the pair cannot be written, or exists and may not be overwritten.
    """
    written: list[Path] = []
    with IndexedDatasetWriter(os.fspath(prefix), np.uint16, overwrite=overwrite) as writer:
        for path, tokens in _documents(files, max_tokens):
            writer.add_document(tokens)
            written.append(path)
            progress(tokens.size)
    return written


def _documents(files: Iterable[Path], max_tokens: int) -> Iterator[tuple[Path, np.ndarray]]:
    total = 0
    for path in files:
        try:
            text = path.read_bytes()
        except OSError:
            continue  # not ours to read
        if not text or total + len(text) >= max_tokens:
            continue
        tokens = np.empty(len(text) + 1, np.uint16)
        tokens[:-1] = np.frombuffer(text, np.uint8)
        tokens[-1] = END_OF_DOCUMENT
        total += tokens.size
        yield path, tokens
