"""Small corpora for tests: random lengths, and tokens that tell where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.format.pair import provenance_path
from megaindex.format.provenance import ProvenanceSpool, RowFile
from megaindex.format.sink import IndexSpool


def write_corpus(
    prefix: Path, lengths: list[int] | np.ndarray, dtype: type = np.int32, eod: int | None = None
) -> IndexedDataset:
    """Documents whose tokens count on through the corpus, modulo what the dtype holds.

    With ``eod`` the last token of every document is that id.
    """
    limit = 50_000 if dtype is np.uint16 else 2**31 - 1
    sizes = np.array(lengths, np.int64)
    ends = np.cumsum(sizes)
    tokens = (np.arange(sizes.sum()) % limit).astype(dtype)
    if eod is not None:
        tokens[ends[sizes > 0] - 1] = eod
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        writer.add_documents(tokens, sizes)
    return IndexedDataset(str(prefix))


def write_pairs(**documents: int) -> None:
    """Write pairs of so many documents of 50 to 399 random tokens, as the pages use them."""
    rng = np.random.default_rng(0)
    for name, count in documents.items():
        with IndexedDatasetWriter(name, dtype="uint16") as writer:
            for length in rng.integers(50, 400, count):
                writer.add_document(rng.integers(0, 50_000, length))


def write_sparse_corpus(
    prefix: Path, lengths: list[int], last: Sequence[int] = (), dtype: type = np.uint16
) -> IndexedDataset:
    """Documents of zeros, uint16 or uint8, in a sparse file, but for the last tokens."""
    itemsize = np.dtype(dtype).itemsize
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(itemsize * sum(lengths))
        file.seek(itemsize * (sum(lengths) - len(last)))
        file.write(np.array(last, dtype).tobytes())
    spool = IndexSpool(str(prefix.parent), multimodal=False)
    spool.open()
    for length in lengths:
        spool.add_one(length)
    with open(f"{prefix}.idx", "wb") as file:
        spool.assemble(file, dtype_code={1: 1, 2: 8}[itemsize], itemsize=itemsize)
    spool.close()
    return IndexedDataset(str(prefix))


def write_provenance(prefix: Path) -> None:
    """Write a provenance beside a pair: document k is line k of rows.jsonl."""
    count = IndexedDataset(str(prefix)).document_indices.size - 1
    rows = np.arange(count)
    spool = ProvenanceSpool(str(Path(prefix).parent))
    spool.open()
    spool.add_file(RowFile(path="rows.jsonl", format="jsonl"), rows, 10 * rows, 10 * rows + 9)
    with open(provenance_path(str(prefix)), "wb") as out:
        spool.assemble(out, xxhash.xxh3_128_digest(Path(f"{prefix}.idx").read_bytes()))
    spool.close()
