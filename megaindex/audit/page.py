"""The audit as one HTML page without external files, with a style for printing."""

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


def write_page(audit: Audit, path: str | os.PathLike[str]) -> None:
    """Write an audit as one HTML page, atomically; an earlier page at the path is replaced.

    Args:
        audit: result of `megaindex.audit.audit`.
        path: local path of the page.

    Raises:
        InvalidArgument: matplotlib is not installed, or the path is a URL.
        StorageError: another file is at the path, or the page cannot be written.
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
    """Return the page as text; as `write_page`."""
    check_plots()
    texts = [*map(jump_text, audit.jumps), *cut_texts(audit)]
    notices = "".join(f'<p class="notice">{escape(text)}</p>' for text in texts)
    sections = (_exposure(audit), _shares(audit), _times(audit), _sources(audit), _repeats(audit))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{_MARK}\n<style>{_CSS}</style>\n</head>\n<body>\n"
        f"<h1>Tokens served over training</h1>\n<p>{escape(headline(audit))}.</p>\n{notices}\n"
        + "\n".join(sections)
        + f"\n{_footer(audit)}\n</body>\n</html>\n"
    )


def _exposure(audit: Audit) -> str:
    from megaindex.audit.plots import exposure_curve

    past = " The shaded part is past." if audit.stream.past_steps else ""
    return _section(
        "Exposure by step",
        exposure_curve(audit),
        "Mean number of times that earlier steps have served the tokens of each step. 0: all "
        "tokens are new. A ramp comes from epochs that are shuffled together, a jump from an epoch "
        "that begins after all others have ended. Dotted lines: the tokens served amount to "
        "once, twice, … the corpus." + past,
    )


def _shares(audit: Audit) -> str:
    from megaindex.audit.plots import exposure_shares

    return _section(
        "New and repeated tokens",
        exposure_shares(audit),
        "Shares of a step's tokens that are served for the first, the second, … time. The lightest "
        "colour is new text.",
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
        "Tokens and documents by times seen",
        times_seen(audit),
        "Share, in percent, of the corpus by the number of times that it is served. A document "
        "counts by its most served token. Tokens outside the samples drawn, and those of an "
        "incomplete last sample, are not served.",
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
        "Shares of the sources in the tokens of a step. A blend keeps them constant from the first "
        "step to the last. The table lists the tokens of each source by times served.",
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
        "Tokens that are served again, by the number of steps since the last time. Small distances "
        "mean that text is repeated soon after it was seen. " + distance_text(audit),
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
        f"<footer><p>Data: {names}{rest}. All counts of tokens are exact. The token that a sample "
        "reads only as the label of its last position does not count for that sample. Steps count "
        "from 0. Made by <code>megaindex audit --html</code>.</p></footer>"
    )
