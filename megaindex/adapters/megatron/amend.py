"""Training data whose blend changed in mid-run, for ``install(amend=…)``.

The training data of the run as it began is built by Megatron's builder under the names that it had
then, validation and test data by the arguments of today.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

from megaindex.adapters.amended_blend import TrainSource, amended_data, check_present
from megaindex.adapters.megatron.arrays import ARRAYS
from megaindex.adapters.megatron.batches import index_of, samples_index
from megaindex.adapters.megatron.core import core, is_built_here
from megaindex.adapters.reports import MEGATRON
from megaindex.builders.extend import AmendedBlend
from megaindex.errors import InvalidArgument

_KEPT = "_megaindex_splits"
"""Attribute of a builder: the numbers of the splits that it builds."""
_TRAIN, _OTHERS = (0,), (1, 2)


def kept_splits(builder: Any, split: Sequence[Any]) -> list[Any]:
    """Return the shares of the splits that a builder builds, None for the others."""
    kept = getattr(builder, _KEPT, None)
    return list(split) if kept is None else [s if k in kept else None for k, s in enumerate(split)]


def build(self: Any, original: Any, amended: AmendedBlend) -> list[Any]:
    """``BlendedMegatronDatasetBuilder.build`` of an amended run.

    Args:
        original: Megatron's method.
        amended: the setting of `install`.

    Raises:
        InvalidArgument: the data path is not that of the last change, or the run has no amended
            order.
    """
    _check(self.config)
    present = self.config.blend or self.config.blend_per_split[0]
    check_present(amended, *present)
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
