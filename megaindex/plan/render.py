"""Tables and notes of a printed plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaindex.console import (
    FittedTable,
    Prose,
    ShortNames,
    TableColumn,
    answer_panel,
    spaced,
    warning,
)
from megaindex.index.frameworks import framework_rules
from megaindex.plan.model import (
    MANY_SOURCES,
    SHOWN_SOURCES,
    BlockFacts,
    PackingFacts,
    Plan,
    PlannedPast,
    RecipePlan,
    Row,
    SettingsPlan,
    SourceTotal,
    StageDraw,
    epochs_text,
    listed,
    sizes_text,
)
from megaindex.plan.subsets import SourceSubset
from megaindex.settings.settings import adapter_call
from megaindex.validation import count_of, percent

_SHOWN_TIMES = 4
_ORDINALS = {2: "a second", 3: "a third"}
_ALWAYS_REPEATS = "no number of iterations runs without a repeated sample"
_METHODS = {"closed-form": "exact", "built": "exact, counted", "expected": "expected"}


def run_view(plan: Plan) -> RenderableType:
    """Return all parts of the printed plan of a decided run."""
    names = ShortNames.of(row.path for row in plan.datasets)
    tokens = f", {plan.tokens_consumed:,} tokens" if plan.tokens_consumed is not None else ""
    asked = Text(f"a decided run in order {plan.order}, {plan.sequence_length} tokens a sample")
    answer = Text.assemble("train_iters ", (str(plan.train_iters), "bold green"))
    total = Text(f"{plan.samples_consumed:,} samples{tokens}")
    lines = [Text(f"skip: {line}") for line in (plan.skip.lines() if plan.skip else ())]
    parts: list[RenderableType] = [answer_panel(asked, Text(), answer, total, *lines)]
    rows = shown_rows(plan)
    parts.append(_sources(plan, rows, names))
    if (coverage := coverage_table(plan, rows, names)) is not None:
        parts.append(coverage)
    if plan.subsets:
        parts.append(_subsets(plan.subsets))
    return spaced(parts)


def plan_view(plan: SettingsPlan) -> RenderableType:
    """Return all parts of the printed plan."""
    names = ShortNames.of(row.path for row in plan.datasets)
    rows = shown_rows(plan)
    parts: list[RenderableType] = [_answer(plan, names), _totals(plan), _sources(plan, rows, names)]
    if plan.subsets:
        parts.append(_subsets(plan.subsets))
    parts += [
        view for view in (coverage_table(plan, rows, names), _facts(plan)) if view is not None
    ]
    parts += [warning(names.text(text)) for text in plan.warnings]
    return spaced(parts)


def _answer(plan: SettingsPlan, names: ShortNames) -> RenderableType:
    asked = Text.assemble(
        (plan.target, "bold"),
        f" in order {plan.order} of {plan.framework}, {plan.sequence_length} tokens a sample, "
        f"{_batch(plan)} samples an iteration",
    )
    if plan.caution:
        asked = Text("\n").join([Text(plan.caution, "bold yellow"), asked])
    answer = Text.assemble("train_iters ", (str(plan.train_iters), "bold green"))
    if plan.consumed_samples:
        answer.append(f" more, from sample {plan.consumed_samples:,} on")
    return answer_panel(asked, Text(), answer, *_limits(plan, names))


def _batch(plan: SettingsPlan) -> str:
    sizes = [str(size) for _, size in plan.batch_schedule]
    if len(sizes) > 4:
        sizes = [*sizes[:2], "…", sizes[-1]]
    return " → ".join(sizes)


def _limits(plan: SettingsPlan, names: ShortNames) -> list[Text]:
    """Return ``8063 stays in one epoch, 8064 begins a second``, and the last without repeats."""
    lines = []
    last, exact = plan.max_train_iters_without_repeat, plan.max_train_iters_with_exact_buffer
    if last != plan.max_train_iters_same_epochs or exact is not None:
        text = _without_repeat(plan, last, exact)
        lines.append(Text(text or _ALWAYS_REPEATS))
    effect = plan.buffer_effect
    open_ = plan.order == "neox" and plan.evaluation is None and plan.variance_buffer == 1.0
    if open_ and effect is not None:  # the data may be data_path or train_data_paths
        text = _without_repeat(plan, effect.max_train_iters_without_repeat, last)
        lines.append(Text(f"of train_data_paths, whose buffer is 1.005, {text}"))
    if len(plan.neighbours) == 2:
        within, beyond = plan.neighbours
        stays = " builds no further epoch, "
        begins = f" begins another of {names.cut(beyond.begins)}"
        if within.num_epochs_built < beyond.num_epochs_built:
            stays = f" stays in {epochs_text(within.num_epochs_built)}, "
            number = beyond.num_epochs_built
            begins = f" begins {_ORDINALS.get(number, f'epoch {number}')}"
        if not beyond.begins:
            begins = " runs out of samples"
        built = f": {beyond.samples_built:,} samples built"
        last_one, next_one = (str(n.train_iters) for n in plan.neighbours)
        lines.append(Text.assemble((last_one, "bold"), stays, (next_one, "bold"), begins, built))
    return lines


def _without_repeat(plan: SettingsPlan, last: int, exact: int | None) -> str:
    """Return the most iterations that repeat no sample, and those under an exact buffer."""
    texts = [without_repeat(last)] * bool(last)
    if exact is not None and exact > last:
        texts.append(f"{exact} with {adapter_call(plan.order, {'variance_buffer': 'exact'})}")
    return ", or ".join(texts)


def without_repeat(last: int) -> str:
    """Return the sentence on the most iterations that repeat no sample."""
    return f"up to {last} iterations repeat no sample" if last else _ALWAYS_REPEATS


def _totals(plan: SettingsPlan) -> RenderableType:
    table = FittedTable(TableColumn("train", "label"), "samples", "tokens")
    length = plan.sequence_length
    rows: list[tuple[str, int | None, int | None]] = [
        ("one epoch", plan.samples_per_epoch, plan.tokens_per_epoch),
        ("consumed", plan.samples_consumed, plan.tokens_consumed),
        ("left over", plan.samples_left_over, plan.tokens_left_over),
    ]
    if plan.consumed_samples:
        rows.insert(1, ("before this run", plan.consumed_samples, plan.consumed_samples * length))
    epochs = plan.num_epochs_built
    built = "built" if epochs is None else f"built, {epochs_text(epochs)}"
    for name, samples, tokens in (*rows, (built, plan.samples_built, None)):
        table.add_row(name, _number(samples), "" if tokens is None else _number(tokens))
    return table


def shown_rows(plan: Plan) -> Sequence[Row]:
    """Return the rows; of many, those of training that repeat most, or are drawn least."""
    if len(plan.datasets) <= MANY_SOURCES:
        return plan.datasets
    train = plan.rows("train")
    epochs = _epochs_drawn(train, plan.sequence_length)
    return worst_first(train, epochs, repeat=any(map(_repeats, train)))[:SHOWN_SOURCES]


AnyRow = TypeVar("AnyRow")


def worst_first(
    rows: Sequence[AnyRow], epochs: Sequence[float], *, repeat: bool
) -> Sequence[AnyRow]:
    """Return sources by how often they are read: most often first, or least if none repeats.

    Args:
        epochs: epochs of each source that are read.
        repeat: some source repeats.
    """
    sign = -1 if repeat else 1
    order = sorted(range(len(rows)), key=lambda number: (sign * epochs[number], number))
    return [rows[number] for number in order]


def _epochs_drawn(rows: Sequence[Row], sequence_length: int) -> list[float]:
    """Return the epochs of each source that are drawn, or may be."""
    return [
        (row.drawn_bounds[1] if row.drawn is None else row.drawn)
        / (row.samples_per_epoch or max(1, row.tokens_per_epoch or 1) / sequence_length)
        for row in rows
    ]


def _repeats(row: Row) -> bool:
    """Return True for a source of which it is certain that samples are drawn again."""
    if row.repeated is not None:
        return row.repeated > 0
    return row.samples_per_epoch is not None and row.drawn_bounds[0] > row.samples_per_epoch


def _of_all(plan: Plan, names: ShortNames) -> Iterator[str]:
    """Yield a sentence on all sources of each split."""
    splits: dict[str, list[Row]] = {}
    for row in plan.datasets:
        splits.setdefault(_split(row), []).append(row)
    for split, rows in splits.items():
        epochs = _epochs_drawn(rows, plan.sequence_length)
        most = names.name(rows[epochs.index(max(epochs))].name)
        repeats = sum(map(_repeats, rows))
        least = any(row.repeated is None for row in rows)
        text = repeats_text(repeats, len(rows), most, max(epochs), least=least)
        unseen = {
            names.name(row.name): row.coverage.tokens[0] for row in rows if row.coverage.tokens
        }
        yield f"{split}: {text}{unseen_text(unseen)}"


def repeats_text(number: int, count: int, most: str, epochs: float, *, least: bool = False) -> str:
    """Return how many of the sources repeat, and which is read most often."""
    found = f"{'at least ' * least}{number:,}" if number or least else "none"
    return f"{found} of {count:,} sources repeat, at most {epochs:,.2f} epochs are drawn ({most})"


def unseen_text(shares: Mapping[str, float]) -> str:
    """Return of how many sources some tokens stay unseen, and the largest share; or nothing."""
    unseen = {name: share for name, share in shares.items() if share > 0}
    if not unseen:
        return ""
    name = max(unseen, key=unseen.__getitem__)
    share = _percent(unseen[name])
    return f"; of {len(unseen):,} some tokens stay unseen, at most {share} ({name})"


def _sources(plan: Plan, rows: Sequence[Row], names: ShortNames) -> RenderableType:
    weighted = any(row.weight is not None for row in plan.datasets)
    columns = ["weight"] * weighted
    columns += ["per epoch", "requested", "drawn", "built", "epochs", "repeated"]
    table = FittedTable(TableColumn("split", "label"), TableColumn("source", "name"), *columns)
    for row in rows:
        numbers = (row.samples_per_epoch, row.requested, row.drawn)
        cells = [_number(n) for n in (*numbers, row.built, row.epochs, row.repeated)]
        if row.drawn is None:
            cells[2] = f"{row.drawn_bounds[0]:,}…{row.drawn_bounds[1]:,}"
        weight = [_weight(row.weight)] * weighted
        table.add_row(_split(row), names.name(row.name), *weight, *cells)
    left = len(plan.datasets) - len(rows)
    sentences = [Prose(text) for text in _of_all(plan, names)] if left else []
    return Group(table, *more(left), *names.note(), *sentences)


def coverage_table(plan: Plan, rows: Sequence[Row], names: ShortNames) -> RenderableType | None:
    """Return the table of tokens, and of documents where they were counted, by times seen."""
    lines = [
        (row, kind, shares)
        for row in rows
        for kind, shares in (
            ("tokens", row.coverage.tokens),
            ("documents", row.coverage.documents if row.split == "train" else ()),
        )
        if shares
    ]
    if not lines:
        return None
    times = max(len(shares) for _, _, shares in lines)
    heads = [f"{k}×" for k in range(min(times, _SHOWN_TIMES))]
    heads += [f"≥{_SHOWN_TIMES}×"] * (times > _SHOWN_TIMES)
    table = FittedTable(
        TableColumn("seen in", "label"),
        TableColumn("source", "name"),
        TableColumn("share of", "label"),
        *heads,
        TableColumn("method", "note"),
    )
    for row, kind, shares in lines:
        cells = [_percent(share) for share in shares[:_SHOWN_TIMES]]
        if rest := shares[_SHOWN_TIMES:]:
            cells.append(_percent(sum(rest)))
        cells += [""] * (len(heads) - len(cells))
        method = _METHODS[row.coverage.method]
        table.add_row(_split(row), names.name(row.name), kind, *cells, method)
    return Group(table, *more(len(plan.datasets) - len(rows)))


def more(count: int) -> list[RenderableType]:
    """Return a line on the rows that are left out."""
    return [Prose(f"… and {count:,} more; --json lists all")] if count else []


def _split(row: Row) -> str:
    if row.stage:
        return row.stage
    return row.split if row.phase is None else f"{row.split}, phase {row.phase}"


def _weight(weight: float | None) -> str:
    if weight is None:
        return ""
    return f"{int(weight):,}" if weight >= 1000 and weight == int(weight) else f"{weight:g}"


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _percent(share: float) -> str:
    return percent(share).replace("%", " %")


def _facts(plan: SettingsPlan) -> RenderableType | None:
    train = plan.rows("train")
    packed = packing_texts(
        ("packing" if len(train) == 1 else f"source {row.source}", row.packing) for row in train
    )
    return facts_view([*packed, *_tail_facts(plan), *_buffer_fact(plan), *_run_facts(plan)])


def facts_view(facts: Sequence[tuple[str, str]]) -> RenderableType | None:
    """Return a grid of names and texts; None without facts."""
    if not facts:
        return None
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in facts:
        grid.add_row(name, text)
    return grid


def packing_texts(sources: Iterable[tuple[str, PackingFacts | None]]) -> list[tuple[str, str]]:
    """Return the facts about each source in order packed, by its name, as text."""
    packed = [(name, packing) for name, packing in sources if packing is not None]
    listed = packed
    if len(packed) > MANY_SOURCES:
        listed = sorted(packed, key=lambda source: source[1].fill)[:SHOWN_SOURCES]
    facts = []
    for name, packing in listed:
        text = (
            f"fill {_percent(packing.fill)}, {packing.padding:,} positions of padding an epoch; "
            f"{packing.pieces_per_sample:.1f} documents a sample, at most {packing.most_pieces} of "
            f"{packing.max_documents}, the shortest {_percent(packing.likeness)} as long as the "
            f"longest; {_percent(packing.rare_tokens)} of the tokens are in pieces whose length at "
            "most one other has, which epochs mix least"
        )
        if packing.long_documents:
            text += f"; {packing.long_documents:,} documents are longer than a sample"
        if packing.cut_tokens:
            text += f", {packing.cut_tokens:,} of their tokens are in none"
        facts.append((name, text))
    if left := len(packed) - len(listed):
        facts.append(("", f"… and {left:,} with more fill; --json lists all"))
    return facts


def _tail_facts(plan: SettingsPlan) -> list[tuple[str, str]]:
    facts = []
    for tail in plan.tails:
        ranks = "one rank" if tail.ranks_masked == 1 else f"{tail.ranks_masked} ranks"
        cost = {
            "drop": f"leaves {count_of(tail.samples_dropped, 'sample')} unseen",
            "pad": f"masks the loss of {count_of(tail.samples_masked, 'sample')}"
            + f", all of {ranks}" * (tail.ranks_masked > 0),
            "wrap": f"repeats {count_of(tail.samples_repeated, 'sample')}",
        }[tail.policy]
        chosen = ", as planned" if tail.policy == plan.tail else ""
        facts.append((f"tail {tail.policy}", f"{tail.train_iters} iterations, {cost}{chosen}"))
    return facts


def _buffer_fact(plan: SettingsPlan) -> list[tuple[str, str]]:
    effect = plan.buffer_effect
    if effect is None or plan.order == "neox" or not framework_rules(plan.order).is_framework:
        return []
    short = f"; too small for {len(effect.short)} sources" if effect.short else ""
    text = (
        f"would build {epochs_text(effect.num_epochs_built)} ({effect.samples_built:,} samples); "
        f"up to {effect.max_train_iters_without_repeat} iterations repeat no sample{short}"
    )
    return [(f"buffer {effect.variance_buffer}", text)]


def _run_facts(plan: SettingsPlan) -> list[tuple[str, str]]:
    facts = []
    if (evaluation := plan.evaluation) is not None:
        rounds, test = count_of(evaluation.rounds_run, "round"), f"{evaluation.test_samples:,}"
        read = count_of(evaluation.valid_samples_read, "validation sample")
        texts = [f"{rounds} draw{'s' * (evaluation.rounds_run == 1)} {read}"]
        tested = f"the test draws {test}"
        if evaluation.full:
            steps = ", ".join(f"{count:,}" for count in evaluation.iterations)
            held = f"{evaluation.valid_samples:,} validation samples"
            texts = [f"{rounds} of {steps} iterations read all {held}"]
            tested = f"the test is built for {test}"
        has = {row.split for row in plan.datasets if row.tokens_per_epoch}
        texts = texts * ("valid" in has) + [tested] * ("test" in has)
        facts.append(("evaluation", ", ".join(texts) or "no data"))
    if plan.skip is not None:
        facts += [("skip" * (not number), line) for number, line in enumerate(plan.skip.lines())]
    if plan.ignored_settings:
        facts.append(("ignored", ", ".join(plan.ignored_settings)))
    if (ranks := plan.ranks) is not None:
        text = f"{ranks.samples_per_rank:,} samples on each of {ranks.data_parallel_size} ranks"
        facts.append(("data parallel", text))
    for number, phase in enumerate(plan.phases, 1):
        text = (
            f"iterations {phase.begin} to {phase.end}, {phase.samples:,} samples from "
            f"{phase.first_sample:,} on"
        )
        facts.append((f"phase {number}", text))
    return facts


def recipe_view(plan: RecipePlan) -> RenderableType:
    parts: list[RenderableType] = [_recipe_answer(plan)]
    if plan.past is not None:
        parts.append(_past_table(plan.past))
    parts += [_stages(plan), _source_totals(plan)]
    if plan.subsets:
        parts.append(_subsets(plan.subsets))
    rows = plan.datasets if len(plan.sources) <= MANY_SOURCES else shown_rows(plan)
    if (coverage := coverage_table(plan, rows, ShortNames("", {}))) is not None:
        parts.append(coverage)
    if any(source.blocks is not None for source in plan.sources):
        parts.append(_blocks(plan))
    if plan.mix_bounds:
        parts.append(_bounds(plan))
    packed = packing_texts((source.source, source.packing) for source in plan.sources)
    if (facts := facts_view(packed)) is not None:
        parts.append(facts)
    return spaced([*parts, *map(warning, plan.warnings)])


def _recipe_answer(plan: RecipePlan) -> RenderableType:
    sizes = " → ".join(
        sizes_text([size] if isinstance(size, int) else size.values())
        for _, size in plan.batch_schedule
    )
    stages = len({draw.stage for draw in plan.draws})
    several = dict.fromkeys(steps.sequence_length for steps in plan.steps)
    lengths = " → ".join(map(str, several or [plan.sequence_length]))
    lines: list[str | Text] = [
        f"{count_of(stages, 'stage')} of {count_of(len(plan.sources), 'source')}, "
        f"{lengths} tokens a sample, {sizes} samples an iteration",
        "",
        Text.assemble("train_iters ", (str(plan.train_iters), "bold green")),
    ]
    if plan.past is not None:
        steps = plan.train_iters - plan.past.steps
        lines.append(f"{plan.past.steps:,} of them in another system, then {steps:,} here")
    lines.append(f"{plan.samples_consumed:,} samples, {plan.tokens_consumed:,} tokens")
    if plan.samples_per_rank is not None:
        lines.append(f"every rank reads {plan.samples_per_rank:,} samples")
    if plan.samples_masked:
        lines.append(f"{_rows(plan.samples_masked)} of the last batch masked")
    if plan.max_train_iters_without_repeat is not None:
        lines.append(without_repeat(plan.max_train_iters_without_repeat))
    if plan.skip is not None:
        lines += [f"skip: {line}" for line in plan.skip.lines()]
    if (mix := plan.mix_changes) is not None:
        when = f"changed {mix.changes:,} times, at steps {mix.first_step:,} … {mix.last_step:,}"
        lines.append(f"mix: {when if mix.changes > 1 else f'changed at step {mix.first_step:,}'}")
    if (rest := plan.remaining) is not None:
        counts = [f"{count:,} {name}" for name, count in rest.sources.items() if count]
        left = f", {listed(counts)}" * bool(counts)
        lines.append(
            f"at step {rest.first_step:,}: {rest.samples:,} samples in {rest.steps:,} steps "
            f"left{left}"
        )
    if plan.evaluation_rounds:
        masked = plan.evaluation_masked
        lines.append(
            f"{plan.evaluation_rounds} × evaluation on {plan.evaluation_samples:,} of "
            f"{plan.evaluation_available:,} samples, each once, in {plan.evaluation_batches:,} "
            f"batch{'es' * (plan.evaluation_batches != 1)}"
            + (f", {_rows(masked)} masked" if masked else "")
        )
    return answer_panel(*(Text(line) if isinstance(line, str) else line for line in lines))


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _past_table(past: PlannedPast) -> RenderableType:
    table = FittedTable(
        TableColumn("past", "name"),
        TableColumn("given", "label"),
        *("read", "epochs"),
        TableColumn("assumed", "label"),
        "expected repeats",
    )
    rows = past.sources
    if len(rows) > MANY_SOURCES:
        rows = tuple(sorted(rows, key=lambda row: -row.expected_repeats)[:SHOWN_SOURCES])
    for row in rows:
        table.add_row(
            row.source,
            row.given,
            f"{row.samples:,}",
            f"{row.epochs:.2f}",
            row.assumed or "nothing",
            f"{row.expected_repeats:,} of {row.drawn:,}" if row.assumed else "",
        )
    return Group(table, *more(len(past.sources) - len(rows)))


def _stages(plan: RecipePlan) -> RenderableType:
    sized = any(draw.batch_size for draw in plan.draws)
    table = FittedTable(
        TableColumn("stage", "name"),
        TableColumn("steps", "label"),
        TableColumn("source", "name"),
        *["batch"] * sized,
        *("samples", "share", "epochs", "first repeat"),
    )
    before: tuple[str, int] | None = None
    for draw in plan.draws if len(plan.sources) <= MANY_SOURCES else _of_stages(plan.draws):
        opening = (draw.stage, draw.first_step)
        shown = opening != before
        table.add_row(
            draw.stage if shown else "",
            f"{draw.first_step:,} … {draw.end_step - 1:,}" if shown else "",
            draw.source,
            *["" if draw.batch_size is None else f"{draw.batch_size:,}"] * sized,
            f"{draw.samples:,}",
            f"{100 * draw.share:.1f} %",
            f"{draw.epochs_begin:.2f} → {draw.epochs_end:.2f}",
            "" if draw.first_repeat is None else f"step {draw.first_repeat:,}",
        )
        before = opening
    return table


def _of_stages(draws: Sequence[StageDraw]) -> Iterator[StageDraw]:
    """Yield for each stage of more than a few sources one draw that stands for all."""
    for _, stage in groupby(draws, key=lambda draw: (draw.stage, draw.first_step)):
        each = list(stage)
        if len(each) <= SHOWN_SOURCES:
            yield from each
            continue
        repeats = [draw.first_repeat for draw in each if draw.first_repeat is not None]
        yield replace(
            each[0],
            source=f"{len(each):,} sources",
            samples=sum(draw.samples for draw in each),
            share=sum(draw.share for draw in each),
            epochs_begin=max(draw.epochs_begin for draw in each),
            epochs_end=max(draw.epochs_end for draw in each),
            first_repeat=min(repeats, default=None),
            batch_size=None,
        )


def _bounds(plan: RecipePlan) -> RenderableType:
    table = FittedTable(
        TableColumn("any mix", "name"), *("least share", "most", "can repeat from", "as planned")
    )
    rows = plan.mix_bounds
    if len(rows) > MANY_SOURCES:
        last = plan.train_iters
        soon = sorted(rows, key=lambda row: last if row.first_step is None else row.first_step)
        rows = tuple(soon[:SHOWN_SOURCES])
    for row in rows:
        steps = (
            "not in this run" if step is None else f"step {step:,}"
            for step in (row.first_step, row.planned_step)
        )
        table.add_row(row.source, f"{100 * row.least:.4g} %", f"{100 * row.most:.4g} %", *steps)
    return Group(table, *more(len(plan.mix_bounds) - len(rows)))


def _source_totals(plan: RecipePlan) -> RenderableType:
    cut = any(source.cut_tokens for source in plan.sources)
    names = ["tokens an epoch", "samples an epoch", "drawn", "epochs", "never drawn"]
    names += ["tokens cut"] * cut
    table = FittedTable(TableColumn("source", "name"), TableColumn("kind", "label"), *names)
    shown: Sequence[SourceTotal] = plan.sources
    if len(plan.sources) > MANY_SOURCES:
        epochs = [source.epochs for source in shown]
        shown = worst_first(shown, epochs, repeat=bool(_repeating(plan)))[:SHOWN_SOURCES]
    for source in shown:
        table.add_row(
            source.source,
            source.kind,
            f"{source.tokens_per_epoch:,}",
            f"{source.samples_per_epoch:,}",
            f"{source.drawn:,}",
            f"{source.epochs:.2f}",
            f"{source.unseen:,}",
            *([f"{source.cut_tokens:,}"] * cut),
        )
    left = len(plan.sources) - len(shown)
    return Group(table, *more(left), *[Prose(_of_all_totals(plan))] * bool(left))


def _repeating(plan: RecipePlan) -> set[str]:
    return {draw.source for draw in plan.draws if draw.first_repeat is not None}


def _of_all_totals(plan: RecipePlan) -> str:
    """Return a sentence on all sources."""
    repeat = _repeating(plan)
    most = max(plan.sources, key=lambda source: source.epochs)
    text = repeats_text(len(repeat), len(plan.sources), most.source, most.epochs)
    unseen = sum(source.unseen > 0 for source in plan.sources)
    return text + f"; of {unseen:,} some samples are never drawn" * bool(unseen)


def _blocks(plan: RecipePlan) -> RenderableType:
    """Return the table of the first epoch of the sources in order blocks."""
    table = FittedTable(
        TableColumn("first epoch", "name"),
        *("blocks", "tokens a block", "served", "dropped", "deferred", "not read"),
    )
    rows = [(source, source.blocks) for source in plan.sources if source.blocks is not None]
    shown: Sequence[tuple[SourceTotal, BlockFacts]] = rows
    if len(rows) > MANY_SOURCES:
        epochs = [source.epochs for source, _ in rows]
        shown = worst_first(rows, epochs, repeat=bool(_repeating(plan)))[:SHOWN_SOURCES]
    for source, facts in shown:
        numbers = (facts.blocks, facts.block_tokens, facts.served, facts.dropped, facts.deferred)
        table.add_row(source.source, *(f"{number:,}" for number in (*numbers, facts.unread)))
    return Group(table, *more(len(rows) - len(shown)))


def _subsets(subsets: Sequence[SourceSubset]) -> RenderableType:
    """Return the table of subsets, with what pins them."""
    table = FittedTable(
        TableColumn("subset of", "name"),
        *("documents", "tokens", "share", "subset", "held_out"),
        TableColumn("shuffle_name", "note"),
    )
    for one in subsets:
        table.add_row(
            one.source,
            f"{one.documents:,}",
            f"{one.tokens:,}",
            f"{one.tokens / one.of_tokens:.4%}" if one.of_tokens else "",
            one.threshold,
            one.held_from or "",
            one.shuffle_name,
        )
    return table
