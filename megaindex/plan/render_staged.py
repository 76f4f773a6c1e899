"""The plan of a recipe as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from megaindex.plan.printing import Column, FittedTable, answer_panel, print_view, spaced, warning
from megaindex.plan.staged import RecipePlan

if TYPE_CHECKING:
    from typing import TextIO


def print_recipe_plan(plan: RecipePlan, file: TextIO | None = None) -> None:
    """Prints the plan; the same layout on a terminal and in a pipe, colours on a terminal only."""
    print_view(recipe_plan_view(plan), file)


def recipe_plan_view(plan: RecipePlan) -> RenderableType:
    """All parts of the printed plan."""
    parts: list[RenderableType] = [_answer(plan), _stages(plan), _sources(plan)]
    parts += [warning(text) for text in plan.warnings]
    return spaced(parts)


def _answer(plan: RecipePlan) -> RenderableType:
    sizes = " → ".join(str(size) for _, size in plan.batch_schedule)
    stages = len({draw.stage for draw in plan.draws})
    lines = [
        Text(
            f"{stages} stage{'s' * (stages != 1)} of {len(plan.sources)} "
            f"source{'s' * (len(plan.sources) > 1)}, {plan.sequence_length} tokens a sample, "
            f"{sizes} samples an iteration"
        ),
        Text(),
        Text.assemble("train_iters ", (str(plan.train_iters), "bold green")),
        Text(f"{plan.samples_consumed:,} samples, {plan.tokens_consumed:,} tokens"),
    ]
    if plan.samples_per_rank is not None:
        lines.append(Text(f"every rank reads {plan.samples_per_rank:,} samples"))
    if plan.samples_masked:
        lines.append(Text(f"{_rows(plan.samples_masked)} of the last batch masked"))
    if plan.evaluation_rounds:
        masked = plan.evaluation_masked
        lines.append(
            Text(
                f"{plan.evaluation_rounds} × evaluation on {plan.evaluation_samples:,} of "
                f"{plan.evaluation_available:,} samples, each once, in {plan.evaluation_batches:,} "
                f"batch{'es' * (plan.evaluation_batches != 1)}"
                + (f", {_rows(masked)} masked" if masked else "")
            )
        )
    return answer_panel(*lines)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _stages(plan: RecipePlan) -> RenderableType:
    table = FittedTable(
        Column(name="stage", kind="name"),
        Column(name="steps", kind="label"),
        Column(name="source", kind="name"),
        *(Column(name=name) for name in ("samples", "share", "epochs", "first repeat")),
    )
    before: tuple[str, int] | None = None
    for draw in plan.draws:
        opening = (draw.stage, draw.first_step)
        shown = opening != before
        table.add_row(
            draw.stage if shown else "",
            f"{draw.first_step:,} … {draw.end_step - 1:,}" if shown else "",
            draw.source,
            f"{draw.samples:,}",
            f"{100 * draw.share:.1f} %",
            f"{draw.epochs_begin:.2f} → {draw.epochs_end:.2f}",
            "" if draw.first_repeat is None else f"step {draw.first_repeat:,}",
        )
        before = opening
    return table


def _sources(plan: RecipePlan) -> RenderableType:
    names = ["tokens an epoch", "samples an epoch", "drawn", "epochs", "never drawn"]
    cut = any(source.cut_tokens for source in plan.sources)
    table = FittedTable(
        Column(name="source", kind="name"),
        Column(name="kind", kind="label"),
        *(Column(name=name) for name in names + ["tokens cut"] * cut),
    )
    for source in plan.sources:
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
    return table
