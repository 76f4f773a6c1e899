"""BlendedMegatronDatasetBuilder: all datasets of a blend at once, and no barriers.

One process per file system builds what is missing (`megaindex.store.claim`), so ranks need not wait
for rank 0 at a barrier, and none of them needs a device to wait with.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from megaindex.adapters.megatron import blending, indexing
from megaindex.adapters.megatron.core import core, is_built_here
from megaindex.adapters.megatron.corpus import Corpus
from megaindex.adapters.megatron.deferred import Maker, fill_in_later
from megaindex.adapters.megatron.drawing import Ahead, expected_draws
from megaindex.adapters.megatron.indexing import Request, is_left_to_megatron
from megaindex.adapters.megatron.reading import is_ours, open_later
from megaindex.kernels import num_threads
from megaindex.store.array_set import Sidecar
from megaindex.store.array_writer import ArrayWriter, write_together
from megaindex.store.claim import build_once
from megaindex.store.listing import Listing
from megaindex.store.sidecar import record_accepted
from megaindex.store.sidecar_file import make_sets_durable_later

logger = logging.getLogger("megaindex")

_CLASS = "BlendedMegatronDatasetBuilder"
_WORTH_A_THREAD = 1 << 20  # bytes of an .idx: 50,000 documents
_WORTH_LISTING = 20  # names for each dataset: looking for its five by themselves takes longer
_TOGETHER = 64  # datasets recorded in one file: fewer than this are built by one thread


def build_megatron_datasets_parallel(
    self: Any, prefixes: Sequence[str], split: Sequence[Any], sizes_per_dataset: Sequence[Any]
) -> list[list[Any]]:
    """``BlendedMegatronDatasetBuilder._build_megatron_datasets_parallel``."""
    if not is_built_here(self.is_built_on_rank) and coordinates(self.cls, self.config):
        return [[None] * len(prefixes) for _ in split]
    makers = _makers(self, prefixes, split)
    if makers is None:
        original = core().originals[_CLASS, "_build_megatron_datasets_parallel"]
        return cast("list[list[Any]]", original(self, prefixes, split, sizes_per_dataset))
    ahead = Ahead(expected_draws(self.config, self.sizes, split))
    with _uncollected():
        made = _make(self, makers, prefixes, sizes_per_dataset)
    pairs = [pair for row in made for pair in row if pair is not None]
    _fill_in(pairs, self.config.path_to_cache, ahead)
    columns = [
        [None if pair is None else pair[0] for pair in column] for column in zip(*made, strict=True)
    ]
    ahead.leave_for(columns)
    return columns


def _make(
    builder: Any, makers: Sequence[Maker | None], prefixes: Sequence[str], sizes: Sequence[Any]
) -> list[list[tuple[Any, Request] | None]]:
    """For each corpus and split a dataset, and the request for its arrays."""
    low_level = _patched("IndexedDataset", core().indexed_dataset.IndexedDataset)
    made = []
    for prefix, asked in zip(prefixes, sizes, strict=True):
        corpus = Corpus(open_later(low_level, prefix, builder.config.mmap_bin_files))
        made.append(
            [
                None if maker is None else maker.make(corpus, prefix, size)
                for maker, size in zip(makers, asked, strict=True)
            ]
        )
    return made


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Thousands of objects are made at once, and stay. Looking for garbage among them, and among
    all that a trainer holds, would take a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _makers(self: Any, prefixes: Sequence[str], split: Sequence[Any]) -> list[Maker | None] | None:
    """For each split what makes its datasets; None where Megatron's own code has to."""
    config, module = self.config, core().builder
    plain = self.cls is _patched("GPTDataset", core().gpt_dataset.GPTDataset)
    local = {"object_storage_config": None}
    if not (
        plain
        and coordinates(self.cls, config)
        and all(is_ours({**local, "path_prefix": prefix}) for prefix in prefixes)
    ):
        return None
    makers = [
        None if share is None else Maker(self.cls, config, name, share)
        for name, share in zip(module.Split, split, strict=True)
    ]
    return makers if all(maker is None or maker.is_possible for maker in makers) else None


def _fill_in(pairs: Sequence[tuple[Any, Request]], directory: str | None, ahead: Ahead) -> None:
    requests = [request for _, request in pairs]
    if directory is None:  # every corpus has its own
        sidecars = [request.find_or_build() for request in requests]
    else:
        names = "".join(str(request.files) for request in requests)
        key = f"{hashlib.md5(names.encode(), usedforsecurity=False).hexdigest()}-megaindex-blend"
        sidecars = build_once(
            directory,
            key,
            lambda: _find_all(requests, directory),
            lambda: _build_missing(requests, directory, ahead),
        )
    for (dataset, request), sidecar in zip(pairs, sidecars, strict=True):
        fill_in_later(dataset, request, sidecar)


@contextlib.contextmanager
def _listing(requests: Sequence[Request], directory: str) -> Iterator[Listing | None]:
    """To look requests up by; what is found to be Megatron's is recorded at the end, and what
    has outlived a boot noted."""
    listing = Listing.of(directory, at_most=_WORTH_LISTING * len(requests))
    yield listing
    if listing is None:
        return
    for begin in range(0, len(listing.accepted), _TOGETHER):
        record_accepted(listing.accepted[begin : begin + _TOGETHER])
    for begin in range(0, len(listing.verified), _TOGETHER):
        make_sets_durable_later(listing.verified[begin : begin + _TOGETHER])


def _find_all(requests: Sequence[Request], directory: str) -> list[Sidecar] | None:
    sidecars = []
    with _uncollected(), _listing(requests, directory) as listing:
        for request in requests:
            sidecar = request.find(listing)
            if sidecar is None:
                return None
            sidecars.append(sidecar)
    return sidecars


def _build_missing(requests: Sequence[Request], directory: str, ahead: Ahead) -> list[Sidecar]:
    ahead.start()
    with _listing(requests, directory) as listing:
        sidecars = [request.find(listing) for request in requests]
    missing = [number for number, sidecar in enumerate(sidecars) if sidecar is None]
    logger.info("building the index arrays of %d of %d datasets", len(missing), len(requests))
    parts = [missing[begin : begin + _TOGETHER] for begin in range(0, len(missing), _TOGETHER)]

    # Python's lock is held for most of the work on a small corpus: threads would only wait for it.
    index_bytes = sum(sum(requests[number].corpus.stamp[:1]) for number in missing)
    at_once = num_threads() if index_bytes >= len(missing) * _WORTH_A_THREAD else 1
    threads = max(1, num_threads() // max(at_once, 1))

    def build(numbers: list[int]) -> None:
        chosen = [requests[number] for number in numbers]
        built = write_together(
            [
                (ArrayWriter(r.files, listing), r.identity(), r.description)
                for r in chosen
                if r.files
            ],
            lambda k, writer: chosen[k].fill(writer, threads),
        )
        for number, sidecar in zip(numbers, built, strict=True):
            sidecars[number] = sidecar

    with ThreadPoolExecutor(at_once, "megaindex-build") as pool:
        list(pool.map(build, parts))
    return [sidecar for sidecar in sidecars if sidecar is not None]


def build_megatron_dataset_splits(
    self: Any, dataset_path: str | None, split: Any, sizes: Any, synchronize_ranks: bool = True
) -> list[Any]:
    """``BlendedMegatronDatasetBuilder._build_megatron_dataset_splits``, without its barriers."""
    original = core().originals[_CLASS, "_build_megatron_dataset_splits"]
    wait = synchronize_ranks and not coordinates(self.cls, self.config)
    return cast("list[Any]", original(self, dataset_path, split, sizes, wait))


def build_generic_dataset(
    cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any
) -> Any:
    """``BlendedMegatronDatasetBuilder.build_generic_dataset``: a static method."""
    if cls is core().blended_dataset.BlendedDataset:
        cls = _patched("BlendedDataset", cls)
    if coordinates(cls, args[-1] if args else None):
        return cls(*args) if is_built_here(is_built_on_rank) else None
    original = core().originals[_CLASS, "build_generic_dataset"]
    return original(cls, is_built_on_rank, synchronize_ranks, *args)


def _patched(name: str, theirs: Any) -> Any:
    """Megatron's class where it has the methods of megaindex, else the subclass that has them."""
    from megaindex.adapters.megatron.classes import METHODS, load_class

    is_patched = all(vars(theirs).get(method) is ours for method, ours in METHODS[name].items())
    return theirs if is_patched else load_class(name)


def coordinates(cls: Any, config: Any) -> bool:
    """Whether datasets of this class agree among themselves who builds, so that no rank waits."""
    if not isinstance(cls, type):
        return False
    build = getattr(cls, "_build_document_sample_shuffle_indices", None)
    if build is indexing.build_document_sample_shuffle_indices:
        return indexing.is_arranged_here(cls, config)
    is_blend = getattr(cls, "_build_indices", None) is blending.build_indices
    return is_blend and build is None and not is_left_to_megatron(config)
