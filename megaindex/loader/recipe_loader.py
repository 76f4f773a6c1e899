"""Loader of a recipe's run, and its checkpoint.

opened = open_recipe(read_recipe("run.yaml"))
loader = RecipeLoader(opened, data_parallel_rank=rank, data_parallel_size=world)
for batch in loader:
    train(batch)
    log(loader.ledger.totals(loader.consumed_samples))
checkpoint["data"] = loader.state_dict()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from megaindex._types import IntArray
from megaindex.builders.recipe import OpenRecipe, OpenSource
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.balance import CostModel
from megaindex.index.orders.keyed import shuffle_names
from megaindex.loader.batch import SampleOptions
from megaindex.loader.checkpoint import Contents, SourceProgress, check_content, check_contents
from megaindex.loader.loader import Loader
from megaindex.loader.receipts import Recorder
from megaindex.loader.run_sampler import sampler_of, with_micro_batches
from megaindex.loader.sampler_state import decided_samples
from megaindex.loader.targets import targets_of, targets_text
from megaindex.loader.torch_dataset import GPTDataset
from megaindex.recipe.amend import check_past
from megaindex.recipe.layout import RecipeLayout, resolve_recipe
from megaindex.recipe.mix_changes import MixChanges, given_weights
from megaindex.recipe.mixture import SourceSize
from megaindex.recipe.recipe import Recipe
from megaindex.recipe.recipe_file import recipe_of, to_mapping
from megaindex.run.from_recipe import evaluation_of_opened, identity_of_opened, run_of_opened
from megaindex.validation import (
    CheckpointReader,
    check_between,
    check_integer,
    check_number,
    differ,
    error_text,
    shown,
)

VERSION = 3
WITH_MIX = 4
"""Version of a state with changes of the mix, which releases without them must refuse."""
_WHAT = "the state of a recipe's loader"
SIZES = ("tokens", "documents", "samples")
UNREAD = "unread_samples"
"""Size of a source of which documents were read before the run joined."""
# errors that a damaged recipe, or wrong sizes of sources, may raise
_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class StoredRecipe:
    """Checkpoint of which every field was checked."""

    recipe: Recipe
    text: str
    """The recipe as YAML, without changes of the mix."""
    changes: MixChanges | None
    """Changes of the mix; None without any."""
    sizes: list[SourceSize]
    sources: dict[str, dict[str, Any]]
    loader: dict[str, Any]
    consumed_samples: int
    decided_samples: int
    """The end of the step begun if it is balanced, else ``consumed_samples``."""

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> StoredRecipe:
        """Read a result of `RecipeLoader.state_dict`, or raise FormatError."""
        stored = CheckpointReader(_WHAT, state)
        stored.check_version(VERSION, WITH_MIX)
        recipe = _recipe_of(stored.text("recipe"), Path("/"))
        changes = None
        if ("mix_changes" in stored.values) != (stored.values["version"] == WITH_MIX):
            raise stored.error(
                f"it must have changes of the mix if and only if its version is {WITH_MIX}",
                stored.values["version"],
            )
        if "mix_changes" in stored.values:
            changes = MixChanges.from_dict(stored.part("mix_changes", "the changes of the mix"))
            recipe = _with_changes(recipe, changes)
        rule = "must be a list of mappings"
        given = stored.checked("sources", rule, lambda value: isinstance(value, list))
        sources = dict(map(_source_of, given))
        names = [source.name for source in recipe.sources]
        if list(sources) != names or len(given) != len(names):
            raise stored.error(f"sources must equal those of its recipe, {shown(names)}", given)
        loader = stored.part("loader", "the state of a loader")
        return cls(
            changes=changes,
            recipe=recipe,
            text=stored.text("recipe"),
            sizes=[
                SourceSize(**{size: facts[size] for size in (*SIZES, UNREAD) if size in facts})
                for facts in sources.values()
            ],
            sources=sources,
            loader=dict(loader.values),
            consumed_samples=loader.integer("consumed_samples"),
            decided_samples=decided_samples(
                loader.part("sampler", "the state of a sampler").values
            ),
        )

    @property
    def recipe_here(self) -> Recipe:
        """The recipe with the paths that it has, relative ones to the current directory."""
        recipe = _recipe_of(self.text, Path())
        return recipe if self.changes is None else _with_changes(recipe, self.changes)

    @property
    def shuffle_names(self) -> list[str]:
        """Name by which each source is shuffled."""
        fingerprints = [facts["fingerprint"] for facts in self.sources.values()]
        return shuffle_names(fingerprints, [source.shuffle_name for source in self.recipe.sources])

    def layout(self, here: Mapping[str, OpenSource]) -> RecipeLayout:
        """Return the layout of the run, or raise FormatError if recipe and sizes do not fit.

        Args:
            here: opened source that goes on with each source, by its name in the state. Its lengths
                decide the blocks of order blocks.
        """
        with _as_damage("its recipe does not fit the sizes of its sources"):
            sizes = []
            each = zip(self.recipe.sources, self.sizes, self.shuffle_names, strict=True)
            for source, size, name in each:
                if self.recipe.order_of(source) == "blocks":
                    size = here[source.name].as_in(self.recipe, source).size
                elif source.name in here:  # of other content, if that was accepted
                    name = here[source.name].shuffle_name
                sizes.append(replace(size, shuffle_name=name))
            return resolve_recipe(self.recipe, sizes)


def _stage_at(layout: RecipeLayout, position: int) -> tuple[str, int]:
    """Return name and first sample of the stage that a sample belongs to, or the last one."""
    reached = [stage for stage in layout.stages if stage.first_sample <= position]
    name = reached[-1].name if reached else ""
    return name, min((stage.first_sample for stage in reached if stage.name == name), default=0)


def _recipe_of(text: str, folder: Path) -> Recipe:
    import yaml

    more = ", or use the release that wrote it"
    with _as_damage("its recipe cannot be read", more, (*_ERRORS, yaml.YAMLError)):
        return recipe_of(yaml.safe_load(text), "the checkpoint's recipe", folder)


def _with_changes(recipe: Recipe, changes: MixChanges) -> Recipe:
    with _as_damage("its changes of the mix do not fit its recipe", errors=(InvalidArgument,)):
        return replace(recipe, mix_changes=changes)


def _source_of(each: Any) -> tuple[str, dict[str, Any]]:
    """Return name and facts of a source in a state."""
    stored = CheckpointReader(f"{_WHAT}: a source of it", each)
    name = stored.text("name")
    facts: dict[str, Any] = {
        "fingerprint": stored.hashed("fingerprint"),
        "targets": stored.text("targets"),
    }
    for size in SIZES:
        facts[size] = stored.integer(size, least=0 if size == "documents" else 1, most=2**62)
    if UNREAD in stored.values:
        facts[UNREAD] = stored.integer(UNREAD, most=facts["samples"])
    content = stored.field("content", "must be a mapping or null")
    if content is not None:
        content = Contents.read(stored.part("content", "the content of a source"))
    return name, {**facts, "content": content}


def check_sizes(name: str, facts: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise FormatError if a source has the stored fingerprint, but another size."""
    for size in ("tokens", "documents"):
        if facts["fingerprint"] == ours["fingerprint"] and facts[size] != ours[size]:
            raise FormatError(
                f"not {_WHAT}: source {name} must have {ours[size]} {size}, the size of its "
                f"content, got {facts[size]}; take it from an intact checkpoint"
            )


@contextlib.contextmanager
def _as_damage(
    fault: str, more: str = "", errors: tuple[type[Exception], ...] = _ERRORS
) -> Iterator[None]:
    """Raise FormatError for these errors, with their text on one line, cut to 400 characters."""
    try:
        yield
    except errors as error:
        reason = error_text(error)
        raise FormatError(
            f"not {_WHAT}: {fault} ({reason}); take it from an intact checkpoint{more}"
        ) from None


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
    """Rule that chooses weights by what was served, for `RecipeLoader.control_mix`."""

    def __call__(self, statistics: tuple[SourceStatistics, ...], /) -> Mapping[str, Any] | None:
        """Return the weight of each source by name, or None for no change."""


class RecipeLoader(Loader):
    """`Loader` of the batches of one rank of a recipe's run.

    Rows of instruction data carry loss at their targets only, and never across documents; padding
    carries no loss. A checkpoint, a few kilobytes, holds the recipe, the fingerprints of its
    sources, the receipt of the samples served and the number of samples consumed.

    Args:
        opened: a result of `megaindex.recipe.open_recipe`.
        data_parallel_rank: rank of this process, from 0.
        data_parallel_size: number of ranks. Default: that of the recipe, or 1. Iteration ends with
            an error at a stage that names another number, unless its batches can be divided by
            this one: continue from the state with as many ranks as the stage names.
        micro_batch_size: rows of one micro batch of a rank, in every stage. Default: those of the
            stages, or 1.
        options: options of the samples. Default: Megatron's fields without resets.
        content: coverage of the tokens by a checkpoint, as for `Loader`; cached in the directory
            given to ``open_recipe``.
        balance: cost model by which each step's samples are assigned to the ranks, as for
            `MicroBatchSampler`; not in evaluations. The totals of ``ledger`` are then exact at the
            end of each step.
        **loading: other arguments of `Loader`: reader, read_ahead, num_threads, bytes_ahead,
            pin_memory, device, restore_fields.

    Raises:
        InvalidArgument: a global batch is not a multiple of micro batch size × ranks.
        StorageError: a source cannot be read.
    """

    def __init__(
        self,
        opened: OpenRecipe,
        *,
        data_parallel_rank: int = 0,
        data_parallel_size: int | None = None,
        micro_batch_size: int | None = None,
        options: SampleOptions | None = None,
        content: Literal["sampled", "whole"] | None = "sampled",
        balance: CostModel | None = None,
        **loading: Any,
    ) -> None:
        check_content(content)
        layout = opened.layout
        self._opened = self._given = opened
        self._source_contents = _contents_of(opened, content)
        self._facts = {
            source.corpus.name: {
                "fingerprint": fingerprint,
                "targets": targets_text(source),
                **{name: getattr(source.size, name) for name in SIZES},
                **({} if source.past is None else {UNREAD: source.size.unread_samples}),
            }
            for source, fingerprint in zip(opened.sources, opened.fingerprints, strict=True)
        }
        self._options, self._loading, self._balance = options, loading, balance
        self._losses: dict[str, tuple[int, float, float]] = {}
        self._has_dataset = False
        if layout.recipe.files:
            _ = self._given_identity  # of the files as they are now
        self._sampler_of = partial(
            sampler_of,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            micro_batch_size=micro_batch_size,
            balance=balance,
        )
        run = run_of_opened(opened)
        super().__init__(
            run.index,
            opened.datasets,
            self._sampler_of(run),
            options=options,
            recorder=Recorder(opened.fingerprints),
            targets=targets_of(opened),
            content=None,
            evaluation=lambda: with_micro_batches(evaluation_of_opened(opened), micro_batch_size),
            **loading,
        )

    def _progress(self) -> SourceProgress:
        return SourceProgress.of_recipe(self._opened)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run, with the changes of its mix."""
        return self._opened.layout.recipe

    @property
    def layout(self) -> RecipeLayout:
        """The layout of the run, with the changes of its mix."""
        return self._opened.layout

    @cached_property
    def _given_identity(self) -> str | None:
        return identity_of_opened(self._given)

    @property
    def identity(self) -> str | None:
        """Identity of the run, as its lock has; None with changes of the mix set by `set_mix`."""
        same = self.recipe.mix_changes == self._given.layout.recipe.mix_changes
        return self._given_identity if same else None

    @property
    def next_step(self) -> int:
        """The first step, from 0, of which no sample was returned; the earliest for `set_mix`."""
        return self._opened.layout.batch.iterations_reaching(self.decided_samples)

    def set_mix(self, weights: Mapping[str, Any], at: int | None = None) -> int:
        """Draw with other weights from a step on, in the same iteration.

        The sources go on where they are, so none repeats before its epoch ends; sources without a
        weight, those of other stages too, have none until they are given one. The weights hold to
        the end of the stage, or to the next change. Batches are drawn evenly, also under batching
        random; under per_stream they stay of one source each. What rounding leaves of a weight is
        carried over to the next weights.

        Call it on every rank with the same weights between the same batches. Prefetched batches of
        the step and after it are read again; those before it are not.

        Args:
            weights: weight of each source by name, from 0; only their ratios count.
            at: step, from 0, that is the first with these weights; a later call for the same step
                replaces them. Default: `next_step`, or, where one is begun, the step after it.

        Returns:
            The step.

        Raises:
            InvalidArgument: a source is unknown, a weight is not a number from 0 or beyond
                ``mix_bounds``, the weights sum to 0; the step was begun, or is beyond the end of
                the run; the stage draws by repeat and choose; a source would be exhausted under
                exhaustion error; `dataset` was called. The loader stays as it was.
        """
        recipe, layout = self.recipe, self._opened.layout
        names = [source.name for source in recipe.sources]
        bounds = {name: (low, high) for name, low, high in recipe.mix_bounds}
        row = given_weights(weights, names, bounds)
        first, end = self.next_step, layout.num_steps
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
        self._serve(self._opened.changed(changed), position)
        self._losses = {}
        return step

    def _serve(self, opened: OpenRecipe, first: int) -> None:
        """Serve the samples of a changed run from position ``first`` on."""
        if self._has_dataset:
            raise InvalidArgument(
                "the mix cannot change after dataset(), whose samples are those of the mix before; "
                "iterate over the loader, or set the mix or load the state before dataset()"
            )
        same = opened.index.num_samples == self._opened.index.num_samples
        if same and self._balance is None:
            self._exchange(opened.index, first)
        else:
            run = run_of_opened(opened)
            self._exchange(run.index, first, self._sampler_of(run))
        self._opened = opened

    def report_loss(self, source: str | int, loss: float, tokens: int = 1) -> None:
        """Record a loss of a source, for the next `mix_statistics`.

        Args:
            source: its name, or its number as in the field ``dataset_id`` of a batch.
            loss: mean loss of the tokens.
            tokens: number of tokens, the weight of the loss.

        Raises:
            InvalidArgument: the source is unknown, or the loss not a finite number.
        """
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
        reports, total, weight = self._losses.get(name, (0, 0.0, 0.0))
        value = check_number("report_loss: loss", loss)
        self._losses[name] = reports + 1, total + value * tokens, weight + tokens

    def mix_statistics(self) -> tuple[SourceStatistics, ...]:
        """Return what a controller of the mix needs of every source, in the order of the recipe.

        Samples and tokens are those of all ranks; losses those reported on this rank since the mix
        was last changed.
        """
        weights = self._weights_at(self._opened.layout.batch.samples_after(self.next_step))
        rows = self.ledger.totals(self.decided_samples)
        return tuple(
            SourceStatistics(
                source=row.source,
                weight=weight,
                steps=self.next_step,
                samples=row.samples,
                tokens=row.tokens,
                epochs=row.epochs,
                reports=reports,
                loss=total / tokens if reports else None,
            )
            for row, weight in zip(rows, weights, strict=True)
            for reports, total, tokens in [self._losses.get(row.source, (0, 0.0, 0.0))]
        )

    def _weights_at(self, position: int) -> list[float]:
        """Return the share of every source in the weights at a position, 0 behind the run."""
        layout = self._opened.layout
        found = [0.0] * len(layout.sizes)
        for stage in layout.stages:
            if stage.first_sample <= position < stage.first_sample + stage.num_samples:
                shares = stage.weights_at(position - stage.first_sample)
                for source, share in zip(stage.mixed.sources, shares, strict=False):
                    found[source] = share
        return found

    def control_mix(
        self,
        controller: MixController,
        *,
        broadcast: Callable[[Any], Any] | None = None,
        at: int | None = None,
    ) -> int | None:
        """Set the mix that a controller returns on rank 0.

        Args:
            controller: called on rank 0 with `mix_statistics`; it returns the weights of
                `set_mix`, or None for no change.
            broadcast: called on every rank, with the weights on rank 0 and None on others; returns
                those of rank 0. It may be left out with one rank.
            at: as for `set_mix`.

        Returns:
            The first step with the weights; None without a change.

        Raises:
            InvalidArgument: as `set_mix`; or several ranks have no ``broadcast``.
        """
        ranks = self.sampler.ranks
        if broadcast is None and ranks.data_parallel_size > 1:
            raise InvalidArgument(
                f"control_mix: broadcast must be given with {ranks.data_parallel_size} ranks, "
                "which need the weights of rank 0; such as one of "
                "torch.distributed.broadcast_object_list"
            )
        weights = None
        if ranks.data_parallel_rank == 0:
            weights = controller(self.mix_statistics())
        if broadcast is not None:
            weights = broadcast(weights)
        return None if weights is None else self.set_mix(weights, at=at)

    @property
    def sequence_lengths(self) -> set[int]:
        """Tokens of a sample, of each stage."""
        recipe = self._opened.layout.recipe
        return {recipe.length_of(stage) for stage in recipe.stages}

    def dataset(self, *, receipts: bool = False) -> GPTDataset:
        """Return the same samples for a DataLoader, as `Loader.dataset`; the mix cannot change
        from then on."""
        self._has_dataset = True
        return super().dataset(receipts=receipts)

    def __repr__(self) -> str:
        return f"RecipeLoader({self._opened!r}, {self.consumed_samples:,} samples consumed)"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank and its run, as JSON values."""
        import yaml

        recipe = self._opened.layout.recipe
        changes = recipe.mix_changes
        mix = {} if changes is None else {"mix_changes": changes.to_dict()}
        plain = to_mapping(replace(recipe, mix_changes=None))
        return {
            "version": WITH_MIX if mix else VERSION,
            # text, since the order of stages and sources matters, and JSON may reorder keys
            "recipe": yaml.safe_dump(plain, sort_keys=False),
            **mix,
            "sources": [
                {
                    "name": name,
                    **facts,
                    "content": self._source_contents and self._source_contents[name].to_dict(),
                }
                for name, facts in self._facts.items()
            ],
            "loader": super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Continue from `state_dict`, with any number of ranks, also with a recipe changed since.

        Args:
            state: a result of `state_dict`, or of `megaindex.loader.join_states`; see
                `Loader.load_state_dict` for the ranks that may load it.
            allow: names of differences to accept: ``past`` (the recipe would have served other
                samples before, or shuffles a source by another name), ``content`` (a source holds
                other tokens), ``targets`` (other tokens of it carry loss), and those of
                `Loader.load_state_dict`.

        Raises:
            InvalidArgument: the recipe would have served other samples before, or a source has
                changed.
            FormatError: the state is damaged, or not one of `state_dict`.
        """
        stored = StoredRecipe.read(state)
        here = self._sources_here(stored)
        for fact, what in (("fingerprint", "content"), ("targets", "targets")):
            if what not in allow:
                self._check_sources(stored, here, fact, what)
        if self._source_contents is not None:
            theirs = {
                here[name].corpus.name: facts["content"]
                for name, facts in stored.sources.items()
                if name in here
            }
            check_contents(theirs, self._source_contents, allow)
        if "past" not in allow:
            self._check_shuffle_names(stored, here)
        previous, opened = self._opened, self._with_changes_of(stored, here)
        if "past" not in allow:
            check_past(stored.layout(here), opened.layout, stored.decided_samples)
        receipt = stored.loader.get("receipt")
        loader = {**stored.loader, "receipt": self._receipt(receipt, stored.sources)}
        others = set(allow) - {"past", "content", "targets"}
        if "past" in allow or "content" in allow:
            others.add("order")
        if opened is not previous:
            self._serve(opened, 0)
        try:
            self._load(loader, allow=others, numbers=self._numbers_in(stored, here))
        except BaseException:
            if opened is not previous:
                self._serve(previous, 0)
            raise

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
        """Return the run with the changes of the mix in a state, if its recipe was given without;
        those made by this loader since are not of the state."""
        given = self._given.layout.recipe
        changes = stored.changes
        if given.mix_changes is not None:
            return self._given
        if changes is not None:
            self._check_later_changes(stored.layout(here), changes, stored.decided_samples)
            names = [here[n].corpus.name if n in here else n for n in changes.sources]
            changes = replace(changes, sources=tuple(names))
        if changes == self.recipe.mix_changes:
            return self._opened
        return self._given.changed(replace(given, mix_changes=changes))

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
        names = [source.name for source in self._opened.layout.recipe.sources]
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

    def _receipt(self, receipt: Any, sources: Mapping[str, Mapping[str, Any]]) -> Any:
        """Return the receipt with the fingerprints of this run, which may have more sources."""
        known = [facts["fingerprint"] for facts in sources.values()]
        if not isinstance(receipt, Mapping) or differ(receipt.get("fingerprints"), known):
            return receipt
        return {**receipt, "fingerprints": self._opened.fingerprints}


def _contents_of(
    opened: OpenRecipe, content: Literal["sampled", "whole"] | None
) -> dict[str, Contents] | None:
    if content is None:
        return None
    found = {}
    hashes = opened.contents(whole=content == "whole")
    for source, (tokens, targets) in zip(opened.sources, hashes, strict=True):
        kind = "text" if source.targets is None else source.targets.kind
        found[source.corpus.name] = Contents(tokens=tokens, kind=kind, targets=targets)
    return found
