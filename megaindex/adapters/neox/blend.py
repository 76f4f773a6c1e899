"""Methods of GPT-NeoX's BlendableDataset, for any number of datasets and whole batches.

GPT-NeoX builds the datasets of today's ``train_data_paths``. With ``install(amend=…)`` the blend
gets those of the run as it began in their place, under the names that they had then, and one epoch
of each source that joined.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megaindex._types import F64, I64
from megaindex.adapters.amended_blend import TrainSource, amended_data
from megaindex.adapters.neox.arrays import grouped
from megaindex.adapters.neox.datasets import (
    ARRAYS,
    LENGTHS,
    TEXT_ROWS,
    BatchRows,
    is_plain_text,
    join_batches,
    read_texts,
)
from megaindex.adapters.neox.framework import framework, make_dataset
from megaindex.adapters.neox.samples import NeoxSamples
from megaindex.adapters.neox.skips import is_training, joint_index, samples_index
from megaindex.adapters.reports import NEOX
from megaindex.builders.blend import CachedBlend, cached_blend
from megaindex.configs.amended import AmendedBlend
from megaindex.errors import InvalidArgument, OutOfRange, StorageError
from megaindex.index.blend import normalized
from megaindex.index.draws import BlendDraws, ExhaustiveDraws, GreedyDraws
from megaindex.io.paths import absolute
from megaindex.loader.neox_dataset import TextRows

logger = logging.getLogger("megaindex")

_MOST_IN_UINT8 = 254  # GPT-NeoX asserts that there are no more


def init_unchanged(self: Any, datasets: Sequence[Any], weights: Sequence[float]) -> None:
    """``BlendableDataset.__init__``.

    As in GPT-NeoX the blend is as long as its datasets together, so near its end it draws samples
    that a dataset does not have. With ``exact`` it ends before the first of them; and if epochs are
    requested of the datasets, each sample is served once in every epoch.
    """
    if len(datasets) != len(weights) or not datasets:
        raise InvalidArgument(
            f"a blend has one weight for each dataset, got {len(weights)} for {len(datasets)}"
        )
    started = time.perf_counter()
    self.datasets = list(datasets)
    self._exact = framework().exact
    sizes = np.array([len(dataset) for dataset in datasets], np.int64)
    samples = [getattr(dataset, "megaindex", None) for dataset in datasets]
    directory = None if samples[0] is None else samples[0].request().directory
    draws: BlendDraws = GreedyDraws(normalized(weights))
    if self._exact and all(one is not None and one.requested is None for one in samples):
        draws = ExhaustiveDraws(sizes)  # epochs are requested
    blend = draw(draws, int(sizes.sum()), directory)
    arrays = blend.arrays
    end = draws.end(arrays, sizes) if self._exact else arrays.dataset_index.size
    if end < arrays.dataset_index.size:
        number = int(arrays.dataset_index[end])
        logger.info("the blend ends after %d samples, where dataset %d is spent", end, number)
    self.dataset_index = arrays.dataset_index[:end]
    self.dataset_sample_index = arrays.dataset_sample_index[:end]
    self.size = end
    _report(self, normalized(weights), blend, time.perf_counter() - started)


def _report(self: Any, shares: F64, blend: CachedBlend, seconds: float) -> None:
    """Record the blend, and print GPT-NeoX's own lines about it."""
    show = framework().print_line
    show(f"> elapsed time for building blendable dataset indices: {seconds:.2f} (sec)")
    achieved = blend.arrays.counts / max(1, blend.arrays.dataset_index.size)
    ratios = [
        f"   dataset {number}, input: {share:g}, achieved: {drawn:g}"
        for number, (share, drawn) in enumerate(zip(shares, achieved, strict=True))
    ]
    show("\n".join([" > sample ratios:", *ratios]))
    kind = type(self).__name__
    first = getattr(self.datasets[0], "name", "")
    NEOX.serve(
        kind,
        f"{first} and {len(self.datasets) - 1} more",
        "built" if blend.was_built else "opened",
        samples=self.size,
        seconds=seconds,
        cache=blend.entry or None,
    )
    if type(self).__getitem__ is not read_blend_sample:
        NEOX.leave("reading", kind, f"{kind} has a __getitem__ of its own")


def draw(draws: BlendDraws, size: int, directory: str | None) -> CachedBlend:
    """Return the first ``size`` draws, read-only.

    At least `_WORTH_KEEPING` of them are cached in ``directory``, for all processes to map.
    """
    dtype = "uint8" if draws.values.size <= _MOST_IN_UINT8 else "int16"
    folder = None
    if directory is not None and size >= _WORTH_KEEPING:
        folder = os.path.join(directory, FOLDER)
    try:
        blend = cached_blend(draws, size, folder, dtype)
    except StorageError as error:
        logger.warning("%s; the blend is drawn anew at each start", error)
        blend = cached_blend(draws, size, None, dtype)
    for array in blend.arrays:
        array.flags.writeable = False
    return blend


FOLDER = "megaindex-blends"
"""Name of the cache of draws, in the directory of the first dataset's arrays."""
_WORTH_KEEPING = 1 << 16  # draws that take longer to compute than to open a file


def reshuffles(self: Any) -> bool:
    """Return True if every dataset has another order for each epoch."""
    return all(
        getattr(getattr(dataset, "megaindex", None), "reshuffles", False)
        for dataset in self.datasets
    )


def _is_late(self: Any) -> bool:
    """Return True if GPT-NeoX's own code made a blend, before `install`.

    Raises:
        InvalidArgument: `install` has settings that came too late for it.
    """
    is_late = "_exact" not in vars(self)
    if is_late:
        framework().check_late(f"a {type(self).__name__}")
    return is_late


def read_blend_sample(self: Any, idx: int) -> Any:
    """``__getitem__``."""
    if _is_late(self):
        return framework().original("blendable_dataset", "BlendableDataset", "__getitem__")(
            self, idx
        )
    rows = read_texts(self, [idx], _make_text_rows)
    if rows is not None:
        return {"text": rows[0]}
    return _read(self, [idx])[0]


def read_blend_samples(self: Any, ids: Sequence[int]) -> list[Any]:
    """``__getitems__``: the samples of a batch, read together, or one by one if ``__getitem__`` is
    overridden."""
    if type(self).__getitem__ is not read_blend_sample or _is_late(self):
        return [self[idx] for idx in ids]
    rows = read_texts(self, list(ids), _make_text_rows)
    if rows is not None:
        return BatchRows({"text": rows})
    return _read(self, ids)


def _read(self: Any, ids: Sequence[int]) -> list[Any]:
    wanted: I64 = np.asarray(ids, np.int64)
    within, epochs = wanted, np.zeros_like(wanted)
    if self._exact and reshuffles(self):
        epochs, within = np.divmod(wanted, self.size)
    elif not self._exact and self.size:
        within = np.where(wanted >= self.size, wanted % self.size, wanted)
    beyond = (within < 0) | (within >= self.size)
    if beyond.any():
        raise OutOfRange(
            f"sample {int(wanted[beyond][0])} was requested, the blend holds samples 0 to "
            f"{self.size - 1}; exact serves no other in its place"
        )
    source, sample = self.dataset_index[within], self.dataset_sample_index[within]
    parts = []
    for number in np.unique(source).tolist():
        dataset = self.datasets[number]
        at = np.flatnonzero(source == number)
        asked = (sample[at] + epochs[at] * len(dataset)).tolist()
        read = getattr(dataset, "__getitems__", None)
        parts.append((at, [dataset[i] for i in asked] if read is None else read(asked)))
    return join_batches(parts, wanted.size)


def _make_text_rows(self: Any) -> TextRows | None:
    """Return the reader of a blend as a whole; None where its datasets are read one by one."""
    if not all(map(is_plain_text, self.datasets)):
        return None
    samples: list[NeoxSamples] = [dataset.megaindex for dataset in self.datasets]
    if len({(one.seq_length, one.exact) for one in samples}) > 1:
        return None
    return TextRows(joint_index(self, samples), [one.text for one in samples])


def get_blend_state(self: Any) -> dict[str, Any]:
    """``__getstate__``: without the reader of all its datasets."""
    return {name: value for name, value in vars(self).items() if name != TEXT_ROWS}


def init_blend(self: Any, datasets: Sequence[Any], weights: Sequence[float]) -> None:
    """``BlendableDataset.__init__``, with the changes of `install`."""
    amended = framework().policy.amend
    if amended is None or not datasets or not is_training(datasets[0]):
        init_unchanged(self, datasets, weights)
        return
    _check(datasets)
    amended.check_present([each.megaindex.data_prefix for each in datasets], weights)
    end = sum(each.megaindex.requested for each in datasets)  # at least the samples of the run
    made = grouped(_datasets)(amended, datasets)
    old = object.__new__(type(self))
    init_unchanged(old, made, amended.weights or [1.0])
    sources = [_source(dataset) for dataset in made]
    first = made[0].megaindex
    data = amended_data(
        amended,
        samples_index(old),
        sources,
        open_source=lambda path: _open(path, datasets, made),
        row=framework().policy.row,
        seed=first.seed,
        end=end,
        cache_dir=first.request().directory,
        key=[
            "neox",
            [[each.megaindex.data_prefix, each.megaindex.requested] for each in made],
            [str(weight) for weight in amended.weights or [1.0]],
            [first.seq_length, first.seed, framework().policy.mark, framework().exact],
        ],
    )
    for number, arrays in data.longer.items():
        made[number] = _with_arrays(made[number], arrays)
    self.datasets = made
    self._exact = framework().exact
    self.dataset_index, self.dataset_sample_index = data.dataset_index, data.dataset_sample_index
    self.size = end
    NEOX.serve(type(self).__name__, "train", "amended", samples=end, detail=amended.detail)


def refuse_split(name: str) -> None:
    """Raise InvalidArgument if training data other than a blend is to be amended."""
    if framework().policy.amend is not None:
        raise InvalidArgument(
            f"amend: {name} is split into training, validation and test data, and a blend is not; "
            "amend a run that began with train_data_paths"
        )


def _check(datasets: Sequence[Any]) -> None:
    for each in datasets:
        if not is_plain_text(each):
            raise InvalidArgument(
                "amend: the training data must be GPT2Dataset with pack_impl packed, without "
                f"labels, got {type(each).__name__} with pack_impl "
                f"{getattr(each, 'pack_impl', None)}; use a recipe"
            )
        if each.megaindex.requested is None:
            raise InvalidArgument(
                "amend: train_epochs reads the data again in passes, in which a change has no "
                "place; give train_iters"
            )


def _datasets(amended: AmendedBlend, present: Sequence[Any]) -> list[Any]:
    """Return the datasets of the run as it began."""
    weights = amended.weights
    if weights is None and len(amended.sources) > 1:
        raise InvalidArgument(
            "amend: write a weight before every path of data_path, as in train_data_weights"
        )
    _, asked = framework().data_utils.get_normalized_weights_and_num_samples(
        weights or [1.0], amended.num_samples
    )
    return [
        _dataset(present, number, source.path, count, None)
        for number, (source, count) in enumerate(zip(amended.sources, asked, strict=True))
    ]


def _dataset(
    present: Sequence[Any], number: int, path: str, samples: int | None, epochs: int | None
) -> Any:
    """Return a dataset like those of today."""
    like = present[0].megaindex
    known = {absolute(each.megaindex.data_prefix): each.indexed_dataset for each in present}
    opened = known.get(absolute(path))
    if opened is None:
        opened = make_dataset(path, "mmap", True)
    return type(present[0])(
        f"train_{number}",
        path,
        np.arange(len(opened), dtype=np.int32),
        opened,
        samples,
        epochs,
        like.seq_length,
        like.seed,
        pack_impl=like.pack_impl,
        allow_chopped=like.allow_chopped,
    )


def _open(path: str, present: Sequence[Any], made: list[Any]) -> TrainSource:
    """Append the dataset of a source that joins, and return it."""
    dataset = _dataset(present, len(made), path, None, 1)
    dataset.megaindex.reshuffles = False
    made.append(dataset)
    return _source(dataset)


def _source(dataset: Any) -> TrainSource:
    samples: NeoxSamples = dataset.megaindex
    index: Any = samples.epoch(0).index
    documents = samples.documents
    assert isinstance(documents, range), "all documents"
    return TrainSource(path=samples.data_prefix, index=index, documents=documents)


def _with_arrays(dataset: Any, arrays: Any) -> Any:
    """Return a copy of a dataset with other arrays."""
    samples: NeoxSamples = dataset.megaindex
    old: Any = samples.epoch(0).index
    longer = replace(old, **arrays)
    made = copy.copy(dataset)  # whose attributes are complete
    vars(made).update({ours: arrays[array] for ours, array in ARRAYS.items()})
    vars(made).update({which: longer.num_samples + more for which, more in LENGTHS.items()})
    made.megaindex = replace(samples, longer=longer, _epochs={})
    vars(made).pop(TEXT_ROWS, None)
    return made
