"""Methods of BlendedMegatronDatasetBuilder: all datasets of a blend at once, without barriers.

One process per file system builds missing arrays (`megaindex.cache.claim`), so ranks do not wait
for rank 0 at a barrier, which would need a device.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from megaindex.adapters.megatron import amend, arrays, blend, indexed_dataset
from megaindex.adapters.megatron.arrays import (
    DatasetRequest,
    LowLevelCorpus,
    epochs_in,
    log_as_megatron,
    unchecked_cache_reason,
    unsupported_reason,
)
from megaindex.adapters.megatron.batches import samples_index, unbatched_reason
from megaindex.adapters.megatron.blend import BackgroundDraws, expected_draws
from megaindex.adapters.megatron.core import METHODS, core, is_built_here, load_class
from megaindex.adapters.megatron.lazy_datasets import DatasetFactory, defer_arrays
from megaindex.adapters.reports import MEGATRON, ServedDataset
from megaindex.cache.framework_files.array_files import Sidecar
from megaindex.cache.framework_files.group import fetch_together, uncollected
from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import SPLITS

_CLASS = "BlendedMegatronDatasetBuilder"


def build_megatron_datasets_parallel(
    self: Any, prefixes: Sequence[str], split: Sequence[Any], sizes_per_dataset: Sequence[Any]
) -> list[list[Any]]:
    """``BlendedMegatronDatasetBuilder._build_megatron_datasets_parallel``."""
    split = amend.kept_splits(self, split)
    if not is_built_here(self.is_built_on_rank) and coordinates(self.cls, self.config):
        return [[None] * len(prefixes) for _ in split]
    factories = _factories(self, prefixes, split)
    if factories is None:
        original = core().originals[_CLASS, "_build_megatron_datasets_parallel"]
        columns = cast("list[list[Any]]", original(self, prefixes, split, sizes_per_dataset))
    else:
        columns = _build(self, factories, prefixes, split, sizes_per_dataset)
    _check_enough(self, columns, split, sizes_per_dataset)
    return columns


def _build(
    self: Any,
    factories: Sequence[DatasetFactory | None],
    prefixes: Sequence[str],
    split: Sequence[Any],
    sizes_per_dataset: Sequence[Any],
) -> list[list[Any]]:
    """Return the datasets of each split; they open their files on first use."""
    started = time.perf_counter()
    draws = expected_draws(self.config, self.sizes, split) if len(prefixes) > 1 else []
    background = BackgroundDraws(draws)
    with uncollected():
        made = _make(self, factories, prefixes, sizes_per_dataset)
        pairs = [pair for row in made for pair in row if pair is not None]
    made_of = _fetch_arrays(pairs, self.config.path_to_cache, background)
    what = "a blend" if len(prefixes) > 1 else prefixes[0]
    _report(made_of, what, time.perf_counter() - started)
    if pairs:
        kind, low_level = type(pairs[0][0]), type(pairs[0][0].dataset)
        reason = unbatched_reason(kind, low_level, self.config)
        if reason is not None:
            MEGATRON.leave("reading", kind.__name__, reason)
    columns = [
        [None if pair is None else pair[0] for pair in column] for column in zip(*made, strict=True)
    ]
    background.pass_to_blends(columns)
    return columns


def _report(
    made_of: tuple[list[DatasetRequest], list[Sidecar], list[bool]], what: str, seconds: float
) -> None:
    """Record the datasets of a blend or of one corpus, with one log record for all."""
    _, sidecars, built = made_of
    summary = f"{len(built)} datasets of {what}, {sum(built)} of them built, in {seconds:.2f} s"
    MEGATRON.serve_together(partial(_records, *made_of), summary)
    log_as_megatron(_size_of(sidecar) for sidecar in sidecars)


def _records(
    requests: Sequence[DatasetRequest], sidecars: Sequence[Sidecar], built: Sequence[bool]
) -> list[ServedDataset]:
    rows = []
    for request, sidecar, is_new in zip(requests, sidecars, built, strict=True):
        samples, epochs = _size_of(sidecar)
        files = str(request.files)
        _, kind, split = files.rsplit("-", 2)
        rows.append(
            ServedDataset(
                MEGATRON.framework, kind, f"{request.name} ({split})", "megaindex",
                "built" if is_new else "opened", samples, epochs, None, files,
            )
        )  # fmt: skip
    return rows


def _size_of(sidecar: Sidecar) -> tuple[int, int]:
    """Return the samples and epochs of arrays of a range of documents."""
    begin, end = sidecar.settings["documents"]
    samples, entries = (
        int(sidecar.arrays[name][1][0]) for name in ("shuffle_index", "document_index")
    )
    return samples, epochs_in(entries, end - begin)


def _check_enough(
    self: Any, columns: Sequence[Sequence[Any]], split: Sequence[Any], asked: Sequence[Any]
) -> None:
    """Check that a blend without weights is as long as requested under a variance buffer.

    Raises:
        InvalidArgument: one epoch of all sources holds fewer samples.
    """
    weighted = any(size is not None for sizes in asked for size in sizes)
    if core().policy.variance_buffer is None or weighted:
        return
    if core().policy.variance_buffer != "exact":
        MEGATRON.leave(
            "sizes", "a blend without weights",
            "one epoch of each source is built, and variance_buffer has no effect",
        )  # fmt: skip
        return
    for name, size, share, column in zip(
        core().builder.Split, self.sizes, split, columns, strict=True
    ):
        if share is None or size is None or any(dataset is None for dataset in column):
            continue
        total = sum(len(dataset) for dataset in column)
        if total < size:
            raise InvalidArgument(
                f"{name.name}: {size} samples are requested of sources without weights, whose one "
                f"epoch holds {total}; Megatron would serve only those. Give weights, or leave "
                "variance_buffer out"
            )


def _make(
    builder: Any,
    factories: Sequence[DatasetFactory | None],
    prefixes: Sequence[str],
    sizes: Sequence[Any],
) -> list[list[tuple[Any, DatasetRequest] | None]]:
    """Return, for each corpus and split, a dataset and the request for its arrays."""
    low_level = _patched("IndexedDataset", core().indexed_dataset.IndexedDataset)
    made = []
    for prefix, asked in zip(prefixes, sizes, strict=True):
        corpus = LowLevelCorpus(
            indexed_dataset.open_lazily(low_level, prefix, builder.config.mmap_bin_files)
        )
        made.append(
            [
                None if factory is None else factory.make(corpus, prefix, size)
                for factory, size in zip(factories, asked, strict=True)
            ]
        )
    return made


def _factories(
    self: Any, prefixes: Sequence[str], split: Sequence[Any]
) -> list[DatasetFactory | None] | None:
    """Return a factory of the datasets of each split; None where Megatron's own code makes them."""
    config = self.config
    plain = self.cls is _patched("GPTDataset", core().gpt_dataset.GPTDataset)
    if not plain or not coordinates(self.cls, config):
        return None  # each dataset reports the reason
    if any(indexed_dataset.unsupported_reason({"path_prefix": prefix}) for prefix in prefixes):
        return None
    factories = [
        None if share is None else DatasetFactory(self.cls, config, name, share)
        for name, share in zip(core().builder.Split, split, strict=True)
    ]
    return factories if all(one is None or one.is_possible for one in factories) else None


def _fetch_arrays(
    pairs: Sequence[tuple[Any, DatasetRequest]], directory: str | None, background: BackgroundDraws
) -> tuple[list[DatasetRequest], list[Sidecar], list[bool]]:
    """Find or build the arrays of all datasets; return the requests, the sidecars of their arrays,
    and which were built."""
    requests = [request for _, request in pairs]
    if directory is None:  # every corpus has its own
        fetched = [request.fetch() for request in requests]
    else:
        names = "".join(str(request.files) for request in requests)
        key = f"{hashlib.md5(names.encode(), usedforsecurity=False).hexdigest()}-megaindex-blend"
        fetched = fetch_together(requests, directory, key, lambda _: background.start())
    sidecars, built = [one.sidecar for one in fetched], [one.was_built for one in fetched]
    with uncollected():
        for (dataset, request), sidecar in zip(pairs, sidecars, strict=True):
            defer_arrays(dataset, request, sidecar)
    return requests, sidecars, built


def build_megatron_dataset_splits(
    self: Any, dataset_path: str | None, split: Any, sizes: Any, synchronize_ranks: bool = True
) -> list[Any]:
    """``BlendedMegatronDatasetBuilder._build_megatron_dataset_splits``, without its barriers."""
    original = core().originals[_CLASS, "_build_megatron_dataset_splits"]
    split = amend.kept_splits(self, split)
    if synchronize_ranks and dataset_path is not None:  # a path in no blend: those have theirs
        sizes = [core().policy.enlarged(size) for size in sizes]
    factories = None if dataset_path is None else _factories(self, [dataset_path], split)
    if factories is not None and dataset_path is not None and is_built_here(self.is_built_on_rank):
        datasets = [column[0] for column in _build(self, factories, [dataset_path], split, [sizes])]
        return _open_all(datasets)
    wait = synchronize_ranks and not coordinates(self.cls, self.config)
    return cast("list[Any]", original(self, dataset_path, split, sizes, wait))


def _open_all(datasets: list[Any]) -> list[Any]:
    """Open the files of the datasets of one corpus, which takes less than deferring it."""
    for dataset in datasets:
        if dataset is not None:
            _ = dataset.shuffle_index, dataset.dataset.index
    return datasets


def build_generic_dataset(
    cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any
) -> Any:
    """``BlendedMegatronDatasetBuilder.build_generic_dataset``: a static method."""
    if args and isinstance(args[0], list) and args[0][:1] == [None]:
        return None  # of a split that an amended run builds apart
    if cls is core().blended_dataset.BlendedDataset:
        cls = _patched("BlendedDataset", cls)
    if coordinates(cls, args[-1] if args else None):
        return cls(*args) if is_built_here(is_built_on_rank) else None
    _report_unserved(cls, args)
    original = core().originals[_CLASS, "build_generic_dataset"]
    return original(cls, is_built_on_rank, synchronize_ranks, *args)


def _patched(name: str, theirs: Any) -> Any:
    """Return Megatron's class where it has megaindex's methods, else the subclass with them."""
    is_patched = all(vars(theirs).get(method) is ours for method, ours in METHODS[name].items())
    return theirs if is_patched else load_class(name)


def coordinates(cls: Any, config: Any) -> bool:
    """Return True if datasets of this class are built under a claim, without barriers."""
    if not isinstance(cls, type):
        return False
    build = getattr(cls, "_build_document_sample_shuffle_indices", None)
    if build is arrays.build_document_sample_shuffle_indices:
        return unsupported_reason(cls, config) is None
    is_blend = getattr(cls, "_build_indices", None) is blend.build_indices
    return is_blend and build is None and unchecked_cache_reason(config) is None


def _report_unserved(cls: Any, args: Sequence[Any]) -> None:
    """Report a class that builds its arrays itself."""
    owns = not isinstance(cls, type) or not (
        getattr(cls, "_build_indices", None) is blend.build_indices
        or getattr(cls, "_build_document_sample_shuffle_indices", None)
        is arrays.build_document_sample_shuffle_indices
    )
    if owns:
        split = next((f" ({a.name})" for a in args if isinstance(a, core().builder.Split)), "")
        name = f"{next((a for a in args if isinstance(a, str)), '')}{split}"
        reason = "it builds and reads its arrays itself; the .idx and .bin it opens are megaindex's"
        MEGATRON.leave(getattr(cls, "__name__", str(cls)), name, reason)


def build_datasets(self: Any) -> Any:
    """``BlendedMegatronDatasetBuilder.build``, with the changes or the lock of `install`."""
    original = core().originals[_CLASS, "build"]
    amended = core().policy.amend
    if amended is not None:
        return amend.build(self, original, amended)
    made = original(self)
    lock = core().policy.lock
    if lock is None:
        return made
    for name, dataset in zip(SPLITS, made, strict=True):
        if isinstance(dataset, list):  # several validation sets, which no lock has
            MEGATRON.leave("lock", name, "several sets are not compared with a lock")
        elif dataset is not None:
            datasets = getattr(dataset, "datasets", [dataset])
            prefixes = [each.dataset.path_prefix for each in datasets]
            lock.check(name, samples_index(dataset), prefixes, MEGATRON)
    return made
