"""Tables and text of an audit, its look-ups and comparisons."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from megaindex._types import F64
from megaindex.audit.balance import BalanceModel
from megaindex.audit.diff import Difference, TokenRun
from megaindex.audit.report import (
    Audit,
    SourceCounts,
    cut_texts,
    distance_text,
    headline,
    jump_text,
    skip_texts,
    source_counts,
    times_seen,
)
from megaindex.audit.trace import Origin, Serving
from megaindex.console import (
    FittedTable,
    Prose,
    ShortNames,
    TableColumn,
    print_lines,
    print_view,
    spaced,
)
from megaindex.plan.model import MANY_SOURCES, SHOWN_SOURCES
from megaindex.plan.render import more, repeats_text, unseen_text, worst_first
from megaindex.run.run import Run
from megaindex.validation import percent, shown

SOURCE_COLUMNS = (
    "of tokens served", "unseen", "once", "twice or more", "epochs served", "first repeat"
)  # fmt: skip


def source_rows(sources: Sequence[SourceCounts]) -> Iterator[tuple[str, list[str]]]:
    """Yield each source's name and its cells under `SOURCE_COLUMNS`."""
    for source in sources:
        parts = map(percent, (source.of_served, source.unseen, source.once, source.more))
        repeat = "" if source.first_repeat is None else f"step {source.first_repeat:,}"
        yield source.name, [*parts, f"{source.epochs:.3f}", repeat]


def worst_sources(sources: Sequence[SourceCounts]) -> list[SourceCounts]:
    """Return the sources, those that repeat most first, or those read least if none repeats."""
    repeat = any(source.more > 0 for source in sources)
    return [*worst_first(sources, [source.epochs for source in sources], repeat=repeat)]


def sources_text(sources: Sequence[SourceCounts], names: ShortNames) -> str:
    """Return a sentence on all sources."""
    most = max(sources, key=lambda source: source.epochs)
    repeat = sum(source.more > 0 for source in sources)
    text = repeats_text(repeat, len(sources), names.name(most.name), most.epochs)
    return text + unseen_text({names.name(source.name): source.unseen for source in sources})


_CURVE_WIDTH = 60
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_TIMES = 8
_MOST_ROWS = 200


def audit_view(audit: Audit) -> RenderableType:
    """Return the summary of an audit."""
    names = ShortNames.of(source.name for source in audit.run.sources)
    skips = [Prose(names.text(words), "bold") for words in skip_texts(audit)]
    parts: list[RenderableType] = [Prose(headline(audit), "bold"), *skips]
    parts += [_seen(audit), _Curve(audit)]
    parts += [Prose(jump_text(jump), "yellow") for jump in audit.jumps]
    parts += [Prose(names.text(words), "yellow") for words in cut_texts(audit)]
    if len(audit.run.sources) > 1:
        parts.append(_sources(audit, names))
    parts.append(Prose(distance_text(audit)))
    if audit.balance is not None:
        parts += _balance(audit.balance)
    return spaced(parts)


def print_balance(model: BalanceModel) -> None:
    """Print the modelled work of rows and the time that ranks wait."""
    print_view(spaced(_balance(model)))


def _balance(model: BalanceModel) -> list[RenderableType]:
    return [Prose(balance_headline(model), "bold"), _lost(model), _Work(model)]


def balance_headline(model: BalanceModel) -> str:
    shared = model.cost_model.context_parallel_size
    cost, part = model.cost_model, f"{model.steps_modelled:,} of {model.steps:,} steps"
    return (
        f"modelled work of the {model.rows:,} rows of {part}: {cost.linear:g} a token, "
        f"{cost.attention:g} a squared token of a document; micro batches of "
        f"{model.micro_batch_size} on {model.data_parallel_size} ranks"
        + ("" if shared == 1 else f", each of {shared} that divide every {cost.partition}")
    )


def lost_rows(model: BalanceModel) -> list[list[str]]:
    """Return the cells of the table of lost time: synchronisation, in order, balanced."""
    sides = (("every round", model.by_round), ("every step", model.by_step))
    return [[name, percent(lost.in_order), percent(lost.balanced)] for name, lost in sides]


def _lost(model: BalanceModel) -> RenderableType:
    table = FittedTable(TableColumn("time lost, synchronised", "label"), "in order", "balanced")
    for cells in lost_rows(model):
        table.add_row(*cells)
    return Group(table, Prose(documents_text(model), "dim"))


def documents_text(model: BalanceModel) -> str:
    return (
        f"{model.documents_mean:.1f} documents a sample on average, {model.documents_most:,} at "
        "most, parts included"
    )


@dataclass(frozen=True)
class _Work:
    """Histogram of the rows by work."""

    model: BalanceModel

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        model = self.model
        yield Prose("rows by work, in multiples of the mean", "bold")
        heads = [f"{low} … {high}" for low, high in pairwise(_distinct(model.work_bounds.tolist()))]
        wide, most = max(map(len, heads)), int(model.work_rows.max())
        count = len(f"{most:,}")
        room = max(1, min(_CURVE_WIDTH, options.max_width - wide - count - 2))
        for head, rows in zip(heads, model.work_rows.tolist(), strict=True):
            bar = "█" * (-(-rows * room // most))
            yield Text.assemble(f"{head:>{wide}} {rows:>{count},} ", (bar, "cyan"))


def _distinct(numbers: Sequence[float]) -> list[str]:
    """Return the numbers with two decimals, or as many as tell them apart."""
    texts = ([f"{number:.{digits}f}" for number in numbers] for digits in range(2, 18))
    return next(each for each in texts if len(set(each)) == len(numbers))


def print_origins(run: Run, found: Sequence[Origin], total: int) -> None:
    """Print the first of ``total`` spans with their rows, as a table or, with text, one by one."""
    paths = dict.fromkeys(_near(origin.file) for origin in found if origin.file is not None)
    files = ShortNames.of(paths)
    if len(paths) == 1:
        (path,) = paths
        folder, slash, name = path.rpartition("/")
        files = ShortNames(f"{folder}{slash}*" if folder else "", {path: name})
    if found and found[0].text is not None:
        print_lines(line for origin in found for line in _text_lines(run, origin))
    else:
        note = [Prose(f"files: {files.common}", "dim")] if files.common else []
        print_view(Group(_origin_table(run, found, files), *note))
    if total > len(found):
        print_lines([f"{total - len(found):,} more spans; --json lists all"])


def _near(path: str) -> str:
    """Return a path relative to the working directory, if it lies in it."""
    return path.removeprefix(f"{os.getcwd()}/")


def _origin_table(run: Run, found: Sequence[Origin], files: ShortNames) -> RenderableType:
    ranks = any(origin.serving.rank is not None for origin in found)
    many = len(run.sources) > 1
    sources = ShortNames.of(source.name for source in run.sources)
    names = ["step", *["rank"] * ranks, "sample", "document", "tokens", "row"]
    name_columns = [TableColumn("source", "name")] * many + [TableColumn("file", "name")]
    table = FittedTable(*names, *name_columns)
    for origin in found:
        serving = origin.serving
        table.add_row(
            str(serving.step),
            *[str(serving.rank)] * ranks,
            str(serving.sample),
            str(serving.document),
            _token_range(serving),
            "–" if origin.row is None else f"{origin.row_name} {origin.row}",
            *[sources.name(run.sources[serving.source].name)] * many,
            "unknown" if origin.file is None else files.name(_near(origin.file)),
        )
    return table


def _token_range(serving: Serving) -> str:
    return f"{serving.offset} … {serving.offset + serving.length - 1}"


def _text_lines(run: Run, origin: Origin) -> Iterator[str]:
    serving = origin.serving
    source = f"{run.sources[serving.source].name}, " if len(run.sources) > 1 else ""
    place = "of unknown origin"
    if origin.file is not None:
        place = f"{_near(origin.file)}, {origin.row_name} {origin.row}"
    rank = "" if serving.rank is None else f"rank {serving.rank}, "
    yield (
        f"step {serving.step}, {rank}sample {serving.sample}, {source}document {serving.document}, "
        f"tokens {_token_range(serving)}:"
    )
    yield f"  {place}"
    for line in (origin.text or "").splitlines():
        yield f"  | {line}"


def print_servings(run: Run, found: Sequence[Serving]) -> None:
    """Print a look-up as a table."""
    many = len(run.sources) > 1
    names = ShortNames.of(source.name for source in run.sources)
    columns = ("step", "rank", "micro batch", "sample", "document", "tokens")
    table = FittedTable(*columns, *[TableColumn("source", "name")] * many)
    for s in found[:_MOST_ROWS]:
        numbers = (s.step, s.rank, s.micro_batch, s.sample, s.document)
        cells = ["–" if number is None else str(number) for number in numbers]
        table.add_row(*cells, _token_range(s), *[names.name(run.sources[s.source].name)] * many)
    rest = len(found) - _MOST_ROWS
    view: RenderableType = Group(table, *(names.note() if many else []))
    if not found:
        view = Prose("not served in any step of this run")
    elif rest > 0:
        view = Group(view, Prose(f"{rest} more; --json lists all"))
    print_view(view)


def _seen(audit: Audit) -> RenderableType:
    """Return the table of shares by times seen, after the past steps and after all."""
    names, rows = times_seen(audit, _MOST_TIMES, lambda share, _: percent(share))
    table = FittedTable(TableColumn("seen", "label"), *names)
    for row in rows:
        table.add_row(*row)
    return Group(table, Prose("a document counts by its most served token", "dim"))


@dataclass(frozen=True)
class _Curve:
    """Bars of the mean earlier exposures over steps, as wide as fits."""

    audit: Audit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        exposure, last = self.audit.exposure.curve(), self.audit.run.num_steps - 1
        highest = f"  highest {float(exposure.max()):.2f}"
        width = max(1, min(_CURVE_WIDTH, options.max_width - len(highest)))
        curve = _resampled(exposure, width)
        most = float(curve.max())
        level = (
            np.ceil(curve / most * (len(_BARS) - 1)).astype(int) if most > 0 else curve.astype(int)
        )
        bars = "".join(_BARS[k] for k in level)
        yield Prose("mean earlier exposures of the tokens of a step", "bold")
        yield Text(bars + highest, "cyan")
        yield Text(f"step 0 {' ' * (len(bars) - 12)} step {last}", "dim")


def _resampled(curve: F64, width: int) -> F64:
    starts = np.unique(np.linspace(0, curve.size, width, endpoint=False).astype(np.int64))
    sums = np.add.reduceat(curve, starts)
    return np.asarray(sums / np.diff(starts, append=curve.size), np.float64)


def _sources(audit: Audit, names: ShortNames) -> RenderableType:
    """Return the table of the sources; of many the worst, and a sentence on all."""
    table = FittedTable(TableColumn("source", "name"), *SOURCE_COLUMNS)
    counts, notes = source_counts(audit), names.note()
    shown: Sequence[SourceCounts] = counts
    if len(counts) > MANY_SOURCES:
        shown = worst_sources(counts)[:SHOWN_SOURCES]
        notes = [*more(len(counts) - len(shown)), *notes, Prose(sources_text(counts, names))]
    for name, cells in source_rows(shown):
        table.add_row(names.name(name), *cells)
    return Group(table, *notes)


_MOST_RUNS = 6


def print_difference(difference: Difference) -> None:
    """Print the result of a comparison: its relation, the first difference and the causes."""
    a, b = difference.names
    text = [f"A  {a}", f"B  {b}", "", _verdict(difference), *_identities(difference)]
    if difference.samples is not None:
        text += ["", f"first difference: sample {difference.first_difference:,}"]
        many = difference.num_sources > 1
        for side, runs in zip("AB", difference.samples, strict=True):
            text += [f"  {side}  {line}" for line in _runs(runs, many)]
    if difference.causes:
        equal = "settings that differ, without effect on the order:"
        text += ["", equal if difference.equal else "cause:"]
    for cause in difference.causes:
        a, b = (shown(each) if isinstance(each, list) else each for each in (cause.a, cause.b))
        values = f"{cause.setting}: {a} and {b}: " if cause.setting else ""
        text.append(f"  {values}{cause.words}")
    print_lines(text)


def _identities(difference: Difference) -> list[str]:
    """Return the line with the identities of two locks; of other sides none."""
    a, b = difference.identities
    if a is None or b is None:
        return []
    if a == b:
        return [f"identity: {a} in both, with the same steps, masks and evaluation"]
    same = "; their steps, masks or evaluation may differ" if difference.equal else ""
    return [f"identity: {a} in A, {b} in B{same}"]


def _verdict(difference: Difference) -> str:
    count_a, count_b = difference.num_samples
    compared = min(count_a, count_b)
    if difference.equal:
        others = {cause.setting for cause in difference.causes}
        loss = "; the loss differs, see mask" if "mask" in others else ""
        if "removal" in others:
            loss += "; inputs and loss differ, see removal"
        return f"equal: {count_a:,} samples, the same in every position{loss}; tokens not compared"
    if difference.relation == "prefix":
        longer = "A" if count_a > count_b else "B"
        return (
            f"{longer} continues the other: the first {compared:,} samples are the same, "
            f"{longer} has {abs(count_a - count_b):,} more"
        )
    share = percent(difference.positions_differing / compared)
    where = f"{difference.positions_differing:,} of {compared:,} positions differ ({share})"
    if difference.relation == "reordered":
        return f"the same {count_a:,} samples in another order: {where}"
    common = difference.samples_in_common
    if common == compared:
        shorter, longer = ("A", "B") if count_a < count_b else ("B", "A")
        return f"all {compared:,} samples of {shorter} are in {longer}, at other places: {where}"
    return (
        f"other samples: {where}; {common:,} samples are in both (A has {count_a:,}, B {count_b:,})"
    )


def _runs(runs: Sequence[TokenRun], many: bool) -> list[str]:
    found = []
    for each in runs[:_MOST_RUNS]:
        end = "its end" if each.length is None else f"{each.offset + each.length - 1}"
        source = f"source {each.source}, " if many else ""
        found.append(f"{source}document {each.document}, tokens {each.offset} … {end}")
    rest = len(runs) - _MOST_RUNS
    return [*found, f"and {rest} more"] if rest > 0 else found
