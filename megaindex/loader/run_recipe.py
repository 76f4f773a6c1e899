"""Recipe of a run that is loaded: the changes of its mix, and checks of states against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from megaindex._types import IntArray
from megaindex.builders.recipe import OpenRecipe, OpenSource
from megaindex.errors import InvalidArgument
from megaindex.loader.checkpoint import ProgressRow, other_mix
from megaindex.loader.recipe_state import StoredRecipe, check_sizes, recipe_part, source_facts
from megaindex.recipe.amend import check_past
from megaindex.recipe.layout import RecipeLayout
from megaindex.run.from_recipe import run_of_opened
from megaindex.run.run import Run
from megaindex.settings.mix_changes import MixChanges, given_weights
from megaindex.settings.recipe import Recipe
from megaindex.validation import (
    CheckpointReader,
    check_between,
    check_integer,
    check_number,
    differ,
    shown,
)


@dataclass(frozen=True, kw_only=True)
class SourceStatistics:
    """Statistics of one source for a controller of the mix.

    Attributes:
        source: its name.
        weight: its share of the draws of the next step, according to the weights.
        steps: steps of the run made, or begun.
        samples: samples of the source in them.
        tokens: samples × sequence_length.
        epochs: samples over samples of an epoch.
        reports: number of losses reported since the mix was last changed.
        loss: their mean, weighted by tokens; None without any.
    """

    source: str
    weight: float
    steps: int
    samples: int
    tokens: int
    epochs: float
    reports: int
    loss: float | None


class MixController(Protocol):
    """Rule that chooses weights by what was served, for `Loader.control_mix`."""

    def __call__(self, statistics: tuple[SourceStatistics, ...], /) -> Mapping[str, Any] | None:
        """Return the weight of each source by name, or None for no change."""


class RunRecipe:
    """Recipe of a run that is loaded, and the changes of its mix since.

    Args:
        open_it: function that returns the recipe, called when its mix changes at the latest.
        is_given: True if states always hold the recipe, False if only those of a changed mix.
    """

    def __init__(self, open_it: Callable[[], OpenRecipe], *, is_given: bool) -> None:
        self._open, self.is_given = open_it, is_given
        self._changed: OpenRecipe | None = None  # with other changes of the mix than as given
        self.losses: dict[str, tuple[int, float, float]] = {}
        """Number, sum and weight of the losses reported, by source."""

    @cached_property
    def _given(self) -> OpenRecipe:
        return self._open()

    @cached_property
    def _facts(self) -> dict[str, dict[str, Any]]:
        return source_facts(self._given)

    @property
    def opened(self) -> OpenRecipe:
        """The recipe with the changes of its mix."""
        return self._changed or self._given

    @property
    def recipe(self) -> Recipe:
        """The recipe with the changes of its mix."""
        return self.opened.layout.recipe

    @property
    def stages(self) -> list[tuple[str, int]]:
        """Name and first sample of the stages of a recipe that was given."""
        if not self.is_given:
            return []
        return [(stage.name, stage.first_sample) for stage in self.opened.layout.stages]

    @property
    def is_changed(self) -> bool:
        """True if the mix has other changes than as given."""
        given = self._changed and self._given.layout.recipe.mix_changes
        return self._changed is not None and self.recipe.mix_changes != given

    def run(self, opened: OpenRecipe) -> Run:
        """Return the run of the recipe with other changes of its mix."""
        return run_of_opened(opened)

    def serve(self, opened: OpenRecipe) -> None:
        """Go on with other changes of the mix."""
        self._changed = None if opened is self._given else opened

    def state(self) -> dict[str, Any] | None:
        """Return its part of a state; None if it was not given, and its mix is as it was."""
        if not (self.is_given or self.is_changed):
            return None
        return recipe_part(self.opened, self._facts)

    def next_step(self, decided: int) -> int:
        """Return the first step, from 0, that begins at a position or after it."""
        return self.opened.layout.batch.iterations_reaching(decided)

    def with_mix(
        self, weights: Mapping[str, Any], at: int | None, decided: int
    ) -> tuple[int, int, OpenRecipe]:
        """Return step and position from which the recipe draws with other weights, and the recipe
        with this change; see `Loader.set_mix`.

        Args:
            weights: weight of each source by name.
            at: first step with the weights; None: the first that may be.
            decided: position before which nothing can change.
        """
        recipe, layout = self.recipe, self.opened.layout
        names = [source.name for source in recipe.sources]
        bounds = {name: (low, high) for name, low, high in recipe.mix_bounds}
        row = given_weights(weights, names, bounds)
        first, end = self.next_step(decided), layout.num_steps
        step = first if at is None else check_integer("at", at)
        if not first <= step < end:
            raise InvalidArgument(
                f"at: the mix can change from step {first}, the next one, to step {end - 1}, the "
                f"last of the run, got {step}"
                + ("" if step < end else "; make the run longer with megaindex.recipe.amend")
            )
        position = layout.batch.samples_after(step)
        changes = (recipe.mix_changes or MixChanges.empty(names)).of_sources(names)
        changed = replace(recipe, mix_changes=changes.with_change(position, row))
        return step, position, self.opened.changed(changed)

    def report_loss(self, source: str | int, loss: float, tokens: int) -> None:
        """Record a loss of a source; see `Loader.report_loss`."""
        names = [each.name for each in self.recipe.sources]
        if isinstance(source, str):
            if source not in names:
                raise InvalidArgument(
                    f"report_loss: unknown source {shown(source)}; the sources are "
                    f"{', '.join(names)}"
                )
            name = source
        else:
            name = names[check_between("report_loss: source", source, 0, len(names) - 1)]
        tokens = check_between("report_loss: tokens", tokens, 1)
        reports, total, weight = self.losses.get(name, (0, 0.0, 0.0))
        value = check_number("report_loss: loss", loss)
        self.losses[name] = reports + 1, total + value * tokens, weight + tokens

    def statistics(
        self, decided: int, rows: Collection[ProgressRow]
    ) -> tuple[SourceStatistics, ...]:
        """Return the statistics of every source, in the order of the recipe.

        Args:
            decided: position before which nothing can change.
            rows: progress of every source up to it.
        """
        step = self.next_step(decided)
        weights = self._weights_at(self.opened.layout.batch.samples_after(step))
        names = [source.name for source in self.recipe.sources]
        return tuple(
            SourceStatistics(
                source=name,
                weight=weight,
                steps=step,
                samples=row.samples,
                tokens=row.tokens,
                epochs=row.epochs,
                reports=reports,
                loss=total / tokens if reports else None,
            )
            for name, row, weight in zip(names, rows, weights, strict=True)
            for reports, total, tokens in [self.losses.get(name, (0, 0.0, 0.0))]
        )

    def _weights_at(self, position: int) -> list[float]:
        """Return the share of every source in the weights at a position, 0 behind the run."""
        layout = self.opened.layout
        found = [0.0] * len(layout.sizes)
        for stage in layout.stages:
            if stage.first_sample <= position < stage.first_sample + stage.num_samples:
                shares = stage.weights_at(position - stage.first_sample)
                for source, share in zip(stage.mixed.sources, shares, strict=False):
                    found[source] = share
        return found

    def continued(
        self, stored: CheckpointReader, identity: str | None, allow: Collection[str]
    ) -> tuple[OpenRecipe | None, IntArray | None, Any]:
        """Return how the recipe goes on from the state of a loader.

        Args:
            stored: the state.
            identity: identity of the run as given; None: not known.
            allow: names of differences to accept, as for `Loader.load_state_dict`.

        Returns:
            The recipe with the changes of the mix in the state, None if it is served now; the
            number of each source in the state, -1 for one that joined since, or None for the same;
            and the receipt of the state, with the fingerprints of the sources here.

        Raises:
            InvalidArgument: the recipe would have served other samples before, or a source has
                changed.
            FormatError: the state is damaged.
        """
        receipt = stored.field("receipt", "must be a mapping or null")
        if not self._reads(stored, identity):
            return None if self._changed is None else self._given, None, receipt
        state = StoredRecipe.read(stored.values)
        here = self._sources_here(state)
        for fact, what in (("fingerprint", "content"), ("targets", "targets")):
            if what not in allow:
                self._check_sources(state, here, fact, what)
        if "past" not in allow:
            self._check_shuffle_names(state, here)
        opened = self._with_changes_of(state, here)
        if "past" not in allow:
            check_past(state.layout(here), opened.layout, state.decided_samples)
        opened_since = None if opened is self.opened else opened
        return opened_since, self._numbers_in(state, here), self._receipt(receipt, state)

    def _reads(self, stored: CheckpointReader, identity: str | None) -> bool:
        """Return True if the recipe in a state is compared, not its order alone."""
        has_other_mix = other_mix(stored, identity)
        return has_other_mix or (self.is_given and stored.values["recipe"] is not None)

    def _sources_here(self, stored: StoredRecipe) -> dict[str, OpenSource]:
        """Return the source that goes on with each source of a state, by its name there: the one
        of that name, else the one that is shuffled by the same name."""
        names = {source.corpus.name: source for source in self._given.sources}
        shuffles = {source.shuffle_name: source for source in self._given.sources}
        found = {}
        for name, shuffle in zip(stored.sources, stored.shuffle_names, strict=True):
            source = names.get(name) or shuffles.get(shuffle)
            if source is not None:
                found[name] = source
        return found

    def _with_changes_of(self, stored: StoredRecipe, here: Mapping[str, OpenSource]) -> OpenRecipe:
        """Return the run with the changes of the mix in a state, which those of the recipe given
        begin or continue; those made by this loader since are not of the state."""
        given = self._given.layout.recipe
        ours, theirs = given.mix_changes, stored.changes
        changes = theirs
        if theirs is not None:
            names = [here[n].corpus.name if n in here else n for n in theirs.sources]
            changes = replace(theirs, sources=tuple(names))
        if ours is not None and (changes is None or ours.begins_with(changes)):
            return self._given
        if ours is not None and changes is not None and not changes.begins_with(ours):
            if changes.before(stored.decided_samples).size == changes.size:
                return self._given  # whose past is compared
            raise InvalidArgument(
                "mix_changes: the state sets changes of the mix for steps to come, and the recipe "
                "has others; write those of the state to the recipe's file, or leave the file out"
            )
        if theirs is not None and ours is not None:
            later = theirs.positions[ours.size :].tolist()
            if not self._are_of_one_stage(stored.layout(here), later):
                return self._given  # an amended recipe, whose stages end the changes of others
        elif theirs is not None:
            self._check_later_changes(stored.layout(here), theirs, stored.decided_samples)
        if changes == self.recipe.mix_changes:
            return self.opened
        return self._given.changed(replace(given, mix_changes=changes))

    def _are_of_one_stage(self, theirs: RecipeLayout, positions: Sequence[int]) -> bool:
        """Return True if the recipe given has the same stages at all of the positions."""
        ours = self._given.layout
        return all(_stage_at(theirs, each) == _stage_at(ours, each) for each in positions)

    def _check_later_changes(self, theirs: RecipeLayout, changes: MixChanges, decided: int) -> None:
        """Refuse changes set for a later step of a stage that is another in the recipe given."""
        ours = self._given.layout
        for position in changes.positions[changes.before(decided).size :].tolist():
            name, begin = _stage_at(theirs, position)
            if (name, begin) != _stage_at(ours, position):
                step = theirs.batch.iterations_within(position)
                raise InvalidArgument(
                    f"mix_changes: the state changes the mix at step {step}, in stage {name} from "
                    f"sample {begin}, and the recipe has another stage there; continue the "
                    "recipe of the state, or amend that with megaindex.recipe.amend, which ends "
                    "such changes"
                )

    def _numbers_in(self, stored: StoredRecipe, here: Mapping[str, OpenSource]) -> IntArray:
        """Return each source's number in the recipe of the state; -1 for one that joined since."""
        theirs = {
            here[name].corpus.name: n for n, name in enumerate(stored.sources) if name in here
        }
        names = [source.name for source in self.recipe.sources]
        return np.array([theirs.get(name, -1) for name in names])

    def _check_shuffle_names(self, stored: StoredRecipe, here: Mapping[str, OpenSource]) -> None:
        """Refuse another shuffle name of a source of the same content, as it has where a source of
        the same pair that was listed before it is gone."""
        for (name, facts), shuffle in zip(
            stored.sources.items(), stored.shuffle_names, strict=True
        ):
            source = here.get(name)
            if source is None or source.shuffle_name == shuffle:
                continue
            if self._facts[source.corpus.name]["fingerprint"] == facts["fingerprint"]:
                raise InvalidArgument(
                    f"source {name}: its shuffle name must be {shuffle}, as in the checkpoint, got "
                    f"{source.shuffle_name}; give it shuffle_name: {shuffle}, or list the sources "
                    "of the same fingerprint as they were, or, if the change is intended, load "
                    'with allow=("past",)'
                )

    def _check_sources(
        self, stored: StoredRecipe, here: Mapping[str, OpenSource], fact: str, what: str
    ) -> None:
        for name, facts in stored.sources.items():
            known = self._facts[here[name].corpus.name] if name in here else {}
            ours = known.get(fact)
            if ours == facts[fact]:
                check_sizes(name, facts, known)
                continue
            raise InvalidArgument(
                f"source {name}: {what} must be {facts[fact][:200]}, as in the checkpoint, "
                + (f"got {ours}" if ours else "but the recipe has no such source")
                + f'; restore it, or, if the change is intended, load with allow=("{what}",)'
            )

    def _receipt(self, receipt: Any, stored: StoredRecipe) -> Any:
        """Return the receipt with the fingerprints of this run, which may have more sources."""
        known = [facts["fingerprint"] for facts in stored.sources.values()]
        if not isinstance(receipt, Mapping) or differ(receipt.get("fingerprints"), known):
            return receipt
        return {**receipt, "fingerprints": self._given.fingerprints}


def _stage_at(layout: RecipeLayout, position: int) -> tuple[str, int]:
    """Return name and first sample of the stage that a sample belongs to, or the last one."""
    reached = [stage for stage in layout.stages if stage.first_sample <= position]
    name = reached[-1].name if reached else ""
    return name, min((stage.first_sample for stage in reached if stage.name == name), default=0)
