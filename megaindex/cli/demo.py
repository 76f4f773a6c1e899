"""Plan, build, read, check and record one epoch of a real corpus.

The corpus is the text of the Python standard library and of the installed packages, one token per
byte.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from megaindex._types import I64, U8
from megaindex.audit.render import print_origins
from megaindex.audit.trace import documents_of, origins
from megaindex.builders import build_index
from megaindex.cli.options import Parser, add_flags
from megaindex.console import console_of
from megaindex.corpus.tokenize.run import tokenize
from megaindex.door import make_plan
from megaindex.errors import InvalidArgument, MegaIndexError
from megaindex.format import IndexedDataset
from megaindex.format.provenance import open_provenance
from megaindex.format.tokenizers import END_OF_DOCUMENT
from megaindex.index.spans import Index, Spans
from megaindex.io.paths import as_storage_error
from megaindex.kernels import backend
from megaindex.loader.samplers import MicroBatchSampler
from megaindex.loader.token_readers import MappedTokens
from megaindex.lock.check import verify_lock
from megaindex.lock.make import make_lock
from megaindex.lock.opening import run_of_lock
from megaindex.plan.render import plan_view
from megaindex.progress import copying, counting
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.run_settings import Data, RunSettings, Target
from megaindex.settings.sources import Source

if TYPE_CHECKING:
    from megaindex.builders import BuiltIndex
    from megaindex.plan.model import SettingsPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedCounts:
    """Samples and tokens that all ranks together read."""

    times_sample: U8
    """Times that each sample was served: uint8[num_samples]."""
    times_token: U8
    """Times that each token of the .bin was an input, one of the first S of a served sample."""
    token_counts: I64
    """Times that each token id was read as an input: int64[vocabulary]."""

    def matches(self, dataset: IndexedDataset) -> bool:
        """Return True if the ids read are those of the tokens at the served positions."""
        expected = np.bincount(
            dataset.tokens[self.times_token > 0].astype(np.int64), minlength=self.token_counts.size
        )
        return bool(np.array_equal(expected, self.token_counts))


def read_all_ranks(
    index: Index,
    dataset: IndexedDataset,
    *,
    num_samples: int,
    micro_batch_size: int,
    data_parallel_size: int,
    vocabulary: int,
    progress: Callable[[int], None] = lambda _: None,
) -> ServedCounts:
    """Read the batches of every rank and count samples and tokens."""
    times_sample = np.zeros(index.num_samples, np.uint8)
    times_token = np.zeros(dataset.tokens.size, np.uint8)
    token_counts = np.zeros(vocabulary, np.int64)
    reader = MappedTokens([dataset])
    tokens = np.empty((micro_batch_size, index.sequence_length), np.int64)
    for rank in range(data_parallel_size):
        batches = MicroBatchSampler(
            num_samples=num_samples,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=data_parallel_size,
        )
        for rows in batches:
            ids = np.asarray(rows, np.int64)
            spans = index.locate(ids)
            reader.read(spans, tokens, pad_id=0)
            token_counts += np.bincount(tokens.ravel(), minlength=vocabulary)
            np.add.at(times_sample, ids, 1)
            _count_tokens(times_token, dataset, spans, index.sequence_length)
            progress(len(ids))
    return ServedCounts(
        times_sample=times_sample, times_token=times_token, token_counts=token_counts
    )


def _count_tokens(times: U8, dataset: IndexedDataset, spans: Spans, sequence_length: int) -> None:
    """Add one to the count of every token that the samples have as an input."""
    length = spans.input_lengths(sequence_length)
    first = dataset.sequence_pointers[spans.document] // dataset.dtype.itemsize + spans.offset
    for begin, end in zip(first.tolist(), (first + length).tolist(), strict=True):
        times[begin:end] += 1


SUFFIXES = (".py", ".pyi", ".txt", ".md", ".rst", ".h", ".hpp", ".json")
RANKS, MICRO_BATCH, ACCUMULATION = 8, 4, 2
SEED = 1234
ORDER = "epoch"
MARKER = ".megaindex-demo"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    _Demo(options).run()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex demo", description=__doc__)
    add = parser.add_argument
    add("--dir", default="demo-data", help="folder of corpus and cache; default: demo-data")
    size = "size of the corpus at most; default: 64000000"
    add("--max-tokens", type=int, default=64_000_000, metavar="T", help=size)
    add_flags(parser, "--seq-length", default=2048, help="tokens per sample; default: 2048")
    add("--root", action="append", help="text below this folder instead")
    return parser


def text_files(roots: Iterable[str], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the distinct regular files with one of the suffixes below ``roots``, sorted."""
    paths = (path for root in roots for path in Path(root).rglob("*"))
    return sorted({path.resolve() for path in paths if path.suffix in suffixes and path.is_file()})


class _Demo:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._prefix = Path(options.dir) / "corpus"
        self._console = console_of(sys.stdout)

    def run(self) -> None:
        self._claim_directory()
        self._write_corpus()
        dataset = IndexedDataset(self._prefix)
        run = self._run()
        plan = self._plan(run)
        index = self._build(dataset)
        served = self._read(index, dataset, plan)
        self._check(index, dataset, plan, served)
        self._record(run, plan)

    def _claim_directory(self) -> None:
        """Refuse a folder that holds anything but the files of an earlier demo."""
        directory = self._prefix.parent
        if self._options.max_tokens < 1:
            raise InvalidArgument(
                f"--max-tokens must be at least 1, got {self._options.max_tokens}"
            )
        for root in self._options.root or []:
            if not Path(root).is_dir():
                raise InvalidArgument(f"--root {root}: must be a folder with text files in it")
        with as_storage_error(str(directory), "cannot use it for the demo"):
            directory.mkdir(parents=True, exist_ok=True)
            if any(directory.iterdir()) and not (directory / MARKER).exists():
                raise InvalidArgument(
                    f"--dir {directory}: must be new, empty or written by an earlier demo, since "
                    "its corpus and cache are replaced; choose another folder"
                )
            (directory / MARKER).touch()

    def _write_corpus(self) -> None:
        paths = sysconfig.get_paths()
        roots = self._options.root or [paths["stdlib"], paths["purelib"]]
        limit, total = self._options.max_tokens, 0
        with self._step("1  corpus") as say:
            files = []
            for path in text_files(roots, SUFFIXES):
                size = path.stat().st_size + 1  # with the end token
                if size > 1 and total + size <= limit and os.access(path, os.R_OK):
                    files.append(path)
                    total += size
            written = tokenize(
                self._prefix,
                files,
                tokenizer="bytes",
                format="files",
                append_eod=True,
                dtype=np.uint16,
                on_bad_line="skip",
                overwrite=True,
                discard_parts=True,
                stage=copying,
            )
            say(
                f"{written.documents:,} files, {written.new_tokens:,} tokens in "
                f"{self._prefix}.bin/.idx, one a byte"
            )

    def _run(self) -> RunSettings:
        return RunSettings(
            order=ORDER,
            sequence_length=self._options.seq_length,
            data=Data(train=(Source(path=str(self._prefix)),)),
            batch=BatchSchedule.constant(RANKS * MICRO_BATCH * ACCUMULATION),
            target=Target(kind="epochs", value=Fraction(1)),
            seed=SEED,
            micro_batch_size=MICRO_BATCH,
            data_parallel_size=RANKS,
        )

    def _plan(self, run: RunSettings) -> SettingsPlan:
        with self._step("2  plan") as say:
            plan = make_plan(run)
            say(
                f"one epoch on {RANKS} ranks x micro batch {MICRO_BATCH} x "
                f"{ACCUMULATION} accumulation steps is train_iters = {plan.train_iters}"
            )
        self._console.print(plan_view(plan))
        return plan

    def _build(self, dataset: IndexedDataset) -> BuiltIndex:
        length = self._options.seq_length
        with self._step("3  index") as say:
            index = build_index(dataset, sequence_length=length, seed=SEED, order=ORDER)
            say(f"order {ORDER}, {index.num_samples:,} samples, each computed on access")
        cache = Path(self._options.dir) / "cache"
        shutil.rmtree(cache, ignore_errors=True)  # the cache of an earlier demo
        for step, how in (("   for Megatron", f"built by {backend()}"), ("", "from the cache")):
            with self._step(step) as say:
                build_index(dataset, sequence_length=length, seed=SEED, cache_dir=cache)
                say(f"order megatron, the three arrays of Megatron bit for bit, {how}")
        return index

    def _read(self, index: BuiltIndex, dataset: IndexedDataset, plan: SettingsPlan) -> ServedCounts:
        num_samples = plan.train_iters * plan.global_batch_size
        with self._step("4  read") as say:
            start = time.perf_counter()
            with counting("reading", num_samples) as advance:
                served = read_all_ranks(
                    index,
                    dataset,
                    num_samples=num_samples,
                    micro_batch_size=MICRO_BATCH,
                    data_parallel_size=RANKS,
                    vocabulary=END_OF_DOCUMENT + 1,
                    progress=advance,
                )
            rate = num_samples * index.sequence_length / (time.perf_counter() - start) / 1e6
            say(f"{RANKS} ranks read {num_samples:,} samples and counted every token, "
                f"{rate:,.0f} M tokens/s")  # fmt: skip
        return served

    def _check(
        self, index: BuiltIndex, dataset: IndexedDataset, plan: SettingsPlan, served: ServedCounts
    ) -> None:
        consumed = plan.train_iters * plan.global_batch_size
        S, T = index.sequence_length, dataset.num_tokens
        unseen = np.flatnonzero(served.times_token == 0)
        facts = [
            ("samples served once", int((served.times_sample == 1).sum()), consumed),
            ("samples served twice or more", int((served.times_sample > 1).sum()), 0),
            ("tokens served once", int((served.times_token == 1).sum()), consumed * S),
            ("tokens served twice or more", int((served.times_token > 1).sum()), 0),
            ("tokens left over", unseen.size, T - consumed * S),
            ("token counts that differ from the corpus", int(not served.matches(dataset)), 0),
        ]
        table = Table(title="check of one epoch", title_justify="left")
        table.add_column("count of")
        for column in ("counted", "expected"):
            table.add_column(column, justify="right", no_wrap=True)
        for what, counted, expected in facts:
            mark = "[green]" if counted == expected else "[red]"
            table.add_row(what, f"{mark}{counted:,}", f"{expected:,}")
        self._console.print(table)
        self._print_left_over(index, dataset, consumed, unseen)
        wrong = [what for what, counted, expected in facts if counted != expected]
        if wrong:
            raise MegaIndexError(f"the check of one epoch failed: {', '.join(wrong)}")

    def _print_left_over(
        self, index: BuiltIndex, dataset: IndexedDataset, consumed: int, unseen: np.ndarray
    ) -> None:
        starts = dataset.sequence_pointers // dataset.dtype.itemsize
        owners = np.searchsorted(starts, unseen, side="right") - 1
        documents, tokens = np.unique(owners, return_counts=True)
        dropped = index.num_samples - consumed
        rest = unseen.size - dropped * index.sequence_length
        self._console.print(
            f"left over: {unseen.size:,} of {dataset.num_tokens:,} tokens "
            f"({100 * unseen.size / dataset.num_tokens:.2f} %): {dropped} samples that do not fill "
            f"a last batch and {rest:,} tokens that do not fill a last sample, "
            f"in {documents.size:,} of {len(dataset):,} documents:"
        )
        provenance = open_provenance(str(self._prefix))
        assert provenance is not None, "the tokenizer wrote it"
        most = np.argsort(-tokens, kind="stable")[:3]
        rows = provenance.locate(documents[most])
        for count, number in zip(tokens[most].tolist(), rows.file.tolist(), strict=True):
            path = Path(*Path(provenance.files[number].path).parts[-3:])
            self._console.print(f"  {count:>9,} tokens of …/{path}")

    def _record(self, run: RunSettings, plan: SettingsPlan) -> None:
        """Lock the run, verify one of its steps, and trace rows of it to their files."""
        path = Path(self._options.dir) / "run.lock"
        step = plan.train_iters // 2
        with self._step("5  lock") as say:
            lock = make_lock(run).write(path, overwrite=True)
            receipt = lock.content["subsets"]["train"]["receipts"]["total"]
            say(f"{path}, {path.stat().st_size:,} bytes, receipt {receipt}")
        with self._step("   verify") as say:
            checked = verify_lock(path, step=step)
            if not checked.is_clean:
                raise MegaIndexError(f"the check of step {step} of {path} failed")
            say(f"step {step} is what the lock says, from the .idx alone")
        with self._step("   trace") as say:
            locked = run_of_lock(lock)
            found = documents_of(locked, step, rank=0)
            shown = list(origins(locked, found[:3]))
            say(f"rank 0 reads {len(found)} spans in step {step}, the first of them:")
        print_origins(locked, shown, len(shown))

    @contextmanager
    def _step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time the block and print its name with the texts passed to the yielded function."""
        texts: list[str] = []
        start = time.perf_counter()
        yield texts.append
        seconds = time.perf_counter() - start
        duration = f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
        self._console.print(f"[bold]{name:<16}[/] {duration:>8}  {'; '.join(texts)}")
