"""The function `tokenize`: divide inputs into tasks, run them, merge and report their results."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from megaindex.corpus.merge import concatenate
from megaindex.corpus.outputs import WriteResult, check_outputs, checked_outcome
from megaindex.corpus.tokenize.encode import Task, encode_part
from megaindex.corpus.tokenize.inputs import (
    InputFile,
    TokenizeSettings,
    check_settings,
    find_sources,
)
from megaindex.corpus.tokenize.parts import InputPart, cut
from megaindex.corpus.tokenize.reading import place_name
from megaindex.corpus.tokenize.work_folder import (
    Done,
    WorkFolder,
    WorkLock,
    is_half_published,
    is_published,
    not_written,
    read_bad_lines,
)
from megaindex.engine import Engine, open_engine
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format.pair import check_not_a_half
from megaindex.format.provenance import Provenance, ProvenanceSpool, RecordedTokenizer, RowFile
from megaindex.format.tokenizers import find_tokenizer
from megaindex.io.atomic import AtomicFiles, sync_directory, write_file
from megaindex.io.paths import as_storage_error, check_local, listed_paths
from megaindex.progress import Bar, polling, silent
from megaindex.validation import check_choice

_FIRST = 10  # bad lines printed by the command


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line or row that cannot be a document."""

    path: str
    format: str
    number: int
    """Number of the line, from 1, or of the row of a Parquet file, from 0."""
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {place_name(self.format, self.number)}{self.detail}"


@dataclass(frozen=True, kw_only=True)
class BadReport:
    """The bad lines of a run."""

    path: str
    """File that lists all of them."""
    count: int
    first: tuple[BadLine, ...]
    """The first ten."""


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """Result of `tokenize`.

    Attributes:
        pairs: the pair of each key.
        keys: JSON keys, or Parquet columns, that were tokenized, in the order of ``pairs``.
        documents: documents of each pair.
        empty: documents without a token, for each key; they are in the pair, as in Megatron's.
        blank_lines: blank lines skipped.
        bad: bad lines left out, if there were any.
        input_bytes: bytes of the inputs as stored.
        parts: parts that the inputs were divided into.
        resumed: parts that an earlier run had finished.
        new_tokens: tokens of all keys that this run produced; an input given twice counts once.
    """

    pairs: tuple[WriteResult, ...]
    keys: tuple[str, ...]
    documents: int
    empty: tuple[int, ...]
    blank_lines: int
    bad: BadReport | None
    input_bytes: int
    parts: int
    resumed: int
    new_tokens: int

    def lines(self, seconds: float) -> list[str]:
        """Return the lines that the command prints: one for each pair, then one for the run."""
        said = []
        for pair, empty in zip(self.pairs, self.empty, strict=True):
            without = f", {empty:,} documents without any" if empty else ""
            said.append(
                f"{pair.path_prefix}: {pair.documents:,} documents, {pair.tokens:,} "
                f"tokens{without}, {pair.dtype}, {pair.nbytes / 1e6:,.1f} MB"
            )
        rate = self.new_tokens / max(seconds, 1e-9)  # the clock may not have moved
        resumed = f", {self.resumed:,} of them from an earlier run" if self.resumed else ""
        blank = f", {self.blank_lines:,} blank lines skipped" if self.blank_lines else ""
        plural = "" if self.parts == 1 else "s"
        said.append(
            f"  of {self.input_bytes / 1e6:,.1f} MB in {self.parts:,} part{plural}{resumed}{blank}"
            f", in {seconds:.2f} s ({rate:,.0f} tokens/s)"
        )
        return said

    def to_json(self) -> dict[str, Any]:
        """Return the fields, as ``--json`` prints them."""
        return asdict(self)


def summed(
    pairs: tuple[WriteResult, ...],
    keys: tuple[str, ...],
    done: Sequence[Done],
    bad: BadReport | None,
    *,
    input_bytes: int,
    fresh: set[str],
) -> Tokenized:
    """Sum the results of all parts; `fresh` holds the keys of those that this run tokenized."""
    once = {one.key: one for one in done}
    return Tokenized(
        pairs=pairs,
        keys=keys,
        documents=sum(one.documents for one in done),
        empty=tuple(sum(counts) for counts in zip(*(one.empty for one in done), strict=True)),
        blank_lines=sum(one.blank for one in done),
        bad=bad,
        input_bytes=input_bytes,
        parts=len(done),
        resumed=len(once.keys() - fresh),
        new_tokens=sum(sum(one.tokens) for key, one in once.items() if key in fresh),
    )


def bad_report_path(output: str) -> str:
    return f"{output}.bad.jsonl"


def check_bad_report(output: str, inputs: Sequence[str], *, overwrite: bool) -> None:
    """Raise InvalidArgument if the report of bad lines would replace an input, and StorageError if
    it exists, unless `overwrite`."""
    path = bad_report_path(output)
    if os.path.realpath(path) in map(os.path.realpath, inputs):
        raise InvalidArgument(
            f"{path}: is both an input and the report of bad lines; choose another prefix"
        )
    AtomicFiles([path], overwrite=overwrite)  # raises if the file exists


def write_bad_report(
    output: str, parts: Sequence[InputPart], done: Sequence[Done], folder: WorkFolder
) -> BadReport | None:
    """Write `<output>.bad.jsonl`, in the order of the inputs, or remove it without bad lines."""
    path = bad_report_path(output)
    count = sum(one.bad for one in done)
    if count == 0:
        with contextlib.suppress(FileNotFoundError), as_storage_error(path, "cannot remove"):
            os.unlink(path)
        return None
    first: list[BadLine] = []

    def write(file: BinaryIO) -> None:
        for line in _bad_lines(parts, done, folder):
            file.write(json.dumps(_entry(line)).encode() + b"\n")
            if len(first) < _FIRST:
                first.append(line)

    write_file(path, write, overwrite=True)
    return BadReport(path=path, count=count, first=tuple(first))


def _bad_lines(
    parts: Sequence[InputPart], done: Sequence[Done], folder: WorkFolder
) -> Iterator[BadLine]:
    """Yield bad lines; their number in a file is the place in a piece plus the lines before it."""
    for part, one, starts in _first_rows(parts, done, folder):
        for bad in read_bad_lines(folder.bad(one.name)) if one.bad else ():
            if not 0 <= bad["piece"] < len(part.pieces):
                raise not_written(folder.bad(one.name), f"it names piece {bad['piece']}")
            source = part.pieces[bad["piece"]].source
            number = starts[bad["piece"]] + bad["place"] + (source.format != "parquet")
            yield BadLine(
                path=source.path,
                format=source.format,
                number=number,
                rule=bad["rule"],
                detail=bad["detail"],
            )


def _first_rows(
    parts: Sequence[InputPart], done: Sequence[Done], folder: WorkFolder
) -> Iterator[tuple[InputPart, Done, list[int]]]:
    """Yield each part, its result, and the rows of the file before each of its pieces."""
    before = 0
    for part, one in zip(parts, done, strict=True):
        starts = []
        if len(one.lines) != len(part.pieces):
            raise not_written(f"{folder.path}/{one.key}.json", "its pieces differ in number")
        for piece, lines in zip(part.pieces, one.lines, strict=True):
            before = before if piece.begin else 0
            starts.append(before)
            before += lines
        yield part, one, starts


def _add_origins(
    parts: Sequence[InputPart],
    done: Sequence[Done],
    folder: WorkFolder,
    row_file: Callable[[InputFile], RowFile],
    spool: ProvenanceSpool,
) -> None:
    """Add the origins of the documents of all parts, in the order of the inputs; FormatError if a
    file of a part was changed after it was written."""
    for part, one, starts in _first_rows(parts, done, folder):
        path = folder.rows(one.name)
        places = Provenance(path, None)
        places.check_columns()
        if (places.num_documents, len(places.files)) != (one.documents, len(starts)):
            raise not_written(path, "its documents differ in number")
        files = [spool.number_of(row_file(piece.source)) for piece in part.pieces]
        numbers, before = np.array(files, np.int64), np.array(starts, np.int64)
        for rows in places.iterate(0, places.num_documents):
            row = rows.row + before[rows.file]
            spool.add(rows._replace(file=numbers[rows.file], row=row))


def _row_file(settings: TokenizeSettings, key: str, source: InputFile) -> RowFile:
    tokenizer = settings.tokenizer
    return RowFile(
        path=source.path,
        format=source.format,
        row_name="line" if source.format in ("jsonl", "lines") else "row",
        has_bytes=source.format != "parquet",
        compression=source.compression,
        size=source.size,
        version=source.version,
        key=key if source.format in ("jsonl", "parquet") else "",
        tokenizer=RecordedTokenizer(
            path=tokenizer.path,
            fingerprint=tokenizer.fingerprint,
            add_special_tokens=tokenizer.add_special_tokens,
            eod=settings.eod,
        ),
    )


def _entry(line: BadLine) -> dict[str, Any]:
    place = {} if line.format == "files" else {place_name(line.format, 0)[:-4]: line.number}
    return {"file": line.path, **place, "rule": line.rule, "detail": line.detail}


PART_BYTES = 1 << 26
ON_BAD_LINE = ("stop", "skip")
Stage = Callable[[str], AbstractContextManager[Bar]]


def tokenize(
    output: str | os.PathLike[str],
    inputs: Sequence[str | os.PathLike[str]],
    *,
    tokenizer: str | os.PathLike[str],
    format: str | None = None,
    keys: Sequence[str] = ("text",),
    megatron_names: bool = False,
    eod: int | str | None = None,
    append_eod: bool = False,
    add_special_tokens: bool = True,
    encoder: str | None = None,
    dtype: Any | None = None,
    on_bad_line: str = "stop",
    part_bytes: int = PART_BYTES,
    engine: Engine | None = None,
    overwrite: bool = False,
    discard_parts: bool = False,
    stage: Stage = lambda _what: nullcontext(silent),
) -> Tokenized:
    """Write the documents of `inputs`, in their order, as .bin/.idx pairs, with their provenance.

    The bytes equal those of Megatron's tools/preprocess_data.py with the same tokenizer and
    options, and depend neither on `part_bytes` nor on `engine`. Sentences are not split; a list of
    strings is a document of as many sequences. Memory depends only on the longest line. A pair is
    published whole or not at all. An interrupted run leaves its finished parts in
    `<output>.parts`, and the same call resumes from them; parts of changed inputs are tokenized
    again.

    Args:
        output: prefix of the pair; with several keys, or `megatron_names`, the pairs are
            `<output>_<key>_document`.
        inputs: files, objects of a store (URLs), or folders of them, or one of these; JSONL, text
            (both plain, gzip or zstd) or Parquet.
        tokenizer: a tokenizer.json or SentencePiece model, a folder that holds one, or "bytes".
        format: "jsonl", "lines", "files" or "parquet"; by default it follows from each suffix: a
            text file of a folder is a document, of one that is named each line.
        keys: keys of the JSON objects, or columns; each gets a pair.
        eod: id, or text of the token, appended to each document.
        append_eod: append the end token that the tokenizer defines.
        add_special_tokens: add the special tokens of a tokenizer.json's template, such as a begin
            token, as Megatron does by default.
        encoder: "gigatoken" lets that library encode the texts of a tokenizer.json, with the same
            ids; a tokenizer whose ids it does not give is refused.
        dtype: token type; by default, as in Megatron, uint16 for a vocabulary of less than 65,500
            tokens, else int32.
        on_bad_line: "stop" raises at a bad line or row; "skip" leaves it out and lists it in
            `<output>.bad.jsonl`.
        part_bytes: bytes of input for each task.
        engine: engine that runs the tasks; by default local processes, one for each CPU.
        overwrite: replace existing pairs, and the report of bad lines.
        discard_parts: remove finished parts that a run with another tokenizer, end token, token
            type, `keys` or `part_bytes` left at this output, instead of raising.
        stage: function of a stage's name that returns a context manager of its progress bar.

    Returns:
        Counts of documents, tokens and bad lines, and the pairs written.

    Raises:
        InvalidArgument: settings contradict the inputs, the tokenizer or one another, `output` is
            not a new prefix, an input is a pipe, `<output>.parts` holds other files or finished
            parts of a run with other settings, or a library is missing.
        FormatError: an input or the tokenizer is damaged or empty, the inputs hold no document, or
            a line is bad with "stop".
        StorageError: an output exists, an input changed, or a file cannot be read or written.
        EngineError: the tasks cannot be run.
    """
    check_choice("on_bad_line", on_bad_line, ON_BAD_LINE)
    output, inputs, keys = os.fspath(output), listed_paths(inputs), listed_paths(keys)
    prefixes = _prefixes(output, keys, megatron_names)
    sources = find_sources(inputs, format, leave_out=(f"{output}.parts", bad_report_path(output)))
    for source in sources:
        if len(keys) > 1 and source.format in ("lines", "files"):
            raise InvalidArgument(
                f"{source.path}: a text file has no keys, and several are given, "
                f"{', '.join(map(str, keys))}; give one (--json-keys), which names the output"
            )
    file = find_tokenizer(tokenizer, add_special_tokens=add_special_tokens, encoder=encoder)
    settings = check_settings(file, keys, eod=eod, append_eod=append_eod, dtype=dtype)
    parts = cut(sources, settings, part_bytes)
    with WorkLock(output) as work:
        merging = work.is_merging(parts)
        paths = [source.path for source in sources]
        files = [source.path for source in sources if not source.is_remote]
        check_bad_report(output, files, overwrite=overwrite or merging)
        if not merging:
            check_outputs(prefixes, files, overwrite=overwrite)
        work.remove_leftovers(parts, prefixes)
        tasks = [
            Task(part=part, settings=settings, folder=work.folder.path, stop=on_bad_line == "stop")
            for part in parts
        ]
        work.check_unused_parts(
            {part.key for part in parts},
            settings.identity()
            | {"part_bytes": int(part_bytes), "encoder": file.encoder or file.library},
            discard=discard_parts,
        )
        done, fresh = _all_done(tasks, work, engine, stage)
        for source in sources:  # also those of parts that an earlier run finished
            source.check_unchanged()
        work.begin_merging(parts, overwrite=overwrite)
        report = write_bad_report(output, parts, done, work.folder)
        if not any(one.documents for one in done):
            if report is None:  # else the parts say whose the report of bad lines is
                work.clear()
            raise _without_documents(done, paths, report)
        for number, prefix in enumerate(prefixes):
            sizes = [one.sizes[number] for one in done]
            if merging and is_published(prefix, sizes):
                sync_directory(os.path.dirname(prefix) or ".")  # its run may have ended before
            else:
                ours = merging and is_half_published(prefix, sizes)
                row_file = partial(_row_file, settings, settings.keys[number])
                origins = partial(_add_origins, parts, done, work.folder, row_file)
                pairs = [work.folder.pair(one.name, number) for one in done if one.documents]
                with stage(f"merging {len(pairs):,} parts") as bar:
                    concatenate(prefix, pairs, origins, overwrite=overwrite or ours, bar=bar)
        work.clear()
    outcomes = tuple(checked_outcome(prefix, "megatron") for prefix in prefixes)
    return summed(
        outcomes,
        settings.keys,
        done,
        report,
        input_bytes=sum(source.size for source in sources),
        fresh=fresh,
    )


def _prefixes(output: str, keys: Sequence[str], megatron_names: bool) -> list[str]:
    check_local(output, "write the pair to a disk and upload it with the store's own tool")
    check_not_a_half(output)
    if not output or output.endswith("/") or "\0" in output or os.path.exists(output):
        what = "exists" if output and os.path.exists(output) else "is not a prefix"
        raise InvalidArgument(
            f"OUT={output!r}: {what}; give the prefix of the new pair first, then the inputs"
        )
    if len(keys) == 1 and not megatron_names:
        return [output]
    for key in keys:
        if "/" in key or "\0" in key:
            raise InvalidArgument(
                f"key {key!r}: must not contain / or NUL, since it is part of a file name; "
                f"tokenize it alone, without --megatron-names, or rename it in the inputs"
            )
    return [f"{output}_{key}_document" for key in keys]


def _all_done(
    tasks: Sequence[Task], work: WorkLock, engine: Engine | None, stage: Stage
) -> tuple[list[Done], set[str]]:
    """Return the result of every part, and the keys of those tokenized now."""
    stop, pairs = tasks[0].stop, len(tasks[0].settings.keys)
    found = [work.folder.read_done(task.part.key, pairs) for task in tasks]
    done = {one.key: one for one in found if one is not None and not (stop and one.bad)}
    # an input given twice is tokenized once
    todo = list({t.part.key: t for t in tasks if t.part.key not in done}.values())
    if todo:
        total = sum(task.part.nbytes for task in todo)
        with (
            nullcontext(engine) if engine else open_engine() as runner,
            stage(f"tokenizing {len(todo):,} parts") as bar,
            polling(work.folder.bytes_in_progress, bar(total)) as finished,
        ):
            for number, one in runner.run(encode_part, todo):
                done[one.key] = one
                finished(todo[number].part.nbytes)
    return [done[task.part.key] for task in tasks], {task.part.key for task in todo}


def _without_documents(
    done: Sequence[Done], paths: Sequence[str], report: BadReport | None
) -> FormatError:
    lines = sum(sum(one.lines) for one in done)
    blank, bad = sum(one.blank for one in done), sum(one.bad for one in done)
    others = f" and {len(paths) - 1:,} other inputs" if len(paths) > 1 else ""
    listed = "" if report is None else f" ({report.path} lists them, first {report.first[0]})"
    return FormatError(
        f"{paths[0]}{others}: no document in {lines:,} lines, of which {blank:,} are blank and "
        f"{bad:,} bad{listed}; check inputs, format and keys"
    )
