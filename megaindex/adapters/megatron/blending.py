"""BlendedDataset's two arrays, and the text it is named by."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from megaindex.adapters.megatron.core import core
from megaindex.adapters.megatron.deferred import Identifiers
from megaindex.adapters.megatron.drawing import DRAWN, Draw, Drawn, maker_of
from megaindex.adapters.megatron.indexing import why_unlooked
from megaindex.adapters.reports import MEGATRON, find_or_build
from megaindex.store.array_set import SUFFIX, ArrayFiles, Arrays, Identity, Sidecar
from megaindex.store.array_writer import ArrayWriter
from megaindex.store.sidecar import find_arrays, map_arrays

logger = logging.getLogger("megaindex")


def build_indices(self: Any) -> tuple[Any, Any]:
    """``BlendedDataset._build_indices``; sources that are drawn beyond their end are extended.

    Megatron builds each source with a surplus of 0.5 % and raises IndexError where the blend draws
    more. Such a source is asked for as many samples as are drawn of it, which can take one more
    epoch of it; nothing else changes. The arrays then get names of their own, so that a run without
    megaindex stops at its start, as it always did, and not in the middle.
    """
    kind, name = type(self).__name__, f"{self.split.name} of {len(self.datasets)} datasets"
    reason = why_unlooked(self.config)
    if reason is not None:
        MEGATRON.leave(kind, name, reason)
        dataset_index, dataset_sample_index = core().originals["BlendedDataset", "_build_indices"](
            self
        )
        return dataset_index, dataset_sample_index
    started = time.perf_counter()
    draw = Draw(weights=list(self.weights), size=self.size)
    make = maker_of(draw, self.datasets)
    if self.config.path_to_cache:
        (arrays, counts), how, cache = _cached(self, draw, make)
    else:
        (arrays, counts), how, cache = make(), "built", None
    _extend_overdrawn(self, counts)
    seconds = time.perf_counter() - started
    MEGATRON.serve(kind, name, how, samples=draw.num_samples, seconds=seconds, cache=cache)
    for method in ("__getitem__", "__getitems__"):
        if not core().is_plain(type(self), "BlendedDataset", method):
            MEGATRON.leave("reading", kind, f"it has a {method} of its own")
    return arrays["dataset_index"], arrays["dataset_sample_index"]


def _cached(self: Any, draw: Draw, make: Callable[[], Drawn]) -> tuple[Drawn, str, str]:
    """The draws, whether they were opened or built, and what their files' names begin with."""
    directory = self.config.path_to_cache
    base = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}"
    files = _files(os.path.join(directory, base))
    beyond = _files(os.path.join(directory, f"{base}-overdrawn"), with_marker=False)

    def find() -> Drawn | None:
        return _find(files, draw) or _find(beyond, draw)

    def build() -> Drawn:
        arrays, counts = make()
        fits = all(n <= len(dataset) for n, dataset in zip(counts, self.datasets, strict=True))
        with ArrayWriter(files if fits else beyond) as writer:
            for name, array in arrays.items():
                writer.allocate(name, array.shape, array.dtype.name)[...] = array
                writer.done(name)
            writer.publish(_identity(draw, {"drawn": counts}), self.unique_description)
        return arrays, counts

    return *find_or_build(directory, base, find, build), str(files)


def _find(files: ArrayFiles, draw: Draw) -> Drawn | None:
    known: dict[str, Any] = {}

    def check(arrays: Arrays) -> None:
        draw.check(arrays)
        known["drawn"] = draw.counts(arrays["dataset_index"])

    sidecar = find_arrays(files, _identity(draw, known), check)
    if sidecar is None:
        return None
    return map_arrays(files, sidecar), _counts_in(sidecar, files, draw)


def _identity(draw: Draw, facts: Mapping[str, Any]) -> Identity:
    """Of draws, which depend on no corpus."""
    weights = [float(weight) for weight in draw.weights]
    return Identity(
        settings=lambda: {"weights": weights, "size": draw.size},
        corpus=str,
        facts=lambda: facts,
    )


def _counts_in(sidecar: Sidecar, files: ArrayFiles, draw: Draw) -> list[int]:
    drawn: list[int] | None = sidecar.facts.get("drawn")
    return draw.counts(map_arrays(files, sidecar)["dataset_index"]) if drawn is None else drawn


def _files(path: str, *, with_marker: bool = True) -> ArrayFiles:
    return ArrayFiles(
        arrays={name: f"{path}-{name}.npy" for name in DRAWN},
        sidecar=f"{path}{SUFFIX}",
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
