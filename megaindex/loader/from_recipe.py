"""A recipe as batches: text and instruction data mixed, stage after stage, on any cluster.

opened = open_recipe(read_recipe("run.yaml"))
loader = RecipeLoader(opened, data_parallel_rank=rank, data_parallel_size=world)
for batch in loader:
    train(batch)
    log(loader.ledger.totals(loader.consumed_samples))
checkpoint["data"] = loader.state_dict()
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megaindex.build.recipe import OpenRecipe, OpenSource
from megaindex.errors import FormatError, InvalidArgument
from megaindex.loader.batches import Batch
from megaindex.loader.ledger import Ledger
from megaindex.loader.loader import Loader
from megaindex.loader.options import SampleOptions
from megaindex.loader.receipts import Recorder
from megaindex.loader.sampler import MicroBatchSampler
from megaindex.loader.targets import SourceTargets, Targets
from megaindex.recipe.amend import check_past
from megaindex.recipe.recipe_file import recipe_of, to_mapping
from megaindex.recipe.resolve import resolve_recipe

VERSION = 1


class RecipeLoader:
    """The batches of one rank of a recipe's run: dicts of tensors, see `megaindex.loader.Loader`.

    Rows of instruction data carry loss on their targets alone and never across documents; padding
    carries none. A checkpoint holds the recipe, the fingerprints of its sources, the receipt of
    what was served and the number of samples consumed: kilobytes.

    Args:
        opened: the recipe, its sources open.
        data_parallel_rank: which rank this is.
        data_parallel_size: how many there are. Default: the recipe's.
        micro_batch_size: rows a rank reads at once. Default: the recipe's.
        options: of the samples. Default: Megatron's fields without resets.
        loading: what `Loader` takes besides: reader, read_ahead, num_threads, device and so on.

    Raises:
        InvalidArgument: the recipe's batch does not divide among the ranks.
    """

    def __init__(
        self,
        opened: OpenRecipe,
        *,
        data_parallel_rank: int = 0,
        data_parallel_size: int | None = None,
        micro_batch_size: int | None = None,
        options: SampleOptions | None = None,
        **loading: Any,
    ) -> None:
        recipe = opened.itinerary.recipe
        self._opened = opened
        self._fingerprints = {
            source.corpus.name: fingerprint
            for source, fingerprint in zip(opened.sources, opened.fingerprints, strict=True)
        }
        sampler = MicroBatchSampler(
            num_samples=opened.index.num_samples,
            micro_batch_size=micro_batch_size or recipe.micro_batch_size or 1,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size or recipe.data_parallel_size or 1,
            global_batch_size=recipe.batch,
            tail="pad" if opened.itinerary.samples_masked else "drop",
        )
        self._recorder = Recorder(opened.fingerprints)
        self._loader = Loader(
            opened.index,
            opened.datasets,
            sampler,
            options=options,
            recorder=self._recorder,
            targets=_targets(opened),
            **loading,
        )
        self.ledger = Ledger(opened.itinerary)
        """What the run has served of each source at any number of consumed samples."""

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks together were served, up to the last whole step."""
        return int(self._loader.state_dict()["consumed_samples"])

    @property
    def recorder(self) -> Recorder:
        """The receipt of what this rank was handed."""
        return self._recorder

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands, and in which run: JSON values."""
        return {
            "version": VERSION,
            "recipe": to_mapping(self._opened.itinerary.recipe),
            "sources": {
                source.corpus.name: {
                    "fingerprint": self._fingerprints[source.corpus.name],
                    **vars(source.size),
                }
                for source in self._opened.sources
            },
            "loader": self._loader.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go on from `state_dict`, on any cluster, also with a recipe that was changed meanwhile.

        Args:
            allow: ``past``: go on though the recipe served other samples before; ``content``:
                though a source holds something else. Others are `Loader.load_state_dict`'s.

        Raises:
            InvalidArgument: the recipe would have served other samples than the run was served,
                or a source has changed.
            FormatError: not what `state_dict` gives.
        """
        try:
            stored, sources = state["recipe"], dict(state["sources"])
            loader, consumed = dict(state["loader"]), int(state["loader"]["consumed_samples"])
            known = {name: source["fingerprint"] for name, source in sources.items()}
        except (KeyError, TypeError, ValueError):
            raise FormatError(
                "not the state of a recipe's loader; take it from an intact checkpoint"
            ) from None
        if "content" not in allow:
            self._check_content(known)
        if "past" not in allow:
            self._check_past(stored, sources, consumed)
        loader["receipt"] = self._receipt(loader.get("receipt"), list(known.values()))
        self._loader.load_state_dict(loader, allow=set(allow) - {"past", "content"})

    def _check_content(self, known: Mapping[str, str]) -> None:
        for name, fingerprint in known.items():
            ours = self._fingerprints.get(name)
            if ours != fingerprint:
                raise InvalidArgument(
                    f"source {name}: the run read content {fingerprint}, "
                    + (f"it holds {ours} now" if ours else "and the recipe has no such source")
                    + "; restore it, or allow content"
                )

    def _check_past(self, stored: Mapping[str, Any], sources: dict[str, Any], end: int) -> None:
        """The recipe of the checkpoint, laid out with the sizes its sources had."""
        from megaindex.recipe.streams import SourceSize

        old = recipe_of(stored, "the checkpoint's recipe", Path("/"))
        sizes = [
            SourceSize(**{k: v for k, v in sources[source.name].items() if k != "fingerprint"})
            for source in old.sources
        ]
        check_past(resolve_recipe(old, sizes), self._opened.itinerary, end)

    def _receipt(self, receipt: Any, known: list[str]) -> Any:
        """The receipt under this run's sources, to which others may have been added."""
        if receipt is None or receipt.get("fingerprints") != known:
            return receipt
        return {**receipt, "fingerprints": list(self._fingerprints.values())}


def _targets(opened: OpenRecipe) -> Targets | None:
    told = [_source_targets(source) for source in opened.sources]
    return Targets(told) if any(target is not None for target in told) else None


def _source_targets(source: OpenSource) -> SourceTargets | None:
    if source.corpus.kind == "pretraining":
        return None
    if source.targets is None:
        return SourceTargets(kind="all")
    kind: Any = "labels" if source.corpus.labels else "loss_mask"
    return SourceTargets(kind=kind, companion=source.targets)
