"""Print the input file and row of every span of a step, or the steps that serve input rows.

Rows are those of PREFIX.provenance, which megaindex tokenize and import write."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

import numpy as np

from megaindex._types import I64
from megaindex.audit.trace import (
    documents_of,
    documents_of_rows,
    origins,
    ranges_text,
    servings,
    source_of,
    step_ranges,
    unordered_runs,
    unserved_texts,
)
from megaindex.cli.options import Parser, add_flags, print_json, take_run
from megaindex.cli.plan import add_index_arguments, add_run_arguments, run_of_options
from megaindex.errors import InvalidArgument
from megaindex.index.array_index import membership
from megaindex.index.skips import read_ids
from megaindex.run.run import Run, TokenRuns, join_runs
from megaindex.validation import parse_steps

_MOST_ROWS = 200  # printed without --json
_MOST_RANGES = 40


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    take_run(options, "trace")
    _check(options)
    steps = None if options.step is None else parse_steps("--step", options.step)
    documents = None if options.documents is None else read_ids(options.documents)
    run = run_of_options(options)
    if steps is not None:
        _trace_steps(run, steps, options)
    elif documents is not None:
        _trace_documents(run, options, {source_of(run, options.source): documents})
    else:
        _trace_documents(run, options, documents_of_rows(run, options.rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex trace", description=__doc__, allow_abbrev=False)
    add_run_arguments(parser)
    add_index_arguments(parser)
    what = parser.add_argument_group("what is traced (exactly one of step, rows and documents)")
    add = what.add_argument
    add("--step", metavar="K[-L]", help="spans of step K, from 0, or of steps K to L")
    add("--rank", type=int, metavar="R", help="with --step: data-parallel rank")
    rows = "rows of an input file: lines from 1, rows of Parquet and imported files from 0"
    add("--rows", metavar="FILE[:A[-B]]", help=rows)
    add("--documents", metavar="FILE", help="document ids: an .npy of int64, or numbers as text")
    add("--source", metavar="S", help="with --documents: name or number of their source")
    output = parser.add_argument_group("output")
    add = output.add_argument
    add("--text", action="store_true", help="decode the tokens")
    add("--tokenizer", metavar="T", help="with --text: as for tokenize; default: the recorded one")
    add_flags(output, "--json")
    return parser


def _check(options: argparse.Namespace) -> None:
    given = [name for name in ("step", "rows", "documents") if getattr(options, name) is not None]
    if len(given) != 1:
        raise InvalidArgument(
            f"one of --step, --rows and --documents must be given, got {len(given)}"
        )
    for flag, needs in (("rank", "step"), ("source", "documents")):
        if getattr(options, flag) is not None and given != [needs]:
            raise InvalidArgument(f"--{flag} needs --{needs}; give it as well, or leave it out")
    if options.tokenizer and not options.text:
        raise InvalidArgument("--tokenizer needs --text; give it as well, or leave it out")


def _trace_steps(run: Run, steps: range, options: argparse.Namespace) -> None:
    found = documents_of(run, steps, options.rank)
    more = {"text": options.text, "tokenizer": options.tokenizer}
    if options.json:
        spans = [origin.to_json() for origin in origins(run, found, **more)]
        print_json({"step": options.step, "spans": spans})
        return
    from megaindex.audit.render import print_origins
    from megaindex.console import print_lines

    print_lines(unserved_texts(run, steps, found, options.rank))
    if found:
        shown = list(origins(run, found[:_MOST_ROWS], **more))
        print_origins(run, shown, len(found))


def _trace_documents(run: Run, options: argparse.Namespace, documents: dict[int, I64]) -> None:
    runs = join_runs([unordered_runs(run, ids, source) for source, ids in documents.items()])
    steps = run.step_of(runs.sample)
    serves = membership(steps[steps >= 0], run.num_steps)
    ranges = step_ranges(np.flatnonzero(serves))
    count = sum(ids.size for ids in documents.values())
    first = _first(runs, runs.sample.size if options.json else _MOST_ROWS)
    found = servings(run, first)
    shown = list(origins(run, found, text=options.text, tokenizer=options.tokenizer))
    if options.json:
        facts = {
            "documents": count,
            "tokens_served": int(runs.length.sum()),
            "past_steps": run.past_steps,
            "steps": ranges_text(ranges),
            "spans": [origin.to_json() for origin in shown],
        }
        print_json(facts)
        return
    from megaindex.audit.render import print_origins
    from megaindex.console import print_lines

    print_lines(_summary(run, runs, count, ranges))
    if runs.sample.size:
        print_origins(run, shown, runs.sample.size)


def _first(runs: TokenRuns, most: int) -> TokenRuns:
    """Return at least the first ``most`` runs in order of training, and no sample in part."""
    if most < runs.sample.size:
        last = np.partition(runs.sample, most - 1)[most - 1]
        runs = runs.select(np.flatnonzero(runs.sample <= last))
    return runs.select(np.argsort(runs.sample, kind="stable"))


def _summary(run: Run, runs: TokenRuns, count: int, ranges: Sequence[tuple[int, int]]) -> list[str]:
    """Return the lines above the table."""
    plural = "" if count == 1 else "s"
    if not runs.sample.size:
        return [f"{count:,} document{plural}, not served in any step of this run"]
    steps = sum(last - first + 1 for first, last in ranges)
    past = sum(
        max(0, min(last + 1, run.past_steps) - first)
        for first, last in ranges
        if first < run.past_steps
    )
    many = "" if steps == 1 else "s"
    said = f"{count:,} document{plural}, {int(runs.length.sum()):,} tokens served"
    divided = f": {past:,} past, {steps - past:,} to come" if run.past_steps else ""
    text = ranges_text(ranges[:_MOST_RANGES])
    rest = len(ranges) - _MOST_RANGES
    more = f" and {rest:,} more ranges; --json lists all" if rest > 0 else ""
    wrapped = textwrap.wrap(
        f"steps {text}{more}", 80, subsequent_indent="  ", break_on_hyphens=False
    )
    return [f"{said} in {steps:,} step{many}{divided}", *wrapped, ""]
