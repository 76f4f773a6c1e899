"""Training data whose blend changed in mid-run, for ``install(amend=…)``.

GPT-NeoX builds the datasets of today's ``train_data_paths``. In their place the blend gets those of
the run as it began, under the names that they had then, and one epoch of each source that joined.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from megaindex.adapters.amended_blend import TrainSource, amended_data, check_present
from megaindex.adapters.neox import blend, files, group
from megaindex.adapters.neox.datasets import TEXT_ROWS, is_plain_text
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.neox.samples import NeoxTextSamples
from megaindex.adapters.neox.skips import is_training, samples_index
from megaindex.adapters.reports import NEOX
from megaindex.builders.extend import AmendedBlend
from megaindex.errors import InvalidArgument
from megaindex.index.array_index import ArrayIndex
from megaindex.io.paths import absolute
from megaindex.loader.neox_dataset import NeoxDataset


def init_blend(self: Any, datasets: Sequence[Any], weights: Sequence[float]) -> None:
    """``BlendableDataset.__init__``, with the changes of `install`."""
    amended = framework().policy.amend
    if amended is None or not datasets or not is_training(datasets[0]):
        blend.init_blend(self, datasets, weights)
        return
    _check(datasets)
    check_present(amended, [each.megaindex.data_prefix for each in datasets], weights)
    end = sum(each.megaindex.requested for each in datasets)  # at least the samples of the run
    made = group.grouped(_datasets)(amended, datasets)
    old = object.__new__(type(self))
    blend.init_blend(old, made, amended.weights or [1.0])
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
        opened = files.make_dataset(path, "mmap", True)
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
    samples: NeoxTextSamples = dataset.megaindex
    index: Any = samples.epoch(0).index
    documents = samples.documents
    assert isinstance(documents, range), "all documents"
    return TrainSource(path=samples.data_prefix, index=index, documents=documents)


@dataclass(kw_only=True)
class LongerTextSamples(NeoxTextSamples):
    """Samples of a GPT2Dataset with longer arrays than its request."""

    longer: ArrayIndex

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.longer.num_samples

    def epoch(self, number: int) -> NeoxDataset:
        """Return the samples, the same in every epoch."""
        del number
        return NeoxDataset(self.longer, self.text)


def _with_arrays(dataset: Any, arrays: Any) -> Any:
    """Return a copy of a dataset with other arrays."""
    samples: NeoxTextSamples = dataset.megaindex
    old: Any = samples.epoch(0).index
    given = {field.name: getattr(samples, field.name) for field in fields(samples) if field.init}
    given |= {"_epochs": {}}
    longer = replace(old, **arrays)
    made = copy.copy(dataset)  # whose attributes are complete
    for name, array in (("doc_idx", "document_index"), ("sample_idx", "sample_index"),
                        ("shuffle_idx", "shuffle_index")):  # fmt: skip
        setattr(made, name, arrays[array])
    made.shuffle_idx_len = longer.num_samples - 1
    made.sample_idx_len = longer.num_samples
    made.megaindex = LongerTextSamples(**given, longer=longer)
    vars(made).pop(TEXT_ROWS, None)
    return made
