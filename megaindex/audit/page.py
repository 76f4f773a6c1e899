"""The audit as one HTML page without external files, with a style for printing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from html import escape

import numpy as np

import megaindex
from megaindex.audit import plots
from megaindex.audit.exposure import SHARES
from megaindex.audit.render import (
    SOURCE_COLUMNS,
    balance_headline,
    documents_text,
    lost_rows,
    source_rows,
    sources_text,
    worst_sources,
)
from megaindex.audit.report import (
    Audit,
    SourceCounts,
    distance_text,
    findings,
    headline,
    source_counts,
    suggestions,
    times_seen,
)
from megaindex.console import ShortNames
from megaindex.errors import MissingFile, StorageError
from megaindex.io.atomic import write_file
from megaindex.io.paths import as_storage_error, check_local, check_regular, open_at_once
from megaindex.plan.model import MANY_SOURCES, SHOWN_SOURCES
from megaindex.validation import percent

PAGE_REMEDY = "write the page (--html) to a disk"
_MARK = '<meta name="generator" content="megaindex audit">'
_START_BYTES = 512
_MOST_TIMES = 12  # rows of a table by times seen
_MOST_ROWS = 200
_MOST_TITLE = 60  # letters of the sources' names
_MOST_LETTERS = 400  # of a setting
_CSS = f"""
:root {{ color-scheme: light dark; {plots.variables(dark=False)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {plots.variables(dark=True)} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 60rem; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem; }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--grid); }}
p, ul {{ margin: .4rem 0; }}
ul {{ padding-left: 1.2rem; }}
.findings {{ border: 1px solid var(--grid); border-left: 4px solid var(--all); border-radius: 4px;
  padding: .6rem 1rem; margin: 1rem 0; }}
.findings h2 {{ border: 0; margin: .2rem 0; font-size: 1rem; }}
.findings li {{ margin: .25rem 0; }}
.change {{ border-left-color: var(--balanced); }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }}
dt {{ color: var(--soft); }}
dd {{ margin: 0; min-width: 0; }}
code {{ font-size: .9em; }}
figure {{ margin: .6rem 0; }}
figure svg {{ display: block; overflow: visible; }}
figcaption {{ color: var(--soft); font-size: .92rem; max-width: 46rem; }}
.legend {{ list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; padding: 0;
  margin: .2rem 0; font-size: .88rem; }}
.legend i {{ display: inline-block; width: .8em; height: .8em; margin-right: .35em; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: .92rem; }}
th, td {{ padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--grid);
  vertical-align: top; }}
th {{ font-weight: 600; color: var(--soft); vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
th, td {{ overflow-wrap: normal; }}
.sources td:first-child {{ overflow-wrap: anywhere; }}
td small {{ display: block; color: var(--soft); }}
td b {{ font-weight: 500; white-space: nowrap; }}
dd span {{ display: inline-block; max-width: 100%; }}
td i {{ display: block; height: 4px; background: var(--all); margin: 2px 0 0 auto; }}
i {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
footer {{ margin-top: 2rem; color: var(--soft); font-size: .88rem; }}
{plots.STYLE}
@media screen and (max-width: 620px) {{
  dl {{ display: block; }}
  dt {{ margin-top: .3rem; }}
  th, td {{ padding: .25rem .2rem; font-size: .84rem; }}
  td small {{ overflow-wrap: anywhere; }}
  .sources thead {{ display: none; }}
  .sources tr, .sources td {{ display: block; }}
  .sources tr {{ border-bottom: 1px solid var(--grid); padding: .4rem 0; }}
  .sources td {{ border: 0; padding: 0; }}
  .sources td:first-child {{ font-weight: 600; text-align: left; }}
  .sources td + td {{ display: flex; justify-content: space-between; }}
  .sources td + td::before {{ content: attr(data-name); color: var(--soft); }}
  .sources td:empty {{ display: none; }}
}}
@page {{ margin: 14mm; }}
@media print {{
  :root {{ font-size: 9.5pt; }}
  body {{ margin: 0; padding: 0; max-width: none; font-size: 1rem; line-height: 1.35; }}
  h2 {{ break-after: avoid; margin-top: 1rem; }}
  td small {{ display: inline; }}
  figure, section.keep, .findings, tr {{ break-inside: avoid; }}
}}
"""


def check_page(path: str | os.PathLike[str]) -> bool:
    """Check that a page can be written at a path: only earlier pages are replaced.

    Returns:
        True if an earlier page is there.

    Raises:
        InvalidArgument: the path is a URL.
        MissingFile: its folder does not exist.
        StorageError: another file is there, it cannot be read, or its folder cannot be written to.
    """
    name = os.fspath(path)
    check_local(name, PAGE_REMEDY)
    folder = os.path.dirname(name) or "."
    if not os.path.isdir(folder):
        raise MissingFile(
            f"{name}: cannot write: the folder {folder} does not exist; {PAGE_REMEDY}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{name}: cannot write: no write access to {folder}; {PAGE_REMEDY}")
    try:
        with as_storage_error(name, "cannot read its status"):
            check_regular(name, os.lstat(name))
            with open(open_at_once(name, follow=False), "rb") as file:
                start = file.read(_START_BYTES)
    except MissingFile:
        return False
    if not (start.startswith(b"<!DOCTYPE html>") and _MARK.encode() in start):
        raise StorageError(
            f"{name}: the file exists and is not a page of megaindex audit, and only such pages "
            f"are replaced; choose another name for the page (--html), or move the file"
        )
    return True


def write_page(
    audit: Audit, path: str | os.PathLike[str], *, command: str = "", date: str = ""
) -> None:
    """Write an audit as one HTML page, atomically; an earlier page at the path is replaced.

    The page depends on the arguments alone, so that equal audits give equal bytes.

    Args:
        audit: result of `megaindex.audit.audit`.
        path: local path of the page.
        command: command line that made the audit, to be shown.
        date: date of the audit, to be shown.

    Raises:
        InvalidArgument: the path is a URL.
        StorageError: another file is at the path, or the page cannot be written.
    """
    name = os.fspath(path)
    overwrite = check_page(name)
    text = page(audit, command=command, date=date).encode("utf-8", "replace")
    write_file(name, lambda file: file.write(text), overwrite=overwrite)


def page(audit: Audit, *, command: str = "", date: str = "") -> str:
    """Return the page as text; as `write_page`."""
    names = ShortNames.of(source.name for source in audit.run.sources)
    counts, colours = source_counts(audit), plots.source_colours(audit)
    parts = (
        f"<h1>Tokens served over training</h1>\n<p>{escape(headline(audit))}.</p>",
        _list("What this run sees", findings(audit), names),
        _list("What to change", suggestions(audit), names, "change"),
        _run(audit, names, command, date),
        _exposure(audit),
        _by_source(audit, counts, colours, names),
        _shares(audit),
        _times(audit),
        _sources(audit, counts, colours, names),
        _repeats(audit),
        _balance(audit),
        "<footer><p>All counts of tokens are exact. The token that a sample reads only as the "
        "label of its last position does not count for that sample. Steps count from 0: trainers "
        "log step k as iteration k + 1. Made by <code>megaindex audit --html</code>.</p></footer>",
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'{_MARK}\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_title(audit, names))}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _title(audit: Audit, names: ShortNames) -> str:
    """Return a title that tells runs apart in tabs, bookmarks and printed headers."""
    run = audit.run
    sources = [names.name(source.name) for source in run.sources]
    text = ", ".join(sources) if len(sources) <= 3 else f"{len(sources):,} sources"
    if len(text) > _MOST_TITLE:
        text = f"…{text[-_MOST_TITLE:]}"
    order = f", order {run.order}" * bool(run.order)
    return f"{text}: {run.num_steps:,} steps{order} – megaindex audit"


def _list(title: str, texts: Sequence[str], names: ShortNames, kind: str = "") -> str:
    items = "".join(f"<li>{escape(names.text(text))}</li>\n" for text in texts)
    items = re.sub("`([^`\n]+)`", r"<code>\1</code>", items)
    return f'<div class="findings {kind}">\n<h2>{title}</h2>\n<ul>\n{items}</ul>\n</div>'


def _run(audit: Audit, names: ShortNames, command: str, date: str) -> str:
    """Return the list of the run's settings."""
    run = audit.run
    sizes = np.unique(np.diff(run.step_bounds)).tolist()
    batch = f"{sizes[-1]:,} samples a step"
    if len(sizes) > 1:
        batch = f"{sizes[0]:,} to {batch}"
    ranks = f", {run.data_parallel_size:,} ranks" if run.data_parallel_size else ""
    micro = f", micro batches of {run.micro_batch_size:,}" if run.micro_batch_size else ""
    sources = ", ".join(names.name(source.name) for source in run.sources)
    settings = {
        "order": run.order,
        **run.settings,
        "sequence_length": run.lengths_text,
        "steps": f"{run.num_steps:,}, of which {run.past_steps:,} are past",
        "batch": batch + micro + ranks,
        "epochs built": f"{run.index.num_epochs:,}",
        "sources": (f"{names.common}: " if names.common else "") + sources,
        "megaindex": megaindex.__version__,
        "date": date,
        "command": command,
    }
    rows = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{_value(name, str(value))}</dd>\n"
        for name, value in settings.items()
        if value != ""
    )
    return f"<section>\n<h2>This run</h2>\n<dl>\n{rows}</dl>\n</section>"


def _value(name: str, value: str) -> str:
    """Return a setting as HTML; of a long one the first words, and all of it when opened."""
    shown = escape(value)
    if name == "command":  # broken between its words alone
        words = " ".join(f"<span>{escape(word)}</span>" for word in value.split(" "))
        shown = f"<code>{words}</code>"
    if len(value) <= _MOST_LETTERS:
        return shown
    start = escape(value[: _MOST_LETTERS // 2])
    return f"<details><summary>{start} …</summary>{shown}</details>"


def _exposure(audit: Audit) -> str:
    past = " The shaded part is past." if audit.run.past_steps else ""
    return _section(
        "Exposure by step",
        plots.exposure_curve(audit),
        "Mean number of times that earlier steps have served the tokens of each step. 0: all "
        "tokens are new. A ramp comes from epochs that are shuffled together, a jump from an epoch "
        "that begins after all others have ended. Dotted lines: the tokens served amount to "
        "1 ×, 2 ×, … the corpus." + past,
    )


def _by_source(
    audit: Audit, counts: Sequence[SourceCounts], colours: dict[int, str], names: ShortNames
) -> str:
    if len(counts) == 1:
        return ""
    only = ""
    if len(counts) > len(colours):
        only = f" Of {len(counts):,} sources, those served most, and most often for their size."
    return _section(
        "Exposure of each source by step",
        plots.exposure_by_source(audit, colours),
        "Mean number of times that earlier steps have served the tokens that a step reads of a "
        f"source. A source repeats from where its line leaves 0.{only}",
        _legend([*colours.values()], [names.name(counts[k].name) for k in colours]),
    )


def _shares(audit: Audit) -> str:
    used = int(np.flatnonzero(audit.exposure.shares.sum(axis=0)).max(initial=0)) + 1
    times = ["first", "second", "third", *(f"{k}th" for k in range(4, SHARES))]
    labels = [*(f"{time} time" for time in times), f"{SHARES}th time or later"]
    return _section(
        "New and repeated tokens",
        plots.exposure_shares(audit),
        "Shares of a step's tokens that are served for the first, the second, … time.",
        _legend(plots.RAMP, labels[:used]),
    )


def _times(audit: Audit) -> str:
    columns, rows = times_seen(audit, _MOST_TIMES, _bar)
    return (
        "<section>\n<h2>Tokens and documents by times seen</h2>\n"
        + _table(["seen", *columns], rows)
        + "<p>A document counts by its most served token. Tokens outside the samples drawn, and "
        "those of an incomplete last sample, are not served.</p>\n</section>"
    )


def _bar(share: float, count: int) -> str:
    text = f"<b>{percent(share)}</b> <small>{count:,}</small>"
    return f'{text}<i style="width: {4 * share:.3f}em"></i>'


def _sources(
    audit: Audit, counts: Sequence[SourceCounts], colours: dict[int, str], names: ShortNames
) -> str:
    if len(counts) == 1:
        return ""
    served, shown = audit.exposure.composition, list(colours)
    drawn, labels = [*colours.values()], [names.name(counts[k].name) for k in shown]
    columns = served[:, shown]
    if rest := len(counts) - len(shown):
        others = served.sum(axis=1) - columns.sum(axis=1)
        columns = np.column_stack((columns, others))
        drawn.append("others")
        labels.append(f"{rest:,} others")
    return _section(
        "Sources by step",
        plots.composition(audit, columns, drawn),
        "Shares of the sources in the tokens of a step. A blend keeps them constant from the first "
        "step to the last. The table lists the tokens of each source by times served.",
        _legend(drawn, labels),
    ) + _table_of_sources(counts, names)


def _table_of_sources(counts: Sequence[SourceCounts], names: ShortNames) -> str:
    """Return the table of the sources; of many the worst, with a sentence and the rest closed."""
    order = sorted(counts, key=lambda source: -source.served)
    if len(counts) > MANY_SOURCES:
        order = worst_sources(counts)
    rows = [
        [escape(names.name(name)), *map(escape, cells)]
        for name, cells in source_rows(order[:_MOST_ROWS])
    ]
    columns = ("source", *SOURCE_COLUMNS)
    notes = [f"Common part of the names: {names.common}."] if names.common else []
    if len(counts) <= MANY_SOURCES:
        return _table(columns, rows, "sources") + _notes(notes)
    first, later = rows[:SHOWN_SOURCES], rows[SHOWN_SOURCES:]
    notes.insert(0, f"{sources_text(counts, names)}.")
    if len(counts) > _MOST_ROWS:
        notes.append(f"--json lists all {len(counts):,} sources.")
    closed = f"<details><summary>{len(later):,} more sources</summary>\n"
    return (
        _table(columns, first, "sources")
        + _notes(notes)
        + f"{closed}{_table(columns, later, 'sources')}</details>\n"
    )


def _notes(texts: Sequence[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>\n" for text in texts)


def _repeats(audit: Audit) -> str:
    title = "Distance between repeats"
    if not audit.exposure.distances.any():
        return f'<section class="keep"><h2>{title}</h2><p>{distance_text(audit)}</p></section>'
    return _section(
        title,
        plots.repeat_distances(audit),
        "Tokens that are served again, by the number of steps since the last time. Small distances "
        "mean that text is repeated soon after it was seen. " + distance_text(audit),
    )


def _balance(audit: Audit) -> str:
    model = audit.balance
    if model is None:
        return ""
    return (
        _section(
            "Waiting for the slowest rank",
            plots.step_time(audit, model),
            f"Time of a step if ranks synchronise after every round of micro batches, by the "
            f"{balance_headline(model)}.",
            _legend(plots.BALANCE, ["in order", "balanced"]),
        )
        + _table(["time lost, synchronised", "in order", "balanced"], lost_rows(model))
        + _section(
            "Rows by work",
            plots.work_of_rows(model),
            f"Shares of rows by their modelled work. {documents_text(model).capitalize()}.",
        )
    )


def _section(title: str, plot: str, caption: str, legend: str = "") -> str:
    return (
        f'<section class="keep">\n<h2>{escape(title)}</h2>\n<figure>\n{legend}{plot}\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n</section>\n"
    )


def _legend(colours: Sequence[str], names: Sequence[str]) -> str:
    items = "".join(
        f'<li><i style="background: var(--{colour})"></i>{escape(name)}</li>'
        for colour, name in zip(colours, names, strict=False)
    )
    return f'<ul class="legend">{items}</ul>\n'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Return a table; cells are HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{escape(name)}">{cell}</td>'
            for name, cell in zip(columns, row, strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<table class="{kind}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n'
        "</table>\n"
    )
