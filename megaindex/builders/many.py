"""Many datasets, each built into one cache by a task of its own, on whatever engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaindex.builders.single import BuiltIndex, build_index
from megaindex.engine import Engine
from megaindex.errors import MegaIndexError
from megaindex.index.frameworks import Split
from megaindex.index.order_settings import Order
from megaindex.validation import DEFAULT_SEED


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """Settings that all datasets are built with: arguments of `build_index`."""

    sequence_length: int
    cache_dir: str
    seed: int = DEFAULT_SEED
    num_samples: int | None = None
    epochs: str | None = None
    split: str | None = None
    subset: Split = "train"
    order: str | Order = "megatron"

    def build(self, path: str) -> BuiltIndex:
        """Return the index of one dataset, see `build_index`."""
        return build_index(path, **vars(self))


@dataclass(frozen=True, kw_only=True)
class Built:
    """Result for one dataset; its arrays are in the cache."""

    path: str
    order: str
    num_samples: int
    num_epochs: int
    tokens_per_epoch: int
    seconds: float
    """For this dataset alone, in the process that built or found it."""


@dataclass(frozen=True, kw_only=True)
class BuildTask:
    """One dataset. Two workers that have it build it once: the cache decides who does."""

    path: str
    settings: BuildSettings

    def __str__(self) -> str:
        return self.path

    def run(self) -> Built:
        """Build the dataset, or find it in the cache.

        Raises:
            MegaIndexError: as `build_index`; the message names the dataset.
        """
        start = time.perf_counter()
        try:
            index = self.settings.build(self.path)
        except (MegaIndexError, MemoryError) as error:
            if str(error).startswith(self.path):
                raise
            raise type(error)(f"{self.path}: {error}") from error
        return Built(
            path=self.path,
            order=index.order,
            num_samples=index.num_samples,
            num_epochs=index.num_epochs,
            tokens_per_epoch=index.tokens_per_epoch,
            seconds=time.perf_counter() - start,
        )


def build_many(paths: Sequence[str], settings: BuildSettings, engine: Engine) -> Iterator[Built]:
    """Build every dataset of ``paths``; yields them as they are done, in any order.

    Every file of the cache is the one that a single machine writes, but for the boot that a
    manifest names and the marks of what is synced. What was built stays when a dataset fails.

    Raises:
        MegaIndexError: of the first dataset that fails; those that run are ended.
    """
    tasks = [BuildTask(path=path, settings=settings) for path in dict.fromkeys(paths)]
    for _, built in engine.run(BuildTask.run, tasks):
        yield built
