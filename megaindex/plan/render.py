"""The plan as a table: what was asked, the answer, its neighbours, every source, what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from megaindex.index.draws import Progress
from megaindex.io.progress import on_terminal
from megaindex.plan.model import Plan
from megaindex.plan.printing import ShortNames, answer_panel, print_view, spaced, warning
from megaindex.plan.tables import coverage, epochs_text, sources, totals
from megaindex.recipe.adapter_line import adapter_call

if TYPE_CHECKING:
    from typing import TextIO


def print_plan(plan: Plan, file: TextIO | None = None) -> None:
    """Prints the plan; the same layout on a terminal and in a pipe, colours on a terminal only."""
    print_view(plan_view(plan), file)


@contextmanager
def counting() -> Iterator[Progress | None]:
    """A progress bar on stderr while draws or coverage are counted, on a terminal only."""
    if not on_terminal():
        yield None
        return
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True)
    task = bar.add_task("counting samples", total=None)

    def advance(done: int, goal: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=goal)

    try:
        yield advance
    finally:
        bar.stop()


def plan_view(plan: Plan) -> RenderableType:
    """All parts of the printed plan."""
    names = ShortNames.of(row.path for row in plan.datasets)
    parts: list[RenderableType] = [_answer(plan, names), totals(plan), sources(plan, names)]
    parts += [view for view in (coverage(plan, names), _facts(plan)) if view is not None]
    parts += [warning(names.text(text)) for text in plan.warnings]
    return spaced(parts)


def _answer(plan: Plan, names: ShortNames) -> RenderableType:
    asked = Text.assemble(
        (plan.target, "bold"),
        f" in order {plan.order} of {plan.framework}, {plan.sequence_length} tokens a sample, "
        f"{_batch(plan)} samples an iteration",
    )
    if plan.caution:
        asked = Text("\n").join([Text(plan.caution, "bold yellow"), asked])
    answer = Text.assemble("train_iters ", (str(plan.train_iters), "bold green"))
    return answer_panel(asked, Text(), answer, *_limits(plan, names))


def _batch(plan: Plan) -> str:
    sizes = [str(size) for _, size in plan.batch_schedule]
    if len(sizes) > 4:
        sizes = [*sizes[:2], "…", sizes[-1]]
    return " → ".join(sizes)


def _limits(plan: Plan, names: ShortNames) -> list[Text]:
    """``8063 stays in one epoch, 8064 begins a second``, and the last without repeats if lower."""
    lines = []
    if len(plan.neighbours) == 2:
        last, beyond = plan.neighbours
        stays, begins = " builds no epoch more, ", f" begins another of {names.cut(beyond.begins)}"
        if last.num_epochs_built < beyond.num_epochs_built:
            stays = f" stays in {epochs_text(last.num_epochs_built)}, "
            begins = f" begins {_ordinal(beyond.num_epochs_built)}"
        if not beyond.begins:
            begins = " runs dry"
        built = f": {beyond.samples_built:,} samples built"
        last_one, next_one = (str(n.train_iters) for n in plan.neighbours)
        lines.append(Text.assemble((last_one, "bold"), stays, (next_one, "bold"), begins, built))
    if plan.max_train_iters_without_repeat != plan.max_train_iters_same_epochs:
        lines.append(
            Text(f"at most {plan.max_train_iters_without_repeat} iterations repeat nothing")
        )
    return lines


def _ordinal(epoch: int) -> str:
    return {2: "a second", 3: "a third"}.get(epoch, f"epoch {epoch}")


def _facts(plan: Plan) -> RenderableType | None:
    """Short facts under the tables, each with a name."""
    facts = [*_tail_facts(plan), *_buffer_fact(plan), *_run_facts(plan)]
    if not facts:
        return None
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in facts:
        grid.add_row(name, text)
    return grid


def _tail_facts(plan: Plan) -> list[tuple[str, str]]:
    facts = []
    for tail in plan.tails:
        cost = {
            "drop": f"leaves {tail.samples_dropped:,} samples unseen",
            "pad": f"masks the loss of {tail.samples_masked:,} samples"
            + f", all of {_ranks_text(tail.ranks_masked)}" * (tail.ranks_masked > 0),
            "wrap": f"repeats {tail.samples_repeated:,} samples",
        }[tail.policy]
        chosen = ", as planned" if tail.policy == plan.tail else ""
        facts.append((f"tail {tail.policy}", f"{tail.train_iters} iterations, {cost}{chosen}"))
    return facts


def _ranks_text(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def _buffer_fact(plan: Plan) -> list[tuple[str, str]]:
    effect = plan.buffer_effect
    if effect is None:
        return []
    short = f"; too small for {len(effect.short)} sources" if effect.short else ""
    where, unless = "", ""
    if plan.order == "neox":
        where = "of train_data_paths "
        unless = f" without {adapter_call(plan.order, {'variance_buffer': 'exact'})}"
    text = (
        f"{where}would build {epochs_text(effect.num_epochs_built)} ({effect.samples_built:,} "
        f"samples); at most {effect.max_train_iters_without_repeat} iterations repeat nothing"
        f"{unless}{short}"
    )
    return [(f"buffer {effect.variance_buffer}", text)]


def _run_facts(plan: Plan) -> list[tuple[str, str]]:
    facts = []
    if plan.evaluation is not None:
        evaluation = plan.evaluation
        text = (
            f"{evaluation.rounds:,} rounds draw {evaluation.valid_samples:,} validation samples, "
            f"the test draws {evaluation.test_samples:,}"
        )
        if evaluation.full:
            steps = ", ".join(f"{count:,}" for count in evaluation.iterations)
            text = (
                f"{evaluation.rounds_run:,} rounds of {steps} iterations read all "
                f"{evaluation.valid_samples:,} validation samples, the test is built for "
                f"{evaluation.test_samples:,}"
            )
        facts.append(("evaluation", text))
    if plan.ignored_settings:
        facts.append(("ignored", ", ".join(plan.ignored_settings)))
    if plan.ranks is not None:
        ranks = plan.ranks
        text = f"{ranks.samples_per_rank:,} samples on each of {ranks.data_parallel_size} ranks"
        facts.append(("data parallel", text))
    for number, phase in enumerate(plan.phases, 1):
        text = (
            f"iterations {phase.begin} to {phase.end}, {phase.samples:,} samples from "
            f"{phase.first_sample:,} on"
        )
        facts.append((f"phase {number}", text))
    return facts
