"""Indices of many datasets, each built into one cache by a task of an engine."""

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
    """Settings common to all datasets of `build_many`: arguments of `build_index`.

    Attributes:
        sequence_length: tokens of a sample, without the extra one of the shifted label.
        cache_dir: folder of the cache entries, one of each dataset.
        seed: seed of the shuffles.
        num_samples: samples of each index; None: those of ``epochs``.
        epochs: epochs of each index, as text such as ``"2"`` or ``"3/2"``; None: one, or those
            that ``num_samples`` need.
        split: shares of train, valid and test, such as ``"969,30,1"``; None: all documents.
        subset: part of the split that is built.
        order: name of an order, or an order object.
    """

    sequence_length: int
    cache_dir: str
    seed: int = DEFAULT_SEED
    num_samples: int | None = None
    epochs: str | None = None
    split: str | None = None
    subset: Split = "train"
    order: str | Order = "megatron"

    def build(self, path: str) -> BuiltIndex:
        """Build the index of the dataset at a prefix."""
        return build_index(path, **vars(self))

    def built(self, path: str) -> Built:
        """Build the index of the dataset at a prefix, or find it, and return its size."""
        start = time.perf_counter()
        index = self.build(path)
        return Built(
            path=path,
            order=index.order,
            num_samples=index.num_samples,
            num_epochs=index.num_epochs,
            tokens_per_epoch=index.tokens_per_epoch,
            seconds=time.perf_counter() - start,
        )


@dataclass(frozen=True, kw_only=True)
class Built:
    """Size of the index of one dataset, whose arrays are in the cache."""

    path: str
    order: str
    num_samples: int
    num_epochs: int
    tokens_per_epoch: int
    seconds: float
    """Time to build or find the index."""


@dataclass(frozen=True, kw_only=True)
class BuildTask:
    """Task to build the index of one dataset."""

    path: str
    settings: BuildSettings

    def __str__(self) -> str:
        return self.path

    def run(self) -> Built:
        """Build the index or find it in the cache; errors name the dataset."""
        try:
            return self.settings.built(self.path)
        except (MegaIndexError, MemoryError) as error:
            if str(error).startswith(self.path):
                raise
            raise type(error)(f"{self.path}: {error}") from error


def build_many(paths: Sequence[str], settings: BuildSettings, engine: Engine) -> Iterator[Built]:
    """Build the indices of many datasets and yield their sizes as they finish, in any order.

    Array files do not depend on the engine. Finished indices stay in the cache if a dataset fails.

    Args:
        paths: prefixes; repeated ones are built once.
        settings: arguments of `build_index` for all of them.
        engine: of `megaindex.open_engine`.

    Raises:
        MegaIndexError: the error of the first dataset that fails; running tasks are cancelled.
    """
    tasks = [BuildTask(path=path, settings=settings) for path in dict.fromkeys(paths)]
    for _, built in engine.run(BuildTask.run, tasks):
        yield built
