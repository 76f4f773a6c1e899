"""Input files and rows of served documents, and the documents of input rows.

Documents of a step and rank, and steps and ranks of a document, are looked up in any order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.errors import FormatError, InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.format.header import integer_array
from megaindex.format.pair import provenance_path
from megaindex.format.provenance import UNKNOWN, Provenance, RecordedTokenizer, open_provenance
from megaindex.format.tokenizers import Tokenizer, find_tokenizer, load
from megaindex.index.array_index import distinct, served_tokens
from megaindex.index.skips import source_number
from megaindex.index.spans import datasets_of
from megaindex.io.paths import is_remote
from megaindex.run.run import Run, TokenRuns
from megaindex.validation import check_between


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Consecutive tokens of one document that are input of one sample.

    Attributes:
        step: step, from 0; trainers log it as iteration step + 1.
        sample: position of the sample in the run.
        rank: data-parallel rank; None if micro batch or number of ranks are unknown.
        micro_batch: number of the rank's micro batch in the step, from 0.
        source: number of the source in `Run.sources`.
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


def documents_of(run: Run, step: int | range, rank: int | None = None) -> list[Serving]:
    """Return the servings of a step, or of consecutive ones, in order of samples.

    Args:
        run: the run.
        step: step, from 0, or a range of steps.
        rank: data-parallel rank; None: all ranks.

    Raises:
        OutOfRange: a step or rank does not exist.
        InvalidArgument: a rank is given, and the run has no micro batch or number of ranks.
    """
    steps = step if isinstance(step, range) else range(step, step + 1)
    for each in (steps.start, steps.stop - 1):
        if not 0 <= each < run.num_steps:
            raise OutOfRange(f"step must be from 0 to {run.num_steps - 1}, got {each}")
    if rank is not None:
        _check_rank(run, rank)
    first, last = run.step_bounds[[steps.start, steps.stop]].tolist()
    found = [serving for runs in run.runs(first, last) for serving in servings(run, runs)]
    return [serving for serving in found if rank is None or serving.rank == rank]


def steps_of(run: Run, document: int, source: int = 0) -> list[Serving]:
    """Return all servings of a document, in order of training.

    Args:
        run: the run.
        document: sequence id in its source.
        source: number of the source in `Run.sources`.

    Raises:
        OutOfRange: the source does not exist, or the document is outside its part of the corpus.
    """
    return list(servings(run, runs_of(run, [document], source)))


def source_of(run: Run, text: str | None, flag: str = "--source") -> int:
    """Return the number of a source given by name or by number; of a run of one, None is that one.

    Raises:
        InvalidArgument: it is unknown, or missing with several sources; the message names ``flag``.
    """
    return source_number(text, [source.name for source in run.sources], flag)


def runs_of(run: Run, documents: npt.ArrayLike, source: int = 0) -> TokenRuns:
    """Return all token runs of documents that are input of a sample, in order of the samples.

    Args:
        run: the run.
        documents: sequence ids in their source, in any order.
        source: number of the source in `Run.sources`.

    Raises:
        OutOfRange: the source does not exist, or a document is outside its part of the corpus.
    """
    runs = unordered_runs(run, documents, source)
    return runs.select(np.argsort(runs.sample, kind="stable"))


def unordered_runs(run: Run, documents: npt.ArrayLike, source: int = 0) -> TokenRuns:
    """Return the result of `runs_of` in any order, which for millions of runs is faster."""
    check_source(run, source)
    ids = distinct(integer_array(np.ravel(documents), "documents", 0, 2**63 - 1))
    first = run.sources[source].first_document
    last = first + run.sources[source].sequence_lengths.size - 1
    outside = ids[(ids < first) | (ids > last)]
    if outside.size:
        raise OutOfRange(
            f"{run.sources[source].name}: the audited documents are {first} to {last}, got "
            f"{outside[0]}"
        )
    found = served_tokens(run.index, ids, source)
    if run.num_samples < run.index.num_samples:
        found = found.select(found.sample < run.num_samples)
    return TokenRuns(
        sample=found.sample,
        source=np.full(found.sample.size, source, np.int32),
        document=found.document,
        offset=found.offset,
        length=found.length,
    )


def check_source(run: Run, source: int) -> None:
    """Raise OutOfRange unless the run has a source of that number."""
    if not 0 <= source < len(run.sources):
        raise OutOfRange(f"source must be from 0 to {len(run.sources) - 1}, got {source}")


def _check_rank(run: Run, rank: int) -> None:
    if _shapes(run) is None:
        raise InvalidArgument(
            "a rank needs micro batch size and data-parallel size, by which ranks share a step; "
            "give their flags with those of the run, write them to the recipe's batch, or lock a "
            "run that names them"
        )
    most = max(shape.data_parallel_size or 1 for shape in run.shapes)
    check_between("rank", rank, 0, most - 1, error=OutOfRange)


def _shapes(run: Run) -> I64 | None:
    """Return int64[shapes, 3]: the shapes of a run; None if one of them is unknown."""
    shapes = [shape for shape in run.shapes if None not in shape]
    return np.array(shapes, np.int64) if len(shapes) == len(run.shapes) else None


def unserved_texts(
    run: Run, steps: range, found: Sequence[Serving], rank: int | None = None
) -> Iterator[str]:
    """Yield lines with the steps of a range that serve no token to all ranks, and why."""
    numbers = np.arange(steps.start, steps.stop)
    elsewhere, skipped = numbers < run.steps_elsewhere, run.is_skipped(numbers)
    served = np.isin(numbers, [serving.step for serving in found])
    for which, text in (
        (elsewhere, "was made in another system, and its rows are unknown"),
        (skipped, "is skipped; the samples of moved steps are served behind the end"),
        (
            ~(elsewhere | skipped | served) & (rank is None),
            "has removed documents alone: all its rows are padding",
        ),
    ):
        if which.any():
            yield f"step {ranges_text(step_ranges(numbers[which]))} {text}"


def servings(run: Run, runs: TokenRuns) -> Iterator[Serving]:
    """Yield the servings of token runs."""
    step = run.step_of(runs.sample)
    ranks, micro_batches = _ranks(run, step, runs.sample - run.step_bounds[step])
    columns = (step, runs.sample, runs.source, runs.document, runs.offset, runs.length)
    names = ("step", "sample", "source", "document", "offset", "length")
    for place, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        yield Serving(
            rank=None if ranks is None else int(ranks[place]),
            micro_batch=None if micro_batches is None else int(micro_batches[place]),
            **dict(zip(names, values, strict=True)),
        )


def _ranks(run: Run, step: I64, within: I64) -> tuple[I64 | None, I64 | None]:
    """Return rank and micro batch of samples, as `megaindex.loader.samplers` assigns them.

    A last step with rows of padding spreads its samples over all micro batches.
    """
    shapes = _shapes(run)
    if shapes is None:
        return None, None
    at = np.searchsorted(shapes[:, 0], run.step_bounds[step], "right") - 1
    size, parallel = shapes[at, 1], shapes[at, 2]
    number = within // size
    if run.masked_rows:
        first, end = run.step_bounds[-2:].tolist()
        each, longer = divmod(end - first, (end - first + run.masked_rows) // int(shapes[-1, 1]))
        is_last, cut = step == run.num_steps - 1, longer * (each + 1)
        spread = np.where(within < cut, within // (each + 1), longer)
        spread += np.where(within < cut, 0, (within - cut) // max(each, 1))
        number = np.where(is_last, spread, number)
    return number % parallel, number // parallel


_ROWS = re.compile(r"(?P<path>.+?)(?::(?P<first>\d+)(?:-(?P<last>\d+))?)?")
_NAMED = 3  # files in a message
_LAST_ROW = 2**62


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A serving, and the row of an input file that its document came from.

    Attributes:
        serving: step, rank, sample, document and tokens.
        file: path of the input file; None if it is unknown.
        row_name: "line", counted from 1, or "row", from 0.
        row: number of the row; None if it is unknown.
        begin: first byte of the document in the unpacked file; None if it is unknown.
        end: first byte after it.
        text: decoded tokens, if they were requested.
    """

    serving: Serving
    file: str | None = None
    row_name: str = "row"
    row: int | None = None
    begin: int | None = None
    end: int | None = None
    text: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        place = {"file": self.file, self.row_name: self.row, "begin": self.begin, "end": self.end}
        text = {} if self.text is None else {"text": self.text}
        return {**self.serving.to_json(), **place, **text}


class _SourceDocuments:
    """The documents of one source, and their provenance if there is one."""

    def __init__(self, name: str, path_prefix: str, dataset: IndexedDataset | None) -> None:
        self.name = name
        self.path_prefix = path_prefix
        self._dataset = dataset

    @cached_property
    def provenance(self) -> Provenance | None:
        found = open_provenance(self.path_prefix) if self.path_prefix else None
        if found is not None and found.num_documents != self.bounds.size - 1:
            raise FormatError(
                f"{found.path}: has {found.num_documents} documents, and its pair "
                f"{self.bounds.size - 1}; write the pair again, or delete the file"
            )
        return found

    @cached_property
    def dataset(self) -> IndexedDataset:
        if self._dataset is not None:
            return self._dataset
        if not self.path_prefix:
            raise InvalidArgument(
                f"{self.name}: the run has no path of the pair; give its sources a path_prefix"
            )
        return IndexedDataset(self.path_prefix)

    @cached_property
    def bounds(self) -> I64:
        return self.dataset.document_indices

    def document_of(self, sequence: int) -> int:
        return int(np.searchsorted(self.bounds, sequence, "right")) - 1

    def sequences_of(self, documents: I64) -> I64:
        """Return the sequences of documents."""
        begins = self.bounds[documents]
        counts = self.bounds[documents + 1] - begins
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.asarray(np.repeat(begins, counts) + within, np.int64)


def _pairs(run: Run) -> list[_SourceDocuments]:
    datasets = datasets_of(run.index) or [None] * len(run.sources)
    return [
        _SourceDocuments(source.name, source.path_prefix, dataset)
        for source, dataset in zip(run.sources, datasets, strict=True)
    ]


def origins(
    run: Run,
    servings: Iterable[Serving],
    *,
    text: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Iterator[Origin]:
    """Yield the origin of each serving; its file is None where a pair has no provenance.

    Args:
        run: the run.
        servings: results of `documents_of` or `steps_of`.
        text: decode the tokens.
        tokenizer: tokenizer of the text; by default the one that the provenance records.

    Raises:
        FormatError: a provenance is damaged or of another pair.
        InvalidArgument: no tokenizer is recorded, another file has its path now, or the tokens of a
            pair are floats.
    """
    pairs, loaded = _pairs(run), cache(_load_tokenizer)  # which hashes its file
    for serving in servings:
        pair = pairs[serving.source]
        origin, recorded = _origin(pair, serving)
        if text:
            chosen = recorded if tokenizer is None else os.fspath(tokenizer)
            if chosen is None:
                raise InvalidArgument(
                    f"{pair.name}: no tokenizer is recorded for document {serving.document}; pass "
                    "--tokenizer"
                )
            ids = pair.dataset.get(serving.document, serving.offset, serving.length)
            if ids.dtype.kind not in "iu":
                raise InvalidArgument(
                    f"{pair.name}: its tokens are {ids.dtype}, and no ids of text; leave --text out"
                )
            origin = replace(origin, text=loaded(chosen).decode(ids.tolist()))
        yield origin


def _origin(pair: _SourceDocuments, serving: Serving) -> tuple[Origin, RecordedTokenizer | None]:
    """Return the origin of a serving, and the tokenizer of its document; None if not recorded."""
    if pair.provenance is None:
        return Origin(serving=serving), None
    document = np.array([pair.document_of(serving.document)])
    number, row, begin, end = (int(column[0]) for column in pair.provenance.locate(document))
    if number == UNKNOWN:
        return Origin(serving=serving), None
    file = pair.provenance.files[number]
    origin = Origin(
        serving=serving,
        file=file.path,
        row_name=file.row_name,
        row=row + file.first_row,
        begin=begin if file.has_bytes else None,
        end=end if file.has_bytes else None,
    )
    return origin, file.tokenizer


def _load_tokenizer(tokenizer: str | RecordedTokenizer) -> Tokenizer:
    if isinstance(tokenizer, str):
        return load(find_tokenizer(tokenizer, add_special_tokens=True))
    file = find_tokenizer(tokenizer.path, add_special_tokens=tokenizer.add_special_tokens)
    # library and content; its version may differ
    if file.fingerprint.split()[::2] != tokenizer.fingerprint.split()[::2]:
        raise InvalidArgument(
            f"{tokenizer.path}: is not the recorded tokenizer any more ({file.fingerprint}, was "
            f"{tokenizer.fingerprint}); pass --tokenizer"
        )
    return load(file)


def documents_of_rows(run: Run, rows: str) -> dict[int, I64]:
    """Return the documents of input rows, as sequence ids by number of the source.

    Args:
        run: the run.
        rows: ``FILE``, ``FILE:120`` or ``FILE:120-140``, both included. Lines count from 1, rows
            of other formats from 0. A path that was not recorded may be the end of one that was.

    Raises:
        InvalidArgument: the text has another form, no pair has a provenance, or the file is not one
            of those recorded, or several.
        OutOfRange: no document came from these rows, or only documents outside the run's part.
    """
    path, first, last = _parsed(rows)
    pairs = _pairs(run)
    known = [(pair, pair.provenance) for pair in pairs]
    if all(provenance is None for _, provenance in known):
        raise InvalidArgument(
            f"{provenance_path(pairs[0].path_prefix)}: does not exist, as of every source; only "
            "pairs that megaindex tokenized or imported name their rows"
        )
    recorded = {file.path for _, provenance in known if provenance for file in provenance.files}
    chosen = _recorded_path(path, sorted(recorded))
    found: dict[int, I64] = {}
    spans: list[str] = []
    past: list[int] = []  # the last row with a document, of each source
    filled = False
    for number, (pair, provenance) in enumerate(known):
        if provenance is None:
            continue
        for of, file in enumerate(provenance.files):
            if file.path != chosen:
                continue
            shift = file.first_row
            if first is not None and first < shift:
                raise InvalidArgument(
                    f"--rows {rows}: {file.row_name}s of {file.path} count from {shift}, got "
                    f"{first}; give the first as {shift}"
                )
            low = 0 if first is None else first - shift
            high = _LAST_ROW if last is None else last - shift
            documents = provenance.documents_of(of, low, high)
            text, end = _rows_text(provenance, of, shift)
            spans.append(text)
            past.append(end)
            if documents.size:
                sequences = pair.sequences_of(documents)
                filled = filled or bool(sequences.size)
                inside = _inside(run, number, sequences)
                found[number] = np.union1d(found.get(number, inside), inside)
    if found and last is not None and last > max(past):
        raise OutOfRange(
            f"{rows}: the last row of {chosen} with a document is {max(past)}, got {last}; give "
            f"rows up to {max(past)}"
        )
    if not any(sequences.size for sequences in found.values()):
        where = f"the pair has {spans[0]}"
        if found and not filled:
            where = "their documents are empty"
        elif found:
            where = "their documents are in another part of the corpus, see --subset and --split"
        raise OutOfRange(f"{rows}: no document of this run came from these rows; {where}")
    return found


def _inside(run: Run, source: int, sequences: I64) -> I64:
    first = run.sources[source].first_document
    inside = (sequences >= first) & (sequences < first + run.sources[source].sequence_lengths.size)
    return sequences[inside]


def _rows_text(provenance: Provenance, number: int, shift: int) -> tuple[str, int]:
    """Return the rows of a file that have documents, as text, and the last of them."""
    documents = provenance.documents_of(number, 0, _LAST_ROW)
    if not documents.size:
        return "no document", -1
    rows = provenance.locate(documents).row + shift
    last = int(rows.max())
    return f"documents of {provenance.files[number].row_name}s {rows.min()} to {last}", last


def _parsed(rows: str) -> tuple[str, int | None, int | None]:
    match = _ROWS.fullmatch(rows)
    assert match is not None, "any text of a character or more matches"
    path, first, last = match["path"], match["first"], match["last"]
    if first is None:
        return path, None, None
    low, high = int(first), int(last or first)
    if high < low:
        raise InvalidArgument(f"--rows {rows}: must be FILE:A-B with A <= B, got {low} and {high}")
    return path, low, high


def _recorded_path(path: str, recorded: Sequence[str]) -> str:
    whole = path if is_remote(path) else os.path.abspath(path)
    for exact in (path, whole):
        if exact in recorded:
            return exact
    ends = [one for one in recorded if one.endswith(f"/{path}")]
    if len(ends) == 1:
        return ends[0]
    some = ", ".join((ends or list(recorded))[:_NAMED])
    if ends:
        raise InvalidArgument(f"{path}: is the end of {len(ends)} input files, {some}; give one")
    raise InvalidArgument(
        f"{path}: none of the {len(recorded)} input files of the run, such as {some}; give the "
        "path of one of them"
    )


def step_ranges(steps: npt.ArrayLike) -> list[tuple[int, int]]:
    """Return ranges of consecutive steps, both ends included: 3 4 5 9 gives (3, 5) and (9, 9)."""
    ordered = distinct(np.asarray(steps, np.int64).ravel())
    if not ordered.size:
        return []
    breaks = np.flatnonzero(np.diff(ordered) > 1)
    firsts = ordered[np.concatenate(([0], breaks + 1))]
    lasts = ordered[np.concatenate((breaks, [ordered.size - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def ranges_text(ranges: Sequence[tuple[int, int]]) -> str:
    """Return ranges as text: "3-5 9"."""
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)
