"""BlendedDataset's two arrays, and the text it is named by."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex.adapters.megatron.core import core
from megaindex.adapters.megatron.deferred import Identifiers
from megaindex.adapters.megatron.indexing import is_left_to_megatron
from megaindex.errors import FormatError
from megaindex.helpers import build_blending_indices, build_exhaustive_blending_indices
from megaindex.kernels.types import I16, I64, IntArray
from megaindex.store.array_set import ArrayFiles, Arrays, Sidecar
from megaindex.store.array_writer import ArrayWriter
from megaindex.store.claim import build_once
from megaindex.store.sidecar import Identity, find_arrays, map_arrays

logger = logging.getLogger("megaindex")

_NAMES = ("dataset_index", "dataset_sample_index")
_COMPARED = 1_000_000  # draws of found arrays that are compared with our own


def build_indices(self: Any) -> tuple[Any, Any]:
    """``BlendedDataset._build_indices``; sources that are drawn beyond their end are extended.

    Megatron builds each source with a surplus of 0.5 % and raises IndexError where the blend draws
    more. Such a source is asked for as many samples as are drawn of it, which can take one more
    epoch of it; nothing else changes. The arrays then get names of their own, so that a run without
    megaindex stops at its start, as it always did, and not in the middle.
    """
    if is_left_to_megatron(self.config):
        dataset_index, dataset_sample_index = core().originals["BlendedDataset", "_build_indices"](
            self
        )
        return dataset_index, dataset_sample_index
    draw = _Draw.of(self)
    if not self.config.path_to_cache:
        arrays, counts = draw.arrays_and_counts()
    else:
        arrays, counts = _cached(self, draw)
    _extend_overdrawn(self, counts)
    return arrays["dataset_index"], arrays["dataset_sample_index"]


@dataclass(frozen=True, kw_only=True)
class _Draw:
    """What is drawn from how many sources."""

    weights: list[Any]
    """Normalised weights, or, without a size, the samples of each source."""
    size: int | None

    @classmethod
    def of(cls, blend: Any) -> _Draw:
        return cls(weights=list(blend.weights), size=blend.size)

    @property
    def num_samples(self) -> int:
        return int(sum(self.weights)) if self.size is None else int(self.size)

    def first(self, count: int) -> tuple[I16, I64]:
        """The first ``count`` draws, int16 and int64."""
        dataset_index: I16 = np.zeros(count, np.int16)
        dataset_sample_index: I64 = np.zeros(count, np.int64)
        build_blending_indices(
            dataset_index, dataset_sample_index, self.weights, len(self.weights), count
        )
        return dataset_index, dataset_sample_index

    def arrays_and_counts(self) -> tuple[Arrays, list[int]]:
        """All draws, and how many there are of each source."""
        if self.size is not None:
            drawn = self.first(self.num_samples)
        else:
            drawn = np.zeros(self.num_samples, np.int16), np.zeros(self.num_samples, np.int64)
            sizes = [int(size) for size in self.weights]
            build_exhaustive_blending_indices(*drawn, sizes, len(sizes))
        arrays: Arrays = dict(zip(_NAMES, drawn, strict=True))
        return arrays, self.counts(drawn[0])

    def counts(self, dataset_index: IntArray) -> list[int]:
        counted: list[int] = np.bincount(dataset_index, minlength=len(self.weights)).tolist()
        return counted

    def check(self, arrays: Arrays) -> None:
        """Whether arrays that Megatron wrote are this draw.

        Raises:
            FormatError: they are not.
        """
        which, sample = (arrays[name] for name in _NAMES)
        shape = (self.num_samples,)
        if which.dtype != np.int16 or sample.dtype != np.int64 or not which.shape == sample.shape:
            raise FormatError(f"must be int16 and int64, are {which.dtype} and {sample.dtype}")
        if which.shape != shape:
            raise FormatError(f"must have shape {shape}, have {which.shape}")
        if shape[0] and not 0 <= which.min() <= which.max() < len(self.weights):
            raise FormatError(f"must draw from {len(self.weights)} sources")
        if self.size is None:
            matches = self.counts(which) == [int(size) for size in self.weights]
        else:
            count = min(self.num_samples, _COMPARED)
            ours = self.first(count)
            matches = np.array_equal(ours[0], which[:count]) and np.array_equal(
                ours[1], sample[:count]
            )
        if not matches:
            raise FormatError("are not the draws of these weights and this size")


def _cached(self: Any, draw: _Draw) -> tuple[Arrays, list[int]]:
    directory = self.config.path_to_cache
    base = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}"
    files = _files(os.path.join(directory, base))
    beyond = _files(os.path.join(directory, f"{base}-overdrawn"), with_marker=False)

    def find() -> tuple[Arrays, list[int]] | None:
        for candidate in (files, beyond):
            known: dict[str, Any] = {}
            sidecar = find_arrays(candidate, _identity(draw, known), draw.check)
            if sidecar is not None:
                return map_arrays(candidate, sidecar), _counts_in(sidecar, candidate, draw)
        return None

    def build() -> tuple[Arrays, list[int]]:
        arrays, counts = draw.arrays_and_counts()
        fits = all(n <= len(dataset) for n, dataset in zip(counts, self.datasets, strict=True))
        with ArrayWriter(files if fits else beyond) as writer:
            for name, array in arrays.items():
                writer.allocate(name, array.shape, array.dtype.name)[...] = array
                writer.done(name)
            writer.publish(_identity(draw, {"drawn": counts}), self.unique_description)
        return arrays, counts

    return build_once(directory, base, find, build)


def _identity(draw: _Draw, facts: Mapping[str, Any]) -> Identity:
    """Of draws, which depend on no corpus."""
    weights = [float(weight) for weight in draw.weights]
    return Identity(
        settings=lambda: {"weights": weights, "size": draw.size},
        corpus=str,
        facts=lambda: facts,
    )


def _counts_in(sidecar: Sidecar, files: ArrayFiles, draw: _Draw) -> list[int]:
    drawn: list[int] | None = sidecar.facts.get("drawn")
    return draw.counts(map_arrays(files, sidecar)["dataset_index"]) if drawn is None else drawn


def _files(path: str, *, with_marker: bool = True) -> ArrayFiles:
    return ArrayFiles(
        arrays={name: f"{path}-{name}.npy" for name in _NAMES},
        sidecar=f"{path}-megaindex.json",
        marker=f"{path}-description.txt" if with_marker else None,
    )


def _extend_overdrawn(self: Any, counts: list[int]) -> None:
    datasets = list(self.datasets)
    for number, (dataset, drawn) in enumerate(zip(datasets, counts, strict=True)):
        if drawn <= len(dataset):
            continue
        logger.warning(
            "%s: the %s blend draws %d samples of it and %d were built; building more, where "
            "Megatron would ask for a larger mid_level_dataset_surplus",
            getattr(dataset, "dataset_path", number), self.split.name, drawn, len(dataset),
        )  # fmt: skip
        datasets[number] = type(dataset)(
            dataset.dataset, dataset.dataset_path, dataset.indices, drawn, dataset.index_split,
            dataset.config,
        )  # fmt: skip
    self.datasets = datasets


class Json:
    """Stands in for the module ``json`` where a blend is named.

    The description of a blend holds those of its datasets, each of which was written already:
    they are moved in by eight spaces instead of being written again.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @staticmethod
    def dumps(value: Any, *, indent: int, default: Callable[[Any], Any]) -> str:
        """``json.dumps`` of a blend's identifiers."""
        datasets = value.get("datasets", ())
        if not datasets or not all(isinstance(d, Identifiers) for d in datasets):
            return json.dumps(value, indent=indent, default=default)
        outer = json.dumps({**value, "datasets": None}, indent=indent, default=default)
        newline = "\n" + 2 * indent * " "
        inner = ("," + newline).join(d.description.replace("\n", newline) for d in datasets)
        listed = f"[{newline}{inner}\n{indent * ' '}]"
        return outer.replace('"datasets": null', f'"datasets": {listed}', 1)
