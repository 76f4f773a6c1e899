"""The audit as one HTML page that opens without a network and prints on paper."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from html import escape

from megaindex.audit.render import (
    SOURCE_COLUMNS,
    cut_texts,
    distance_text,
    headline,
    jump_text,
    source_rows,
)
from megaindex.audit.report import Audit, shares
from megaindex.console import percent
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.io.atomic import AtomicFiles
from megaindex.io.os_errors import as_storage_error
from megaindex.io.paths import check_local, check_regular, open_at_once

PAGE_REMEDY = "write the page (--html) to a disk"
_MARK = "<title>megaindex audit</title>"  # of every page since the first, near its beginning
_START_BYTES = 512
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 60rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; border-bottom: 1px solid #ddd; }
.notice { border-left: 4px solid #d55e00; background: #fdf3ec; padding: .5rem .9rem; }
figure { margin: .6rem 0; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: #333; max-width: 52rem; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; border-bottom: 1px solid #e4e4e4; }
th:first-child, td:first-child { text-align: left; }
td:first-child { overflow-wrap: anywhere; }
code { white-space: nowrap; }
footer { margin-top: 2.5rem; color: #555; font-size: .9rem; }
@page { margin: 14mm; }
@media print {
  body { margin: 0; padding: 0; max-width: none; font-size: 10pt; line-height: 1.35; }
  h1, h2 { margin-top: .8rem; }
  figure svg { width: 94%; }
  figure, table, section.keep { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""


def check_plots() -> None:
    """Check that matplotlib can be imported.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument(
            "--html draws with matplotlib, which is not installed: pip install 'megaindex[plots]'"
        )


def check_page(path: str | os.PathLike[str]) -> bool:
    """Refuse a path at which there is anything but an earlier page, which alone is replaced.

    Returns:
        Whether an earlier page is there.

    Raises:
        InvalidArgument: the path is a URL.
        StorageError: something else is there, or it cannot be looked at.
    """
    name = os.fspath(path)
    check_local(name, PAGE_REMEDY)
    try:
        with as_storage_error(name, "cannot look at it"):
            check_regular(name, os.lstat(name))
            with open(open_at_once(name, follow=False), "rb") as file:
                start = file.read(_START_BYTES)
    except MissingFile:
        return False
    if not (start.startswith(b"<!DOCTYPE html>") and _MARK.encode() in start):
        raise StorageError(
            f"{name}: already exists and is not a page of megaindex audit, and only such pages "
            f"are replaced; choose another name for the page (--html), or move that file away"
        )
    return True


def write_page(audit: Audit, path: str | os.PathLike[str]) -> None:
    """Write the page atomically; an earlier page at that path is replaced.

    Raises:
        InvalidArgument: matplotlib is not installed, or the path is a URL.
        StorageError: something else is at the path, or the file cannot be written.
    """
    name = os.fspath(path)
    files = AtomicFiles([name], overwrite=check_page(name))
    text = page(audit)
    try:
        with as_storage_error(name, "cannot write"):
            files.open(name).write(text.encode())
        files.publish()
    finally:
        files.discard()


def page(audit: Audit) -> str:
    """Return the page as text.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    check_plots()
    texts = [*map(jump_text, audit.jumps), *cut_texts(audit)]
    notices = "".join(f'<p class="notice">{escape(text)}</p>' for text in texts)
    sections = (_exposure(audit), _shares(audit), _times(audit), _sources(audit), _repeats(audit))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{_MARK}\n<style>{_CSS}</style>\n</head>\n<body>\n"
        f"<h1>What the model sees, and when</h1>\n<p>{escape(headline(audit))}.</p>\n{notices}\n"
        + "\n".join(sections)
        + f"\n{_footer(audit)}\n</body>\n</html>\n"
    )


def _exposure(audit: Audit) -> str:
    from megaindex.audit.plots import exposure_curve

    past = " The shaded part is past." if audit.stream.past_steps else ""
    return _section(
        "Exposure, step by step",
        exposure_curve(audit),
        "For each step: how often, on average, its tokens have been served by earlier steps. 0: "
        "all tokens are new. A ramp comes from epochs that are shuffled together, a jump from an "
        "epoch that begins after all others have ended. Dotted lines: as many tokens have been "
        "served as the corpus holds, once, twice, …" + past,
    )


def _shares(audit: Audit) -> str:
    from megaindex.audit.plots import exposure_shares

    return _section(
        "New and repeated tokens",
        exposure_shares(audit),
        "The same in parts: which share of a step's tokens is served for the first, the second, … "
        "time. The lightest colour is new text.",
    )


def _times(audit: Audit) -> str:
    from megaindex.audit.plots import times_seen

    columns = ["seen"]
    histograms = []
    for name, counts in audit.moments():
        columns += [f"tokens {name}", f"share {name}", f"documents {name}"]
        tokens = counts.tokens.sum(axis=0)
        histograms += [
            [f"{n:,}" for n in tokens.tolist()],
            [percent(share) for share in shares(tokens)],
            [f"{n:,}" for n in counts.documents_in_part.tolist()],
        ]
    rows = [
        [f"{times}×", *(column[times] if times < len(column) else "" for column in histograms)]
        for times in range(max(map(len, histograms)))
    ]
    return _section(
        "How often tokens and documents are seen",
        times_seen(audit),
        "Share, in percent, of the corpus by the number of times it is served. A document counts "
        "by its most served token. Not served at all: what lies outside the samples drawn, and the "
        "tokens that do not fill a last sample.",
        _table(columns, rows),
    )


def _sources(audit: Audit) -> str:
    if len(audit.stream.sources) == 1:
        return ""
    from megaindex.audit.plots import composition

    rows = [[name, *cells] for name, cells in source_rows(audit)]
    return _section(
        "Sources over time",
        composition(audit),
        "Which share of a step's tokens comes from which source. A blend keeps these shares level "
        "from the first step to the last. The table adds how often each source is served.",
        _table(["source", *SOURCE_COLUMNS], rows),
    )


def _repeats(audit: Audit) -> str:
    title = "Distance between repeats"
    if not audit.exposure.distances.any():
        return f'<section class="keep"><h2>{title}</h2><p>{distance_text(audit)}</p></section>'
    from megaindex.audit.plots import repeat_distances

    return _section(
        title,
        repeat_distances(audit),
        "Tokens that are served again, by the number of steps since the last time. Weight near 0 "
        "means that text comes back while the model still remembers it. " + distance_text(audit),
    )


def _section(title: str, picture: str, caption: str, table: str = "") -> str:
    described = picture.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    return (
        f'<section class="keep">\n<h2>{escape(title)}</h2>\n<figure>\n{described}\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n</section>\n{table}"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def _footer(audit: Audit) -> str:
    names = ", ".join(escape(source.name) for source in audit.stream.sources[:20])
    more = len(audit.stream.sources) - 20
    rest = f" and {more} more" if more > 0 else ""
    return (
        f"<footer><p>Data: {names}{rest}. All counts are exact, token by token; the token that a "
        "sample reads only as the label of its last position is not counted for it. Steps count "
        "from 0. Made by <code>megaindex audit --html</code>.</p></footer>"
    )
