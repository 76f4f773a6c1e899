"""Report how often each document and token of a run was and will be seen, and when.

--consumed-samples divides past from future. --step or --document looks up samples instead."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence

from megaindex.audit.trace import documents_of, source_of, steps_of, unserved_texts
from megaindex.cli.options import Parser, add_flags, print_json, take_run
from megaindex.cli.plan import (
    add_balance_arguments,
    add_index_arguments,
    add_run_arguments,
    cost_model_of,
    run_of_options,
)
from megaindex.errors import InvalidArgument
from megaindex.progress import counting_samples
from megaindex.run.run import Run
from megaindex.validation import parse_steps

_LAST_SECOND = 253402300799  # of the year 9999


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    take_run(options, "audit")
    _check(options)
    date = ""
    if options.html:  # checked before the work
        from megaindex.audit.page import check_page

        check_page(options.html)
        date = _date()
    run = run_of_options(options)
    if options.step is None and options.document is None:
        _audit(run, options, shlex.join(["megaindex", "audit", *arguments]), date)
    else:
        _look_up(run, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex audit", description=__doc__, allow_abbrev=False)
    add_run_arguments(parser)
    add_balance_arguments(parser)
    add_index_arguments(parser)
    look_up = parser.add_argument_group("look-up (in place of the audit)")
    steps = "documents of step K, from 0, or of steps K to L"
    look_up.add_argument("--step", metavar="K[-L]", help=steps)
    look_up.add_argument("--rank", type=int, metavar="R", help="with --step: data-parallel rank")
    look_up.add_argument("--document", type=int, metavar="ID", help="steps of this document")
    source = "with --document: name or number of its source"
    look_up.add_argument("--source", metavar="S", help=source)
    output = parser.add_argument_group("output")
    add_flags(output, "--json")
    add = output.add_argument
    add("--html", metavar="FILE", help="write a page with plots to one file")
    add("--points", type=int, default=400, metavar="N", help="most points of a curve; default: 400")
    return parser


def _check(options: argparse.Namespace) -> None:
    looks_up = options.step is not None or options.document is not None
    if options.step is not None and options.document is not None:
        raise InvalidArgument("--step and --document exclude each other; give one of them")
    if options.rank is not None and options.step is None:
        raise InvalidArgument("--rank needs --step; give the step as well")
    if options.source is not None and options.document is None:
        raise InvalidArgument("--source needs --document; give the document as well")
    if options.html and looks_up:
        raise InvalidArgument("--html shows the audit, not a look-up; leave one of them out")
    if cost_model_of(options) and looks_up:
        raise InvalidArgument(
            "--balance shows the audit, not a look-up, whose ranks are those of rows in order; "
            "leave one of them out"
        )


def _date() -> str:
    """Return the date of the page, that of SOURCE_DATE_EPOCH if it is set."""
    wanted = os.environ.get("SOURCE_DATE_EPOCH") or str(int(time.time()))
    if not wanted.isascii() or not wanted.isdigit() or int(wanted) > _LAST_SECOND:
        raise InvalidArgument(
            f"SOURCE_DATE_EPOCH must be seconds since 1970, at most {_LAST_SECOND}, got {wanted!r}"
        )
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(int(wanted)))


def _audit(run: Run, options: argparse.Namespace, command: str, date: str) -> None:
    from megaindex.audit.render import audit_view
    from megaindex.audit.report import audit
    from megaindex.console import print_view

    with counting_samples() as progress:
        result = audit(
            run, points=options.points, progress=progress, cost_model=cost_model_of(options)
        )
    if options.json:
        print_json(result.to_json())
    else:
        print_view(audit_view(result))
    if options.html:
        from megaindex.audit.page import write_page

        write_page(result, options.html, command=command, date=date)
        print(f"megaindex audit: wrote {options.html}", file=sys.stderr)


def _look_up(run: Run, options: argparse.Namespace) -> None:
    from megaindex.audit.render import print_servings
    from megaindex.console import print_lines

    steps = None if options.step is None else parse_steps("--step", options.step)
    if steps is not None:
        found = documents_of(run, steps, options.rank)
    else:
        found = steps_of(run, options.document, source_of(run, options.source))
    if options.json:
        print_json({"servings": [serving.to_json() for serving in found]})
        return
    if steps is not None:
        print_lines(unserved_texts(run, steps, found, options.rank))
    if found or steps is None:
        print_servings(run, found)
