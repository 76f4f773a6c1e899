"""What decides the index arrays of one of Megatron's low-level datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megaindex.adapters.megatron.reading import mapped
from megaindex.kernels.types import I32
from megaindex.store.fingerprint import array_checksum, corpus_fingerprint, corpus_stamp


class Corpus:
    """A low-level dataset as far as its indices depend on it, read only where that is needed.

    Sizes and times of the two files stand for their content while they are those that a sidecar
    has recorded; otherwise the lengths are read and hashed.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        prefix = getattr(dataset, "path_prefix", None)
        self.stamp = [] if prefix is None else corpus_stamp(prefix)
        self._num_sequences: int | None = None
        self._fingerprint: str | None = None
        self._lengths: I32 | None = None

    def learn(self, facts: Mapping[str, Any]) -> None:
        """Take what a sidecar tells of files with this stamp."""
        self._num_sequences = facts["sequences"]

    def facts(self) -> dict[str, Any]:
        return {"sequences": self.num_sequences}

    @property
    def num_sequences(self) -> int:
        if self._num_sequences is None:
            self._num_sequences = int(self.dataset.sequence_lengths.shape[0])
        return self._num_sequences

    @property
    def lengths(self) -> I32:
        """int32[sequences], every one of them checked."""
        if self._lengths is None:
            reader = mapped(self.dataset)
            if reader is not None:
                reader.validate()
            self._lengths = self.dataset.sequence_lengths
        return self._lengths

    def fingerprint(self) -> str:
        """32 hex digits; of the lengths alone where there are no local files."""
        if self._fingerprint is None:
            reader = mapped(self.dataset)
            self._fingerprint = (
                array_checksum(np.asarray(self.dataset.sequence_lengths))
                if reader is None
                else corpus_fingerprint(reader)
            )
        return self._fingerprint
