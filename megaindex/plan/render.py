"""Tables and notes of a printed plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaindex.configs.settings import adapter_call
from megaindex.console import (
    FittedTable,
    Prose,
    ShortNames,
    TableColumn,
    answer_panel,
    print_view,
    spaced,
    warning,
)
from megaindex.index.frameworks import framework_rules
from megaindex.plan.model import PackingFacts, Plan, Row, SettingsPlan, epochs_text
from megaindex.validation import percent

_MANY_SOURCES = 24
_SHOWN_TIMES = 4
_ORDINALS = {2: "a second", 3: "a third"}
_ALWAYS_REPEATS = "no number of iterations runs without a repeated sample"
_METHODS = {"closed-form": "exact", "built": "exact, counted", "expected": "expected"}


def print_plan(plan: Plan) -> None:
    """Print the plan, with colours on a terminal."""
    print_view(plan.view())


def run_view(plan: Plan) -> RenderableType:
    """Return all parts of the printed plan of a decided run."""
    names = ShortNames.of(row.path for row in plan.datasets)
    tokens = f", {plan.tokens_consumed:,} tokens" if plan.tokens_consumed is not None else ""
    asked = Text(f"a decided run in order {plan.order}, {plan.sequence_length} tokens a sample")
    answer = Text.assemble("train_iters ", (str(plan.train_iters), "bold green"))
    total = Text(f"{plan.samples_consumed:,} samples{tokens}")
    lines = [Text(f"skip: {line}") for line in (plan.skip.lines() if plan.skip else ())]
    parts: list[RenderableType] = [answer_panel(asked, Text(), answer, total, *lines)]
    parts.append(_sources(plan, names))
    if (coverage := coverage_table(plan, names)) is not None:
        parts.append(coverage)
    return spaced(parts)


def plan_view(plan: SettingsPlan) -> RenderableType:
    """Return all parts of the printed plan."""
    names = ShortNames.of(row.path for row in plan.datasets)
    parts: list[RenderableType] = [_answer(plan, names), _totals(plan), _sources(plan, names)]
    parts += [view for view in (coverage_table(plan, names), _facts(plan)) if view is not None]
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


def _sources(plan: Plan, names: ShortNames) -> RenderableType:
    weighted = any(row.weight is not None for row in plan.datasets)
    columns = ["weight"] * weighted
    columns += ["per epoch", "requested", "drawn", "built", "epochs", "repeated"]
    table = FittedTable(TableColumn("split", "label"), TableColumn("source", "name"), *columns)
    for row in plan.datasets[:_MANY_SOURCES]:
        numbers = (row.samples_per_epoch, row.requested, row.drawn)
        cells = [_number(n) for n in (*numbers, row.built, row.epochs, row.repeated)]
        if row.drawn is None:
            cells[2] = f"{row.drawn_bounds[0]:,}…{row.drawn_bounds[1]:,}"
        weight = [_weight(row.weight)] * weighted
        table.add_row(_split(row), names.name(row.name), *weight, *cells)
    return Group(table, *_more(len(plan.datasets)), *names.note())


def coverage_table(plan: Plan, names: ShortNames) -> RenderableType | None:
    """Return the table of tokens, and of documents where they were counted, by times seen."""
    lines = [
        (row, kind, shares)
        for row in plan.datasets
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
    for row, kind, shares in lines[:_MANY_SOURCES]:
        cells = [_percent(share) for share in shares[:_SHOWN_TIMES]]
        if rest := shares[_SHOWN_TIMES:]:
            cells.append(_percent(sum(rest)))
        cells += [""] * (len(heads) - len(cells))
        method = _METHODS[row.coverage.method]
        table.add_row(_split(row), names.name(row.name), kind, *cells, method)
    return Group(table, *_more(len(lines)))


def _more(count: int) -> list[RenderableType]:
    """Return a line on the rows that are left out."""
    if count <= _MANY_SOURCES:
        return []
    return [Prose(f"… {count - _MANY_SOURCES} more: --json lists all")]


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
    facts = []
    for name, packing in packed[:_MANY_SOURCES]:
        text = (
            f"fill {_percent(packing.fill)}, {packing.padding:,} positions of padding an epoch; "
            f"{packing.pieces_per_sample:.1f} documents a sample, at most {packing.most_pieces} of "
            f"{packing.max_documents}, the shortest {_percent(packing.likeness)} as long as the "
            f"longest; {_percent(packing.rare_tokens)} of the tokens share a sample with nearly "
            "the same documents in every epoch"
        )
        if packing.long_documents:
            text += f"; {packing.long_documents:,} documents are longer than a sample"
        if packing.cut_tokens:
            text += f", {packing.cut_tokens:,} of their tokens are in none"
        facts.append((name, text))
    if (more := len(packed) - _MANY_SOURCES) > 0:
        facts.append(("", f"… {more} more: --json lists all"))
    return facts


def _tail_facts(plan: SettingsPlan) -> list[tuple[str, str]]:
    facts = []
    for tail in plan.tails:
        ranks = "one rank" if tail.ranks_masked == 1 else f"{tail.ranks_masked} ranks"
        cost = {
            "drop": f"leaves {tail.samples_dropped:,} samples unseen",
            "pad": f"masks the loss of {tail.samples_masked:,} samples"
            + f", all of {ranks}" * (tail.ranks_masked > 0),
            "wrap": f"repeats {tail.samples_repeated:,} samples",
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
        rounds, test = f"{evaluation.rounds_run:,} rounds", f"{evaluation.test_samples:,}"
        texts = [f"{rounds} draw {evaluation.valid_samples_read:,} validation samples"]
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
