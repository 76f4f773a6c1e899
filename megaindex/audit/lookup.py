"""Look-up of the documents of a step and rank, and of the steps and ranks of a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.audit.streams import AuditStream, Runs
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.index.inverse import distinct, served_tokens
from megaindex.validation import check_between


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Consecutive tokens of one document that are input of one sample.

    Attributes:
        step: step, from 0; trainers log it as iteration step + 1.
        sample: position of the sample in the run.
        rank: data-parallel rank; None if micro batch or number of ranks are unknown.
        micro_batch: number of the rank's micro batch in the step, from 0.
        source: number of the source in `AuditStream.sources`.
        document: sequence id in the source.
        offset: first token, in the document.
        length: number of tokens.
    """

    step: int
    sample: int
    rank: int | None
    micro_batch: int | None
    source: int
    document: int
    offset: int
    length: int

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return dict(vars(self))


def documents_of(stream: AuditStream, step: int, rank: int | None = None) -> list[Serving]:
    """Return the servings of a step, in order of samples.

    Args:
        stream: the run.
        step: step, from 0.
        rank: data-parallel rank; None: all ranks.

    Raises:
        OutOfRange: the step or rank does not exist.
        InvalidArgument: a rank is given, and the stream has no micro batch or number of ranks.
    """
    if not 0 <= step < stream.num_steps:
        raise OutOfRange(f"step must be from 0 to {stream.num_steps - 1}, got {step}")
    if rank is not None:
        _check_rank(stream, rank)
    first, last = stream.step_bounds[step : step + 2].tolist()
    found = [serving for runs in stream.runs(first, last) for serving in servings(stream, runs)]
    return [serving for serving in found if rank is None or serving.rank == rank]


def steps_of(stream: AuditStream, document: int, source: int = 0) -> list[Serving]:
    """Return all servings of a document, in order of training.

    Args:
        stream: the run.
        document: sequence id in its source.
        source: number of the source in `AuditStream.sources`.

    Raises:
        OutOfRange: the source does not exist, or the document is outside its part of the corpus.
    """
    return list(servings(stream, runs_of(stream, [document], source)))


def runs_of(stream: AuditStream, documents: npt.ArrayLike, source: int = 0) -> Runs:
    """Return all token runs of documents that are input of a sample, in order of the samples.

    Args:
        stream: the run.
        documents: sequence ids in their source, in any order.
        source: number of the source in `AuditStream.sources`.

    Raises:
        OutOfRange: the source does not exist, or a document is outside its part of the corpus.
    """
    runs = unordered_runs(stream, documents, source)
    return runs.select(np.argsort(runs.sample, kind="stable"))


def unordered_runs(stream: AuditStream, documents: npt.ArrayLike, source: int = 0) -> Runs:
    """Return the result of `runs_of` in any order, which for millions of runs is faster."""
    check_source(stream, source)
    ids = distinct(np.asarray(documents, np.int64).ravel())
    first = stream.sources[source].first_document
    last = first + stream.sources[source].lengths.size - 1
    outside = ids[(ids < first) | (ids > last)]
    if outside.size:
        raise OutOfRange(
            f"{stream.sources[source].name}: the audited documents are {first} to {last}, got "
            f"{outside[0]}"
        )
    found = served_tokens(stream.index, ids, source)
    if stream.num_samples < stream.index.num_samples:
        found = found.select(found.sample < stream.num_samples)
    return Runs(
        sample=found.sample,
        source=np.full(found.sample.size, source, np.int32),
        document=found.document,
        offset=found.offset,
        length=found.length,
    )


def check_source(stream: AuditStream, source: int) -> None:
    """Raise OutOfRange unless the stream has a source of that number."""
    if not 0 <= source < len(stream.sources):
        raise OutOfRange(f"source must be from 0 to {len(stream.sources) - 1}, got {source}")


def _check_rank(stream: AuditStream, rank: int) -> None:
    if stream.micro_batch_size is None or stream.data_parallel_size is None:
        raise InvalidArgument(
            "a rank needs --micro-batch-size and --data-parallel-size, by which ranks share a step"
        )
    check_between("rank", rank, 0, stream.data_parallel_size - 1, error=OutOfRange)


def servings(stream: AuditStream, runs: Runs) -> Iterator[Serving]:
    """Yield the servings of token runs."""
    step = stream.step_of(runs.sample)
    ranks, micro_batches = _ranks(stream, step, runs.sample - stream.step_bounds[step])
    columns = (step, runs.sample, runs.source, runs.document, runs.offset, runs.length)
    names = ("step", "sample", "source", "document", "offset", "length")
    for place, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        yield Serving(
            rank=None if ranks is None else int(ranks[place]),
            micro_batch=None if micro_batches is None else int(micro_batches[place]),
            **dict(zip(names, values, strict=True)),
        )


def _ranks(stream: AuditStream, step: I64, within: I64) -> tuple[I64 | None, I64 | None]:
    """Return rank and micro batch of samples, as `megaindex.loader.samplers` assigns them.

    A last step with rows of padding spreads its samples over all micro batches.
    """
    size, parallel = stream.micro_batch_size, stream.data_parallel_size
    if size is None or parallel is None:
        return None, None
    number = within // size
    if stream.masked_rows:
        first, end = stream.step_bounds[-2:].tolist()
        each, longer = divmod(end - first, (end - first + stream.masked_rows) // size)
        is_last, cut = step == stream.num_steps - 1, longer * (each + 1)
        spread = np.where(within < cut, within // (each + 1), longer)
        spread += np.where(within < cut, 0, (within - cut) // max(each, 1))
        number = np.where(is_last, spread, number)
    return number % parallel, number // parallel
