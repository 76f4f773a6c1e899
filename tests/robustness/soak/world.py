"""A folder of corpora, a cache, and what is known of them."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from robustness.faults.injection import Act, Injector
from robustness.faults.trial import fail, kill
from robustness.soak.model import Documents, Rows

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import StorageError
from megaindex.index.spans import Index
from megaindex.loader.token_readers import MappedTokens

_FAULTS: list[tuple[str, Act]] = [
    ("killed", kill),
    ("full disk", fail(errno.ENOSPC)),
    ("failing disk", fail(errno.EIO)),
]


class World:
    """The state that operations change; every random choice comes from ``random``."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.corpora = folder / "corpora"
        self.corpora.mkdir()
        self.cache.mkdir()
        self.random = random.Random(seed)
        self.known: dict[str, Documents] = {}
        self.answers: dict[Any, bytes] = {}
        """Of computed orders, by request: what was answered first holds for ever."""
        self.counts: Counter[str] = Counter()
        self._next_token = 0

    def new_documents(self) -> Documents:
        """Up to 60 documents, some of them empty, whose tokens are used once in this world."""
        lengths = self.random.choices([0, 1, 2, 7, 30, 45], k=self.random.randint(2, 60))
        lengths.append(40)  # enough for a sample
        self.random.shuffle(lengths)
        documents = []
        for length in lengths:
            documents.append(list(range(self._next_token, self._next_token + length)))
            self._next_token += length
        return documents

    def any_corpus(self) -> str:
        return self.random.choice(sorted(self.known))

    def prefix(self, name: str) -> Path:
        return self.corpora / name

    def open(self, name: str) -> IndexedDataset:
        return IndexedDataset(self.prefix(name))

    def write(self, name: str, documents: Documents) -> None:
        overwrite = (self.corpora / f"{name}.bin").exists()
        with IndexedDatasetWriter(self.prefix(name), np.int32, overwrite=overwrite) as writer:
            for tokens in documents:
                writer.add_document(tokens)

    def read(self, name: str) -> Documents | None:
        """What a reader finds now."""
        if not os.path.exists(f"{self.prefix(name)}.idx"):
            return None
        dataset = self.open(name)
        dataset.validate()
        return [dataset[k].tolist() for k in range(len(dataset))]

    def interrupted(self, act: Callable[[], Any], folder: Path) -> None:
        """``act`` in a child process that is killed, or sees a failing disk, at a random call."""
        name, fault = self.random.choice(_FAULTS)
        injector = Injector(os.fspath(folder), self.random.randint(1, 20), fault)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                injector.install()
                act()
                status = 0
            except StorageError:
                status = 3
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 3, -signal.SIGKILL), f"exit status {status} after {name}"
        self.counts[f"  of which {'unharmed' if status == 0 else name}"] += 1


def rows_of(index: Index, *datasets: IndexedDataset) -> Rows:
    """The tokens of every sample, as a loader reads them."""
    width = index.sequence_length + index.add_extra_token
    rows = np.zeros((index.num_samples, width), np.int64)
    spans = index.locate(np.arange(index.num_samples))
    MappedTokens(datasets).read(spans, rows, pad_id=-1)
    return rows
