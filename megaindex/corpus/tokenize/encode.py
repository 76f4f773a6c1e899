"""Tokenization of one part: a repeatable task that always writes the same bytes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.corpus.tokenize.inputs import BadRecord, Record, Refused, TokenizeSettings
from megaindex.corpus.tokenize.parts import InputPart, Piece
from megaindex.corpus.tokenize.reading import RecordReader, place_name
from megaindex.corpus.tokenize.work_folder import (
    BadLines,
    Done,
    Heartbeat,
    PartRows,
    WorkFolder,
    pair_bytes,
)
from megaindex.errors import FormatError
from megaindex.format.provenance import InputRows
from megaindex.format.tokenizers import Tokenizer, insert_tokens, load, one_thread
from megaindex.format.writer import IndexedDatasetWriter
from megaindex.io.paths import as_storage_error

Encoded = tuple[npt.NDArray[Any], npt.NDArray[np.int64], list[int]]
"""Ids of all texts, the number of ids of each, and the number of texts of each document."""

_BATCH_BYTES = 1 << 18  # text tokenized at once
_BATCH_RECORDS = 4096


@dataclass(frozen=True, kw_only=True)
class Task:
    """One part to be tokenized."""

    part: InputPart
    settings: TokenizeSettings
    folder: str
    stop: bool
    """Raise at the first bad line instead of counting it."""

    def __str__(self) -> str:
        first, others = self.part.pieces[0], len(self.part.pieces) - 1
        more = f" and {others:,} other inputs" if others else ""
        unit = "row groups" if first.source.format == "parquet" else "bytes"
        return f"{first.source.path}, {unit} {first.begin}:{first.end}{more}"


def encode_part(task: Task) -> Done:
    """Write the pairs of a part, one for each key, then its result; each whole or not at all.

    Raises:
        FormatError: an input is damaged; with `stop`, a line or row is not a document.
        StorageError: an input changed or cannot be read, or a file cannot be written.
    """
    folder = WorkFolder(task.folder)
    done = folder.read_done(task.part.key, len(task.settings.keys))
    if done is not None and not (task.stop and done.bad):
        return done  # by an earlier run, or by a worker that was considered lost
    with one_thread():
        return _Encoding(task, folder).run()


class _Encoding:
    """A part while it is tokenized, with its counts."""

    def __init__(self, task: Task, folder: WorkFolder) -> None:
        self._task = task
        self._settings = task.settings
        self._folder = folder
        self._tokenizer = load(task.settings.tokenizer)
        self._documents = self._blank = 0
        self._tokens = [0] * len(task.settings.keys)
        self._empty = [0] * len(task.settings.keys)

    def run(self) -> Done:
        part, count = self._task.part, len(self._settings.keys)
        attempt = secrets.token_hex(4)
        name = f"{part.key}.{attempt}"
        prefixes = [self._folder.pair(name, number) for number in range(count)]
        lines = []
        with ExitStack() as opened:
            bad = opened.enter_context(BadLines(self._folder.bad(name)))
            heartbeat = opened.enter_context(Heartbeat(self._folder.pulse(name)))
            rows = opened.enter_context(PartRows(self._folder.rows(name), len(part.pieces)))
            writers = [
                opened.enter_context(IndexedDatasetWriter(prefix, self._settings.dtype))
                for prefix in prefixes
            ]
            for number, piece in enumerate(part.pieces):
                lines.append(self._piece(number, piece, writers, rows, bad, heartbeat))
        with as_storage_error(self._folder.path, "cannot read the size of a file"):
            sizes = tuple(pair_bytes(prefix) for prefix in prefixes)
            rows_bytes = os.path.getsize(self._folder.rows(name))
        done = Done(
            key=part.key,
            attempt=attempt,
            documents=self._documents,
            blank=self._blank,
            bad=bad.count,
            tokens=tuple(self._tokens),
            empty=tuple(self._empty),
            lines=tuple(lines),
            sizes=sizes,
            rows_bytes=rows_bytes,
        )
        self._folder.write_done(done)
        return done

    def _piece(
        self,
        number: int,
        piece: Piece,
        writers: Sequence[IndexedDatasetWriter],
        rows: PartRows,
        bad: BadLines,
        heartbeat: Heartbeat,
    ) -> int:
        """Tokenize a piece and return its number of lines or rows."""
        reader = RecordReader(piece, self._settings.keys)
        for batch in _batches(reader):
            records = [one for one in batch if isinstance(one, Record)]
            kept, refused = self._encoded(records)
            refused += [one for one in batch if isinstance(one, Refused)]
            for one in sorted(refused, key=lambda one: one.place):
                if self._task.stop:
                    raise _as_error(one, piece, reader)
                bad.add(number, one)
            for key, encoded in enumerate(kept):
                self._write(key, writers[key], encoded)
            if refused:
                left_out = {one.place for one in refused}
                records = [one for one in records if one.place not in left_out]
            rows.add(_origins(number, records))
            self._documents += len(records)
            heartbeat.update(reader.done)
        heartbeat.piece_done(piece.nbytes)
        self._blank += reader.blank
        return reader.count

    def _encoded(self, records: Sequence[Record]) -> tuple[list[Encoded], list[Refused]]:
        """Return the ids of each key, and the records refused by the library, found one by one."""
        keys = range(len(self._settings.keys))
        try:
            return [_encode(self._tokenizer, records, key) for key in keys], []
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of any type; a panic in Rust is not an Exception
            if len(records) == 1:
                reason = BadRecord("tokenizer", f"cannot be tokenized: {error}")
                nothing = _encode(self._tokenizer, [], 0)
                return [nothing for _ in keys], [Refused(place=records[0].place, error=reason)]
        singles = [self._encoded([record]) for record in records]
        together = [_joined([kept[key] for kept, _ in singles]) for key in keys]
        return together, [one for _, refused in singles for one in refused]

    def _write(self, key: int, writer: IndexedDatasetWriter, encoded: Encoded) -> None:
        tokens, lengths, sequences = lay_out(*encoded, self._settings.eod)
        self._tokens[key] += tokens.size
        self._empty[key] += int((sequences == 0).sum())
        if (sequences == 1).all():  # nearly always
            writer.add_documents(tokens, lengths)
            return
        begin = 0
        ends = np.cumsum(sequences)
        for first, stop in zip(ends - sequences, ends, strict=True):
            own = lengths[first:stop]
            end = begin + int(own.sum())
            writer.add_document(tokens[begin:end], own)
            begin = end


def _origins(piece: int, records: Sequence[Record]) -> InputRows:
    count = len(records)
    begin = np.fromiter((record.begin for record in records), np.int64, count)
    size = np.fromiter((record.size for record in records), np.int64, count)
    place = np.fromiter((record.place for record in records), np.int64, count)
    return InputRows(np.full(count, piece, np.int64), place, begin, begin + size)


def lay_out(
    tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64], counts: Sequence[int], eod: int | None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Lay out documents as Megatron's tools/preprocess_data.py.

    A text without tokens becomes no sequence, and a document without tokens gets no end token:
    texts [5, 6], [], [7] of two documents with two texts and one, and the end token 9, give
    5 6 9 7 9.

    Args:
        tokens: ids of all texts.
        lengths: number of ids of each text.
        counts: number of texts of each document.
        eod: end token.

    Returns:
        Consecutive tokens; lengths of their sequences; number of sequences of each document.
    """
    owners = np.repeat(np.arange(len(counts)), counts)[lengths > 0]
    lengths = lengths[lengths > 0]
    if eod is not None and lengths.size:
        is_last = np.append(owners[1:] != owners[:-1], True)
        lengths = lengths + is_last
        tokens = insert_tokens(tokens, [(np.cumsum(lengths)[is_last] - 1, eod)])
    return tokens, lengths, np.bincount(owners, minlength=len(counts)).astype(np.int64)


def _joined(parts: Sequence[Encoded]) -> Encoded:
    tokens, lengths, counts = zip(*parts, strict=True)
    return np.concatenate(tokens), np.concatenate(lengths), [one for own in counts for one in own]


def _encode(tokenizer: Tokenizer, records: Sequence[Record], key: int) -> Encoded:
    texts = [record.texts[key] for record in records]
    flat = [text for value in texts for text in value]
    return *tokenizer.encode(flat), [len(value) for value in texts]


def _as_error(refused: Refused, piece: Piece, reader: RecordReader) -> FormatError:
    where = place_name(piece.source.format, reader.place(refused.place))
    return FormatError(
        f"{piece.source.path}: {where}{refused.error.detail}; correct it, or pass --on-bad-line "
        "skip"
    )


def _batches(records: Iterable[Record | Refused]) -> Iterator[list[Record | Refused]]:
    batch: list[Record | Refused] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size if isinstance(record, Record) else 0
        if size >= _BATCH_BYTES or len(batch) == _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
