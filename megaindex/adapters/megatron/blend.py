"""The two arrays of a BlendedDataset, and training data whose blend changed in mid-run.

With ``install(amend=…)`` the training data of the run as it began is built by Megatron's builder
under the names that it had then, validation and test data by the arguments of today.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from megaindex.adapters.amended_blend import TrainSource, amended_data
from megaindex.adapters.megatron.arrays import ARRAYS, DatasetIdentifiers, unchecked_cache_reason
from megaindex.adapters.megatron.batches import index_of, samples_index
from megaindex.adapters.megatron.core import SIZES, core, is_built_here
from megaindex.adapters.reports import MEGATRON
from megaindex.cache.array_files import SUFFIX, ArrayFiles, Arrays, Identity
from megaindex.cache.array_group import ArrayWriter
from megaindex.cache.claim import build_once
from megaindex.cache.sidecar import find_arrays, map_arrays
from megaindex.configs.amended import AmendedBlend
from megaindex.errors import InvalidArgument
from megaindex.index.counts import drawn_counts
from megaindex.index.draws import BlendArrays, BlendDraws, ExhaustiveDraws, GreedyDraws

logger = logging.getLogger("megaindex")

BLEND_ARRAYS = ("dataset_index", "dataset_sample_index")


def sizes_per_dataset(
    normalized_weights: Sequence[float], target_size_per_split: Sequence[int], **surplus: float
) -> list[list[int]]:
    """``_get_size_per_split_per_dataset`` under a variance buffer: the samples that each split
    requests of each dataset.

    With ``"exact"`` the requests are the draws of each source, and their sum is the target size.
    """
    policy = core().policy
    asks_for_surplus = surplus or policy.variance_buffer == "exact"
    if not asks_for_surplus or None in target_size_per_split:  # which Megatron refuses
        original = core().originals["", SIZES]
        return cast("list[list[int]]", original(normalized_weights, target_size_per_split))
    blend = policy.blend(normalized_weights, explicit=False)
    columns = [blend.requests(size) for size in target_size_per_split]
    return [list(sizes) for sizes in zip(*cast("list[list[int]]", columns), strict=True)]


def build_indices(self: Any) -> tuple[Any, Any]:
    """``BlendedDataset._build_indices``; extends sources of which more is drawn than they have.

    Megatron builds each source with a surplus of 0.5 % and raises IndexError if the blend draws
    more. Such a source is built again with the samples drawn of it, which can take one more epoch.
    The arrays of the blend then have other names, so that a run without megaindex stops at its
    start and not in the middle.
    """
    kind, name = type(self).__name__, f"{self.split.name} of {len(self.datasets)} datasets"
    reason = unchecked_cache_reason(self.config)
    if reason is not None:
        MEGATRON.leave(kind, name, reason)
        dataset_index, dataset_sample_index = core().originals["BlendedDataset", "_build_indices"](
            self
        )
        return dataset_index, dataset_sample_index
    started = time.perf_counter()
    draws, size = _draws(self)
    if self.config.path_to_cache:
        arrays, how, cache = _cached(self, draws, size)
    else:
        arrays, how, cache = draws.arrays(size), "built", None
    _extend_overdrawn(self, arrays.counts.tolist())
    seconds = time.perf_counter() - started
    MEGATRON.serve(kind, name, how, samples=size, seconds=seconds, cache=cache)
    for method in ("__getitem__", "__getitems__"):
        if not core().is_plain(type(self), "BlendedDataset", method):
            MEGATRON.leave("reading", kind, f"it has a {method} of its own")
    return arrays.dataset_index, arrays.dataset_sample_index


def _draws(self: Any) -> tuple[BlendDraws, int]:
    """Return the draws of a blend and its size, by default that of its datasets together."""
    if self.size is None:
        sizes = np.array(self.weights, np.int64)
        return ExhaustiveDraws(sizes), int(sizes.sum())
    return GreedyDraws(np.array(self.weights, np.float64)), int(self.size)


def _cached(self: Any, draws: BlendDraws, size: int) -> tuple[BlendArrays, str, str]:
    """Return the arrays, ``opened`` or ``built``, and the common prefix of their files' names."""
    directory = self.config.path_to_cache
    base = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}"
    files = _files(os.path.join(directory, base))
    beyond = _files(os.path.join(directory, f"{base}-overdrawn"), with_marker=False)

    def identity(facts: Mapping[str, Any]) -> Identity:  # draws do not depend on a corpus
        weights = [float(weight) for weight in self.weights]
        settings = {"weights": weights, "size": self.size}
        return Identity(settings=lambda: settings, corpus=str, facts=lambda: facts)

    def find_in(files: ArrayFiles) -> BlendArrays | None:
        known: dict[str, Any] = {}

        def check(arrays: Arrays) -> None:
            known["drawn"] = draws.check(**arrays, size=size).tolist()

        sidecar = find_arrays(files, identity(known), check)
        if sidecar is None:
            return None
        arrays, drawn = map_arrays(files, sidecar), sidecar.facts.get("drawn")
        if drawn is None:
            drawn = drawn_counts(arrays["dataset_index"], len(self.weights))
        return BlendArrays(**arrays, counts=np.array(drawn, np.int64))

    def find() -> tuple[BlendArrays, str] | None:
        found = find_in(files) or find_in(beyond)
        return None if found is None else (found, "opened")

    def build() -> tuple[BlendArrays, str]:
        made = draws.arrays(size)
        counts = made.counts.tolist()
        fits = all(n <= len(dataset) for n, dataset in zip(counts, self.datasets, strict=True))
        with ArrayWriter(files if fits else beyond) as writer:
            for name in BLEND_ARRAYS:
                array = getattr(made, name)
                writer.allocate(name, array.shape, array.dtype.name)[...] = array
                writer.seal(name)
            writer.publish(identity({"drawn": counts}), self.unique_description)
        return made, "built"

    return *build_once(directory, base, find, build), str(files)


def _files(path: str, *, with_marker: bool = True) -> ArrayFiles:
    return ArrayFiles(
        arrays={name: f"{path}-{name}.npy" for name in BLEND_ARRAYS},
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
            "Megatron would require a larger mid_level_dataset_surplus",
            getattr(dataset, "dataset_path", number), self.split.name, drawn, len(dataset),
        )  # fmt: skip
        datasets[number] = type(dataset)(
            dataset.dataset, dataset.dataset_path, dataset.indices, drawn, dataset.index_split,
            dataset.config,
        )  # fmt: skip
    self.datasets = datasets


class DescriptionJson:
    """A replacement for the module ``json`` where a blend is named.

    The description of a blend contains those of its datasets, which were serialized before: they
    are indented by eight spaces instead of being serialized again.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @staticmethod
    def dumps(value: Any, *, indent: int, default: Callable[[Any], Any]) -> str:
        """``json.dumps`` of a blend's identifiers."""
        datasets = value.get("datasets", ())
        if not datasets or not all(isinstance(d, DatasetIdentifiers) for d in datasets):
            return json.dumps(value, indent=indent, default=default)
        outer = json.dumps({**value, "datasets": None}, indent=indent, default=default)
        newline = "\n" + 2 * indent * " "
        inner = ("," + newline).join(d.description.replace("\n", newline) for d in datasets)
        listed = f"[{newline}{inner}\n{indent * ' '}]"
        return outer.replace('"datasets": null', f'"datasets": {listed}', 1)


_KEPT = "_megaindex_splits"
"""Attribute of a builder: the numbers of the splits that it builds."""
_TRAIN, _OTHERS = (0,), (1, 2)


def kept_splits(builder: Any, split: Sequence[Any]) -> list[Any]:
    """Return the shares of the splits that a builder builds, None for the others."""
    kept = getattr(builder, _KEPT, None)
    return list(split) if kept is None else [s if k in kept else None for k, s in enumerate(split)]


def build(self: Any, original: Any, amended: AmendedBlend) -> list[Any]:
    """``BlendedMegatronDatasetBuilder.build`` of an amended run, by Megatron's ``original``.

    Raises:
        InvalidArgument: the data path is not that of the last change, or the run has no amended
            order.
    """
    _check(self.config)
    present = self.config.blend or self.config.blend_per_split[0]
    amended.check_present(*present)
    others = _copy_of(self, _OTHERS, self.sizes, present)
    _, *rest = original(others)
    paths = [source.path for source in amended.sources]
    then = (paths, amended.weights)
    train = _copy_of(self, _TRAIN, [amended.num_samples, *self.sizes[1:]], then)
    old = original(train)[0]
    if old is None or not is_built_here(self.is_built_on_rank):
        return [None, *rest]
    return [_amended(train, old, amended, int(self.sizes[0])), *rest]


def _check(config: Any) -> None:
    reason = None
    if config.mock:
        reason = "mock data has no documents"
    elif not config.blend and not config.blend_per_split[0]:
        reason = "there is no training data"
    elif getattr(config, "defer_npy_index_mmap", False):
        reason = "--dataloader-defer-npy-index-mmap leaves the arrays of the past unread; remove it"
    elif _phases():
        reason = "--phase-transition-iterations counts the samples of each phase anew; remove it"
    if reason is not None:
        raise InvalidArgument(f"amend: {reason}")


def _phases() -> bool:
    """Return whether Megatron's training loop rebuilds its data in phases."""
    module = sys.modules.get("megatron.training.global_vars")
    args = getattr(module, "_GLOBAL_ARGS", None)
    return bool(getattr(args, "phase_transition_iterations", None))


def _copy_of(builder: Any, kept: Sequence[int], sizes: Sequence[Any], blend: Any) -> Any:
    """Return a builder of some splits, with another blend of the training data."""
    made, config = copy.copy(builder), copy.copy(builder.config)
    if config.blend:
        config.blend = blend
    else:
        config.blend_per_split = [
            each if number in kept else None
            for number, each in enumerate([blend, *config.blend_per_split[1:]])
        ]
    made.config, made.sizes = config, list(sizes)
    setattr(made, _KEPT, tuple(kept))
    return made


def _amended(builder: Any, old: Any, amended: AmendedBlend, end: int) -> Any:
    """Return the training data of an amended run as a BlendedDataset."""
    datasets = list(getattr(old, "datasets", [old]))
    config = builder.config
    share = config.split_matrix[0] if config.blend else (0.0, 1.0)

    def open_source(path: str) -> TrainSource:
        column = builder._build_megatron_datasets_parallel(
            [path], [share, None, None], [[None, None, None]]
        )[0]
        datasets.append(column[0])
        return _source(column[0])

    data = amended_data(
        amended,
        samples_index(old),
        [_source(dataset) for dataset in datasets],
        open_source=open_source,
        row=core().policy.row,
        seed=int(config.random_seed),
        end=end,
        cache_dir=config.path_to_cache or None,
        key=old.unique_description_hash,
    )
    for number, arrays in data.longer.items():
        datasets[number] = _with_arrays(datasets[number], arrays)
    blend = object.__new__(core().blended_dataset.BlendedDataset)
    known = f"{old.unique_description_hash}-amended-{end}"
    vars(blend).update(
        datasets=datasets,
        split=datasets[0].index_split,
        weights=[1.0 / len(datasets)] * len(datasets),
        size=end,
        config=config,
        unique_identifiers={"class": "BlendedDataset", "amended": known},
        unique_description=known,
        unique_description_hash=known,
        dataset_index=data.dataset_index,
        dataset_sample_index=data.dataset_sample_index,
    )
    MEGATRON.serve("BlendedDataset", "train", "amended", samples=end, detail=amended.detail)
    return blend


def _source(dataset: Any) -> TrainSource:
    documents = dataset.indices
    return TrainSource(
        path=dataset.dataset.path_prefix,
        index=index_of(dataset),
        documents=range(int(documents[0]), int(documents[-1]) + 1),
    )


def _with_arrays(dataset: Any, arrays: Any) -> Any:
    """Return a copy of a dataset with other arrays."""
    made = copy.copy(dataset)  # whose state is complete
    vars(made).update({name: arrays[name] for name in ARRAYS})
    return made
