"""Plan of a share of a recipe, with the exposures that it reaches beside those of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from megaindex.builders.recipe import plan_recipe
from megaindex.console import FittedTable, TableColumn, spaced, warning
from megaindex.index.draws import Progress
from megaindex.plan.model import RecipePlan
from megaindex.plan.recipe_plan import plan_of_layout
from megaindex.recipe.scale import ScaledRecipe
from megaindex.settings.recipe import Recipe

_NEAR = 0.005  # of its exposure: a source that is further off is named


@dataclass(frozen=True, kw_only=True)
class ScaledPlan:
    """Plan of a scaled recipe.

    Attributes:
        scaled: the recipe, and what was scaled.
        plan: its plan.
        epochs: by source, its epochs in the whole run and in the scaled one.
    """

    scaled: ScaledRecipe
    plan: RecipePlan
    epochs: dict[str, tuple[float, float]]

    @classmethod
    def of(
        cls, whole: Recipe, scaled: ScaledRecipe, progress: Progress | None = None, **asked: Any
    ) -> ScaledPlan:
        """Return the plan of a scaled recipe; ``asked`` as for `plan_of_layout`.

        Raises:
            InvalidArgument, FormatError, StorageError: a recipe cannot be planned.
        """
        before = plan_of_layout(plan_recipe(whole), coverage="none")
        plan = plan_of_layout(plan_recipe(scaled.recipe), progress=progress, **asked)
        pairs = zip(before.sources, plan.sources, strict=True)
        return cls(
            scaled=scaled,
            plan=plan,
            epochs={one.source: (one.epochs, other.epochs) for one, other in pairs},
        )

    @property
    def far(self) -> list[str]:
        """Sources whose exposure is more than 0.5 % from that of the whole run."""
        return [
            name for name, (whole, ours) in self.epochs.items() if abs(ours - whole) > _NEAR * whole
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the plan's object with ``scale``: share, changes, dropped, left and exposures."""
        scaled = self.scaled
        scale = {
            "share": str(scaled.share),
            "changes": [list(change) for change in scaled.changes],
            "dropped": list(scaled.dropped),
            "left": scaled.left,
            "epochs": {name: list(pair) for name, pair in self.epochs.items()},
        }
        return {**self.plan.to_json(), "scale": scale}

    def view(self) -> RenderableType:
        """Return the tables and notes of the printed plan."""
        changed = FittedTable(
            TableColumn(f"scaled to {self.scaled.share}", "name"),
            TableColumn("whole", "note"),
            TableColumn("scaled", "note"),
        )
        for change in self.scaled.changes:
            changed.add_row(*change)
        exposures = FittedTable(TableColumn("epochs of", "name"), "whole", "scaled", "difference")
        for name, (whole, ours) in self.epochs.items():
            difference = f"{ours / whole - 1:+.3%}" if whole else ""
            exposures.add_row(name, f"{whole:.4f}", f"{ours:.4f}", difference)
        notes = [Text(f"left as they are: {self.scaled.left}")]
        notes += [Text(f"left out, of the whole run: {each}") for each in self.scaled.dropped]
        parts: list[RenderableType] = [changed, exposures, Group(*notes)]
        parts += [
            warning(
                f"source {name}: its exposure is more than 0.5 % from that of the whole run, since "
                "a document or a sample is much of its subset; scale less, or leave it whole"
            )
            for name in self.far
        ]
        return Group(self.plan.view(), Text(), spaced(parts))
