"""Skips: steps that a run does not train on, documents whose loss is masked or that are removed.

A position is the place of a sample in the order of training. A skipped step leaves a hole in the
positions, so every other sample keeps its own; moved samples have new positions behind the end of
the run. A masked document keeps its place as input, and the labels that it holds carry no loss. The
place of a removed one is padding.

    skips = resolve_skips([Skip(steps="120-124"), Skip(source="code", from_step=300)], schedule,
                          num_samples=index.num_samples)
    index = with_skips(index, skips)               # locate, receipts and iteration with skips
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.index.array_index import distinct
from megaindex.index.spans import Index, Spans, datasets_of, iterate_spans, sequence_lengths_at
from megaindex.index.stretches import (
    LossMask,
    MaskedDocuments,
    Stretch,
    StretchedIndex,
    digest_of_ids,
)
from megaindex.io.atomic import read_named
from megaindex.io.mapping import map_npy_file
from megaindex.io.paths import inside
from megaindex.kernels import num_threads
from megaindex.validation import (
    CheckpointReader,
    check_between,
    check_flag,
    check_integer,
    check_kind,
    shown,
)

_KEYS = ("steps", "move", "documents", "source", "from_step", "remove")
_MOST_STEP = 2**62

StepRanges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Skip:
    """One entry of a run's skips: steps, or documents or a source from a step on.

    Attributes:
        steps: steps that are not trained on, counted from 0: text such as ``"1200-1249 1300"``,
            with both ends of a range included, a step, or a list of steps.
        move: serve the samples of these steps behind the end of the run.
        documents: sequence ids whose loss is masked, as an integer array or the path of a file: an
            integer ``.npy``, or text with ids separated by white space. In any order; an id that
            occurs twice counts once.
        source: name of the source of the documents, or its number from 0, which is kept as text; an
            index of one source does not need it. Without documents, the whole source is masked.
        from_step: first step with the mask; default: 0.
        remove: remove the documents: none of their tokens is an input or a label.

    Raises:
        InvalidArgument: a setting is out of range, or excludes another.
    """

    steps: StepRanges | str | int | Sequence[int] = ()
    move: bool = False
    documents: str | os.PathLike[str] | npt.ArrayLike | None = None
    source: str | None = None
    from_step: int | None = None
    remove: bool = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "steps", _ranges_of(self.steps))
        put(self, "move", check_flag("skip: move", self.move))
        put(self, "remove", check_flag("skip: remove", self.remove))
        if isinstance(self.documents, (str, os.PathLike)):
            put(self, "documents", os.fspath(self.documents))
        elif self.documents is not None:
            try:
                ids = np.asarray(self.documents)
            except ValueError as error:
                raise InvalidArgument(f"skip: documents must be a list of ids: {error}") from None
            put(self, "documents", _sorted_ids(ids, "skip: documents"))
        source: object = self.source
        if isinstance(source, int) and not isinstance(source, bool) and source >= 0:
            source = str(source)
        if source is not None and (not isinstance(source, str) or not source):
            raise InvalidArgument(
                f"skip: source must be a name or a number from 0, got {shown(source)}"
            )
        put(self, "source", source)
        masks = self.documents is not None or self.source is not None
        if bool(self.steps) == masks:
            raise InvalidArgument(
                "skip: give either steps, or documents or a source, in one entry"
                + ("; write two entries" if masks else f", got {shown(self._given())}")
            )
        if self.steps and self.from_step is not None:
            raise InvalidArgument(
                "skip: from_step belongs to documents or a source, steps have their own numbers; "
                "leave it out"
            )
        if self.remove and not masks:
            raise InvalidArgument(
                "skip: remove belongs to documents or a source, skipped steps serve nothing; leave "
                "it out"
            )
        if masks and self.move:
            raise InvalidArgument(
                "skip: move belongs to steps, masked documents stay in place; leave it out"
            )
        if masks:
            step = 0 if self.from_step is None else self.from_step
            check_integer("skip: from_step", step, flags=False)
            put(self, "from_step", check_between("skip: from_step", step, 0, _MOST_STEP))

    @property
    def ranges(self) -> StepRanges:
        """The ranges (first, last) of the skipped steps, sorted."""
        ranges: Any = self.steps
        return tuple(ranges)

    def _given(self) -> dict[str, Any]:
        return {
            key: getattr(self, key) for key in _KEYS if getattr(self, key) not in ((), None, False)
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Skip) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        documents = self.documents
        if isinstance(documents, np.ndarray):
            documents = digest_of_ids(documents)
        return self.steps, self.move, documents, self.source, self.from_step, self.remove

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str, folder: str | os.PathLike[str]) -> Skip:
        """Return the entry that a mapping of a settings file describes.

        Args:
            values: the settings by name.
            where: place of the mapping, for messages.
            folder: directory that the path of documents is relative to.
        """
        unknown = [key for key in values if key not in _KEYS]
        if unknown:
            raise InvalidArgument(
                f"{where}: unknown setting {unknown[0]}; known are {', '.join(_KEYS)}"
            )
        settings = {key: value for key, value in values.items() if value is not None}
        documents = settings.get("documents")
        if documents is not None:
            if not isinstance(documents, str):
                raise InvalidArgument(
                    f"{where}: documents must be the path of a file of ids, got {shown(documents)}"
                )
            settings["documents"] = inside(Path(folder), documents)
        try:
            return cls(**settings)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {str(error).removeprefix('skip: ')}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that `of` reads.

        Raises:
            InvalidArgument: the documents are an array, which has no path.
        """
        if isinstance(self.documents, np.ndarray):
            raise InvalidArgument(
                "skip: documents of a recipe or a lock must be a file, got an array; write it "
                "with numpy.save and give the path"
            )
        text = " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in self.ranges)
        if text:
            return {"steps": text, **({"move": True} if self.move else {})}
        found = {"documents": self.documents, "source": self.source, "from_step": self.from_step,
                 "remove": self.remove or None}  # fmt: skip
        return {key: value for key, value in found.items() if value is not None}


def read_skips(value: object, where: str, folder: str | os.PathLike[str]) -> tuple[Skip, ...]:
    """Return the entries of the setting ``skip``: a mapping, or a list of mappings."""
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list) or not all(isinstance(each, Mapping) for each in entries):
        raise InvalidArgument(
            f"{where} must be a mapping with steps, documents or source, or a list of them, got "
            f"{shown(value)}"
        )
    places = [where] if len(entries) == 1 else [f"{where}[{k}]" for k in range(len(entries))]
    return tuple(Skip.of(each, place, folder) for each, place in zip(entries, places, strict=True))


def given_skips(skip: Skip | Iterable[Skip] | None) -> tuple[Skip, ...]:
    """Return the entries of an argument ``skip``, which may be one of them or None."""
    entries = () if skip is None else (skip,) if isinstance(skip, Skip) else skip
    given = tuple(entries) if isinstance(entries, Iterable) else (entries,)
    for each in given:
        check_kind("skip", each, Skip, "a megaindex.Skip or a list of them", "write Skip(steps=…)")
    return given


_WORD = re.compile(r"(\d+)(?:-(\d+))?")


def _ranges_of(steps: object) -> StepRanges:
    """Return the sorted ranges (first, last) of the steps in a setting."""
    if isinstance(steps, str):
        pairs = [_parse(word) for word in steps.replace(",", " ").split()]
        if not pairs:
            raise InvalidArgument('skip: steps is empty; write steps such as "1200-1249 1300"')
    elif isinstance(steps, (Sequence, np.ndarray, range)):
        pairs = [_pair(step) for step in steps]
    else:
        pairs = [_pair(steps)]
    pairs.sort()
    for (_, last), (first, _) in itertools.pairwise(pairs):
        if first <= last:
            raise InvalidArgument(f"skip: step {first} occurs twice in steps; name it once")
    return tuple(pairs)


def _pair(step: object) -> tuple[int, int]:
    if isinstance(step, tuple) and len(step) == 2:
        first, last = (check_between("skip: a step", n, 0, _MOST_STEP) for n in step)
        if first > last:
            raise InvalidArgument(f"skip: steps {first}-{last} must begin with the smaller step")
        return first, last
    if isinstance(step, str):
        return _parse(step)
    number = check_integer("skip: a step", step, flags=False)
    return (check_between("skip: a step", number, 0, _MOST_STEP),) * 2


def _parse(word: str) -> tuple[int, int]:
    match = _WORD.fullmatch(word)
    if not match or len(word) > 40:
        raise InvalidArgument(
            f"skip: steps must be numbers from 0 and ranges, such as 1200-1249 1300, got {word!r}"
        )
    return _pair((int(match[1]), int(match[2] or match[1])))


def _sorted_ids(ids: npt.NDArray[Any], where: str) -> I64:
    """Return ids as a sorted int64 array without repetitions, which cannot be written to."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{where} must hold integers in one dimension, got {ids.dtype} of shape {ids.shape}"
        )
    if ids.size == 0:
        raise InvalidArgument(f"{where} must hold at least one id, got none; leave it out")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > _MOST_STEP:
        wrong = low if low < 0 else high
        raise InvalidArgument(f"{where} must hold sequence ids from 0 to 2**62, got {wrong}")
    found = distinct(ids.astype(np.int64))
    found.setflags(write=False)
    return found


def read_ids(path: str) -> I64:
    """Return the sorted sequence ids of a file, an integer ``.npy`` or text.

    Raises:
        MissingFile: the file does not exist.
        StorageError: it cannot be read.
        InvalidArgument: it does not hold integers from 0.
    """
    try:
        if path.endswith(".npy"):
            return _sorted_ids(map_npy_file(path), path)
        words = read_named(path, "file of document ids", longest=1 << 32).split()
    except InvalidArgument:
        raise
    except ValueError as error:
        raise InvalidArgument(f"{path}: not an array of ids in .npy format ({error})") from None
    try:
        ids = np.array(words).astype(np.int64) if words else np.zeros(0, np.int64)
    except (ValueError, OverflowError):
        wrong = next((w for w in words if not w.isdigit() or int(w) >= 2**63), words[0])
        raise InvalidArgument(
            f"{path}: must hold sequence ids separated by white space, got "
            f"{shown(wrong.decode(errors='replace'))}"
        ) from None
    return _sorted_ids(ids, path)


class StepSchedule(Protocol):
    """Steps of a run, such as those of a `BatchSchedule`."""

    def samples_after(self, step: int, /) -> int: ...
    def iterations_within(self, samples: int, /) -> int: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Skips:
    """The skips of a run in positions.

    Attributes:
        settings: the entries.
        num_samples: samples of the order.
        end: positions of the run without moved samples, which have the positions that follow.
        holes (int64[n, 2]): skipped positions, sorted; none adjoins a hole of the same kind.
        is_moved (bool[n]): True for holes whose samples are served behind the end.
        masks: documents without loss, or removed.
        num_steps: steps of the run, skipped ones included, moved ones not counted twice.
    """

    settings: tuple[Skip, ...]
    num_samples: int
    end: int
    holes: I64
    is_moved: npt.NDArray[np.bool_]
    masks: tuple[LossMask, ...]
    num_steps: int

    @cached_property
    def num_moved(self) -> int:
        """Number of samples that are served behind the end."""
        return int(self._moved_before[-1])

    @cached_property
    def num_skipped(self) -> int:
        """Number of positions that are not served, moved samples included."""
        return int((self.holes[:, 1] - self.holes[:, 0]).sum())

    @property
    def removes(self) -> bool:
        """True if documents are removed."""
        return any(mask.remove for mask in self.masks)

    @property
    def run_end(self) -> int:
        """Position after the last sample of the run, moved samples included."""
        return self.end + self.num_moved

    @property
    def num_positions(self) -> int:
        """Number of samples with a position: those of the order, and the moved ones again."""
        return self.num_samples + self.num_moved

    @cached_property
    def _moved(self) -> I64:
        return self.holes[self.is_moved]

    @cached_property
    def _moved_before(self) -> I64:
        return _cumulated(self._moved)

    def samples_at(self, positions: I64) -> I64:
        """Return the sample of the order at each position; of a hole, the sample left out."""
        if self.num_moved == 0 or not positions.size or positions.max() < self.end:
            return positions
        place = positions - self.end
        moved = _elements(self._moved, self._moved_before, place)
        later = np.where(place < self.num_moved, moved, positions - self.num_moved)
        return np.where(place < 0, positions, later)

    def after(self, position: int) -> int:
        """Return the position from which on samples are served: the end of a hole inside it."""
        k = int(np.searchsorted(self.holes[:, 0], position, "right")) - 1
        while 0 <= k < len(self.holes) and self.holes[k, 0] <= position < self.holes[k, 1]:
            position, k = int(self.holes[k, 1]), k + 1  # a moved hole may adjoin a dropped one
        return position

    def segments(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the ranges of positions that are served, from ``first`` to ``end`` or the end of
        the run."""
        end = self.run_end if end is None else end
        k = int(np.searchsorted(self.holes[:, 1], first, "right"))
        for begin, stop in self.holes[k:].tolist():
            if begin >= end:
                break
            if first < begin:
                yield first, begin
            first = max(first, stop)
        if first < end:
            yield first, end

    @cached_property
    def _served_segments(self) -> I64:
        return np.array(list(self.segments(0, self.num_positions)), np.int64).reshape(-1, 2)

    @cached_property
    def _served_before(self) -> I64:
        return _cumulated(self._served_segments)

    def positions_of(self, numbers: npt.ArrayLike) -> I64:
        """Return the position of each served sample, numbered from 0 in order of training."""
        numbers = np.asarray(numbers, np.int64)
        return _elements(self._served_segments, self._served_before, numbers)

    def served_before(self, position: int) -> int:
        """Return the number of samples served before a position."""
        return sum(stop - begin for begin, stop in self.segments(0, position))

    def moved_ranges(self, count: int, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the ranges of samples at positions ``first`` to ``count - 1`` behind the end."""
        for begin, stop in self._moved.tolist():
            if max(first, 0) < min(count, stop - begin):
                yield begin + max(first, 0), min(stop, begin + count)
            first, count = first - (stop - begin), count - (stop - begin)

    def served_samples(self, end: int, first: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the ranges of samples of the order served at positions ``first`` to ``end - 1``."""
        for begin, stop in self.segments(first, end):
            if begin < self.end:
                yield begin, min(stop, self.end)
        yield from self.moved_ranges(end - self.end, first - self.end)

    def is_hole(self, positions: I64) -> npt.NDArray[np.bool_]:
        """Return bool[n]: True for positions that are not served."""
        which = np.searchsorted(self.holes[:, 0], positions, "right") - 1
        if not len(self.holes):
            return np.zeros(positions.shape, bool)
        inside = positions < self.holes[np.maximum(which, 0), 1]
        return np.asarray((which >= 0) & inside)

    def check_step(self, begin: int, end: int) -> None:
        """Raise InvalidArgument if positions begin ... end - 1 reach into a hole."""
        k = int(np.searchsorted(self.holes[:, 1], begin, "right"))
        if k < len(self.holes) and self.holes[k, 0] < end:
            first, last = self.holes[k].tolist()
            raise InvalidArgument(
                f"skip: the step of samples {begin} to {end - 1} reaches into the skipped samples "
                f"{first} to {last - 1}, which are whole steps of the batch sizes from sample 0 "
                "on; give global_batch_size as the BatchSchedule of the whole run, or resume at "
                "the end of one of its steps"
            )

    @property
    def stored(self) -> StoredSkips:
        """The skips as a state records them."""
        return StoredSkips(**self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return what a state records, as JSON values."""
        return {
            "end": self.end,
            "dropped": self.holes[~self.is_moved].tolist(),
            "moved": self._moved.tolist(),
            "masked": [mask.record for mask in self.masks],
        }


def _cumulated(ranges: I64) -> I64:
    return np.concatenate(([0], np.cumsum(ranges[:, 1] - ranges[:, 0]))).astype(np.int64)


def _elements(ranges: I64, before: I64, numbers: I64) -> I64:
    """Return elements of ranges by their numbers; ``before`` are those `_cumulated`."""
    which = np.clip(np.searchsorted(before, numbers, "right") - 1, 0, len(ranges) - 1)
    found: I64 = ranges[which, 0] + numbers - before[which]
    return found


def resolve_skips(
    settings: Iterable[Skip],
    schedule: StepSchedule,
    *,
    num_samples: int,
    train_samples: int | None = None,
    drops_tail: bool = True,
) -> Skips | None:
    """Return the skips of a run in positions; None without settings.

    Args:
        settings: the entries.
        schedule: batch sizes over the run; steps are counted from its first sample on.
        num_samples: samples of the order.
        train_samples: samples of the run. Default: all.
        drops_tail: True if samples that do not fill a last step are not served.

    Raises:
        InvalidArgument: a step lies beyond the end of the run, or is skipped twice; no step is
            left.
        MissingFile, StorageError: a file of documents cannot be read.
    """
    entries = given_skips(settings)
    if not entries:
        return None
    total = num_samples if train_samples is None else train_samples
    num_steps = schedule.iterations_within(total)
    whole = schedule.samples_after(num_steps)
    num_steps += not drops_tail and whole < total
    end = min(whole, total) if drops_tail else total
    ranges = sorted((first, last, entry.move) for entry in entries for first, last in entry.ranges)
    for first, last, _ in ranges:
        if last >= num_steps:
            raise InvalidArgument(
                f"skip: step {max(first, num_steps)} lies beyond the end of the run, whose steps "
                f"are 0 to {num_steps - 1}; skip earlier steps"
            )
    for (_, last, _), (first, _, _) in itertools.pairwise(ranges):
        if first <= last:
            raise InvalidArgument(f"skip: step {first} is skipped twice; name it in one entry")
    holes, moves = _holes(ranges, schedule, end)
    if num_steps and sum(b - a for a, b in holes) >= end:
        raise InvalidArgument("skip: every step of the run is skipped; leave some to train on")
    return Skips(
        settings=entries,
        num_samples=num_samples,
        end=end,
        holes=np.array(holes, np.int64).reshape(-1, 2),
        is_moved=np.array(moves, bool),
        masks=tuple(_masks(entries, schedule, num_steps, end)),
        num_steps=num_steps,
    )


def _holes(
    ranges: Sequence[tuple[int, int, bool]], schedule: StepSchedule, end: int
) -> tuple[list[list[int]], list[bool]]:
    """Return the positions of ranges of steps, adjoining ones of one kind joined."""
    holes: list[list[int]] = []
    moves: list[bool] = []
    for first, last, move in ranges:
        begin, stop = (min(end, schedule.samples_after(step)) for step in (first, last + 1))
        if holes and holes[-1][1] == begin and moves[-1] == move:
            holes[-1][1] = stop
        else:
            holes.append([begin, stop])
            moves.append(move)
    return holes, moves


def _masks(
    entries: Sequence[Skip], schedule: StepSchedule, num_steps: int, end: int
) -> Iterator[LossMask]:
    for entry in entries:
        if entry.from_step is None:
            continue
        if entry.from_step >= num_steps:
            raise InvalidArgument(
                f"skip: from_step {entry.from_step} lies beyond the end of the run, whose steps "
                f"are 0 to {num_steps - 1}; give an earlier one"
            )
        ids: Any = entry.documents
        yield LossMask(
            source=entry.source,
            first=min(end, schedule.samples_after(entry.from_step)),
            documents=read_ids(ids) if isinstance(ids, str) else ids,
            remove=entry.remove,
        )


def with_skips(
    index: Index,
    skips: Skips | None,
    names: Sequence[str] | None = None,
    documents: Sequence[int] | None = None,
) -> Index:
    """Return the index of a run with skips, by positions; without any, the index itself.

    Args:
        index: the samples.
        skips: skips of the run.
        names: name of each source. Default: the path prefixes of its datasets.
        documents: number of sequences of each source, to check ids. Default: those of its
            datasets.

    Raises:
        InvalidArgument: the source of a skip is unknown or not named, or does not have a document.
    """
    if skips is None:
        return index
    datasets = datasets_of(index)
    if names is None:
        names = [dataset.path_prefix for dataset in datasets]
    if documents is None:
        documents = [len(dataset) for dataset in datasets]
    by_source: dict[int, list[MaskedDocuments]] = {}
    for mask in skips.masks:
        number = source_number(mask.source, names)
        _check_ids(mask, number, names, documents)
        by_source.setdefault(number, []).append(MaskedDocuments(mask))
    stretches = tuple(_stretches(index, skips))
    return StretchedIndex(stretches=stretches, masks=by_source, skips=skips)


def _stretches(index: Index, skips: Skips) -> Iterator[Stretch]:
    """Yield the positions of the run, those of moved samples, and the samples that follow."""
    at = 0
    for begin, stop in skips.holes.tolist():
        if at < begin:
            yield Stretch(index=index, samples=range(at, begin))
        yield Stretch(index=index, samples=range(begin, stop), hole=_SKIPPED)
        at = stop
    if at < skips.end:
        yield Stretch(index=index, samples=range(at, skips.end))
    for begin, stop in skips.holes[skips.is_moved].tolist():
        yield Stretch(index=index, samples=range(begin, stop))
    if skips.end < skips.num_samples:
        yield Stretch(index=index, samples=range(skips.end, skips.num_samples))


_SKIPPED = (
    "is skipped; read the samples that MicroBatchSampler(…, index=index) yields, which leaves "
    "skipped ones out"
)


def without_holes(index: Index, begin: int, end: int) -> Index:
    """Return the index of the samples that positions ``begin`` to ``end - 1`` serve, in order."""
    skips = skips_of(index)
    ranges = [(begin, end)] if skips is None else skips.segments(begin, end)
    return StretchedIndex(
        stretches=tuple(Stretch(index=index, samples=range(*each)) for each in ranges)
    )


def unskipped(index: Index) -> Index:
    """Return the index of a run without its skips."""
    if not isinstance(index, StretchedIndex) or index.skips is None:
        return index
    return index.stretches[0].index


def skips_of(index: object) -> Skips | None:
    """Return the skips of an index; None without any."""
    skips = index.skips if isinstance(index, StretchedIndex) else None
    assert skips is None or isinstance(skips, Skips), "of one type"
    return skips


def numbered_masks(index: object) -> list[tuple[int, LossMask]]:
    """Return each mask of an index after the number of its source, in the order of its skips."""
    skips = skips_of(index)
    if skips is None or not isinstance(index, StretchedIndex):
        return []
    numbers = {id(each.mask): number for number, sets in index.masks.items() for each in sets}
    return [(numbers[id(mask)], mask) for mask in skips.masks]


def source_number(name: str | None, names: Sequence[str], setting: str = "skip") -> int:
    """Return the number of the source of documents, by its name or its number as text.

    A path is also named by its last parts, as tables show it, if those of no other are the same.

    Raises:
        InvalidArgument: it is unknown, or missing with several sources; the message names
            ``setting``.
    """
    if name is None:
        if len(names) > 1:
            raise InvalidArgument(
                f"{setting}: documents need their source, one of {_listed(names)}; give it"
            )
        return 0
    if name in names:
        return list(names).index(name)
    if name.isdecimal() and len(name) < 10 and int(name) < len(names):
        return int(name)
    ends = [number for number, other in enumerate(names) if other.endswith(f"/{name}")]
    if len(ends) == 1:
        return ends[0]
    raise InvalidArgument(f"{setting}: unknown source {name}; the sources are {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + ", …" * (len(names) > 8)


def _check_ids(mask: LossMask, number: int, names: Sequence[str], documents: Sequence[int]) -> None:
    if mask.documents is None or number >= len(documents):
        return
    last = int(mask.documents[-1])
    if last >= documents[number]:
        name = names[number] if number < len(names) else f"source {number}"
        raise InvalidArgument(
            f"skip: document {last} does not exist, {name} has sequences 0 to "
            f"{documents[number] - 1}; check the ids and their source"
        )


def masked_labels(spans: Spans, width: int) -> npt.NDArray[np.bool_]:
    """Return bool[rows, width]: True where the label of an input token is of a masked span, or the
    input itself of a removed one."""
    assert spans.masked is not None, "the index has masks"
    begins, ends = spans.bounds_in_samples()
    # token t of a row is the label of input t - 1
    last = ends - 1 if spans.removed is None else ends - 1 + spans.removed
    return spans.ranges(begins - 1, last, width, spans.masked)


def removes_documents(index: object) -> bool:
    """Return True if an index removes documents."""
    if not isinstance(index, StretchedIndex):
        return False
    sets = (each for sets in index.masks.values() for each in sets)
    return any(each.mask.remove for each in sets) or any(map(removes_documents, index.bases))


def refuse_removal(index: object, what: str, remedy: str) -> None:
    """Raise InvalidArgument if an index removes documents, which ``what`` cannot."""
    if removes_documents(index):
        raise InvalidArgument(f"skip: remove: {what}; {remedy}")


def masked_tokens(index: StretchedIndex, num_sources: int, end: int | None = None) -> I64:
    """Return int64[2, sources]: labels of the samples served that are of masked documents, and
    tokens of them, inputs or labels, that are of removed ones.

    Every sample from the first mask up to ``end``, or the end of the run, is located, with all
    threads.
    """
    skips = skips_of(index)
    assert skips is not None, "its masks are those of a run"
    last = skips.run_end if end is None else min(end, skips.run_end)
    begin = min(last, *(mask.first for mask in skips.masks))
    threads = num_threads()

    def share(part: int) -> I64:
        counts = np.zeros((2, num_sources), np.int64)
        for positions, spans in iterate_spans(index, begin, last, part, threads):
            masked = spans.masked
            if masked is None or not masked.any():
                continue
            width = sequence_lengths_at(index, positions)
            if isinstance(width, np.ndarray):
                width = spans.per_span(width)
            removed = np.zeros_like(masked) if spans.removed is None else spans.removed
            # tokens 1 to width of a row are labels
            first, past = (np.clip(n, ~removed, width + 1) for n in spans.bounds_in_samples())
            kinds = removed[masked].astype(np.int64)
            np.add.at(counts, (kinds, spans.source[masked]), (past - first)[masked])
        return counts

    with ThreadPoolExecutor(threads, "megaindex-skips") as pool:
        return np.asarray(sum(pool.map(share, range(threads))), np.int64)


@dataclass(frozen=True, kw_only=True)
class StoredSkips:
    """Skips in the state of a sampler."""

    end: int
    dropped: list[list[int]]
    moved: list[list[int]]
    masked: list[dict[str, Any]]

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> StoredSkips | None:
        """Return the skips of a sampler's state, or None; FormatError if they are damaged."""
        if "skip" not in state:
            return None
        stored = CheckpointReader("the state of a sampler", state).part("skip", "the skips of it")
        ranges = {name: stored.checked(name, _RANGES, _are_ranges) for name in ("dropped", "moved")}
        masked = stored.checked("masked", "must be a list of mappings", _are_mappings)
        for each in masked:
            mask = CheckpointReader("a mask of a sampler's state", each)
            if mask.field("source", "must be text or null") is not None:
                mask.text("source")
            if "number" in each:
                mask.integer("number")
            mask.integer("from")
            if mask.field("documents", "must be a number or null") is not None:
                mask.integer("documents", least=1)
                mask.hashed("digest")
            if each.get("remove", True) is not True:
                raise mask.error("remove must be true, or not there", each["remove"])
        return cls(end=stored.integer("end"), masked=[dict(each) for each in masked], **ranges)

    def position_of(self, served: int) -> int:
        """Return the position after so many samples served."""
        position = 0
        for begin, end in sorted([*self.dropped, *self.moved]):
            if position + served <= begin:
                break
            served, position = served - (begin - position), end
        return position + served


_RANGES = "must be a list of ranges of positions, sorted and disjoint"


def _are_ranges(value: object) -> bool:
    if not isinstance(value, list):
        return False
    ends = [0]
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            return False
        if any(type(n) is not int for n in pair) or not ends[-1] <= pair[0] < pair[1] <= 2**62:
            return False
        ends.append(pair[1])
    return True


def _are_mappings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


_KEEP = "give the recipe, the sampler or install() the skip of the checkpoint"
_NONE = StoredSkips(end=0, dropped=[], moved=[], masked=[])


def skip_difference(
    theirs: StoredSkips | None, ours: StoredSkips | None, consumed: int, decided: int
) -> str:
    """Return the reason for which a run cannot continue with other skips; empty if it can.

    Args:
        theirs: skips of the checkpoint.
        ours: skips of the run that continues.
        consumed: samples consumed at the checkpoint.
        decided: position before which the samples served, or to be served in the step begun, are
            decided.
    """
    old, new = theirs or _NONE, ours or _NONE
    for kind in ("dropped", "moved"):
        for begin, end in getattr(old, kind):
            if not any(a <= begin and end <= b for a, b in getattr(new, kind)):
                return (
                    f"the run of the checkpoint skips samples {begin} to {end - 1} ({kind}), and "
                    f"this one does not; {_KEEP}"
                )
        for begin, end in ranges_without(getattr(new, kind), getattr(old, kind)):
            if begin < decided:
                return (
                    f"skip: samples {begin} to {end - 1} are to be skipped, and {consumed} samples "
                    "were served; resume from a checkpoint before them, or mask their documents "
                    "from a later step on"
                )
    if old.moved and decided > old.end and (old.moved, old.end) != (new.moved, new.end):
        return (
            "the run of the checkpoint serves moved samples already; keep the steps that it moves "
            "and its number of samples"
        )
    for mask in old.masked:
        if not any(_is_same_mask(mask, other) for other in new.masked):
            return (
                f"the run of the checkpoint {_verb(mask)} {_mask_text(mask)}, and this one does "
                f"not; {_KEEP}, with the same ids"
            )
    for mask in new.masked:
        is_new = not any(_is_same_mask(mask, other) for other in old.masked)
        if is_new and mask["from"] < decided:
            return (
                f"skip: {_mask_text(mask)}, and {consumed} samples were served before this run "
                f"{_verb(mask)} them; give from_step the step at which the run continues, or "
                "resume from an earlier checkpoint"
            )
    return ""


def _is_same_mask(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    names = ("source", "from", "documents", "digest", "remove")
    return all(first.get(name) == second.get(name) for name in names)


def numbered(state: Mapping[str, Any], index: object) -> dict[str, Any]:
    """Return the state of a sampler with the number of each mask's source in the index served."""
    ours = numbered_masks(index)
    if not ours or "skip" not in state:
        return dict(state)
    masks = zip(state["skip"]["masked"], ours, strict=True)
    masked = [{**mask, "number": number} for mask, (number, _) in masks]
    return {**state, "skip": {**state["skip"], "masked": masked}}


def named_as(
    state: Mapping[str, Any], index: object, numbers: Sequence[int] | None
) -> Mapping[str, Any]:
    """Return the state of a sampler whose masks name their sources as the skips of an index do.

    Args:
        state: a result of `numbered`; masks without a number, as in release 1.0, keep their names.
        index: the index that is served now.
        numbers: number of each source in the run of the state, -1 for one that it does not have;
            None: the same.
    """
    stored, ours = StoredSkips.read(state), numbered_masks(index)
    if stored is None:
        return state

    def renamed(mask: dict[str, Any]) -> dict[str, Any]:
        if "number" not in mask:
            return mask
        for number, each in ours:
            named = {**mask, "source": each.source}
            theirs = number if numbers is None else numbers[number]
            if theirs == mask["number"] and _is_same_mask(named, each.record):
                return named
        if any(_is_same_mask(mask, each.record) for _, each in ours):  # of another source
            return {**mask, "source": f"{mask['source']} of the checkpoint"}
        return mask

    masked = [renamed(mask) for mask in stored.masked]
    return {**state, "skip": {**state["skip"], "masked": masked}}


def ranges_without(
    ranges: Sequence[Sequence[int]], others: Collection[Sequence[int]]
) -> Iterator[Any]:
    """Yield the parts [begin, end) of sorted ranges that no other sorted range holds."""
    for begin, end in ranges:
        for first, last in others:
            if begin < last and first < end:
                if begin < first:
                    yield begin, first
                begin = max(begin, last)
        if begin < end:
            yield begin, end


def _mask_text(mask: Mapping[str, Any]) -> str:
    what = "all documents" if mask["documents"] is None else f"{mask['documents']} documents"
    of = "" if mask["source"] is None else f" of {mask['source']}"
    return f"{what}{of} from sample {mask['from']} on"


def _verb(mask: Mapping[str, Any]) -> str:
    return "removes" if mask.get("remove") else "masks"
